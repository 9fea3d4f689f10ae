"""A room on one prefill rank as a whole: the engine's chunks, a flow per decode rank, and one outcome for all."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from attrs import define

from ..errors import AbortedError, DeadlineError, DisaggKVError, LocalProtocolError, OversizeError, RemoteProtocolError
from ..geometry import PageTable
from ..ids import Epoch, Generation, GroupId, RoomId
from ..planning import Segment
from .base import Cancel, Decided, Effect, Finished, Later, Offered, Options, Phase, Tick, Vote
from .frames import Abort
from .machine import ours
from .sending import Flow, FlowPlan, room_head
from .tables import Sending


@define
class Chunk:
    """Rows that the engine handed over together.

    Args:
        start, stop: which rows.
        tables: their pages; None after a withdrawal, until they are given again.
        ready: False while they are still being computed (look-ahead).
        after: the engine's event; None: the bytes are final.
    """

    start: int
    stop: int
    tables: Mapping[GroupId, PageTable] | None
    ready: bool
    after: Later | None


class SendRoom:
    """All flows of a room. Any failure fails all of them; success needs ``Complete`` from every decode rank."""

    def __init__(
        self, room: RoomId, generation: Generation, epoch: Epoch, options: Options, now: float, total_s: float
    ) -> None:
        self.room = room
        self.generation = generation
        self.error: DisaggKVError | None = None
        self.done = False
        self.reads = 0
        self.flows: dict[Epoch, Flow] = {}
        self.world: int | None = None
        self.chunks: list[Chunk] = []
        self._epoch = epoch
        self._options = options
        self._total_s = total_s
        self._deadline = now + total_s
        self._finished: Finished | None = None
        self._voted: bool | None = None

    @property
    def phase(self) -> Phase:
        """How far the room is."""
        if self.error is not None:
            return Phase.FAILED
        if self.done:
            return Phase.DONE
        if self.world is None or len(self.flows) < self.world:
            return Phase.CONNECTING
        return Phase.MOVING if self.chunks or self._finished else Phase.READY

    @property
    def released(self) -> bool:
        """True: the outcome stands and nobody reads the room's pages any more."""
        return (self.done or self.error is not None) and self.reads == 0

    @property
    def closed(self) -> bool:
        """True: nothing is left to be said or waited for."""
        return self.released and all(f.state is Sending.CLOSED for f in self.flows.values())

    @property
    def stop(self) -> int:
        """One past the last row handed over."""
        return self.chunks[-1].stop if self.chunks else 0

    def next_at(self) -> float | None:
        """When a Tick is due."""
        times = [f.next_at() for f in self.flows.values()]
        if self.error is None and not self.done:
            times.append(self._deadline)
        return min((t for t in times if t is not None), default=None)

    # What the engine says.

    def add(
        self, stop: int, tables: Mapping[GroupId, PageTable], *, ready: bool, after: Later | None, now: float
    ) -> list[Effect]:
        """Rows up to ``stop`` with their pages; rows known already get these pages again after a withdrawal."""
        if self.error is not None or self.done:
            return []
        if self._finished is not None and stop > self.stop:
            raise LocalProtocolError(f"room {self.room.hex()}: rows up to {stop} after it was finished at {self.stop}")
        for chunk in self.chunks:
            covered = chunk.stop <= stop and all(t.first <= chunk.start for t in tables.values())
            if chunk.tables is None and covered:
                chunk.tables, chunk.ready, chunk.after = tables, ready, after
        out: list[Effect] = []
        if stop > self.stop:
            chunk = Chunk(self.stop, stop, tables, ready, after)
            self.chunks.append(chunk)
            for flow in self._planned():
                out += _offer(flow, [chunk], now)
        return self._reviewed(out, now) + self._all(Offered(), now)

    def ready(self, stop: int, after: Later | None, now: float) -> list[Effect]:
        """The rows up to ``stop`` that were announced ahead are computed now, or will be at ``after``."""
        for chunk in self.chunks:
            if chunk.stop <= stop and not chunk.ready:
                chunk.ready, chunk.after = True, after
        return self._all(Offered(), now)

    def withdraw(self) -> None:
        """Forget all pages: what is not being read now is not read until pages are given again."""
        for chunk in self.chunks:
            chunk.tables = None

    def finish(self, stop: int, aux: bytes | None, tag: bytes, now: float) -> list[Effect]:
        """Nothing is added: the room's rows end at ``stop``."""
        if self.error is not None or self.done:
            return []
        if self._finished is not None:
            raise LocalProtocolError(f"room {self.room.hex()}: finished at row {self._finished.stop} already")
        if stop != self.stop and self.chunks:
            raise LocalProtocolError(f"room {self.room.hex()}: finish at row {stop}, but chunks end at {self.stop}")
        self._finished = Finished(stop, aux, tag)
        return self._all(self._finished, now)

    def chunk(self, segment: Segment) -> Chunk:
        """The chunk that a segment lies in."""
        return self.chunks[bisect_right(self.chunks, segment.start, key=lambda c: c.start) - 1]

    # What decode ranks say.

    def expect(self, peer: Epoch, generation: Generation, plan: FlowPlan, world: int, now: float) -> list[Effect]:
        """A decode rank awaits the room: begin its flow. If the room has failed, the flow ends at once."""
        flow = self._flow(peer, generation, plan)
        error = self.error
        if self.world not in (None, world):
            error = RemoteProtocolError(f"room {self.room.hex()}: decode instances of {self.world} and {world} ranks")
        if error is not None:
            return self._reviewed(flow.handle(Cancel(error), now), now)
        self.world = world
        out = _offer(flow, self.chunks, now)
        out += flow.handle(Offered(), now)
        if self._finished is not None:
            out += flow.handle(self._finished, now)
        return self._reviewed(out, now)

    def decline(self, peer: Epoch, generation: Generation, abort: Abort, now: float) -> list[Effect]:
        """A decode rank gives the room up before it awaited anything."""
        return self._reviewed(self._flow(peer, generation, None).handle(abort, now), now)

    def refuse(self, peer: Epoch, generation: Generation, error: DisaggKVError, now: float) -> list[Effect]:
        """A decode rank awaits what we cannot send it: the room fails."""
        return self._reviewed(self._flow(peer, generation, None).handle(Cancel(error), now), now)

    def _flow(self, peer: Epoch, generation: Generation, plan: FlowPlan | None) -> Flow:
        head = room_head(self._epoch, peer, self.room, generation)
        flow = Flow(head, plan, self._options, self._available)
        self.flows[peer] = flow
        return flow

    def _available(self, segment: Segment) -> bool:
        chunk = self.chunk(segment)
        return chunk.ready and chunk.tables is not None

    def handle(self, peer: Epoch, event: object, now: float) -> list[Effect]:
        """An event of one flow; nothing after its end."""
        flow = self.flows[peer]
        if flow.state is Sending.CLOSED:
            return []
        return self._reviewed(flow.handle(event, now), now)

    def tick(self, now: float) -> list[Effect]:
        """Time has passed."""
        if now >= self._deadline and self.error is None and not self.done:
            return self.cancel(DeadlineError(self._overdue()), now)
        return self._all(Tick(), now)

    def _overdue(self) -> str:
        late = [
            f"{f.peer.hex()[:8]} is {f.state.value}" for f in self.flows.values() if f.state is not Sending.COMPLETE
        ]
        world = "unknown" if self.world is None else self.world
        asked = f"{len(self.flows)} of {world} decode ranks asked for it"
        return f"room {self.room.hex()}: not complete within {self._total_s:g} s: {'; '.join([asked, *late])}"

    # How it ends.

    def cancel(self, error: DisaggKVError, now: float) -> list[Effect]:
        """Our engine, a deadline or a lost peer ends the room; nothing after its end."""
        if self.error is not None or self.done:
            return []
        if self._voted:
            return [Vote(False, str(error))]
        return self._fail(error, now)

    def decided(self, event: Decided, now: float) -> list[Effect]:
        """The ranks of our instance agree."""
        if self.error is not None or self.done:
            return []
        if not event.ok:
            return self._fail(AbortedError(f"room {self.room.hex()}: another rank failed: {event.reason}"), now)
        assert self._voted
        self.done = True
        self.chunks.clear()
        return self._all(Cancel(AbortedError("complete")), now)

    def _fail(self, error: DisaggKVError, now: float) -> list[Effect]:
        self.error = error
        self._voted = False
        self.chunks.clear()
        out: list[Effect] = [Vote(False, str(error))]
        return out + self._all(Cancel(error), now)

    def _all(self, event: object, now: float) -> list[Effect]:
        out: list[Effect] = []
        for flow in self.flows.values():
            if flow.state is not Sending.CLOSED:
                out += flow.handle(event, now)
        return self._reviewed(out, now)

    def _reviewed(self, out: list[Effect], now: float) -> list[Effect]:
        """After every event: has a flow failed, or are all complete?"""
        if self.error is not None or self.done:
            return out
        failed = next((f for f in self.flows.values() if f.error is not None), None)
        if failed is not None:
            assert failed.error is not None
            return out + self._fail(ours(failed.error, f"room {self.room.hex()}"), now)
        complete = all(f.state is Sending.COMPLETE for f in self.flows.values())
        if self._voted is None and self.world == len(self.flows) and complete:
            self._voted = True
            out.append(Vote(True, ""))
        return out

    def _planned(self) -> list[Flow]:
        return [f for f in self.flows.values() if f.plan is not None and f.state is Sending.MOVING]

    def check_integrity(self) -> None:
        """Raise AssertionError if the accounts contradict each other."""
        assert self.reads >= 0
        assert not (self.done and self.error is not None)
        for flow in self.flows.values():
            flow.check_integrity()


def _offer(flow: Flow, chunks: Sequence[Chunk], now: float) -> list[Effect]:
    """Add chunks to a flow; rows that no slot or lease can hold end it."""
    try:
        for chunk in chunks:
            flow.offer(chunk.start, chunk.stop)
    except OversizeError as exc:
        return flow.handle(Cancel(exc), now)
    return []
