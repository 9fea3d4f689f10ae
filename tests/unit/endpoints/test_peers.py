"""Networks that lose, double and delay frames; peers that restart, do not fit, or are many."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import attrs
import numpy as np
import pytest

# A class of torch.distributed, which does not export it to type checkers.
from torch._C._distributed_c10d import HashStore

from disagg_kv.channels import Channel, InprocChannel, News
from disagg_kv.core import Options, Phase
from disagg_kv.endpoints import Expectation, Incarnation
from disagg_kv.endpoints.peers.directory import DOUBT_S
from disagg_kv.errors import (
    ConfigurationError,
    GeometryError,
    IncompatiblePeerError,
    LocalProtocolError,
    PeerLostError,
    UnknownNameError,
)
from disagg_kv.geometry import CacheSpec, PageTable, shard
from disagg_kv.ids import Rank, RoomId
from disagg_kv.rendezvous import Source, StoreRendezvous
from disagg_kv.transports import Capabilities, InprocTransport, ShmTransport
from disagg_kv.transports.process import Process
from tests.support.rig import KV, Memory, Rig, tp_shards
from tests.support.rig_parts import Fate, Unreliable

SPEC = CacheSpec.kv(2, 4, 8, "float16")
QUICK = Options(silence_s=5.0, total_s=20.0)


def through(fate: Fate) -> Callable[[Channel], Channel]:
    """Channels with that fate."""
    return lambda inner: Unreliable(inner, fate)


def fifth(number: int, address: str) -> Sequence[int]:
    """Every fifth frame is dropped."""
    return () if number % 5 == 4 else (0,)


def twice(number: int, address: str) -> Sequence[int]:
    """Every frame comes twice, the second time much later."""
    return (0, 7)


def shuffled(number: int, address: str) -> Sequence[int]:
    """Frames overtake one another."""
    return (number * 5 % 3,)


def all_of_it(number: int, address: str) -> Sequence[int]:
    """Some are lost, some doubled, some late."""
    return ((), (0,), (2,), (0, 5), (1,), (0, 0))[number * 7 % 6]


@pytest.mark.parametrize("fate", [fifth, twice, shuffled, all_of_it])
@pytest.mark.parametrize("path", ["staged", "slice", "mapped"])
def test_a_bad_network_costs_only_time(path: str, fate: Fate) -> None:
    """Lost, doubled and late frames delay rooms; they never fail them, leak a lease or change a byte."""
    rig = Rig(SPEC)
    memory = Memory(channel=through(fate), pages=128)
    prefills = rig.prefill(tp_shards(SPEC, 2), memory=memory, strategy=path, slot_bytes=512)
    decodes = rig.decode(tp_shards(SPEC, 4), memory=memory, strategy=path, ring_bytes=16 << 10)
    requests = [rig.request(f"{i}", prefills, decodes, 21) for i in range(5)]
    for request in requests:
        request.start()
    rig.until(lambda: all(h.released for r in requests for h in r.handles), "all rooms", 20_000)
    for request in requests:
        request.done()
    rig.check()
    rig.quiet()


@pytest.mark.parametrize("fate", [fifth, all_of_it])
def test_aborts_in_a_bad_network(fate: Fate) -> None:
    """An abort at any time over a bad network leaves nothing behind."""
    rig = Rig(SPEC)
    memory = Memory(channel=through(fate), pages=128)
    prefills = rig.prefill(tp_shards(SPEC, 2), memory=memory, strategy="staged", slot_bytes=512)
    decodes = rig.decode(tp_shards(SPEC, 2), memory=memory, strategy="staged", ring_bytes=16 << 10)
    for turns in range(0, 40, 4):
        request = rig.request(f"{turns}", prefills, decodes, 12).start()
        for _ in range(turns):
            rig.turn()
        request.handles[turns // 4 % 4].abort("changed my mind")
        request.ended()
    rig.quiet()


def test_decode_restarts() -> None:
    """Another life under the same address fails the old rooms on prefill and serves new ones."""
    rig = Rig(SPEC, options=QUICK)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 8).open_decode().expect().open_prefill()
    rig.until(lambda: request.sends[0].phase is Phase.READY, "the expectation")
    decodes[0].crash()
    rig.decodes.clear()
    again = rig.decode(tp_shards(SPEC, 1))
    fresh = rig.request("fresh", prefills, again, 8).start().landed()
    assert fresh.all(Phase.DONE)
    rig.until(lambda: request.sends[0].released, "the loss")
    assert request.sends[0].phase is Phase.FAILED
    assert isinstance(request.sends[0].error, PeerLostError)
    assert len(prefills[0].endpoint.peers()) == 1
    rig.quiet()


def test_decode_is_followed_by_a_process_that_was_there_before() -> None:
    """A spare that was started first takes over the address of one whose end nobody has seen."""
    rig = Rig(SPEC, options=QUICK)
    first, spare = (Incarnation(process=Process(pid, ticks, "another host")) for pid, ticks in ((2, 5000), (1, 4000)))
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1), life=first)
    rig.request("first", prefills, decodes, 8).start().landed()
    decodes[0].crash()
    rig.decodes.clear()
    rig.request("spare", prefills, rig.decode(tp_shards(SPEC, 1), life=spare), 8).start().landed()
    assert [peer.epoch for peer in prefills[0].endpoint.peers()] == [spare.epoch]
    rig.quiet()


def test_a_second_endpoint_of_the_same_name_takes_new_rooms_and_leaves_open_ones_alone() -> None:
    """An address is nobody else's while it is used; under another one the newer endpoint has the name."""
    rig = Rig(SPEC)

    def elsewhere(given: Channel) -> Channel:
        given.close()
        return InprocChannel(rig.hub, "elsewhere")

    first, decodes = rig.prefill(tp_shards(SPEC, 1), memory=Memory(channel=elsewhere)), rig.decode(tp_shards(SPEC, 1))
    early = rig.request("early", first, decodes, 8).open_decode().expect(8).open_prefill()
    rig.until(lambda: early.sends[0].phase is Phase.READY, "the expectation")
    second = rig.prefill(tp_shards(SPEC, 1))
    with pytest.raises(ConfigurationError, match="P0: the address is in use"):
        rig.prefill(tp_shards(SPEC, 1))
    rig.wait(DOUBT_S)
    decodes[0].endpoint.driver.loop.directory.doubt(Source("P"))  # a room has failed, or it is looked up after a while
    rig.request("late", second, decodes, 8).start().landed()
    early.send(8).finish().landed()
    rig.quiet()


