"""A deterministic world for the protocol machines: a hostile network, late writes, engines that change their minds.

Memory is a table of cells; who may write where is checked when a write lands, not when it is posted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, pairwise

import numpy as np
from attrs import define, field, frozen

from disagg_kv.core import (
    Awaited,
    Cancel,
    Codec,
    Effect,
    FlowPlan,
    Gone,
    Introduced,
    Lost,
    Met,
    Options,
    Phase,
    Quiet,
    ReceiveRoom,
    RoomKey,
    SendRoom,
    Transfer,
    WriteFailed,
    Wrote,
)
from disagg_kv.core.wire.frames import Expect, WireTable
from disagg_kv.endpoints import attempt_id
from disagg_kv.errors import PeerLostError, TransportError
from disagg_kv.geometry import CacheSpec, PageTable, Shard, shard, stages
from disagg_kv.ids import Epoch, GroupId, Rank, RoomId
from disagg_kv.planning import Batch, Limits, RankPlan, Segment
from tests.support.protocol_nodes import DecodeNode, Node, PrefillNode, given_up

Cell = tuple[int, str, int, int]
"""Layer, component, row, unit."""

UNIT = 64
CLAIM_S, TOTAL_S = 30.0, 300.0
GROUP = GroupId("all")


@frozen
class Setup:
    """One experiment. Rates are probabilities per occasion."""

    prefill_tp: int = 1
    prefill_pp: int = 1
    decode_tp: int = 1
    heads: int = 2
    layers: int = 2
    rows: int = 24
    held: int = 0
    chunks: int = 2
    rooms: int = 1
    attempts: int = 1
    exposed: bool = False
    open_end: bool = False
    look_ahead: bool = False
    drop: float = 0.0
    duplicate: float = 0.0
    write_faults: float = 0.0
    cancels: int = 0
    withdrawals: int = 0
    group: int = 0
    scatter_faults: float = 0.0
    crash: str = ""
    seed: int = 0

    @property
    def calm(self) -> bool:
        """Nothing happens that may fail a room."""
        return not (self.write_faults or self.cancels or self.crash or self.scatter_faults)


@define(eq=False)
class Write:
    """A transfer between its beginning and its last event."""

    source: PrefillNode
    target: DecodeNode
    key: RoomKey
    theirs: RoomKey
    transfer: Transfer
    landed: bool = False
    reported: bool = False


@define
class Try:
    """An attempt of a request: what each engine still means to do, and which keys it has there."""

    request: RoomId
    number: int
    room: RoomId
    prefill: dict[Rank, list[Callable[[], None]]] = field(factory=dict)
    decode: dict[Rank, list[Callable[[], None]]] = field(factory=dict)
    keys: dict[tuple[str, Rank], RoomKey] = field(factory=dict)


class World:
    """Everything that is not the protocol."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.random = random.Random(setup.seed)
        # Engines open a room at any time: where every room is to succeed, the other side waits for that.
        self.options = Options(window=4, claim_s=TOTAL_S if setup.calm else CLAIM_S)
        self.codec = Codec()
        self.now = 0.0
        self.faults = True
        self.faults_until = 0.0
        self.spec = CacheSpec.kv(setup.layers, setup.heads, UNIT, "int8")
        stage_layers = stages(self.spec, setup.prefill_pp)
        tp = setup.prefill_tp
        writers = [shard(self.spec, tp=tp, rank=r, layers=layers) for layers in stage_layers for r in range(tp)]
        targets = [shard(self.spec, tp=setup.decode_tp, rank=r) for r in range(setup.decode_tp)]
        self.targets: list[Shard] = targets
        self.rank_plans = [RankPlan.build(self.spec, writers, target, setup.seed) for target in targets]
        self.prefill = [
            PrefillNode(Epoch(bytes([1, r] * 8)), Rank(r), len(writers), self.options, self._plan)
            for r in range(len(writers))
        ]
        ring = 8 * 8192
        self.decode = [
            DecodeNode(Epoch(bytes([2, r] * 8)), Rank(r), len(targets), self.options, ring) for r in range(len(targets))
        ]
        for node in self.prefill:
            node.decode_world = len(targets)
        self.nodes: dict[Epoch, PrefillNode | DecodeNode] = {
            **{p.epoch: p for p in self.prefill},
            **{d.epoch: d for d in self.decode},
        }
        self.network: list[tuple[Epoch, bytes]] = []
        self.writes: list[Write] = []
        self.ring_memory: dict[tuple[Epoch, int], tuple[RoomKey, Segment, Rank]] = {}
        self.pages: dict[tuple[Epoch, RoomKey], dict[Cell, Rank]] = {}
        self.attempts: list[Try] = []
        self.to_come = [(RoomId(bytes([65 + i])), n + 1) for n in range(setup.attempts) for i in range(setup.rooms)]
        self.terminal: dict[tuple[Epoch, RoomKey], Phase] = {}
        self.released: set[tuple[Epoch, RoomKey]] = set()
        self.news: list[tuple[PrefillNode | DecodeNode, Lost | Gone]] = []
        self.cancels = setup.cancels
        self.crash = bool(setup.crash)
        for side in (self.prefill, self.decode):
            self._introduce(side)
        self._next_attempts()

    # Beginning.

    def _introduce(self, side: Sequence[Node]) -> None:
        for node in side[1:]:
            side[0].joined(node.epoch, node.rank)
            node.joined(side[0].epoch, Rank(0))

    def _plan(self, node: PrefillNode, expect: Expect) -> FlowPlan:
        target = self.nodes[Epoch(expect.src)]
        exposed = expect.tables is not None
        return FlowPlan(
            node.rank,
            self.rank_plans[target.rank],
            expect.start,
            expect.stop,
            exposed,
            Limits(4096, 8192, 4),
            groups=self._groups if self.setup.group else None,
        )

    def _groups(self, run: range, start: int, stop: int, batch: Batch) -> list[range]:
        size = self.setup.group
        return [range(a, min(a + size, run.stop)) for a in range(run.start, run.stop, size)]

    def _next_attempts(self) -> None:
        """An attempt begins when the one before has ended everywhere; late frames of that may still arrive."""
        for request, number in list(self.to_come):
            before = next((one for one in self.attempts if one.request == request), None)
            if number > 1 and (before is None or before.number < number - 1 or not self._ended(before)):
                continue
            self.to_come.remove((request, number))
            attempt = Try(request, number, attempt_id(request, number))
            self.attempts = [*(one for one in self.attempts if one is not before), attempt]
            for node in self.prefill:
                attempt.prefill[node.rank] = self._prefill_script(attempt, node)
            for target in self.decode:
                attempt.decode[target.rank] = self._decode_script(attempt, target)

    def _ended(self, attempt: Try) -> bool:
        room = attempt.room
        scripts = [*attempt.prefill.values(), *attempt.decode.values()]
        return (
            not any(scripts)
            and not any(room in n.rooms for n in self.prefill if not n.dead)
            and not any(k.room == room for n in self.decode if not n.dead for k in n.rooms)
        )

    def _prefill_script(self, attempt: Try, node: PrefillNode) -> list[Callable[[], None]]:
        s = self.setup
        edges = [s.rows * i // s.chunks for i in range(s.chunks + 1)]
        tables = {GROUP: PageTable(GROUP, np.arange(-(-s.rows // 4), dtype=np.int32))}

        def at(what: Callable[[SendRoom], list[Effect]]) -> Callable[[], None]:
            return lambda: node.act(attempt.keys["prefill", node.rank], what)

        def opens() -> None:
            attempt.keys["prefill", node.rank] = node.open(attempt.room, TOTAL_S)

        turns = count(1)

        def adds(start: int, stop: int) -> Callable[[], None]:
            turn = next(turns)
            for layer in self.spec.layers if s.look_ahead else ():
                readies.append(at(partial(SendRoom.ready, call_id=turn, layers={layer}, now=self.now)))
            return at(lambda room: room.add(turn, start, stop, tables, ready=not s.look_ahead, now=self.now))

        readies: list[Callable[[], None]] = []
        script = [opens]
        for i, (start, stop) in enumerate(pairwise(edges)):
            script.append(adds(start, stop))
            if i < s.withdrawals:
                # The engine's pauses between the two let grants arrive that nobody may use.
                pause = at(lambda room: [])
                script += [at(lambda room: room.withdraw(self.now)), *[pause] * 6, adds(0, stop)]
        self.random.shuffle(readies)
        script += readies
        aux = bytes([node.rank] * 5)
        script.append(at(lambda room: room.finish(s.rows, aux, self.now)))
        return script

    def _decode_script(self, attempt: Try, node: DecodeNode) -> list[Callable[[], None]]:
        s = self.setup

        def opens() -> None:
            key = attempt.keys["decode", node.rank] = node.open(attempt.room, TOTAL_S)
            self.pages[node.epoch, key] = {}

        def awaits() -> None:
            tables = (WireTable(GROUP, 0, 1, 0, bytes(4)),) if s.exposed else None
            stop = None if s.open_end else s.rows
            node.handle(
                attempt.keys["decode", node.rank],
                Awaited(s.held, stop, s.rows, "direct" if s.exposed else "staged", tables, aux_bytes=5),
            )

        def introduces() -> None:
            key = attempt.keys["decode", node.rank]
            there = tuple(p.epoch for p in self.prefill if not p.dead)
            room = node.rooms.get(key)
            if room is not None and room.error is None and len(there) == len(self.prefill):
                node.handle(key, Introduced(there, self.rank_plans[node.rank]))
                return
            nobody = Lost(Epoch(b""), PeerLostError("nobody answers"))
            for event in (nobody, *map(Met, there), nobody):
                node.handle(key, event)

        rest = [awaits, introduces]
        self.random.shuffle(rest)
        return [opens, *rest]

    # Steps.

    def step(self) -> bool:
        """Do one thing; False: nothing but time can do anything."""
        actions: list[Callable[[], None]] = []
        if self.network:
            actions += [self._deliver] * 4
        scripts = self._scripts()
        if scripts:
            actions.append(lambda: self._script(self.random.choice(scripts)))
        movers = [n for n in self.prefill if n.transfers and not n.dead]
        if movers:
            actions += [lambda: self._begin(self.random.choice(movers))] * 2
        if self.writes:
            actions += [lambda: self._progress(self.random.choice(self.writes))] * 2
        scatterers = [n for n in self.decode if n.scatters and not n.dead]
        if scatterers:
            actions.append(lambda: self._scatter(self.random.choice(scatterers)))
        if self.news:
            actions.append(self._tell)
        if self.faults and self.cancels and self.random.random() < 0.05:
            actions.append(self._cancel)
        if self.faults and self.crash and self.random.random() < (0.2 if self.writes else 0.01):
            actions.append(self._crash)
        if actions:
            self.random.choice(actions)()
        if self.faults and (not actions or self.random.random() < 0.1):
            self.advance(self.random.choice([0.05, 0.3, 2.5]))
        self._collect()
        self._next_attempts()
        self.check()
        return bool(actions)

    def advance(self, dt: float) -> None:
        self.now += dt
        for node in self.nodes.values():
            node.now = self.now
            if not node.dead:
                node.tick()
        self._collect()

    def settle(self, steps: int = 20_000) -> None:
        """Faults end; everything that was begun has to end too."""
        self.faults, self.faults_until = False, self.now
        for _ in range(steps):
            if self.step():
                continue
            times = [n.next_at() for n in self.nodes.values() if not n.dead]
            due = [t for t in times if t is not None]
            if not due:
                return
            self.advance(max(0.0, min(due) - self.now))
        raise AssertionError(f"still busy at {self.now} s: {self.describe()}")

    def describe(self) -> str:
        rooms = [(k.room, k.generation, r.state, r.error) for n in self.decode for k, r in n.rooms.items()]
        sends = [
            (k.room, n.rank, m.phase, m.reads, [(f.state, f.error) for f in m.flows.values()])
            for n in self.prefill
            for k, m in n.rooms.values()
        ]
        return f"{rooms} {sends} {[n.verdict.undecided for n in self.nodes.values()]}"

    def _scripts(self) -> list[list[Callable[[], None]]]:
        live: list[list[Callable[[], None]]] = []
        for attempt in self.attempts:
            live += [script for rank, script in attempt.prefill.items() if script and not self.prefill[rank].dead]
            live += [script for rank, script in attempt.decode.items() if script and not self.decode[rank].dead]
        return live

    @staticmethod
    def _script(script: list[Callable[[], None]]) -> None:
        script.pop(0)()

    def _collect(self) -> None:
        for node in self.nodes.values():
            for send in node.outbox:
                if not node.dead:
                    self.network.append((send.to, self.codec.encode(send.frame)))
            node.outbox.clear()

    def _deliver(self) -> None:
        index = self.random.randrange(len(self.network))
        to, data = self.network[index]
        chance = self.random.random() if self.faults else 1.0
        if chance >= self.setup.duplicate:
            self.network[index] = self.network[-1]
            self.network.pop()
        node = self.nodes[to]
        if (self.faults and self.random.random() < self.setup.drop) or node.dead:
            return
        node.on_frame(self.codec.decode(data))

    # Moving.

    def _begin(self, node: PrefillNode) -> None:
        (key, peer, _), transfer = self.random.choice(list(node.transfers.items()))
        if not node.begin(key, transfer):
            return
        target = self.nodes[peer]
        assert isinstance(target, DecodeNode)
        flow = node.rooms[key.room][1].flows[peer]
        self.writes.append(Write(node, target, key, RoomKey(key.room, flow.generation), transfer))

    def _progress(self, write: Write) -> None:
        """A write lands at some time after its beginning, and is reported, well or not, at some other time."""
        if write.source.dead:
            if any(isinstance(event, Lost) for _, event in self.news) and self.random.random() < 0.9:
                return
            if not write.landed and self.random.random() < 0.5:
                self._land(write)
            self.writes.remove(write)
            return
        fails = self.faults and not write.reported and self.random.random() < self.setup.write_faults
        if write.target.dead and not write.reported:
            self._end(write, WriteFailed(write.transfer.segment, TransportError("its target is gone"), True))
        elif fails:
            quiesced, retryable = self.random.random() < 0.6, self.random.random() < 0.7
            if quiesced and self.random.random() < 0.5:
                self._land(write)
            error = TransportError("injected", retryable=retryable)
            failed = WriteFailed(write.transfer.segment, error, quiesced)
            if quiesced:
                self._end(write, failed)
            else:
                write.reported = True
                write.source.moved(write.key, write.transfer.to, failed)
        elif not write.landed:
            self._land(write)
        elif write.reported:
            self._end(write, Quiet(write.transfer.segment))
        else:
            self._end(write, Wrote(write.transfer.segment))

    def _end(self, write: Write, event: Wrote | WriteFailed | Quiet) -> None:
        self.writes.remove(write)
        write.source.moved(write.key, write.transfer.to, event)

    def _land(self, write: Write) -> None:
        """At this moment the memory must still belong to the room."""
        write.landed = True
        target, key, t = write.target, write.theirs, write.transfer
        if target.dead:
            return
        if t.offset is None:
            room = target.rooms.get(key)
            assert room is not None, f"{t} landed in pages of a room that has ended"
            assert not room.released, f"{t} landed in pages that were released"
            self._put(target, key, t.segment, write.source.rank, again=True)
            return
        lease = target.leases.get((key, t.segment))
        assert lease is not None, f"{t} landed in a lease that was given back"
        assert lease.start == t.lease, f"{t} landed in {lease}"
        place, nbytes = self.rank_plans[target.rank].lease(t.segment)[0][write.source.rank]
        assert (lease.offset + place, nbytes) == (t.offset, t.nbytes)
        self.ring_memory[target.epoch, t.offset] = (key, t.segment, write.source.rank)

    def cells(self, target: DecodeNode, segment: Segment, writer: Rank) -> set[Cell]:
        cells: set[Cell] = set()
        for part in self.rank_plans[target.rank].parts[writer]:
            for row in range(*part.rows(segment.start, segment.stop)):
                layers = [x for x in part.layers if segment.first <= x < segment.last]
                cells |= {(layer, part.component, row, unit) for layer in layers for unit in part.units}
        return cells

    def _put(self, target: DecodeNode, key: RoomKey, segment: Segment, writer: Rank, *, again: bool) -> None:
        pages = self.pages[target.epoch, key]
        for cell in self.cells(target, segment, writer):
            assert cell not in pages or (again and pages[cell] == writer), f"{cell} arrived twice"
            pages[cell] = writer

    def _scatter(self, node: DecodeNode) -> None:
        index = self.random.randrange(len(node.scatters))
        key, scatter = node.scatters.pop(index)
        if self.faults and self.random.random() < self.setup.scatter_faults:
            node.scattered(key, scatter.segment, RuntimeError("injected"))
            return
        assert (key, scatter.segment) in node.leases, "a scatter reads a lease that was given back"
        assert not node.rooms[key].released, "a scatter writes pages that were released"
        for writer, offset in scatter.parts.items():
            assert self.ring_memory[node.epoch, offset] == (key, scatter.segment, writer)
            self._put(node, key, scatter.segment, writer, again=False)
        node.scattered(key, scatter.segment, None)

    # Faults.

    def _cancel(self) -> None:
        self.cancels -= 1
        attempt = self.random.choice(self.attempts)
        options = [(side, rank) for side, rank in attempt.keys]
        if not options:
            return
        side, rank = self.random.choice(options)
        key = attempt.keys[side, rank]
        if side == "prefill":
            if not self.prefill[rank].dead:
                self.prefill[rank].cancel(key, given_up())
        elif not self.decode[rank].dead:
            self.decode[rank].handle(key, Cancel(given_up()))

    def _crash(self) -> None:
        """One endpoint stops; the others hear of it in some order, and only later see its end."""
        busy = [(w.source, w.target) for w in self.writes]
        pairs = busy or [(p, d) for p in self.prefill for d in self.decode]
        source, target = self.random.choice(pairs)
        victim = source if self.setup.crash == "prefill" else target
        self.crash = False
        victim.dead = True
        victim.outbox.clear()
        error = PeerLostError(f"{victim.epoch.hex()[:4]} is silent")
        others = [n for n in self.nodes.values() if n is not victim]
        self.random.shuffle(others)
        for other in others:
            self.news.append((other, Lost(victim.epoch, error)))
        self.news += [(other, Gone(victim.epoch)) for other in others]

    def _tell(self) -> None:
        node, event = self.news[0]
        if isinstance(event, Gone) and any(w.source.epoch == event.peer for w in self.writes):
            return
        self.news.pop(0)
        victim = self.nodes[event.peer]
        if type(victim) is not type(node):
            node.peer_event(event)
        elif isinstance(event, Lost):
            node.lost_sibling(event.peer)

    # What must hold.

    def check(self) -> None:
        for node in self.decode:
            node.check_integrity()
            for key, room in node.rooms.items():
                self._watch(node, key, room)
        for source in self.prefill:
            source.check_integrity()
            for key, machine in source.rooms.values():
                self._watch(source, key, machine)

    def _watch(self, node: Node, key: RoomKey, room: ReceiveRoom | SendRoom) -> None:
        """An outcome never changes, and pages that were released stay so."""
        before = self.terminal.get((node.epoch, key))
        assert before is None or room.phase is before, f"{before} became {room.phase}"
        if room.phase in (Phase.DONE, Phase.FAILED):
            self.terminal[node.epoch, key] = room.phase
        if (node.epoch, key) in self.released:
            assert room.released
        if room.released:
            self.released.add((node.epoch, key))
            assert not (isinstance(room, SendRoom) and any(w.source is node and w.key == key for w in self.writes))

    def check_end(self) -> None:
        """Everything ended; nothing is held; whoever succeeded has exactly what it needed."""
        for one in self.nodes.values():
            assert one.dead or (not one.rooms and one.verdict.undecided == 0)
        for side in (self.prefill, self.decode):
            alive = [n for n in side if not n.dead]
            told = [n.outcomes for n in alive]
            if alive and not side[0].dead:
                assert all(one == told[0] for one in told), told
            if self.setup.calm:
                assert all(set(phases) == {Phase.DONE} for one in told for phases in one.values()), told
                assert all(len(one) == self.setup.rooms * self.setup.attempts for one in told)
        for node in self.decode:
            if not node.dead:
                assert node.ring.live_bytes == 0
                assert node.queue.waiting == 0
                assert not node.leases
        for (epoch, key), pages in self.pages.items():
            target = self.nodes[epoch]
            assert isinstance(target, DecodeNode)
            if target.tombstones.outcome(epoch, key.generation) is not None and self._succeeded(target, key):
                assert set(pages) == self.needed(target)
                assert target.aux[key] == bytes(5)

    @staticmethod
    def _succeeded(node: DecodeNode, key: RoomKey) -> bool:
        ended = node.tombstones.outcome(node.epoch, key.generation)
        return ended is not None and ended.value == "done"

    def needed(self, target: DecodeNode) -> set[Cell]:
        return {
            (int(layer), h.component, row, unit)
            for h in self.targets[target.rank]
            for layer in h.layers
            for row in range(self.setup.held, self.setup.rows)
            for unit in h.units
        }


def run(setup: Setup, steps: int = 400) -> World:
    """Live through ``steps`` steps with faults, then without any until everything has ended."""
    world = World(setup)
    for _ in range(steps):
        world.step()
    world.settle()
    world.check_end()
    return world
