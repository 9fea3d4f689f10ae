"""Tensor-parallel ranks of SGLang that share one GPU, which NCCL refuses: a plug-in that every process of SGLang loads.

The folder ``wire`` beside this file names it to SGLang. It does something where ``ENGINES_GPU_SHARED`` is set: all
ranks get the first GPU, and sums and gathers of activations go through memory that the ranks map from each other, with
a barrier of Gloo before and after. That is slower than NCCL between GPUs, for all pairs alike.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from .cases import SHARED

BYTES = 64 << 20
"""Of a rank's buffer: more than the activations of a chunk of 8,192 tokens."""


class Shared:
    """The buffers of a group's ranks.

    Args:
        group: of Gloo.
        rank: in the group.
        device: of the buffers.
    """

    def __init__(self, group: Any, rank: int, device: torch.device) -> None:
        self._group, self._rank, self._on_gpu = group, rank, device.type == "cuda"
        own = torch.empty(BYTES, dtype=torch.uint8, device=device)
        if not self._on_gpu:
            own.share_memory_()  # type: ignore[no-untyped-call]
        handles: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(handles, bytes(ForkingPickler.dumps(own)), group=group)
        self._buffers = [own if one == rank else pickle.loads(made) for one, made in enumerate(handles)]
        self._barrier()

    def _barrier(self) -> None:
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        torch.distributed.barrier(group=self._group)

    @contextmanager
    def exchanged(self, tensor: Tensor) -> Iterator[list[Tensor]]:
        """The tensor of every rank, until the context ends."""
        views = [buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for buffer in self._buffers]
        views[self._rank].copy_(tensor)
        self._barrier()
        yield views
        self._barrier()


def install() -> None:
    """Replace what needs NCCL."""
    if not os.environ.get(SHARED):
        return
    from sglang.srt.distributed.parallel_state import GroupCoordinator  # type: ignore[import-not-found, unused-ignore]
    from sglang.srt.entrypoints import engine  # type: ignore[import-not-found, unused-ignore]

    begin, new = torch.distributed.init_process_group, torch.distributed.new_group
    coordinate = GroupCoordinator.__init__
    made: dict[Any, Shared] = {}

    def of(group: Any, tensor: Tensor) -> Shared:
        if group not in made:
            made[group] = Shared(group.cpu_group, group.rank_in_group, tensor.device)
        return made[group]

    def all_reduce(group: Any, tensor: Tensor) -> Tensor:
        if group.world_size > 1:
            with of(group, tensor).exchanged(tensor) as parts:
                tensor.copy_(torch.stack(parts).sum(0, dtype=torch.float32))
        return tensor

    def all_gather_into_tensor(group: Any, output: Tensor, tensor: Tensor) -> None:
        with of(group, tensor).exchanged(tensor.contiguous()) as parts:
            torch.cat(parts, out=output)

    @contextmanager
    def first(number: int) -> Iterator[int]:
        yield 0

    torch.distributed.init_process_group = lambda **given: begin(**given | {"backend": "gloo", "pg_options": None})
    torch.distributed.new_group = lambda ranks, **given: new(ranks, **given | {"backend": "gloo", "pg_options": None})
    GroupCoordinator.__init__ = lambda group, **given: coordinate(group, **given | {"use_pynccl": False})
    GroupCoordinator.all_reduce, GroupCoordinator.all_gather_into_tensor = all_reduce, all_gather_into_tensor
    engine.maybe_reindex_device_id = first