@pytest.mark.parametrize("path", ["staged", "slice", "mapped"])
def test_prefill_restarts(path: str) -> None:
    """Decode's rooms with the old life fail; rooms with the new one work at once."""
    rig = Rig(SPEC, options=QUICK)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 2), strategy=path), rig.decode(tp_shards(SPEC, 1), strategy=path)
    request = rig.request("room", prefills, decodes, 8).open_decode().expect().open_prefill()
    rig.until(lambda: all(h.phase is Phase.READY for h in request.sends), "the expectation")
    for member in prefills:
        member.crash()
    rig.prefills.clear()
    again = rig.prefill(tp_shards(SPEC, 2), strategy=path)
    rig.wait(1.0)
    rig.request("fresh", again, decodes, 8).start().landed()
    rig.until(lambda: request.receives[0].phase is Phase.FAILED, "the loss")
    rig.until(lambda: request.receives[0].released, "the evidence")
    rig.quiet()


def other_spec(change: str) -> CacheSpec:
    """A spec that differs in one field."""
    match change:
        case "spec.model":
            return attrs.evolve(SPEC, model=b"another")
        case "spec.layers":
            return CacheSpec.kv(3, 4, 8, "float16")
        case "spec.layers[0].k.dtype":
            return CacheSpec.kv(2, 4, 8, "bfloat16", v_dtype="float16")
        case "spec.layers[0].v.unit_bytes":
            return CacheSpec.kv(2, 4, 8, "float16", v_head_dim=4)
        case _:
            return CacheSpec.mla(2, 8, "float16")


