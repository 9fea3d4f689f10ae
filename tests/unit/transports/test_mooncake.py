"""Mooncake's transport: what the suite does not ask."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from ipaddress import ip_address

import attrs
import msgspec
import numpy as np
import pytest

from disagg_kv.core import Phase
from disagg_kv.errors import (
    PeerLostError,
    RegistrationError,
    RemoteProtocolError,
    TransportError,
)
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Peer, Ticket
from disagg_kv.testing import FakeClock
from disagg_kv.testing.ends import Child, End, HostMemory, plain
from disagg_kv.testing.pair import Log, Pair, batch, noise, same, wait
from disagg_kv.transports import PeerLost, Settled, WriteEnded
from disagg_kv.transports.descriptor import decode, encode, unpack
from disagg_kv.transports.mooncake import LOOK_S, MooncakeTransport, loopback
from disagg_kv.transports.mooncake_flight import ADDRESS, Address
from disagg_kv.transports.mooncake_single import DEPTH
from tests.support.needs import needs_mooncake
from tests.support.rig import Memory, Rig, tp_shards

pytestmark = needs_mooncake

NBYTES = 1 << 16
KV = CacheSpec.kv(4, 4, 8, "float16")
TIMEOUT_S = 120.0
GIVE_UP_S = 100
"""After which a write fails: by the clock of the tests, or, where the library blocks, by its own."""


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def end(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[End]:
    """An end in this process, for which time stands still; the library has a clock of its own."""
    for name in ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC"):
        monkeypatch.setenv(name, str(GIVE_UP_S))
    end = End(lambda: MooncakeTransport(timeout_s=GIVE_UP_S, workers=2, clock=clock), HostMemory())
    yield end
    end.close(0.0)


@pytest.fixture
def pair(end: End) -> Iterator[Pair]:
    """Both ends in this process."""
    target = End(MooncakeTransport, HostMemory())
    yield Pair(end, target, NBYTES, TIMEOUT_S)
    end.close(1.0)
    target.close(1.0)


def readdressed(
    descriptor: bytes, change: Callable[[Address], Address] = lambda a: a, incarnation: Peer | None = None
) -> bytes:
    """The same descriptor with another address, or of another incarnation."""
    found = decode(descriptor, "mooncake")
    blob = msgspec.msgpack.encode(change(unpack(found.blob, ADDRESS)))
    return encode(attrs.evolve(found, incarnation=incarnation or found.incarnation, blob=blob))


def whereabouts(end: End | Child) -> Address:
    """Where its engine says that it is, and in which process."""
    return unpack(decode(end.descriptor(), "mooncake").blob, ADDRESS)


def test_2500_scattered_descriptors_to_one_peer_arrive(pair: Pair) -> None:
    """In one ticket, although the library fails above 2,048."""
    pair.put(*((24 * i, 24 * (2499 - i), 16) for i in range(2500)))
    pair.check()


def test_a_write_that_the_peer_refuses_is_never_called_quiet(pair: Pair, clock: FakeClock) -> None:
    """The library has no evidence."""
    pair.put((0, 0, 100))
    there = pair.target
    assert isinstance(there, End)
    assert isinstance(there.transport, MooncakeTransport)
    there.transport._engine().unregister(there.buffer(pair.remote).addr)
    ticket = pair.submit((0, 0, 1000))
    ended = pair.end(ticket)
    assert isinstance(ended.error, TransportError)
    assert "1 writes of 1000 bytes failed" in str(ended.error)
    assert "the region may be gone there" in str(ended.error)
    assert not ended.quiesced
    clock.advance(1e6)
    pair.work()
    assert not pair.log.settled
    again = pair.target.add(pair.want)
    assert pair.connect() == pair.peer
    pair.succeed(pair.source.submit(pair.peer, batch(pair.local, again, [(0, 0, 1000)])))
    assert list(pair.source.close(1.0)) == [ticket]


def test_a_closed_peer_is_lost_at_the_next_write(pair: Pair) -> None:
    """Nobody listens there any more; what is submitted afterwards ends at once and is quiet."""
    pair.put((0, 0, 100))
    pair.target.close(0.0)
    first = pair.submit((0, 0, 10))
    assert isinstance(pair.end(first).error, PeerLostError)
    assert not pair.log.ended[first].quiesced
    ended = pair.end(pair.submit((0, 0, 10)))
    assert isinstance(ended.error, PeerLostError)
    assert ended.quiesced, "it was never given to the library"
    pair.until(lambda: bool(pair.log.peer_events), "the loss to be told")
    assert pair.log.peer_events == [PeerLost(pair.peer)]
    third = pair.submit((0, 0, 10))
    assert pair.end(third).quiesced
    with pytest.raises(PeerLostError, match="is lost"):
        pair.connect()


def test_a_frozen_peer_delays_nobody_and_is_quiet_once_it_took_all_or_some_time_after_its_end(
    end: End, clock: FakeClock
) -> None:
    """Late bytes land; that all have landed settles a write, and so do the process's end and the drain."""
    with closing(_Children(2)) as children:
        frozen, lively = children.all
        pairs = [Pair(end, child, 1 << 22, TIMEOUT_S) for child in (frozen, lively)]
        log = Log(end.transport.caps)
        for pair in pairs:
            pair.log = log
            pair.put((0, 0, 100))

        def look() -> None:
            clock.advance(LOOK_S)
            log.add(end.events())

        def freeze() -> set[Ticket]:
            """Writes that the library has, and one that waits for them."""
            frozen.pause()
            stuck = {pairs[0].submit((0, 0, 1 << 22)) for _ in range(DEPTH)}
            queued = pairs[0].submit((0, 0, 10))
            for _ in range(5):
                pairs[1].put((0, 0, 1 << 16))
            assert not stuck & log.ended.keys()
            clock.advance(GIVE_UP_S)
            wait(lambda: queued in log.ended, look, TIMEOUT_S, "the writes to be given up")
            for ticket in stuck:
                assert f"no end within {GIVE_UP_S} s" in str(log.ended[ticket].error)
                assert not log.ended[ticket].quiesced
            assert "does not answer" in str(log.ended[queued].error)
            assert log.ended[queued].quiesced, "it was never given to the library"
            return stuck

        stuck = freeze()
        assert not log.settled
        frozen.resume()
        wait(lambda: log.settled == stuck, look, TIMEOUT_S, "the late writes to be settled")
        same(frozen.read(pairs[0].remote), pairs[0].data)
        pairs[0].put((0, 0, 100))
        dead = freeze()
        frozen.kill()
        wait(lambda: bool(log.peer_events), look, TIMEOUT_S, "the loss to be told")
        clock.advance(29.9)
        log.add(end.events())
        assert log.settled == stuck
        # The library takes a moment to see that its connections have ended.
        wait(lambda: log.settled == stuck | dead, look, TIMEOUT_S, "the writes to the dead to be settled")


