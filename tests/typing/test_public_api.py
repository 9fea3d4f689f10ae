"""How the public API looks to a strict type checker; run as tests too, so that what it shows is also true."""

from __future__ import annotations

import select
from collections.abc import Mapping, Sequence
from typing import assert_type

import numpy as np
import pytest
import torch
from attrs import define, field

from disagg_kv.channels import ZmqChannel
from disagg_kv.core import Phase
from disagg_kv.endpoints import (
    DecodeEndpoint,
    Delivery,
    Expectation,
    ForwardPass,
    PrefillEndpoint,
    Receiver,
    Reception,
)
from disagg_kv.errors import ConfigurationError, DisaggKVError, TransportError
from disagg_kv.geometry import CacheSpec, Component, Group, Holding, PageTable, Plane, Shard, shard
from disagg_kv.ids import GroupId, LayerId, Peer, RegionId, RoomId, Ticket, VirtualOffset
from disagg_kv.memory import Buffer, Event, PagedPool
from disagg_kv.planning import Writes
from disagg_kv.prefix import HashPrefixIndex, PageAllocator, Pages, PrefixLock
from disagg_kv.rendezvous import Source, StaticRendezvous
from disagg_kv.staging import Lease, RingStagingAllocator, StagingAllocator
from disagg_kv.transports import (
    Capabilities,
    PeerLost,
    Settled,
    SupportsAllocate,
    Transport,
    WriteEnded,
    register_transport,
    registry,
    transport,
)


@define
class Nowhere:
    """A transport outside the library: it inherits from nothing, and every write ends as lost."""

    name: str = "nowhere"
    caps: Capabilities = field(factory=Capabilities)
    tickets: list[Ticket] = field(factory=list)

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        """Number them."""
        return [RegionId(i) for i in range(len(buffers))]

    def peer_of(self, descriptor: bytes) -> Peer:
        """Everyone is the same."""
        return Peer(b"nobody")

    def local_descriptor(self) -> bytes:
        """Nothing to tell."""
        return b""

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """Everyone is the same."""
        return Peer(b"nobody")

    def disconnect(self, peer: Peer) -> None:
        """Nothing to forget."""

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        """Take a ticket."""
        self.tickets.append(Ticket(len(self.tickets)))
        return self.tickets[-1]

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        """Every ticket failed."""
        ended = [WriteEnded(ticket, TransportError("nowhere to write to"), quiesced=True) for ticket in self.tickets]
        self.tickets.clear()
        return ended

    def close(self, drain_s: float) -> Sequence[Ticket]:
        """All is quiet."""
        return ()


def test_a_class_that_inherits_from_nothing_is_a_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})  # so that the name is gone after this test
    register_transport("nowhere", Nowhere)
    mine = transport("nowhere")
    assert_type(mine, Transport)
    ticket = mine.submit(mine.connect(b"", 1.0), Writes.one(0, 0, 0, 0, 8))
    assert_type(ticket, Ticket)
    events = mine.poll()
    assert_type(events, Sequence[WriteEnded | Settled | PeerLost])
    (ended,) = events
    match ended:
        case WriteEnded(error=error):
            assert_type(error, Exception | None)
            assert isinstance(error, TransportError)
        case Settled() | PeerLost():
            raise AssertionError(ended)


def test_optional_powers_are_protocols_that_narrow() -> None:
    made = transport("shm")
    if isinstance(made, SupportsAllocate):
        assert_type(made.allocate(4096), Buffer)
    made.close(0.0)


def test_geometry_speaks_in_ids_and_ranges() -> None:
    spec = CacheSpec.kv(4, 8, 64, "bfloat16", v_head_dim=32)
    mine = shard(spec, tp=2, rank=1)
    assert_type(mine, Shard)
    assert_type(mine.layers(), tuple[LayerId, ...])
    assert_type(mine.units(LayerId(0), "k"), tuple[range, ...])
    assert mine.units(LayerId(3), "v") == (range(4, 8),)
    table = PageTable(GroupId("kv"), [3, 1, 2])
    assert_type(table.first, int)