@pytest.mark.parametrize(
    "field",
    ["spec.model", "spec.layers", "spec.layers[0].k.dtype", "spec.layers[0].v.unit_bytes", "spec.layers[0]"],
)
def test_caches_that_differ_are_refused_by_name(field: str) -> None:
    """Two sides with different caches refuse each other at once, and the error names the field."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1))
    rig.spec = other_spec(field)
    decodes = rig.decode(tp_shards(rig.spec, 1))
    handle = decodes[0].endpoint.open(RoomId(b"room"), Source("P"))
    rig.until(lambda: handle.released, "the refusal", 400)
    assert isinstance(handle.error, IncompatiblePeerError)
    assert handle.error.field == field
    assert not prefills[0].endpoint.peers()
    assert not decodes[0].endpoint.peers()


@pytest.mark.parametrize(
    ("memory", "strategy", "field"),
    [(Memory(transport=ShmTransport), "auto", "transport"), (Memory(), "slice", "paths")],
    ids=["transport", "paths"],
)
def test_sides_with_nothing_in_common_are_refused(memory: Memory, strategy: str, field: str) -> None:
    """Other transports and paths are named too."""
    rig = Rig(SPEC)
    rig.prefill(tp_shards(SPEC, 1), strategy="staged")
    decodes = rig.decode(tp_shards(SPEC, 1), memory=memory, strategy=strategy)
    handle = decodes[0].endpoint.open(RoomId(b"room"), Source("P"))
    rig.until(lambda: handle.released, "the refusal", 400)
    assert isinstance(handle.error, IncompatiblePeerError)
    assert handle.error.field == field


def test_prefill_that_lacks_what_decode_needs() -> None:
    """A split of which decode's boxes cannot be made is refused with the reason."""
    rig = Rig(SPEC)
    half = [shard(SPEC, units={"k": range(2), "v": range(4)})]
    rig.prefill(half)
    decodes = rig.decode(tp_shards(SPEC, 1))
    handle = decodes[0].endpoint.open(RoomId(b"room"), Source("P"))
    rig.until(lambda: handle.released, "the refusal", 400)
    assert isinstance(handle.error, IncompatiblePeerError)
    assert handle.error.field == "shards"
    assert "give each rank the shards of all" in str(handle.error)


def test_an_instance_that_is_not_what_the_rendezvous_says() -> None:
    """Ranks of one instance must agree on what the instance is."""
    rig = Rig(SPEC)
    shards = tp_shards(SPEC, 2)
    prefills = rig.prefill(shards, only=[0], slot_bytes=4096) + rig.prefill(shards, only=[1], slot_bytes=8192)
    decodes = rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 8).open_prefill().open_decode().failed()
    assert isinstance(request.receives[0].error, IncompatiblePeerError)
    assert "slot_bytes" in request.receives[0].error.field


def test_who_is_there_is_told_when_another_rank_of_its_instance_cannot_be_reached() -> None:
    """Nothing comes of the room; the ranks that were reached would wait for their deadline."""
    rig = Rig(SPEC)
    shards = tp_shards(SPEC, 2)
    prefills = rig.prefill(shards, only=[0])
    prefills += rig.prefill(shards, only=[1], memory=Memory(transport=ShmTransport))
    decodes = rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 8).open_prefill(60.0).open_decode()
    began = rig.clock()
    request.failed()
    assert rig.clock() - began < 30.0
    assert isinstance(request.receives[0].error, IncompatiblePeerError)
    assert "transport" in str(request.sends[0].error)
    rig.quiet()


