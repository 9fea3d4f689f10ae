"""What several transports as one promise beyond the conformance suite."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import msgspec
import numpy as np
import pytest

from bench.emulated import emulate
from disagg_kv.errors import (
    ConfigurationError,
    IncompatiblePeerError,
    PeerLostError,
    RegistrationError,
    RemoteProtocolError,
    TransportError,
)
from disagg_kv.ids import Peer, RegionId, Ticket
from disagg_kv.memory import Buffer, bytes_of
from disagg_kv.planning import Writes
from disagg_kv.testing.ends import plain
from disagg_kv.testing.pair import noise
from disagg_kv.transports import (
    InprocTransport,
    PeerLost,
    Settled,
    ShmTransport,
    SupportsAllocate,
    SupportsFlags,
    SupportsMapping,
    Transport,
    WriteEnded,
    combine,
    decode,
    encode,
    pack,
)
from disagg_kv.transports.combining import combined, for_peer, lane_of, said_name
from disagg_kv.transports.lane_offers import Offer
from disagg_kv.transports.lanes import CombinedTransport


class Unreachable(InprocTransport):
    """A lane that reaches no peer."""

    name = "far"

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """Refuses."""
        raise TransportError("no route")


class Careless(InprocTransport):
    """A user's lane, whose adapter lets the errors of its library through."""

    name = "careless"
    fails: frozenset[str] = frozenset()

    def _may_fail(self, what: str) -> None:
        if what in self.fails:
            raise OSError(f"the card failed: {what}")

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        """May fail."""
        self._may_fail("register")
        return super().register(buffers)

    def deregister(self, regions: Sequence[RegionId]) -> None:
        """May fail."""
        self._may_fail("deregister")
        super().deregister(regions)

    def peer_of(self, descriptor: bytes) -> Peer:
        """May fail."""
        self._may_fail("peer_of")
        return super().peer_of(descriptor)

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """May fail."""
        self._may_fail("connect")
        return super().connect(descriptor, timeout_s)


class Picky(InprocTransport):
    """A lane that registers no memory from 4,096 bytes on."""

    name = "picky"

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        """Refuses large ones."""
        if any(buffer.nbytes >= 4096 for buffer in buffers):
            raise RegistrationError("too large")
        return super().register(buffers)


class Odd(InprocTransport):
    """A lane whose regions have other numbers."""

    name = "odd"

    def __init__(self) -> None:
        super().__init__()
        super().register([plain(np.zeros(16, np.uint8))])


class Broken(ShmTransport):
    """A lane that may break: its writes end in no poll, and then its poll raises."""

    name = "brittle"
    broken = False
    slow = False

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        """Raises."""
        if self.broken:
            raise OSError("the card is gone")
        return () if self.slow else super().poll()


def one(local: int, remote: int, nbytes: int) -> Writes:
    """A single write."""
    return Writes.one(RegionId(local), 0, RegionId(remote), 0, nbytes)


def memory(transport: Transport, nbytes: int = 1000) -> Buffer:
    """Memory that peers can write to."""
    if isinstance(transport, SupportsAllocate):
        return transport.allocate(nbytes)
    return plain(np.zeros(nbytes, np.uint8))


def ends(transport: Transport, nbytes: int = 1000) -> tuple[RegionId, Buffer]:
    """Register some memory of noise."""
    buffer = memory(transport, nbytes)
    bytes_of(buffer)[:] = noise(nbytes)
    (region,) = transport.register([buffer])
    return region, buffer


def crosses(source: Transport, target: Transport) -> str:
    """Move bytes from one to another; the lane that did it."""
    here, _ = ends(source)
    there, buffer = ends(target)
    bytes_of(buffer)[:] = 0
    peer = source.connect(for_peer(source, target.name, target.local_descriptor()), 1.0)
    ticket = source.submit(peer, one(here, there, 1000))
    assert WriteEnded(ticket) in list(source.poll())
    assert (bytes_of(buffer) == noise(1000)).all()
    return lane_of(source, peer).name


@pytest.mark.parametrize(
    ("lanes", "why"),
    [
        ([], "1 to 8 transports are needed, not 0"),
        ([InprocTransport()] * 9, "1 to 8 transports are needed, not 9"),
        ([InprocTransport(), ShmTransport(), InprocTransport()], "more than one 'inproc'"),
        ([[InprocTransport()], ShmTransport()], "number 0 is itself a list"),
        ([Odd(), combine([InprocTransport(), ShmTransport()])], "number 1 is itself a list"),
        ([ShmTransport(), Broken()], "shm and brittle write only to memory of their own"),
        ("shm", "a list of transports is needed"),
        ([InprocTransport(), None], "number 1: a transport is needed"),
    ],
)
def test_lists_that_cannot_be_are_refused(lanes: Sequence[Transport], why: str) -> None:
    """Each by name."""
    with pytest.raises(ConfigurationError, match=why):
        combine(lanes)


