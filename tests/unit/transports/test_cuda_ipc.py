"""What cuda_ipc promises beyond the suite: refusals with a reason, events in streams, and what a broken driver does."""

from __future__ import annotations

import gc
import logging
import os
import select
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Self

import msgspec
import numpy as np
import pytest
from attrs import evolve

from disagg_kv.errors import RegistrationError, RemoteProtocolError, TransportError
from disagg_kv.ids import Peer
from disagg_kv.memory import All, Buffer
from disagg_kv.memory.flag import raise_flags
from disagg_kv.testing.ends import Child, End
from disagg_kv.testing.pair import POISON, Pair, batch, noise, same
from disagg_kv.transports import available, decode, encode
from disagg_kv.transports.cuda_api import Gpu
from disagg_kv.transports.cuda_ipc import CudaIpcTransport
from disagg_kv.transports.flags import SLOT_WORDS
from tests.support.fake_cuda import Allocation, FakeCuda, FakeCudaMemory, fake_cuda_ipc
from tests.support.rig_parts import FiredEvent
from tests.support.scarce import no_descriptor

NBYTES = 1 << 16
TIMEOUT_S = 120.0


class CudaFlag(FiredEvent):
    """An event that a stream of the fake driver waits for."""

    def __init__(self, cuda: FakeCuda, number: int) -> None:
        super().__init__()
        self._cuda = cuda
        self.cuda_event = number

    def query(self) -> bool:
        raise AssertionError("the host asked")

    def fire(self) -> None:
        self._cuda.fired.add(self.cuda_event)


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    child = Child(fake_cuda_ipc, FakeCudaMemory(), TIMEOUT_S)
    yield child
    child.stop()


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def made(cuda: FakeCuda) -> CudaIpcTransport:
    return CudaIpcTransport(driver=cuda)


@pytest.fixture
def pair(made: CudaIpcTransport, child: Child) -> Iterator[Pair]:
    child.open()
    yield Pair(End(lambda: made, FakeCudaMemory()), child, NBYTES, TIMEOUT_S)
    made.close(0.0)
    child.close(0.0)


def _buffer(nbytes: int = 4096, device: str = "cuda:0") -> Buffer:
    one = Allocation(nbytes)
    return Buffer(one.addr, nbytes, device, one)


def test_memory_that_is_mapped_piecewise_is_refused_with_the_setting_to_change(
    made: CudaIpcTransport, cuda: FakeCuda
) -> None:
    """VMM memory would register and then crawl; nothing of the call is registered."""
    good = _buffer()
    cuda.piecewise = True
    with pytest.raises(RegistrationError, match=r"4096 bytes at 0x.*expandable_segments:True.*cudaMallocAsync"):
        made.register([good])
    cuda.piecewise = False
    assert len(made.register([good])) == 1


def test_memory_beyond_its_allocation_is_refused(made: CudaIpcTransport) -> None:
    """Peers would write to whatever lies behind it."""
    one = _buffer(4096)
    with pytest.raises(RegistrationError, match="beyond its allocation of 4096 bytes"):
        made.register([evolve(one, nbytes=4097)])


def test_memory_that_the_driver_does_not_know_is_refused(made: CudaIpcTransport, cuda: FakeCuda) -> None:
    """An address of no allocation, and one that cannot be exported; the driver's word is in the error."""
    with pytest.raises(RegistrationError, match="CUDA_ERROR_INVALID_VALUE"):
        made.register([Buffer(4096, 4096, "cuda:0")])
    cuda.broken = {"export"}
    with pytest.raises(RegistrationError, match="CUDA_ERROR_FAKE"):
        made.register([_buffer()])


def test_all_regions_lie_on_one_device(made: CudaIpcTransport) -> None:
    """Within one call and over several."""
    with pytest.raises(RegistrationError, match="'cuda:1': the transport's other regions lie on 'cuda:0'"):
        made.register([_buffer(), _buffer(device="cuda:1")])
    made.register([_buffer(device="cuda:1")])
    with pytest.raises(RegistrationError, match="'cuda:0': the transport's other regions lie on 'cuda:1'"):
        made.register([_buffer()])