def test_one_endpoint_for_two_ranks_is_refused_before_anything_is_written() -> None:
    """Bad input: the rendezvous names one address twice; the error says which rank is not there."""
    rig = Rig(SPEC)
    rig.rendezvous = StoreRendezvous(HashStore())
    prefills, decodes = rig.prefill(tp_shards(SPEC, 2), only=[0]), rig.decode(tp_shards(SPEC, 1))
    rig.rendezvous.publish("P", Rank(1), 2, prefills[0].channel.address)
    handle = decodes[0].endpoint.open(RoomId(b"room"), Source("P"))
    rig.until(lambda: handle.released, "the refusal", 400)
    assert isinstance(handle.error, IncompatiblePeerError)
    assert handle.error.field == f"rank of {prefills[0].channel.address}"
    assert (handle.error.ours, handle.error.theirs) == (1, 0)


def test_a_name_that_nobody_has() -> None:
    """Unknown strategies, combinations, ranks and shards are refused when the endpoint is built."""
    rig = Rig(SPEC)
    with pytest.raises(UnknownNameError, match="'fast'"):
        rig.prefill(tp_shards(SPEC, 1), "A", strategy="fast")
    with pytest.raises(ConfigurationError, match="both a schedule"):
        rig.decode(tp_shards(SPEC, 1), "B", strategy="per_chunk+layer-pipelined")
    with pytest.raises(ConfigurationError, match="both a path"):
        rig.decode(tp_shards(SPEC, 1), "C", strategy="staged+slice")
    with pytest.raises(ConfigurationError, match="slots of 100 bytes"):
        rig.prefill(tp_shards(SPEC, 1), "D", slot_bytes=100)
    with pytest.raises(ConfigurationError, match="slots must be at least 1, not 0"):
        rig.prefill(tp_shards(SPEC, 1), "E", slots=0)


def test_memory_that_cannot_be_written_to() -> None:
    """An explicit path that exposes pages needs memory that the transport can write to; auto does without."""

    class Own(InprocTransport):
        caps = Capabilities(in_process_only=True, own_memory_only=True)

    rig = Rig(SPEC)
    memory = Memory(transport=Own)
    with pytest.raises(ConfigurationError, match="'slice' writes into pages"):
        rig.decode(tp_shards(SPEC, 1), "X", memory, strategy="slice")
    prefills = rig.prefill(tp_shards(SPEC, 1))
    decodes = rig.decode(tp_shards(SPEC, 1), memory=memory)
    request = rig.request("room", prefills, decodes, 8).start().landed()
    assert request.sends[0].report.path == "staged"
    assert request.receives[0].report.path == "staged"


def test_direct_between_unequal_layouts() -> None:
    """An explicit path that cannot is an error with the reason on both sides; auto takes another."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 2), "explicit", strategy="direct")
    others = rig.prefill(tp_shards(SPEC, 2), "auto")
    decodes = rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 8, "explicit").start().failed()
    assert isinstance(request.receives[0].error, ConfigurationError)
    assert all("direct cannot: prefill rank 0: layer 0" in str(handle.error) for handle in request.handles)
    rig.request("other room", others, decodes, 8, "auto").start().landed()
    rig.quiet()


def test_a_path_that_decode_does_not_allow() -> None:
    """``auto`` on prefill takes what decode asks for, and both reports name it alike."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1))
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="slice")
    request = rig.request("room", prefills, decodes, 8).start().landed()
    assert request.sends[0].report.path == "slice"
    assert request.receives[0].report.path == "slice"


