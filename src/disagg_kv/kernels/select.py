"""The kernels there are, and which of them serve a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from ..errors import IntegrityError, UnknownNameError
from ..geometry import CacheSpec, PageTable, shard
from ..ids import GroupId
from ..memory import Buffer, Event, MemoryPool, PagedPool, bytes_of
from ..planning import StagedLayout
from .base import Kernels, Move
from .gather import cpu as gather_cpu
from .scatter import cpu as scatter_cpu


class ReferenceKernels:
    """The specification, in torch on the CPU; slow."""

    name = "reference"

    def gather(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None) -> None:
        """Copy pages into staging; blocks until ``after`` has happened and the copy is done."""
        from .gather import reference  # imports torch, which the other kernels do without

        if after is not None:
            after.synchronize()
        reference.gather(pool, moves, staging)

    def scatter(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> None:
        """Copy staging into pages; blocks until it is done."""
        from .scatter import reference

        reference.scatter(pool, moves, staging)


class CpuKernels:
    """NumPy on one core."""

    name = "cpu"

    def gather(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None) -> None:
        """Copy pages into staging; blocks until ``after`` has happened and the copy is done."""
        if after is not None:
            after.synchronize()
        gather_cpu.gather(pool, moves, staging)

    def scatter(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> None:
        """Copy staging into pages; blocks until it is done."""
        scatter_cpu.scatter(pool, moves, staging)


KERNELS: Mapping[str, Kernels] = MappingProxyType({"reference": ReferenceKernels(), "cpu": CpuKernels()})
"""Every implementation, by name."""


def kernels_for(device: str) -> Kernels:
    """The fastest kernels for memory on ``device`` (``"cpu"``, ``"cuda:0"`` ...); an error names the devices served."""
    if device != "cpu":
        raise UnknownNameError("device for gather and scatter", device, ["cpu"])
    return KERNELS["cpu"]


def available(kernels: Mapping[str, Kernels] = KERNELS) -> dict[str, str | None]:
    """Try each of ``kernels`` on a small pool: name -> why it does not work here, or None if it does."""
    return {name: _reason(one) for name, one in kernels.items()}


def _reason(kernels: Kernels) -> str | None:
    try:
        _try(kernels)
    except Exception as exc:  # whatever stops it is what the caller asks for
        return f"{type(exc).__name__}: {exc}"
    return None


def _try(kernels: Kernels) -> None:
    """Move a page out of one pool and into another; raises where the bytes differ."""
    spec = CacheSpec.kv(1, 2, 4, "float16")
    source, target = (PagedPool.allocate(spec, shard(spec), pages=2, page_size=4) for _ in range(2))
    source.view(0)[1] = np.arange(64, dtype=np.uint8).reshape(4, 2, 8)
    memory = np.zeros(32, np.uint8)
    staging = Buffer(memory.ctypes.data, memory.nbytes, owner=memory)
    number, row = np.int32, np.int64
    layout = StagedLayout(
        np.array([0], number),
        np.array([1], number),
        np.array([1], number),
        np.array([0], row),
        np.array([4], row),
        np.array([0], row),
        32,
    )
    move = Move(layout, {GroupId("kv"): PageTable(GroupId("kv"), [1])}, 0)
    for event in (kernels.gather(source, [move], staging, None), kernels.scatter(target, [move], staging)):
        if event is not None:
            event.synchronize()
    expected = np.zeros_like(bytes_of(target.buffers[0]))
    expected[64:128].reshape(4, 2, 8)[:, 1] = source.view(0)[1, :, 1]
    if not np.array_equal(bytes_of(target.buffers[0]), expected):
        raise IntegrityError(f"kernels {kernels.name!r} move wrong bytes")
