"""A room on one decode rank: which rows are awaited, who has sent what, and what a peer may still write to."""

from __future__ import annotations

from itertools import combinations

from ..errors import (
    AbortedError,
    DeadlineError,
    DisaggKVError,
    GeometryError,
    IntegrityError,
    RemoteProtocolError,
)
from ..geometry import Coverage
from ..ids import Epoch, Generation, Rank, RoomId
from ..planning import Intake, RowRange, Segment
from .base import (
    AskAgain,
    Awaited,
    Cancel,
    Decided,
    Effect,
    Free,
    Gone,
    Introduced,
    Leased,
    Lost,
    Options,
    Phase,
    Prepare,
    Quarantine,
    Reserve,
    Scatter,
    Scattered,
    Send,
    Store,
    Tick,
    Vote,
)
from .frames import (
    Abort,
    AbortAck,
    AuxPart,
    AuxTaken,
    Box,
    ChunkReady,
    Complete,
    Done,
    Drained,
    DrainedAck,
    Expect,
    Expected,
    Grant,
    Head,
    Landed,
    Queued,
    Return,
    Returned,
    RoomFrame,
    StagingRequest,
    WirePace,
    words,
)
from .machine import Machine, corners, ours, overlap
from .parts import InboundSegment, Writer, leased, misplaced, waited_for
from .retry import Repeater
from .tables import RECEIVING, Receiving
from .verify import unlike
from .wire import segment_from_wire, segment_to_wire


