"""What shared memory promises beyond the conformance suite."""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import msgspec
import numpy as np
import pytest

from disagg_kv import (
    CacheSpec,
    DecodeEndpoint,
    Expectation,
    PagedPool,
    PageTable,
    Phase,
    PrefillEndpoint,
    Source,
    shard,
)
from disagg_kv.channels import Hub, InprocChannel
from disagg_kv.errors import PeerLostError, RegistrationError, RemoteProtocolError, TransportError
from disagg_kv.ids import Peer, RegionId, RoomId
from disagg_kv.memory import Buffer, bytes_of
from disagg_kv.planning import Writes
from disagg_kv.rendezvous import StaticRendezvous
from disagg_kv.testing.ends import plain
from disagg_kv.transports import PeerLost, Process, Region, ShmTransport, WriteEnded, decode, encode
from disagg_kv.transports.memfd import Place
from disagg_kv.transports.process import LOOK_S
from tests.support.leftovers import abandoned
from tests.support.processes import KV, wait
from tests.support.scarce import no_descriptor

CHILD = """
import sys
from disagg_kv.transports import ShmTransport
side = ShmTransport()
side.register([side.allocate(1 << 20)])
sys.stdout.buffer.write(len(side.local_descriptor()).to_bytes(4) + side.local_descriptor())
sys.stdout.flush()
sys.stdin.read()
"""


def changed(descriptor: bytes, **fields: int) -> bytes:
    """The descriptor with other fields in its first region's place."""
    found = decode(descriptor, "shm")
    place = attrs.evolve(msgspec.msgpack.decode(found.regions[0].blob, type=Place), **fields)
    region = attrs.evolve(found.regions[0], blob=msgspec.msgpack.encode(place))
    return encode(attrs.evolve(found, regions=(region,)))


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_ended_by_a_signal_leaves_nothing_behind(how: signal.Signals) -> None:
    """Its memory never had a name, and connecting to it is an error at once."""
    before = abandoned()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    descriptor = child.stdout.read(int.from_bytes(child.stdout.read(4)))
    side = ShmTransport()
    peer = side.connect(descriptor, 1.0)
    assert not [name for name in os.listdir("/dev/shm") if peer.hex() in name]
    child.send_signal(how)
    _, errors = child.communicate()
    assert b"leaked" not in errors
    time.sleep(LOOK_S)
    assert list(side.poll()) == [PeerLost(peer, fenced=True)]
    assert list(side.poll()) == []
    assert side.connect(descriptor, 1.0) == peer, "a peer already known stays known, and lost"
    with pytest.raises(PeerLostError):
        ShmTransport().connect(descriptor, 1.0)
    wait(lambda: abandoned() <= before, lambda: f"left in /dev/shm: {abandoned() - before}")
    side.close(0.0)


def test_memory_goes_with_its_owner_and_not_with_the_transport() -> None:
    """``close`` leaves it readable; the last reference frees it."""
    side = ShmTransport()
    buffer = side.allocate(4096)
    view = bytes_of(buffer)
    side.close(0.0)
    view[:] = 7
    assert view.sum() == 7 * 4096
    place = f"{buffer.addr:x}-"

    def mapped() -> bool:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return any(line.startswith(place) and "memfd" in line for line in maps)

    assert mapped()
    del view, buffer
    gc.collect()
    assert not mapped()


def test_a_part_of_allocated_memory_is_a_region_at_its_own_place() -> None:
    """Also at an odd offset, not at a page."""
    source, target = ShmTransport(), ShmTransport()
    whole = target.allocate(3 * 4096)
    part = Buffer(whole.addr + 4099, 1000, whole.device, whole.owner)
    (remote,) = target.register([part])
    (local,) = source.register([plain(np.arange(1000, dtype=np.uint8))])
    peer = source.connect(target.local_descriptor(), 1.0)
    source.submit(peer, Writes.one(local, 0, remote, 0, 1000))
    want = np.zeros(3 * 4096, np.uint8)
    want[4099:5099] = np.arange(1000, dtype=np.uint8)
    assert bytes_of(whole).tobytes() == want.tobytes()
    source.close(0.0)
    target.close(0.0)


