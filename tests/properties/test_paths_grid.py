"""Every pairing of tensor-parallel sizes, heads, page sizes and layouts: all paths leave the same decode pools.

The caches are plain arrays here; what a rank should hold is said by indexing them, without the library's help.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from attrs import frozen

from disagg_kv.geometry import CacheSpec, Group, PageTable, Plane, Shard, shard
from disagg_kv.ids import GroupId, LayerId, Rank
from disagg_kv.kernels import CpuKernels, Move, PageMove, Pages
from disagg_kv.memory import PagedPool
from disagg_kv.planning import PairPlan, Segment, Writes
from disagg_kv.planning.descriptors import direct_writes, slice_writes
from disagg_kv.planning.rank_plan import RankPlan
from disagg_kv.planning.staged import PartView
from tests.support.pools import KV, Bytes, adopted, buffer_over, noise

LAYERS = 2
START, MIDDLE, STOP = 5, 40, 70
WHOLE = Segment(START, STOP, 0, LAYERS)
HALVES = (Segment(START, MIDDLE, 0, LAYERS), Segment(MIDDLE, STOP, 0, LAYERS))
SIZES = (1, 2, 4, 8)
ALIKE = ((4, "bfloat16"), (4, "bfloat16"))
UNLIKE = ((3, "float32"), (5, "int8"))
BYTES = {ALIKE: (8, 8), UNLIKE: (12, 5)}

Kind = tuple[tuple[int, str], tuple[int, str]]


@frozen(eq=False)
class _Rank:
    """One rank: its pool, the memory under it, that memory without and with the room's rows, and their bytes."""

    pool: PagedPool
    tables: dict[GroupId, PageTable]
    memory: Bytes
    poison: Bytes
    filled: Bytes
    needed: int


@cache
def _spec(heads: int, kind: Kind) -> CacheSpec:
    (k_dim, k_dtype), (v_dim, v_dtype) = kind
    return CacheSpec.kv(LAYERS, heads, k_dim, k_dtype, v_head_dim=v_dim, v_dtype=v_dtype)


@cache
def _truth(heads: int, kind: Kind) -> list[Bytes]:
    """The room's cache, one array ``[rows, heads, unit_bytes]`` per layer and component."""
    return [
        noise(STOP * heads * unit_bytes, 10 * layer + i).reshape(STOP, heads, unit_bytes)
        for layer in range(LAYERS)
        for i, unit_bytes in enumerate(BYTES[kind])
    ]


