"""What endpoints are given fails from outside: the rendezvous, the transport's ``connect``, an observer, the thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, cast

import pytest

from disagg_kv import PrefillEndpoint
from disagg_kv.channels import InprocChannel
from disagg_kv.core import Options, Phase
from disagg_kv.endpoints.peers.background import HelperThreads
from disagg_kv.endpoints.peers.directory import look_up
from disagg_kv.errors import (
    AbortedError,
    DeadlineError,
    DisaggKVError,
    EndpointBrokenError,
    PeerLostError,
    RemoteProtocolError,
)
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Epoch, Peer, Rank, RoomId, Ticket
from disagg_kv.memory import Event
from disagg_kv.planning import Writes
from disagg_kv.rendezvous import Rendezvous, Source
from disagg_kv.trace import Guarded, Span
from disagg_kv.transports import InprocTransport, PeerLost, Settled, WriteEnded
from tests.support.rig import Memory, Rig, tp_shards

SPEC = CacheSpec.kv(2, 4, 8, "float16")


class Leaving:
    """A rendezvous that does ``instead`` while it is away, and counts what it is asked."""

    def __init__(self, inner: Rendezvous) -> None:
        self._inner = inner
        self.instead: Callable[[], tuple[str, ...] | None] | None = None
        self.asked = 0

    def publish(self, instance: str, rank: Rank, world: int, address: str) -> None:
        """Pass on."""
        self._inner.publish(instance, rank, world, address)

    def lookup(self, source: Source) -> tuple[str, ...] | None:
        """Pass on, or fail."""
        self.asked += 1
        return self._inner.lookup(source) if self.instead is None else self.instead()


def raises(error: Exception) -> Callable[[], tuple[str, ...] | None]:
    """What a look-up does that fails."""

    def look() -> tuple[str, ...] | None:
        raise error

    return look


Look = Callable[[], tuple[str, ...] | None]

AWAY: Sequence[tuple[str, Look]] = (
    ("unreachable", raises(PeerLostError("the store cannot be reached"))),
    ("garbage", raises(RemoteProtocolError("the store holds b'x' as its number of ranks"))),
    ("foreign error", raises(RuntimeError("Broken pipe"))),
    ("nothing", lambda: None),
    ("no list", lambda: cast("tuple[str, ...]", "inproc://P0")),
)


@pytest.mark.parametrize("away", [away for _, away in AWAY], ids=[name for name, _ in AWAY])
def test_rooms_of_connected_ranks_need_no_rendezvous(
    away: Callable[[], tuple[str, ...] | None], caplog: pytest.LogCaptureFixture
) -> None:
    """Rooms in flight and new rooms end well while it is away for minutes, and few lines are logged."""
    rig = Rig(SPEC)
    rig.rendezvous = there = Leaving(rig.rendezvous)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 2)), rig.decode(tp_shards(SPEC, 2))
    rig.request("first", prefills, decodes, 8).start().landed()
    flying = rig.request("flying", prefills, decodes, 8).open_decode().expect().open_prefill()
    there.instead = away
    with caplog.at_level(logging.WARNING):
        rig.wait(60.0)
        flying.send(8).finish().landed()
        for number in range(3):
            rig.request(f"new {number}", prefills, decodes, 8).start().landed()
            rig.wait(1.5)
    assert len(caplog.records) <= 10, caplog.text
    rig.quiet()


def test_a_rendezvous_that_comes_back_serves_rooms_that_waited() -> None:
    """A room of ranks that were never met waits, and begins once the rendezvous answers."""
    rig = Rig(SPEC)
    rig.rendezvous = there = Leaving(rig.rendezvous)
    there.instead = raises(PeerLostError("the store cannot be reached"))
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 8).start()
    rig.wait(5.0)
    assert request.receives[0].phase is Phase.CONNECTING
    there.instead = None
    request.landed()
    rig.quiet()


def test_a_room_that_is_never_found_says_what_the_rendezvous_said() -> None:
    """It fails after ``silence_s``, by name, and the reason is the rendezvous' own."""
    rig = Rig(SPEC, options=Options(silence_s=5.0))
    rig.rendezvous = there = Leaving(rig.rendezvous)
    there.instead = raises(RemoteProtocolError("the store holds b'x' as its number of ranks"))
    handle = rig.decode(tp_shards(SPEC, 1))[0].endpoint.open(RoomId(b"room"), Source("P"))
    rig.until(lambda: handle.released, "the end")
    assert isinstance(handle.error, PeerLostError)
    assert "not found in 5 s: the store holds b'x'" in str(handle.error)


