"""What a ``connect``, a look-up or a thread that cannot be started does wrong harms no other peer, and ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest

from disagg_kv.channels import InprocChannel
from disagg_kv.core import Codec, Hello, Options, Phase
from disagg_kv.core.wire.frames import Expected
from disagg_kv.endpoints.peers.background import HelperThreads, Inline
from disagg_kv.endpoints.peers.connections import EARLY_BYTES, OVERDUE_S, READY_S, Connections, ConnectResult
from disagg_kv.endpoints.peers.directory import UNANSWERED, Directory
from disagg_kv.endpoints.peers.mapping import Mapping
from disagg_kv.endpoints.peers.session import PeerSession
from disagg_kv.errors import CapacityError, PeerLostError, TransportError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Epoch, Peer, Rank, RoomId, Ticket
from disagg_kv.rendezvous import Source, StaticRendezvous
from disagg_kv.testing import FakeClock
from disagg_kv.trace import Recorder
from disagg_kv.transports import Carrier, InprocTransport, PeerLost, Settled, Transports, WriteEnded
from disagg_kv.transports.process import _started
from tests.support.rig import Memory, Rig, tp_shards
from tests.support.rig_parts import Later

SPEC = CacheSpec.kv(2, 2, 8, "float16")
IMPATIENT = Options(silence_s=1.0, heartbeat_s=0.2, closed_s=0.3)


def nothing() -> None:
    """Do it."""


def hello_of(rig: Rig) -> Hello:
    """What the only decode rank says of itself."""
    return rig.decodes[0].endpoint.driver.loop.me.hello()(b"")


# Threads.


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The host has no thread for the next one whose name has one of these parts."""
    refused: list[str] = []
    start = threading.Thread.start

    def starting(thread: threading.Thread) -> None:
        for part in refused:
            if part in thread.name:
                refused.remove(part)
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    return refused


def test_a_thread_that_cannot_be_started_leaves_nothing(no_thread: list[str]) -> None:
    """Its job is never run, the next one is, and ``close`` waits for no thread that never was."""
    threads, ran = HelperThreads("few", 1), list[str]()
    no_thread.append("few")
    with pytest.raises(RuntimeError, match="can't start"):
        threads.start(lambda: ran.append("first"))
    threads.start(lambda: ran.append("second"))
    assert threads.close(60.0, lambda: ran.append("closed"))
    assert ran == ["second", "closed"]


@pytest.mark.parametrize("kind", ["links", "look-ups"])
def test_a_peer_whose_thread_cannot_be_started_is_tried_again(kind: str, no_thread: list[str]) -> None:
    """A link fails by name and works once its failure is forgotten; a look-up is repeated, and no room fails."""
    rig = Rig(SPEC, threaded=True, options=IMPATIENT)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    no_thread.append(f"D/0 {kind}")
    first = rig.request("first", prefills, decodes, 12)
    receive = first.open_decode().expect().receives[0]
    rig.until(lambda: not no_thread, "the thread that is not there")
    if kind == "links":
        rig.until(lambda: receive.phase is Phase.FAILED, "the failure")
        assert "can't start new thread" in str(receive.error)
        assert "can't start new thread" in str(first.open_prefill().failed().sends[0].error)
        attempt = 1
        while not first.all(Phase.DONE):
            attempt += 1
            first = rig.request("again", prefills, decodes, 12, attempt=attempt).start().released()
        first.landed()
    else:
        first.open_prefill().send(12).finish().landed()
    rig.close()


def test_a_job_that_ends_its_thread_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """``SystemExit`` is logged, and neither counts as a job that runs nor holds ``close`` up."""
    threads = HelperThreads("ending", 1)

    def job() -> None:
        raise SystemExit(3)

    threads.start(job)
    assert threads.close(60.0, nothing)
    assert "a job of ending raised" in caplog.text


class Leaving(InprocTransport):
    """A transport whose ``connect`` ends its thread."""

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """End it."""
        raise SystemExit(3)


def test_a_connect_that_ends_its_thread_is_a_failure() -> None:
    """The room fails by name, before its deadline."""
    rig = Rig(SPEC, threaded=True)
    prefills = rig.prefill(tp_shards(SPEC, 1))
    decodes = rig.decode(tp_shards(SPEC, 1), memory=Memory(transport=Leaving))
    request = rig.request("room", prefills, decodes, 12).start()
    rig.until(lambda: request.receives[0].phase is Phase.FAILED, "the failure")
    assert "ended without a result" in str(request.receives[0].error)
    rig.close()


