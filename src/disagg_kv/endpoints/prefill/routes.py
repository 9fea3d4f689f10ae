"""How one room's bytes get to one decode rank: decided when the rank asks, planned per segment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
from attrs import evolve, frozen

from ...core import FlowPlan, Transfer, Verify
from ...core.wire.frames import Expect, WirePace, wire_pace
from ...core.wire.page_runs import tables_from_wire
from ...errors import LocalProtocolError, QuarantineFullError, RemoteProtocolError
from ...geometry import I32, shards_as
from ...ids import Epoch, Rank, RegionId, RoomId, room_name
from ...memory import MappedPool, MemoryPool
from ...planning import (
    Batch,
    CostModel,
    Groups,
    InstancePlans,
    Intake,
    LayerRun,
    Limits,
    Pace,
    PageCopy,
    PairPlan,
    PartView,
    RowRange,
    Segment,
    StagedLayout,
    Writes,
    check_pages,
    check_tables,
)
from ...strategies import PER_CHUNK, Job, Schedule, Strategy, Tables, TransferPlanner, maps_pages
from ...transports import Bells, Lane
from ..cached_prefix import check_start
from ..peers.handshake import EndpointInfo, RemoteEndpoint
from ..peers.mapping import Mapping
from .lane_rates import LaneRates
from .path_choice import PathChooser, PathRequest, segment_limits
from .read_pools import ReadPools

Plan = Writes | StagedLayout | PageCopy
"""What a transfer does: writes into exposed pages, a gather, or a copy into mapped pages."""

OnGroups = Callable[[range, Groups], None]
"""Called with a run of layers and the groups into which it is cut."""


@frozen
class Route:
    """How one room's bytes get to one decode rank.

    Args:
        remote: the rank.
        path: how they cross; reason: why so.
        lane: what carries writes to the rank.
        pool: ours, as it reads it: where its cache has other dtypes, converted.
        pair: what this rank sends to it.
        view: that in our pool; routes with the same bytes have the same view.
        intake: what it gets from all ranks.
        tables: its pages, where they are exposed.
        ring: its ring.
        start: the first row that it awaits.
        verify: how much it wants compared.
        mapped: its pool as it is mapped here, where the path copies into it.
        bells: its board of bells, where the path exposes pages and the board is open here.
    """

    remote: RemoteEndpoint
    path: TransferPlanner
    reason: str
    lane: Lane
    pool: MemoryPool
    pair: PairPlan
    view: PartView
    intake: Intake
    tables: Tables
    ring: RegionId
    start: int
    verify: Verify
    mapped: MappedPool | None = None
    bells: Bells | None = None


class Router:
    """Finds the route of a room towards a decode rank, and plans its transfers.

    ``rates`` is how fast the lanes are: the writes are measured, and the choice of a path reads the result.

    Args:
        me: this endpoint.
        pools: its cache, as decode ranks read it.
        strategy: which path to take.
        paths: those that are known here.
        schedule: when rows cross.
        pace: how fast this rank is over a lane; None: nothing was measured yet.
        mapping: the pool of a decode rank, as it is mapped here.
        request_pages: see :class:`~disagg_kv.core.Options`.
        lane: what carries writes to a decode rank.
        clock: seconds.
    """

    def __init__(
        self,
        me: EndpointInfo,
        pools: ReadPools,
        strategy: Strategy,
        schedule: Schedule,
        paths: Iterable[TransferPlanner],
        pace: Callable[[str], Pace | None],
        mapping: Callable[[Epoch], Mapping],
        request_pages: int,
        lane: Callable[[Epoch], Lane],
        clock: Callable[[], float],
    ) -> None:
        self._lane = lane
        self._mapping = mapping
        self._request_pages = request_pages
        self._me = me
        self._pools = pools
        self._strategy = strategy
        self._schedule = schedule
        self._pace = pace
        self.rates = LaneRates(clock)
        self._regions: I32 = np.array(me.regions, np.int32)
        self._chooser = PathChooser(strategy.path, tuple(paths))
        self._plans: dict[Epoch, InstancePlans] = {}

    def forget(self, epoch: Epoch) -> None:
        """A decode rank is lost."""
        self._plans.pop(epoch, None)
        self._chooser.forget(epoch)

    def find(
        self,
        room: RoomId,
        remote: RemoteEndpoint,
        frame: Expect,
        others: Sequence[Route],
        stuck: int,
        quota: int,
        on_groups: OnGroups,
    ) -> tuple[Route, FlowPlan]:
        """Decide how the bytes cross.

        Args:
            room: which room.
            remote: who awaits it.
            frame: what it awaits.
            others: of the ranks of its instance that asked before.
            stuck: staging slots that wait for evidence of this destination.
            quota: staging slots that one destination may pin.
            on_groups: called with each decision how layers are grouped.

        Raises:
            ConfigurationError: no path can.
            QuarantineFullError: too many staging slots wait for evidence of this destination.
            RemoteProtocolError: it awaits what cannot be.
        """
        me, hello = self._me, remote.hello
        starts = {Rank(route.remote.hello.rank): route.start for route in others if route.remote.site.token_groups}
        check_start(room_name(room), frame, remote.site, self._strategy.selection, Rank(hello.rank), starts)
        plans = self._plans.get(remote.epoch)
        if plans is None:
            held = shards_as(tuple(me.shards), me.site.spec, remote.spec)
            plans = self._plans[remote.epoch] = InstancePlans.of(held, remote.site)
        rotation, rows = plans.rotation(room), RowRange(frame.start, frame.stop)
        pool = self._pools.of(remote.spec)
        intake, pair = plans.intake(rotation).for_rows(rows), plans.pair(rotation, me.rank, pool.site, rows)
        if frame.tables is not None and not hello.regions:
            raise RemoteProtocolError("pages are exposed, but no memory of theirs is registered")
        limits = Limits(me.slot_bytes, hello.lease_bytes, remote.page_rows())
        exposed, length = frame.tables is not None, self._length(frame)
        mapping = self._mapping(remote.epoch)
        unmapped = mapping.refused if mapping.pool is None else None
        request = PathRequest(pair, intake, me.rank, limits, frame.paths, exposed, length, unmapped, frame.uncut)
        lane = self._lane(remote.epoch)
        costs = CostModel.of_lane(lane.caps.write_s, lane.caps.bytes_per_s, me.device, unmapped is None)
        costs = evolve(costs, measured=self.rates.of(lane))
        choice = self._chooser.choose(remote.epoch, rotation, hello.paths, request, costs)
        path = choice.path
        if not path.exposes_pages and stuck >= quota:
            raise QuarantineFullError(f"{remote.name}: {stuck} staging slots wait for evidence")
        tables = {} if frame.tables is None else tables_from_wire(frame.tables, self._request_pages)
        ring = RegionId(hello.ring_region)
        mapped = mapping.pool if maps_pages(path) else None
        known = pair, pair.source_view, intake, tables
        bells = mapping.bells if path.exposes_pages else None
        route = Route(remote, path, choice.reason, lane, pool, *known, ring, frame.start, frame.verify, mapped, bells)
        pace = None if frame.pace is None else Pace(*frame.pace)
        grouping = None if self._schedule.name == PER_CHUNK else partial(self._groups, lane, intake, on_groups, pace)
        plan = FlowPlan(
            me.rank,
            intake,
            intake.floor(frame.start),
            frame.stop,
            path.exposes_pages,
            segment_limits(request),
            path.name,
            grouping,
            partial(self._measured, lane),
            None if bells is None else frame.bells,
            lane.name,
            choice.unstaged,
        )
        return route, plan

    def _measured(self, lane: Lane) -> WirePace | None:
        pace = self._pace(lane.name)
        return None if pace is None else wire_pace(pace.layer_token_s, pace.bytes_per_s, pace.group_s)

    def _groups(
        self,
        lane: Lane,
        intake: Intake,
        on_groups: OnGroups,
        pace: Pace | None,
        run: range,
        start: int,
        stop: int,
        batch: Batch,
    ) -> Sequence[range]:
        """How a run of layers is cut: equal on all ranks that hold it, so they go by the pace in decode's ``Expect``.

        One of them measured it in its last room with this instance. A rank that holds the run alone uses its own pace.
        """
        if sum(run in intake.ranges(Rank(rank)) for rank in range(len(intake.parts))) == 1:
            pace = self._pace(lane.name)
        sizes = [nbytes for _, nbytes in intake.lease(Segment(start, stop, run.start, run.stop))[0].values()]
        groups = self._schedule.groups(LayerRun(len(run), stop - start, max(sizes, default=0), batch, pace))
        on_groups(run, groups)
        return groups.cut(run)

    def _length(self, frame: Expect) -> int:
        """Rows of the request for the choice of its path: up to a power of two, and to the pool; 0: not known."""
        if frame.stop is None or frame.stop <= frame.start:
            return 0
        most = max((g.rows_per_page * g.pages for g in self._me.site.groups), default=1)
        return min(1 << (frame.stop - frame.start - 1).bit_length(), most)

    def plan(self, route: Route, transfer: Transfer, tables: Tables) -> Plan:
        """What to post, to gather or to copy: never more than the part, nor outside the peer's ring or its pages."""
        hello, name, segment = route.remote.hello, route.path.name, transfer.segment
        site = route.pool.site
        check_pages(site, route.view.layout(segment), tables)
        plan = route.path.send(Job(route.pair, segment, tables, route.tables))
        if route.mapped is not None and isinstance(plan, PageCopy) and plan.source.nbytes == transfer.nbytes:
            check_tables(site, plan.source, tables)
            check_tables(route.remote.site, plan.target, route.tables)
            return plan
        if transfer.offset is None and route.mapped is None and isinstance(plan, Writes) and not site.conversions:
            return plan.renamed(self._regions, np.array(hello.regions, np.int32))
        if transfer.offset is None or not isinstance(plan, StagedLayout) or plan.nbytes != transfer.nbytes:
            wanted = f"a layout of {transfer.nbytes} bytes" if transfer.offset is not None else "writes into pages"
            if route.mapped is not None:
                wanted = f"a copy of {transfer.nbytes} bytes"
            raise LocalProtocolError(f"path {name!r} plans {type(plan).__name__}s for {segment}, which takes {wanted}")
        if transfer.offset + transfer.nbytes > hello.ring_bytes:
            end = transfer.offset + transfer.nbytes
            granted = f"granted bytes {transfer.offset}-{end} of a ring of {hello.ring_bytes}"
            raise RemoteProtocolError(f"{route.remote.name}: {granted}")
        return plan


def taken(routes: Sequence[Route], theirs: RemoteEndpoint) -> str | None:
    """Why a decode rank cannot have a room: another instance has it, or another life of this rank."""
    for route in routes:
        ours = route.remote
        if ours.hello.instance != theirs.hello.instance or len(ours.shards) != len(theirs.shards):
            return f"decode instance {ours.hello.instance!r} has this room already"
        if ours.hello.rank == theirs.hello.rank:
            return f"another life of rank {theirs.hello.rank} has this room already"
    return None