def test_memory_that_the_host_does_not_have_is_refused() -> None:
    """With the number asked for; so are sizes that are none."""
    side = ShmTransport()
    for nbytes in (1 << 50, 1 << 70, 0, -1):
        with pytest.raises(RegistrationError, match=f"cannot allocate {nbytes} bytes"):
            side.allocate(nbytes)


def test_a_peer_that_closed_has_no_memory_to_connect_to() -> None:
    """Although its process still runs."""
    target = ShmTransport()
    memory = target.allocate(4096)
    target.register([memory])
    descriptor = target.local_descriptor()
    target.close(0.0)
    with pytest.raises(PeerLostError):
        ShmTransport().connect(descriptor, 1.0)


def test_only_the_memory_that_was_meant_is_ever_opened(tmp_path: Path) -> None:
    """A file descriptor that means something else by now, or a range outside, is the peer's loss, not a mapping."""
    target = ShmTransport()
    memory = target.allocate(4096)
    target.register([memory])
    descriptor = target.local_descriptor()
    with (tmp_path / "other").open("wb") as other:
        for bad in (
            changed(descriptor, fd=other.fileno()),
            changed(descriptor, number=77),
            changed(descriptor, offset=1),
        ):
            with pytest.raises(PeerLostError, match="is not"):
                ShmTransport().connect(bad, 1.0)
    with pytest.raises(RemoteProtocolError, match="offset"):
        ShmTransport().connect(changed(descriptor, offset=-4096), 1.0)
    target.close(0.0)


def test_a_failed_connect_keeps_nothing_mapped() -> None:
    """Neither file descriptors nor the regions that came before the bad one."""
    target, source = ShmTransport(), ShmTransport()
    memory = target.allocate(4096)
    target.register([memory])
    good = decode(target.local_descriptor(), "shm")
    bad = attrs.evolve(
        good.regions[0], id=RegionId(9), blob=decode(changed(encode(good), number=5), "shm").regions[0].blob
    )
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd")
    with pytest.raises(PeerLostError):
        source.connect(encode(attrs.evolve(good, regions=(*good.regions, bad))), 1.0)
    gc.collect()
    fds, mappings = len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd")
    assert fds <= before[0], "a library that an earlier test has used may close some of its own meanwhile"
    assert mappings == before[1]
    target.close(0.0)


def mapped(peer: Peer) -> int:
    """Bytes of a peer's memory that this process has mapped: its own mapping, where both are one process, included."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in maps if peer.hex() in line]
    return sum(int(end, 16) - int(start, 16) for start, end in ends)


def opened(peer: Peer) -> int:
    """How many descriptors of a peer's memory this process has."""
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(peer.hex() in os.readlink(path) for path in paths if os.path.islink(path))


def test_connecting_maps_each_region_once_and_touches_no_page() -> None:
    """However large the peer's memory is. A later descriptor maps what is new in it."""
    source, target = ShmTransport(), ShmTransport()
    small, large = target.allocate(1 << 20), target.allocate(256 << 20)
    regions = target.register([small, large])
    (local,) = source.register([plain(np.arange(100, dtype=np.uint8))])
    own = small.nbytes + large.nbytes
    me = decode(target.local_descriptor(), "shm").incarnation
    files, before = opened(me), faults()
    peer = source.connect(target.local_descriptor(), 1.0)
    assert (peer, mapped(peer)) == (me, 2 * own)
    source.submit(peer, Writes.one(local, 0, regions[1], 5 << 20, 100))
    assert faults() - before < 1000, "page tables are filled that nothing needs"
    assert bytes_of(large)[5 << 20 :][:100].tolist() == list(range(100))
    assert source.connect(target.local_descriptor(), 1.0) == peer
    more = target.allocate(1 << 20)
    target.register([more])
    source.connect(target.local_descriptor(), 1.0)
    assert mapped(peer) == 2 * (own + more.nbytes), "what was mapped stays so, once"
    source.disconnect(peer)
    gc.collect()
    assert (mapped(peer), opened(peer)) == (own + more.nbytes, files + 2), "a file and its mapping have one each"
    source.close(0.0)
    target.close(0.0)


