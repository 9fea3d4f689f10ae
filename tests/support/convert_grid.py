"""Pools that are read as other caches, for kernels on any device, and the check against the reference."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from attrs import evolve, frozen

from disagg_kv.geometry import CacheSpec, Component, PageTable, Plane, item_bytes, shard
from disagg_kv.geometry.formats import CONVERSIONS, SCALED
from disagg_kv.ids import LayerId
from disagg_kv.kernels import Kernels, Move, ReferenceKernels
from disagg_kv.memory import ConvertedPool, Layout, PagedPool
from tests.support.kernel_grid import buffer_on, content_of
from tests.support.pools import KV, Bytes, adopted, noise, staged_layout

ROWS, PAGE_SIZE, PAGES = 21, 4, 8
HEADS = 3


@frozen
class Case:
    """Two specs, of which the first converts into the second."""

    name: str
    source: CacheSpec
    target: CacheSpec

    @property
    def of_one_layer(self) -> tuple[CacheSpec, CacheSpec]:
        """The same two without what is not converted."""
        first = LayerId(0)
        return CacheSpec({first: self.source.layers[first]}), CacheSpec({first: self.target.layers[first]})


def spec(dtype: str, dims: tuple[int, int], scales: str = "none") -> CacheSpec:
    """K and V of two dims; ``scales``: none, per ``layer``, per ``head``, or ``computed``."""
    of: list[Component] = []
    for name, dim, scale in zip("kv", dims, ((0.03, 2.0, 7.5), (40.0, 1e-3, 0.25)), strict=True):
        one = Component(name, dtype, HEADS, dim * item_bytes(dtype))
        if scales in ("layer", "head"):
            one = evolve(one, scales=scale[: 1 if scales == "layer" else HEADS])
        elif scales == "computed":
            one = evolve(one, scaled_by=f"{name}_scale")
            of.append(Component(f"{name}_scale", "float32", HEADS, 4))
        of.append(one)
    return CacheSpec({LayerId(0): of, LayerId(1): [*of, Component("index", "int8", 1, 3)]})


def cases(dims: tuple[int, int]) -> Iterator[Case]:
    """Every conversion, with every kind of scales that it may have."""
    for source, target in sorted(CONVERSIONS):
        narrows, widens = target in SCALED, source in SCALED
        for scales in ("none", "layer", "head", "computed") if narrows or widens else ("none",):
            ours, theirs = ("none", scales) if narrows else (scales, "none")
            yield Case(f"{source}-{target}-{scales}", spec(source, dims, ours), spec(target, dims, theirs))


def moves_of(pool: ConvertedPool) -> tuple[list[Move], int]:
    """Whole rows and slices of heads, of every plane, parts side by side; and the staging bytes."""
    moves: list[Move] = []
    pages = np.random.default_rng(3).permutation(PAGES)[: -(-ROWS // PAGE_SIZE)]
    base = 16
    for first, last, start, stop in ((0, HEADS, 0, ROWS), (1, HEADS, 3, 18), (0, 1, 7, 8), (2, 3, 5, 5)):
        entries: list[tuple[int, int, int, int, int, int]] = []
        nbytes = 0
        for number, plane in enumerate(pool.site.planes):
            component = pool.spec.component(plane.layer, plane.component)
            low, high = min(first, component.units - 1), min(last, component.units)
            entries.append((number, low, high - low, start, stop, nbytes))
            nbytes += (stop - start) * (high - low) * component.unit_bytes
        moves.append(Move(staged_layout(entries, nbytes), {KV: PageTable(KV, pages)}, base))
        base += nbytes
    return moves, base + 5


def content(nbytes: int, seed: int) -> Bytes:
    """Codes of any kind, and runs of zeros, so that some rows have no scale of their own."""
    found = noise(nbytes, seed)
    found[: nbytes // 8] = 0
    return found


def check(kernels: Kernels, case: Case, layout: Layout, device: str, shifts: tuple[int, int] = (0, 0)) -> None:
    """Compare every byte of staging, converted or not, and every sum with the reference; the pool does not change."""
    shaped = PagedPool.allocate(case.source, shard(case.source), pages=PAGES, page_size=PAGE_SIZE, layout=layout)
    planes: list[Plane] = []
    begins = np.cumsum([0, *(-(-n // 256) * 256 for n in shaped.site.buffers)])
    for plane in shaped.site.planes:
        planes.append(evolve(plane, buffer=0, offset=int(begins[plane.buffer]) + plane.offset))
    memory = content(int(begins[-1]), 1)
    held = buffer_on(device, memory, shifts[0])
    own = adopted(case.source, shaped.site.shard, shaped.site.groups, planes, (held,))
    pool = ConvertedPool(own, case.target)
    moves, nbytes = moves_of(pool)
    staged = [buffer_on(device, noise(nbytes, 2), shifts[1]) for _ in range(2)]
    event = kernels.gather(pool, moves, staged[0], None)
    if event is not None:
        event.synchronize()
    reference = ReferenceKernels()
    reference.gather(pool, moves, staged[1], None)
    found, wanted = (content_of(one) for one in staged)
    wrong = np.flatnonzero(found != wanted)
    assert not len(wrong), f"{case.name}: {len(wrong)} bytes, the first {wrong[0]}: {found[wrong[0]]}"
    assert np.array_equal(content_of(held), memory)
    sums = kernels.checksum(pool, moves, None)
    if sums.event is not None:
        sums.event.synchronize()
    for ours, theirs in zip(sums.read(), reference.checksum(pool, moves, None).read(), strict=True):
        assert np.array_equal(ours, theirs), case.name


def every_code(kernels: Kernels, source: str, target: str, device: str) -> None:
    """Every code of at most 16 bits, or float32 beside and between all floats of 16 bits, equals the reference."""
    size = item_bytes(source)
    if size < 4:
        codes = np.arange(1 << 8 * size, dtype={1: np.uint8, 2: np.uint16}[size])
    else:
        high = np.arange(1 << 16, dtype=np.uint32) << 16
        codes = np.concatenate([high + step for step in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    width = 1024 if size > 1 else 256
    ours, theirs = (
        CacheSpec.uniform(1, [Component("k", dtype, 1, width * item_bytes(dtype))]) for dtype in (source, target)
    )
    rows = len(codes) // width
    shape = PagedPool.allocate(ours, shard(ours), pages=1, page_size=rows)
    held = buffer_on(device, codes.view(np.uint8))
    own = adopted(ours, shape.site.shard, shape.site.groups, shape.site.planes, (held,))
    pool = ConvertedPool(own, theirs)
    nbytes = len(codes) * item_bytes(target)
    move = Move(staged_layout([(0, 0, 1, 0, rows, 0)], nbytes), {KV: PageTable(KV, [0])}, 0)
    staged = [buffer_on(device, np.zeros(nbytes, np.uint8)) for _ in range(2)]
    event = kernels.gather(pool, [move], staged[0], None)
    if event is not None:
        event.synchronize()
    ReferenceKernels().gather(pool, [move], staged[1], None)
    found, wanted = (torch.from_numpy(content_of(one)) for one in staged)
    assert torch.equal(found, wanted)