def _heads_of(heads: int, tp: int, rank: int) -> list[int]:
    """The heads of a rank: an equal run of them, or, with fewer heads than ranks, one that neighbours share."""
    return [h for h in range(heads) if h * tp // heads == rank] if heads >= tp else [rank // (tp // heads)]


@cache
def _ranks(side: str, tp: int, heads: int, page_size: int, layout: str, kind: Kind) -> tuple[_Rank, ...]:
    """The ranks of one side, each with pages, page ids and poison of its own."""
    first = {"prefill": 20, "decode": 30}[side]
    return tuple(_rank(first + rank, tp, rank, heads, page_size, layout, kind) for rank in range(tp))


def _rank(seed: int, tp: int, rank: int, heads: int, page_size: int, layout: str, kind: Kind) -> _Rank:
    spec, held = _spec(heads, kind), _heads_of(heads, tp, rank)
    used = -(-STOP // page_size)
    pages = used + 2
    ids = np.random.default_rng(seed).permutation(pages)[:used]
    sizes = [pages * page_size * len(held) * b for b in BYTES[kind]] * LAYERS
    gap = 3
    poison = noise(sum(sizes) + gap * len(sizes), seed)
    filled = poison.copy()
    rows = np.arange(START, STOP)
    planes: list[Plane] = []
    offset = gap
    for i, (truth, size) in enumerate(zip(_truth(heads, kind), sizes, strict=True)):
        axes = (page_size, len(held)) if layout == "NHD" else (len(held), page_size)
        stored = filled[offset : offset + size].reshape(pages, *axes, -1)
        cells = stored if layout == "NHD" else stored.transpose(0, 2, 1, 3)
        cells[ids[rows // page_size], rows % page_size] = truth[START:STOP, held]
        planes.append(Plane(LayerId(i // 2), "kv"[i % 2], KV, 0, offset, *cells.strides[:3]))
        offset += size + gap
    memory = filled.copy()
    needed = LAYERS * len(rows) * len(held) * sum(BYTES[kind])
    groups = (Group(KV, page_size, pages),)
    pool = adopted(spec, shard(spec, tp=tp, rank=rank), groups, planes, [buffer_over(memory)])
    return _Rank(pool, {KV: PageTable(KV, ids)}, memory, poison, filled, needed)


@cache
def _rank_plan(prefill: int, decode: int, rank: int, heads: int, kind: Kind, rotation: int) -> RankPlan:
    spec = _spec(heads, kind)
    writers: list[Shard] = [shard(spec, tp=prefill, rank=r) for r in range(prefill)]
    return RankPlan.build(spec, writers, shard(spec, tp=decode, rank=rank), rotation)


def _write(writes: Writes, source: Bytes, target: Bytes) -> None:
    """Do what a transport does with a batch between two pools of one buffer each."""
    assert not writes.local.any()
    assert not writes.remote.any()
    for nbytes in np.unique(writes.nbytes):
        of = writes.nbytes == nbytes
        each = np.arange(nbytes)
        target[writes.remote_off[of][:, None] + each] = source[writes.local_off[of][:, None] + each]


def _one_sided(sources: Sequence[_Rank], target: _Rank, rank_plan: RankPlan, *, direct: bool) -> int:
    """Transfer by ``direct`` or ``slice``; returns how many bytes were posted."""
    plan = direct_writes if direct else slice_writes
    posted = 0
    for source, parts in zip(sources, rank_plan.parts, strict=True):
        writes = plan(PairPlan(source.pool.site, target.pool.site, parts), WHOLE, source.tables, target.tables)
        _write(writes, source.filled, target.memory)
        posted += writes.total()
    return posted


def _staged(sources: Sequence[_Rank], target: _Rank, rank_plan: RankPlan) -> int:
    """Transfer by gather, one bulk copy per writer, scatter; returns how many bytes were posted."""
    kernels = CpuKernels()
    posted = 0
    for segment in HALVES:
        places, nbytes = rank_plan.lease(segment)
        lease = noise(nbytes, 7)
        moves: list[Move] = []
        for writer, (offset, size) in places.items():
            source, parts = sources[writer], rank_plan.parts[writer]
            layout = PartView(source.pool.site, parts).layout(segment)
            assert layout.nbytes == size
            slot = noise(size, 8)
            kernels.gather(source.pool, [Move(layout, source.tables, 0)], buffer_over(slot), None)
            lease[offset : offset + size] = slot
            posted += size
            seen = PartView(target.pool.site, parts).layout(segment)
            moves.append(Move(seen, target.tables, offset))
        kernels.scatter(target.pool, moves, buffer_over(lease))
    return posted


def _mapped(sources: Sequence[_Rank], target: _Rank, rank_plan: RankPlan) -> int:
    """Transfer by one copy of all writers' pages into the target's; returns how many bytes were copied."""
    moves: list[PageMove] = []
    for source, parts in zip(sources, rank_plan.parts, strict=True):
        plan = PairPlan(source.pool.site, target.pool.site, parts).page_copy(WHOLE)
        moves.append(PageMove(plan, Pages(source.pool, source.tables), Pages(target.pool, target.tables)))
    CpuKernels().copy(moves, None)
    return sum(move.copy.target.nbytes for move in moves)


@pytest.mark.parametrize("heads", SIZES)
@pytest.mark.parametrize("decode", SIZES)
@pytest.mark.parametrize("prefill", SIZES)
def test_every_path_leaves_the_pool_that_plain_indexing_says(prefill: int, decode: int, heads: int) -> None:
    """Each byte once, the same pool by every path, and no byte outside the room's rows changed.

    Page sizes 1, 16 and 64 and NHD and HND on either side; K like V and unlike it.
    """
    pages = itertools.product((1, 16, 64), ("NHD", "HND"))
    for case, (ours, theirs, kind) in enumerate(itertools.product(*[list(pages)] * 2, (ALIKE, UNLIKE))):
        sources = _ranks("prefill", prefill, heads, *ours, kind)
        targets = _ranks("decode", decode, heads, *theirs, kind)
        # Decode ranks that share a head take in the same; who sends which piece of it turns with the case.
        for rank in range(0, decode, max(1, decode // heads)):
            rank_plan = _rank_plan(prefill, decode, rank, heads, kind, case % prefill)
            _check(sources, targets[rank], rank_plan, alike=ours == theirs)


def _check(sources: Sequence[_Rank], target: _Rank, rank_plan: RankPlan, *, alike: bool) -> None:
    """Compare the pools that the paths leave with what plain indexing says, byte for byte."""
    held = [sum(len(h.units) for h in rank.pool.site.shard if h.component == "k") for rank in (*sources, target)]
    direct = not any(
        PairPlan(s.pool.site, target.pool.site, p).direct_refusal for s, p in zip(sources, rank_plan.parts, strict=True)
    )
    assert direct or not (alike and len(set(held)) == 1)
    for path in ["slice", "staged", "mapped"] + ["direct"] * direct:
        target.memory[:] = target.poison
        if path == "staged":
            posted = _staged(sources, target, rank_plan)
        elif path == "mapped":
            posted = _mapped(sources, target, rank_plan)
        else:
            posted = _one_sided(sources, target, rank_plan, direct=path == "direct")
        assert posted == target.needed, path
        assert np.array_equal(target.memory, target.filled), path
    assert all(np.array_equal(source.memory, source.filled) for source in sources)


def test_a_swapped_head_is_seen() -> None:
    """The negative control: the comparison fails where two heads change places on the way."""
    (source,) = _ranks.__wrapped__("prefill", 1, 2, 16, "NHD", ALIKE)
    (target,) = _ranks("decode", 1, 2, 16, "HND", ALIKE)
    view = source.pool.view(0)
    view[...] = view[:, :, ::-1].copy()
    target.memory[:] = target.poison
    _staged([source], target, _rank_plan(1, 1, 0, 2, ALIKE, 0))
    assert not np.array_equal(target.memory, target.filled)


@pytest.mark.parametrize("writer", [Rank(0), Rank(1)])
def test_pools_that_differ_in_pages_are_refused_by_direct_alone(writer: Rank) -> None:
    """The refusal names both page sizes."""
    sources, (target,) = _ranks("prefill", 2, 2, 16, "NHD", ALIKE), _ranks("decode", 1, 2, 64, "NHD", ALIKE)
    parts = _rank_plan(2, 1, 0, 2, ALIKE, 0).parts[writer]
    reason = PairPlan(sources[writer].pool.site, target.pool.site, parts).direct_refusal
    assert reason is not None
    assert "16 rows here and of 64 rows there" in reason
