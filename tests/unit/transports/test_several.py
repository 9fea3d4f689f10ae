"""The transports of an endpoint: what each peer gets, and that one transport's end leaves the others alone."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import pytest

from bench.emulated import emulate
from disagg_kv.errors import (
    ConfigurationError,
    DisaggKVError,
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
    Carrier,
    Failed,
    InprocTransport,
    PeerLost,
    Settled,
    ShmTransport,
    Transport,
    Transports,
    WriteEnded,
    pack,
)
from disagg_kv.transports.several import Offer

NBYTES = 1000


class Unreachable(InprocTransport):
    """A transport that reaches no peer."""

    name = "far"

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """Refuses."""
        raise TransportError("no route")


class Careless(InprocTransport):
    """A user's transport, whose adapter lets the errors of its library through."""

    name = "careless"
    fails: frozenset[str] = frozenset()

    def _may_fail(self, what: str) -> None:
        if what in self.fails:
            raise OSError(f"the card failed: {what}")

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        """May fail."""
        self._may_fail("register")
        return super().register(buffers)

    def peer_of(self, descriptor: bytes) -> Peer:
        """May fail."""
        self._may_fail("peer_of")
        return super().peer_of(descriptor)

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """May fail."""
        self._may_fail("connect")
        return super().connect(descriptor, timeout_s)


class Picky(InprocTransport):
    """A transport that registers no memory from 4,096 bytes on."""

    name = "picky"

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        """Refuses large ones."""
        if any(buffer.nbytes >= 4096 for buffer in buffers):
            raise RegistrationError("too large")
        return super().register(buffers)


class Odd(InprocTransport):
    """A transport that calls regions by other numbers."""

    name = "odd"

    def __init__(self) -> None:
        super().__init__()
        super().register([plain(np.zeros(16, np.uint8))])


class Broken(ShmTransport):
    """A transport that may break: then its poll raises."""

    name = "brittle"
    broken = False

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        """Raises."""
        if self.broken:
            raise OSError("the card is gone")
        return super().poll()


class Slow(InprocTransport):
    """Promises less; does not map."""

    name = "slow"
    caps = attrs.evolve(InprocTransport.caps, max_batch=7, drain_s=3.0)
    map = None  # type: ignore[assignment]


class Unknown(InprocTransport):
    """Never sure that its writes have landed."""

    name = "unknown"
    caps = attrs.evolve(InprocTransport.caps, drain_s=None)


def registered(*made: Transport, nbytes: int = NBYTES) -> tuple[Transports, Buffer]:
    """Transports with a region of noise, which peers can write to."""
    several = Transports(made)
    buffer = plain(np.zeros(nbytes, np.uint8)) if several.allocator is None else several.allocator(nbytes)
    bytes_of(buffer)[:] = noise(nbytes)
    assert len(several.register([buffer])) == 1
    return several, buffer


def connect(source: Transports, target: Transports) -> Carrier:
    """What carries writes from one to another."""
    return source.connect(source.shared(target.offers()), 1.0)


def crosses(source: Transports, target: Transports, there: Buffer) -> Carrier:
    """Move bytes from one to another; what did it."""
    bytes_of(there)[:] = 0
    carrier = connect(source, target)
    ticket = carrier.transport.submit(carrier.peer, Writes.one(RegionId(0), 0, RegionId(0), 0, NBYTES))
    assert (carrier.transport, WriteEnded(ticket)) in list(source.poll())
    assert (bytes_of(there) == noise(NBYTES)).all()
    return carrier


@pytest.mark.parametrize(
    ("several", "why"),
    [
        ([], "1 to 8 transports are needed, not 0"),
        ([InprocTransport()] * 9, "1 to 8 transports are needed, not 9"),
        ([InprocTransport(), ShmTransport(), InprocTransport()], "more than one 'inproc'"),
        ([[InprocTransport()], ShmTransport()], "number 0 is itself a list"),
        ([Odd(), Transports([InprocTransport(), ShmTransport()])], "number 1 is itself a list"),
        ([ShmTransport(), Broken()], "shm and brittle write only to memory of their own"),
        ("shm", "a list of transports is needed"),
        ([InprocTransport(), None], "number 1: a transport is needed"),
    ],
)
def test_lists_that_cannot_be_are_refused(several: Sequence[Transport], why: str) -> None:
    """Each by name."""
    with pytest.raises(ConfigurationError, match=why):
        Transports(several)


def test_a_transport_may_not_be_named_like_several() -> None:
    """The sign between names belongs to no name."""

    class Bad(InprocTransport):
        name = "a+b"

    with pytest.raises(ConfigurationError, match=r"'a\+b' has a '\+'"):
        Transports([Bad(), ShmTransport()])