def test_deadlines_run_whatever_the_rendezvous_holds() -> None:
    """Names that hold garbage do not hold up the deadline of another room by more than a step."""
    rig = Rig(SPEC)
    rig.rendezvous = there = Leaving(rig.rendezvous)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    rig.request("first", prefills, decodes, 8).start().landed()
    endpoint = decodes[0].endpoint
    innocent = endpoint.open(RoomId(b"innocent"), Source("P"), total_s=1.5)
    there.instead = raises(RemoteProtocolError("garbage"))
    for name in "XYZ":
        endpoint.open(RoomId(name.encode()), Source(name))
    rig.wait(1.7)
    assert isinstance(innocent.error, DeadlineError)


def test_a_settled_instance_asks_the_rendezvous_no_more() -> None:
    """Once ranks have met, and no room begins, there is nothing to ask."""
    rig = Rig(SPEC)
    rig.rendezvous = there = Leaving(rig.rendezvous)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 4)), rig.decode(tp_shards(SPEC, 2))
    rig.request("first", prefills, decodes, 8).start().landed()
    rig.wait(3.0)
    before = there.asked
    rig.wait(30.0)
    assert there.asked == before


class Blocking(InprocTransport):
    """A transport whose ``connect`` blocks while ``gate`` is shut, except to the ``reachable``."""

    gate = threading.Event()
    reachable: ClassVar[set[bytes]] = set()
    begun = 0

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """Wait, as for a fabric that does not answer."""
        if self.peer_of(descriptor) not in self.reachable:
            type(self).begun += 1
            assert self.gate.wait(60)
        return super().connect(descriptor, timeout_s)


def test_ranks_whose_fabric_does_not_answer_hold_up_nobody() -> None:
    """While connections to 40 ranks block, rooms with a healthy instance go on, and so do new ones."""
    rig = Rig(SPEC, threaded=True)
    Blocking.gate, Blocking.reachable, Blocking.begun = threading.Event(), set(), 0
    healthy = rig.prefill(tp_shards(SPEC, 1))
    transport = healthy[0].transport
    assert isinstance(transport, InprocTransport)
    Blocking.reachable.add(transport._me)
    decodes = rig.decode(tp_shards(SPEC, 1), memory=Memory(transport=Blocking))
    rig.request("first", healthy, decodes, 8).start().landed()
    for number in range(40):
        rig.prefill(tp_shards(SPEC, 1), f"dark {number}")
        decodes[0].endpoint.open(RoomId(b"dark %d" % number), Source(f"dark {number}"))
    rig.until(lambda: Blocking.begun == 40, "the connections")
    for number in range(5):
        rig.request(f"healthy {number}", healthy, decodes, 8).start().landed()
    late = rig.prefill(tp_shards(SPEC, 1), "late")
    transport = late[0].transport
    assert isinstance(transport, InprocTransport)
    Blocking.reachable.add(transport._me)
    rig.request("late", late, decodes, 8, of="late").start().landed()
    assert Blocking.begun == 40
    Blocking.gate.set()
    for member in rig.members:
        member.close()


class Unreachable(InprocTransport):
    """A transport that reaches no peer, and counts how often it tried."""

    tried = 0

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """Fail."""
        type(self).tried += 1
        raise OSError("no route to host")


def test_a_failed_connection_is_remembered() -> None:
    """However often a peer speaks, another attempt begins only after ``silence_s``."""
    rig = Rig(SPEC, options=Options(silence_s=5.0, total_s=20.0))
    Unreachable.tried = 0
    prefills = rig.prefill(tp_shards(SPEC, 1))
    decodes = rig.decode(tp_shards(SPEC, 1), memory=Memory(transport=Unreachable))
    request = rig.request("room", prefills, decodes, 8).start()
    rig.until(lambda: request.receives[0].phase is Phase.FAILED, "the refusal")
    assert "no route to host" in str(request.receives[0].error)
    rig.wait(4.0)
    assert Unreachable.tried == 1


class Grumbling:
    """An observer that raises, and counts how often it was called."""

    def __init__(self) -> None:
        self.called = 0

    def span(self, span: Span) -> None:
        """Raise."""
        self.called += 1
        raise RuntimeError("full")

    def count(self, name: str, amount: int = 1) -> None:
        """Raise."""
        self.called += 1
        raise RuntimeError("full")