def test_a_lane_may_not_be_named_like_several() -> None:
    """The sign between names of lanes belongs to no name."""

    class Bad(InprocTransport):
        name = "a+b"

    with pytest.raises(ConfigurationError, match=r"'a\+b' has a '\+'"):
        combine([Bad(), ShmTransport()])


def test_one_transport_stays_itself() -> None:
    """There is nothing to choose."""
    only = InprocTransport()
    assert combine([only]) is only


def test_several_have_the_powers_of_any_and_the_promises_of_the_weakest() -> None:
    """An endpoint asks for both."""
    neither = combine([emulate(InprocTransport(), 1e9), Slow()])
    assert not isinstance(neither, SupportsAllocate | SupportsMapping | SupportsFlags)
    assert isinstance(combine([emulate(ShmTransport(), 1e9), Slow()]), SupportsAllocate)
    both = combine([InprocTransport(), ShmTransport()])
    assert isinstance(both, SupportsAllocate)
    assert isinstance(both, SupportsMapping)
    assert isinstance(both, SupportsFlags)
    caps = combine([Slow(), ShmTransport()]).caps
    assert (caps.own_memory_only, caps.in_process_only, caps.max_batch) == (True, False, 7)
    assert (caps.drain_s, combine([Unknown(), ShmTransport()]).caps.drain_s) == (3.0, None)


class Slow(InprocTransport):
    """Promises less; does not map."""

    name = "slow"
    caps = attrs.evolve(InprocTransport.caps, max_batch=7, drain_s=3.0)
    map = None  # type: ignore[assignment]


class Unknown(InprocTransport):
    """Never sure that its writes have landed."""

    name = "unknown"
    caps = attrs.evolve(InprocTransport.caps, drain_s=None)


def test_each_peer_gets_the_first_lane_that_reaches_it() -> None:
    """Peers with lanes, with one transport, and the other way round; the reason says why not an earlier one."""
    both = combine([Unreachable(), InprocTransport(), ShmTransport()])
    assert crosses(both, combine([ShmTransport(), InprocTransport()])) == "inproc"
    assert crosses(both, ShmTransport()) == "shm"
    assert crosses(both, combine([ShmTransport(), Odd()])) == "shm"
    assert crosses(InprocTransport(), both) == "inproc"
    other = combine([Unreachable(), ShmTransport()])
    assert crosses(both, other) == "shm"
    assert isinstance(both, CombinedTransport)
    lane = both.lane(both.peer_of(other.local_descriptor()))
    assert lane.reason == "not far: no route; not inproc: the peer does not offer it"
    with pytest.raises(TransportError, match="no peer"):
        both.lane(Peer(bytes(16)))


def test_a_peer_that_shares_no_lane_is_refused_with_all_lanes_of_both() -> None:
    """And one that no shared lane reaches, with the reason for each."""
    both = combined([InprocTransport(), ShmTransport()], {"nixl": "not installed"})
    other = combine([Odd(), Unreachable()])
    with pytest.raises(IncompatiblePeerError, match=r"inproc, shm, nixl \(not installed\), theirs is odd, far"):
        both.connect(other.local_descriptor(), 1.0)
    with pytest.raises(IncompatiblePeerError, match="ours is odd, theirs is nixl"):
        for_peer(Odd(), both.name, both.local_descriptor())
    with pytest.raises(IncompatiblePeerError, match=r"ours is inproc\+shm, theirs is odd"):
        for_peer(both, "odd", Odd().local_descriptor())
    far = combine([Unreachable(), Odd()])
    with pytest.raises(TransportError, match=r"far \(no route\), odd \(the peer does not offer it\)"):
        far.connect(combine([Unreachable(), ShmTransport()]).local_descriptor(), 1.0)
    assert said_name(both) == "inproc+shm (without nixl (not installed))"


def test_memory_that_a_lane_cannot_register_excludes_that_lane() -> None:
    """Both sides say so, and the other lanes go on. Memory that no lane can register is refused."""
    both = combine([Picky(), ShmTransport()])
    assert isinstance(both, CombinedTransport)
    assert crosses(both, Picky()) == "picky"
    ends(both, 5000)
    assert both.excluded == {"picky": "it cannot register the memory: too large"}
    assert crosses(both, combine([Picky(), ShmTransport()])) == "shm"
    with pytest.raises(IncompatiblePeerError, match=r"picky \(it cannot register the memory: too large\), shm"):
        combine([Picky(), InprocTransport()]).connect(both.local_descriptor(), 1.0)
    alone = combine([Picky(), Unreachable()])
    with pytest.raises(RegistrationError, match="abacus"):
        alone.register([Buffer(1 << 20, 10, "abacus:0")])
    single = combined([Picky()])
    with pytest.raises(RegistrationError, match=r"no transport can register this memory: picky \(too large\)"):
        ends(single, 5000)
    assert not single.excluded
    assert crosses(single, Picky()) == "picky"