def test_jobs_that_take_long_hold_up_no_other() -> None:
    """However many of them never return, another one runs."""
    threads, gate, ran = HelperThreads("slow", 2), threading.Event(), threading.Event()
    for _ in range(8):
        threads.start(lambda: assert_opened(gate))
    threads.start(ran.set)
    assert ran.wait(60)
    gate.set()
    assert threads.close(60.0, nothing)


def assert_opened(gate: threading.Event) -> None:
    """Wait until it is."""
    assert gate.wait(60)


# Closing.


class Slow(InprocTransport):
    """A transport whose ``connect`` blocks until its gate opens; ``order`` says what happened."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.inside, self.closed = threading.Event(), threading.Event(), threading.Event()
        self.order: list[str] = []

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """Wait."""
        self.inside.set()
        assert self.gate.wait(60)
        self.order.append("connected")
        return super().connect(descriptor, timeout_s)

    def close(self, drain_s: float) -> Sequence[Ticket]:
        """Note it."""
        self.order.append("closed")
        left = super().close(drain_s)
        self.closed.set()
        return left


def test_close_waits_for_no_connect_that_blocks(caplog: pytest.LogCaptureFixture) -> None:
    """It returns while one does; the transport is closed by that one's thread, after it."""
    rig = Rig(SPEC, threaded=True)
    prefills = rig.prefill(tp_shards(SPEC, 1))
    decodes = rig.decode(tp_shards(SPEC, 1), memory=Memory(transport=Slow))
    transport = decodes[0].transport
    assert isinstance(transport, Slow)
    rig.request("room", prefills, decodes, 12).open_decode()
    assert transport.inside.wait(60)
    decodes[0].close(0.1)
    assert transport.order == []
    assert "still being connected" in caplog.text
    transport.gate.set()
    assert transport.closed.wait(60)
    assert transport.order == ["connected", "closed"]
    prefills[0].close()


def test_no_look_up_begins_after_close() -> None:
    """Those that wait for their turn are dropped."""

    class Counting(StaticRendezvous):
        gate = threading.Event()
        counting = threading.Lock()
        begun = 0

        def lookup(self, source: Source) -> tuple[str, ...] | None:
            with self.counting:
                type(self).begun += 1
            assert self.gate.wait(60)
            return None

    threads = HelperThreads("closing", 4)
    directory = Directory(Counting(), threads, nothing, FakeClock(), Options())
    for number in range(40):
        directory.ask(Source(f"{number}"))
    directory.close(-1.0)
    begun = len(threads._places)
    Counting.gate.set()
    assert threads.close(60.0, nothing)
    assert Counting.begun == begun


# Look-ups.


