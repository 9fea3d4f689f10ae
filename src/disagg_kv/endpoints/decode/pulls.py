"""Pulls: kernels of this process copy from mapped pages of prefill ranks into our pages.

Theory of operation
===================

The direction of path ``mapped`` in which no process writes into memory of another::

    prefill rank                                   decode rank
    rows are final
    ChunkReady, with an offer of its pages  ---->  pull: a kernel reads those pages and writes ours
    (pages stay)                                   the kernel has ended
    free to go                              <----  Landed

A part is offered once per attempt, by the frame that is repeated until ``Landed``, and pulled once however often the
frame comes. It arrives when its kernel has ended, so all that follows (counting, ``Done``, votes) is as on other paths.
Each writer's part is pulled by itself: a writer may have to wait for ``Landed`` before its engine computes the rows
that other writers wait for. One planner serves both directions: ``page_copy`` names both pools, and the kernel is the
same. Layer groups, incremental transfers, states, aux and comparisons do not know the direction.

What each ending means:

* *The room fails here.* Pages are free once our own kernels have ended: no peer writes, so no evidence about a peer is
  needed. What is not launched yet is dropped. Each writer gets an ``Abort`` and answers ``Drained``.
* *The room fails at prefill.* What was offered stays offered until ``DrainedAck``. This side sends that only while
  none of its kernels reads pages of that writer for the room, and begins to read none after it. A room that has ended
  answers from its tombstone, since it does not end while a kernel runs.
* *Prefill's engine takes its pages away.* It waits until what was offered has landed; nothing more is offered.
* *This side is silent, or paused.* Prefill's room fails after its silence, and its pages stay withheld. A kernel that
  runs late reads what was offered, so a success that is reported late has right bytes.
* *This side ends.* ``Gone``, which is the observed end of the process or the operator's word, frees prefill's pages.
* *Prefill ends.* A mapping outlives its owner, so kernels that run end soundly. The room fails unless everything has
  landed.

An event that raises fails the room, and proves nothing. It is asked again until it has happened; until then our pages
and the writer's stay held. What a kernel reads stays mapped until its event has happened, or the process ends, also
where the endpoint has closed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from attrs import define, field

from ...core import Pull, Pulled
from ...core.wire.page_runs import tables_from_wire
from ...errors import ConfigurationError, GeometryError, IntegrityError, LocalProtocolError, RemoteProtocolError
from ...geometry import CacheSpec
from ...ids import Rank
from ...kernels import Kernels, PageMove, Pages, SupportsStreams, SupportsWarmUp
from ...memory import Event, MappedPool, MemoryPool
from ...planning import PageCopy, PairPlan, Segment, check_tables
from ...strategies import Job, TransferPlanner
from ...trace import Span
from ..checksums import compare, layer_sums
from ..loop.event_loop import EventLoop
from .rate_limit import RateLimiter
from .room import DecodeRoom

ENTRIES = 256
"""Planes of parts that one launch takes, about, as for scatters."""


@define(eq=False)
class _Pulling:
    """A pull, from when it is planned until nothing of it reads or writes.

    Args:
        room, what: for which room, and what.
        started: when.
        moves: what the launch copies; they keep the memory mapped.
        events: its ends: of the copy, and of the comparison.
        check: compares sums once all events have happened.
        error: why it has failed.
        nbytes: how much it copies.
    """

    room: DecodeRoom
    what: Pull
    started: float
    moves: Sequence[PageMove] = ()
    events: list[Event] = field(factory=list)
    check: Callable[[], IntegrityError | None] | None = None
    error: Exception | None = None
    nbytes: int = 0

    def over(self) -> bool:
        """Whether nothing of it reads or writes any more."""
        self.events = [event for event in self.events if not event.query()]
        return not self.events


_COMPILING = threading.Lock()
"""Threads that connect peers at once need the same kernels: one compiles them, and the others find them."""

_RUNNING: dict[_Pulling, None] = {}
"""Pulls of all endpoints of this process, closed ones too, whose events are not known to have happened."""


def warm_pulls(kernels: Kernels, pool: MemoryPool, spec: CacheSpec, mapped: MappedPool | None) -> None:
    """Compile copies from a mapped pool with this spec into ours. Blocks; on any thread."""
    if isinstance(kernels, SupportsWarmUp) and mapped is not None and spec == pool.site.spec:
        with _COMPILING:
            kernels.warm_copy(mapped, pool)


class PullQueue:
    """Runs on the endpoint's thread only.

    Args:
        loop: the endpoint's: its clock.
        pool: ours.
        kernels: copy and sum.
        pair: what a prefill rank sends of what a room awaits.
        pace: how fast rows may come.
    """

    def __init__(
        self,
        loop: EventLoop,
        pool: MemoryPool,
        kernels: Kernels,
        pair: Callable[[DecodeRoom, Rank], PairPlan],
        pace: RateLimiter | None,
    ) -> None:
        self._loop = loop
        self._pool = pool
        self._kernels = kernels
        self._together = isinstance(kernels, SupportsStreams)
        self._pair = pair
        self._pace = pace
        self._paths: dict[str, TransferPlanner] = {p.name: p for p in loop.me.paths}
        self._waiting: deque[tuple[DecodeRoom, Pull]] = deque()
        self._barred: list[tuple[DecodeRoom, Pull]] = []
        self._over: deque[tuple[DecodeRoom, Pulled]] = deque()
        self.running: list[_Pulling] = []
        self.failed: list[_Pulling] = []

    def add(self, room: DecodeRoom, what: Pull) -> None:
        """A writer offers a part."""
        self._barred.append((room, what))
        self._admit()

    def _admit(self) -> None:
        """Queue what may be written to its pages now, in the order in which it came."""
        barred, self._barred = self._barred, []
        for room, what in barred:
            try:
                writable = room.writable()
            except Exception as exc:
                self._over.append((room, Pulled(what.segment, what.rank, exc)))
                continue
            (self._waiting if writable else self._barred).append((room, what))

    @property
    def ready_at(self) -> float | None:
        """When the pace lets the next one begin; None: nothing waits for it."""
        return self._pace.ready_at if self._waiting and self._pace is not None else None

    @property
    def active(self) -> bool:
        """Whether there is anything to do or to take."""
        return bool(self.running or self.failed or self._waiting or self._barred or self._over)

    @property
    def unlaunched(self) -> int:
        """Pulls that are not launched yet."""
        return len(self._waiting) + len(self._barred)

    def work(self) -> bool:
        """Go on with pulls that run, and begin others; True while one runs, or is left for the next step."""
        budget = self._loop.budget()
        self._look()
        self._look_at_failed()
        while budget.take() and self._start():
            pass
        return bool(self.running or self._barred) or budget.spent

    def _look(self) -> None:
        """Take the pulls that have ended out of those that run, and queue those whose pages may be written now."""
        if self._barred:
            self._admit()
        for one in list(self.running):
            try:
                if not one.over():
                    continue
            except Exception as exc:
                self.running.remove(one)
                self.failed.append(one)
                self._end(one, one.error or exc, quiet=False)
                continue
            self.running.remove(one)
            self._ended(one)

    def _look_at_failed(self) -> None:
        """Take the pulls that failed and are proved to have ended."""
        for one in list(self.failed):
            try:
                if not one.over():
                    continue
            except Exception:
                continue  # Its room has failed with the first such error; its pages stay held.
            self.failed.remove(one)
            del _RUNNING[one]
            self._end(one, None)

    def outcome(self) -> tuple[DecodeRoom, Pulled] | None:
        """How the next pull went, of those of which something is known; None: there is none."""
        return self._over.popleft() if self._over else None

    def _start(self) -> bool:
        """Begin what may begin now, in one launch; False: nothing may."""
        begun: list[_Pulling] = []
        entries = 0
        while self._waiting and (self._together or not begun) and entries < ENTRIES:
            room, what = self._waiting[0]
            failed = room.machine.error is not None
            if not failed and self._pace is not None and not self._pace.ready(self._loop.now):
                break
            self._waiting.popleft()
            one = _Pulling(room, what, self._loop.clock())
            if failed:
                self._end(one, None)
                continue
            try:
                move = self._move(room, what)
            except Exception as exc:
                # A path may be foreign code, and tables come from the peer: their errors fail this room alone.
                self._end(one, exc)
                continue
            one.moves, one.nbytes = (move,), move.copy.target.nbytes
            if self._pace is not None:
                self._pace.begin(one.nbytes, self._loop.now)
            begun.append(one)
            entries += len(move.copy.target.plane)
        if begun:
            self._loop.flush()
            self._launch(begun)
        return bool(begun)

    def _launch(self, begun: Sequence[_Pulling]) -> None:
        moves = [move for one in begun for move in one.moves]
        try:
            event = self._kernels.copy(moves, None)
        except Exception as exc:
            # Kernels raise before they have launched anything, or once all that they copied is done.
            if len(begun) > 1:
                # One of them is at fault, or they are too many for one launch.
                for single in begun:
                    self._launch([single])
                return
            self._end(begun[0], exc)
            return
        for one in begun:
            one.moves = moves
            one.events = [] if event is None else [event]
            _RUNNING[one] = None
            if one.what.sums is not None:
                try:
                    self._compare(one, one.what.sums, event)
                except Exception as exc:
                    # The copy goes on, whatever fails after it.
                    one.error = exc
            if one.events:
                self.running.append(one)
            else:
                self._ended(one)

    def _ended(self, one: _Pulling) -> None:
        """Nothing of it reads or writes any more."""
        del _RUNNING[one]
        error = one.error
        if error is None and one.check is not None:
            try:
                error = one.check()
            except Exception as exc:
                error = exc
        self._end(one, error)

    def _end(self, one: _Pulling, error: Exception | None, *, quiet: bool = True) -> None:
        if one.moves and quiet:
            now, what = self._loop.clock(), one.what
            one.room.handle.report.spend("pull", now - one.started)
            if self._loop.observed:
                labels = {**what.segment.labels(), "peer": one.room.remotes[what.rank].epoch.hex()}
                self._loop.observer.span(Span("pull", one.room.key.room, one.started, now, one.nbytes, labels=labels))
        self._over.append((one.room, Pulled(one.what.segment, one.what.rank, error, quiet)))

    def _move(self, room: DecodeRoom, what: Pull) -> PageMove:
        """What to copy: never from outside the peer's pages, nor to outside ours."""
        assert room.wanted is not None
        ours, remote = room.wanted.tables, room.remotes[what.rank]
        theirs = tables_from_wire(what.offer.tables, self._loop.options.request_pages)
        pair, path = self._pair(room, what.rank), self._paths[what.offer.path]
        source = room.sources.get(what.rank)
        if source is None:
            raise ConfigurationError(f"{remote.name}: its pages are not mapped here")
        plan = path.send(Job(pair, what.segment, theirs, ours))
        if not isinstance(plan, PageCopy) or plan.target.nbytes != pair.target_view.layout(what.segment).nbytes:
            raise LocalProtocolError(f"path {path.name!r} plans no copy of the part of {what.segment}")
        try:
            check_tables(source.site, plan.source, theirs)
        except GeometryError as exc:
            raise RemoteProtocolError(f"{remote.name} offers pages that cannot be: {exc}") from exc
        check_tables(self._pool.site, plan.target, ours)
        return PageMove(plan, Pages(source, theirs), Pages(self._pool, ours))

    def _compare(self, one: _Pulling, theirs: bytes, after: Event | None) -> None:
        """Sum our pages behind the copy; compared is when the sums are there."""
        room, segment, rank = one.room, one.what.segment, one.what.rank
        assert room.wanted is not None
        site, tables = self._pool.site, room.wanted.tables
        layouts = {rank: self._pair(room, rank).target_view.layout(segment)}
        began = self._loop.clock()
        sums = layer_sums(self._kernels, self._pool, segment, layouts, tables, after)
        room.handle.report.spend("checksum", self._loop.clock() - began)
        if sums.event is not None:
            one.events.append(sums.event)
        paths = {rank: one.what.offer.path}
        one.check = lambda: compare(room.name, site, segment, tables, layouts, {rank: theirs}, sums.read(), paths)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every room knows of the pulls that may still read or write for it, and more."""
        known: dict[DecodeRoom, set[tuple[Segment, Rank]]] = {}
        for one in (*self.running, *self.failed):
            known.setdefault(one.room, set()).add((one.what.segment, one.what.rank))
        for room, what in (*self._waiting, *self._barred):
            known.setdefault(room, set()).add((what.segment, what.rank))
        for room, pulls in known.items():
            parts = room.machine.inspect().parts
            assert all(rank in parts[segment].pulling for segment, rank in pulls), pulls
