"""A room on one decode rank: which rows are awaited, and which are in our pages.

Theory of operation. :class:`ReceiveRoom` takes one event at a time and returns effects; it reads no clock and does no
I/O. :data:`~disagg_kv.core.room.tables.RECEIVING` names the method for each pair of state and event.

* ``OPENED``: the engine has opened the room. ``Awaited`` brings the engine's rows, ``Introduced`` the prefill ranks.
  With both, each prefill rank gets an ``Expect``, which is repeated until ``Expected`` answers it.
* ``MOVING``: a writer requests a lease for a segment, writes, and announces its part (``ChunkReady``). All writers of a
  segment share one lease; each has its own range of it. When the last part has arrived, the lease is scattered. A
  segment on exposed pages has no lease, and is scattered only where it is compared.
* ``PLACED``: the placed rows are exactly those awaited. Where prefill has to say how the room ends, at which row or
  with which aux data, every writer is done, too, and all that it announced has arrived. This rank votes for success. It
  cannot fail alone any more: a doubt becomes a vote against.
* ``CLOSED``: every lease is free. The ranks have decided success, or the room failed and no abort is pending.
* ``DRAINING``: the room has failed, and its memory is not free yet. :mod:`.draining` holds that half, and the rule by
  which every lease comes back, also in a room that succeeds.

Every frame may be lost, repeated or late, so each handler accepts repetitions. A request is numbered (``ask``): one
that was given back does not get a lease again. Rows come as rectangles of rows and layers that must not overlap.
"""

from __future__ import annotations

from math import inf

from ...errors import AbortedError, About, DeadlineError, GeometryError, IntegrityError, RemoteProtocolError
from ...ids import Epoch, Generation, RoomId
from ...planning import RankPlan, RowRange, Segment
from ..base import (
    Awaited,
    Cancel,
    CastVote,
    Decided,
    Effect,
    Introduced,
    Leased,
    Lost,
    Met,
    Options,
    Phase,
    Prepare,
    Reserve,
    Scatter,
    Scattered,
    Send,
    Store,
    Tick,
    tags_differ,
)
from ..wire.frames import (
    Abort,
    ChunkReady,
    Complete,
    Done,
    Drained,
    Expect,
    Expected,
    Grant,
    Landed,
    Queued,
    Return,
    Returned,
    RoomFrame,
    StagingRequest,
    WireFlags,
    WirePace,
    words,
)
from ..wire.verify import unlike
from .draining import DrainingRoom
from .inbound import InboundSegment, Writer, chosen, misplaced, unopened, waited_for
from .machine import ours
from .tables import Receiving


