"""What rarely happens: garbage, strangers, expiry, exits of processes, peers that are gone for good."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from enum import Enum

import attrs
import msgspec
import numpy as np
import pytest

from disagg_kv.channels import Arrived, InprocChannel
from disagg_kv.core import MAX_AUX, Codec, Hello, Options, Phase
from disagg_kv.core.room.flow import room_head
from disagg_kv.core.room.machine import Machine
from disagg_kv.core.room.tables import RECEIVING, SENDING, Receiving, Sending
from disagg_kv.core.wire.frames import VERSION, Complete, Done, Expect, Grant, Head, Refused, WireHolding, WireTable
from disagg_kv.endpoints import (
    DecodeEndpoint,
    Environment,
    Expectation,
    Incarnation,
    PrefillEndpoint,
)
from disagg_kv.endpoints.peers.handshake import check_instance
from disagg_kv.endpoints.peers.session import PeerSession
from disagg_kv.errors import ConfigurationError, GeometryError, OversizeError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Epoch, Generation, Rank, RoomId
from disagg_kv.memory import PagedPool
from disagg_kv.planning.staged import _views
from disagg_kv.rendezvous import Source
from disagg_kv.strategies.paths import StagedPlanner
from disagg_kv.testing import FakeClock, Fault, FaultyTransport
from disagg_kv.transports import InprocTransport, Transports
from disagg_kv.transports.process import LOOK_S, Process
from tests.support.rig import Decodes, E, Memory, Prefills, Rig, tp_shards
from tests.support.rig_parts import CountingKernels, FiredEvent, RecordingTransport

SPEC = CacheSpec.kv(2, 4, 8, "float16")


@pytest.mark.parametrize("path", ["staged", "slice"])
@pytest.mark.parametrize("fault", [Fault.HUNG, Fault.LATE])
def test_writes_to_a_peer_that_is_gone_are_over(fault: Fault, path: str) -> None:
    """A fenced peer is evidence for prefill too: pages and slots that its writes read come back."""
    rig = Rig(SPEC)
    memory = Memory(transport=lambda: FaultyTransport(InprocTransport(), {0: fault}.get))
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy=path)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy=path)
    request = rig.request("room", prefills, decodes, 8).start()
    transport = prefills[0].transport
    assert isinstance(transport, FaultyTransport)
    rig.until(lambda: bool(transport.held), "the held write")
    decodes[0].crash()
    rig.until(lambda: request.sends[0].released, "the evidence")
    assert request.sends[0].phase is Phase.FAILED
    rig.quiet()


def test_garbage_and_frames_of_strangers_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Bytes that are no frame, and frames of unknown lives, change nothing."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    stranger = InprocChannel(rig.hub, "stranger")
    frame = Done(src=bytes(16), dst=bytes(16), room=b"room", generation=1, stop=8, segments=0, aux=None)
    with caplog.at_level(logging.ERROR):
        for member in rig.members:
            for data in (b"", b"\x00" * 40, b"\xc1", Codec().encode(frame)):
                stranger.send(member.channel.address, data)
    rig.request("room", prefills, decodes, 8).start().landed()
    for member in rig.members:
        assert member.observer.counters["frames.refused"] == 3
        assert member.observer.counters["frames.stale"] == 1


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_frame_that_a_peer_must_never_send_costs_its_room_alone(side: str) -> None:
    """It is the peer's error, not one of ours that would end every room."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    bad, good = (rig.request(name, prefills, decodes, 8).open_decode().expect(8).open_prefill() for name in "ab")
    rig.until(lambda: all(r.sends[0].phase is Phase.READY for r in (bad, good)), "the expectations")
    (prefill,), (decode,) = decodes[0].endpoint.peers(), prefills[0].endpoint.peers()
    sender, member = (decode, prefills[0]) if side == "prefill" else (prefill, decodes[0])
    receiver = prefill if side == "prefill" else decode
    head = room_head(sender.epoch, receiver.epoch, bad.room, Generation(1))
    frame = Done(**head, stop=8, segments=0, aux=None) if side == "prefill" else Complete(**head)
    InprocChannel(rig.hub, "forger").send(member.channel.address, Codec().encode(frame))
    bad.failed()
    assert f"sent {type(frame).__name__}, which it must never send" in bad.errors()
    good.send(8).finish().landed()
    assert not any(m.observer.counters["errors.unforeseen"] for m in rig.members)
    rig.quiet()