class ReceiveRoom(Machine[Receiving]):
    """The decode side's state machine. Outcome is ``phase`` and ``error``; whose the pages are is ``released``."""

    def __init__(
        self, room: RoomId, generation: Generation, epoch: Epoch, options: Options, now: float, total_s: float
    ) -> None:
        super().__init__(RECEIVING, Receiving.OPENED)
        self.room = room
        self.generation = generation
        self.error: DisaggKVError | None = None
        self.segments_landed = 0
        self.bytes_landed = 0
        self.path = ""
        self.paths: dict[Rank, str] = {}
        self._epoch = epoch
        self._options = options
        self._deadline = now + total_s
        self._total_s = total_s
        self._repeat = Repeater(options)
        self._awaited: Awaited | None = None
        self._intake: Intake | None = None
        self._pace: WirePace | None = None
        self._writers: dict[Epoch, Writer] = {}
        self._parts: dict[Segment, InboundSegment] = {}
        self._claimed = {state: Coverage() for state in (False, True)}
        self._coverage = {state: Coverage() for state in (False, True)}
        self._stop: int | None = None
        self._exposed = False
        self._declined = False

    def handle(self, event: object, now: float) -> list[Effect]:
        """See :meth:`Machine.handle`; frames of strangers only count, and so does all that comes after the end."""
        stranger = isinstance(event, RoomFrame) and event.src not in self._writers
        if stranger or self.state is Receiving.CLOSED:
            self.ignored += 1
            return []
        return super().handle(event, now)

    @property
    def phase(self) -> Phase:
        """How far the room is."""
        if self.error is not None:
            return Phase.FAILED
        if self.state is Receiving.OPENED:
            return Phase.READY if self._intake is not None else Phase.CONNECTING
        return Phase.DONE if self.state is Receiving.CLOSED else Phase.MOVING

    @property
    def released(self) -> bool:
        """True: nobody reads or writes the room's pages any more, neither we nor a peer."""
        if self.state is Receiving.CLOSED:
            return True
        if self.state is not Receiving.DRAINING or any(p.scattering for p in self._parts.values()):
            return False
        return not any(self._may_touch_pages(w) for w in self._writers.values())

    @property
    def writers(self) -> tuple[Epoch, ...]:
        """The prefill ranks, once they are known."""
        return tuple(self._writers)

    def next_at(self) -> float | None:
        """When a Tick is due."""
        soonest = self._repeat.next_at()
        if self.state in (Receiving.OPENED, Receiving.MOVING, Receiving.LANDED):
            return self._deadline if soonest is None else min(soonest, self._deadline)
        return soonest

    # Beginning.

    def _on_awaited(self, event: Awaited) -> None:
        self._awaited = event
        self._stop = event.stop
        self._begin()

    def _on_introduced(self, event: Introduced) -> None:
        self._intake = event.intake
        self._pace = event.pace
        self._writers = {e: Writer(e, Rank(rank)) for rank, e in enumerate(event.writers)}
        self._begin()

    def _begin(self) -> None:
        if self._awaited is None or self._intake is None:
            return
        self.state = Receiving.MOVING
        a = self._awaited
        self._intake = self._intake.for_rows(a.rows)
        self._exposed = a.tables is not None
        for w in self._writers.values():
            self._expect(w, a)

    def _expect(self, w: Writer, a: Awaited) -> None:
        expect = Expect(
            **self._to(w),
            start=a.start,
            stop=a.stop,
            paths=a.paths,
            tables=a.tables,
            tag=a.tag,
            verify=a.verify,
            pace=self._pace,
        )
        self._out.append(self._repeat.start(("expect", w.rank), Send(w.epoch, expect), self.now))

    def _on_ask_again(self, event: AskAgain) -> None:
        assert self._awaited is not None
        w = self._writers.get(event.peer)
        if w is not None and not w.complete:
            self._expect(w, self._awaited)

    def _on_expected(self, event: Expected) -> None:
        w = self._writers[Epoch(event.src)]
        if not event.parked:
            self._repeat.stop(("expect", w.rank))
            return
        # Each repetition keeps it parked for as long as a peer may be silent.
        self._repeat.slow(("expect", w.rank), self._options.silence_s / 2)

    # Moving.

    def _on_request(self, event: StagingRequest) -> None:
        w = self._writers[Epoch(event.src)]
        if w.rank not in self.paths:
            self.paths[w.rank] = event.path
            self.path = "+".join(sorted(set(self.paths.values())))
        assert self._awaited is not None
        if self.paths[w.rank] != event.path or event.path not in self._awaited.paths:
            self._fail(RemoteProtocolError(f"{self._name()}: rank {w.rank} must not use path {event.path!r}"))
            return
        if w.open >= self._options.window and Segment(*event.segment) not in self._parts:
            # It is repeated, and by then fewer are open: a peer with a larger window than ours only waits.
            self._send(w, Queued(**self._to(w), segment=event.segment))
            return
        part = self._part(w, event.segment)
        if part is None:
            return
        segment = segment_from_wire(event.segment)
        if w.rank in part.arrived:
            self._landed(w, segment)
            return
        if part.stale(w.rank, event.ask):
            self.ignored += 1
            return
        again = w.rank in part.asked
        w.open += w.rank not in part.asks
        part.asks[w.rank] = event.ask
        part.asked.add(w.rank)
        if part.lease is not None:
            self._grant(w, segment, part)
            self._prepare(segment, part)
            return
        if again:
            self._send(w, Queued(**self._to(w), segment=event.segment))
        self._out.append(Reserve(part.asker, segment, part.nbytes, event.ready))

    def _part(self, w: Writer, box: Box) -> InboundSegment | None:
        """The live segment, new or old; None: it was answered, or the room has failed over it."""
        assert self._awaited is not None
        assert self._intake is not None
        try:
            segment = segment_from_wire(box)
            if segment in self._parts:
                part = self._parts[segment]
            else:
                if self._coverage[segment.state].contains(*corners(segment)):
                    self._landed(w, segment)
                    return None
                part = self._new_part(w, segment)
            if w.rank not in part.writers:
                raise RemoteProtocolError(f"prefill rank {w.rank} was not elected for any of {segment}")
        except (RemoteProtocolError, GeometryError) as exc:
            self._fail(RemoteProtocolError(f"{self._name()}: {exc}"))
            return None
        if segment not in self._parts:
            self._claimed[segment.state].add(*corners(segment))
            self._parts[segment] = part
        return part

    def _new_part(self, w: Writer, segment: Segment) -> InboundSegment:
        assert self._awaited is not None
        assert self._intake is not None
        most = self._awaited.most if self._stop is None else self._stop
        first = self._intake.floor(self._awaited.start)
        if not segment.state and (segment.start < first or segment.stop > most):
            raise RemoteProtocolError(f"rows {segment.start}-{segment.stop} outside {first}-{most}")
        self._intake.validate(segment)
        if self._claimed[segment.state].overlaps(*corners(segment)):
            raise RemoteProtocolError(f"{segment} overlaps another segment")
        offsets, nbytes = self._intake.lease(segment)
        return InboundSegment(tuple(offsets), offsets, nbytes, w.epoch)

    def _on_leased(self, event: Leased) -> None:
        part = self._parts[event.segment]
        part.lease = event.lease
        for w in self._writers.values():
            if w.rank in part.asked:
                self._grant(w, event.segment, part)
        self._prepare(event.segment, part)

    def _grant(self, w: Writer, segment: Segment, part: InboundSegment) -> None:
        assert part.lease is not None
        offset, nbytes = part.offsets[w.rank]
        grant = Grant(
            **self._to(w),
            segment=segment_to_wire(segment),
            ask=part.asks[w.rank],
            lease=part.lease.start,
            offset=part.lease.offset + offset,
            nbytes=nbytes,
        )
        self._send(w, grant)

    def _prepare(self, segment: Segment, part: InboundSegment) -> None:
        if part.newly_known():
            self._out.append(Prepare(segment, part.places(part.writers)))

    def _on_given_back(self, event: Return) -> None:
        """A writer does without what it was granted; the lease is free once nobody has it."""
        w, segment = self._writers[Epoch(event.src)], Segment(*event.segment)
        self._send(w, Returned(**self._to(w), segment=event.segment, ask=event.ask))
        part = self._parts.get(segment)
        if part is None or w.rank in part.arrived or part.asks.get(w.rank) != event.ask:
            return
        part.asked.discard(w.rank)
        if not part.asked:
            part.lease, part.prepared = None, False
            self._out.append(Free(segment))

    def _on_chunk_ready(self, event: ChunkReady) -> None:
        assert self._awaited is not None
        w = self._writers[Epoch(event.src)]
        if event.lease is None and self._awaited.tables is None:
            self._fail(RemoteProtocolError(f"{self._name()}: rank {w.rank} wrote to pages that were not exposed"))
            return
        part = self._part(w, event.segment)
        if part is None:
            return
        segment = segment_from_wire(event.segment)
        if event.lease is not None and not part.granted(w.rank, event.lease):
            self._fail(RemoteProtocolError(f"{self._name()}: rank {w.rank} used lease {event.lease} of {segment}"))
            return
        if problem := unlike(self.room, segment, event.sums, self._awaited.verify):
            self._fail(RemoteProtocolError(f"{self._name()}: rank {w.rank} sent {problem} of {segment}"))
            return
        self._landed(w, segment)
        if w.rank in part.arrived:
            return
        self._arrive(part, w)
        if problem := w.problem:
            self._fail(RemoteProtocolError(f"{self._name()}: {problem}"))
            return
        if event.sums is not None:
            part.sums[w.rank] = event.sums
        if event.lease is not None:
            part.staged.add(w.rank)
        if len(part.arrived) < len(part.writers):
            self._check_landed()
        elif part.staged or part.sums:
            part.scattering = True
            self._out.append(Scatter(segment, part.places(part.staged), part.sums))
        else:
            self._finish_part(segment)

    def _arrive(self, part: InboundSegment, w: Writer) -> None:
        part.arrived.add(w.rank)
        w.arrived += 1
        w.open -= w.rank in part.asks

    def _on_scattered(self, event: Scattered) -> None:
        self._parts[event.segment].scattering = False
        if event.error is not None:
            self._fail(ours(event.error, f"{self._name()}: scatter of {event.segment} failed"))
            return
        self._finish_part(event.segment)

    def _finish_part(self, segment: Segment) -> None:
        self._coverage[segment.state].add(*corners(segment))
        self.segments_landed += 1
        self.bytes_landed += sum(nbytes for _, nbytes in self._parts[segment].offsets.values())
        del self._parts[segment]
        self._out.append(Free(segment))
        self._check_landed()

    def _on_aux_part(self, event: AuxPart) -> None:
        assert self._awaited is not None
        w, most = self._writers[Epoch(event.src)], self._awaited.aux_bytes
        if most and (problem := w.take(event, most)):
            self._fail(RemoteProtocolError(f"{self._name()}: rank {w.rank} sent {problem}"))
        else:
            self._send(w, AuxTaken(**self._to(w), upto=len(w.aux) if most else event.total))

    def _on_done(self, event: Done) -> None:
        assert self._awaited is not None
        w = self._writers[Epoch(event.src)]
        if w.done is not None:
            return
        w.done = event
        a = self._awaited
        if event.tag and a.tag and event.tag != a.tag:
            self._fail(IntegrityError(f"{self._name()}: prefill's tag {event.tag.hex()} is not {a.tag.hex()}"))
            return
        if problem := w.problem or misplaced(self._writers.values(), a):
            self._fail(RemoteProtocolError(f"{self._name()}: {problem}"))
            return
        self._stop = event.stop if a.stop is None else a.stop
        self._check_landed()

    def _check_landed(self) -> None:
        """Succeed only if landed segments exactly cover our box: ``Done`` alone proves nothing.

        Whether they do is judged when all that was announced has come: ``Done`` may overtake notices.
        """
        assert self._awaited is not None
        assert self._intake is not None
        complete = all(w.complete for w in self._writers.values())
        if not complete or any(p.scattering for p in self._parts.values()):
            return
        assert self._stop is not None
        needed = self._intake.needed(RowRange(self._awaited.start, self._stop))
        short = [box for box in needed if not self._coverage[box.state].covers(*corners(box))] or [*self._parts]
        if short:
            what = f"{'states of ' if short[0].state else ''}layers {short[0].layers}"
            self._fail(RemoteProtocolError(f"{self._name()}: prefill is done, but {what} are not complete"))
            return
        aux = next((w.results for w in self._writers.values() if w.results is not None), None)
        if aux is not None:
            self._out.append(Store(aux))
        self._repeat.clear()
        self.state = Receiving.LANDED
        self._out.append(Vote(True, ""))

    # Landed here, not yet agreed.

    def _on_answer_landed(self, event: StagingRequest | ChunkReady) -> None:
        self._landed(self._writers[Epoch(event.src)], Segment(*event.segment))

    def _on_doubt(self, event: Abort | Drained | Cancel) -> None:
        """Too late to fail alone: ask the others to."""
        if isinstance(event, Cancel):
            reason = str(event.error)
        else:
            reason = event.reason
            if isinstance(event, Drained):
                self._drained(event)
            else:
                self._on_acknowledge(event)
        self._out.append(Vote(False, reason))

    def _on_tick_landed(self, event: Tick) -> None:
        if self.now >= self._deadline:
            self._deadline = self.now + self._total_s
            self._out.append(Vote(False, f"{self._name()}: no agreement within {self._total_s:g} s"))

    def _on_decided(self, event: Decided) -> None:
        if not event.ok:
            self._declined = True
            self._fail(AbortedError(f"{self._name()}: another rank failed: {event.reason}"))
            return
        assert self.state is Receiving.LANDED
        for w in self._writers.values():
            self._send(w, Complete(**self._to(w)))
        self.state = Receiving.CLOSED

    # Failing.

    def _on_tick(self, event: Tick) -> None:
        if self.now >= self._deadline:
            where = waited_for(self._writers.values()) if self._writers else "the prefill ranks were not found"
            self._declined = True
            self._fail(DeadlineError(f"{self._name()}: not complete within {self._total_s:g} s: {where}"))
        else:
            self._out += self._repeat.tick(self.now)

    def _on_their_abort(self, event: Abort) -> None:
        self._on_acknowledge(event)
        self._fail(AbortedError(f"{self._name()}: prefill gave up: {event.reason}"))

    def _on_drained(self, event: Drained) -> None:
        self._drained(event)
        self._fail(AbortedError(f"{self._name()}: prefill gave up: {event.reason}"))

    def _on_lost(self, event: Lost) -> None:
        """A writer is needed until all it announced has come; while none is known, any loss is of one we look for."""
        w = self._writers.get(event.peer)
        if w is not None:
            w.lost = True
        if not w.complete if w is not None else not self._writers:
            self._fail(ours(event.error, self._name()))

    def _on_lost_landed(self, event: Lost) -> None:
        w = self._writers.get(event.peer)
        if w is not None:
            w.lost = True

    def _on_gone(self, event: Gone) -> None:
        w = self._writers.get(event.peer)
        if w is not None:
            w.gone = True

    def _on_cancel(self, event: Cancel) -> None:
        self._declined = True
        self._fail(ours(event.error, self._name()))

    def _fail(self, error: DisaggKVError) -> None:
        self.error = error
        self.state = Receiving.DRAINING
        self._repeat.clear()
        for w in self._writers.values():
            w.aux.clear()
        self._out.append(Vote(False, str(error)))
        self._tell_abort()
        for segment, part in list(self._parts.items()):
            if part.lease is not None:
                self._out.append(Quarantine(segment))
            elif not part.scattering:
                del self._parts[segment]
                self._out.append(Free(segment))
        self._settle()

    def _tell_abort(self) -> None:
        for w in self._writers.values():
            if not w.evidence:
                abort = Abort(**self._to(w), reason=words(self.error))
                self._out.append(self._repeat.start(("abort", w.rank), Send(w.epoch, abort), self.now))

    # Draining: memory comes back on evidence only.

    def _on_introduced_late(self, event: Introduced) -> None:
        self._writers = {e: Writer(e, Rank(rank)) for rank, e in enumerate(event.writers)}
        self._tell_abort()
        self._settle()

    def _on_answer_abort(self, event: StagingRequest) -> None:
        w = self._writers[Epoch(event.src)]
        self._send(w, Abort(**self._to(w), reason=words(self.error)))

    def _on_leased_late(self, event: Leased) -> None:
        self._out.append(Free(event.segment))

    def _on_late_chunk(self, event: ChunkReady) -> None:
        w = self._writers[Epoch(event.src)]
        part = self._parts.get(Segment(*event.segment))
        if part is not None and event.lease is not None and part.granted(w.rank, event.lease):
            if w.rank not in part.arrived:
                self._arrive(part, w)
            self._settle()

    def _on_scattered_late(self, event: Scattered) -> None:
        self._parts[event.segment].scattering = False
        self._settle()

    def _on_late_done(self, event: Done) -> None:
        self._writers[Epoch(event.src)].done = event
        self._settle()

    def _on_acknowledge(self, event: Abort) -> None:
        w = self._writers[Epoch(event.src)]
        self._send(w, AbortAck(**self._to(w)))

    def _drained(self, event: Drained) -> None:
        w = self._writers[Epoch(event.src)]
        w.drained = True
        self._send(w, DrainedAck(**self._to(w)))

    def _on_drained_late(self, event: Drained) -> None:
        self._drained(event)
        self._settle()

    def _on_lost_late(self, event: Lost) -> None:
        if not self._writers:
            self.state = Receiving.CLOSED
            return
        self._on_lost_landed(event)
        self._settle()

    def _on_gone_late(self, event: Gone) -> None:
        self._on_gone(event)
        self._settle()

    def _on_tick_draining(self, event: Tick) -> None:
        self._out += self._repeat.tick(self.now)

    def _may_touch_pages(self, w: Writer) -> bool:
        return self._exposed and w.done is None and not w.evidence

    def _owes(self, w: Writer) -> bool:
        """True while this writer may still write to memory of ours."""
        return self._may_touch_pages(w) or (not w.evidence and leased(self._parts.values(), w.rank) > 0)

    def owed(self) -> dict[Epoch, tuple[int, bool]]:
        """Of a room that failed: whose evidence is awaited, for how many bytes of leases, and whether for pages."""
        owing, parts = [w for w in self._writers.values() if self._owes(w)], self._parts.values()
        return {w.epoch: (leased(parts, w.rank), self._may_touch_pages(w)) for w in owing}

    def _settle(self) -> None:
        """Give back what nobody writes to any more; close when nothing is left."""
        safe = {w.rank for w in self._writers.values() if w.evidence}
        for segment, part in list(self._parts.items()):
            if not part.scattering and not part.asked - part.arrived - safe:
                del self._parts[segment]
                self._out.append(Free(segment))
        # A room that decode declined waits until there is a prefill to tell, or none can be reached.
        ended = bool(self._writers) or not self._declined
        for w in self._writers.values():
            if w.evidence or (w.lost and not self._owes(w)):
                self._repeat.stop(("abort", w.rank))
            else:
                ended = False
        if ended and not self._parts:
            self.state = Receiving.CLOSED

    # Words.

    def _name(self) -> str:
        return f"room {self.room.hex()} generation {self.generation}"

    def _to(self, w: Writer) -> Head:
        return Head(src=self._epoch, dst=w.epoch, room=self.room, generation=self.generation)

    def _send(self, w: Writer, frame: RoomFrame) -> None:
        self._out.append(Send(w.epoch, frame))

    def _landed(self, w: Writer, segment: Segment) -> None:
        self._send(w, Landed(**self._to(w), segment=segment_to_wire(segment)))

    def check_integrity(self) -> None:
        """Raise AssertionError if the accounts contradict each other."""
        for a, b in combinations(self._parts, 2):
            assert not overlap(a, b), (a, b)
        for part in self._parts.values():
            part.check_integrity()
        if self.error is None:
            for w in self._writers.values():
                asked = [p for p in self._parts.values() if w.rank in p.asks and w.rank not in p.arrived]
                assert w.open == len(asked), (w, asked)
        assert self.state is not Receiving.CLOSED or not self._parts
        assert (self.error is None) or self.state in (Receiving.DRAINING, Receiving.CLOSED)