class ReceiveRoom(DrainingRoom):
    """The decode side's state machine. ``phase`` and ``error`` are its outcome; ``released``: its pages are free.

    ``transport`` is what carries the writes, as far as the writers have named it; of several, all, joined by ``+``.
    """

    def __init__(
        self,
        room: RoomId,
        generation: Generation,
        epoch: Epoch,
        options: Options,
        now: float,
        tag: bytes = b"",
        source: str = "",
    ) -> None:
        super().__init__(room, generation, epoch, options, tag, source)
        self._deadline = now + options.total_s
        self._claim_by = inf
        self._awaited: Awaited | None = None
        self._rank_plan: RankPlan | None = None
        self._floor = 0
        self._pace: WirePace | None = None
        self._flags: tuple[WireFlags, ...] = ()
        self._stop: int | None = None
        self.transport = ""
        self._transports_known = False

    def handle(self, event: object, now: float) -> list[Effect]:
        """See :meth:`Machine.handle`; a frame of an unknown writer, and any event after the end, is only counted."""
        if self.state is Receiving.CLOSED or (isinstance(event, RoomFrame) and event.src not in self.writers):
            self.ignored += 1
            return []
        if self._claim_by < inf and isinstance(event, RoomFrame):
            w = self.writers[Epoch(event.src)]
            w.opened |= not (isinstance(event, Expected) and event.parked)
            self._claim_by = self._claim_by if unopened(self.writers.values()) else inf
        return super().handle(event, now)

    @property
    def phase(self) -> Phase:
        """How far the room is."""
        if self.error is not None:
            return Phase.FAILED
        if self.state is Receiving.OPENED:
            return Phase.READY if self._rank_plan is not None else Phase.CONNECTING
        if self.state is Receiving.CLOSED:
            return Phase.DONE
        return Phase.MOVING if self._claim_by == inf else Phase.WAITING

    @property
    def moving(self) -> bool:
        """Whether rows are awaited, and every writer has named what carries its writes."""
        return self.state is Receiving.MOVING and self._transports_known

    def next_at(self) -> float | None:
        """When a Tick is due."""
        soonest = self._repeat.next_at()
        live = self.state in (Receiving.OPENED, Receiving.MOVING, Receiving.PLACED)
        due = min(self._deadline, self._claim_by) if live else self._until
        return soonest if due == inf else min(due, inf if soonest is None else soonest)

    # Beginning.

    def _on_awaited(self, event: Awaited) -> None:
        self._awaited = event
        self._stop = event.stop
        self._begin()

    def _on_introduced(self, event: Introduced) -> None:
        self._rank_plan = event.rank_plan
        self._pace = event.pace
        self._flags = event.flags
        self._introduce(event)
        self._begin()

    def _begin(self) -> None:
        if self._awaited is None or self._rank_plan is None:
            return
        self.state = Receiving.MOVING
        self._claim_by = self.now + self._options.claim_s
        a = self._awaited
        self._rank_plan = self._rank_plan.for_rows(RowRange(a.start, a.stop))
        self._floor = self._rank_plan.floor(a.start)
        self.exposed = a.tables is not None
        if not self.exposed or a.verify != "off":
            self._flags = ()
        for w in self.writers.values():
            self._expect(w, a)

    def _expect(self, w: Writer, a: Awaited) -> None:
        expect = Expect(
            **w.head,
            start=a.start,
            stop=a.stop,
            path=a.path,
            tables=a.tables,
            tag=self.tag,
            verify=a.verify,
            pace=self._pace,
            flags=self._flags[w.rank] if self._flags else None,
            unsegmented=a.unsegmented,
        )
        self._out.append(self._repeat.start(("expect", w.rank), Send(w.epoch, expect), self.now))

    def _on_met(self, event: Met) -> None:
        assert self._awaited is not None
        w = self.writers.get(event.peer)
        if w is not None and not w.complete:
            self._expect(w, self._awaited)

    def _on_expected(self, event: Expected) -> None:
        w = self._writer(event)
        if not event.parked:
            self._repeat.stop(("expect", w.rank))
            self._name_transport(w, event.transport)
            self._check_placed()
            return
        # Each repetition keeps it parked for as long as a peer may be silent.
        self._repeat.slow(("expect", w.rank))

    def _name_transport(self, w: Writer, transport: str) -> None:
        """A writer names what carries its writes."""
        assert self._rank_plan is not None
        parts, writers = self._rank_plan.parts, self.writers.values()
        if w.transport != transport:
            w.transport = transport
            self.transport = "+".join(sorted({one.transport for one in writers if one.transport and parts[one.rank]}))
            self._transports_known = None not in [one.transport for one in writers]

    # Moving.

    def _on_request(self, event: StagingRequest) -> None:
        w = self._writer(event)
        assert self._awaited is not None
        if self._awaited.tables is not None:
            self._refuse(w, f"must not use staging memory: the path is {self._awaited.path!r}")
            return
        segment = Segment(*event.segment)
        if w.open >= self._options.window and segment not in self.inbound:
            # It is repeated, and by then fewer are open: a peer with a larger window than ours only waits.
            self._send(w, Queued(**w.head, segment=segment))
            return
        part = self._part(w, segment)
        if part is None:
            return
        if w.rank in part.arrived:
            self._send_landed(w, segment)
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
            self._send(w, Queued(**w.head, segment=segment))
        self._out.append(Reserve(part.asker, segment, part.nbytes, event.ready))

    def _part(self, w: Writer, segment: Segment) -> InboundSegment | None:
        """The segment in hand, new or not; None: it was answered, or it has failed the room."""
        assert self._awaited is not None
        assert self._rank_plan is not None
        rows = range(self._floor, self._awaited.most if self._stop is None else self._stop)
        try:
            if segment.start >= segment.stop or segment.first >= segment.last:
                raise RemoteProtocolError(f"an empty segment: {segment}")
            if segment not in self.inbound and self.inbound.has_placed(segment):
                self._send_landed(w, segment)
                return None
            return self.inbound.find(segment, w.rank, w.epoch, self._rank_plan, rows)
        except (RemoteProtocolError, GeometryError) as exc:
            self._refuse(w, f"sent a wrong segment: {exc}")
            return None

    def _on_leased(self, event: Leased) -> None:
        part = self.inbound[event.segment]
        part.lease = event.lease
        for w in self.writers.values():
            if w.rank in part.asked:
                self._grant(w, event.segment, part)
        self._prepare(event.segment, part)

    def _grant(self, w: Writer, segment: Segment, part: InboundSegment) -> None:
        assert part.lease is not None
        offset, nbytes = part.offsets[w.rank]
        grant = Grant(
            **w.head,
            segment=segment,
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
        """A writer returns what it was granted."""
        w, segment = self._writer(event), Segment(*event.segment)
        self._send(w, Returned(**w.head, segment=segment, ask=event.ask))
        part = self.inbound.get(segment)
        if part is None or w.rank in part.arrived or part.asks.get(w.rank) != event.ask:
            return
        part.asked.discard(w.rank)
        if self._release(segment, part):
            part.lease, part.prepared = None, False

    def _on_chunk_ready(self, event: ChunkReady) -> None:
        assert self._awaited is not None
        w, segment = self._writer(event), Segment(*event.segment)
        if event.lease is None and self._awaited.tables is None:
            self._refuse(w, "wrote to pages that were not exposed")
            return
        part = self._part(w, segment)
        if part is None:
            return
        if event.lease is not None and not part.granted(w.rank, event.lease):
            self._refuse(w, f"used lease {event.lease} of {segment}")
            return
        verify = self._awaited.verify
        compared = event.sums is not None or verify != "off"
        if compared and (problem := unlike(self.room, segment, event.sums, verify)):
            self._refuse(w, f"sent {problem} of {segment}")
            return
        self._send_landed(w, segment)
        if w.rank not in part.arrived:
            self._land(w, segment, part, event)

    def _land(self, w: Writer, segment: Segment, part: InboundSegment, notice: ChunkReady) -> None:
        """A writer's part of a segment is there."""
        self._arrive(part, w)
        if problem := w.problem:
            self._refuse(w, problem)
            return
        if notice.sums is not None:
            part.sums[w.rank] = notice.sums
        if notice.lease is not None:
            part.staged.add(w.rank)
        if len(part.arrived) < len(part.writers):
            self._check_placed()
        elif part.staged or part.sums:
            part.scattering = True
            self._out.append(Scatter(segment, part.places(part.staged), part.sums))
        else:
            self._finish_part(segment)

    def _on_scattered(self, event: Scattered) -> None:
        self.inbound[event.segment].scattering = False
        if event.error is not None:
            self._fail(ours(event.error, f"{self._name()}: scatter of {event.segment} failed"))
            return
        self._finish_part(event.segment)

    def _finish_part(self, segment: Segment) -> None:
        self.inbound.place(segment)
        if self._release(segment, self.inbound[segment]):
            del self.inbound[segment]
        self._check_placed()

    def _on_done(self, event: Done) -> None:
        assert self._awaited is not None
        w, a = self._writer(event), self._awaited
        if w.done is not None:
            return
        w.done = event
        self._name_transport(w, event.transport)
        if problem := w.problem or misplaced([one.stop for one in self.writers.values()], a):
            self._refuse(w, problem)
            return
        self._stop = event.stop if a.stop is None else a.stop
        self._check_placed()

    def _check_placed(self) -> None:
        """Vote for success only if the placed segments exactly cover the awaited rows: ``Done`` alone proves nothing.

        ``Done`` may overtake notices, so this waits until each announced segment has arrived. Where only rows are
        awaited, and it is known which, nothing waits for ``Done``, unless there are none to come.
        """
        assert self._awaited is not None
        assert self._rank_plan is not None
        writers = self.writers.values()
        done = all(w.complete for w in writers)
        landed = self.inbound.segments_placed > 0 and not self.inbound
        # Whether every writer has to say how the room ends: at which row, or with which aux data.
        needs_ends = self._awaited.stop is None or self._awaited.aux_bytes > 0
        known = landed and not needs_ends and self._transports_known
        if self.inbound.scattering or not (done or known):
            return
        assert self._stop is not None
        if missing := self.inbound.missing(self._rank_plan, RowRange(self._awaited.start, self._stop)):
            if not done:
                return
            what = f"{'states of ' if missing[0].state else ''}layers {missing[0].layers}"
            reason = f"{self._name()}: prefill is done, but {what} are not complete"
            self._fail(RemoteProtocolError(reason, instance=self.source))
            return
        aux = chosen(w.aux for w in writers)
        if aux is not None:
            self._out.append(Store(aux))
        elif self._awaited.aux_bytes:
            reason = f"{self._name()}: an aux row is awaited, and prefill gave none"
            self._fail(IntegrityError(reason, instance=self.source))
            return
        self._repeat.clear()
        self.exposed = False  # every byte that a writer had for these pages is there
        self.state = Receiving.PLACED
        self._out.append(CastVote(True, ""))

    # Placed here, not yet agreed.

    def _on_answer_placed(self, event: StagingRequest | ChunkReady) -> None:
        self._send_landed(self._writer(event), Segment(*event.segment))

    def _on_doubt(self, event: Abort | Drained | Cancel) -> None:
        """It is too late to fail alone: vote against the room, so that all ranks fail it."""
        if isinstance(event, Cancel):
            reason = str(event.error)
        else:
            reason = event.reason
            if isinstance(event, Drained):
                self._acknowledge_drained(event)
            else:
                w = self._writer(event)
                self._send(w, Abort(**w.head, reason=words(reason)))
        self._withdraw(reason)

    def _withdraw(self, reason: str) -> None:
        """Vote against a room that this rank has voted for: it fails unless rank 0 has decided."""
        self._out.append(CastVote(False, reason))

    def _on_tick_placed(self, event: Tick) -> None:
        if self.now >= self._deadline:
            self._deadline = self.now + self._options.total_s
            self._withdraw(f"{self._name()}: no agreement within {self._options.total_s:g} s")

    def _on_decided(self, event: Decided) -> None:
        if not event.ok or self.state is not Receiving.PLACED:
            why = "the others agree without this rank" if event.ok else f"another rank failed: {event.reason}"
            self._fail(AbortedError(f"{self._name()}: {why}"))
            return
        for w in self.writers.values():
            self._send(w, Complete(**w.head))
        self.state = Receiving.CLOSED

    # Failing.

    def _on_tick(self, event: Tick) -> None:
        writers = self.writers.values()
        if self.now >= self._deadline:
            where = waited_for(writers) if writers else "the prefill ranks were not found"
            late = f"{self._name()}: not complete within {self._options.total_s:g} s: {where}"
            self._fail(DeadlineError(late, instance=self.source))
        elif self.now >= self._claim_by:
            late = f"prefill ranks {unopened(writers)} have not opened it within {self._options.claim_s:g} s (claim_s)"
            self._fail(DeadlineError(f"{self._name()}: {late}", instance=self.source))
        else:
            self._out += self._repeat.tick(self.now)

    def _on_their_abort(self, event: Abort) -> None:
        if tags_differ(event.tag, self.tag):
            other = f"{self._name()}: prefill's tag {event.tag.hex()} is not {self.tag.hex()}"
            self._fail(IntegrityError(other, **self._who(self._writer(event))))
        else:
            self._give_up(event)

    def _on_drained(self, event: Drained) -> None:
        self._acknowledge_drained(event)
        self._give_up(event)

    def _give_up(self, event: Abort | Drained) -> None:
        w = self._writer(event)
        self._fail(AbortedError(f"{self._name()}: prefill rank {w.rank} gave up: {event.reason}", **self._who(w)))

    def _refuse(self, w: Writer, problem: str) -> None:
        """A writer did what it must not do."""
        self._fail(RemoteProtocolError(f"{self._name()}: rank {w.rank} {problem}", **self._who(w)))

    def _on_lost(self, event: Lost) -> None:
        """A writer is needed until all that it announced has arrived; while none is known, any lost peer is needed."""
        w = self.writers.get(event.peer)
        if w is not None:
            w.lost = True
        if not w.complete if w is not None else not self.writers:
            known: About = {} if w is None else self._who(w)
            self._fail(ours(event.error, self._name(), **known))

    def _on_cancel(self, event: Cancel) -> None:
        self._fail(ours(event.error, self._name()))

    def _send_landed(self, w: Writer, segment: Segment) -> None:
        self._send(w, Landed(**w.head, segments=(segment,)))

    def check_integrity(self) -> None:
        """Raise AssertionError if the accounts contradict each other."""
        live = self.error is None
        self.inbound.check_integrity({w.rank: w.open for w in self.writers.values()} if live else None)
        assert self.state is not Receiving.CLOSED or not self.inbound
        assert live or self.state in (Receiving.DRAINING, Receiving.CLOSED)