@pytest.mark.parametrize("path", ["auto", "staged"])
def test_an_expectation_of_more_rows_than_there_can_be(path: str) -> None:
    """What a peer says costs neither time nor memory: paths are compared for rows that our pool can hold."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1), strategy=path), rig.decode(tp_shards(SPEC, 1))
    rig.request("first", prefills, decodes, 8).start().landed()
    delivery = prefills[0].endpoint.open(RoomId(b"room"))
    head = forged(prefills, decodes, RoomId(b"room"))
    expect = Expect(**head, start=0, stop=2**62, path="staged", tables=None, tag=b"")
    InprocChannel(rig.hub, "forger").send(prefills[0].channel.address, Codec().encode(expect))
    rig.until(lambda: delivery.phase is Phase.READY, "the expectation")
    assert delivery.report.path == "staged"


def test_pages_of_a_peer_that_registered_none_of_them() -> None:
    """Pages that are named without memory to write to fail the room, with the reason."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1), strategy="staged")
    rig.request("first", prefills, decodes, 8).start().landed()
    delivery = prefills[0].endpoint.open(RoomId(b"room"))
    tables = (WireTable("kv", 0, 1, 0, bytes(4)),)
    expect = Expect(**forged(prefills, decodes, RoomId(b"room")), start=0, stop=4, path="slice", tables=tables, tag=b"")
    InprocChannel(rig.hub, "forger").send(prefills[0].channel.address, Codec().encode(expect))
    rig.until(lambda: delivery.released, "the refusal")
    assert "no memory of theirs is registered" in str(delivery.error)
    assert not any(m.observer.counters["errors.unforeseen"] for m in rig.members)
    rig.quiet()


def test_a_grant_outside_the_ring_is_not_written_to() -> None:
    """A lease must lie in the ring that the peer's Hello told of; nothing is posted for one that does not."""
    rig = Rig(SPEC)
    transport = RecordingTransport(InprocTransport())
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=Memory(transport=lambda: transport), strategy="staged")
    decodes = rig.decode(tp_shards(SPEC, 1), ring_bytes=1 << 16)
    request = rig.request("room", prefills, decodes, 8).open_decode().expect(8).open_prefill()
    rig.until(lambda: request.sends[0].phase is Phase.READY, "the expectation")
    decodes[0].frozen = True
    request.send(8)
    rig.wait(0.1)
    grant = Grant(
        **forged(prefills, decodes, request.room, 1),
        segment=(0, 8, 0, 2, False),
        ask=0,
        lease=0,
        offset=(1 << 16) - 256,
        nbytes=2048,
    )
    InprocChannel(rig.hub, "forger").send(prefills[0].channel.address, Codec().encode(grant))
    rig.until(lambda: request.sends[0].released, "the failure")
    assert "granted bytes 65280-67328 of a ring of 65536" in str(request.sends[0].error)
    assert not transport.batches
    decodes[0].frozen = False
    request.failed()
    rig.quiet()


def test_a_path_that_plans_too_much_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path may be somebody else's code: a layout that is not the part's size would reach into other leases."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1), strategy="staged"), rig.decode(tp_shards(SPEC, 1))
    with monkeypatch.context() as patched:
        patched.setattr(
            StagedPlanner, "send", lambda _, job: attrs.evolve(job.pair.source_view.layout(job.segment), nbytes=4096)
        )
        request = rig.request("room", prefills, decodes, 8).start().failed()
    assert "which takes a layout of 2048 bytes" in str(request.sends[0].error)
    rig.request("next", prefills, decodes, 8).start().landed()
    rig.quiet()


