"""What NIXL's transport does beyond the suite that all pass."""

from __future__ import annotations

import gc
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence

import attrs
import msgspec
import numpy as np
import pytest

from disagg_kv.errors import PeerLostError, RegistrationError, RemoteProtocolError, TransportError
from disagg_kv.ids import Peer, RegionId, Ticket
from disagg_kv.memory import U8, Buffer
from disagg_kv.planning import Writes
from disagg_kv.testing.ends import Child, End, HostMemory, TransportEvent
from disagg_kv.testing.pair import Log, batch, noise, same, wait
from disagg_kv.testing.transport_events import FiredEvent
from disagg_kv.transports import (
    Descriptor,
    Extents,
    PeerLost,
    Process,
    WriteEnded,
    decode,
    encode,
    nixl_library,
    nixl_worker,
    transport,
)
from disagg_kv.transports.nixl import NixlTransport, cut, single
from tests.support.needs import needs_nixl

pytestmark = needs_nixl

MIB = 1 << 20
THREAD = "disagg_kv-nixl"
WAIT_S = 120.0


def end(**options: object) -> End:
    """One end in this process."""
    return End(lambda: transport("nixl", **options), HostMemory())


@pytest.fixture
def source() -> Iterator[End]:
    one = end()
    yield one
    one.close(0.0)


@pytest.fixture
def target() -> Iterator[End]:
    one = end()
    yield one
    one.close(0.0)


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    """A process in which each test may open a transport of its own."""
    one = Child(NixlTransport, HostMemory(), WAIT_S)
    yield one
    one.stop()


@pytest.fixture
def victim() -> Iterator[Child]:
    """A process that the test may kill."""
    one = Child(NixlTransport, HostMemory(), WAIT_S)
    one.open()
    yield one
    one.stop()


def collected(one: End, number: int) -> list[TransportEvent]:
    """What it tells, until it has told so much."""
    found: list[TransportEvent] = []
    wait(lambda: len(found) >= number, lambda: found.extend(one.events()), WAIT_S, f"{number} events")
    return found


def contact(descriptor: bytes) -> tuple[Descriptor, dict[str, object]]:
    """A descriptor and what is NIXL's in it."""
    made = decode(descriptor, "nixl")
    found: dict[str, object] = msgspec.msgpack.decode(made.blob)
    return made, found


def forged(descriptor: bytes, **changes: object) -> bytes:
    """With another contact."""
    made, found = contact(descriptor)
    return encode(attrs.evolve(made, blob=msgspec.msgpack.encode(found | changes)))


def threads() -> set[threading.Thread]:
    """Those of this process's transports."""
    return {thread for thread in threading.enumerate() if thread.name == THREAD}


def forged_name(descriptor: bytes) -> bytes:
    """Of another incarnation."""
    return encode(attrs.evolve(decode(descriptor, "nixl"), incarnation=Peer(bytes(16))))


def test_an_idle_peer_that_is_killed_is_reported_without_any_write(source: End, victim: Child) -> None:
    """Nothing is in flight and nothing is posted; the same peer is then refused."""
    descriptor = victim.descriptor()
    peer = source.connect(descriptor, WAIT_S)
    victim.kill()
    assert collected(source, 1) == [PeerLost(peer)]
    with pytest.raises(PeerLostError):
        source.connect(descriptor, WAIT_S)
    source.transport.disconnect(peer)
    with pytest.raises(PeerLostError):
        source.connect(descriptor, WAIT_S)


def test_a_peer_that_cannot_be_watched_is_probed(source: End, target: End) -> None:
    """As of another host; here its transport closes, its process lives."""
    peer = source.connect(target.descriptor(), WAIT_S)
    target.close(0.0)
    assert collected(source, 1) == [PeerLost(peer)]


def test_a_peer_of_another_host_is_not_asked_of_this_one(source: End, target: End) -> None:
    """The same process number means another process there."""
    elsewhere = attrs.asdict(attrs.evolve(Process.own(), host="another"))
    region, there = source.add(noise(100)), target.add(np.zeros(100, np.uint8))
    peer = source.connect(forged(target.descriptor(), process=elsewhere), WAIT_S)
    ticket = source.submit(peer, batch(region, there, [(0, 0, 100)]))
    assert collected(source, 1) == [WriteEnded(ticket)]
    same(target.read(there), noise(100))


