"""Two prefill instances and a decode instance, round after round: processes are killed, stand still and come back.

The memory of every process is compared, byte for byte. A room that is DONE has the bytes of its own source; what a
program finds in a room that FAILED, if it does not look at the phase, is counted and printed.
"""

from __future__ import annotations

import heapq
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Literal

import pytest
from attrs import define, evolve, field, frozen

from disagg_kv import Options
from tests.support.engines import Engine
from tests.support.leftovers import abandoned
from tests.support.needs import needs_mooncake, needs_nixl
from tests.support.processes import Cluster, Knobs, Node, State, Wire, wait

ROUNDS = int(os.environ.get("DISAGG_KV_PAUSES", "10"))
"""Rounds in all; those over NIXL and Mooncake only run where the variable is set."""

PAUSE_S = float(os.environ.get("DISAGG_KV_PAUSE_S", "1.5"))
"""The longest time for which a process stands still; all other times follow from it."""

SEED = os.environ.get("DISAGG_KV_SEED", "0")

OPTIONS = Options(
    silence_s=PAUSE_S / 2,
    closed_s=PAUSE_S / 3,
    heartbeat_s=PAUSE_S / 20,
    total_s=5 * PAUSE_S,
    retry_s=PAUSE_S / 20,
)
LATE_S = 60.0
"""What a busy host may add to a deadline before it is called a hang."""

ROOMS, TOKENS = (5, 10), 600
"""Rooms of a round; rows of a room, at most."""

SPREAD_S = 0.4
"""In this time the rooms of a round begin and its faults happen: about as long as the rooms take."""


@frozen
class Shape:
    """Which processes there are: ranks of the two prefill instances and of decode, and what connects them.

    ``late``: writes are in flight for a while, so that a process that stands still has some.
    """

    transport: str
    wire: Wire
    prefill: tuple[int, int]
    decode: int
    late: bool = False


SHAPES = [
    Shape("shm", "ipc", (1, 2), 1),
    Shape("shm", "unix", (2, 1), 2),
    Shape("shm", "ipc", (2, 1), 1, late=True),
    Shape("shm", "unix", (1, 2), 2, late=True),
]
REQUESTED = [
    pytest.param(Shape("nixl", "ipc", (1, 2), 1), marks=needs_nixl, id="nixl"),
    pytest.param(Shape("mooncake", "unix", (2, 1), 2), marks=needs_mooncake, id="mooncake"),
]


@define(eq=False)
class Room:
    """A request.

    Args:
        name: its id.
        tokens: its rows.
        cuts: where its chunks end, but for the last.
        sources: instances that are asked for it, one after the other.
        until: when all of it must be over.
        on: the ranks that were told of it.
        states: what they said of it last.
        asked: attempts for which prefill was told of it.
    """

    name: bytes
    tokens: int
    cuts: Sequence[int]
    sources: Sequence[str]
    until: float
    on: list[Node] = field(factory=list)
    states: dict[Node, State] = field(factory=dict)
    asked: int = 0