def test_a_kernel_s_event_that_raises() -> None:
    """An event of a gather or scatter that raises fails its room alone, and once."""

    class Broken(FiredEvent):
        def query(self) -> bool:
            raise RuntimeError("device lost")

    class Doomed(CountingKernels):
        def _done(self, event: object) -> FiredEvent:
            return Broken()

    for side in ("prefill", "decode"):
        rig = Rig(SPEC)
        kernels = CountingKernels(), CountingKernels()
        bad = Doomed()
        prefills = rig.prefill(tp_shards(SPEC, 1), strategy="staged", kernels=bad if side == "prefill" else kernels[0])
        decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged", kernels=bad if side == "decode" else kernels[1])
        request = rig.request("room", prefills, decodes, 8).start().failed()
        assert "device lost" in request.errors()
        assert not any(m.observer.counters["errors.unforeseen"] for m in rig.members)
        rig.quiet()


def test_what_is_kept_for_later_expires() -> None:
    """Parked expectations, declined rooms and rooms that nobody asked for are not kept for ever."""
    rig = Rig(SPEC, options=Options(silence_s=5.0, total_s=10.0))
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    parked = rig.request("parked", prefills, decodes, 8).open_decode().expect()
    declined = rig.request("declined", prefills, decodes, 8).open_decode()
    declined.receives[0].abort("not now")
    unasked = rig.request("unasked", prefills, decodes, 8).open_prefill()
    unasked.sends[0].abort("not ever")
    rig.wait(15.0)
    assert parked.receives[0].phase is Phase.FAILED
    keeper = rig.request("keeper", prefills, decodes, 8).open_prefill()
    rig.wait(12.0)
    assert keeper.sends[0].released
    for request in (declined, unasked):
        rig.request(request.room.decode(), prefills, decodes, 8, attempt=2).start().landed()
    rig.quiet()


def test_pools_must_be_what_the_instance_says() -> None:
    """An endpoint's rank and shard are checked against the instance's list when it is built."""
    shards = tp_shards(SPEC, 2)
    site = PagedPool.allocate(SPEC, shards[0], pages=4, page_size=4).site
    check_instance(shards, 0, site)
    with pytest.raises(GeometryError, match="rank 2 of an instance of 2"):
        check_instance(shards, 2, site)
    with pytest.raises(GeometryError, match="not the one"):
        check_instance(shards, 1, site)


def forged(prefills: Prefills, decodes: Decodes, room: RoomId, generation: int = 100) -> Head:
    """The head of a frame from the only decode rank to the only prefill rank, about a room that it has not had yet."""
    (prefill,), (decode,) = decodes[0].endpoint.peers(), prefills[0].endpoint.peers()
    return room_head(decode.epoch, prefill.epoch, room, Generation(generation))


def introduced(rig: Rig) -> Hello:
    """What a decode endpoint says of itself to an address that it dials."""
    ear = InprocChannel(rig.hub, "ear")
    rig.rendezvous.publish("ear", Rank(0), 1, ear.address)
    rig.decodes[0].endpoint.open(RoomId(b"dial"), Source("ear"))
    rig.wait(0.5)
    frames = [Codec().decode(event.frame) for event in ear.poll() if isinstance(event, Arrived)]
    hello = next(frame for frame in frames if isinstance(frame, Hello))
    ear.close()
    return hello