class Deaf(StaticRendezvous):
    """A rendezvous that does not answer for instances named ``dead``..., and once not for those in ``hung``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.hung: set[str] = set()

    def lookup(self, source: Source) -> tuple[str, ...] | None:
        """Answer, or wait."""
        if source.instance.startswith("dead") or source.instance in self.hung:
            self.hung.discard(source.instance)
            self.gate.wait(120)
        return super().lookup(source)


def test_look_ups_that_never_return_hide_no_other_instance() -> None:
    """However many there are; and an instance whose own look-up did not return is asked for again."""
    rig = Rig(SPEC, threaded=True, options=Options(silence_s=20.0, closed_s=0.2))
    there = rig.rendezvous = Deaf()
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    for number in range(8):
        decodes[0].endpoint.open(RoomId(b"dead%d" % number), Source(f"dead{number}"))
    there.hung.add("P")
    rig.request("room", prefills, decodes, 12).start().landed()
    there.gate.set()
    rig.close()


def test_a_late_answer_changes_nothing_that_is_newer() -> None:
    """A look-up that does not return fails; what it says later counts until a later one has been answered."""
    there, later, clock = StaticRendezvous(), Later(), FakeClock()
    directory, source = Directory(there, later, nothing, clock, Options(closed_s=3.0)), Source("P")
    directory.ask(source)
    directory.ask(source)
    assert len(later.jobs) == 1
    clock.advance(3.0)
    (failed,) = directory.answers()
    assert "no answer for 3.0 s" in str(failed.error)
    directory.ask(source)
    first, second = later.jobs
    there.publish("P", Rank(0), 1, "new")
    second()
    there.publish("P", Rank(0), 1, "old")
    first()
    assert [answer.addresses for answer in directory.answers()] == [("new",)]
    assert directory.known(source) == ("new",)
    clock.advance(1.0)
    directory.ask(source)
    clock.advance(3.0)
    assert directory.answers()[0].error is not None
    later.jobs[2]()
    assert [answer.addresses for answer in directory.answers()] == [("old",)]


def test_look_ups_that_never_return_are_few() -> None:
    """Of one instance and in all; one more fails by name, and those of others begin."""
    later, clock = Later(), FakeClock()
    directory = Directory(StaticRendezvous(), later, nothing, clock, Options(closed_s=3.0, peers=UNANSWERED + 1))
    for _ in range(UNANSWERED):
        directory.ask(Source("P"))
        clock.advance(3.0)
        directory.answers()
    directory.ask(Source("P"))
    (answer,) = directory.answers()
    assert isinstance(answer.error, CapacityError)
    assert "instance 'P': 4 of its look-ups and 4 in all have not returned" in str(answer.error)
    clock.advance(3.0)
    directory.ask(Source("P"))
    assert len(later.jobs) == UNANSWERED + 1  # a rendezvous that has come back is noticed
    later.jobs.pop()()
    directory.answers()
    directory.ask(Source("Q"))
    directory.ask(Source("R"))
    (answer,) = directory.answers()
    assert "instance 'R': 0 of its look-ups and 5 in all" in str(answer.error)
    for job in later.jobs:
        job()
    directory.answers()
    directory.ask(Source("P"))
    assert len(later.jobs) == UNANSWERED + 2


def test_jobs_that_are_done_one_after_the_other_do_not_all_begin_at_once() -> None:
    """A library may have one thread for all: those that wait in it for long would run into their time-outs."""
    most = 4
    lock, ended = threading.Lock(), threading.Semaphore(0)
    waiting = Counter[str]()
    threads = HelperThreads("one by one", most)

    def job() -> None:
        waiting["now"] += 1
        waiting["most"] = max(waiting["most"], waiting["now"])
        with lock:
            threading.Event().wait(0.05)
        waiting["now"] -= 1
        ended.release()

    for _ in range(30):
        threads.start(job)
    for _ in range(30):
        assert ended.acquire(timeout=60)
    assert waiting["most"] == most


def test_jobs_that_never_return_give_their_places_up() -> None:
    """All of them at once, when none has moved for a while."""
    gate, ran = threading.Event(), threading.Event()
    threads = HelperThreads("hung", 4)

    def hang() -> None:
        gate.wait(60)

    for _ in range(9):
        threads.start(hang)
    threads.start(ran.set)
    assert ran.wait(30)
    gate.set()
    assert threads.close(60.0, nothing)


def test_a_withdrawal_needs_no_thread(no_thread: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """Where there is none the address stays, and the log says so."""

    class Taking(StaticRendezvous):
        taken = 0

        def withdraw(self, instance: str, rank: Rank) -> None:
            type(self).taken += 1

    directory = Directory(Taking(), HelperThreads("asking", 4), nothing, FakeClock(), Options())
    directory.withdraw("P", Rank(0))
    no_thread.append("asking")
    directory.withdraw("P", Rank(0))
    assert Taking.taken == 1
    assert "rank 0 stays in the rendezvous: can't start new thread" in caplog.text


# Lives.


def test_a_life_that_is_never_reached_is_not_watched() -> None:
    """However many introduce themselves, no descriptor of a file stays behind."""
    rig = Rig(SPEC, options=Options(peers=16))
    prefills = rig.prefill(tp_shards(SPEC, 1))
    rig.decode(tp_shards(SPEC, 1))[0].frozen = True
    stranger, codec = InprocChannel(rig.hub, "stranger"), Codec()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        rig.turn()
        before = len(os.listdir("/proc/self/fd"))
        for number in range(40):
            hello = msgspec.structs.replace(
                hello_of(rig),
                src=os.urandom(16),
                address=f"inproc://m{number}",
                descriptor=b"junk",
                pid=child.pid,
                started=_started(child.pid),
            )
            stranger.send("inproc://P0", codec.encode(hello))
            rig.turn()
        assert prefills[0].observer.counters["peers.lost"] >= 40
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        child.communicate(b"\n")


def test_an_end_while_a_peer_is_being_connected_is_noticed() -> None:
    """Its process is looked at as soon as it is connected."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1))
    rig.decode(tp_shards(SPEC, 1))[0].frozen = True
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        ended = msgspec.structs.replace(hello_of(rig), pid=child.pid, started=_started(child.pid))
        child.communicate(b"\n")
    InprocChannel(rig.hub, "ended").send("inproc://P0", Codec().encode(ended))
    rig.until(lambda: bool(prefills[0].observer.counters.get("peers.lost")), "the end")
    rig.turn()
    node = prefills[0].endpoint.driver.loop
    assert not node.connections.linked()
    assert not len(node._exits)
    assert not node.landing


