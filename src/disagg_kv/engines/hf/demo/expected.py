"""What a rank's pages must hold of each conversation, from the process that computed each row.

Rows are passed on as files beside every transfer, so that nothing of it is the library's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, DynamicLayer

from .config import Role
from .member import Member

Rows = npt.NDArray[np.float32]


class ExpectedRows:
    """The rows of every conversation as this rank must have them ``[layers, 2, heads, rows, dim]``.

    For models with K and V of all tokens in every layer.

    Args:
        member: this process.
        heads: the KV heads that it holds.
    """

    def __init__(self, member: Member, heads: tuple[int, ...]) -> None:
        config = member.config
        nothing = np.zeros((config.layers, 2, len(heads), 0, config.head_dim), np.float32)
        self.of = [nothing] * config.requests
        self._member = member
        self._heads = slice(heads[0], heads[-1] + 1)

    def computed(self, request: int, start: int, cache: Cache) -> None:
        """The rows from ``start`` on are those that this rank's own model has just made."""
        layers = [torch.cat(key_values(of))[:, :, start:] for of in cache.layers]
        self._follow(request, start, torch.stack(layers).cpu().numpy())

    def publish(self, request: int) -> None:
        """Pass the rows on, before they are sent. A reader of what was passed on before may be at work."""
        file = _file(self._member.work, self._member.role, request, self._member.rank)
        draft = file.with_suffix(".part")
        with draft.open("wb") as out:
            np.save(out, self.of[request])
        draft.replace(file)

    def publish_all(self) -> None:
        """At the end, pass all rows on to the comparison."""
        for request in range(len(self.of)):
            self.publish(request)

    def received(self, request: int, start: int, stop: int, role: Role, ranks: range) -> None:
        """The rows ``[start, stop)`` have come from these ranks of a role."""
        parts = [np.load(_file(self._member.work, role, request, rank)) for rank in ranks]
        self._follow(request, start, np.concatenate(parts, axis=2)[:, :, self._heads, start:stop])

    def _follow(self, request: int, start: int, rows: Rows) -> None:
        """Rows take their place among those that are there; later ones stay."""
        there = self.of[request]
        self.of[request] = np.concatenate((there[..., :start, :], rows, there[..., start + rows.shape[3] :, :]), axis=3)


def key_values(layer: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer of a model's own cache ``[1, heads, rows, dim]``."""
    assert isinstance(layer, DynamicLayer)
    assert layer.keys is not None
    assert layer.values is not None
    return layer.keys, layer.values


def _file(work: Path, role: Role, request: int, rank: int) -> Path:
    return work / f"rows-{role}-{request}-{rank}.npy"