def test_exits_of_processes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer's end is observed where the host allows it, and evidence once its last writes must have landed."""
    rig = Rig(SPEC)
    rig.decode(tp_shards(SPEC, 1))
    hello = introduced(rig)
    loop = rig.decodes[0].endpoint.driver.loop
    loop.me, loop.clock = attrs.evolve(loop.me, incarnation=Incarnation()), FakeClock()
    say = "from disagg_kv.transports.process import Process as P; p = P.own(); print(p.pid, p.started, flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{say}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        pid, started = map(int, child.stdout.readline().split())
        running = msgspec.structs.replace(hello, pid=pid, started=started)
        said = [running, running, hello, msgspec.structs.replace(running, host="elsewhere"), running]
        alive, other, own, far, late = (PeerSession(one, 0.0, True) for one in said)
        for session in (alive, other, alive, own, far):
            assert loop._unwatched(session) is None
        assert loop.exited() == []
        child.communicate(b"\n")
        time.sleep(LOOK_S)
    assert loop._unwatched(late) is None
    loop._unlink(other)
    assert loop.exited() == [late, alive]
    assert loop.exited() == []
    monkeypatch.setattr(Transports, "drain_s", None)
    assert loop.drained() == []
    monkeypatch.setattr(Transports, "drain_s", 1.0)
    assert loop.drained() == []
    loop.clock.advance(1.0)
    assert loop.drained() == [late, alive]
    loop._unlink(late)
    assert loop.drained() == [alive]
    loop._exits.clear()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"version": VERSION + 1}, "version"),
        ({"rank": 7}, "rank"),
        ({"instance": "other"}, "role"),
        ({"rank": 1, "shards": ()}, "rank"),
        ({"regions": tuple(range(9))}, "hello"),
        ({"lease_bytes": (1 << 16) + 1}, "hello"),
        ({"role": "both"}, "role"),
        ({"shards": ((WireHolding("k", ((0, 1 << 16),), 0, 1),) * 1000,)}, "hello"),
    ],
)
def test_ranks_of_one_instance_must_fit(change: dict[str, object], field: str) -> None:
    """Another endpoint of our own role must be a rank of the same instance."""
    rig = Rig(SPEC)
    rig.decode(tp_shards(SPEC, 2), only=[0])
    hello = msgspec.structs.replace(introduced(rig), **{"src": b"x" * 16, "rank": 1, **change})
    stranger = InprocChannel(rig.hub, "stranger")
    hello = msgspec.structs.replace(hello, address=stranger.address)
    stranger.send(rig.decodes[0].channel.address, Codec().encode(hello))
    rig.wait(0.5)
    frames = [Codec().decode(event.frame) for event in stranger.poll() if isinstance(event, Arrived)]
    (refused,) = [frame for frame in frames if isinstance(frame, Refused)]
    assert refused.field == field
    assert not rig.decodes[0].endpoint.peers()


def alone(kind: type[E], rig: Rig, pool: PagedPool, name: str) -> E:
    """The only rank of an instance, over a pool that no rig would make."""
    return kind(
        pool,
        transport=InprocTransport(),
        channel=InprocChannel(rig.hub, name),
        rendezvous=rig.rendezvous,
        instance=name,
        environment=Environment(clock=rig.clock, thread=False, engine=False),
    )


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("sizes", [(64, 8), (MAX_AUX, MAX_AUX - 1), (MAX_AUX - 1, MAX_AUX), (MAX_AUX, MAX_AUX)])
def test_aux_rows_of_any_size_arrive_where_they_fit(sizes: tuple[int, int], wanted: bool) -> None:
    """Up to 512 KiB; more than decode's row fails the room; what it does not want, not."""
    rig = Rig(SPEC)
    pools = [
        PagedPool.allocate(SPEC, tp_shards(SPEC, 1)[0], pages=4, page_size=4, aux_slots=1, aux_bytes=n) for n in sizes
    ]
    aux = rig.rng.integers(0, 255, sizes[0], dtype=np.uint8).tobytes()
    pools[0].write_aux(0, aux)
    room = RoomId(b"room")
    send_end = alone(PrefillEndpoint, rig, pools[0], "aux0")
    receive_end = alone(DecodeEndpoint, rig, pools[1], "aux1")
    receive = receive_end.open(room, Source("aux0"))
    receive.expect(Expectation(0, [], aux=0 if wanted else None))
    send = send_end.open(room)
    send.finish(0, aux=0)

    def ended() -> bool:
        send_end.driver.step()
        receive_end.driver.step()
        return send.released and receive.released

    rig.until(ended, "the end")
    if wanted and sizes[0] > sizes[1]:
        assert f"aux data of {sizes[0]} bytes for rows of {sizes[1]}" in str(receive.error)
    else:
        assert (send.phase, receive.phase) == (Phase.DONE, Phase.DONE)
        assert pools[1].read_aux(0) == (aux if wanted else b"").ljust(sizes[1], b"\0")


