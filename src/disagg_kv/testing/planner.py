"""What every :class:`~disagg_kv.strategies.TransferPlanner` must do: a suite to inherit.

::

    class TestMine(TransferPlannerSuite):
        def planner(self):
            return MyPlanner()

Plans are carried out in plain memory and compared with what plain indexing says. Needs pytest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import get_args

import numpy as np
import pytest
from attrs import evolve, field, frozen

from ..geometry import CacheSpec, PageTable, Shard, shard
from ..ids import KV, GroupId, LayerId, Rank
from ..kernels import CpuKernels, Move, PageMove, Pages
from ..memory import U8, Layout, PagedPool, bytes_of, new_buffer
from ..planning import Limits, PageCopy, PairPlan, RankPlan, RowRange, StagedLayout, Writes
from ..strategies import Job, MoverName, TransferPlanner, exposes_pages

POISON = 0xA5
"""What the target's memory is filled with before a transfer."""

STAGING_BYTES = 1 << 12
"""Of a slot and of a lease: so small that a request is many segments."""

Truth = Mapping[tuple[LayerId, str], U8]
"""Per layer and component every byte of a request: ``[rows, units, unit_bytes]``."""


@frozen
class Case:
    """A prefill instance, one decode rank and a request.

    Args:
        spec: the cache.
        prefill: the shards of prefill's ranks.
        decode: the shard of the decode rank.
        page_sizes: rows of a page, (prefill, decode).
        layouts: the order of the axes inside a page, (prefill, decode).
        start: rows before it are held by decode.
        stop: where the request ends.
    """

    spec: CacheSpec
    prefill: tuple[Shard, ...]
    decode: Shard
    page_sizes: tuple[int, int] = (4, 4)
    layouts: tuple[Layout, Layout] = ("NHD", "NHD")
    start: int = 0
    stop: int = 37


def _ranks(spec: CacheSpec, tp: int) -> tuple[Shard, ...]:
    return tuple(shard(spec, tp=tp, rank=rank) for rank in range(tp))


_KV = CacheSpec.kv(3, 4, 8, "float16", v_head_dim=4)
_MLA = CacheSpec.mla(3, 12, "float16")

CASES: Mapping[str, Case] = {
    "equal layouts": Case(_KV, _ranks(_KV, 1), shard(_KV)),
    "equal layouts, a held prefix": Case(_KV, _ranks(_KV, 1), shard(_KV), start=8),
    "larger pages": Case(_KV, _ranks(_KV, 1), shard(_KV), (4, 16)),
    "two ranks to one": Case(_KV, _ranks(_KV, 2), shard(_KV), (4, 8)),
    "one rank to one of two": Case(_KV, _ranks(_KV, 1), shard(_KV, tp=2, rank=1)),
    "heads outermost": Case(_KV, _ranks(_KV, 2), shard(_KV), (8, 4), ("HND", "NHD"), start=4),
    "latents that two ranks hold": Case(_MLA, _ranks(_MLA, 2), shard(_MLA), (4, 8)),
}