def test_a_lane_may_number_regions_in_its_own_way() -> None:
    """Writes and mappings reach the right region; a side without lanes refuses such numbers."""
    source, target = combine([Odd(), ShmTransport()]), combine([Odd(), ShmTransport()])
    assert [crosses(source, target) for _ in range(3)] == ["odd"] * 3
    assert isinstance(source, SupportsMapping)
    peer = source.peer_of(target.local_descriptor())
    assert source.unmappable(peer, [RegionId(2)], "cpu") is None
    assert (bytes_of(source.map(peer, RegionId(2), "cpu")) == noise(1000)).all()
    assert "region 9" in str(source.unmappable(peer, [RegionId(9)], "cpu"))
    for wrong in (one(0, 9, 10), one(9, 0, 10)):
        with pytest.raises(RegistrationError, match="region 9"):
            source.submit(peer, wrong)
    with pytest.raises(TransportError, match="other numbers"):
        for_peer(Odd(), target.name, target.local_descriptor())


def test_a_peer_whose_lane_does_not_map_is_refused_by_name() -> None:
    """Other peers are mapped."""
    source = combine([ShmTransport(), Slow()])
    other, near = Slow(), combine([ShmTransport()])
    crosses(source, other)
    crosses(source, near)
    assert isinstance(source, SupportsMapping)
    peer = source.peer_of(for_peer(source, "slow", other.local_descriptor()))
    assert "transport 'slow' does not map memory of peers (not shm: the peer" in str(source.unmappable(peer, [], "cpu"))
    with pytest.raises(RegistrationError, match="does not map"):
        source.map(peer, RegionId(0), "cpu")
    mapped = source.map(source.peer_of(for_peer(source, "shm", near.local_descriptor())), RegionId(0), "cpu")
    assert mapped.nbytes == 1000
    with pytest.raises(TransportError, match="no peer"):
        source.map(Peer(bytes(16)), RegionId(0), "cpu")


def test_a_lane_that_fails_loses_its_peers_and_no_others() -> None:
    """Its writes end, not known to be quiet; later peers get another lane."""
    brittle = Broken()
    both = combine([brittle, InprocTransport()])
    assert isinstance(both, CombinedTransport)
    lost, kept = Broken(), InprocTransport()
    assert crosses(both, lost) == "brittle"
    assert crosses(both, kept) == "inproc"
    peer = both.peer_of(for_peer(both, "brittle", lost.local_descriptor()))
    brittle.slow = True
    ticket = both.submit(peer, one(0, 0, 10))
    brittle.broken = True
    events = both.poll()
    assert events[-1] == PeerLost(peer)
    assert isinstance(events[0], WriteEnded)
    assert (events[0].ticket, events[0].quiesced, len(events)) == (ticket, False, 2)
    assert "it has failed: the card is gone" in str(events[0].error)
    assert both.lane(peer).lost.startswith("it has failed: ")
    assert both.poll() == []
    with pytest.raises(TransportError, match="the card is gone"):
        both.submit(peer, one(0, 0, 10))
    with pytest.raises(PeerLostError, match="the card is gone"):
        both.connect(for_peer(both, "brittle", lost.local_descriptor()), 1.0)
    assert crosses(both, kept) == "inproc"
    assert crosses(both, combine([Broken(), InprocTransport()])) == "inproc"


def test_no_peer_gets_the_lane_of_another_one() -> None:
    """A descriptor is no secret: with another peer's inside, it would receive or end that one's writes."""
    source, victim = combine([InprocTransport(), ShmTransport()]), combine([InprocTransport(), ShmTransport()])
    crosses(source, victim)
    stolen = decode(victim.local_descriptor(), "lanes")
    forged = encode(attrs.evolve(stolen, incarnation=Peer(b"f" * 16)))
    with pytest.raises(RemoteProtocolError, match="is that of "):
        source.connect(forged, 1.0)
    source.disconnect(Peer(b"f" * 16))
    assert crosses(source, victim) == "inproc"
    source.disconnect(source.peer_of(victim.local_descriptor()))
    assert source.connect(forged, 1.0) == b"f" * 16


@pytest.mark.parametrize("offers", [(), (Offer("shm"), Offer("shm")), tuple(Offer(f"{i}") for i in range(20))])
def test_impossible_lanes_of_a_peer_are_refused(offers: tuple[Offer, ...]) -> None:
    """None, the same twice, and too many."""
    both = combine([InprocTransport(), ShmTransport()])
    there = decode(both.local_descriptor(), "lanes")
    with pytest.raises((RemoteProtocolError, IncompatiblePeerError)):
        both.connect(encode(attrs.evolve(there, blob=pack(offers))), 1.0)
    assert msgspec.msgpack.decode(pack(offers)) is not None