def test_who_is_there() -> None:
    """``peers`` lists the other side and the ranks of our own instance."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 2)), rig.decode(tp_shards(SPEC, 1))
    rig.request("room", prefills, decodes, 8).start().landed()
    assert {(p.instance, p.rank) for p in decodes[0].endpoint.peers()} == {("P", 0), ("P", 1)}
    assert {(p.instance, p.rank) for p in prefills[1].endpoint.peers()} == {("P", 0), ("D", 0)}


def test_zero_is_not_the_default() -> None:
    """A size or a time of 0 is refused by name, not silently replaced."""
    rig = Rig(SPEC)
    with pytest.raises(ConfigurationError, match="slot_bytes must be at least 1, not 0"):
        rig.prefill(tp_shards(SPEC, 1), slot_bytes=0)
    with pytest.raises(ConfigurationError, match="ring_bytes must be at least 1, not 0"):
        rig.decode(tp_shards(SPEC, 1), name="E", ring_bytes=0)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1), name="Q"), rig.decode(tp_shards(SPEC, 1))
    with pytest.raises(ConfigurationError, match="total_s must be more than 0"):
        prefills[0].endpoint.open(RoomId(b"r"), total_s=0)
    with pytest.raises(ConfigurationError, match="claim_s must be more than 0"):
        decodes[0].endpoint.open(RoomId(b"r"), Source("Q"), claim_s=0)


def test_arguments_are_checked_before_anything_happens() -> None:
    """Calls that cannot work raise, with names and numbers, and change nothing."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 8).open_decode().open_prefill()
    (send,), (receive,) = request.sends, request.receives
    table = PageTable(KV, np.array([1, 2], np.int32))
    with pytest.raises(GeometryError, match=r"slots of groups \['kv'\]; of states there are \[\]"):
        receive.expect(Expectation(8, [table], state=[table]))
    with pytest.raises(ConfigurationError, match="incremental"):
        receive.expect(Expectation(8, [table], held={KV: 4}))
    with pytest.raises(ConfigurationError, match="tag must have 0 to 256 bytes, not 300"):
        decodes[0].endpoint.open(RoomId(b"other"), Source("P"), tag=bytes(300))
    with pytest.raises(GeometryError):
        receive.expect(Expectation(-1, [table]))
    with pytest.raises(GeometryError):
        receive.expect(Expectation(9, [table]))
    with pytest.raises(GeometryError, match="two page tables"):
        receive.expect(Expectation(8, [table, table]))
    with pytest.raises(GeometryError, match="no page table"):
        receive.expect(Expectation(8, []))
    with pytest.raises(GeometryError, match="aux slot 9"):
        receive.expect(Expectation(8, [table], aux=9))
    assert receive.expect(Expectation(8, [table])) == {KV: 0}
    with pytest.raises(LocalProtocolError, match="already"):
        receive.expect(Expectation(8, [table]))
    for act in (send.check_chunk, send.send_chunk):
        with pytest.raises(GeometryError):
            act(9, [table])
    with pytest.raises(ConfigurationError, match="stop"):
        send.check_chunk(-1, [table])
    send.check_chunk(8, [table])
    with pytest.raises(GeometryError, match="of states there are"):
        send.finish(0, state=[table])
    with pytest.raises(ConfigurationError, match="tag must have 0 to 256 bytes, not 300"):
        prefills[0].endpoint.open(RoomId(b"other"), tag=bytes(300))
    with pytest.raises(GeometryError, match="aux slot 7"):
        send.finish(0, aux=7)
    with pytest.raises(LocalProtocolError, match="chunks end at 0"):
        send.finish(8)
    request.taken = [table]
    request.send(8)
    with pytest.raises(LocalProtocolError, match="were given"):
        send.send_chunk(8, [table])
    request.finish()
    with pytest.raises(LocalProtocolError, match="second"):
        send.finish(8)
    with pytest.raises(LocalProtocolError, match="after finish"):
        send.send_chunk(9, [PageTable(KV, np.array([1, 2, 3], np.int32))])
    for member in decodes:
        member.free = [p for p in member.free if p not in (1, 2)]
    request.landed()