@frozen
class Side:
    """A rank's pool, and where the request's rows lie in it."""

    pool: PagedPool
    tables: Mapping[GroupId, PageTable]

    @classmethod
    def of(cls, spec: CacheSpec, held: Shard, page_size: int, layout: Layout, stop: int, seed: int) -> Side:
        """A pool of twice the pages that the rows up to ``stop`` need, and half of the pages in a mixed order."""
        needed = -(-stop // page_size)
        pool = PagedPool.allocate(spec, held, pages=2 * needed, page_size=page_size, layout=layout)
        pages = np.random.default_rng(seed).permutation(2 * needed)[:needed]
        return cls(pool, {KV: PageTable(KV, pages.astype(np.int32))})

    def put(self, truth: Truth, start: int, stop: int) -> None:
        """Write the rows ``[start, stop)`` by plain indexing."""
        pages = self.tables[KV].pages
        for number, plane in enumerate(self.pool.site.planes):
            view = self.pool.view(number)
            units = [u for run in self.pool.site.shard.units(plane.layer, plane.component) for u in run]
            for row in range(start, stop):
                of = truth[plane.layer, plane.component][row]
                view[pages[row // view.shape[1]], row % view.shape[1]] = of[units]


@frozen
class Part:
    """One writer's part of one segment, as each side asks about it."""

    source: Side
    send: Job
    receive: Job
    nbytes: int


@frozen
class Transfer:
    """A case in memory: pools, pages, random rows and all that has to be planned."""

    case: Case
    truth: Truth
    target: Side
    want: Side
    sources: tuple[Side, ...]
    rank_plan: RankPlan = field(repr=False)

    @classmethod
    def of(cls, case: Case) -> Transfer:
        """New memory for a case: prefill's pools have the rows, decode's is poison."""
        rng = np.random.default_rng(7)
        truth = {
            (layer, c.name): rng.integers(0, 256, (case.stop, c.units, c.unit_bytes), np.uint8)
            for layer, components in case.spec.layers.items()
            for c in components
        }
        sides = []
        for number, held in enumerate((*case.prefill, case.decode, case.decode)):
            role = 0 if number < len(case.prefill) else 1
            # The last two, what is written and what should be, lie in the same pages.
            seed = min(number, len(case.prefill))
            made = Side.of(case.spec, held, case.page_sizes[role], case.layouts[role], case.stop, seed)
            for buffer in made.pool.buffers:
                bytes_of(buffer)[:] = POISON
            sides.append(made)
        *sources, target, want = sides
        for one in sources:
            one.put(truth, 0, case.stop)
        want.put(truth, case.start, case.stop)
        rows = RowRange(case.start, case.stop)
        rank_plan = RankPlan.build(case.spec, case.prefill, case.decode).for_rows(rows)
        return cls(case, truth, target, want, tuple(sources), rank_plan)

    def parts(self, exposed: bool) -> Iterator[Part]:
        """Each segment of each writer; target's pages are known to the writer only where they are exposed."""
        case, rank_plan = self.case, self.rank_plan
        limits = Limits(STAGING_BYTES, STAGING_BYTES, case.page_sizes[1])
        for rank, (source, shares) in enumerate(zip(self.sources, rank_plan.parts, strict=True)):
            pair = PairPlan(source.pool.site, self.target.pool.site, shares, rank_plan.room)
            for layers in rank_plan.ranges(Rank(rank)):
                for segment in rank_plan.cut(case.start, case.stop, layers, limits):
                    nbytes = rank_plan.part_bytes(segment, Rank(rank))
                    if nbytes:
                        tables = self.target.tables if exposed else {}
                        send = Job(pair, segment, source.tables, tables)
                        receive = Job(pair, segment, {}, self.target.tables)
                        yield Part(source, send, receive, nbytes)

    def check(self) -> None:
        """The target's pages hold the rows that were awaited, and all else is as it was."""
        for found, want in zip(self.target.pool.buffers, self.want.pool.buffers, strict=True):
            wrong = np.flatnonzero(bytes_of(found) != bytes_of(want))
            assert not len(wrong), f"{len(wrong)} bytes are wrong, the first at {wrong[0]} of {found.nbytes}"


class TransferPlannerSuite:
    """Promises of a path. Subclasses give ``planner``; test methods are inherited."""

    def planner(self) -> TransferPlanner:
        """The path; new ones of one kind plan alike."""
        raise NotImplementedError

    def refusal(self, of: Transfer) -> str | None:
        """Why the path cannot carry a case."""
        planner, target = self.planner(), of.target.pool.site
        for source, parts in zip(of.sources, of.rank_plan.parts, strict=True):
            pair = PairPlan(source.pool.site, target, parts)
            reason = planner.refuse(pair)
            assert reason is None or reason, "a refusal without a reason"
            assert planner.refuse(pair) == reason, "another answer to the same question"
            if reason is not None:
                return reason
        return None

    @pytest.fixture(params=CASES)
    def moved(self, request: pytest.FixtureRequest) -> Transfer:
        """Each case that the path does not refuse."""
        of = Transfer.of(CASES[request.param])
        reason = self.refusal(of)
        if reason is not None:
            pytest.skip(f"{self.planner().name} refuses: {reason}")
        return of

    def test_it_says_what_it_is(self) -> None:
        """A plain word, a number, and the mover of its plans."""
        planner = self.planner()
        assert planner.name.isidentifier()
        assert type(planner.version) is int
        assert planner.mover in get_args(MoverName)

    def test_it_can_carry_something(self) -> None:
        """A path that refuses every case of this suite was not tested."""
        refused = {name: self.refusal(Transfer.of(case)) for name, case in CASES.items()}
        assert None in refused.values(), refused

    def test_every_byte_arrives_and_no_other_is_touched(self, moved: Transfer) -> None:
        """All segments of all writers, one after the other, as endpoints would carry out the plans."""
        planner = self.planner()
        for part in moved.parts(exposes_pages(planner)):
            plan = planner.send(part.send)
            match plan:
                case PageCopy():
                    _copy(plan, part, moved.target)
                case Writes():
                    _write(plan, part, moved.target)
                case StagedLayout():
                    _stage(plan, planner.receive(part.receive), part, moved.target)
        moved.check()

    def test_the_same_question_has_the_same_answer(self, moved: Transfer) -> None:
        """Endpoints keep answers."""
        planner, again = self.planner(), self.planner()
        for part in moved.parts(exposes_pages(planner)):
            assert planner.send(part.send) == planner.send(part.send) == again.send(part.send)
            if not exposes_pages(planner):
                assert planner.receive(part.receive) == again.receive(part.receive)

    def test_the_count_is_a_bound_and_needs_no_tables(self, moved: Transfer) -> None:
        """``plan`` asks for it before pages are known."""
        planner = self.planner()
        for part in moved.parts(exposes_pages(planner)):
            plan = planner.send(part.send)
            posted = len(plan) if isinstance(plan, Writes) else 1
            assert planner.count(evolve(part.send, source_tables={}, target_tables={})) >= posted

    def test_pages_are_given_only_where_they_are_exposed(self, moved: Transfer) -> None:
        """The type of a plan is the path's for good: never writes into pages that decode did not expose."""
        planner = self.planner()
        kind = {"direct": "Writes", "mapped": "PageCopy", "staged": "StagedLayout"}[planner.mover]
        found = {type(planner.send(part.send)).__name__ for part in moved.parts(exposes_pages(planner))}
        assert found == {kind}


def _write(plan: Writes, part: Part, target: Side) -> None:
    """Carry out writes from buffer to buffer."""
    assert plan.total() == part.nbytes, f"{plan.total()} bytes are planned of {part.nbytes}"
    columns = (plan.local, plan.local_off, plan.remote, plan.remote_off, plan.nbytes)
    for local, at, remote, to, nbytes in zip(*(column.tolist() for column in columns), strict=True):
        source = bytes_of(part.source.pool.buffers[local])
        into = bytes_of(target.pool.buffers[remote])
        assert nbytes > 0, "a write of no bytes"
        assert min(at, to) >= 0, "a write before a buffer"
        assert at + nbytes <= len(source), "a read behind a buffer"
        assert to + nbytes <= len(into), "a write behind a buffer"
        into[to : to + nbytes] = source[at : at + nbytes]


def _copy(plan: PageCopy, part: Part, target: Side) -> None:
    """Copy from pages to pages."""
    for layout, side in ((plan.source, part.source), (plan.target, target)):
        assert layout.nbytes == part.nbytes, f"{layout.nbytes} bytes are planned of {part.nbytes}"
        _check_layout(layout, side.pool)
    source, into = Pages(part.source.pool, part.source.tables), Pages(target.pool, target.tables)
    CpuKernels().copy([PageMove(plan, source, into)], None)


def _stage(plan: StagedLayout, there: StagedLayout, part: Part, target: Side) -> None:
    """Gather, and scatter the same bytes."""
    for layout, side in ((plan, part.source), (there, target)):
        assert layout.nbytes == part.nbytes, f"{layout.nbytes} bytes are planned of {part.nbytes}"
        _check_layout(layout, side.pool)
    kernels, staging = CpuKernels(), new_buffer(part.nbytes, "cpu")
    kernels.gather(part.source.pool, [Move(plan, part.source.tables, 0)], staging, None)
    kernels.scatter(target.pool, [Move(there, target.tables, 0)], staging)


def _check_layout(layout: StagedLayout, pool: PagedPool) -> None:
    """The entries lie inside their planes and follow one another in staging, without a gap."""
    end = 0
    columns = (layout.plane, layout.first_unit, layout.units, layout.row_start, layout.row_stop, layout.offset)
    for number, first, units, start, stop, offset in zip(*(column.tolist() for column in columns), strict=True):
        assert 0 <= number < len(pool.site.planes), f"plane {number} of {len(pool.site.planes)}"
        held, unit_bytes = pool.view(number).shape[2:]
        assert 0 <= first < first + units <= held, f"units [{first}, {first + units}) of {held}"
        assert 0 <= start < stop, f"rows [{start}, {stop})"
        assert offset == end, f"plane {number} begins at byte {offset} of the part, not at {end}"
        end += (stop - start) * units * unit_bytes
    assert end == layout.nbytes, f"{end} bytes of a part of {layout.nbytes}"
