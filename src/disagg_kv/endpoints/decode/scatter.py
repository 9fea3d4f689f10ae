"""From the ring into pages: prepared while bytes are on their way, launched when the pace allows it.

A launch costs the host most when the endpoint's thread has slept. Where kernels support it, nearly all of that work is
done when the lease is granted. Segments that are not prepared and have come together are one launch.

Calls go one way: the endpoint's side adds what has arrived, calls ``look``, ``start`` and ``prepare_one`` in each step
of its loop, and takes what has ended (``outcome``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from attrs import define, frozen

from ... import arguments
from ...core import Prepare, RoomKey, Scatter, Scattered
from ...errors import IntegrityError
from ...geometry import read_as
from ...ids import Rank
from ...kernels import Kernels, Move, Prepared, SupportsPreparing, SupportsStreams
from ...memory import Buffer, Event, MemoryPool
from ...planning import PairPlan, RowRange, Segment
from ...strategies import Job
from ...trace import Span
from ..checksums import compare, layer_sums
from ..loop.event_loop import EventLoop
from ..prepared import PreparedLaunches
from .room import DecodeRoom

ENTRIES = 256
"""Planes of parts that one launch takes, about: what it needs for them, and for as many pages, was allocated before."""

SCATTER_BYTES_PER_S = 100e9
"""The default: 5 % of the time of an H200 that scatters 2.09e12 bytes a second, which is more than a 400 Gbit/s wire
brings (benchmarks/results/h200_kernels.json counts reads and writes)."""

BURST_S = 0.02
"""Seconds of the pace that may be used at once after a pause: what arrives within one step of decoding. A request of 1
or 2 GiB then comes as fast as NVLink brings it. It costs the step in which it comes 1 ms of an H200's scatter rate."""


class RateLimiter:
    """A token bucket. Work of any size passes, and what follows waits the longer.

    Args:
        bytes_per_s: the pace.
        burst_s: seconds of it that a pause saves up.

    Attributes:
        ready_at: when the next piece of work may begin.

    Raises:
        ConfigurationError: a number that is not positive.
    """

    def __init__(self, bytes_per_s: float, burst_s: float = BURST_S) -> None:
        self._pace = arguments.positive(bytes_per_s, "scatter_bytes_per_s")
        self._burst = arguments.seconds(burst_s, "burst_s")
        self.ready_at = float("-inf")

    def ready(self, now: float) -> bool:
        """Whether work may begin now."""
        return now >= self.ready_at

    def begin(self, nbytes: int, now: float) -> None:
        """Begin work of ``nbytes`` bytes; unused time counts up to the burst."""
        self.ready_at = max(self.ready_at, now - self._burst) + nbytes / self._pace


@define(eq=False)
class _Scattering:
    """A scatter and, where there is one, the comparison of what it brought; ``error``: that could not begin."""

    room: DecodeRoom
    segment: Segment
    started: float
    event: Event | None = None
    error: Exception | None = None
    check: Callable[[], IntegrityError | None] | None = None
    comparing: float = 0.0


_Begun = tuple[_Scattering, Scatter, list[Move]]
_At = tuple[RoomKey, Segment]
_Order = tuple[DecodeRoom, Prepare]
_Places = Mapping[Rank, int]


@frozen(eq=False)
class _PreparedScatter:
    """A prepared launch for parts that have ``nbytes`` together."""

    nbytes: int
    prepared: Prepared

    def drop(self) -> None:
        """See :class:`~disagg_kv.endpoints.prepared.Launch`."""
        self.prepared.drop()


