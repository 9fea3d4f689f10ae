"""An exhaustive small grid for gather, scatter and checksum, on any device, and the check against the reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from attrs import evolve, frozen

from disagg_kv.geometry import CacheSpec, PageTable, Plane, shard
from disagg_kv.kernels import Kernels, Move, ReferenceKernels, SupportsPreparing
from disagg_kv.kernels.tensors import tensor_of
from disagg_kv.memory import Buffer, Layout, PagedPool
from tests.support.pools import KV, Bytes, adopted, noise, staged_layout

PAGES = 7

ALIGNMENTS: dict[int, tuple[str, int, int]] = {
    1: ("float8_e4m3fn", 5, 3),
    2: ("bfloat16", 5, 3),
    4: ("float32", 5, 3),
    8: ("float16", 4, 12),
    16: ("bfloat16", 8, 24),
}
"""For each alignment that a kernel tells apart: a dtype and the dims of K and V whose units have no better one."""


def buffer_on(device: str, content: Bytes, shift: int = 0) -> Buffer:
    """A copy of ``content`` in memory of ``device`` that begins ``shift`` bytes after a multiple of 256."""
    memory = torch.zeros(len(content) + 512, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % 256 + shift
    memory[start : start + len(content)] = torch.from_numpy(content).to(device)
    if device != "cpu":
        torch.cuda.synchronize()
    return Buffer(memory.data_ptr() + start, len(content), str(memory.device), memory)


def content_of(buffer: Buffer) -> Bytes:
    """The bytes that lie in a buffer now."""
    content: Bytes = tensor_of(buffer).cpu().numpy().copy()
    return content


def placed(pool: PagedPool, buffer: Buffer) -> PagedPool:
    """A pool of the same geometry in ``buffer``."""
    site = pool.site
    return adopted(site.spec, site.shard, site.groups, site.planes, (buffer,))


@frozen
class Grid:
    """One pool's geometry, and a call with every slice of its heads times whole, partial and single pages.

    Args:
        pool: the geometry; its memory is not used.
        moves: of one call.
        staging_bytes: what they need.
    """

    pool: PagedPool
    moves: Sequence[Move]
    staging_bytes: int

    @classmethod
    def of(cls, layout: Layout, fused: bool, page_size: int, alignment: int, slices: Iterable[tuple[int, int]]) -> Grid:
        """The grid for three heads, K and V of different dims, and pages in a shuffled order."""
        dtype, k_dim, v_dim = ALIGNMENTS[alignment]
        spec = CacheSpec.kv(1, 3, k_dim, dtype, v_head_dim=v_dim)
        pool = PagedPool.allocate(spec, shard(spec), pages=PAGES, page_size=page_size, layout=layout, fused=fused)
        sizes = [spec.component(p.layer, p.component).unit_bytes for p in pool.site.planes]
        tokens = 3 * page_size
        rows = {(0, tokens), (0, 1), (page_size - 1, page_size + 1), (1, tokens - 1)}
        pages = np.random.default_rng(page_size).permutation(PAGES)[:4]
        moves: list[Move] = []
        base = 16
        for first, last in slices:
            for start, stop in sorted(rows):
                n = (stop - start) * (last - first)
                entries = [
                    (0, first, last - first, start, stop, 0),
                    (1, first, last - first, start, stop, n * sizes[0]),
                ]
                begin = page_size if start >= page_size else 0
                table = PageTable(KV, pages, begin)
                moves.append(Move(staged_layout(entries, n * sum(sizes)), {KV: table}, base))
                # Every part begins at the alignment under test, and touches its neighbour where it can.
                base += -(-n * sum(sizes) // alignment) * alignment
        return cls(pool, moves, base + 5)


def check(
    kernels: Kernels, pool: PagedPool, moves: Sequence[Move], staging_bytes: int, device: str, shifts: tuple[int, int]
) -> None:
    """Compare with the reference, every byte of the pool's only buffer and of staging, moved or not.

    What is scattered was gathered from one memory before, so that moves may overlap.

    Args:
        kernels: under test.
        pool: geometry; its memory is not used.
        moves: of one call.
        staging_bytes: of the staging buffer.
        device: where.
        shifts: bytes by which pool and staging lie off their alignment.
    """
    reference = ReferenceKernels()
    nbytes = pool.site.buffers[0]
    truth = placed(pool, buffer_on(device, noise(nbytes, 1), shifts[0]))
    staged = [buffer_on(device, noise(staging_bytes, 2), shifts[1]) for _ in range(2)]
    event = kernels.gather(truth, moves, staged[0], None)
    if event is not None:
        event.synchronize()
    reference.gather(truth, moves, staged[1], None)
    assert np.array_equal(content_of(staged[0]), content_of(staged[1]))
    assert np.array_equal(content_of(truth.buffers[0]), noise(nbytes, 1))

    sums = kernels.checksum(truth, moves, None)
    if sums.event is not None:
        sums.event.synchronize()
    expected = reference.checksum(truth, moves, None).read()
    assert [of.tolist() for of in sums.read()] == [of.tolist() for of in expected]

    into = [placed(pool, buffer_on(device, noise(nbytes, 3), shifts[0])) for _ in range(2)]
    event = kernels.scatter(into[0], moves, staged[1])
    if event is not None:
        event.synchronize()
    reference.scatter(into[1], moves, staged[1])
    assert np.array_equal(content_of(into[0].buffers[0]), content_of(into[1].buffers[0]))
    assert np.array_equal(content_of(staged[0]), content_of(staged[1]))


def check_prepared(kernels: Kernels, grid: Grid, device: str) -> None:
    """Compare a prepared scatter with the reference's, every byte; no byte of pages changes before it is launched."""
    assert isinstance(kernels, SupportsPreparing)
    nbytes = grid.pool.site.buffers[0]
    truth = placed(grid.pool, buffer_on(device, noise(nbytes, 1)))
    into = [placed(grid.pool, buffer_on(device, noise(nbytes, 3))) for _ in range(2)]
    staging = buffer_on(device, noise(grid.staging_bytes, 2))
    prepared = kernels.prepare_scatter(into[0], grid.moves, staging)
    assert prepared is not None
    # The bytes come after it was prepared.
    ReferenceKernels().gather(truth, grid.moves, staging, None)
    assert np.array_equal(content_of(into[0].buffers[0]), noise(nbytes, 3))
    event = prepared.launch()
    if event is not None:
        event.synchronize()
    ReferenceKernels().scatter(into[1], grid.moves, staging)
    assert np.array_equal(content_of(into[0].buffers[0]), content_of(into[1].buffers[0]))