def test_parts_of_one_allocation_are_told_apart(made: CudaIpcTransport, child: Child) -> None:
    """Allocators cut tensors out of large allocations: what is exported is the whole, what is written the part."""
    whole = _buffer(3 * 4096)
    parts = [evolve(whole, addr=whole.addr + 4096 * i, nbytes=4096) for i in (1, 2)]
    FakeCudaMemory().write(whole, np.full(3 * 4096, POISON, np.uint8))
    regions = made.register(parts)
    child.open()
    local = child.add(noise(4096))
    peer = child.connect(made.local_descriptor(), 5.0)
    ticket = child.submit(peer, batch(local, regions[1], [(0, 100, 50)]))
    told = list(child.events())
    while not told:
        told = list(child.events())
    assert [event.ticket for event in told] == [ticket]  # type: ignore[union-attr]
    want = np.full(3 * 4096, POISON, np.uint8)
    want[2 * 4096 + 100 : 2 * 4096 + 150] = noise(4096)[:50]
    same(FakeCudaMemory().read(whole), want)
    child.close(0.0)


def test_a_peer_of_this_process_is_refused(made: CudaIpcTransport) -> None:
    """The driver opens other processes' memory only."""
    other = fake_cuda_ipc()
    with pytest.raises(TransportError, match="in this process"):
        made.connect(other.local_descriptor(), 1.0)


def test_a_region_that_is_not_inside_what_its_handle_opens_is_refused(made: CudaIpcTransport, child: Child) -> None:
    """A descriptor is another process's word."""
    child.open()
    child.add(noise(4096))
    remote = decode(child.descriptor(), "cuda_ipc")
    made.register([_buffer()])
    for wrong in (-1, 1, 1 << 40):
        place = msgspec.msgpack.decode(remote.regions[0].blob)
        bad = evolve(remote.regions[0], blob=msgspec.msgpack.encode({**place, "offset": wrong}))
        with pytest.raises(RemoteProtocolError, match="not inside its allocation of 4096 bytes"):
            made.connect(encode(evolve(remote, regions=(bad,))), 1.0)
    peer = made.connect(encode(remote), 1.0)
    with pytest.raises(RemoteProtocolError, match="not inside"):
        made.connect(encode(evolve(remote, regions=(bad,), serial=remote.serial + 1)), 1.0)
    assert made.connect(child.descriptor(), 1.0) == peer
    child.close(0.0)


def test_a_peer_may_be_met_before_there_is_memory_of_ones_own(made: CudaIpcTransport, child: Child) -> None:
    """What it has is mapped for the device on which our first region lies."""
    child.open()
    remote = child.add(np.full(NBYTES, POISON, np.uint8))
    peer = made.connect(child.descriptor(), 1.0)
    with pytest.raises(RegistrationError):
        made.submit(peer, batch(0, remote, [(0, 0, 10)]))  # type: ignore[arg-type]
    end = End(lambda: made, FakeCudaMemory())
    ticket = end.submit(peer, batch(end.add(noise(NBYTES)), remote, [(0, 0, 10)]))
    assert {event.ticket for _ in range(3) for event in end.events()} == {ticket}  # type: ignore[union-attr]
    same(child.read(remote)[:10], noise(NBYTES)[:10])
    child.close(0.0)