def test_plain_numbers_and_text_are_layers_and_groups() -> None:
    """What comes back has the library's types."""
    k = Component("k", "float16", 2, 16)
    spec = CacheSpec({0: [k], 1: (k,)})
    assert spec == CacheSpec({LayerId(0): [k], LayerId(1): (k,)})
    assert_type(spec.component(1, "k"), Component)
    mine = shard(spec, layers=range(2))
    assert mine.units(0, "k") == (range(2),)
    assert Shard((Holding("k", [0, 1], range(2)),)) == mine
    tables = [PageTable([3, 1]), PageTable("kv", [3, 1]), PageTable(GroupId("kv"), np.array([3, 1]))]
    assert_type(tables[0].group, GroupId)
    assert tables[0] == tables[1] == tables[2]
    for held in (Expectation(8, tables, held={"kv": 4}).held, Expectation(8, tables, held={GroupId("kv"): 4}).held):
        assert_type(held, Mapping[GroupId, int])
        assert held[GroupId("kv")] == 4
    plane = Plane(0, "k", "kv", 0, 0, 64, 32, 16)
    assert_type(plane.layer, LayerId)
    assert_type(Group("kv", 4, 8).id, GroupId)
    tensors = {layer: {"k": torch.zeros(2, 4, 2, 8, dtype=torch.float16)} for layer in range(2)}
    pool = PagedPool.from_tensors(spec, mine, tensors, group={0: "a", 1: "b"})
    assert_type(pool.site.group("a"), Group)
    assert [group.id for group in pool.site.groups] == ["a", "b"]
    PagedPool.from_tensors(
        spec,
        mine,
        {LayerId(0): tensors[0], LayerId(1): tensors[1]},
        group={LayerId(0): GroupId("a"), LayerId(1): GroupId("b")},
    )
    assert [g.id for g in PagedPool.allocate(spec, mine, pages=2, page_size=4, group="mine").site.groups] == ["mine"]


def _declared(step: ForwardPass) -> bool:
    """Layers of a pass are plain numbers, too."""
    return step.layer_ready(0) and step.layer_ready(LayerId(1))


def test_a_ring_is_an_allocator_and_its_leases_may_be_none() -> None:
    ring: StagingAllocator = RingStagingAllocator(4096)
    lease = ring.reserve(100)
    assert_type(lease, Lease | None)
    assert lease is not None
    assert_type(lease.start, VirtualOffset)
    assert_type(lease.end, VirtualOffset)
    assert_type(lease.offset, int)


def test_errors_are_one_tree_and_bad_input_is_a_value_error() -> None:
    error: DisaggKVError = ConfigurationError("no")
    assert isinstance(error, ValueError)


def test_a_decode_endpoint_is_a_receiver() -> None:
    spec = CacheSpec.kv(1, 1, 8, "float16")
    rendezvous = StaticRendezvous()

    def pool() -> PagedPool:
        return PagedPool.allocate(spec, shard(spec), pages=2, page_size=4)

    sender = PrefillEndpoint(
        pool(), transport=transport("shm"), channel=ZmqChannel(), rendezvous=rendezvous, instance="p"
    )
    receiver: Receiver = DecodeEndpoint(
        pool(), transport=transport("shm"), channel=ZmqChannel(), rendezvous=rendezvous, instance="d"
    )
    try:
        delivery: Delivery = sender.open(RoomId(b"room"))
        assert_type(delivery.phase, Phase)
        assert_type(delivery.error, DisaggKVError | None)
        reception = receiver.open(RoomId(b"room"), Source("p"))
        assert_type(reception, Reception)
        assert_type(reception.released, bool)
        deliveries: Sequence[Delivery] = sender.poll()
        assert {one.room for one in deliveries} <= {delivery.room}
        assert_type(receiver.poll(), Sequence[Reception])
    finally:
        sender.close(0.0)
        receiver.close(0.0)


def test_an_endpoint_is_what_event_loops_wait_for() -> None:
    spec = CacheSpec.kv(num_layers=1, kv_heads=1, head_dim=8, dtype="float16")
    pool = PagedPool.allocate(spec, shard(spec), pages=2, page_size=4)
    endpoint = PrefillEndpoint(
        pool, transport=transport("shm"), channel=ZmqChannel(), rendezvous=StaticRendezvous(), instance="p"
    )
    try:
        assert_type(endpoint.fileno(), int)
        assert select.select([endpoint], [], [], 0) == ([], [], [])
    finally:
        endpoint.close(0.0)


def test_a_prefix_index_and_an_allocator_are_what_the_protocols_say() -> None:
    """An engine's own would be used the same way."""
    index = HashPrefixIndex(2, 4)
    pages: Pages = PageAllocator(range(4))
    lock = index.match([1, 2, 3])
    assert_type(lock, PrefixLock)
    pages.give(index.insert(lock, [1, 2, 3], pages.take(1)))
    assert (lock.rows, pages.free) == (2, 3)
