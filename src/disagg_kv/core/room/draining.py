"""The memory of a room on a decode rank: which of it a peer may still write to, and how it comes back after a failure.

Theory of operation. :class:`DrainingRoom` has the accounts: the writers, the segments in hand, and whether prefill was
given the room's pages. :class:`~disagg_kv.core.room.receive_room.ReceiveRoom` fills them while the room may succeed.
:meth:`DrainingRoom._fail` ends that: the phase is final at once, but a write may be in flight. Each writer gets an
``Abort``, which is repeated until there is evidence that it writes nothing more.

Memory comes back on evidence only. A lease is reusable when no scatter reads it, no staged byte is needed, and each
writer that has its grant has announced its part, returned the grant, or is proved to write nothing more. The proof is
``Drained``, the last frame of an endpoint that closes, a fence of the transport, or the end of its process and
``drain_s`` after it. A lost connection proves nothing. :meth:`~disagg_kv.core.room.inbound.InboundSegment.reusable`
holds that rule, and only :meth:`DrainingRoom._release` asks it. A lease that no writer knows is freed at once:
``_on_leased_late``. Exposed pages follow the same rule by room: :attr:`DrainingRoom.released` says when the engine may
free them.
"""

from __future__ import annotations

from math import inf

from ...errors import About, DisaggKVError
from ...ids import Epoch, Generation, Rank, RoomId, room_name
from ...planning import Segment
from ..base import CastVote, Free, Gone, Introduced, Leased, Lost, Met, Options, Quarantine, Scattered, Send, Tick
from ..timers import Repeater
from ..wire.frames import Abort, ChunkReady, Done, Drained, DrainedAck, Head, RoomFrame, StagingRequest, words
from .inbound import InboundSegment, InboundSegments, Writer
from .machine import Machine
from .tables import RECEIVING, Receiving