def check_prepared_gather(kernels: Kernels, grid: Grid, device: str) -> None:
    """The same for a gather, which goes further on than was said when it was prepared; no byte before it changes."""
    assert isinstance(kernels, SupportsPreparing)
    nbytes, base = grid.pool.site.buffers[0], 4096
    truth = placed(grid.pool, buffer_on(device, noise(nbytes, 3)))
    staged = [buffer_on(device, noise(base + grid.staging_bytes, 2)) for _ in range(2)]
    prepared = kernels.prepare_gather(truth, grid.moves, staged[0])
    assert prepared is not None
    # The bytes come after it was prepared.
    tensor_of(truth.buffers[0]).copy_(torch.from_numpy(noise(nbytes, 1)))
    if device != "cpu":
        torch.cuda.synchronize()
    assert np.array_equal(content_of(staged[0]), noise(base + grid.staging_bytes, 2))
    event = prepared.launch(base, None)
    if event is not None:
        event.synchronize()
    moved = [evolve(move, base=move.base + base) for move in grid.moves]
    ReferenceKernels().gather(truth, moved, staged[1], None)
    assert np.array_equal(content_of(staged[0]), content_of(staged[1]))


def strided(unit_bytes: int, units: int, gap: int, page_size: int) -> PagedPool:
    """A pool of one plane whose units are ``gap`` bytes apart."""
    spec = CacheSpec.mla(1, unit_bytes, "uint8") if units == 1 else CacheSpec.kv(1, units, unit_bytes, "uint8")
    shaped = PagedPool.allocate(spec, shard(spec), pages=PAGES, page_size=page_size)
    step = unit_bytes + gap
    planes = [
        Plane(p.layer, p.component, p.group, 0, i * PAGES * page_size * units * step, page_size * units * step,
              units * step, step)
        for i, p in enumerate(shaped.site.planes)
    ]  # fmt: skip
    nbytes = len(planes) * PAGES * page_size * units * step
    return adopted(spec, shard(spec), shaped.site.groups, planes, (buffer_on("cpu", noise(nbytes, 0)),))