def test_a_write_that_the_library_still_has_is_not_quiet_however_long_its_peer_has_ended(
    end: End, clock: FakeClock
) -> None:
    """It still reads its source, and lands; as where a process has ended and left its sockets to a child of it."""
    assert isinstance(end.transport, MooncakeTransport)
    singles = end.transport._singles
    assert singles is not None
    with closing(_Children(2)) as children:
        target, mortal = children.all
        process = whereabouts(mortal).process
        remote = target.add(np.zeros(1 << 22, np.uint8))
        local, log = end.add(noise(1 << 22)), Log(end.transport.caps)
        moved = readdressed(target.descriptor(), lambda a: attrs.evolve(a, process=process))
        peer = end.connect(moved, TIMEOUT_S)

        def look() -> None:
            clock.advance(LOOK_S)
            log.add(end.events())
            assert not [ticket for ticket in log.settled if singles.has(ticket)]

        target.pause()
        stuck = {end.submit(peer, batch(local, remote, [(0, 0, 1 << 22)])) for _ in range(DEPTH)}
        mortal.kill()
        wait(lambda: bool(log.peer_events), look, TIMEOUT_S, "the end of the process to be told")
        # From here on the process has been gone for longer than its last writes may take.
        clock.advance(max(GIVE_UP_S, end.transport.caps.drain_s or 0.0))
        wait(lambda: stuck == log.ended.keys(), look, TIMEOUT_S, "the writes to be given up")
        look()
        target.resume()
        wait(lambda: log.settled == stuck, look, TIMEOUT_S, "the writes to be settled")