def faults() -> int:
    """Pages that were brought into this process's page tables."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident(peers: Sequence[Peer]) -> int:
    """Bytes of these peers' memory that are in this process's page tables."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = any(peer.hex() in line for peer in peers)
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def test_the_first_transfer_touches_only_the_staging_memory_that_it_uses() -> None:
    """To fill page tables of a whole ring takes hundreds of milliseconds, and can hold the interpreter meanwhile."""
    spec, where, hub, pages = CacheSpec.kv(2, 4, 64, "float32"), StaticRendezvous(), Hub(), [PageTable(KV, [0, 1, 2])]
    pools = [PagedPool.allocate(spec, shard(spec), pages=8, page_size=16) for _ in range(2)]
    transports = ShmTransport(), ShmTransport()
    peers = [decode(one.local_descriptor(), "shm").incarnation for one in transports]
    sender = PrefillEndpoint(
        pools[0], transport=transports[0], channel=InprocChannel(hub, "p"), rendezvous=where, instance="P"
    )
    receiver = DecodeEndpoint(
        pools[1], transport=transports[1], channel=InprocChannel(hub, "d"), rendezvous=where, instance="D"
    )
    reception, delivery = receiver.open(RoomId(b"first"), Source("P")), sender.open(RoomId(b"first"))
    reception.expect(Expectation(40, pages))
    delivery.send_chunk(40, pages)
    delivery.finish(40)
    wait(lambda: reception.released and delivery.released, lambda: f"{reception.phase} {delivery.phase}")
    assert (reception.phase, delivery.phase) == (Phase.DONE, Phase.DONE)
    staged = reception.report.nbytes
    assert receiver.staging.nbytes >= 1000 * staged, "the test needs a ring that is much larger than the room"
    assert 0 < resident(peers) < 20 * staged
    for endpoint in (receiver, sender):
        endpoint.close()


def test_memory_that_its_owner_could_shorten_is_refused() -> None:
    """A later write would kill the process that makes it."""
    target, source = ShmTransport(), ShmTransport()
    memory = target.allocate(4096)
    target.register([memory])
    good = decode(target.local_descriptor(), "shm")
    fd = os.memfd_create(f"disagg_kv-{good.incarnation.hex()}-9")
    os.ftruncate(fd, 4096)
    with pytest.raises(TransportError, match="not sealed"):
        source.connect(changed(encode(good), fd=fd, number=9), 1.0)
    os.close(fd)
    target.close(0.0)