def test_a_peer_whose_process_cannot_be_watched_is_not_kept(
    made: CudaIpcTransport, child: Child, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was opened of its memory is given back, and a later connect opens it again."""
    child.open()
    child.add(np.full(NBYTES, POISON, np.uint8))
    End(lambda: made, FakeCudaMemory()).add(noise(NBYTES))
    with monkeypatch.context() as patch:
        patch.setattr(select, "epoll", no_descriptor)
        with pytest.raises(TransportError, match="cannot be watched") as caught:
            made.connect(child.descriptor(), 1.0)
    assert caught.value.retryable
    assert len(cuda.opened_by) == 1
    assert not cuda.opened
    made.connect(child.descriptor(), 1.0)
    assert (len(made._exits), len(cuda.opened)) == (1, 1)
    made.close(0.0)
    child.close(0.0)


def test_writes_wait_in_the_stream_for_events_of_the_gpu(pair: Pair, cuda: FakeCuda) -> None:
    """Nobody asks the event on the host: the copies are queued behind it at once, and those of others are not."""
    event = CudaFlag(cuda, 77)
    writes = batch(pair.local, pair.remote, [(0, 0, 100)])
    ticket = pair.source.transport.submit(pair.peer, writes, after=event)
    never = CudaFlag(cuda, 0)
    for _ in range(5):
        pair.log.add(pair.source.events())
    assert ticket not in pair.log.ended
    pair.check()
    event.fire()
    pair.succeed(ticket)
    pair.succeed(pair.source.transport.submit(pair.peer, writes, after=never))
    pair.want[:100] = pair.data[:100]
    pair.check()


def test_an_event_may_be_made_of_the_gpus_and_of_others(pair: Pair, cuda: FakeCuda) -> None:
    """The host waits for what only it can ask, the stream for the rest."""
    gpu, host = CudaFlag(cuda, 5), FiredEvent()
    writes = batch(pair.local, pair.remote, [(0, 0, 100)])
    ticket = pair.source.transport.submit(pair.peer, writes, after=All((All((gpu,)), host)))
    host.fired = True
    pair.log.add(pair.source.events())
    assert ticket not in pair.log.ended
    gpu.fire()
    pair.succeed(ticket)


def test_an_event_lives_until_the_copies_that_wait_for_it_are_queued(pair: Pair, cuda: FakeCuda) -> None:
    """The driver's handle of one that nobody keeps is soon another event's."""
    gpu, host = CudaFlag(cuda, 5), FiredEvent()
    lives = weakref.ref(gpu)
    writes = batch(pair.local, pair.remote, [(0, 0, 100)])
    ticket = pair.source.transport.submit(pair.peer, writes, after=All((gpu, host)))
    del gpu
    gc.collect()
    assert lives() is not None
    cuda.fired.add(5)
    host.fired = True
    pair.succeed(ticket)
    gc.collect()
    assert lives() is None


def test_an_event_that_fails_ends_its_ticket_and_nothing_was_written(pair: Pair) -> None:
    """With the event's own error as the cause, and quiet."""

    class Fails(FiredEvent):
        def query(self) -> bool:
            raise ValueError("the engine's stream is broken")

    writes = batch(pair.local, pair.remote, [(0, 0, 100)])
    ticket = pair.source.transport.submit(pair.peer, writes, after=Fails())
    pair.log.add(pair.source.events())
    ended = pair.log.ended[ticket]
    assert ended.quiesced
    assert isinstance(ended.error, TransportError)
    assert isinstance(ended.error.__cause__, ValueError)
    pair.check()


@pytest.mark.parametrize("call", ["copy", "passed"])
def test_a_driver_that_fails_ends_the_ticket_and_proves_nothing(pair: Pair, cuda: FakeCuda, call: str) -> None:
    """The bytes may still be moving: the ticket is not quiet, and close names it."""
    cuda.broken = {call}
    ticket = pair.submit((0, 0, 100))
    pair.log.add(pair.source.events())
    ended = pair.log.ended[ticket]
    assert not ended.quiesced
    assert "CUDA_ERROR_FAKE" in str(ended.error)
    assert pair.source.close(0.0) == (ticket,)


def test_what_is_mapped_is_given_back_when_nothing_uses_it(pair: Pair, cuda: FakeCuda) -> None:
    """Disconnecting ends no ticket: its mapping stays until it has ended, and goes then."""
    cuda.stuck = True
    ticket = pair.submit((0, 0, 100))
    pair.source.transport.disconnect(pair.peer)
    pair.log.add(pair.source.events())
    assert len(cuda.opened) == 1
    cuda.stuck = False
    pair.succeed(ticket)
    assert not cuda.opened
    assert not cuda.streams
    pair.want[:100] = pair.data[:100]
    pair.check()


def test_a_driver_that_gives_nothing_back_is_logged(
    pair: Pair, cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    """There is nobody whom it could be told."""
    cuda.broken = {"close"}
    with caplog.at_level(logging.WARNING, "disagg_kv"):
        pair.source.transport.disconnect(pair.peer)
    assert "CUDA_ERROR_FAKE" in caplog.text


def test_close_names_copies_in_flight_and_ends_those_that_wait(
    pair: Pair, made: CudaIpcTransport, cuda: FakeCuda
) -> None:
    """What may still be read is left alone, also when the transport is gone; what was never queued is quiet."""
    cuda.stuck = True
    flying = pair.submit((0, 0, 100))
    waiting = pair.source.transport.submit(pair.peer, batch(pair.local, pair.remote, [(0, 0, 9)]), after=FiredEvent())
    assert pair.source.close(0.001) == (flying,)
    assert len(cuda.opened) == 1
    (ended,) = pair.source.transport.poll()
    assert ended.ticket == waiting  # type: ignore[union-attr]
    assert ended.quiesced  # type: ignore[union-attr]
    assert pair.source.close(0.0) == ()
    made._leaving.clear()
    made._flying.clear()
    gc.collect()
    assert len(cuda.opened) == 1


def test_close_waits_for_copies(pair: Pair, cuda: FakeCuda) -> None:
    """At most as long as it may."""
    pair.submit((0, 0, 100))
    assert pair.source.close(TIMEOUT_S) == ()
    pair.want[:100] = pair.data[:100]
    pair.check()
    assert not cuda.opened


def test_without_a_driver_the_reason_is_said() -> None:
    """By the registry, with what to do about it."""
    reason = available()["cuda_ipc"]
    assert reason is None or "nvidia-smi" in reason


ONE, OTHER = Gpu(b"the-first-of-two"), Gpu(b"the-second-of-2x")


def test_gpus_are_identified_by_their_uuids_and_not_by_their_numbers(pair: Pair, cuda: FakeCuda) -> None:
    """Here the peer's GPU, its first, is the second; only the link between the two counts."""
    transport = pair.source.transport
    assert isinstance(transport, CudaIpcTransport)
    cuda.seen, cuda.apart = [OTHER, ONE], {(0, 1)}
    reason = transport.unmappable(pair.peer, [pair.remote], "cuda:0") or ""
    assert "no peer access (cuDeviceCanAccessPeer)" in reason
    assert ONE.uuid.hex() in reason
    assert OTHER.uuid.hex() in reason
    with pytest.raises(RegistrationError, match="no peer access"):
        transport.map(pair.peer, pair.remote, "cuda:0")
    assert transport.unmappable(pair.peer, [pair.remote], "cuda:1") is None
    cuda.apart = {(1, 0)}
    assert transport.unmappable(pair.peer, [pair.remote], "cuda:0") is None
    cuda.seen, cuda.apart = [OTHER], {(0, 1)}
    assert transport.unmappable(pair.peer, [pair.remote], "cuda") is None, "what is not seen is tried"


def test_what_cannot_be_mapped_is_refused_by_name(pair: Pair, cuda: FakeCuda) -> None:
    """MIG, a GPU that is not there, a driver that does not say, another IPC namespace."""
    transport = pair.source.transport
    assert isinstance(transport, CudaIpcTransport)

    def reason(device: str = "cuda:0") -> str:
        found = transport.unmappable(pair.peer, [pair.remote], device) or ""
        with pytest.raises(RegistrationError):
            transport.map(pair.peer, pair.remote, device)
        return found

    for seen in ([evolve(OTHER, partitioned=True)], [evolve(ONE, uuid=b"an-instance-of-1", partitioned=True)]):
        cuda.seen = list(seen)
        assert "MIG allows it only inside one GPU instance" in reason()
    cuda.seen = [evolve(ONE, partitioned=True)]
    assert transport.unmappable(pair.peer, [pair.remote], "cuda:0") is None, "one instance"
    assert "no GPU 7, only 1" in reason("cuda:7")
    assert "not on 'cuda:x'" in reason("cuda:x")
    cuda.broken = {"gpus"}
    assert "CUDA_ERROR_FAKE" in reason()
    cuda.broken = set()
    remote = transport._peers.get(pair.peer)
    assert remote is not None
    remote.owner = evolve(remote.owner, ipc="ipc:[1]")
    assert "of IPC namespace ipc:[1], this process of ipc:[" in reason()


def test_memory_is_opened_for_the_device_that_runs_the_kernel(pair: Pair, cuda: FakeCuda) -> None:
    """An address of one device's context is none of another's."""
    transport = pair.source.transport
    assert isinstance(transport, CudaIpcTransport)
    pair.put((0, 0, 10))
    kept = [transport.map(pair.peer, pair.remote, device) for device in ("cuda:0", "cuda:1")]
    assert [one.device for one in kept] == ["cuda:0", "cuda:1"]
    assert cuda.opened_by == [0, 1]


def test_a_region_that_goes_while_it_is_mapped_is_refused_by_name(pair: Pair) -> None:
    """Another thread has connected the peer with a later descriptor, just before."""
    transport = pair.source.transport
    assert isinstance(transport, CudaIpcTransport)
    (remote,) = transport._peers.all.values()

    class Late(ExitStack):
        def __enter__(self) -> Self:
            remote.regions, remote.places = (), {}
            return super().__enter__()

    remote.mapping = Late()  # type: ignore[assignment]
    with pytest.raises(RegistrationError, match=f"region {pair.remote} is not registered any more"):
        transport.map(pair.peer, pair.remote, "cuda:0")


def test_a_mapping_stays_open_while_a_buffer_of_it_lives_and_is_closed_then(pair: Pair, cuda: FakeCuda) -> None:
    """Also after the peer was disconnected, and the transport closed; a forked child closes nothing."""
    transport = pair.source.transport
    assert isinstance(transport, CudaIpcTransport)
    kept = [transport.map(pair.peer, pair.remote, "cuda:0") for _ in range(2)]
    assert len(cuda.opened) == 1
    transport.disconnect(pair.peer)
    pair.source.close(0.0)
    kept.pop()
    assert len(cuda.opened) == 1
    child = os.fork()
    if not child:
        kept.pop()
        os._exit(len(cuda.opened))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    kept.pop()
    assert not cuda.opened


def test_what_cannot_be_opened_is_an_error_with_the_driver_s_word(pair: Pair, cuda: FakeCuda) -> None:
    """As on a host whose driver is in confidential mode; nothing of it stays open."""
    transport = pair.source.transport
    assert isinstance(transport, CudaIpcTransport)
    cuda.broken = {"open"}
    with pytest.raises(TransportError, match="CUDA_ERROR_FAKE"):
        transport.map(pair.peer, pair.remote, "cuda:1")
    cuda.broken = set()
    assert transport.map(pair.peer, pair.remote, "cuda:1").nbytes == NBYTES


def test_a_page_is_the_streams_while_a_flag_of_it_lives(pair: Pair, cuda: FakeCuda) -> None:
    """Also after the peer was disconnected, and the transport closed; a forked child takes nothing back."""
    transport = pair.source.transport
    assert isinstance(transport, CudaIpcTransport)
    flags = transport.open_flags(pair.peer, pair.target.flag_page(4096))
    flag = flags.arm(1, 5, (0, 1, 0, 1, 0), "cuda:0")
    assert flag is not None
    assert list(cuda.shared.values()) == [4096]
    assert flags.arm(1, 5, (0, 1, 0, 1, 0), "cuda:1") is None
    transport.disconnect(pair.peer)
    pair.source.close(0.0)
    kept = [flag]
    del flags, flag
    gc.collect()
    assert len(cuda.shared) == 1
    child = os.fork()
    if not child:
        kept.clear()
        os._exit(len(cuda.shared))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    raise_flags(kept)
    assert pair.target.words()[SLOT_WORDS] == 5
    kept.clear()
    assert not cuda.shared


def test_a_page_is_taken_from_streams_by_the_thread_that_drops_its_last_flag(pair: Pair, cuda: FakeCuda) -> None:
    """Once, while it is mapped still, whatever that thread is: here, one that has nothing to do with a transport."""
    transport = pair.source.transport
    assert isinstance(transport, CudaIpcTransport)
    flags = transport.open_flags(pair.peer, pair.target.flag_page(4096))
    kept = [flags.arm(slot, 5, (0, 1, 0, 1, 0), "cuda:0") for slot in (1, 2)]
    del flags
    pair.source.close(0.0)
    assert kept.pop() is not None
    assert len(cuda.shared) == 1
    with ThreadPoolExecutor(1) as pool:
        pool.submit(kept.clear).result(10.0)
    assert not cuda.shared


def test_where_the_driver_refuses_the_page_no_stream_raises_flags(
    pair: Pair, cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the driver's word."""
    transport = pair.source.transport
    assert isinstance(transport, CudaIpcTransport)
    page = pair.target.flag_page(4096)
    cuda.broken = {"share"}
    with caplog.at_level(logging.WARNING, "disagg_kv"):
        flags = transport.open_flags(pair.peer, page)
    assert "no stream raises its flags: cuda: share: CUDA_ERROR_FAKE" in caplog.text
    assert flags.arm(1, 5, (0, 1, 0, 1, 0), "cuda:0") is None
    cuda.broken = {"unshare"}
    del flags
    transport.open_flags(pair.peer, page)
    assert "unshare: CUDA_ERROR_FAKE" in caplog.text


def test_a_transport_without_memory_of_its_own_raises_no_flags(child: Child, made: CudaIpcTransport) -> None:
    """There is no device yet whose streams could."""
    child.open()
    peer = made.connect(child.descriptor(), TIMEOUT_S)
    flags = made.open_flags(peer, child.flag_page(4096))
    assert flags.arm(0, 1, (0, 1, 0, 1, 0), "cuda:0") is None
    with pytest.raises(TransportError, match="no peer"):
        made.open_flags(Peer(bytes(16)), child.flag_page(4096))
    made.close(0.0)
    child.close(0.0)