def test_several_say_what_an_endpoint_asks_of_all() -> None:
    """Whether one maps, whose memory peers write to, the longest drain, and the dearest link."""
    neither = Transports([emulate(InprocTransport(), 1e9), Slow()])
    assert (neither.maps, neither.allocator, neither.drain_s) == (False, None, 3.0)
    shm = ShmTransport()
    both = Transports([InprocTransport(), shm])
    assert both.maps
    assert both.allocator == shm.allocate
    assert both.link == shm.caps.link
    assert Transports([Unknown(), shm]).drain_s is None
    assert (len(both), both.name, str(both)) == (2, "inproc+shm", "inproc+shm")
    assert str(Transports([shm], {"nixl": "not installed"})) == "shm (without nixl (not installed))"


def test_each_peer_gets_the_first_transport_that_reaches_it() -> None:
    """Peers with several, and with one; the reason says why not an earlier one."""
    source, _ = registered(Unreachable(), InprocTransport(), ShmTransport())
    target = registered(ShmTransport(), InprocTransport())
    assert crosses(source, *target).name == "inproc"
    assert crosses(source, *registered(ShmTransport())).name == "shm"
    only = crosses(registered(InprocTransport())[0], *target)
    assert (only.name, only.reason) == ("inproc", "the only transport")
    far = crosses(source, *registered(Unreachable(), ShmTransport()))
    assert (far.name, far.reason) == ("shm", "not far: no route; not inproc: the peer does not offer it")
    assert crosses(registered(ShmTransport(), InprocTransport())[0], *target).reason == "the first transport"


def test_a_peer_that_shares_no_transport_is_refused_with_those_of_both() -> None:
    """And one that none reaches, with the reason for each."""
    both = Transports([InprocTransport(), ShmTransport()], {"nixl": "not installed"})
    with pytest.raises(IncompatiblePeerError, match=r"inproc, shm, nixl \(not installed\), theirs is odd, far"):
        both.shared(Transports([Odd(), Unreachable()]).offers())
    with pytest.raises(IncompatiblePeerError, match=r"ours is odd, theirs is nixl \(not installed\), inproc, shm"):
        Transports([Odd()]).shared(both.offers())
    far, there = Transports([Unreachable(), Odd()]), Transports([Unreachable(), ShmTransport()])
    with pytest.raises(TransportError, match=r"far \(no route\), odd \(the peer does not offer it\)"):
        connect(far, there)


def test_memory_that_a_transport_cannot_register_excludes_that_transport() -> None:
    """Both sides say so, and the others go on. Memory that none can register is refused, and none keeps it."""
    both, buffer = registered(Picky(), ShmTransport(), nbytes=5000)
    assert both.excluded == {"picky": "it cannot register the memory: too large"}
    assert connect(both, registered(Picky(), ShmTransport())[0]).name == "shm"
    with pytest.raises(IncompatiblePeerError, match=r"picky \(it cannot register the memory: too large\), shm"):
        Transports([Picky(), InprocTransport()]).shared(both.offers())
    with pytest.raises(RegistrationError, match="abacus"):
        Transports([Picky(), Unreachable()]).register([Buffer(1 << 20, 10, "abacus:0")])
    with pytest.raises(RegistrationError, match=r"no transport can register this memory: picky \(.*too large\)"):
        Transports([Picky()]).register([buffer])


def test_memory_that_overlaps_is_the_callers_fault_and_excludes_no_transport() -> None:
    """As that which an earlier attempt has registered, which a later transport has refused."""

    class Refuses(InprocTransport):
        name = "refuses"

        def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
            raise ConfigurationError("an option of mine is wrong")

    used = ShmTransport()
    buffer = used.allocate(4096)
    with pytest.raises(ConfigurationError, match="an option of mine is wrong"):
        Transports([used, Refuses()]).register([buffer])
    lists: list[list[Transport]] = [[used, InprocTransport()], [InprocTransport(), used], [used]]
    for made in lists:
        several = Transports(made)
        with pytest.raises(ConfigurationError, match="overlaps the region of 4096 bytes"):
            several.register([buffer])
        assert several.excluded == {}
    with pytest.raises(ConfigurationError, match="overlaps the region of 4096 bytes"):
        Transports([ShmTransport(), InprocTransport()]).register([buffer, buffer])


def test_a_list_of_a_caller_stays_open_where_it_is_refused() -> None:
    """Nothing of it is closed: the caller may give it to another endpoint."""
    shm, inproc = ShmTransport(), InprocTransport()
    with pytest.raises(ConfigurationError, match=r"no transport moves memory on 'cuda:0': shm .*, inproc"):
        Transports([shm, inproc]).on_device("cuda:0")
    assert len(Transports([shm, inproc]).register([shm.allocate(4096)])) == 1


def test_a_transport_that_calls_memory_by_other_numbers_takes_no_peers() -> None:
    """Alone, it may."""
    alone, there = registered(Odd()), registered(InprocTransport())
    assert alone[0].name == "odd"
    both, _ = registered(InprocTransport(), Odd())
    assert both.excluded == {"odd": "it calls the memory [1], and an earlier one calls it [0]"}
    assert connect(both, there[0]).name == "inproc"