def test_without_a_pool_of_connections_no_caller_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would make one for each write, in the call that begins it: threads make those calls."""
    monkeypatch.setenv("MC_TCP_ENABLE_CONNECTION_POOL", "0")
    source, target = End(MooncakeTransport, HostMemory()), End(MooncakeTransport, HostMemory())
    assert isinstance(source.transport, MooncakeTransport)
    assert not source.transport._engine().begins
    pair = Pair(source, target, NBYTES, TIMEOUT_S)
    pair.put((0, 0, NBYTES))
    pair.check()
    source.close(1.0)
    target.close(1.0)


class _Children:
    """Open targets in processes of their own."""

    def __init__(self, number: int) -> None:
        self.all = [Child(MooncakeTransport, HostMemory(), TIMEOUT_S) for _ in range(number)]
        for child in self.all:
            child.open()

    def close(self) -> None:
        for child in self.all:
            child.stop()


@pytest.mark.slow
def test_close_does_not_wait_for_a_stuck_write() -> None:
    """The tickets are returned; what was queued behind them has ended, quiet."""
    with closing(_Children(2)) as children:
        target, source = children.all
        remote = target.add(np.zeros(1 << 22, np.uint8))
        local = source.add(noise(1 << 22))
        peer = source.connect(target.descriptor(), TIMEOUT_S)
        target.pause()
        stuck = [source.submit(peer, batch(local, remote, [(0, 0, 1 << 22)])) for _ in range(DEPTH)]
        queued = source.submit(peer, batch(local, remote, [(0, 0, 1)]))
        assert source.close(0.2) == tuple(stuck)
        (ended,) = source.events()
        assert isinstance(ended, WriteEnded)
        assert (ended.ticket, ended.quiesced) == (queued, True)
        assert "closed before it was written" in str(ended.error)


STUCK = """
import sys
import numpy as np
from disagg_kv.memory import Buffer
from disagg_kv.planning import Writes
from disagg_kv.transports.mooncake import MooncakeTransport

source = MooncakeTransport()
memory = np.ones(1 << 26, np.uint8)
source.register([Buffer(memory.ctypes.data, memory.nbytes, owner=memory)])
peer = source.connect(bytes.fromhex(sys.argv[1]), 120.0)
print("connected", flush=True)
input()
source.submit(peer, Writes.one(0, 0, 0, 0, memory.nbytes))
assert len(source.close(0.2)) == 1
"""


@pytest.mark.slow
def test_a_process_ends_well_while_a_write_is_stuck() -> None:
    """With its memory, its engine and its thread in the middle of a call, and without waiting for it."""
    with closing(_Children(1)) as children:
        (target,) = children.all
        target.add(np.zeros(1 << 26, np.uint8))
        command = [sys.executable, "-c", STUCK, target.descriptor().hex()]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "connected\n"
            target.pause()
            said = process.communicate("go\n")
        assert (process.returncode, said) == (0, ("", ""))


def test_a_peer_that_does_not_answer_is_not_waited_for(end: End) -> None:
    """Whoever it is that listens there."""
    other = MooncakeTransport()
    descriptor = other.local_descriptor()
    with socket.create_server(("127.0.0.1", 0)) as deaf, pytest.raises(TransportError, match="answer"):
        end.connect(
            readdressed(descriptor, lambda a: attrs.evolve(a, host="127.0.0.1", port=deaf.getsockname()[1])), 0.3
        )
    with pytest.raises(PeerLostError, match="no process listens"):
        end.connect(readdressed(descriptor, lambda a: attrs.evolve(a, port=9)), TIMEOUT_S)
    with pytest.raises(TransportError, match=r"cannot open '127\.0\.0\.1:9'"):
        end.connect(readdressed(descriptor, lambda a: attrs.evolve(a, session="127.0.0.1:9")), TIMEOUT_S)
    other.close(0.0)


def test_a_peer_that_cannot_be_worked_with_is_refused(end: End) -> None:
    """With an address that is none, another protocol, or the address of an earlier peer."""
    other = MooncakeTransport()
    good = other.local_descriptor()
    changes: tuple[Callable[[Address], Address], ...] = (
        lambda a: attrs.evolve(a, port=0),
        lambda a: attrs.evolve(a, port=1 << 16),
        lambda a: attrs.evolve(a, host=""),
        lambda a: attrs.evolve(a, session=""),
    )
    for change in changes:
        with pytest.raises(RemoteProtocolError, match="impossible address"):
            end.connect(readdressed(good, change), TIMEOUT_S)
    with pytest.raises(TransportError, match="'rdma', this side 'tcp'"):
        end.connect(readdressed(good, lambda a: attrs.evolve(a, protocol="rdma")), TIMEOUT_S)
    end.connect(good, TIMEOUT_S)
    with pytest.raises(TransportError, match="an earlier peer was at"):
        end.connect(readdressed(good, incarnation=Peer(b"x" * 16)), TIMEOUT_S)
    other.close(0.0)


def test_each_engine_of_a_host_has_an_address_of_its_own(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library forgets none, and ports repeat after some fifty peers; unless it is to listen at one address."""
    hosts = {whereabouts(end).host for end in (pair.source, pair.target)}
    assert len(hosts) == 2
    assert all(ip_address(host).is_loopback for host in hosts)
    pair.put((0, 0, NBYTES))
    pair.check()
    monkeypatch.setenv("MC_TCP_BIND_ADDRESS", "127.0.0.1")
    narrow = End(MooncakeTransport, HostMemory())
    assert whereabouts(narrow).host == "127.0.0.1"
    narrow.close(0.0)
    not_ours = "192.0.2.1"
    assert [loopback(host) for host in ("127.9.9.9", not_ours)] == ["127.9.9.9", "127.0.0.1"]