class ScatterQueue:
    """Runs on the thread that advances.

    A segment is prepared when its parts' places are known, one in a step and after all that is urgent. A prepared
    launch belongs to the segment's lease: the side calls :meth:`drop` when that ends.

    Arrivals must not hold up what is being decoded, so each waits until the pace allows it. What may begin in one
    step is one launch where kernels are queued on a GPU; a CPU scatters one segment after another, so that the ring
    gets its bytes back as early as it can.

    Attributes:
        waiting: segments that have arrived.
        barred: those of them whose pages may not be written yet.
        running: scatters that were launched and have not ended.
        prepared: what is prepared, and what is to be.
    """

    def __init__(
        self,
        loop: EventLoop,
        pool: MemoryPool,
        ring: Buffer,
        kernels: Kernels,
        pace: RateLimiter | None,
    ) -> None:
        self._loop = loop
        self._pool = pool
        self._ring = ring
        self._kernels = kernels
        self._together = self.queues = isinstance(kernels, SupportsStreams)
        self._preparing = kernels if isinstance(kernels, SupportsPreparing) else None
        self._pace = pace
        self.waiting: deque[tuple[DecodeRoom, Scatter]] = deque()
        self.barred: list[tuple[DecodeRoom, Scatter]] = []
        self.running: list[_Scattering] = []
        self._over: deque[tuple[_Scattering, Exception | None]] = deque()
        self.prepared: PreparedLaunches[_At, _Order, _Places, _PreparedScatter] = PreparedLaunches(loop, "scatters")

    def prepare(self, room: DecodeRoom, effect: Prepare) -> None:
        """A segment will arrive there."""
        if self._preparing is not None:
            self.prepared.waiting[room.key, effect.segment] = room, effect

    def add(self, room: DecodeRoom, effect: Scatter) -> None:
        """A segment has arrived: what is prepared for it, and need not wait, is launched before this thread goes on."""
        if room.ready is not None:
            self.barred.append((room, effect))
            self._admit()
        else:
            self._enqueue(room, effect)

    def _admit(self) -> None:
        """Queue what has arrived for pages that may be written now."""
        barred, self.barred = self.barred, []
        for room, effect in barred:
            try:
                writable = room.writable()
            except Exception as exc:
                self._over.append((_Scattering(room, effect.segment, self._loop.clock()), exc))
                continue
            if writable:
                self._enqueue(room, effect)
            else:
                self.barred.append((room, effect))

    def _enqueue(self, room: DecodeRoom, effect: Scatter) -> None:
        first = not self.waiting
        self.waiting.append((room, effect))
        ready = self.prepared.ready.get((room.key, effect.segment)) if first and self._together else None
        if ready is not None and ready.condition == effect.parts:
            self._next()

    def drop(self, room: RoomKey, segment: Segment) -> None:
        """A segment has no lease any more, or its room has failed: nothing will be launched for it."""
        if self._preparing is not None:
            self.prepared.forget((room, segment))

    @property
    def ready_at(self) -> float | None:
        """When the pace lets the next one begin; None: nothing waits for it."""
        return self._pace.ready_at if self.waiting and self._pace is not None else None

    def look(self) -> None:
        """Take the scatters that have ended out of those that run, and queue those whose pages may be written now."""
        if self.barred:
            self._admit()
        for one in list(self.running):
            try:
                if one.event is not None and not one.event.query():
                    continue
                error = one.error
            except Exception as exc:
                error = exc
            self.running.remove(one)
            self._over.append((one, error))

    def start(self) -> bool:
        """Begin what may begin now, in one launch; False: nothing may."""
        begun = self._next()
        if begun:
            self._begin(begun)
        return bool(begun)

    def outcome(self) -> tuple[DecodeRoom, Scattered] | None:
        """How the next scatter went, of those that have ended; None: of all of them it is known."""
        return self._finish(*self._over.popleft()) if self._over else None

    @property
    def active(self) -> bool:
        """Whether there is anything to do, to prepare or to take."""
        return bool(self.running or self.waiting or self.barred or self._over or self.prepared.waiting)

    @property
    def waits(self) -> bool:
        """Whether a scatter runs, or waits for its pages or to be prepared; none of these wakes this thread."""
        return bool(self.running or self.barred or self.prepared.waiting)

    def _next(self) -> list[_Begun]:
        """Launch what may begin now and is prepared; the rest of what may begin now, in one launch, comes out."""
        begun: list[_Begun] = []
        entries = 0
        while self.waiting and (self._together or not begun) and entries < ENTRIES:
            room, effect = self.waiting[0]
            failed = room.machine.error is not None
            if not failed and self._pace is not None and not self._pace.ready(self._loop.now):
                break
            self.waiting.popleft()
            one = _Scattering(room, effect.segment, self._loop.clock())
            if failed:
                self._over.append((one, None))
                continue
            if self._preparing is not None:
                self.prepared.waiting.pop((room.key, effect.segment), None)
                ready = self.prepared.take((room.key, effect.segment), effect.parts)
                if ready is not None:
                    self._launch(one, effect, ready)
                    continue
            try:
                moves = [self._move(room, effect.segment, rank, base) for rank, base in effect.parts.items()]
            except Exception as exc:
                # A path may be foreign code: its errors fail this room alone.
                self._over.append((one, exc))
                continue
            if self._pace is not None:
                self._pace.begin(sum([move.layout.nbytes for move in moves]), self._loop.now)
            begun.append((one, effect, moves))
            entries += sum([len(move.layout.plane) for move in moves])
        return begun

    def _launch(self, one: _Scattering, effect: Scatter, ready: _PreparedScatter) -> None:
        if self._pace is not None:
            self._pace.begin(ready.nbytes, self._loop.now)
        event: Event | None = None
        error: Exception | None = None
        try:
            event = ready.prepared.launch()
        except Exception as exc:
            error = exc
        self._follow(one, effect, event, error)

    def prepare_one(self) -> None:
        """Prepare the segment whose lease is the oldest."""
        key = next(iter(self.prepared.waiting), None)
        if key is None:
            return
        # Grants leave first, so that bytes come sooner.
        self._loop.flush()
        room, effect = self.prepared.waiting.pop(key)
        self.prepared.prepare(key, lambda: self._prepare(room, effect))

    def _prepare(self, room: DecodeRoom, effect: Prepare) -> tuple[_Places, _PreparedScatter] | None:
        assert self._preparing is not None
        moves = [self._move(room, effect.segment, rank, base) for rank, base in effect.parts.items()]
        prepared = self._preparing.prepare_scatter(self._pool, moves, self._ring)
        if prepared is None:
            return None
        return effect.parts, _PreparedScatter(sum([move.layout.nbytes for move in moves]), prepared)

    def _begin(self, begun: Sequence[_Begun]) -> None:
        self._loop.flush()
        moves = [move for _, _, some in begun for move in some]
        event: Event | None = None
        error: Exception | None = None
        try:
            if moves:
                event = self._kernels.scatter(self._pool, moves, self._ring)
        except Exception as exc:
            if len(begun) > 1:
                # One of them is at fault, or they are too many for one launch.
                for single in begun:
                    self._begin([single])
                return
            error = exc
        for one, effect, _ in begun:
            self._follow(one, effect, event, error)

    def _follow(self, one: _Scattering, effect: Scatter, event: Event | None, error: Exception | None) -> None:
        """After a launch, or its failure: compare sums behind it, and wait for its end unless it has ended."""
        one.event, one.error = event, error
        if effect.sums and error is None:
            try:
                self._compare(one, effect)
            except Exception as exc:
                # A scatter that has begun reads the lease and writes pages until its event, whatever fails after.
                one.error = exc
        if one.event is None:
            self._over.append((one, one.error))
        else:
            self.running.append(one)

    def _finish(self, one: _Scattering, error: Exception | None) -> tuple[DecodeRoom, Scattered]:
        now = self._loop.clock()
        one.room.handle.report.spend("scatter", now - one.started - one.comparing)
        if self._loop.observed:
            labels = one.segment.labels()
            self._loop.observer.span(Span("scatter", one.room.key.room, one.started, now, labels=labels))
        if error is None and one.check is not None:
            try:
                error = one.check()
            except Exception as exc:
                error = exc
        return one.room, Scattered(one.segment, error)

    def _compare(self, one: _Scattering, effect: Scatter) -> None:
        """Sum our pages behind the scatter; compared is when the sums are there."""
        room = one.room
        assert room.wanted is not None
        began = self._loop.clock()
        site, segment, tables = self._pool.site, effect.segment, room.wanted.tables
        layouts = {rank: self._pair(room, rank).target_view.layout(segment) for rank in effect.sums}
        sums = layer_sums(self._kernels, self._pool, segment, layouts, tables, one.event)
        one.comparing = self._loop.clock() - began
        room.handle.report.spend("checksum", one.comparing)
        path = "" if room.path is None else room.path.name
        one.event = sums.event
        one.check = lambda: compare(room.name, site, segment, tables, layouts, effect.sums, sums.read(), path)

    def _move(self, room: DecodeRoom, segment: Segment, rank: Rank, base: int) -> Move:
        assert room.wanted is not None
        assert room.path is not None
        tables = room.wanted.tables
        job = Job(self._pair(room, rank), segment, target_tables=tables)
        return Move(room.path.receive(job), tables, base)

    def _pair(self, room: DecodeRoom, rank: Rank) -> PairPlan:
        """What a prefill rank sends of what this room awaits."""
        found = room.pairs.get(rank)
        if found is None:
            assert room.plans is not None
            assert room.wanted is not None
            rows, rotation = RowRange(room.wanted.start, room.wanted.stop), room.plans.rotation(room.key.room)
            source = read_as(room.remotes[rank].site, self._pool.site.spec)
            found = room.pairs[rank] = room.plans.pair(rotation, rank, source, rows)
        return found