def aux_pool(nbytes: int, kind: type[PagedPool] = PagedPool) -> PagedPool:
    """Of one aux row."""
    return kind.allocate(SPEC, tp_shards(SPEC, 1)[0], pages=4, page_size=4, aux_slots=1, aux_bytes=nbytes)


def test_a_pool_of_longer_aux_rows_is_refused() -> None:
    """By the constructor of either side, with both sizes; one of 512 KiB is taken."""
    rig = Rig(SPEC)
    refused = f"the aux data of a room: {MAX_AUX + 1} bytes requested, .* {MAX_AUX}"
    with pytest.raises(OversizeError, match=refused):
        alone(PrefillEndpoint, rig, aux_pool(MAX_AUX + 1), "more0")
    with pytest.raises(OversizeError, match=refused):
        alone(DecodeEndpoint, rig, aux_pool(MAX_AUX + 1), "more1")
    alone(PrefillEndpoint, rig, aux_pool(MAX_AUX), "aux0").close()
    alone(DecodeEndpoint, rig, aux_pool(MAX_AUX), "aux1").close()


class Longer(PagedPool):
    """Gives more than it said, from the ``after``-th look on."""

    after = 1

    def read_aux(self, slot: int) -> bytes:
        self.after -= 1
        return super().read_aux(slot) + (b"x" if self.after <= 0 else b"")


@pytest.mark.parametrize("after", [1, 2])
def test_a_pool_that_gives_more_aux_data_than_it_said_fails_before_any_is_sent(after: int) -> None:
    """The call of the engine, or the room that it was for."""
    rig = Rig(SPEC)
    pool = aux_pool(MAX_AUX, Longer)
    assert isinstance(pool, Longer)
    pool.after = after
    send_end = alone(PrefillEndpoint, rig, pool, "aux0")
    receive_end = alone(DecodeEndpoint, rig, aux_pool(MAX_AUX), "aux1")
    receive = receive_end.open(RoomId(b"room"), Source("aux0"))
    receive.expect(Expectation(0, [], aux=0))
    send = send_end.open(RoomId(b"room"))
    if after == 1:
        with pytest.raises(OversizeError, match=f"the aux data of a room: {MAX_AUX + 1} bytes"):
            send.finish(0, aux=0)
        send.finish(0)
    else:
        send.finish(0, aux=0)

    def ended() -> bool:
        send_end.driver.step()
        receive_end.driver.step()
        return send.released and receive.released

    rig.until(ended, "the end")
    assert (send.phase, receive.phase) == (Phase.FAILED, Phase.FAILED)
    assert ("an aux row is awaited, and prefill gave none" in str(receive.error)) is (after == 1)
    assert isinstance(send.error, OversizeError) is (after == 2)


