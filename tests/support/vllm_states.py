"""The states of a small hybrid model, as vLLM keeps them: of Mamba 2 layers, or of gated delta nets.

The numbers come from plain indexing over the whole model, of which a rank has a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from attrs import define, frozen


@define
class MambaSpec:
    """A spec known by its class name."""

    shapes: tuple[tuple[int, ...], ...]
    mamba_type: Any
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float16, torch.float16)
    block_size: int = 1 << 10
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0
    tp_replicated: bool = False


@frozen
class States:
    """Of each layer of a model.

    Args:
        kind: ``MAMBA2`` or ``GDN_ATTN``.
        heads: of the recurrent state.
        groups: of B and C, or heads of keys.
        outer, inner: sizes of a head of the recurrent state.
        rows: of the conv state.
        channels_first: the layout of conv states.
    """

    kind: str = "MAMBA2"
    heads: int = 4
    groups: int = 2
    outer: int = 2
    inner: int = 3
    rows: int = 2
    channels_first: bool = False

    @property
    def _blocks(self) -> list[tuple[int, int]]:
        """Units and channels of a unit of each block of channels."""
        wide, narrow = (self.heads, self.outer), (self.groups, self.inner)
        return [wide, narrow, narrow] if self.kind == "MAMBA2" else [narrow, narrow, wide]

    def spec(self, tp: int) -> MambaSpec:
        """As vLLM describes a rank's."""
        conv, recurrent = self.truth([], tp, 0)
        return MambaSpec((tuple(conv.shape), tuple(recurrent.shape)), SimpleNamespace(name=self.kind))

    def views(self, pages: torch.Tensor, tp: int) -> list[torch.Tensor]:
        """Both states of a layer in bytes ``[blocks, 1, 1, bytes]``, one after the other."""
        found, first = [], 0
        for one in self.truth([], tp, 0):
            found.append(pages[:, 0, 0, first : first + one.nbytes].view(one.dtype).view(-1, *one.shape))
            first += one.nbytes
        return found

    def truth(self, tokens: Sequence[int], tp: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The states of a rank after some tokens; every number depends on all of them."""
        seen = sum(token * (place + 3) for place, token in enumerate(tokens)) + len(tokens)
        parts = []
        for number, (units, channels) in enumerate(self._blocks):
            whole = torch.arange(units * channels)[None, :] * 11 + torch.arange(self.rows)[:, None] * 5 + number * 101
            mine = _part(units, tp, rank)
            parts.append(whole[:, mine.start * channels : mine.stop * channels])
        conv = torch.cat(parts, dim=1)
        conv = conv.t() if self.channels_first else conv
        size = self.outer * self.inner
        heads = torch.arange(self.heads * size).reshape(self.heads, self.outer, self.inner) * 7 + 13
        mine = _part(self.heads, tp, rank)
        recurrent = heads[mine.start : mine.stop]
        return _number(conv + seen), _number(recurrent + seen)


def _part(units: int, tp: int, rank: int) -> range:
    """The units of a rank; each has the only one."""
    each = units // tp
    return range(units) if units == 1 else range(rank * each, (rank + 1) * each)


def _number(of: torch.Tensor) -> torch.Tensor:
    return (of % 1999).to(torch.float16).contiguous()