class DrainingRoom(Machine[Receiving]):
    """The accounts of a room, and all that it does after it has failed.

    ``writers`` are the prefill ranks, once they are known; of a room that failed before, those that have learned it.
    ``inbound`` are the segments that are not placed in pages, ``exposed`` says that prefill was given the pages.
    """

    def __init__(
        self, room: RoomId, generation: Generation, epoch: Epoch, options: Options, tag: bytes, source: str
    ) -> None:
        super().__init__(RECEIVING, Receiving.OPENED)
        self.room = room
        self.generation = generation
        self.tag = tag
        self.source = source
        self.error: DisaggKVError | None = None
        self.inbound = InboundSegments()
        self._epoch = epoch
        self._options = options
        self._repeat = Repeater(options)
        self.writers: dict[Epoch, Writer] = {}
        self.exposed = False
        self._known = False
        self._until = inf

    @property
    def released(self) -> bool:
        """Whether neither this rank nor a peer reads or writes the room's pages any more."""
        if self.state is Receiving.CLOSED:
            return True
        if self.state is not Receiving.DRAINING or self.inbound.scattering:
            return False
        return not any(self._may_touch_pages(w) for w in self.writers.values())

    def owed(self) -> dict[Epoch, tuple[int, bool]]:
        """For each writer that may still write to memory of this failed room: bytes of leases, and whether to pages."""
        owing = [w for w in self.writers.values() if self._owes(w)]
        return {w.epoch: (self.inbound.leased(w.rank), self._may_touch_pages(w)) for w in owing}

    def _introduce(self, event: Introduced) -> None:
        for epoch in event.writers:
            self._join(epoch)
        self._known = True

    def _join(self, epoch: Epoch) -> Writer:
        """A further prefill rank."""
        head = Head(src=self._epoch, dst=epoch, room=self.room, generation=self.generation)
        self.writers[epoch] = w = Writer(epoch, Rank(len(self.writers)), head)
        return w

    # The rule.

    def _may_touch_pages(self, w: Writer) -> bool:
        return self.exposed and w.done is None and not w.evidence

    def _owes(self, w: Writer) -> bool:
        """Whether this writer may still write to memory of ours."""
        return self._may_touch_pages(w) or (not w.evidence and self.inbound.leased(w.rank) > 0)

    def _release(self, segment: Segment, part: InboundSegment) -> bool:
        """Free a segment's lease, or its place in the queue, if it may be reused."""
        ended = [w.rank for w in self.writers.values() if w.evidence]
        reusable = part.reusable(ended, wanted=self.error is None)
        if reusable:
            self._out.append(Free(segment))
        return reusable

    # Failing.

    def _fail(self, error: DisaggKVError) -> None:
        self.error = error.about(room=self.room)
        self.state = Receiving.DRAINING
        self._repeat.clear()
        self._out.append(CastVote(False, str(error)))
        for w in self.writers.values():
            self._abort(w)
        self._until = inf if self._known else self.now + self._options.silence_s
        self._out += [Quarantine(segment) for segment, part in self.inbound.items() if part.lease is not None]
        self._release_all()

    def _abort(self, w: Writer) -> None:
        if not w.evidence:
            abort = Abort(**w.head, reason=words(self.error), tag=self.tag)
            self._out.append(self._repeat.start(("abort", w.rank), Send(w.epoch, abort), self.now))

    def _release_all(self) -> None:
        """Release what no writer can reach any more; close when nothing is left."""
        for segment, part in list(self.inbound.items()):
            if self._release(segment, part):
                del self.inbound[segment]
        # Before its prefill ranks are known, further ones may come, and learn that it has failed.
        ended = self._known
        for w in self.writers.values():
            if w.evidence or (w.lost and not self._owes(w)):
                self._repeat.stop(("abort", w.rank))
            else:
                ended = False
        if ended and not self.inbound:
            self.state = Receiving.CLOSED

    # Evidence, and what is known of a writer without it; in every state.

    def _acknowledge_drained(self, event: Drained) -> None:
        w = self._writer(event)
        w.drained = True
        self._send(w, DrainedAck(**w.head))

    def _on_gone(self, event: Gone) -> None:
        if (w := self.writers.get(event.peer)) is not None:
            w.gone = True

    def _on_lost_placed(self, event: Lost) -> None:
        if (w := self.writers.get(event.peer)) is not None:
            w.lost = True

    def _arrive(self, part: InboundSegment, w: Writer) -> None:
        part.arrived.add(w.rank)
        w.arrived += 1
        w.open -= w.rank in part.asks

    # Draining.

    def _on_met_late(self, event: Met) -> None:
        if not self._known:
            w = self.writers.get(event.peer) or self._join(event.peer)
            w.lost = False
            self._abort(w)

    def _on_answer_abort(self, event: StagingRequest | Abort) -> None:
        w = self._writer(event)
        self._send(w, Abort(**w.head, reason=words(self.error)))

    def _on_leased_late(self, event: Leased) -> None:
        self._out.append(Free(event.segment))  # no writer knows of it

    def _on_late_chunk(self, event: ChunkReady) -> None:
        w = self._writer(event)
        part = self.inbound.get(Segment(*event.segment))
        if part is not None and event.lease is not None and part.granted(w.rank, event.lease):
            if w.rank not in part.arrived:
                self._arrive(part, w)
            self._release_all()

    def _on_scattered_late(self, event: Scattered) -> None:
        self.inbound[event.segment].scattering = False
        self._release_all()

    def _on_late_done(self, event: Done) -> None:
        self._writer(event).done = event
        self._release_all()

    def _on_drained_late(self, event: Drained) -> None:
        self._acknowledge_drained(event)
        self._release_all()

    def _on_lost_late(self, event: Lost) -> None:
        self._known |= not event.peer  # no further prefill rank will come
        self._on_lost_placed(event)
        self._release_all()

    def _on_gone_late(self, event: Gone) -> None:
        self._on_gone(event)
        self._release_all()

    def _on_tick_draining(self, event: Tick) -> None:
        self._out += self._repeat.tick(self.now)
        if self.now >= self._until:
            self.state = Receiving.CLOSED

    # Names and frames.

    def _writer(self, frame: RoomFrame) -> Writer:
        return self.writers[Epoch(frame.src)]

    def _name(self) -> str:
        return f"{room_name(self.room)} generation {self.generation} from instance {self.source!r}"

    def _who(self, w: Writer) -> About:
        return {"instance": self.source, "rank": w.rank, "epoch": w.epoch}

    def _send(self, w: Writer, frame: RoomFrame) -> None:
        self._out.append(Send(w.epoch, frame))
