"""The flow of one room from one prefill rank to one decode rank.

It requests leases, orders transfers and announces writes. :mod:`.tables` names the method ``_on_...`` for each pair of
state and event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from ...errors import AbortedError, About, DisaggKVError, PeerLostError, RemoteProtocolError, TransportError
from ...ids import Epoch, Generation, Rank, RoomId, peer_name, room_name
from ...planning import Batch, Limits, RankPlan, Segment
from ..base import (
    Cancel,
    Finished,
    Gone,
    Granted,
    Lost,
    Offered,
    Options,
    Quiet,
    Send,
    Tick,
    Transfer,
    WriteFailed,
    Wrote,
)
from ..timers import Repeater
from ..wire.frames import (
    Abort,
    ChunkReady,
    Complete,
    Done,
    Drained,
    Expect,
    Expected,
    Grant,
    Head,
    Landed,
    Queued,
    Return,
    Returned,
    StagingRequest,
    WireFlags,
    WirePace,
    words,
)
from .machine import Machine, ours
from .outbound import OutboundSegment, OutboundSegments, SegmentStep
from .rows import Readiness
from .tables import SENDING, Sending

WRITE_TRIES = 3
"""Attempts of a write that fails with a retryable error and is quiet."""


Grouping = Callable[[range, int, int, Batch], Sequence[range]]
"""Cuts a run of layers into groups, for the rows between two numbers of a forward pass; equal on all who send them."""


@frozen
class FlowPlan:
    """What one prefill rank has to send to one decode rank.

    Args:
        rank: our rank in the prefill instance.
        rank_plan: what the decode rank gets from each rank of our instance.
        start: the first row that it awaits, windows included.
        stop: one past the last, None: where our engine ends.
        exposed: True: its pages are exposed and need no lease.
        limits: what cuts it into segments.
        groups: how the layers of some rows are grouped; None: all together.
        pace: how fast we are, once all is sent.
        flags: where its segments may be announced before their frames; None: nowhere.
        transport: the name of what carries its bytes.
    """

    rank: Rank
    rank_plan: RankPlan
    start: int
    stop: int | None
    exposed: bool
    limits: Limits
    groups: Grouping | None = None
    pace: Callable[[], WirePace | None] = lambda: None
    flags: WireFlags | None = None
    transport: str = ""


class Flow(Machine[Sending]):
    """The prefill side's state machine for one room and one decode rank.

    ``readiness`` returns whether a segment is computed and its pages are there. ``who`` is the decode rank, for errors.
    """

    def __init__(
        self,
        head: Head,
        plan: FlowPlan | None,
        options: Options,
        readiness: Callable[[Segment], Readiness],
        who: About | None = None,
    ) -> None:
        super().__init__(SENDING, Sending.MOVING)
        self.peer = Epoch(head["dst"])
        self.who: About = who or {"epoch": self.peer}
        self.generation = Generation(head["generation"])
        self.plan = plan
        self.error: DisaggKVError | None = None
        self.outbound = OutboundSegments()
        self._head = head
        self._options = options
        self._readiness = readiness
        self._repeat = Repeater(options)
        self._unquiet: set[Segment] = set()
        self._finished: Finished | None = None
        self._flags: dict[Segment, int] = {}
        self._stated = False
        self._placed: Complete | None = None
        self._lost = False

    @property
    def peer_name(self) -> str:
        """The decode rank, for messages."""
        return peer_name(self.peer, self.who.get("instance"), self.who.get("rank") or 0)

    @property
    def finished(self) -> bool:
        """True once our engine has given the row at which the room ends."""
        return self._finished is not None

    def next_at(self) -> float | None:
        """When a Tick is due."""
        return self._repeat.next_at()

    def offer(self, start: int, stop: int, batch: Batch) -> None:
        """Add the rows ``[start, stop)`` of a new chunk: cut what the decode rank awaits of them into segments.

        Segments of one group of layers follow one another, in the order in which the layers are computed.
        """
        assert self.plan is not None
        start = max(start, self.plan.start)
        stop = stop if self.plan.stop is None else min(stop, self.plan.stop)
        if start >= stop:
            return
        p = self.plan
        for run in p.rank_plan.ranges(p.rank):
            for layers in [run] if p.groups is None else p.groups(run, start, stop, batch):
                for segment in p.rank_plan.cut(start, stop, layers, p.limits):
                    self._plan(segment)

    def awaits_no_more(self, stop: int) -> bool:
        """Whether rows up to ``stop`` are known to be all that the decode rank awaits."""
        assert self.plan is not None
        return self.plan.stop is not None and 0 < stop >= self.plan.stop

    def offer_states(self) -> None:
        """Add the rows of the room's states, once."""
        assert self.plan is not None
        p = self.plan
        if self._stated:
            return
        self._stated = True
        for layers in p.rank_plan.ranges(p.rank):
            for segment in p.rank_plan.cut_states(layers, p.limits):
                self._plan(segment)

    def _plan(self, segment: Segment) -> None:
        assert self.plan is not None
        if self._placed is None:
            self.outbound.add(segment, self.plan.rank_plan.part_bytes(segment, self.plan.rank))

    def begin(self, transfer: Transfer) -> bool:
        """The transfer queue starts on a Transfer; False: it has become void (an abort, a withdrawal)."""
        if not self.awaits(transfer) or self._readiness(transfer.segment) is not Readiness.READY:
            return False
        self.outbound.move(self.outbound[transfer.segment], SegmentStep.WRITING)
        self._unquiet.add(transfer.segment)
        return True

    def awaits(self, transfer: Transfer) -> bool:
        """Whether a transfer still has its grant, and has not begun."""
        part = self.outbound.get(transfer.segment)
        if self.state is not Sending.MOVING or part is None or part.step is not SegmentStep.GRANTED:
            return False
        if self._placed is not None:
            return False  # decode has all rows, and its pages are another room's
        return transfer.lease == (None if part.grant is None else part.grant.lease)

    @property
    def busy(self) -> bool:
        """True while a gather or a write of this flow may still read or write."""
        return bool(self._unquiet)

    def flag(self, segment: Segment) -> tuple[int, int] | None:
        """The slot and the value of a segment's flag, always the same; None: it has none.

        It may be raised once all bytes of our part are in the peer's pages, and as often as one likes.
        """
        if self.plan is None or self.plan.flags is None:
            return None
        slot, count, value = self.plan.flags
        number = self._flags.setdefault(segment, len(self._flags))
        return (slot + number, value + number) if number < count else None

    # Moving.

    def _on_expect_again(self, event: Expect) -> None:
        self._send(Expected(**self._head, parked=False, transport="" if self.plan is None else self.plan.transport))

    def _on_offered(self, event: Offered) -> None:
        self._advance(changed=event.changed)

    def _advance(self, *, changed: bool = True) -> None:
        """Request, move or return as many segments as the window allows; ``changed``: known rows or pages have."""
        assert self.plan is not None
        if not changed and self.outbound.begun >= self._options.window:
            return
        for segment, part in self.outbound.first(self._options.window):
            if not changed and part.step is not SegmentStep.PLANNED:
                continue
            if part.step is SegmentStep.PLANNED and self.plan.exposed:
                self.outbound.move(part, SegmentStep.GRANTED)
            if part.step is SegmentStep.GRANTED:
                self._use(segment, part)
            elif part.step is SegmentStep.PLANNED or (part.step is SegmentStep.ASKED and not part.asked_ready):
                readiness = self._readiness(segment)
                ready = readiness is Readiness.READY
                if ready or (part.step is SegmentStep.PLANNED and readiness is not Readiness.WITHDRAWN):
                    self._ask(segment, part, ready)

    def _ask(self, segment: Segment, part: OutboundSegment, ready: bool) -> None:
        assert self.plan is not None
        self.outbound.move(part, SegmentStep.ASKED)
        part.asked_ready = ready
        request = StagingRequest(**self._head, segment=segment, ask=part.ask, ready=ready)
        # Its number says that the grant before it is given back.
        self._repeat.stop(("return", segment))
        self._out.append(self._repeat.start(("request", segment), Send(self.peer, request), self.now))

    def _use(self, segment: Segment, part: OutboundSegment) -> None:
        """Move a granted segment. The grant of a withdrawn one is returned: others may need its bytes of the ring."""
        readiness = self._readiness(segment)
        if readiness is Readiness.READY:
            # A repetition is harmless: the queue replaces a pending one, and `begin` rejects one that has started.
            self._out.append(self._transfer(segment, part))
        elif readiness is Readiness.WITHDRAWN and part.grant is not None:
            back = Return(**self._head, segment=segment, ask=part.ask)
            self._out.append(self._repeat.start(("return", segment), Send(self.peer, back), self.now))
            self.outbound.move(part, SegmentStep.PLANNED)
            part.grant, part.ask = None, part.ask + 1

    def _on_returned(self, event: Returned) -> None:
        part = self.outbound.get(Segment(*event.segment))
        if part is None or event.ask != part.ask - 1:
            self.ignored += 1
            return
        self._repeat.stop(("return", Segment(*event.segment)))

    def _transfer(self, segment: Segment, part: OutboundSegment) -> Transfer:
        g = part.grant
        offset, lease = (None, None) if g is None else (g.offset, g.lease)
        return Transfer(self.peer, segment, offset, part.nbytes, lease)

    def _on_queued(self, event: Queued) -> None:
        """Nothing to do: the grant will follow, and the request is repeated ever more slowly."""

    def _on_grant(self, event: Grant) -> None:
        segment = Segment(*event.segment)
        part = self.outbound.get(segment)
        if part is None or part.step is not SegmentStep.ASKED or event.ask != part.ask:
            self.ignored += 1
            return
        if event.nbytes != part.nbytes:
            granted = f"granted {event.nbytes} bytes for {part.nbytes} of {segment}"
            self._fail(RemoteProtocolError(f"{self._name()}: {granted}", **self.who))
            return
        self._repeat.stop(("request", segment))
        part.grant = event
        self.outbound.move(part, SegmentStep.GRANTED)
        self._use(segment, part)
        if self._readiness(segment) is Readiness.AHEAD:
            self._out.append(Granted(self._transfer(segment, part)))

    def _on_wrote(self, event: Wrote) -> None:
        self._unquiet.discard(event.segment)
        part = self.outbound[event.segment]
        self.outbound.move(part, SegmentStep.ANNOUNCED)
        lease = None if part.grant is None else part.grant.lease
        notice = ChunkReady(**self._head, segment=event.segment, lease=lease, sums=event.sums)
        self._out.append(self._repeat.start(("notice", event.segment), Send(self.peer, notice), self.now))
        self._check_finished()

    def _on_write_failed(self, event: WriteFailed) -> None:
        part = self.outbound[event.segment]
        if event.quiet:
            self._unquiet.discard(event.segment)
            part.tries += 1
            retryable = isinstance(event.error, TransportError) and event.error.retryable
            if retryable and part.tries < WRITE_TRIES and self._placed is None:
                self.outbound.move(part, SegmentStep.GRANTED)
                self._use(event.segment, part)
                return
        error = ours(event.error, self._name(), **self.who)
        # A transport knows its peer by another name, and no room.
        self._fail(error.about(self._name()) if isinstance(error, TransportError | PeerLostError) else error)

    def _on_landed(self, event: Landed) -> None:
        if sum(self._acknowledged(Segment(*box)) for box in event.segments):
            self._advance(changed=False)
            self._check_finished()

    def _acknowledged(self, segment: Segment) -> bool:
        part = self.outbound.get(segment)
        if part is None or part.step is SegmentStep.WRITING:
            self.ignored += 1
            return False
        for kind in ("request", "return", "notice"):
            self._repeat.stop((kind, segment))
        self.outbound.land(segment)
        return True

    def _on_finished(self, event: Finished) -> None:
        self._finished = event
        self._check_finished()

    def _check_finished(self) -> None:
        """Send ``Done`` with the last notice: no write follows, though acknowledgements may be pending."""
        f = self._finished
        if f is None or self.outbound.unacknowledged < len(self.outbound):
            return
        assert self.plan is not None
        self.state = Sending.FINISHED
        done = Done(
            **self._head,
            stop=f.stop,
            segments=self.outbound.announced,
            aux=f.aux,
            pace=self.plan.pace(),
            transport=self.plan.transport,
        )
        self._out.append(self._repeat.start("done", Send(self.peer, done), self.now))
        if self._placed is not None:
            self._on_complete(self._placed)

    def _on_landed_late(self, event: Landed) -> None:
        for box in event.segments:
            self._acknowledged(Segment(*box))

    def _on_placed(self, event: Complete) -> None:
        """Decode has all rows and awaits no ``Done``: it is needed no more. A copy that raised a flag may run on."""
        if self.outbound.unacknowledged + len(self._unquiet) < len(self.outbound):
            self.ignored += 1  # it cannot have what was not written
        else:
            self._placed = event

    def _on_complete(self, event: Complete) -> None:
        """Every notice has come, although its ``Landed`` may be lost."""
        self._repeat.clear()
        self.outbound.land_all()
        self.state = Sending.COMPLETE

    def _on_tick(self, event: Tick) -> None:
        self._out += self._repeat.tick(self.now)

    # Ending early.

    def _on_their_abort(self, event: Abort) -> None:
        self.error = AbortedError(f"{self._name()}: decode gave up: {event.reason}", **self.who)
        self._stop_moving()

    def _on_their_late_abort(self, event: Abort) -> None:
        """Every write is quiet already: answer ``Drained``."""
        self._send(Drained(**self._head, reason=event.reason))

    def _on_lost(self, event: Lost) -> None:
        self._lost = True
        if self._placed is not None:
            self._repeat.clear()
            return
        self.error = ours(event.error, self._name(), **self.who)
        self._stop_moving()

    def _on_gone(self, event: Gone) -> None:
        self._on_lost(Lost(event.peer, PeerLostError(f"{self._name()}: the peer's process has ended")))

    def _on_cancel(self, event: Cancel) -> None:
        self._fail(ours(event.error, self._name()))

    def _fail(self, error: DisaggKVError) -> None:
        self.error = error
        self._stop_moving()
        if self.state is Sending.ABORTING:
            abort = Abort(**self._head, reason=words(error))
            self._out.append(self._repeat.start("abort", Send(self.peer, abort), self.now))

    def _stop_moving(self) -> None:
        """Post nothing more; send ``Drained`` once no posted write is left."""
        self._repeat.clear()
        self.outbound.clear()
        self.state = Sending.ABORTING
        self._check_quiet()

    def _check_quiet(self) -> None:
        if self._unquiet:
            return
        self._repeat.clear()
        if self._lost:
            self.state = Sending.CLOSED
            return
        self.state = Sending.DRAINING
        drained = Drained(**self._head, reason=words(self.error))
        self._out.append(self._repeat.start("drained", Send(self.peer, drained), self.now))

    def _on_answer_abort(self, event: Expect) -> None:
        self._send(Abort(**self._head, reason=words(self.error)))

    def _on_quiet_late(self, event: Wrote | Quiet) -> None:
        self._unquiet.discard(event.segment)
        self._check_quiet()

    def _on_write_failed_late(self, event: WriteFailed) -> None:
        if event.quiet:
            self._unquiet.discard(event.segment)
            self._check_quiet()

    def _on_abort_known(self, event: Abort) -> None:
        self._repeat.stop("abort")

    def _on_lost_late(self, event: Lost | Gone) -> None:
        """No peer is left to answer; but posted writes may still read our memory, even if the peer's is gone."""
        self._lost = True
        self._repeat.clear()

    def _on_answer_drained(self, event: Abort) -> None:
        self._send(Drained(**self._head, reason=words(self.error)))

    def _on_close(self, event: object) -> None:
        self._repeat.clear()
        self.state = Sending.CLOSED

    # Words.

    def _name(self) -> str:
        return f"{room_name(self._head['room'])} towards {self.peer_name}"

    def _send(self, frame: Expected | Abort | Drained) -> None:
        self._out.append(Send(self.peer, frame))

    def check_integrity(self) -> None:
        """Raise AssertionError if the accounts contradict each other."""
        state, outbound = self.state, self.outbound
        outbound.check_integrity(self._unquiet)
        assert not self._unquiet or state is Sending.ABORTING or state is Sending.MOVING
        assert not outbound or state is Sending.MOVING or state is Sending.FINISHED
        assert state is not Sending.FINISHED or outbound.unacknowledged == len(outbound)
        assert state is not Sending.COMPLETE or outbound.segments_landed >= outbound.announced


def room_head(epoch: Epoch, peer: Epoch, room: RoomId, generation: Generation) -> Head:
    """The head of all frames of one flow."""
    return Head(src=epoch, dst=peer, room=room, generation=generation)
