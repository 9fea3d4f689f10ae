"""The engines: they open rooms, compute chunks, preempt, abort, and free pages on ``released`` only."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from disagg_kv.core import Phase
from disagg_kv.endpoints import DecodeEndpoint, Expectation, PrefillEndpoint
from disagg_kv.endpoints.decode.handle import ReceptionHandle
from disagg_kv.endpoints.decode.path_choice import UNSAID
from disagg_kv.endpoints.prefill.handle import DeliveryHandle
from disagg_kv.errors import DisaggKVError, LocalProtocolError, QuarantineFullError, SupersededError
from disagg_kv.strategies import LayerPipelined

from .at_once import AtOnce
from .cached_requests import CachedRequest
from .check import Checks
from .cluster import Cluster
from .events import SimEvent
from .fault import FaultClass
from .forward_passes import ForwardPasses
from .kind import Kind
from .node import SimNode
from .request import Request
from .reused_ids import ReusedIds
from .rooms import Chunk, Entry, SimRoom

RETRY_S = 0.01
FINAL = (Phase.DONE, Phase.FAILED)


class Room(SimRoom):
    """One life of a room on all ranks of both sides, as their engines go on with it."""

    def __init__(
        self,
        world: Cluster,
        check: Checks,
        reused: ReusedIds,
        at_once: AtOnce,
        passes: Callable[[SimNode], ForwardPasses],
        number: int,
        plan: Request,
        first: SimRoom | None = None,
        again: Collection[str] = (),
    ) -> None:
        prefill = world.instance("prefill back" if plan.back else f"prefill {plan.source}")
        decode = world.instance("decode back" if plan.back else "decode")
        super().__init__(world.scenario, number, plan, prefill, decode, first, again)
        self.world = world
        self._check = check
        self._reused = reused
        self._at_once = at_once
        self._passes = passes
        self._cached = None if plan.prompt is None else CachedRequest(self, world, check, plan.prompt)
        self._begin()

    def _begin(self) -> None:
        world, plan, rng = self.world, self.plan, self.world.random
        if plan.unmet and plan.never:
            for entry in self.prefill if plan.unmet == "prefill" else self.decode:
                entry.refused = True
        for entry in self.prefill:
            skew = rng.randint(0, 2) / 1000
            world.later(plan.prefill_late[0] + skew, partial(self._open_prefill, entry))
        for entry in self.decode:
            skew = rng.randint(0, 2) / 1000
            world.later(plan.decode_late[0] + skew, partial(self._open_decode, entry))
        if not plan.late:
            self._plan_aborts()

    def _plan_aborts(self) -> None:
        world, plan, rng = self.world, self.plan, self.world.random
        if plan.abort_decode is not None:
            world.later(plan.abort_decode, partial(self.abort, rng.choice(self.decode)))
        if plan.abort_prefill is not None:
            world.later(plan.abort_prefill, partial(self.abort, rng.choice(self.prefill)))

    # Decode.

    def _open_decode(self, entry: Entry) -> None:
        node = entry.node
        if not node.alive or self.given_up or entry.refused:
            entry.refused = True
            return
        try:
            assert isinstance(node.endpoint, DecodeEndpoint)
            entry.handle = node.endpoint.open(self.plan.room, self.source, tag=self.tag, total_s=self.plan.total_s)
        except (LocalProtocolError, QuarantineFullError, SupersededError) as exc:
            self._turned_away(entry, exc)
            return
        entry.opened = self.world.now
        self.world.entries[id(entry.handle)] = entry
        self._reused.opened(entry)
        self.world.later(self.plan.decode_late[1], partial(self._expect, entry))

    def _turned_away(self, entry: Entry, error: DisaggKVError) -> None:
        """The endpoint takes no new work, or not under this id: the router gives the request up everywhere."""
        entry.refused = True
        if isinstance(error, LocalProtocolError):
            if not self._reused.refused(self, error):
                return
        else:
            full = isinstance(error, QuarantineFullError)
            self.world.mark("refused:quarantine full" if full else "refused:superseded")
        self.given_up = True
        for other in self.entries:
            if other.handle is not None:
                self.abort(other)

    def _expect(self, entry: Entry) -> None:
        handle, node, plan = entry.handle, entry.node, self.plan
        if self._is_over(entry):
            return
        assert isinstance(handle, ReceptionHandle)
        memory = node.memory
        if self._cached is not None and (memory.aux or not plan.aux):
            self._cached.match(entry)
            return
        stop = None if plan.open_end else plan.rows
        size = memory.page_rows
        first = min(memory.pool.site.first_rows(0, stop).values(), default=0) // size * size
        pages = memory.take(self.number, -(-plan.rows // size) - first // size)
        if pages is None or (plan.aux and not memory.aux):
            if pages:
                memory.give(pages)
            self.world.mark("engine:waits for pages")
            self.world.later(RETRY_S, partial(self._expect, entry))
            return
        entry.pages = pages
        memory.await_rows(pages, first, plan.rows, self.truth, stop is not None)
        if plan.aux:
            entry.aux = memory.aux.pop()
        entry.await_states()
        tables, slots = memory.tables(pages, first), memory.slot_tables(entry.slots)
        named = sum(len(table.pages) for table in (*tables, *slots))
        entry.exposed = node.exposes and 0 < named <= self.world.scenario.options.request_pages
        rows = self.world.count(plan.rows)
        entry.waits_from = self.world.now
        given = {"stop": None, "least": rows} if stop is None else {"stop": rows}
        handle.expect(Expectation(pages=tables, state=slots, aux=entry.aux, **given))

    # Prefill.

    def _open_prefill(self, entry: Entry) -> None:
        node, plan = entry.node, self.plan
        if not node.alive or self.given_up or entry.refused:
            entry.refused = True
            return
        try:
            assert isinstance(node.endpoint, PrefillEndpoint)
            entry.handle = node.endpoint.open(plan.room, tag=self.tag, total_s=plan.total_s)
        except (LocalProtocolError, QuarantineFullError, SupersededError) as exc:
            self._turned_away(entry, exc)
            return
        entry.opened = self.world.now
        self.world.entries[id(entry.handle)] = entry
        self._reused.opened(entry)
        self.world.later(plan.prefill_late[1], partial(self.chunk, entry, 0))
        if plan.withdraw is not None and not plan.late:
            self.world.later(plan.withdraw, partial(self.withdraw, entry))

    def _is_over(self, entry: Entry) -> bool:
        """Nothing is to be done for it any more."""
        handle = entry.handle
        return not entry.node.alive or handle is None or handle.phase in FINAL or entry.freed

    def _later(self, act: Callable[[], None]) -> None:
        self.world.later(RETRY_S, act)

    def chunk(self, entry: Entry, number: int) -> None:
        """The next chunk has pages: hand it over, or announce it and compute it."""
        if self._is_over(entry):
            return
        if number == len(self.plan.edges):
            self._finish(entry)
            return
        if self.plan.steps:
            self._passes(entry.node).join(entry, number)
            return
        chunk = self.taken(entry, number)
        if chunk is None:
            return
        handle, rng = entry.handle, self.world.random
        assert isinstance(handle, DeliveryHandle)
        ready: SimEvent | None = None
        if rng.random() < 0.4:
            ready = SimEvent()
            self.world.later(self.plan.pass_s, partial(self._final, chunk, ready))
        else:
            entry.write(chunk.start, chunk.stop, entry.pages)
        handle.send_chunk(self.world.count(chunk.stop), chunk.tables, ready)
        self._at_once.rows(entry)
        if self.plan.burst:
            self.chunk(entry, number + 1)
            return
        self.world.later(rng.randint(0, 4) / 1000, partial(self.chunk, entry, number + 1))

    def taken(self, entry: Entry, number: int) -> Chunk | None:
        """A chunk with its pages; None: it is not wanted any more, or it waits and comes again by itself."""
        if self._is_over(entry):
            return None
        stop = self.plan.edges[number]
        waits = entry.withdrawal is not None or entry.given != (self.plan.edges[number - 1] if number else 0)
        if waits or not self._room_for(entry, stop):
            self._later(partial(self.chunk, entry, number))
            return None
        size = entry.node.memory.page_rows
        first = entry.given // size * size
        tables = entry.node.memory.tables(entry.pages[first // size : -(-stop // size)], first)
        start, entry.given = entry.given, stop
        return Chunk(entry, number, start, stop, list(entry.pages), tables)

    def _room_for(self, entry: Entry, stop: int) -> bool:
        memory = entry.node.memory
        more = -(-stop // memory.page_rows) - len(entry.pages)
        taken = memory.take(self.number, more) if more > 0 else []
        if taken is None:
            return False
        entry.pages += taken
        return True

    def _final(self, chunk: Chunk, ready: SimEvent) -> None:
        if chunk.entry.node.alive:
            chunk.lay([None])
            ready.happen()
            chunk.entry.node.touch()

    def _finish(self, entry: Entry) -> None:
        handle, plan = entry.handle, self.plan
        assert isinstance(handle, DeliveryHandle)
        if entry.finished:
            return
        upto = plan.edges[-1] if plan.edges else 0
        if self._has_states(entry) and (entry.withdrawal is not None or entry.given != upto):
            self._later(partial(self.chunk, entry, len(plan.edges)))
            return
        if plan.late:
            if not any(other.finished for other in self.prefill):
                self._plan_aborts()
            if plan.withdraw is not None:
                self.world.later(plan.withdraw / 4, partial(self.withdraw, entry))
        entry.finished = True
        aux = None
        if plan.aux and entry.node.rank == 0 and entry.node.memory.aux:
            aux = entry.aux = entry.node.memory.aux.pop()
            entry.node.memory.pool.write_aux(aux, self.aux)
        self._end_rows(entry, aux)

    def _end_rows(self, entry: Entry, aux: int | None) -> None:
        """The room's rows end here; its states, if the rank has some, are final now or at an event."""
        handle, world = entry.handle, self.world
        assert isinstance(handle, DeliveryHandle)
        memory = entry.node.memory
        entry.slots = slots = memory.take_slot(self.number)
        stop, ready = self.plan.edges[-1] if self.plan.edges else 0, None
        if slots and world.random.random() < 0.4:
            ready = SimEvent()
            world.later(world.random.randint(1, 5) / 1000, partial(self._states_final, entry, slots, ready))
        else:
            self._write_states(entry)
        entry.waits_from = world.now
        handle.finish(world.count(stop), state=memory.slot_tables(slots), aux=aux, ready=ready)

    def _write_states(self, entry: Entry) -> None:
        memory = entry.node.memory
        for cells in (memory.cells, memory.want):
            memory.put_states(cells, entry.slots, self.states)

    def _states_final(self, entry: Entry, slots: list[int], ready: SimEvent) -> None:
        """Write the states, unless the room has lost the slot: then it gives them again with another slot."""
        if entry.node.alive:
            if entry.slots is slots:
                self._write_states(entry)
                self.world.saw(Kind.STATES_LATE)
            ready.happen()
            entry.node.touch()

    def withdraw(self, entry: Entry) -> None:
        """Preemption: once reads have ended the pages go to others, and later the rows are computed again."""
        if self._is_over(entry) or entry.withdrawal is not None or not entry.given:
            return
        assert isinstance(entry.handle, DeliveryHandle)
        self.world.hit(FaultClass.WITHDRAW)
        entry.withdrawal = entry.handle.withdraw()
        self._withdrawn(entry)

    def _withdrawn(self, entry: Entry) -> None:
        fired = entry.withdrawal
        if fired is None or not entry.node.alive or entry.freed:
            entry.withdrawal = None
            return
        if not fired.query():
            self.world.later(0.002, partial(self._withdrawn, entry))
            return
        entry.withdrawal = None
        self._give_slots(entry)
        entry.node.memory.give(entry.pages)
        again = entry.given
        entry.pages, entry.given = [], 0
        if not self._is_over(entry):
            self.world.later(self.world.random.choice((0.001, RETRY_S)), partial(self._resubmit, entry, again))

    def _resubmit(self, entry: Entry, upto: int) -> None:
        """The rows are there again, in other pages."""
        if self._is_over(entry) or entry.given:
            return
        if not self._room_for(entry, upto):
            self._later(partial(self._resubmit, entry, upto))
            return
        entry.write(0, upto, entry.pages)
        entry.given = upto
        assert isinstance(entry.handle, DeliveryHandle)
        entry.handle.send_chunk(upto, entry.node.memory.tables(entry.pages))
        if entry.finished and self._has_states(entry):
            self.world.saw(Kind.STATES_AGAIN)
            self._end_rows(entry, entry.aux)

    def _has_states(self, entry: Entry) -> bool:
        return bool(entry.node.memory.pool.site.state_groups)

    def _give_slots(self, entry: Entry) -> None:
        if entry.slots:
            entry.node.memory.give(entry.slots)
        entry.slots = []

    # Ends.

    def abort(self, entry: Entry) -> None:
        """An engine gives a room up."""
        if entry.handle is None or not entry.node.alive:
            return
        self.world.hit(FaultClass.ABORT)
        entry.handle.abort("the user went away")

    def _note_choice(self, reason: str) -> None:
        """Coverage: ``auto`` takes a mapping as soon as prefill has said that there is one."""
        if reason == "auto takes mapped":
            self.world.mark("mapped:auto copies")
        elif UNSAID in reason:
            self.world.mark("mapped:auto stages first")

    def changed(self, entry: Entry) -> None:
        """The endpoint reports a change of a room."""
        handle, world = entry.handle, self.world
        assert handle is not None
        phase = handle.phase
        if entry.phase in FINAL and phase is not entry.phase:
            world.violation("I6", f"{self.name(entry)}: {entry.phase.name} has become {phase.name}")
        if phase in FINAL and entry.phase not in FINAL:
            entry.ended = world.now
            entry.asked = entry.askers()
            entry.error = handle.error
            entry.segments = handle.report.segments
            self._grouped(entry)
            self._count_kinds(entry)
            if isinstance(handle, ReceptionHandle) and phase is Phase.DONE:
                if entry.node.raised_at == world.now:
                    world.saw(Kind.FLAGS)
                self._note_choice(handle.report.reason)
            if self.plan.burst and phase is Phase.DONE:
                world.saw(Kind.CHUNKS)
            if self.plan.room.startswith(b"crowd") and not world.rooms[0].over:
                world.saw(Kind.CROWD)
            self._check.ended(entry)
            self._reused.ended(entry)
        entry.phase = phase
        if handle.released and not entry.freed:
            entry.freed = True
            if entry.aux is not None:
                entry.node.memory.aux.append(entry.aux)
            self._give_slots(entry)
            if self._cached is not None and isinstance(handle, ReceptionHandle):
                self._cached.over(entry)
            if entry.lease is not None and self._cached is not None:
                self._cached.released(entry)
            else:
                entry.node.memory.give(entry.pages)
            entry.withdrawal = None
            if entry.lease is None:
                entry.pages = []
            world.entries.pop(id(handle), None)
            entry.handle = None
            self._check.freed(entry)
            self._reused.freed(entry)

    def _grouped(self, entry: Entry) -> None:
        """What was special about the groups of layers in which a prefill rank sent the room."""
        handle, world = entry.handle, self.world
        if not isinstance(handle, DeliveryHandle) or handle.report.groups < 2:
            return
        if handle.phase is Phase.FAILED:
            world.saw(Kind.GROUPS_FAILED)
            return
        world.saw(Kind.GROUPS)
        world.saw(Kind.GROUPS_STAGED if handle.report.path == "staged" else Kind.GROUPS_PLACED)
        if world.scenario.schedule == LayerPipelined():  # its formula has one group for so few rows
            world.saw(Kind.GROUPS_MEASURED)
        if any(decode.held for decode in self.decode):
            world.saw(Kind.GROUPS_AFTER)
        if entry.node.split.pp > 1:
            world.saw(Kind.GROUPS_STAGE)

    def _count_kinds(self, entry: Entry) -> None:
        """What a decode rank that has all of the room got besides the rows of full attention."""
        handle, world, lens = entry.handle, self.world, entry.node.memory.lens
        if not isinstance(handle, ReceptionHandle) or handle.phase is Phase.FAILED:
            return
        if handle.report.reason:
            world.saw(Kind.LARGE)
        if any(other.plan.back != self.plan.back and not other.over for other in world.rooms):
            world.saw(Kind.BOTH_WAYS)
        if entry.slots:
            world.saw(Kind.STATES)
            if not len(lens.columns):
                world.saw(Kind.STATES_ALONE)
            if entry.held:
                world.saw(Kind.STATES_AFTER)
            states = world.scenario.model.states
            if states is not None and states.units < self.prefill[0].node.split.tp:
                world.saw(Kind.STATES_REPLICATED)
        if world.scenario.model.window and lens.windows.any():
            world.saw(Kind.WINDOW_OPEN if self.plan.open_end else Kind.WINDOW)
            if len(entry.node.memory.pool.site.groups) > 1:
                world.saw(Kind.OVERLAID)