@pytest.mark.parametrize(
    ("spare", "says"), [(1, "cannot be watched"), (2, "cannot be mapped"), (3, "cannot be mapped")]
)
def test_a_process_that_may_open_no_more_files_is_not_told_that_its_peer_is_lost(spare: int, says: str) -> None:
    """The peer lives: the error is the connecting side's own."""
    target, source = ShmTransport(), ShmTransport()
    memory = [target.allocate(4096) for _ in range(2)]
    target.register(memory)
    descriptor = target.local_descriptor()
    gc.collect()  # what earlier tests have left would give descriptors back in the middle
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(spare)]
    for fd in free:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1] + 1, hard))
    try:
        with pytest.raises(TransportError, match=says):
            source.connect(descriptor, 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    source.connect(descriptor, 1.0)
    source.close(0.0)
    target.close(0.0)


def test_memory_that_cannot_be_opened_is_no_loss_of_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor is left for that: the connect fails and may be repeated."""
    target, source = ShmTransport(), ShmTransport()
    target.register([target.allocate(4096)])
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_descriptor)
        with pytest.raises(TransportError, match="cannot be opened"):
            source.connect(target.local_descriptor(), 1.0)
    source.connect(target.local_descriptor(), 1.0)
    source.close(0.0)
    target.close(0.0)


def test_a_peer_whose_process_cannot_be_watched_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor is left for that: the connect fails and may be repeated, and the next one watches the process."""
    target, source = ShmTransport(), ShmTransport()
    with monkeypatch.context() as patch:
        patch.setattr(select, "epoll", no_descriptor)
        with pytest.raises(TransportError, match="cannot be watched") as caught:
            source.connect(target.local_descriptor(), 1.0)
    assert caught.value.retryable
    assert (len(source._exits), len(source._peers.all)) == (0, 0)
    source.connect(target.local_descriptor(), 1.0)
    assert (len(source._exits), len(source._peers.all)) == (1, 1)
    source.close(0.0)
    target.close(0.0)


@pytest.mark.parametrize("blob", [b"", b"\x80", b"\xc1", b"\xa1\x80"])
def test_a_descriptor_with_a_garbled_inside_is_garbage(blob: bytes) -> None:
    """The envelope alone does not make a descriptor."""
    good = decode(ShmTransport().local_descriptor(), "shm")
    region = Region(RegionId(0), 5, blob=blob or b"\0")
    for bad in (attrs.evolve(good, blob=blob), attrs.evolve(good, regions=(region,))):
        with pytest.raises(RemoteProtocolError, match="cannot be read as a"):
            ShmTransport().connect(encode(bad), 1.0)


def test_a_peer_of_another_host_cannot_be_reached() -> None:
    """Nor one of another PID namespace; it is not called lost, because it may well live."""
    good = decode(ShmTransport().local_descriptor(), "shm")
    elsewhere = msgspec.msgpack.encode(attrs.evolve(Process.own(), host="elsewhere"))
    with pytest.raises(TransportError, match="elsewhere"):
        ShmTransport().connect(encode(attrs.evolve(good, blob=elsewhere)), 1.0)


def test_writes_to_a_lost_peer_fail_and_are_quiet() -> None:
    """Every one, also after the loss was told."""
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    descriptor = child.stdout.read(int.from_bytes(child.stdout.read(4)))
    side = ShmTransport()
    (local,) = side.register([plain(np.zeros(100, np.uint8))])
    peer = side.connect(descriptor, 1.0)
    child.kill()
    child.communicate()
    time.sleep(LOOK_S)
    tickets = [side.submit(peer, Writes.one(local, 0, 0, 0, 100)) for _ in range(2)]
    lost, *ended = side.poll()
    assert lost == PeerLost(peer, fenced=True)
    assert [e.ticket for e in ended if isinstance(e, WriteEnded) and isinstance(e.error, PeerLostError)] == tickets
    assert all(isinstance(e, WriteEnded) and e.quiesced for e in ended)
    side.disconnect(peer)
    side.disconnect(Peer(b"?" * 16))
    side.close(0.0)


def test_memory_that_the_peer_did_not_take_from_allocate_is_not_mapped() -> None:
    """It can be registered, as a source. The reason names the region, and the error is the reason."""
    source, target = ShmTransport(), ShmTransport()
    own, other = target.register([target.allocate(4096), plain(np.zeros(4096, np.uint8))])
    peer = source.connect(target.local_descriptor(), 1.0)
    assert source.unmappable(peer, [own], "cpu") is None
    for regions in ([other], [own, other]):
        reason = source.unmappable(peer, regions, "cpu") or ""
        assert f"region {other} is not registered: it is unknown, or memory of another allocator" in reason
    with pytest.raises(RegistrationError, match=f"region {other} .* memory of another allocator"):
        source.map(peer, other, "cpu")
    assert source.map(peer, own, "cpu").nbytes == 4096
    source.close(0.0)
    target.close(0.0)


def test_a_peer_that_comes_and_goes_leaves_no_watch_and_no_descriptor() -> None:
    """However often: it is connected twice, written to, and disconnected, or what it names is gone already."""
    side = ShmTransport()
    (source,) = side.register([side.allocate(64)])

    def visit(number: int) -> None:
        other = ShmTransport()
        kept = [other.allocate(64)]
        (target,) = other.register(kept)
        peer = side.connect(other.local_descriptor(), 1.0)
        kept.append(other.allocate(64))
        other.register(kept[1:])
        assert side.connect(other.local_descriptor(), 1.0) == peer
        at, nbytes = np.zeros(1, np.int64), np.full(1, 64, np.int64)
        side.submit(peer, Writes(np.array([source], np.int32), at, np.array([target], np.int32), at, nbytes))
        assert [type(event) for event in side.poll()] == [WriteEnded]
        side.disconnect(peer)
        gone = other.local_descriptor()
        other.close(0.0)
        with pytest.raises(PeerLostError):
            side.connect(gone, 1.0)

    def descriptors() -> set[str]:
        gc.collect()
        return set(os.listdir("/proc/self/fd"))

    visit(0)
    before = len(descriptors())
    for number in range(1, 30):
        visit(number)
    assert len(descriptors()) <= before
    assert (len(side._exits), len(side._peers.all)) == (0, 0)
    side.close(0.0)