class Field:
    """The processes, and what happens to them.

    Args:
        cluster: starts the processes.
        shape: which.
        drawn: names the random draws.
    """

    def __init__(self, cluster: Cluster, shape: Shape, drawn: str) -> None:
        knobs = Knobs(
            transport=shape.transport,
            pages=512,
            slot_bytes=8 << 10,
            slots=64,
            ring_bytes=128 << 10,
            options=OPTIONS,
            drain_s=None if shape.transport == "shm" else 2.0,
            aux_slots=64,
            late=shape.late,
        )
        self.draw = random.Random(drawn)
        self._cluster = cluster
        self._drawn = drawn
        self._numbers = count()
        # One instance sends through the ring, the other writes into pages.
        self._prefill = {
            name: cluster.start("prefill", name, ranks, evolve(knobs, path=path), Engine)
            for name, ranks, path in zip("PQ", shape.prefill, ("staged", "slice"), strict=True)
        }
        decode = evolve(knobs, path="auto", page_size=32, layout="HND")
        self._decode = cluster.start("decode", "D", shape.decode, decode, Engine)
        self._rooms: list[Room] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._stopped: Counter[int] = Counter()
        self._hit: set[str] = set()
        self._silent: set[Node] = set()
        self.ends: Counter[str] = Counter()
        for node in self.nodes:
            node.ask("open_rooms")

    @property
    def nodes(self) -> list[Node]:
        """Every process that there is now."""
        return [*(node for ranks in self._prefill.values() for node in ranks), *self._decode]

    def round(self) -> None:
        """Rooms from both instances, faults meanwhile, and then every byte."""
        self._hit.clear()
        self._silent.clear()
        draw = self.draw
        for _ in range(draw.randint(*ROOMS)):
            self._at(draw.uniform(0.0, SPREAD_S), self._begin)
        if draw.random() < 0.7:
            victim = draw.choice(self._prefill[draw.choice("PQ")] if draw.random() < 0.8 else self._decode)
            self._at(draw.uniform(0.0, SPREAD_S), lambda: self._kill(victim))
        for _ in range(draw.randint(0, 2)):
            self._at(draw.uniform(0.0, SPREAD_S), lambda: self._stop([draw.choice(self.nodes)]))
        if draw.random() < 0.15:
            self._at(draw.uniform(0.0, SPREAD_S), lambda: self._stop(self.nodes))
        for _ in range(draw.randint(0, 2)):
            self._at(draw.uniform(0.0, SPREAD_S), self._abort)
        self._pass()
        self._compare()

    # What happens at some moment.

    def _at(self, later_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + later_s, next(self._numbers), act))

    def _begin(self) -> None:
        draw = self.draw
        tokens = draw.randint(1, TOKENS)
        cuts = sorted({draw.randint(1, tokens) for _ in range(draw.randint(0, 2))} - {tokens})
        sources = draw.sample("PQ", draw.choice([1, 1, 2]))
        until = time.monotonic() + OPTIONS.total_s + 2 * PAUSE_S + LATE_S
        room = Room(b"r%d" % next(self._numbers), tokens, cuts, sources, until)
        self._rooms.append(room)
        for node in self._decode:
            self._tell(room, node, "decode", room.name, tokens, sources)
        self._ask_prefill(room, 1)

    def _ask_prefill(self, room: Room, attempt: int) -> None:
        room.asked = attempt
        for node in self._prefill[room.sources[attempt - 1]]:
            self._tell(room, node, "prefill", room.name, room.tokens, attempt, room.cuts)

    def _tell(self, room: Room, node: Node, name: str, *args: object) -> None:
        def answered(taken: object) -> None:
            if not taken and node in room.on:
                # As a router does: the request is refused, on all ranks.
                self.ends["refused, as too much memory waited for evidence"] += 1
                room.on.remove(node)
                for other in room.on:
                    other.tell(_nothing, "give_up", room.name)

        room.on.append(node)
        node.tell(answered, name, *args)

    def _kill(self, victim: Node) -> None:
        """One process dies at any point of its code, also while it stands still, and another takes its place."""
        ranks = self._decode if victim in self._decode else self._prefill[victim.setup.instance]
        self._hit.add(victim.setup.instance)
        victim.kill()
        for room in self._rooms:
            room.on = [node for node in room.on if node is not victim]
            room.states.pop(victim, None)
        ranks[ranks.index(victim)] = self._cluster.again(victim)

    def _stop(self, nodes: Sequence[Node]) -> None:
        """Processes stand still for a while."""
        pause_s = PAUSE_S * 20 ** self.draw.uniform(-1.0, 0.0)
        self.ends["stops"] += len(nodes)
        for node in nodes:
            self._hit.add(node.setup.instance)
            self._silent.add(node)
            self._stopped[node.pid] += 1
            os.kill(node.pid, signal.SIGSTOP)
        self._at(pause_s, lambda: self._go_on(nodes))

    def _go_on(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self._stopped[node.pid] -= 1
            if not self._stopped[node.pid] and node in self.nodes:
                node.thaw()

    def _abort(self) -> None:
        if self._rooms:
            room = self.draw.choice(self._rooms)
            if room.on:
                self.draw.choice(room.on).tell(_nothing, "give_up", room.name)

    # What is seen.

    def _pass(self) -> None:
        """Let all of it happen, and wait until every room is over everywhere."""
        waiting: dict[Node, float] = {}
        while self._due or not all(self._over(room) for room in self._rooms):
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            for node in self.nodes:
                if not node.take() and now >= waiting.get(node, 0.0):
                    waiting[node] = now + 0.02
                    node.tell(self._noted(node), "states")
            time.sleep(0.002)

    def _noted(self, node: Node) -> Callable[[object], None]:
        def note(states: object) -> None:
            assert isinstance(states, Mapping)
            for room in self._rooms:
                if node in room.on and room.name in states:
                    room.states[node] = states[room.name]

        return note

    def _over(self, room: Room) -> bool:
        """Whether it has ended and is released, on every rank that was told of it; begins its next attempt."""
        decode = [room.states[node] for node in self._decode if node in room.states]
        attempt = max((state.attempt for state in decode), default=1)
        if attempt > room.asked:
            self._ask_prefill(room, attempt)
        states = [room.states.get(node) for node in room.on]
        over = all(state is not None and state.final and state.released for state in states)
        if not over and all(state.final for state in decode) and len(decode) == len(set(room.on) & set(self._decode)):
            # As a router does: nobody awaits the request any more.
            for node in room.on:
                if node not in self._decode and room.states.get(node) is not None and not room.states[node].final:
                    node.tell(_nothing, "give_up", room.name)
        assert over or time.monotonic() < room.until, f"{self._drawn}: a hang: {self._tale(room)}"
        return over

    def _tale(self, room: Room) -> str:
        ranks = {f"{node.setup.instance}/{node.setup.rank}": room.states.get(node) for node in room.on}
        return f"room {room.name!r} from {room.sources}, hit {self._hit}: {ranks}"

    def _compare(self) -> None:
        """Bytes of rooms that are DONE, memory that is none of theirs; then nothing is owed."""
        for room in self._rooms:
            decode = [node for node in self._decode if node in room.on]
            phases = {room.states[node].phase for node in decode}
            # A rank 0 that was silent until the others gave it up counts the votes that it has.
            if len(decode) == len(self._decode):
                given_up = decode[0] in self._silent and room.states[decode[0]].phase == "DONE"
                assert given_up or len(phases) == 1, f"{self._drawn}: decode ranks disagree: {self._tale(room)}"
            for node in decode:
                self._judge(room, node, node.ask("mismatch", room.name))
        for node in self.nodes:
            wait(partial(_none, node, "open_rooms"), lambda: f"{self._drawn}: rooms to be forgotten", LATE_S)
            if node in self._decode:
                wait(partial(_none, node, "quarantined"), lambda: f"{self._drawn}: leases to come back", LATE_S)
            faults = node.ask("audit")
            assert not faults, f"{self._drawn}: {node.setup.instance}/{node.setup.rank}: {faults}"
        for room in self._rooms:
            for node in room.on:
                node.ask("drop", room.name)
        self._rooms.clear()

    def _judge(self, room: Room, node: Node, wrong: int) -> None:
        state = room.states[node]
        source = room.sources[state.attempt - 1]
        innocent = source not in self._hit and node.setup.instance not in self._hit
        self.ends[state.phase] += 1
        if state.phase == "DONE":
            assert wrong == 0, f"{self._drawn}: {wrong} wrong bytes in a room that is DONE: {self._tale(room)}"
        elif wrong:
            self.ends["FAILED, and wrong bytes for a program that does not look"] += 1
            if source not in self._hit:
                self.ends[f"  of these, from an instance that nothing happened to: {state.error}"] += 1
        if innocent and state.phase == "FAILED":
            self.ends[f"FAILED although nothing happened to its processes: {state.error}"] += 1


def _none(node: Node, of: Literal["open_rooms", "quarantined"]) -> bool:
    return node.ask(of) == 0


def _nothing(answer: object) -> None:
    assert answer is None


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder; with the test, nothing is left in /dev/shm."""
    before = abandoned()
    yield tmp_path
    wait(lambda: abandoned() <= before, lambda: f"left in /dev/shm: {abandoned() - before}")


def rounds(folder: Path, shape: Shape, many: int) -> None:
    """So many rounds, and what they came to."""
    cluster = Cluster(folder, shape.wire)
    try:
        drawn = f"{shape.transport} {shape.wire} {'late ' * shape.late}seed {SEED}"
        playing = Field(cluster, shape, drawn)
        for _ in range(many):
            playing.round()
    finally:
        cluster.stop()
    assert playing.ends["DONE"] > 0
    print(f"{drawn}: {many} rounds", *(f"{n:6d} {what}" for what, n in playing.ends.items()), sep="\n")


@pytest.mark.slow
@pytest.mark.timeout(LATE_S + 240 + 20 * PAUSE_S * ROUNDS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.wire + "-late" * shape.late)
def test_what_is_done_is_right_whatever_stands_still_or_dies(folder: Path, shape: Shape) -> None:
    """Every byte of every room that is DONE is its source's, and no other byte changes."""
    rounds(folder, shape, -(-ROUNDS // len(SHAPES)))


@pytest.mark.slow
@pytest.mark.skipif("DISAGG_KV_PAUSES" not in os.environ, reason="on request: DISAGG_KV_PAUSES says how many rounds")
@pytest.mark.timeout(LATE_S + 240 + 20 * PAUSE_S * ROUNDS)
@pytest.mark.parametrize("shape", REQUESTED)
def test_what_is_done_is_right_over_a_library(folder: Path, shape: Shape) -> None:
    """The same over NIXL and Mooncake, whose writes nobody can take back: a tenth of the rounds each."""
    rounds(folder, shape, max(1, ROUNDS // 10))


@pytest.mark.slow
def test_bytes_of_a_failed_room_are_wrong_and_only_its_phase_tells(folder: Path) -> None:
    """One instance is killed, the other one stands still for longer than its peers wait: both rooms fail.

    A program that looks at the bytes alone finds wrong ones, also of the instance that goes on.
    """
    cluster = Cluster(folder)
    # A process that only waits for a core is not silent for that long.
    times = Options(silence_s=5.0, heartbeat_s=0.1, retry_s=0.1)
    # In a ring that the room which is there first cannot fill alone.
    knobs = Knobs(slot_bytes=8 << 10, held_from=2, options=times, aux_slots=2)
    try:
        dying, pausing = (cluster.start("prefill", name, 1, knobs, Engine)[0] for name in "PQ")
        (receiver,) = cluster.start("decode", "D", 1, evolve(knobs, held_from=None), Engine)
        rooms = {b"of P": dying, b"of Q": pausing}
        for room, node in rooms.items():
            assert receiver.ask("decode", room, TOKENS, [node.setup.instance])
            assert node.ask("prefill", room, TOKENS, 1, [])
        wait(
            lambda: all(node.ask("held") > 0 for node in rooms.values()),
            lambda: f"writes in flight: {[node.ask('states') for node in (receiver, *rooms.values())]}",
        )
        pausing.freeze()
        dying.kill()
        wait(
            lambda: all(state.final and state.released for state in receiver.ask("states").values()),
            lambda: f"the rooms to fail: {receiver.ask('states')}",
        )
        states = receiver.ask("states")
        assert {(state.phase, state.error) for state in states.values()} == {("FAILED", "PeerLostError")}
        wrong = {room: receiver.ask("mismatch", room) for room in rooms}
        assert all(wrong.values()), "all bytes came, although writes were held"
        pausing.thaw()
        pausing.ask("release")
        wait(lambda: receiver.ask("quarantined") == 0, lambda: "leases to come back")
        assert {room: receiver.ask("mismatch", room) for room in rooms} == wrong
        assert receiver.ask("audit") == []
    finally:
        cluster.stop()
