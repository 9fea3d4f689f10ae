"""A room on one prefill rank as a whole: the engine's chunks, a flow per decode rank, and one outcome for all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from math import inf

from ...errors import (
    AbortedError,
    About,
    DeadlineError,
    DisaggKVError,
    LocalProtocolError,
    OversizeError,
    RemoteProtocolError,
)
from ...geometry import PageTable
from ...ids import Epoch, Generation, GroupId, LayerId, RoomId, room_name
from ...planning import Batch
from ..base import Cancel, CastVote, Decided, Effect, Finished, Lost, Offered, Options, Phase, Tick
from ..wire.frames import Abort
from .flow import Flow, FlowPlan, room_head
from .machine import ours
from .rows import Chunk, Rows
from .tables import Sending


class SendRoom:
    """All flows of a room. Any failure fails all of them; success needs ``Complete`` from every decode rank.

    Args:
        room, generation: its name and incarnation.
        epoch: ours.
        options: times and bounds.
        now: when it was opened.
        tokenless: see :class:`Rows`.
        who: what is known of a decode rank, for errors.
    """

    def __init__(
        self,
        room: RoomId,
        generation: Generation,
        epoch: Epoch,
        options: Options,
        now: float,
        tokenless: Collection[LayerId] = (),
        who: Callable[[Epoch], About] | None = None,
    ) -> None:
        self.room = room
        self.generation = generation
        self.error: DisaggKVError | None = None
        self.done = False
        self.reads = 0
        self.flows: dict[Epoch, Flow] = {}
        self.world: int | None = None
        self.rows = Rows(tokenless)
        self._epoch = epoch
        self._options = options
        self._who = who
        self._deadline = now + options.total_s
        self._claim_by = inf
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
        return Phase.MOVING if self.rows.chunks or self._finished else Phase.READY

    @property
    def released(self) -> bool:
        """True: the outcome is final, and no gather or write reads the room's pages any more."""
        return (self.done or self.error is not None) and self.reads == 0

    @property
    def closed(self) -> bool:
        """True: no frame is left to be sent or awaited."""
        return self.released and all(f.state is Sending.CLOSED for f in self.flows.values())

    def next_at(self) -> float | None:
        """When a Tick is due."""
        soonest = min(self._deadline, self._claim_by) if self.error is None and not self.done else None
        for flow in self.flows.values():
            at = flow.next_at()
            if at is not None and (soonest is None or at < soonest):
                soonest = at
        return soonest

    # Calls of the engine.

    def add(
        self,
        call_id: int,
        start: int,
        stop: int,
        tables: Mapping[GroupId, PageTable],
        *,
        ready: bool,
        now: float,
        batch: Batch | None = None,
    ) -> list[Effect]:
        """Rows with their pages; those known already get these pages again after a withdrawal. See :meth:`Rows.add`."""
        if self.error is not None or self.done:
            return []
        end = self.rows.stop
        if self._finished is not None and stop > end:
            raise LocalProtocolError(f"{room_name(self.room)}: rows up to {stop} after it was finished at {end}")
        chunk = self.rows.add(call_id, start, stop, tables, ready=ready, batch=batch)
        out: list[Effect] = []
        if chunk is not None:
            for flow in self._planned():
                out += _offer(flow, [chunk], now)
                out += self._offer_states(flow, now)
        return self._reviewed(out, now) + self._all(Offered(changed=start < end), now)

    def ready(self, call_id: int, layers: Collection[LayerId] | None, now: float) -> list[Effect]:
        """These layers (None: all) of the rows that came by a call are computed."""
        self.rows.ready(call_id, layers)
        return self._all(Offered(), now)

    def groups(self) -> Set[frozenset[LayerId]]:
        """Layers that cross together and have not landed: only when all of a set are final can more cross than before.

        Of all rows of the room: rows that were withdrawn and given again are cut as before, by calls that differ.
        """
        runs = {run for flow in self.flows.values() for run in flow.outbound.runs()}
        return {self.rows.awaited(run) for run in runs}

    def withdraw(self, now: float) -> list[Effect]:
        """Forget all pages: no further read begins until pages are given again; unused grants are returned."""
        self.rows.withdraw()
        return self._all(Offered(), now)

    def finish(
        self,
        stop: int,
        aux: bytes | None,
        now: float,
        states: Mapping[GroupId, PageTable] | None = None,
    ) -> list[Effect]:
        """End the room's rows at ``stop``; its states, if it has any, are final.

        After a withdrawal another call gives the states again; its other arguments must equal those of the first.
        """
        if self.error is not None or self.done:
            return []
        if self._finished is not None:
            if states and self.rows.states is not None and self.rows.states.tables is None:
                self.rows.give_states(states)
                return self._all(Offered(), now)
            raise LocalProtocolError(f"{room_name(self.room)}: finished at row {self._finished.stop} already")
        end = self.rows.stop
        if stop != end and end:
            raise LocalProtocolError(f"{room_name(self.room)}: finish at row {stop}, but chunks end at {end}")
        self._finished = Finished(stop, aux)
        self._await_claims(now)
        out: list[Effect] = []
        if states:
            self.rows.give_states(states)
            for flow in self._planned():
                out += self._offer_states(flow, now)
            out = self._reviewed(out, now) + self._all(Offered(), now)
        return out + self._all(self._finished, now)

    # Frames of decode ranks.

    def expect(self, peer: Epoch, generation: Generation, plan: FlowPlan, world: int, now: float) -> list[Effect]:
        """A decode rank awaits the room: begin its flow. If the room has failed, the flow ends at once."""
        flow = self._flow(peer, generation, plan)
        error = self.error
        if self.world not in (None, world):
            worlds = f"decode instances of {self.world} and {world} ranks"
            error = RemoteProtocolError(f"{room_name(self.room)}: {worlds}", **flow.who)
        if error is not None:
            return self._reviewed(flow.handle(Cancel(error), now), now)
        self.world = world
        self._await_claims(now)
        out = _offer(flow, self.rows.chunks, now)
        out += self._offer_states(flow, now)
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
        flow = Flow(head, plan, self._options, self.rows.readiness, self._who(peer) if self._who else None)
        self.flows[peer] = flow
        return flow

    def _await_claims(self, now: float) -> None:
        """A finished room waits for ``claim_s`` for the next decode rank that asks for it, until all have."""
        waits = self._finished is not None and self.world != len(self.flows)
        self._claim_by = now + self._options.claim_s if waits else inf

    def handle(self, peer: Epoch, event: object, now: float) -> list[Effect]:
        """An event of one flow; nothing after its end."""
        flow = self.flows[peer]
        if flow.state is Sending.CLOSED:
            return []
        if isinstance(event, Lost) and flow.state is Sending.COMPLETE and self.world != len(self.flows):
            return self.cancel(ours(event.error, room_name(self.room)), now)  # the others may never ask
        return self._reviewed(flow.handle(event, now), now)

    def tick(self, now: float) -> list[Effect]:
        """Time has passed."""
        if now >= self._deadline and self.error is None and not self.done:
            # Once it has voted, the other ranks decide: they are asked again only after another ``total_s``.
            self._deadline = now + self._options.total_s
            return self.cancel(DeadlineError(self._overdue()), now)
        if now >= self._claim_by and self.error is None:
            asked = f"{len(self.flows)} of {self.world} decode ranks" if self.flows else "no decode rank"
            unclaimed = f"{asked} asked for it within {self._options.claim_s:g} s of its end (claim_s)"
            return self.cancel(DeadlineError(f"{room_name(self.room)}: {unclaimed}"), now)
        return self._all(Tick(), now)

    def _overdue(self) -> str:
        late = [f"{f.peer_name} is {f.state.value}" for f in self.flows.values() if f.state is not Sending.COMPLETE]
        world = "unknown" if self.world is None else self.world
        asked = f"{len(self.flows)} of {world} decode ranks asked for it"
        plans = [f.plan for f in self.flows.values() if f.plan is not None]
        layers = {LayerId(layer) for p in plans for run in p.rank_plan.ranges(p.rank) for layer in run}
        missing = self.rows.missing(layers)
        why = [asked, *late, *([missing] if missing else [])]
        return f"{room_name(self.room)}: not complete within {self._options.total_s:g} s: {'; '.join(why)}"

    # The end of the room.

    def cancel(self, error: DisaggKVError, now: float) -> list[Effect]:
        """Our engine, a deadline or a lost peer ends the room; nothing after its end."""
        if self.error is not None or self.done:
            return []
        if self._voted:
            return [CastVote(False, str(error))]
        return self._fail(error, now)

    def decided(self, event: Decided, now: float) -> list[Effect]:
        """The ranks of our instance agree."""
        if self.error is not None or self.done:
            return []
        if not event.ok:
            return self._fail(AbortedError(f"{room_name(self.room)}: another rank failed: {event.reason}"), now)
        assert self._voted
        self.done = True
        self.rows.clear()
        return self._all(event, now)

    def _fail(self, error: DisaggKVError, now: float) -> list[Effect]:
        self.error = error.about(room=self.room)
        self._voted = False
        self.rows.clear()
        out: list[Effect] = [CastVote(False, str(error))]
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
        complete = self.world == len(self.flows)
        for flow in self.flows.values():
            if flow.error is not None:
                return out + self._fail(ours(flow.error, room_name(self.room)), now)
            complete = complete and flow.state is Sending.COMPLETE
        if complete and self._voted is None:
            self._voted = True
            out.append(CastVote(True, ""))
        return out

    def _offer_states(self, flow: Flow, now: float) -> list[Effect]:
        """Add the states to a flow: with the last rows that it awaits, so that their leases are there in time.

        A state that no slot or lease can hold ends the flow.
        """
        known = self.rows.states is not None or flow.awaits_no_more(self.rows.stop)
        if flow.state is not Sending.MOVING or not known:
            return []
        try:
            flow.offer_states()
        except OversizeError as exc:
            return flow.handle(Cancel(exc), now)
        return []

    def _planned(self) -> list[Flow]:
        return [f for f in self.flows.values() if f.plan is not None and f.state is Sending.MOVING]

    def check_integrity(self, since: float = -inf) -> None:
        """Raise AssertionError if the accounts contradict each other: of flows that write or had an event ``since``."""
        assert self.reads >= 0
        assert not (self.done and self.error is not None)
        for flow in self.flows.values():
            if flow.now >= since or flow.busy:
                flow.check_integrity()


def _offer(flow: Flow, chunks: Sequence[Chunk], now: float) -> list[Effect]:
    """Add chunks to a flow; rows that no slot or lease can hold end it."""
    try:
        for chunk in chunks:
            flow.offer(chunk.start, chunk.stop, chunk.batch)
    except Exception as exc:
        # A schedule may be foreign code: its errors fail this room alone.
        return flow.handle(Cancel(exc), now)
    return []
