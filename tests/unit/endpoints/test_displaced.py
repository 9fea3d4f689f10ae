"""Incarnations come and go beyond the size of the peer table: what is held of them is what the table says.

Descriptors are real: each incarnation is a process of its own, which the endpoint watches, and has shared memory.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator

import pytest

from disagg_kv.core import Options, Phase
from disagg_kv.endpoints import DecodeEndpoint, Incarnation, PrefillEndpoint
from disagg_kv.endpoints.loop.event_loop import EventLoop
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Epoch, Role, Ticket
from disagg_kv.testing import Fault, FaultyTransport
from disagg_kv.transports import Process, ShmTransport
from disagg_kv.transports.process import _started
from tests.support.held_links import check_links, connected
from tests.support.rig import Decodes, Member, Memory, Prefills, Request, Rig, tp_shards

SPEC = CacheSpec.kv(1, 1, 8, "int8")
ROWS = 4
PEERS = 4
OPTIONS = Options(peers=PEERS, silence_s=2.0, closed_s=1.0)
SHM = Memory(transport=ShmTransport)


class Crowd:
    """One endpoint, and incarnations of the other side that come and go."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.rig = Rig(SPEC, options=OPTIONS)
        self.hangs = False
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.names: dict[int, str] = {}
        self.prefills: dict[int, Prefills] = {}
        self.decodes: dict[int, Decodes] = {}
        self.owing: dict[int, Ticket] = {}
        self.rooms = 0
        self.one: Member[PrefillEndpoint] | Member[DecodeEndpoint]
        if role == "decode":
            self.ours = self.rig.decode(tp_shards(SPEC, 1), "one", SHM, strategy="staged")
            self.one = self.ours[0]
        else:
            self.served = self.rig.prefill(tp_shards(SPEC, 1), "one", self.writing(), strategy="staged")
            self.one = self.served[0]

    @property
    def loop(self) -> EventLoop:
        """Of the one that stays."""
        return self.one.endpoint.driver.loop

    def writing(self) -> Memory:
        """Of a prefill rank: shared memory; while ``hangs``, a batch is not quiet before it is released."""

        def fault(number: int) -> Fault | None:
            return Fault.DELAYED if self.hangs else None

        return Memory(transport=lambda: FaultyTransport(ShmTransport(), fault))

    def come(self, at: str | None = None) -> int:
        """A new incarnation, at an address of its own or at that of one that has gone."""
        number = len(self.names)
        name = self.names[number] = at or f"other{number}"
        process = self.processes[number] = subprocess.Popen(["sleep", "1000"])
        life = Incarnation(process=Process(process.pid, _started(process.pid), Process.own().host))
        shards = tp_shards(SPEC, 1)
        if self.role == "decode":
            self.prefills[number] = self.rig.prefill(shards, name, self.writing(), life=life, strategy="staged")
        else:
            self.decodes[number] = self.rig.decode(shards, name, SHM, life=life, strategy="staged")
        return number

    def member(self, number: int) -> Member[PrefillEndpoint] | Member[DecodeEndpoint]:
        """One of them."""
        return self.prefills[number][0] if self.role == "decode" else self.decodes[number][0]

    def open(self, number: int) -> Request:
        """A room with one of them."""
        self.rooms += 1
        prefills = self.prefills[number] if self.role == "decode" else self.served
        decodes = self.ours if self.role == "decode" else self.decodes[number]
        of = self.names[number] if self.role == "decode" else "one"
        return self.rig.request(f"room {self.rooms}", prefills, decodes, ROWS, of=of)

    def serve(self, number: int) -> None:
        """A room with one of them succeeds."""
        request = self.open(number).start(ROWS)
        self.until(lambda: all(handle.released for handle in request.handles))
        request.done()
        self.give(request)

    def owe(self, number: int) -> None:
        """A room with one of them keeps memory: its write is not quiet, and the incarnation falls silent."""
        self.hangs = True
        request = self.open(number).start(ROWS)
        writer = request.prefills[0].transport
        assert isinstance(writer, FaultyTransport)
        before = set(writer.held)
        self.until(lambda: set(writer.held) > before)
        self.hangs = False
        self.member(number).frozen = True
        ours = request.receives[0] if self.role == "decode" else request.sends[0]
        self.until(lambda: ours.phase is Phase.FAILED)
        (self.owing[number],) = set(writer.held) - before

    def settle(self, number: int) -> None:
        """Evidence comes: the process has ended, and nothing of it is under way any more."""
        ticket = self.owing.pop(number)
        self.go(number, "killed")
        if isinstance(self.one.transport, FaultyTransport):
            self.one.transport.release(ticket)
        self.until(lambda: not self.in_use(number))
        self.turn()

    def in_use(self, number: int) -> bool:
        """Whether a room of the one that stays uses one of them."""
        peer = self.loop.peers.known(self.epoch(number))
        return peer is not None and peer.users > 0

    def epoch(self, number: int) -> Epoch:
        """Of one of them."""
        return self.member(number).endpoint.driver.loop.me.epoch

    def give(self, request: Request) -> None:
        """The pages of a room are free again."""
        for member, table in zip(request.decodes, request.taken, strict=True):
            member.give(table)
        for number, tables in request.given.items():
            for table in tables:
                request.prefills[number].give(table)

    def go(self, number: int, how: str) -> None:
        """One of them ends: ``closed`` politely, ``killed`` without a word, ``silent`` while its process lives on."""
        if how == "closed":
            self.member(number).close()
        elif how == "killed":
            self.member(number).crash()
            process = self.processes.pop(number)
            process.kill()
            process.wait()
        else:
            self.member(number).frozen = True

    def turn(self, step_s: float = 0.005) -> None:
        """One turn of all, after which what is held is checked."""
        self.rig.turn(step_s)
        check_links(self.one.endpoint)
        for number in self.owing:
            assert self.in_use(number)
            assert self.epoch(number) in self.loop.connections.linked(), (
                "an incarnation that owes evidence has lost its link"
            )

    def until(self, done: Callable[[], bool]) -> None:
        """Turn until it is so."""
        for _ in range(4000):
            if done():
                return
            self.turn()
        raise AssertionError("waited too long")

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        for _ in range(round(seconds / 0.1)):
            self.turn(0.1)

    def close(self) -> None:
        """All processes end."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.rig.close()


@pytest.fixture(params=["decode", "prefill"])
def crowd(request: pytest.FixtureRequest) -> Iterator[Crowd]:
    """The endpoint that stays is of either role."""
    one = Crowd(request.param)
    yield one
    one.close()


@pytest.mark.parametrize(
    ("how", "address"),
    [("closed", None), ("closed", "X"), ("killed", None), ("killed", "X"), ("silent", None), ("stays", None)],
)
def test_incarnations_that_came_and_went_leave_nothing(crowd: Crowd, how: str, address: str | None) -> None:
    """Six times as many as the table has places, at an address each or at one, each with a room that succeeds."""
    for _ in range(6 * PEERS):
        number = crowd.come(address)
        crowd.serve(number)
        if how != "stays":
            crowd.go(number, how)
        crowd.wait(0.2)
        if address is not None and crowd.role == "decode":
            # A room that is opened before the loss is noticed is one of the old life's.
            crowd.wait(1.5)
    crowd.wait(1.0)
    assert len(crowd.loop.connections.linked()) <= PEERS
    assert len(connected(crowd.loop)) <= PEERS


@pytest.mark.parametrize("address", [None, "X"])
def test_an_incarnation_that_owes_evidence_is_never_displaced(crowd: Crowd, address: str | None) -> None:
    """Others come and go, also at its own address; what is held for it stays until its end is evidence."""
    owes = crowd.come(address)
    crowd.owe(owes)
    crowd.member(owes).channel.close()
    crowd.member(owes).closed = True
    for _ in range(3 * PEERS):
        number = crowd.come(address)
        crowd.serve(number)
        crowd.go(number, "killed")
        crowd.wait(0.2)
    crowd.settle(owes)
    assert crowd.epoch(owes) not in crowd.loop.connections.linked()


def test_a_full_table_of_incarnations_that_owe_evidence_takes_no_other_until_one_has_ended(crowd: Crowd) -> None:
    """The newcomer's room fails by name, and one that comes later succeeds."""
    for _ in range(PEERS):
        crowd.owe(crowd.come())
    request = crowd.open(crowd.come()).start(ROWS)
    crowd.wait(5.0)
    assert not request.all(Phase.DONE)
    assert "rooms use all 4 peers" in request.errors()
    crowd.settle(next(iter(crowd.owing)))
    crowd.wait(4.0)
    crowd.serve(crowd.come())


@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_and_goes_what_is_held_is_what_the_table_says(crowd: Crowd, seed: int) -> None:
    """Drawn: who comes where, who ends how, who owes evidence and for how long."""
    rng = random.Random(f"{crowd.role} {seed}")
    there: list[int] = []
    for _ in range(40):
        what = rng.choice(("come", "come", "come", "go", "go", "owe", "settle", "wait"))
        if what == "come" and len(there) + len(crowd.owing) < PEERS:
            crowd_number = crowd.come()
            crowd.serve(crowd_number)
            there.append(crowd_number)
        elif what == "go" and there:
            crowd.go(there.pop(rng.randrange(len(there))), rng.choice(("closed", "killed", "silent")))
        elif what == "owe" and there and len(crowd.owing) < PEERS // 2:
            crowd.owe(there.pop(rng.randrange(len(there))))
        elif what == "settle" and crowd.owing:
            crowd.settle(rng.choice(list(crowd.owing)))
        crowd.wait(rng.choice((0.1, 0.1, 1.0, 50.0)))
    for number in list(crowd.owing):
        crowd.settle(number)
    crowd.wait(0.2)
    assert len(connected(crowd.loop)) <= PEERS