@pytest.mark.parametrize("how", ["span", "count"])
def test_an_observer_that_raises_is_dropped(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is called once; one line is logged."""
    inner = Grumbling()
    guarded = Guarded(inner)
    for _ in range(3):
        if how == "span":
            guarded.span(Span("room", RoomId(b"room"), 0.0, 1.0))
        else:
            guarded.count("frames.refused")
    assert inner.called == 1
    assert len(caplog.records) == 1
    assert "Grumbling raised and is dropped" in caplog.text


class Failing(InprocTransport):
    """A transport whose ``poll`` raises while ``error`` says so."""

    error: BaseException | None = None

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        """Raise or pass on."""
        if self.error is not None:
            raise self.error
        return super().poll()


def test_a_transport_whose_poll_raises_stops_no_command_and_no_tick() -> None:
    """Rooms fail by name, the peer hears heartbeats, and the next room works once ``poll`` does."""
    rig = Rig(SPEC, options=Options(silence_s=5.0, total_s=20.0))
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=Memory(transport=Failing))
    decodes = rig.decode(tp_shards(SPEC, 1))
    rig.request("first", prefills, decodes, 8).start().landed()
    transport = prefills[0].transport
    assert isinstance(transport, Failing)
    transport.error = ValueError("poll is broken")
    request = rig.request("room", prefills, decodes, 8).start()
    rig.until(lambda: all(h.phase is Phase.FAILED for h in request.handles), "the end")
    assert "poll is broken" in request.errors()
    rig.wait(10.0)
    transport.error = None
    rig.request("next", prefills, decodes, 8).start().landed()
    rig.quiet()


class FailingOnce(InprocTransport):
    """A transport whose ``poll`` raises once, the first time after a write was posted."""

    armed = posted = False

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        """Note it."""
        self.posted = self.armed
        return super().submit(peer, writes, after=after)

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        """Raise or pass on."""
        if self.posted:
            self.armed = self.posted = False
            raise ValueError("poll is broken")
        return super().poll()


def test_a_poll_that_raises_between_the_posts_of_one_gather_leaves_no_slot_behind() -> None:
    """A gather for two destinations is posted to both, whatever is learnt after the first post."""
    spec = CacheSpec.mla(2, 16, "float16")
    rig = Rig(spec)
    prefills = rig.prefill(tp_shards(spec, 1), memory=Memory(transport=FailingOnce), strategy="staged")
    decodes = rig.decode(tp_shards(spec, 2), strategy="staged")
    rig.request("first", prefills, decodes, 12).start().landed()
    transport = prefills[0].transport
    assert isinstance(transport, FailingOnce)
    transport.armed = True
    request = rig.request("room", prefills, decodes, 12).start().ended()
    assert not transport.armed
    assert "poll is broken" in request.errors()
    assert prefills[0].endpoint.usage().slots_used == 0
    rig.request("next", prefills, decodes, 12).start().landed()
    rig.quiet()


@pytest.mark.parametrize("side", ["read_aux", "write_aux"])
def test_a_pool_whose_aux_row_fails_ends_its_room_alone(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool may be another project's code."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    innocent = rig.request("innocent", prefills, decodes, 12).open_decode().expect(12).open_prefill().send(4)
    prefills[0].pool.write_aux(0, b"12345678")
    calls: list[int] = []

    def fail(row: int, *data: bytes) -> bytes:
        calls.append(row)
        if side == "read_aux" and len(calls) == 1:
            return b""  # `finish` looks at the row before it takes the call
        raise RuntimeError("the row is gone")

    monkeypatch.setattr((prefills if side == "read_aux" else decodes)[0].pool, side, fail)
    room = rig.request("room", prefills, decodes, 12).open_decode().expect(12, aux=0).open_prefill()
    room.send(12).finish(aux=0)
    rig.until(lambda: all(handle.phase is Phase.FAILED for handle in room.handles), "the end")
    assert "the row is gone" in room.failed().errors()
    room.forgive()
    innocent.send(12).finish().landed()


def test_a_peer_whose_heartbeats_wait_behind_a_flood_is_not_silent() -> None:
    """Silence is judged up to what was taken in: a thread that stood still has more waiting than one step allows."""
    options = Options(silence_s=2.0, heartbeat_s=0.2)
    rig = Rig(SPEC, options=options)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    rig.request("first", prefills, decodes, 12).start().landed()
    request = rig.request("room", prefills, decodes, 12).open_decode().expect(12).open_prefill()
    rig.wait(0.5)
    stranger = InprocChannel(rig.hub, "stranger")
    decodes[0].frozen = True
    for _ in range(2000):
        assert stranger.send(decodes[0].channel.address, b"x")
    rig.wait(1.5 * options.silence_s)
    decodes[0].frozen = False
    lost = decodes[0].observer.counters.get("peers.lost", 0)
    decodes[0].endpoint.driver.step(0.0)
    assert decodes[0].observer.counters.get("peers.lost", 0) == lost
    request.failed()  # prefill has lost decode meanwhile
    rig.quiet()


def test_a_room_that_prefill_gave_up_when_it_lost_decode_ends_when_they_hear_each_other_again() -> None:
    """Decode never missed prefill; it learns that prefill missed it, and asks for its rooms once more."""
    rig = Rig(SPEC, options=Options(silence_s=2.0, heartbeat_s=0.2, total_s=1000.0))
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    rig.request("first", prefills, decodes, 12).start().landed()
    request = rig.request("room", prefills, decodes, 12).open_decode().expect(12).open_prefill().send(4)
    rig.wait(0.5)
    decodes[0].frozen = True
    rig.until(lambda: request.sends[0].phase is Phase.FAILED, "the loss")
    decodes[0].frozen = False
    began = rig.clock()
    request.failed()
    assert rig.clock() - began < 1.0
    assert isinstance(request.receives[0].error, AbortedError)
    rig.quiet()


class UnprintableError(Exception):
    """An error whose text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("error", [ValueError("poll is broken"), UnprintableError(), SystemExit(3)])
def test_an_endpoint_that_cannot_go_on_fails_every_room_and_every_call(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the handling of an error, or one that ends a thread, is never a hang."""
    rig = Rig(SPEC, threaded=True)
    memory = Memory(transport=Failing)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory)
    decodes = rig.decode(tp_shards(SPEC, 1))
    open_one = rig.request("open", prefills, decodes, 8).open_decode().expect().open_prefill()
    rig.until(lambda: open_one.sends[0].phase is Phase.READY, "the expectation")
    endpoint: PrefillEndpoint = prefills[0].endpoint
    transport = prefills[0].transport
    assert isinstance(transport, Failing)

    def handle_error(error: DisaggKVError, *, unmet: bool = False) -> None:
        raise ValueError("a second error")

    monkeypatch.setattr(endpoint.driver.loop.side, "integrity_failure", handle_error)
    transport.error = error
    rig.until(lambda: endpoint.driver.broken is not None, "the end")
    handle = open_one.sends[0]
    rig.until(lambda: handle.phase is Phase.FAILED, "the room's end")
    assert isinstance(handle.error, EndpointBrokenError)
    assert not handle.released
    table = prefills[0].take(8)
    for call in (
        lambda: endpoint.open(RoomId(b"next")),
        endpoint.poll,
        lambda: endpoint.confirm_terminated(Epoch(bytes(16))),
        lambda: handle.send_chunk(8, [table]),
        handle.withdraw,
    ):
        with pytest.raises(EndpointBrokenError, match="P/0 is broken"):
            call()
    for member in rig.members:
        member.close()


def test_a_withdrawal_ends_with_its_endpoint() -> None:
    """Who waits for pages that were withdrawn is told that the endpoint is broken."""
    rig = Rig(SPEC)
    memory = Memory(transport=Failing)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1), memory=memory), rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 8).start()
    fired = request.sends[0].withdraw()
    transport = prefills[0].transport
    assert isinstance(transport, Failing)
    transport.error = SystemExit(1)
    with pytest.raises(EndpointBrokenError):
        prefills[0].endpoint.driver.step(0.0)
    for wait in (fired.query, fired.synchronize):
        with pytest.raises(EndpointBrokenError):
            wait()


def test_look_ups_never_raise() -> None:
    """Whatever a rendezvous does is an answer."""
    for _, away in AWAY:
        there = Leaving(Rig(SPEC).rendezvous)
        there.instead = away
        answer = look_up(there, Source("P"), 0.0)
        assert answer.addresses is None
        assert answer.error is None or isinstance(answer.error, DisaggKVError)


def test_helper_threads_run_jobs_side_by_side_and_end() -> None:
    """A job that raises stops no other, and no thread is left."""
    threads, gate, ran = HelperThreads("helpers", 2), threading.Event(), list[int]()

    def job(number: int) -> Callable[[], None]:
        def run() -> None:
            assert gate.wait(60)
            ran.append(number)
            assert number

        return run

    for number in range(5):
        threads.start(job(number))
    gate.set()
    eventually(lambda: len(ran) == 5)
    assert threads.close(60.0, lambda: ran.append(5))
    assert sorted(ran) == list(range(6))
    eventually(lambda: not any(thread.name == "helpers" for thread in threading.enumerate()))


def eventually(done: Callable[[], bool]) -> None:
    """Wait until it is so."""
    limit = time.monotonic() + 60
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.001)


def test_jobs_that_have_not_begun_are_dropped_by_close(caplog: pytest.LogCaptureFixture) -> None:
    """What has begun is waited for, no longer than asked; what follows it is run by its thread then."""
    threads, begun, gate = HelperThreads("closing", 1), threading.Event(), threading.Event()
    ran, closed = list[str](), threading.Event()

    def first() -> None:
        begun.set()
        assert gate.wait(60)
        raise RuntimeError("a bug")

    def close() -> None:
        ran.append("close")
        closed.set()

    threads.start(first)
    assert begun.wait(60)
    assert not threads.close(0.0, close)
    threads.start(lambda: ran.append("second"))
    assert not ran
    gate.set()
    assert closed.wait(60)
    assert ran == ["close"]
    assert "a job of closing raised" in caplog.text
