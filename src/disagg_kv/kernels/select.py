"""The implementations of the kernels, and their selection by device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve

from ..errors import IntegrityError, MissingDependencyError, UnknownNameError
from ..geometry import CONVERSION_NAMES, CacheSpec, PageTable, shard
from ..ids import KV
from ..memory import (
    U8,
    Buffer,
    Event,
    Flag,
    MappedPool,
    MemoryPool,
    PagedPool,
    bytes_of,
    new_buffer,
    wait_for,
)
from ..memory.flag import raise_flags
from ..planning import PageCopy, StagedLayout
from .base import Checksums, Kernels, Move, PageMove, Pages
from .checksum import cpu as checksum_cpu
from .convert import pages as converted
from .moves import cpu as moves_cpu
from .moves import cpu_copy

if TYPE_CHECKING:
    from .convert.launch import TritonKernels

log = logging.getLogger("disagg_kv")


class ReferenceKernels:
    """The specification, in torch, on the CPU or a GPU; slow."""

    name = "reference"
    conversions = CONVERSION_NAMES

    def gather(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None) -> None:
        """Copy pages into staging; blocks until ``after`` has happened and the copy is done."""
        from .moves import reference  # imports torch, which the NumPy kernels do without

        wait_for(after)
        reference.gather(pool, moves, staging)
        _finish(staging.device)

    def scatter(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> None:
        """Copy staging into pages; blocks until it is done."""
        from .moves import reference

        reference.scatter(pool, moves, staging)
        _finish(staging.device)

    def copy(self, moves: Sequence[PageMove], after: Event | None, flags: Sequence[Flag] = ()) -> None:
        """Copy pages into pages; blocks until ``after`` has happened and the copy is done. raises no flags."""
        from .moves import reference

        wait_for(after)
        reference.copy(moves)
        for device in {move.target.pool.buffers[0].device for move in moves}:
            _finish(device)

    def checksum(self, pool: MemoryPool, moves: Sequence[Move], after: Event | None) -> Checksums:
        """Sum cells; blocks until ``after`` has happened and the sums are there."""
        from .checksum import reference

        wait_for(after)
        sums = reference.checksum(pool, moves)
        return Checksums(None, lambda: sums)


def _finish(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.current_stream(device).synchronize()


class CpuKernels:
    """NumPy on one core."""

    name = "cpu"
    conversions = CONVERSION_NAMES

    def gather(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None) -> None:
        """Copy pages into staging; blocks until ``after`` has happened and the copy is done."""
        wait_for(after)
        (converted if pool.site.converts else moves_cpu).gather(pool, moves, staging)

    def scatter(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> None:
        """Copy staging into pages; blocks until it is done."""
        moves_cpu.scatter(pool, moves, staging)

    def copy(self, moves: Sequence[PageMove], after: Event | None, flags: Sequence[Flag] = ()) -> None:
        """Copy pages into pages, in one pass; blocks until ``after`` has happened and the copy is done."""
        wait_for(after)
        for move in moves:
            (converted if move.source.pool.site.converts else cpu_copy).copy(move)
        raise_flags(flags)

    def checksum(self, pool: MemoryPool, moves: Sequence[Move], after: Event | None) -> Checksums:
        """Sum cells; blocks until ``after`` has happened and the sums are there."""
        wait_for(after)
        sums = (converted if pool.site.converts else checksum_cpu).checksum(pool, moves)
        return Checksums(None, lambda: sums)


def gpu_kernels(programs: int | None = None) -> TritonKernels:
    """Triton's, on GPUs.

    Args:
        programs: see :class:`~disagg_kv.kernels.convert.launch.TritonKernels`.

    Raises:
        MissingDependencyError: Triton or torch cannot be imported.
    """
    try:
        from .convert.launch import TritonKernels
    except ImportError as exc:
        raise MissingDependencyError("kernels 'triton'", str(exc), "pip install 'disagg_kv[triton]'") from exc
    return TritonKernels(programs)


KERNELS: Mapping[str, Callable[[], Kernels]] = MappingProxyType(
    {"reference": ReferenceKernels, "cpu": CpuKernels, "triton": gpu_kernels}
)
"""What makes each implementation, by its name."""


def kernels_for(device: str) -> Kernels:
    """The fastest kernels for memory on ``device`` (``"cpu"``, ``"cuda:0"`` ...); without Triton the reference's.

    Raises:
        UnknownNameError: no kernels serve such a device; names those that are served.
    """
    kind = device.partition(":")[0]
    if kind == "cuda":
        try:
            return gpu_kernels()
        except MissingDependencyError as error:
            log.warning("memory on %s uses the reference kernels, which are many times slower: %s", device, error)
            return ReferenceKernels()
    if kind != "cpu":
        raise UnknownNameError("device for gather and scatter", device, ["cpu", "cuda"])
    return CpuKernels()


def available(kernels: Mapping[str, Callable[[], Kernels]] = KERNELS) -> dict[str, str | None]:
    """Try each of ``kernels`` on a small pool: name -> why it does not work here, or None if it does."""
    return {name: _reason(make) for name, make in kernels.items()}


def _reason(make: Callable[[], Kernels]) -> str | None:
    try:
        _try(make())
    except Exception as exc:  # whatever stops it is what the caller asks for
        return f"{type(exc).__name__}: {exc}"
    return None


def _device(kernels: Kernels) -> str:
    """Where to try them."""
    if kernels.name != "triton":
        return "cpu"
    from .triton_kernels import INTERPRETED

    return "cpu" if INTERPRETED else "cuda"


def _try(kernels: Kernels) -> None:
    """Move a page out of one pool and into two others; raises where bytes or sums differ."""
    device = _device(kernels)
    spec = CacheSpec.kv(1, 2, 4, "float16")
    pools = [PagedPool.allocate(spec, shard(spec), pages=2, page_size=4, device=device) for _ in range(3)]
    source, target, peer = pools
    staging = new_buffer(32, device)
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
    move = Move(layout, {KV: PageTable([1])}, 0)
    content = np.arange(source.buffers[0].nbytes, dtype=np.uint8)
    _write(source.buffers[0], content)
    mapped = Pages(MappedPool(peer.site, peer.buffers), move.tables)
    straight = PageMove(PageCopy(layout, layout), Pages(source, move.tables), mapped)
    for event in (
        kernels.gather(source, [move], staging, None),
        kernels.scatter(target, [move], staging),
        kernels.copy([straight], None),
    ):
        wait_for(event)
    expected = np.zeros_like(content)
    expected[64:128].reshape(4, 2, 8)[:, 1] = content[64:128].reshape(4, 2, 8)[:, 1]
    for pool in (target, peer):
        if not np.array_equal(_read(pool.buffers[0]), expected):
            raise IntegrityError(f"kernels {kernels.name!r} move wrong bytes")
    other = evolve(move, layout=evolve(layout, plane=layout.plane + 1))
    sums = [_sum(kernels, source, move), _sum(kernels, target, move), _sum(kernels, source, other)]
    if sums[0] != sums[1] or sums[0] == sums[2]:
        raise IntegrityError(
            f"kernels {kernels.name!r} sum equal cells to {sums[0]} and {sums[1]}, others to {sums[2]}"
        )


def _sum(kernels: Kernels, pool: MemoryPool, move: Move) -> int:
    sums = kernels.checksum(pool, [move], None)
    wait_for(sums.event)
    return int(sums.read()[0][0])


def _write(buffer: Buffer, content: U8) -> None:
    if buffer.device == "cpu":
        bytes_of(buffer)[:] = content
        return
    import torch

    from .tensors import tensor_of

    tensor_of(buffer).copy_(torch.from_numpy(content))
    _finish(buffer.device)


def _read(buffer: Buffer) -> U8:
    if buffer.device == "cpu":
        return bytes_of(buffer)
    from .tensors import tensor_of

    content: U8 = tensor_of(buffer).cpu().numpy()
    return content