class Counted(InprocTransport):
    """Counts what is called; ``fails`` to disconnect, or reports a peer's end."""

    def __init__(self) -> None:
        super().__init__()
        self.connects, self.disconnects, self.fails = 0, 0, False
        self.reports: list[Peer] = []

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """Count."""
        self.connects += 1
        return super().connect(descriptor, timeout_s)

    def disconnect(self, peer: Peer) -> None:
        """Count, and perhaps fail."""
        self.disconnects += 1
        super().disconnect(peer)
        if self.fails:
            raise RuntimeError("it does not let go")

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        """With what is reported."""
        reports, self.reports = self.reports, []
        return [*super().poll(), *(PeerLost(peer) for peer in reports)]


def counted(rig: Rig) -> Counted:
    """The transport of the only prefill rank."""
    transport = rig.prefills[0].transport
    assert isinstance(transport, Counted)
    return transport


def test_a_peer_that_is_heard_again_is_not_connected_again() -> None:
    """What was connected before it fell silent is used, so nothing disconnects it while it is being connected."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=Memory(transport=Counted), strategy="staged")
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    rig.request("before", prefills, decodes, 12).start(12).landed()
    node = prefills[0].endpoint.driver.loop
    node.lose(decodes[0].endpoint.driver.loop.me.epoch, PeerLostError("silent"))
    rig.wait(3.0)
    rig.request("after", prefills, decodes, 12).start(12).landed()
    assert counted(rig).connects == 1


def test_a_peer_that_its_transport_has_lost_is_not_taken_for_one_that_was_silent() -> None:
    """It is heard again, and is lost again by the transport's own word."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=Memory(transport=Counted), strategy="staged")
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    rig.request("before", prefills, decodes, 12).start(12).landed()
    node = prefills[0].endpoint.driver.loop
    counted(rig).reports.append(node.reach(decodes[0].endpoint.driver.loop.me.epoch).peer)
    rig.wait(3.0)
    assert counted(rig).connects == 1
    assert not list(node.all_there())
    # It is told, and each of its frames is no other loss.
    assert not list(decodes[0].endpoint.driver.loop.all_there())
    assert prefills[0].observer.counters["peers.lost"] == 1


def test_decode_is_told_that_prefill_s_transport_does_not_reach_it() -> None:
    """Soon, by the reason, for a room in flight and for new ones: both sides' frames arrive, so nobody is silent."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=Memory(transport=Counted), strategy="staged")
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    rig.request("before", prefills, decodes, 12).start(12).landed()
    rooms = [rig.request("in flight", prefills, decodes, 12).open_prefill().open_decode().expect(12)]
    rig.wait(1.0)
    carrier = prefills[0].endpoint.driver.loop.reach(decodes[0].endpoint.driver.loop.me.epoch)
    counted(rig).reports.append(carrier.peer)
    rig.wait(2.0)
    rooms += [rig.request(f"{number}", prefills, decodes, 12).open_decode().expect(12) for number in range(3)]
    rig.wait(2.0)
    for room in rooms:
        (received,) = room.receives
        assert received.phase is Phase.FAILED
        assert "does not reach us" in str(received.error)


def test_a_transport_that_cannot_disconnect_harms_no_room(caplog: pytest.LogCaptureFixture) -> None:
    """It is counted and logged, and the name of the peer is free."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=Memory(transport=Counted), strategy="staged")
    one, other = (rig.decode(tp_shards(SPEC, 1), name, strategy="staged") for name in "DE")
    rig.request("before", prefills, one, 12).start(12).landed()
    beside = rig.request("beside", prefills, other, 12).open_decode().expect().open_prefill().send(4)
    counted(rig).fails = True
    prefills[0].endpoint.confirm_terminated(one[0].endpoint.driver.loop.me.epoch)
    rig.until(lambda: bool(counted(rig).disconnects), "the end")
    beside.send(12, 4).finish().landed()
    links = prefills[0].endpoint.driver.loop.connections
    assert prefills[0].observer.counters["disconnects.failed"] == 1
    assert "it does not let go" in caplog.text
    assert [link.session.hello.instance for link in links._owners.values()] == ["E"]


# Links alone.


def made(later: Later, clock: FakeClock, transport: InprocTransport, peers: int = 16) -> Connections:
    """The connections of a transport whose attempts run when a test says so."""
    return Connections(Transports([transport]), later, nothing, clock, Recorder(), Options(peers=peers))