def test_writes_to_a_killed_peer_end_unquiet_and_settle_when_its_end_was_seen(source: End, victim: Child) -> None:
    """Each ends once; none is quiet before the proof."""
    log = Log(source.transport.caps)
    here, there = source.add(noise(8 * MIB)), victim.add(np.zeros(8 * MIB, np.uint8))
    peer = source.connect(victim.descriptor(), WAIT_S)
    victim.pause()
    tickets = [source.submit(peer, batch(here, there, [(0, 0, 8 * MIB)])) for _ in range(5)]
    victim.kill()
    wait(lambda: log.lost(peer), lambda: log.add(source.events()), WAIT_S, "the loss")
    late = source.submit(peer, batch(here, there, [(0, 0, 10)]))

    def quiet() -> bool:
        return all(t in log.settled or (t in log.ended and log.ended[t].quiesced) for t in [*tickets, late])

    wait(quiet, lambda: log.add(source.events()), WAIT_S, "every ticket to be quiet")
    assert log.settled, "all were done before the kill"
    assert isinstance(log.ended[late].error, PeerLostError)
    assert log.ended[late].quiesced
    failed = [log.ended[t].error for t in log.settled]
    assert all(isinstance(error, PeerLostError) for error in failed), failed


def test_close_names_what_is_in_flight_to_a_frozen_peer(source: End, victim: Child) -> None:
    """It returns in time; the memory stays as it is, and later calls find nothing."""
    here, there = source.add(noise(8 * MIB)), victim.add(np.zeros(8 * MIB, np.uint8))
    peer = source.connect(victim.descriptor(), WAIT_S)
    victim.pause()
    tickets = [source.submit(peer, batch(here, there, [(0, 0, 8 * MIB)])) for _ in range(5)]
    source.transport.disconnect(peer)
    left = source.close(0.1)
    ended = {event.ticket for event in source.events() if isinstance(event, WriteEnded)}
    assert left
    assert set(left) | ended == set(tickets)
    victim.resume()
    assert list(source.close(1.0)) == []


def test_no_thread_outlives_its_transport() -> None:
    """Whether it was closed or forgotten."""
    gc.collect()
    before = threads()
    one, other = NixlTransport(), NixlTransport()
    assert len(threads() - before) == 2
    one.close(0.0)
    del other
    gc.collect()
    assert threads() <= before
    with pytest.raises(TransportError, match="closed"):
        one.register([])


