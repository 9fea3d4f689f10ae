"""How one room's bytes get to one decode rank: decided when the rank asks, planned per segment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from attrs import evolve, frozen

from ...core import FlowPlan, Transfer, Verify, verified
from ...core.wire.frames import Expect, WirePace, wire_pace
from ...core.wire.page_runs import tables_from_wire
from ...errors import ConfigurationError, LocalProtocolError, OversizeError, RemoteProtocolError
from ...geometry import shards_as
from ...ids import Rank, RoomId, room_name
from ...memory import MappedPool, MemoryPool
from ...planning import (
    UNLIMITED,
    Batch,
    Groups,
    InstancePlans,
    LayerRun,
    Limits,
    Pace,
    PageCopy,
    PairPlan,
    PartView,
    RankPlan,
    RowRange,
    Segment,
    StagedLayout,
    Writes,
    check_pages,
)
from ...strategies import (
    PER_CHUNK,
    Job,
    Schedule,
    Selection,
    Tables,
    TransferPlanner,
    exposes_pages,
    refusal,
)
from ...transports import Carrier, Flags
from ..expectation import check_start
from ..peers.handshake import EndpointInfo, RemoteEndpoint, page_rows
from ..peers.mapping import Mapping
from ..peers.session import PeerSession
from .read_pools import ReadPools

P = TypeVar("P", Writes, StagedLayout, PageCopy)
"""A plan."""

OnGroups = Callable[[range, Groups], None]
"""Called with a run of layers and the groups into which it is cut."""


@frozen
class Route:
    """How one room's bytes get to one decode rank.

    Args:
        remote: the rank.
        path: how they cross.
        carrier: what carries writes to the rank.
        pool: ours, as it reads it: where its cache has other dtypes, converted.
        pair: what this rank sends to it.
        view: that in our pool; routes with the same bytes have the same view.
        rank_plan: what it gets from all ranks.
        tables: its pages, where they are exposed.
        start: the first row that it awaits.
        verify: how much each side wants compared.
        mapped: its pool as it is mapped here, where the path copies into it.
        flags: its flag page, where the path exposes pages and the page is open here.
    """

    remote: RemoteEndpoint
    path: TransferPlanner
    carrier: Carrier
    pool: MemoryPool
    pair: PairPlan
    view: PartView
    rank_plan: RankPlan
    tables: Tables
    start: int
    verify: tuple[Verify, Verify]
    mapped: MappedPool | None = None
    flags: Flags | None = None

    def verifies(self, room: RoomId, segment: Segment) -> bool:
        """Whether decode compares a segment with checksums of ours."""
        return self.verify != ("off", "off") and verified(room, segment, *self.verify)

    def plan(self, kind: type[P], wanted: str, transfer: Transfer, tables: Tables) -> P:
        """What the path plans for a transfer: never more than the part, nor outside our pages.

        Raises:
            LocalProtocolError: it is of another ``kind`` or size than its mover has ``wanted``.
        """
        segment, site = transfer.segment, self.pool.site
        check_pages(site, self.view.layout(segment), tables)
        plan = self.path.send(Job(self.pair, segment, tables, self.tables))
        staged = plan.source if isinstance(plan, PageCopy) else plan
        fits = isinstance(staged, Writes) or staged.nbytes == transfer.nbytes
        if not isinstance(plan, kind) or not fits:
            planned = f"plans {type(plan).__name__}s for {segment}, which takes {wanted}"
            raise LocalProtocolError(f"path {self.path.name!r} {planned}")
        return plan


class Router:
    """Finds the route of a room towards a decode rank.

    Args:
        me: this endpoint.
        pools: its cache, as decode ranks read it.
        selection: which rows decode may leave out.
        paths: those that are known here.
        schedule: when rows cross.
        pace: how fast this rank is over a transport; None: nothing was measured yet.
        request_pages: see :class:`~disagg_kv.core.Options`.
        verify: how many segments this side wants compared.
    """

    def __init__(
        self,
        me: EndpointInfo,
        pools: ReadPools,
        selection: Selection,
        schedule: Schedule,
        paths: Iterable[TransferPlanner],
        pace: Callable[[str], Pace | None],
        request_pages: int,
        verify: Verify,
    ) -> None:
        self._verify: Verify = verify
        self._request_pages = request_pages
        self._me = me
        self._pools = pools
        self._selection = selection
        self._schedule = schedule
        self._pace = pace
        self._paths = {path.name: path for path in paths}

    def find(
        self,
        room: RoomId,
        session: PeerSession,
        remote: RemoteEndpoint,
        carrier: Carrier,
        frame: Expect,
        others: Sequence[Route],
        on_groups: OnGroups,
    ) -> tuple[Route, FlowPlan]:
        """Decide how the bytes cross.

        Args:
            room: which room.
            session: of the decode rank that awaits it.
            remote: what that rank announced.
            carrier: what carries writes there.
            frame: what it awaits.
            others: of the ranks of its instance that asked before.
            on_groups: called with each decision how layers are grouped.

        Raises:
            ConfigurationError: no path can.
            RemoteProtocolError: it awaits what cannot be.
        """
        me, hello = self._me, remote.hello
        starts = {Rank(route.remote.hello.rank): route.start for route in others if route.remote.site.token_groups}
        check_start(room_name(room), frame, remote.site, self._selection, Rank(hello.rank), starts)
        plans, mapping = session.plans, session.mapping
        if plans is None:
            held = shards_as(tuple(me.shards), me.site.spec, remote.spec)
            plans = session.plans = InstancePlans.of(held, remote.site)
        rotation, rows = plans.rotation(room), RowRange(frame.start, frame.stop)
        pool = self._pools.of(remote.spec)
        rank_plan, pair = plans.rank_plan(rotation).for_rows(rows), plans.pair(rotation, me.rank, pool.site, rows)
        if frame.tables is not None and not hello.regions:
            raise RemoteProtocolError("pages are exposed, but no memory of theirs is registered")
        path = self._path(frame, remote, pair, mapping)
        exposes = exposes_pages(path)
        limits = evolve(UNLIMITED, page_rows=page_rows(remote.site))
        if not frame.unsegmented:
            limits = cutting(rank_plan, me.rank, Limits(me.slot_bytes, hello.lease_bytes, limits.page_rows), path)
        tables = {} if frame.tables is None else tables_from_wire(frame.tables, self._request_pages)
        mapped = mapping.pool if path.mover == "mapped" else None
        flags, verify = mapping.flags if exposes else None, (self._verify, frame.verify)
        view = pair.source_view
        route = Route(remote, path, carrier, pool, pair, view, rank_plan, tables, frame.start, verify, mapped, flags)
        pace = None if frame.pace is None else Pace(*frame.pace)
        grouping = None
        if self._schedule.name != PER_CHUNK:
            grouping = partial(self._groups, carrier, rank_plan, on_groups, pace)
        plan = FlowPlan(
            me.rank,
            rank_plan,
            rank_plan.floor(frame.start),
            frame.stop,
            exposes,
            limits,
            grouping,
            partial(self._measured, carrier),
            None if flags is None else frame.flags,
            carrier.name,
        )
        return route, plan

    def _path(self, frame: Expect, remote: RemoteEndpoint, pair: PairPlan, mapping: Mapping) -> TransferPlanner:
        """The path that decode has chosen for the room.

        Raises:
            ConfigurationError: it cannot carry what this rank sends.
            RemoteProtocolError: decode does not do what the path needs.
        """
        path = self._paths.get(frame.path)
        if path is None or (path.name, path.version) not in remote.hello.paths:
            raise ConfigurationError(f"path {frame.path!r} is not known on both sides: {', '.join(self._paths)}")
        if exposes_pages(path) is (frame.tables is None):
            raise RemoteProtocolError(f"path {path.name!r} with{'out' * exposes_pages(path)} page tables")
        if path.mover == "mapped" and mapping.pool is None and pair.parts:
            raise ConfigurationError(f"path {path.name!r} cannot: {mapping.refused}")
        if pair.parts and (reason := refusal(path, pair)) is not None:
            raise ConfigurationError(f"path {path.name!r} cannot: {reason}")
        return path

    def _measured(self, carrier: Carrier) -> WirePace | None:
        pace = self._pace(carrier.name)
        return None if pace is None else wire_pace(pace.layer_token_s, pace.bytes_per_s, pace.group_s)

    def _groups(
        self,
        carrier: Carrier,
        rank_plan: RankPlan,
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
        if sum(run in rank_plan.ranges(Rank(rank)) for rank in range(len(rank_plan.parts))) == 1:
            pace = self._pace(carrier.name)
        sizes = [nbytes for _, nbytes in rank_plan.lease(Segment(start, stop, run.start, run.stop))[0].values()]
        groups = self._schedule.groups(LayerRun(len(run), stop - start, max(sizes, default=0), batch, pace))
        on_groups(run, groups)
        return groups.cut(run)


def cutting(rank_plan: RankPlan, writer: Rank, limits: Limits, path: TransferPlanner) -> Limits:
    """What cuts a chunk into segments; nothing, where a path that exposes pages could not stage a row.

    All writers of a segment come to the same result, as limits hold for all their parts together.

    Raises:
        OversizeError: one row of one layer is more than a slot or a lease.
    """
    try:
        rank_plan.segments(writer, 0, 1, limits)
    except OversizeError:
        if not exposes_pages(path):
            raise
        return evolve(UNLIMITED, page_rows=limits.page_rows)
    return limits


def taken(routes: Sequence[Route], theirs: RemoteEndpoint) -> str | None:
    """Why a decode rank cannot have a room: another instance has it, or another incarnation of this rank."""
    for route in routes:
        ours = route.remote
        if ours.hello.instance != theirs.hello.instance or len(ours.shards) != len(theirs.shards):
            return f"decode instance {ours.hello.instance!r} has this room already"
        if ours.hello.rank == theirs.hello.rank:
            return f"another incarnation of rank {theirs.hello.rank} has this room already"
    return None