def test_another_engine_under_the_name_of_a_peer_is_refused(pair: Pair) -> None:
    """Bad input: nothing is written to either, and the peer that has the name stays."""
    pair.put((0, 0, 100))
    second = End(MooncakeTransport, HostMemory())
    with pytest.raises(RemoteProtocolError, match="takes its name"):
        pair.source.connect(readdressed(second.descriptor(), incarnation=pair.peer), TIMEOUT_S)
    pair.put((100, 100, 100))
    pair.check()
    second.close(0.0)


def test_a_peer_of_another_host_is_not_watched(pair: Pair) -> None:
    """It is known by its answers alone."""

    def elsewhere(address: Address) -> Address:
        return attrs.evolve(address, process=attrs.evolve(address.process, host="far away"))

    distant = readdressed(pair.target.descriptor(), elsewhere, Peer(b"y" * 16))
    end = End(MooncakeTransport, HostMemory())
    local, log = end.add(pair.data), Log(pair.caps)
    peer = end.connect(distant, TIMEOUT_S)

    def write() -> WriteEnded:
        ticket = end.submit(peer, batch(local, pair.remote, [(0, 0, 100)]))
        wait(lambda: ticket in log.ended, lambda: log.add(end.events()), TIMEOUT_S, "the ticket to end")
        return log.ended[ticket]

    assert write().error is None
    pair.target.close(0.0)
    assert isinstance(write().error, PeerLostError)
    end.close(0.0)


def test_memory_that_the_library_refuses_is_told_with_the_numbers(end: End) -> None:
    """And nothing of the call stays registered."""
    good, bad = plain(noise(100)), plain(noise(200))
    assert isinstance(end.transport, MooncakeTransport)
    engine = end.transport._engine()
    engine.register(bad.addr, bad.nbytes)
    with pytest.raises(RegistrationError, match=rf"200 bytes at {bad.addr:#x}: it overlaps .*-7"):
        end.transport.register([good, bad])
    engine.unregister(bad.addr)
    end.transport.register([good, bad])


def test_a_closed_transport_says_so(end: End) -> None:
    """In every call that needs the engine."""
    end.close(0.0)
    calls: tuple[Callable[[], object], ...] = (
        lambda: end.add(noise(10)),
        lambda: end.connect(b"", 1.0),
    )
    for call in calls:
        with pytest.raises(TransportError, match="closed"):
            call()


@pytest.mark.parametrize(("given", "want"), [(None, 30), ("12", 12), ("3", 5), ("soon", 5)])
def test_the_environment_can_set_the_timeout(monkeypatch: pytest.MonkeyPatch, given: str | None, want: int) -> None:
    """Read as the library reads it."""
    monkeypatch.delenv("MC_TRANSFER_TIMEOUT", raising=False)
    if given is not None:
        monkeypatch.setenv("MC_TRANSFER_TIMEOUT", given)
    transport = MooncakeTransport()
    assert transport._shared.timeout_s == want
    transport.close(0.0)


def test_events_come_once(pair: Pair) -> None:
    """Tickets are Ended, once, in any order; nothing is Settled that was quiet."""
    tickets = [pair.submit((0, 0, 10)) for _ in range(3)]
    told: list[WriteEnded | Settled | PeerLost] = []
    wait(lambda: len(told) >= 3, lambda: told.extend(pair.source.events()), TIMEOUT_S, "three events")
    assert sorted(told, key=str) == [WriteEnded(Ticket(t)) for t in tickets]
    assert not pair.source.events()


@pytest.mark.parametrize("path", ["staged", "slice"])
@pytest.mark.parametrize("ways", [(2, 1), (1, 2)])
def test_requests_arrive_byte_for_byte(ways: tuple[int, int], path: str) -> None:
    """Endpoints with threads of their own, several rooms at once."""
    rig, memory = Rig(KV, threaded=True), Memory(transport=MooncakeTransport)
    prefills = rig.prefill(tp_shards(KV, ways[0]), memory=memory, strategy=path)
    decodes = rig.decode(tp_shards(KV, ways[1]), memory=memory, strategy=path)
    requests = [rig.request(f"room {i}", prefills, decodes, 17).start() for i in range(4)]
    rig.until(lambda: all(r.all(Phase.DONE) for r in requests), "all rooms")
    for request in requests:
        request.wanted(0, 17)
    rig.check()
    rig.quiet()
    rig.close()