def test_an_idle_transport_rests_between_two_looks_at_the_library(target: End, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as ``idle_s`` says: a look takes microseconds of a core, so that idle transports take hardly any."""
    one = end(idle_s=0.01)
    one.connect(target.descriptor(), WAIT_S)
    assert isinstance(one.transport, NixlTransport)
    agent = one.transport._worker._agent
    progress, looks = agent.progress, list[float]()

    def counted() -> None:
        looks.append(time.monotonic())
        progress()

    monkeypatch.setattr(agent, "progress", counted)
    wait(lambda: len(looks) >= 150, lambda: None, WAIT_S, "150 looks")  # the first pauses are shorter
    before = len(looks)
    wait(lambda: len(looks) >= before + 50, lambda: None, WAIT_S, "fifty more")
    assert looks[before + 49] - looks[before] > 0.5 * 49 * 0.01, "without a pause it would take two milliseconds"
    one.close(0.0)


def test_memory_of_several_devices_goes_in_several_parts(source: End, target: End) -> None:
    """One batch and one ticket; the CPU has two names here."""
    data = [noise(4096, seed) for seed in range(3)]
    memory = [np.zeros(4096, np.uint8) for _ in data]
    names = ("cpu", "cpu:0", "cpu")

    def buffers(arrays: Sequence[U8]) -> list[Buffer]:
        return [Buffer(a.ctypes.data, a.nbytes, name, a) for a, name in zip(arrays, names, strict=True)]

    here = source.transport.register(buffers(data))
    there = target.transport.register(buffers(memory[::-1]))
    peer = source.connect(target.descriptor(), WAIT_S)
    local, remote = np.array([*here, here[0]], np.int32), np.array([*there, there[1]], np.int32)
    zero = np.zeros(4, np.int64)
    writes = Writes(local, zero, remote, zero, np.array([4096, 4096, 4096, 0], np.int64))
    ticket = source.submit(peer, writes)
    assert collected(source, 1) == [WriteEnded(ticket)]
    for found, want in zip(memory[::-1], data, strict=True):
        same(found, want)


def test_writes_are_cut_by_the_devices_that_they_go_between() -> None:
    """Each kind of memory has its own call; each GPU its own context."""
    regions = [RegionId(i) for i in range(4)]
    local = {("cuda", 1): regions[:2], ("cpu", 0): regions[2:]}
    remote = {("cuda", 0): regions[:3], ("cpu", 0): regions[3:]}
    rows = np.array([(0, 0, 8), (1, 3, 8), (2, 3, 8), (0, 1, 8), (3, 0, 0)], np.int64)
    ids = rows.astype(np.int32)
    source, target = np.arange(5) + 100, np.arange(5) + 200
    parts = cut(Writes(ids[:, 0], source, ids[:, 1], target, rows[:, 2]), source, target, local, remote)
    assert [(p.here, p.there, np.asarray(p.local).tolist(), np.asarray(p.remote).tolist()) for p in parts] == [
        (("cuda", 1), ("cuda", 0), [[100, 8, 1], [103, 8, 1]], [[200, 8, 0], [203, 8, 0]]),
        (("cuda", 1), ("cpu", 0), [[101, 8, 1]], [[201, 8, 0]]),
        (("cpu", 0), ("cpu", 0), [[102, 8, 0]], [[202, 8, 0]]),
    ]


def test_one_good_range_is_cut_as_a_batch_would_be() -> None:
    """And everything else is left to what can say what is wrong with it."""
    one = batch(RegionId(0), RegionId(1), [(10, 20, 30)])
    local, remote = (Extents([(RegionId(i), 1000 * (i + 1), 100) for i in range(2)], "some") for _ in range(2))
    here, there = {("cuda", 1): [RegionId(0)]}, {("cpu", 0): [RegionId(1)]}
    parts = single(one, local, remote, here, there)
    whole = cut(one, np.array([1010]), np.array([2020]), here, there)
    assert parts is not None
    for part, want in zip(parts, whole, strict=True):
        assert (part.here, part.there) == (want.here, want.there)
        assert np.array_equal(part.local, want.local)
        assert np.array_equal(part.remote, want.remote)
    assert single(one, local, remote, {**here, ("cpu", 0): [RegionId(1)]}, there) is None
    for other in ([(10, 20, 0)], [(90, 0, 20)], [(0, 90, 20)], [], [(0, 0, 1), (1, 1, 1)]):
        assert single(batch(RegionId(0), RegionId(1), other), local, remote, here, there) is None


def test_an_empty_batch_needs_no_thread(source: End, target: End) -> None:
    """Unless that is busy just then."""
    here, there = source.add(noise(10)), target.add(np.zeros(10, np.uint8))
    peer = source.connect(target.descriptor(), WAIT_S)
    at_once = 0
    for _ in range(50):
        ticket = source.submit(peer, batch(here, there, []))
        found = list(source.events())
        at_once += bool(found)
        assert (found or collected(source, 1)) == [WriteEnded(ticket)]
    assert at_once


def test_what_waited_together_is_copied_by_the_caller_in_part_only(
    source: End, target: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``poll`` does not block: who posts CPU memory copies it."""
    here, there = source.add(noise(8 * MIB)), target.add(np.zeros(8 * MIB, np.uint8))
    peer = source.connect(target.descriptor(), WAIT_S)
    flag, mine, post = FiredEvent(), list[int](), nixl_library.Agent.post

    def spied(agent: nixl_library.Agent, name: str, handle: nixl_library.Handle, place: nixl_library.Place) -> bool:
        mine.append(threading.get_ident())
        return post(agent, name, handle, place)

    monkeypatch.setattr(nixl_library.Agent, "post", spied)
    writes = batch(here, there, [(0, 0, 8 * MIB)])
    tickets = [source.transport.submit(peer, writes, after=flag) for _ in range(8)]
    flag.happened = True
    ended = [event for event in source.transport.poll() if isinstance(event, WriteEnded)]
    assert mine.count(threading.get_ident()) <= nixl_worker.SMALL_BYTES // (8 * MIB)
    ended += [event for event in collected(source, 8 - len(ended)) if isinstance(event, WriteEnded)]
    assert {event.ticket for event in ended} == set(tickets)
    assert len(mine) == 8
    same(target.read(there), noise(8 * MIB))


def test_a_handle_that_the_library_keeps_is_no_matter(
    source: End, target: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes have landed: the ticket ends well, and nothing is raised."""

    def refused(agent: nixl_library.Agent, handle: nixl_library.Handle) -> None:
        raise TransportError("injected")

    monkeypatch.setattr(nixl_library.Agent, "release", refused)
    here, there = source.add(noise(100)), target.add(np.zeros(100, np.uint8))
    peer = source.connect(target.descriptor(), WAIT_S)
    tickets = [source.submit(peer, batch(here, there, [(0, 0, 100)])) for _ in range(20)]
    assert sorted(collected(source, 20), key=lambda event: getattr(event, "ticket", 0)) == [
        WriteEnded(t) for t in tickets
    ]


@pytest.mark.parametrize(("kind", "asked"), [("cpu", 1), ("cuda", 0)])
def test_only_who_copies_in_the_call_that_begins_a_write_asks_at_once_whether_it_is_done(
    source: End, monkeypatch: pytest.MonkeyPatch, kind: str, asked: int
) -> None:
    """A GPU has just begun then, and others' writes wait for this thread."""
    transport, asks = source.transport, list[str]()
    assert isinstance(transport, NixlTransport)

    def answer(agent: nixl_library.Agent, name: str, handle: object, here: nixl_library.Place) -> bool:
        asks.append(here[0])
        return True

    monkeypatch.setattr(nixl_library.Agent, "post", lambda *_: False)
    monkeypatch.setattr(nixl_library.Agent, "done", answer)
    monkeypatch.setattr(nixl_library.Agent, "release", lambda *_: None)
    place = (kind, 0)
    part = nixl_library.DescriptorList(place, [(0, 1, 0)], place, [(0, 1, 0)])
    worker = transport._worker
    job = nixl_worker.Job(Ticket(1), Peer(bytes(16)), deque([part]), None, 1, True)
    with worker._lock:
        job.handle = nixl_library.Handle(object())
        worker._open.waiting.append(job)
        worker._post(job)
        assert len(asks) == asked
    assert collected(source, 1) == [WriteEnded(Ticket(1))]


def test_who_looks_after_the_end_finds_nothing(source: End, caplog: pytest.LogCaptureFixture) -> None:
    """At exit a finalizer ends the thread, whoever may still poll."""
    transport = source.transport
    assert isinstance(transport, NixlTransport)
    transport._worker.close(0.0)
    transport._worker._open.waiting.append(nixl_worker.Job(Ticket(1), Peer(bytes(16)), deque(), None, 0, True))
    assert transport.poll() == []
    assert not caplog.records, "an error that was not foreseen"
    transport._worker._open.waiting.clear()


def test_cuda_memory_is_refused_where_there_is_none(source: End) -> None:
    """And the good memory of the same call is not registered."""
    array = np.zeros(4096, np.uint8)
    good = Buffer(array.ctypes.data, array.nbytes, "cpu", array)
    with pytest.raises(RegistrationError, match="cuda:63"):
        source.transport.register([good, Buffer(1 << 40, 4096, "cuda:63")])
    source.transport.register([good])


def test_30000_writes_are_posted_by_threads_of_the_library_if_asked(child: Child) -> None:
    """``num_threads``; and an option of the backend's own moves the same bytes."""
    child.open()
    for options in ({"num_threads": 2}, {"backend_options": {"ucx_error_handling_mode": "none"}}):
        one = end(**options)
        here, there = one.add(noise(30000 * 16)), child.add(np.zeros(30000 * 16, np.uint8))
        peer = one.connect(child.descriptor(), WAIT_S)
        one.submit(peer, batch(here, there, [(16 * i, 16 * i, 8) for i in range(30000)]))
        assert [event.error for event in collected(one, 1) if isinstance(event, WriteEnded)] == [None]
        want = noise(30000 * 16).reshape(-1, 16).copy()
        want[:, 8:] = 0
        same(child.read(there), want.reshape(-1))
        one.close(1.0)
    child.close(0.0)


def test_a_peer_of_another_version_is_refused(source: End, target: End) -> None:
    """Both are named."""
    with pytest.raises(RemoteProtocolError, match=r"0\.9"):
        source.connect(forged(target.descriptor(), version="0.9"), WAIT_S)


def test_metadata_that_is_damaged_or_no_metadata_or_anothers_is_refused(source: End, target: End) -> None:
    """Damage never reaches the library, which trusts its input; what does is refused by it."""
    good = target.descriptor()
    _, found = contact(good)
    metadata = found["metadata"]
    assert isinstance(metadata, bytes)
    with pytest.raises(RemoteProtocolError, match="damaged"):
        source.connect(forged(good, metadata=metadata[:-1] + b"?"), WAIT_S)
    for bad in (b"", b"garbage", metadata[:100]):
        with pytest.raises(RemoteProtocolError, match="no metadata"):
            source.connect(forged(good, metadata=bad, checksum=zlib.crc32(bad)), WAIT_S)
    _, other = contact(source.descriptor())
    with pytest.raises(RemoteProtocolError, match="instead of"):
        target.connect(forged(forged_name(good), metadata=other["metadata"], checksum=other["checksum"]), WAIT_S)
    target.add(noise(10))
    made = decode(target.descriptor(), "nixl")
    odd = attrs.evolve(made, regions=(attrs.evolve(made.regions[0], device="cuda:x"),))
    with pytest.raises(RemoteProtocolError, match="cuda:x"):
        source.connect(encode(odd), WAIT_S)


def test_another_process_under_the_name_of_a_peer_is_refused(source: End, target: End) -> None:
    """Bad input: nothing is written to either, and the peer that has the name stays."""
    here, there = source.add(noise(100)), target.add(np.zeros(100, np.uint8))
    peer = source.connect(target.descriptor(), WAIT_S)
    another = attrs.asdict(attrs.evolve(Process.own(), pid=1))
    with pytest.raises(RemoteProtocolError, match=f"{peer.hex()} is process .*; process 1 takes its name"):
        source.connect(forged(target.descriptor(), process=another), WAIT_S)
    assert source.connect(target.descriptor(), WAIT_S) == peer
    source.submit(peer, batch(here, there, [(0, 0, 100)]))
    assert [event.error for event in collected(source, 1) if isinstance(event, WriteEnded)] == [None]
    same(target.read(there), noise(100))


def test_a_busy_library_is_a_connection_that_may_be_tried_again(source: End, target: End) -> None:
    """``timeout_s`` holds; the peer is there at the next attempt."""
    free = threading.Event()
    assert isinstance(source.transport, NixlTransport)
    source.transport._worker._commands.put(free.wait)
    with pytest.raises(TransportError) as caught:
        source.connect(target.descriptor(), 0.05)
    free.set()
    assert caught.value.retryable
    assert source.connect(target.descriptor(), WAIT_S) == decode(target.descriptor(), "nixl").incarnation


def test_the_drain_bound_is_an_option() -> None:
    """As of a network that delivers late."""
    one = end(drain_s=120.0)
    assert one.transport.caps.drain_s == 120.0
    one.close(0.0)


def test_a_ticket_to_a_peer_that_was_forgotten_still_ends(source: End, target: End) -> None:
    """And the peer can be connected again while it is in flight."""
    here, there = source.add(noise(32 * MIB)), target.add(np.zeros(32 * MIB, np.uint8))
    peer = source.connect(target.descriptor(), WAIT_S)
    for _ in range(3):
        ticket = source.submit(peer, batch(here, there, [(0, 0, 32 * MIB)]))
        source.transport.disconnect(peer)
        assert source.connect(target.descriptor(), WAIT_S) == peer
        assert collected(source, 1) == [WriteEnded(ticket)]