def test_a_transport_that_fails_takes_no_peers_and_the_others_go_on() -> None:
    """The endpoint is told once."""
    brittle, kept = Broken(), registered(InprocTransport())
    source, _ = registered(brittle, InprocTransport())
    there, (near, _) = registered(Broken(), InprocTransport()), kept
    assert crosses(source, *there).name == "brittle"
    assert source.failed(brittle) == ""
    brittle.broken = True
    ((failed, report),) = source.poll()
    assert (failed, report) == (brittle, Failed("brittle: it has failed: the card is gone"))
    assert source.failed(brittle) == "brittle: it has failed: the card is gone"
    assert source.poll() == []
    assert crosses(source, *there).name == "inproc"
    assert connect(source, near).reason == "not brittle: it has failed: the card is gone"
    with pytest.raises(IncompatiblePeerError, match="it has failed"):
        source.shared(registered(Broken())[0].offers())


def test_an_only_transport_that_raises_is_polled_again() -> None:
    """There is no other one that could go on."""
    brittle = Broken()
    alone, _ = registered(brittle)
    brittle.broken = True
    with pytest.raises(OSError, match="the card is gone"):
        alone.poll()
    brittle.broken = False
    assert alone.poll() == []


@pytest.mark.parametrize(
    "offers",
    [b"", b"junk", pack(()), pack((Offer("shm"), Offer("shm"))), pack(tuple(Offer(f"{i}") for i in range(20)))],
)
def test_impossible_offers_of_a_peer_are_refused(offers: bytes) -> None:
    """None, the same twice, and too many."""
    with pytest.raises((RemoteProtocolError, IncompatiblePeerError)):
        Transports([InprocTransport(), ShmTransport()]).shared(offers)


def test_what_cannot_be_read_of_one_transport_leaves_the_others() -> None:
    """Where nothing can be read, the error is that of a peer that breaks the protocol."""
    source = Transports([InprocTransport(), ShmTransport()])
    good = registered(ShmTransport())[0]
    offer = Offer("shm", next(iter(good)).local_descriptor())
    shared = source.shared(pack((Offer("inproc", b"junk"), offer)))
    assert source.connect(shared, 1.0).reason.startswith("not inproc: not a transport descriptor")
    with pytest.raises(RemoteProtocolError, match="not a transport descriptor"):
        source.shared(pack((Offer("inproc", b"junk"), Offer("shm", b"junk"))))


def test_an_end_is_a_fence_only_where_there_is_no_other_transport() -> None:
    """The peer may have written over the other one, so its last writes may also need the other one's time."""
    source, _ = registered(InprocTransport(), ShmTransport())
    alone = connect(source, registered(InprocTransport())[0]) if source.offers() else None
    assert alone is not None
    assert alone.alone
    assert not connect(source, registered(InprocTransport(), ShmTransport())[0]).alone


def test_a_transport_that_has_failed_since_a_peer_was_told_of_it_still_delays_that_peers_end() -> None:
    """The peer may still write over it. One that no peer was told of does not."""

    class Late(Broken):
        caps = attrs.evolve(Broken.caps, drain_s=30.0)

    for told in (True, False):
        late = Late()
        ours, _ = registered(InprocTransport(), late)
        theirs, _ = registered(Late(), InprocTransport())
        if told:
            ours.offers()
        late.broken = True
        ours.poll()
        if not told:
            ours.offers()
        carrier = connect(ours, theirs)
        assert (carrier.name, carrier.caps.drain_s, carrier.alone) == ("inproc", 30.0 if told else 0.0, not told)


def test_a_transport_that_cannot_be_closed_keeps_no_other_open() -> None:
    """Its error is raised once all are closed."""

    class Stuck(InprocTransport):
        name = "stuck"

        def close(self, drain_s: float) -> Sequence[Ticket]:
            raise TransportError("stuck")

    last = InprocTransport()
    both = Transports([Stuck(), last])
    with pytest.raises(TransportError, match="stuck"):
        both.close(0.0)
    with pytest.raises(PeerLostError):
        InprocTransport().connect(last.local_descriptor(), 0.0)


@pytest.mark.parametrize("what", ["connect", "peer_of", "register"])
def test_a_transport_that_raises_a_foreign_error_loses_no_other_one(what: str) -> None:
    """The peer gets the next transport, and the reason names the error."""
    careless = Careless()
    careless.fails = frozenset({what})
    source, _ = registered(careless, InprocTransport())
    begins = "it cannot register the memory: " if what == "register" else ""
    carrier = crosses(source, *registered(Careless(), InprocTransport()))
    assert carrier.name == "inproc"
    assert carrier.reason == f"not careless: {begins}OSError: the card failed: {what}"


def test_a_peer_that_no_transport_reaches_for_a_foreign_error_can_be_connected_later() -> None:
    """The error has the foreign one as its reason."""
    careless = Careless()
    careless.fails = frozenset({"connect"})
    source, target = registered(careless, Unreachable())[0], registered(Careless(), Unreachable())[0]
    with pytest.raises(TransportError, match=r"careless \(OSError: the card failed: connect\)") as caught:
        connect(source, target)
    assert isinstance(caught.value.__cause__, DisaggKVError)
    assert isinstance(caught.value.__cause__.__cause__, OSError)
    careless.fails = frozenset()
    assert connect(source, target).name == "careless"
