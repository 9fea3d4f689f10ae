"""How one room's bytes get to one decode rank: decided when the rank asks, planned per segment."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from itertools import count

import numpy as np
from attrs import field, frozen

from ...errors import LocalProtocolError, QuarantineFullError, RemoteProtocolError
from ...geometry import I32, Share
from ...ids import Epoch, Rank, RegionId, RoomId
from ...memory import MemoryPool
from ...planning import (
    Batch,
    CostModel,
    Groups,
    Intake,
    LayerRun,
    Limits,
    Pace,
    RowRange,
    Segment,
    StagedLayout,
    Writes,
)
from ...protocol import FlowPlan, Transfer, Verify
from ...protocol.frames import Expect, WirePace
from ...protocol.wire import tables_from_wire
from ...strategies import PER_CHUNK, Job, Schedule, Strategy, Tables, TransferPlanner
from ..runtime.cached_prefix import check_start
from ..runtime.handshake import EndpointInfo, RemoteEndpoint
from ..runtime.plan_cache import PlanCache
from .negative_cache import bound
from .path_choice import RankPair, choose_path

Told = Callable[[range, Groups], None]
"""Hears of a run of layers how it is cut."""

CHOICES = 4096
"""Choices of a path that are remembered: comparing them takes longer than sending a short request."""


ALIKE = 256
"""Choices that endpoints share, as they depend on values alone: those of a process that are split alike."""


@frozen
class _Known:
    """Paths, each equal to itself alone: nobody has to make one that can be compared."""

    paths: tuple[TransferPlanner, ...] = field(eq=lambda paths: tuple(map(id, paths)))


@lru_cache(ALIKE)
def _chosen(
    path: str, known: _Known, allowed: Sequence[str], exposed: bool, pair: RankPair, length: int, costs: CostModel
) -> tuple[TransferPlanner, str]:
    return choose_path(path, known.paths, allowed, exposed, pair, length, costs)


@frozen
class Route:
    """How one room's bytes get to one decode rank.

    Args:
        remote: the rank.
        path: how they cross; reason: why so.
        pair: the two ranks.
        tables: its pages, where they are exposed.
        share: ranks with equal numbers get the same bytes.
        ring: its ring.
        start: the first row that it awaits.
        verify: how much it wants compared.
    """

    remote: RemoteEndpoint
    path: TransferPlanner
    reason: str
    pair: RankPair
    tables: Tables
    share: tuple[int, RowRange]
    ring: RegionId
    start: int
    verify: Verify


class Router:
    """Decides, and remembers what was decided for whom.

    Args:
        me: this endpoint.
        pool: its cache.
        strategy: which path to take.
        paths: those that are known here.
        schedule: when rows cross.
        pace: how fast this rank is; None: nothing was measured yet.
    """

    def __init__(
        self,
        me: EndpointInfo,
        pool: MemoryPool,
        strategy: Strategy,
        schedule: Schedule,
        paths: Iterable[TransferPlanner],
        pace: Callable[[], Pace | None],
    ) -> None:
        self._me = me
        self._pool = pool
        self._strategy = strategy
        self._schedule = schedule
        self._pace = pace
        self._paths = tuple(paths)
        self._regions: I32 = np.array(me.regions, np.int32)
        caps = me.transport.caps
        self._costs = CostModel(write_s=caps.write_s, bytes_per_s=caps.bytes_per_s)
        self._routes: dict[Epoch, PlanCache] = {}
        self._shares: OrderedDict[tuple[Share, ...], int] = OrderedDict()
        self._numbers = count()
        self._choices: OrderedDict[tuple[Epoch, int, tuple[str, ...], bool, int], tuple[TransferPlanner, str]] = (
            OrderedDict()
        )

    def forget(self, epoch: Epoch) -> None:
        """A decode rank is lost."""
        self._routes.pop(epoch, None)

    def find(
        self,
        room: RoomId,
        remote: RemoteEndpoint,
        frame: Expect,
        others: Sequence[Route],
        stuck: int,
        quota: int,
        told: Told,
    ) -> tuple[Route, FlowPlan]:
        """Decide how the bytes cross.

        Args:
            room: which room.
            remote: who awaits it.
            frame: what it awaits.
            others: of the ranks of its instance that asked before.
            stuck: staging slots that wait for evidence of this destination.
            quota: staging slots that one destination may pin.
            told: hears how layers are grouped.

        Raises:
            ConfigurationError: no path can.
            QuarantineFullError: too many staging slots wait for evidence of this destination.
            RemoteProtocolError: it awaits what cannot be.
        """
        me, hello = self._me, remote.hello
        starts = {Rank(route.remote.hello.rank): route.start for route in others if route.remote.site.token_groups}
        check_start(f"room {room.hex()}", frame, remote.site, self._strategy.selection, Rank(hello.rank), starts)
        if remote.epoch not in self._routes:
            self._routes[remote.epoch] = PlanCache(me.shards, remote.site)
        routes, site = self._routes[remote.epoch], self._pool.site
        rows = RowRange(frame.start, frame.stop)
        intake, view = routes.intake(room).for_rows(rows), routes.view(room, me.rank, site).for_rows(rows)
        limits = Limits(me.slot_bytes, hello.lease_bytes, remote.page_rows())
        pair = RankPair(me.rank, site, remote.site, intake, view, limits)
        if frame.tables is not None and not hello.regions:
            raise RemoteProtocolError("pages are exposed, but no memory of theirs is registered")
        path, reason = self._choose(remote, routes.rotation(room), frame, pair)
        if not path.exposes_pages and stuck >= quota:
            raise QuarantineFullError(f"{remote.name}: {stuck} staging slots wait for evidence")
        pair = pair.fitted()
        share = self._share(tuple(pair.parts))
        tables = {} if frame.tables is None else tables_from_wire(frame.tables)
        ring = RegionId(hello.ring_region)
        route = Route(remote, path, reason, pair, tables, (share, intake.room), ring, frame.start, frame.verify)
        pace = None if frame.pace is None else Pace(*frame.pace)
        grouping = None if self._schedule.name == PER_CHUNK else partial(self._groups, intake, told, pace)
        plan = FlowPlan(
            me.rank,
            intake,
            intake.floor(frame.start),
            frame.stop,
            path.exposes_pages,
            pair.limits,
            path.name,
            grouping,
            self._measured,
        )
        return route, plan

    def _share(self, parts: tuple[Share, ...]) -> int:
        """A number for these parts, never used for others: what was forgotten is only gathered once more."""
        if parts not in self._shares:
            self._shares[parts] = next(self._numbers)
            bound(self._shares, CHOICES)
        return self._shares[parts]

    def _measured(self) -> WirePace | None:
        pace = self._pace()
        return None if pace is None else (pace.layer_token_s, pace.bytes_per_s, pace.group_s)

    def _groups(
        self, intake: Intake, told: Told, pace: Pace | None, run: range, start: int, stop: int, batch: Batch
    ) -> Sequence[range]:
        """How a run of layers is cut: equal on all ranks that hold it, so they go by what decode has told all of them.

        It tells what one of them measured, in its last room with this instance. A rank that is alone knows better.
        """
        if sum(run in intake.ranges(Rank(rank)) for rank in range(len(intake.parts))) == 1:
            pace = self._pace()
        sizes = [nbytes for _, nbytes in intake.lease(Segment(start, stop, run.start, run.stop))[0].values()]
        groups = self._schedule.groups(LayerRun(len(run), stop - start, max(sizes, default=0), batch, pace))
        told(run, groups)
        return groups.cut(run)

    def _choose(
        self, remote: RemoteEndpoint, rotation: int, frame: Expect, pair: RankPair
    ) -> tuple[TransferPlanner, str]:
        theirs = set(remote.hello.paths)
        known = [p for p in self._paths if (p.name, p.version) in theirs]
        most = max((g.rows_per_page * g.pages for g in self._pool.site.groups), default=1)
        length = 0 if frame.stop is None else min(_rounded(frame.stop - frame.start), most)
        exposed = frame.tables is not None
        key = (remote.epoch, rotation, frame.paths, exposed, length)
        if key not in self._choices:
            chosen = _chosen(self._strategy.path, _Known(tuple(known)), frame.paths, exposed, pair, length, self._costs)
            self._choices[key] = chosen
            bound(self._choices, CHOICES)
        return self._choices[key]

    def plan(self, route: Route, transfer: Transfer, tables: Tables) -> Writes | StagedLayout:
        """What to post or to gather: never more than the part, nor outside the ring that the peer told us of."""
        hello, name, segment = route.remote.hello, route.path.name, transfer.segment
        pair = route.pair
        job = Job(pair.source, pair.target, pair.parts, pair.view, segment, tables, route.tables, pair.intake.room)
        plan = route.path.send(job)
        if transfer.offset is None and isinstance(plan, Writes):
            return plan.renamed(self._regions, np.array(hello.regions, np.int32))
        if transfer.offset is None or isinstance(plan, Writes) or plan.nbytes != transfer.nbytes:
            wanted = "writes into pages" if transfer.offset is None else f"a layout of {transfer.nbytes} bytes"
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


def _rounded(rows: int) -> int:
    """Up to a power of two, as far as the choice of a path is concerned."""
    return 1 << (rows - 1).bit_length() if rows > 0 else rows