def test_an_end_is_a_fence_only_where_there_is_no_other_lane() -> None:
    """The peer may have written over the other one."""
    source = combine([InprocTransport(), ShmTransport()])
    alone, several = InprocTransport(), combine([InprocTransport(), ShmTransport()])
    for target in (alone, several):
        crosses(source, target)
    peers = [source.peer_of(for_peer(source, t.name, t.local_descriptor())) for t in (alone, several)]
    for target in (alone, several):
        target.close(0.0)
    assert sorted(source.poll(), key=lambda event: not getattr(event, "fenced", False)) == [
        PeerLost(peers[0], fenced=True),
        PeerLost(peers[1], fenced=False),
    ]


def test_a_lane_that_cannot_be_closed_keeps_no_other_open() -> None:
    """Its error is raised once all are closed; nothing works any more."""

    class Stuck(InprocTransport):
        name = "stuck"

        def close(self, drain_s: float) -> Sequence[Ticket]:
            raise TransportError("stuck")

    last = InprocTransport()
    both = combine([Stuck(), last])
    with pytest.raises(TransportError, match="stuck"):
        both.close(0.0)
    with pytest.raises(PeerLostError):
        InprocTransport().connect(last.local_descriptor(), 0.0)
    with pytest.raises(TransportError, match="is closed"):
        ends(both)


def test_a_lane_that_has_failed_since_a_peer_was_told_of_it_still_delays_that_peers_end() -> None:
    """The peer may still write over it, so what the other lane says of the peer's end is no fence."""

    class Late(Broken):
        caps = attrs.evolve(Broken.caps, drain_s=30.0)

    late = Late()
    ours, theirs = combine([InprocTransport(), late]), combine([Late(), InprocTransport()])
    assert isinstance(ours, CombinedTransport)
    told = ours.local_descriptor()
    late.broken = True
    ours.poll()
    peer = ours.connect(theirs.local_descriptor(), 1.0)
    assert theirs.connect(told, 1.0) == ours.peer_of(told)
    assert ours.lane(peer).name == "inproc"
    assert ours.lane(peer).caps.drain_s == 30.0
    theirs.close(0.0)
    assert ours.poll() == [PeerLost(peer, fenced=False)]
    fresh, other = combine([InprocTransport(), Late()]), combine([Late(), InprocTransport()])
    assert isinstance(fresh, CombinedTransport)
    fresh._carriers[1].transport.broken = True  # type: ignore[attr-defined]
    fresh.poll()
    peer = fresh.connect(other.local_descriptor(), 1.0)
    assert fresh.lane(peer).caps.drain_s == 0.0, "no peer was offered the lane"


@pytest.mark.parametrize("what", ["connect", "peer_of", "register"])
def test_a_lane_that_raises_a_foreign_error_loses_no_other_lane(what: str) -> None:
    """The peer gets the next lane, and the reason names the error."""
    careless = Careless()
    careless.fails = frozenset({what})
    source, target = combine([careless, InprocTransport()]), combine([Careless(), InprocTransport()])
    assert crosses(source, target) == "inproc"
    peer = source.peer_of(target.local_descriptor())
    begins = "it cannot register the memory: " if what == "register" else ""
    assert lane_of(source, peer).reason == f"not careless: {begins}OSError: the card failed: {what}"


def test_a_peer_that_is_reached_over_no_lane_for_a_foreign_error_can_be_connected_later() -> None:
    """The error has the foreign one as its reason, and nothing of the attempt is left."""
    careless = Careless()
    careless.fails = frozenset({"connect"})
    source, target = combine([careless, Unreachable()]), combine([Careless(), Unreachable()])
    for side in (source, target):
        ends(side)
    with pytest.raises(TransportError, match=r"careless \(OSError: the card failed: connect\)") as caught:
        source.connect(target.local_descriptor(), 1.0)
    assert caught.value.__cause__ is not None
    assert isinstance(caught.value.__cause__.__cause__, OSError)
    careless.fails = frozenset()
    assert lane_of(source, source.connect(target.local_descriptor(), 1.0)).name == "careless"


def test_memory_is_deregistered_from_every_lane_though_one_raises_a_foreign_error() -> None:
    careless, other = Careless(), InprocTransport()
    several = combine([careless, other])
    region, _ = ends(several)
    careless.fails = frozenset({"deregister"})
    with pytest.raises(OSError, match="the card failed: deregister"):
        several.deregister([region])
    assert not other._table.items()