def ups(rig: Rig, number: int) -> tuple[list[PeerSession], list[InprocTransport]]:
    """Some peers that can be connected."""
    there = [InprocTransport() for _ in range(number)]
    said = [
        msgspec.structs.replace(hello_of(rig), src=os.urandom(16), descriptor=Transports([t]).offers()) for t in there
    ]
    return [PeerSession(hello, 0.0, True) for hello in said], there


def link_of(session: PeerSession) -> Carrier:
    """What carries writes to a peer that is linked."""
    assert session.link is not None
    assert session.linked
    assert session.link.carrier is not None
    return session.link.carrier


def rig_of_one() -> Rig:
    """With a decode rank that says something of itself."""
    rig = Rig(SPEC)
    rig.decode(tp_shards(SPEC, 1))
    return rig


def test_an_attempt_that_never_returns_fails() -> None:
    """Also when the peer is heard again; what it brings in the end is disconnected, and then another one may begin."""
    later, clock, transport = Later(), FakeClock(), Counted()
    links, ((up,), there) = made(later, clock, transport), ups(rig_of_one(), 1)
    assert links.begin(up) is None
    clock.advance(OVERDUE_S)
    (failed,) = links.results()
    again = links.begin(up)
    assert again is not None
    for one in (failed, again):
        assert isinstance(one.link, TransportError)
        assert f"its connect has not returned for {OVERDUE_S:g} s" in str(one.link)
    links.drop(up)
    assert transport.disconnects == 0
    later.jobs.pop()()
    assert links.results() == []
    assert (transport.connects, transport.disconnects) == (1, 1)
    assert links.begin(up) is None
    later.jobs.pop()()
    (linked,) = links.results()
    assert linked.link == link_of(up)
    assert link_of(up).peer == there[0]._me


@pytest.mark.parametrize("overdue", [False, True])
def test_mapping_has_a_time_of_its_own(overdue: bool) -> None:
    """Kernels are compiled in it, which may take longer than a connection."""
    later, clock = Later(), FakeClock()

    def compiling(carrier: Carrier, hello: Hello) -> Mapping:
        for _ in range(3):
            clock.advance(READY_S if overdue else OVERDUE_S)
            during.extend(links.results())
        return Mapping(refused="")

    (up,), _there = ups(rig_of_one(), 1)
    links = Connections(Transports([InprocTransport()]), later, nothing, clock, Recorder(), Options(), compiling)
    during: list[ConnectResult] = []
    assert links.begin(up) is None
    later.jobs.pop()()
    if overdue:
        (failed,) = during
        assert f"kernels and a mapping for it were not ready in {READY_S:g} s" in str(failed.link)
    else:
        assert not during
        assert [one.link for one in links.results()] == [link_of(up)]


def test_more_attempts_than_peers_fail_by_name() -> None:
    """The threads that connect are bounded, and nothing is left of the one that is refused."""
    later = Later()
    links, ((first, second), _there) = made(later, FakeClock(), Counted(), peers=1), ups(rig_of_one(), 2)
    assert links.begin(first) is None
    refused = links.begin(second)
    assert refused is not None
    assert isinstance(refused.link, CapacityError)
    assert "1 connections are under way" in str(refused.link)
    assert len(later.jobs) == 1


def test_frames_that_wait_for_connections_are_bounded_together() -> None:
    """In bytes, over all peers; those of one that is lost, or linked, make room for others."""
    later = Later()
    links, (peers, _there) = made(later, FakeClock(), Counted()), ups(rig_of_one(), 3)

    def hold(up: PeerSession) -> None:
        frame = Expected(src=up.epoch, dst=Epoch(bytes(16)), room=b"room", generation=1, parked=False)
        for _ in range(64):
            assert links.hold(up, frame, 1 << 20, lambda _: None)

    def held() -> int:
        return sum(len(link.frames) for link in links._owners.values()) << 20

    for up in peers:
        assert links.begin(up) is None
        hold(up)
    assert EARLY_BYTES / 2 < held() <= EARLY_BYTES
    links.give_up(peers[0])
    assert held() == 0
    hold(peers[1])
    assert EARLY_BYTES / 2 < held() <= EARLY_BYTES
    later.jobs[1]()
    (linked,) = links.results()
    assert len(linked.frames) << 20 > EARLY_BYTES / 2
    hold(peers[2])
    assert EARLY_BYTES / 2 < held() <= EARLY_BYTES


def test_jobs_of_one_thread_end_before_they_return() -> None:
    """Where a caller drives the endpoint."""
    ran: list[str] = []
    inline = Inline()
    inline.start(lambda: ran.append("job"))
    assert inline.close(0.0, lambda: ran.append("closed"))
    assert ran == ["job", "closed"]
