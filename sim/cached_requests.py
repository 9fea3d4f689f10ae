"""What a decode engine with a prefix cache does in one turn: match, agree, expect the rest, keep it, answer."""

from __future__ import annotations

from functools import partial

from disagg_kv.core import Phase
from disagg_kv.endpoints import Expectation
from disagg_kv.endpoints.decode.handle import ReceptionHandle
from disagg_kv.errors import CapacityError

from .check import Checks
from .cluster import Cluster
from .conversations import Prompt
from .kind import Kind
from .memory import KV
from .prefixes import Prefixes, transcript
from .rooms import Entry, SimRoom

ASK_S = 0.003


class CachedRequest:
    """One room's request as a turn of a conversation, on all decode ranks."""

    def __init__(self, room: SimRoom, world: Cluster, check: Checks, prompt: Prompt) -> None:
        scenario = world.scenario
        self._room = room
        self._world = world
        self._check = check
        self._prompt = prompt
        self._transcript = transcript(scenario.model, scenario.conversations, prompt.conversation, scenario.seed)
        self._tokens = self._transcript.tokens[: room.plan.rows]
        self._matched: set[int] = set()
        self._said: dict[int, int] = {}
        self._agreed: int | None = None

    def match(self, entry: Entry) -> None:
        """Lock what the rank holds of the prompt, and tell the others how much that is."""
        prefixes = _prefixes(entry)
        entry.lease = prefixes.cache.lease(self._tokens)
        self._matched.add(entry.lease.rows)
        self._said[entry.node.rank] = entry.lease.rows
        self._ask(entry)

    def _ask(self, entry: Entry) -> None:
        if self._over(entry):
            return
        if self._agreed is None and len(self._said) == entry.node.split.world:
            self._agreed = min(self._said.values())
        if self._agreed is not None:
            self._begin(entry, self._agreed)
        else:
            self._world.later(ASK_S, partial(self._ask, entry))

    def over(self, entry: Entry) -> None:
        """The request has ended on a rank: who still asks holds nothing of it there."""
        if entry.node.alive:
            self._said.setdefault(entry.node.rank, 0)

    def _over(self, entry: Entry) -> bool:
        """The room has ended before anything was awaited."""
        handle = entry.handle
        return not entry.node.alive or handle is None or handle.phase in (Phase.DONE, Phase.FAILED)

    def _begin(self, entry: Entry, agreed: int) -> None:
        """Take pages for what is not held, and await that."""
        room, plan, lease, prefixes = self._room, self._room.plan, entry.lease, _prefixes(entry)
        handle, memory = entry.handle, entry.node.memory
        assert lease is not None
        assert isinstance(handle, ReceptionHandle)
        if len(self._matched) > 1:
            self._world.saw(Kind.UNEQUAL)
        prefixes.pages.owner = room.number
        known = len(prefixes.index)
        try:
            table = lease.begin(agreed)
        except CapacityError:
            self._world.mark("engine:no pages for a prompt")
            entry.lease = None
            handle.abort("there are no pages")
            return
        if len(prefixes.index) < known:
            self._world.saw(Kind.EVICTED_FOR)
        entry.held = lease.rows
        entry.pages = lease.table.pages.tolist()
        if plan.aux:
            entry.aux = memory.aux.pop()
        entry.await_states()
        if len(table.pages):
            memory.put((memory.want,), table.pages.tolist(), table.first, table.first, plan.rows, room.truth)
        named = len(table.pages) + len(entry.slots)
        entry.exposed = entry.node.exposes and 0 < named <= self._world.scenario.options.request_pages
        prefixes.check()
        stop = None if plan.open_end else plan.rows
        state = memory.slot_tables(entry.slots)
        taken = handle.expect(Expectation(stop, [table], held={KV: lease.rows}, state=state, aux=entry.aux))
        if taken != {KV: agreed} or lease.rows != agreed:
            self._world.violation("I2", f"{room.name(entry)}: {agreed} rows were agreed on, {taken} are taken as held")

    def released(self, entry: Entry) -> None:
        """The room's pages are released: the prefix cache keeps the rows that arrived, or none."""
        lease, handle, prefixes = entry.lease, entry.handle, _prefixes(entry)
        assert lease is not None
        assert handle is not None
        if not entry.pages:
            lease.end()
            entry.lease = None
            return
        before = len(prefixes.index)
        if not lease.settle(handle):
            self._world.violation("I3", f"{self._room.name(entry)}: released, but its lease is not settled")
        if handle.phase is not Phase.DONE:
            self._failed(entry, before)
            return
        prefixes.settled()
        whole = lease.rows // entry.node.memory.page_rows
        self._count(entry, len(prefixes.index) - before, whole)
        self._world.later(self._world.random.choice((0.0, 0.002, 0.05)), partial(self._answer, entry))

    def _failed(self, entry: Entry, before: int) -> None:
        if len(_prefixes(entry).index) > before:
            self._world.violation("I2", f"{self._room.name(entry)}: failed, but the prefix cache has its rows")
        if entry.held:
            self._world.saw(Kind.FAILED)
        entry.lease = None
        _prefixes(entry).check()

    def _count(self, entry: Entry, brought: int, whole: int) -> None:
        world, room = self._world, self._room
        if brought < whole - entry.held // entry.node.memory.page_rows:
            world.saw(Kind.TWICE)
        if not entry.held:
            return
        world.saw(Kind.FULL_HIT if entry.held == room.plan.rows else Kind.PREFIX)
        first = self._world.scenario.conversations[self._prompt.conversation]
        if first.fork and entry.held <= first.fork:
            world.saw(Kind.SHARED)

    def _answer(self, entry: Entry) -> None:
        """Decode computes rows of its own, which the next turn may hold, and the request is over."""
        lease, memory, more = entry.lease, entry.node.memory, self._prompt.answer
        if lease is None or not entry.node.alive:
            return
        prefixes, rows = _prefixes(entry), self._room.plan.rows
        prefixes.pages.owner = self._room.number
        known = len(prefixes.index)
        try:
            pages = lease.grow(rows + more).pages.tolist()
        except CapacityError:
            pages, more = entry.pages, 0
        if len(prefixes.index) < known:
            self._world.saw(Kind.EVICTED_FOR)
        memory.put((memory.cells, memory.want), pages, 0, rows, rows + more, self._transcript.truth)
        before = len(prefixes.index)
        lease.end(self._transcript.tokens[: rows + more])
        if len(prefixes.index) > before:
            self._world.saw(Kind.GENERATED)
        entry.lease = None
        entry.pages = []
        prefixes.settled()
        self._check.freed(entry)


def _prefixes(entry: Entry) -> Prefixes:
    prefixes = entry.node.prefixes
    assert prefixes is not None
    return prefixes