@pytest.mark.slow
def test_rooms_leave_nothing_behind() -> None:
    """After any number of rooms an endpoint is as large as after a few: not one object per hundred rooms stays."""
    rig = Rig(SPEC, options=Options(tombstones=128, parked=32))
    prefills, decodes = rig.prefill(tp_shards(SPEC, 2)), rig.decode(tp_shards(SPEC, 2))

    def many(number: int, of: str) -> None:
        for start in range(0, number, 100):
            requests = [rig.request(f"{of}{start + i}", prefills, decodes, 0) for i in range(100)]
            for i, request in enumerate(requests):
                request.start()
                if i % 10 == 9:
                    request.handles[i // 10 % 4].abort("now and then")
            for request in requests:
                request.released()
            for member in rig.members:
                assert member.endpoint.poll()
                while member.endpoint.poll():
                    """Few arrivals are told of at once."""
                member.observer.spans.clear()
        rig.quiet()

    many(600, "warm ")
    before = [size(m.endpoint) for m in rig.members]
    many(1500, "room ")
    after = [size(m.endpoint) for m in rig.members]
    assert all(b <= a + 15 for a, b in zip(before, after, strict=True)), (before, after)


def size(thing: object) -> int:
    """How many objects an endpoint keeps: everything that is reached from it by attributes and containers."""
    seen: dict[int, object] = {}
    queue: list[object] = [thing]
    count = 0
    while queue:
        one = queue.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen[id(one)] = one
        if isinstance(one, Rig | str | bytes | int | float):
            continue
        count += 1
        if isinstance(one, dict):
            queue += [*one.keys(), *one.values()]
        elif isinstance(one, WeakValueDictionary):
            queue += list(one.values())
        elif isinstance(one, list | tuple | set | frozenset | deque):
            queue += list(one)
        elif type(one).__module__.startswith("disagg_kv") and type(one).__name__ not in ("InprocChannel", "Recorder"):
            queue.append(getattr(one, "__dict__", {}))
            for cls in type(one).__mro__:
                queue += [getattr(one, s, None) for s in getattr(cls, "__slots__", ()) if s != "__weakref__"]
    return count


class Drowsy(Unreliable):
    """A channel that sleeps in fake time; it notes for how long."""

    def __init__(self, inner: Channel) -> None:
        super().__init__(inner, lambda number, address: (0,))
        self.slept: list[float] = []
        self._waits_s = 0.0

    def wait(self, timeout_s: float) -> None:
        """Time does not pass."""
        self._waits_s = timeout_s

    def poll(self) -> Sequence[News]:
        """Note how long nothing would have happened."""
        came = super().poll()
        self.slept.append(0.0 if came else self._waits_s)
        self._waits_s = 0.0
        return came


def test_idle_endpoints_rest() -> None:
    """Endpoints without rooms wake up for heartbeats and to notice exits, a few times a second."""
    made: list[Drowsy] = []

    def channel(inner: Channel) -> Drowsy:
        made.append(Drowsy(inner))
        return made[-1]

    rig = Rig(SPEC)
    memory = Memory(channel=channel)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1), memory=memory), rig.decode(tp_shards(SPEC, 1), memory=memory)
    rig.request("room", prefills, decodes, 8).start().landed()
    rig.quiet()
    rig.wait(2.0)
    turns, end = 0, rig.clock() + 20.0
    while rig.clock() < end:
        for member in rig.members:
            member.endpoint.driver.step(1.0)
        turns += 1
        rig.clock.advance(min(one.slept[-1] for one in made))
    assert turns < 20 * 10
    assert len(decodes[0].endpoint.peers()) == 1


class Manual(InprocTransport):
    """Its writes would move only while the target polls."""

    caps = attrs.evolve(InprocTransport.caps, needs_target_polling=True)


def test_a_target_that_has_to_poll_does_so_while_rooms_are_open() -> None:
    """Without that, such a transport's writes would wait for the next heartbeat."""
    made: list[Drowsy] = []

    def channel(inner: Channel) -> Drowsy:
        made.append(Drowsy(inner))
        return made[-1]

    rig = Rig(SPEC)
    (member,) = rig.decode(tp_shards(SPEC, 1), memory=Memory(transport=Manual, channel=channel))
    member.endpoint.driver.step(1.0)
    assert made[0].slept[-1] > 0.01
    member.endpoint.open(RoomId(b"room"), Source("P"))
    for _ in range(3):
        member.endpoint.driver.step(1.0)
    assert made[0].slept[-1] <= 0.001