@pytest.mark.parametrize(("path", "ends"), [("auto", Phase.DONE), ("slice", Phase.FAILED)])
def test_more_pages_than_a_request_may_name_are_not_exposed(
    path: str, ends: Phase, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a request goes through staging, and its report says why; where that is not allowed, the error does.

    The log says it once, and a counter counts every such room.
    """
    rig = Rig(SPEC, options=Options(request_pages=1))
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy=path)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy=path)
    rig.request("first", prefills, decodes, 4).start().landed()
    request = rig.request("room", prefills, decodes, 100).start().released()
    assert [handle.phase for handle in request.handles] == [ends, ends]
    assert request.sends[0].report.path == "staged" or isinstance(request.receives[0].error, OversizeError)
    why = "25 page ids of one request (request_pages), at most 1"
    assert request.receives[0].report.reason == (f"auto takes staged; mapped cannot: {why}" if path == "auto" else "")
    rig.request("another", prefills, rig.decodes, 100).start().released()
    assert caplog.text.count(why) == 1
    assert rig.decodes[0].observer.counters["rooms.too_many_pages"] == 2
    rig.quiet()


def test_the_life_of_an_endpoint_can_be_given() -> None:
    """I8: a simulator's endpoints draw nothing by themselves: epoch and process are what it says."""
    rig = Rig(SPEC)
    life = Incarnation(Epoch(b"0123456789abcdef"), Process(7, 8, "host"), born=9)
    channel = InprocChannel(rig.hub, "mine")
    ear = InprocChannel(rig.hub, "ear")
    rig.rendezvous.publish("ear", Rank(0), 1, ear.address)
    pool = PagedPool.allocate(SPEC, tp_shards(SPEC, 1)[0], pages=4, page_size=4)
    endpoint = DecodeEndpoint(
        pool,
        transport=InprocTransport(),
        channel=channel,
        rendezvous=rig.rendezvous,
        instance="D",
        ring_bytes=4096,
        environment=Environment(clock=rig.clock, thread=False, engine=False, incarnation=life),
    )
    endpoint.open(RoomId(b"room"), Source("ear"))
    endpoint.driver.step()
    hello = next(Codec().decode(event.frame) for event in ear.poll() if isinstance(event, Arrived))
    assert isinstance(hello, Hello)
    assert (hello.src, hello.pid, hello.started, hello.born, hello.host) == (life.epoch, 7, 8, 9, "host")
    endpoint.close(0.0)


def test_cells_of_the_tables_can_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coverage marks: who wants to know gets every pair of state and event that a machine handled."""
    seen: set[tuple[Enum, type]] = set()
    monkeypatch.setattr(Machine, "seen", seen)
    rig = Rig(SPEC)
    rig.prefill(tp_shards(SPEC, 1))
    rig.decode(tp_shards(SPEC, 1))
    rig.request("r", rig.prefills, rig.decodes, 8).start().landed()
    assert {(Receiving.MOVING, Done), (Sending.FINISHED, Complete)} <= seen <= {*RECEIVING, *SENDING}


def test_what_is_remembered_of_peers_parts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers of ever other shapes cost no memory, and no two parts are taken for each other."""
    monkeypatch.setattr("disagg_kv.planning.cache.KEPT", 2)
    _views.clear()  # what other tests of this process have asked
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="staged")
    instances = [
        rig.decode(tp_shards(SPEC, size), name, strategy="staged") for size, name in ((1, "A"), (2, "B"), (4, "C"))
    ]
    for turn in range(2):
        for number, decodes in enumerate(instances):
            rig.request(f"{turn} {number}", prefills, decodes, 8).start().landed()
    assert all(0 < len(decodes[0].endpoint._side._expectations._chooser._chosen) <= 2 for decodes in instances)
    assert len(_views) <= 2
    rig.quiet()


class WithoutPeers:
    """A transport that cannot say which peer a descriptor names; ``caps`` may be anything."""

    def __init__(self, missing: str, instead: object) -> None:
        self._inner = InprocTransport()
        self._missing = missing
        self._instead = instead

    def __getattr__(self, name: str) -> object:
        if name == self._missing:
            if self._instead is None:
                raise AttributeError(name)
            return self._instead
        return getattr(self._inner, name)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("missing", "instead", "message"),
    [
        ("peer_of", None, r"transports?: .*peer_of\(\) is missing"),
        ("caps", {"devices": {"cpu"}}, "transports?: caps: a Capabilities is needed"),
        ("name", 7, "transports?: name: text is needed"),
    ],
)
def test_a_transport_that_cannot_be_one_is_refused_when_the_endpoint_is_made(
    side: str, missing: str, instead: object, message: str
) -> None:
    """And not when its first room fails."""
    spec = CacheSpec.kv(2, 2, 8, "float16")
    rig = Rig(spec)
    memory = Memory(transport=lambda: WithoutPeers(missing, instead))  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigurationError, match=message):
        (rig.prefill if side == "prefill" else rig.decode)(tp_shards(spec, 1), memory=memory)
