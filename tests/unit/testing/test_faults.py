"""What each injected fault does to the bytes, to the events and to the memory that it needs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.emulated import emulate
from disagg_kv.errors import PeerLostError, RegistrationError, TransportError
from disagg_kv.ids import Ticket
from disagg_kv.memory import Buffer
from disagg_kv.planning import Writes
from disagg_kv.testing import Fault, FaultyTransport, MappingFault, MappingPlan, faultless
from disagg_kv.testing.ends import End, HostMemory
from disagg_kv.testing.pair import POISON, Pair
from disagg_kv.transports import InprocTransport, PeerLost, Settled, ShmTransport, Transport, WriteEnded
from tests.support.drawn_faults import seeded

N = 1000


class Rig:
    """A faulty source whose first batch suffers ``fault``, connected to a sound target."""

    def __init__(self, fault: Fault, inner: Callable[[], Transport] = InprocTransport) -> None:
        self.use(FaultyTransport(inner(), {0: fault}.get), inner)

    def use(self, faulty: FaultyTransport, inner: Callable[[], Transport] = InprocTransport) -> None:
        """Begin with this source instead."""
        self.faulty = faulty
        self.pair = Pair(End(lambda: faulty, HostMemory()), End(inner, HostMemory()), N, 5.0)

    def landed(self) -> int:
        """How many leading bytes of the target are the source's; everything after them is poison."""
        found = self.pair.target.read(self.pair.remote)
        n = int((found != POISON).argmin()) if (found == POISON).any() else N
        assert found.tobytes() == self.pair.data[:n].tobytes() + bytes([POISON]) * (N - n)
        return n

    def submit(self) -> Ticket:
        """Three writes that together fill the target."""
        return self.pair.submit((0, 0, 100), (100, 100, 700), (800, 800, 200))

    def events(self) -> list[tuple[str, Ticket, bool]]:
        """Events since the last call: what, ticket, quiet."""
        said: list[tuple[str, Ticket, bool]] = []
        for event in self.pair.source.events():
            if isinstance(event, WriteEnded):
                said.append(
                    ("ended" if event.error is None else type(event.error).__name__, event.ticket, event.quiesced)
                )
            elif isinstance(event, Settled):
                said.append(("settled", event.ticket, True))
        return said


def test_a_refused_batch_is_quiet_and_nothing_of_it_lands() -> None:
    """The next one goes through."""
    rig = Rig(Fault.REFUSED)
    ticket = rig.submit()
    assert rig.events() == [("TransportError", ticket, True)]
    assert (rig.landed(), rig.faulty.held) == (0, ())
    rig.pair.succeed(rig.submit())
    assert rig.landed() == N


def test_half_of_a_partial_batch_lands_to_the_byte() -> None:
    """In the middle of a descriptor; the rest never does."""
    rig = Rig(Fault.PARTIAL)
    ticket = rig.submit()
    assert rig.events() == [("TransportError", ticket, True)]
    rig.faulty.release()
    assert rig.landed() == N // 2


def test_an_unacknowledged_batch_has_landed_but_is_not_quiet_before_release() -> None:
    """It is held until then."""
    rig = Rig(Fault.UNACKNOWLEDGED)
    ticket = rig.submit()
    assert rig.events() == [("TransportError", ticket, False)]
    assert (rig.landed(), rig.faulty.held) == (N, (ticket,))
    rig.faulty.release(ticket)
    assert rig.events() == [("settled", ticket, True)]


def test_a_late_batch_lands_after_its_error() -> None:
    """As a write that nobody can cancel does; also when the peer was disconnected meanwhile."""
    rig = Rig(Fault.LATE)
    ticket = rig.submit()
    assert rig.events() == [("TransportError", ticket, False)]
    assert rig.landed() == 0
    rig.pair.source.transport.disconnect(rig.pair.peer)
    with pytest.raises(TransportError):
        rig.submit()
    rig.faulty.release()
    assert rig.events() == [("settled", ticket, True)]
    assert rig.landed() == N
    rig.pair.connect()
    rig.pair.succeed(rig.submit())


def test_a_delayed_batch_completes_when_it_is_released() -> None:
    """Later ones overtake it."""
    rig = Rig(Fault.DELAYED)
    ticket = rig.pair.submit((0, 0, N))
    other = rig.pair.submit((0, 0, 10))
    assert rig.events() == [("ended", other, True)]
    assert rig.landed() == 10
    rig.faulty.release()
    assert rig.events() == [("ended", ticket, True)]
    assert rig.landed() == N


def test_a_hung_batch_never_ends() -> None:
    """Half of it lands; ``close`` names it."""
    rig = Rig(Fault.HUNG)
    ticket = rig.submit()
    rig.faulty.release()
    assert rig.events() == []
    assert (rig.landed(), rig.faulty.held) == (N // 2, (ticket,))
    assert list(rig.faulty.close(0.0)) == [ticket]
    assert list(rig.faulty.close(0.0)) == []


def test_a_lost_peer_stays_lost() -> None:
    """It is heard once, without a fence; every later batch fails, also after connecting again."""
    rig = Rig(Fault.PEER_LOST)
    first, second = rig.submit(), rig.submit()
    events = list(rig.pair.source.events())
    assert events[0] == PeerLost(rig.pair.peer, fenced=False)
    ended = [e for e in events if isinstance(e, WriteEnded)]
    assert [(e.ticket, e.quiesced) for e in ended] == [(first, True), (second, True)]
    assert all(isinstance(e.error, PeerLostError) for e in ended)
    rig.pair.connect()
    rig.submit()
    assert rig.events()[0][0] == "PeerLostError"
    assert rig.landed() == 0


@pytest.mark.parametrize("fault", list(Fault))
def test_a_bad_batch_is_refused_whatever_was_planned_for_it(fault: Fault) -> None:
    """Nothing lands and no event tells of it; the plan's number is not used up."""
    rig = Rig(fault)
    peer, local, remote = rig.pair.peer, rig.pair.local, rig.pair.remote
    for at, nbytes in ((N - 9, 10), (N + 1, 0), (-1, 2), (5, -1), ((1 << 63) - 1, 10)):
        for writes in (Writes.one(local, at, remote, 0, nbytes), Writes.one(local, 0, remote, at, nbytes)):
            with pytest.raises(RegistrationError):
                rig.pair.source.submit(peer, writes)
    with pytest.raises(TransportError):
        rig.faulty.submit(peer, Writes.one(local, 0, remote, 0, 1), after=_Never())
    assert rig.events() == []
    assert rig.landed() == 0
    ticket = rig.submit()
    assert rig.events() != [("ended", ticket, True)]


@pytest.mark.parametrize("fault", [Fault.DELAYED, Fault.LATE, Fault.HUNG])
def test_close_names_what_is_held(fault: Fault) -> None:
    """It can never be quiet now."""
    rig = Rig(fault)
    ticket = rig.submit()
    assert list(rig.faulty.close(0.0)) == [ticket]
    rig.faulty.release()


def test_the_claims_are_the_inner_ones_and_late_writes() -> None:
    """And no bound on how late they are."""
    caps = FaultyTransport(ShmTransport()).caps
    assert (caps.late_writes, caps.drain_s, caps.own_memory_only) == (True, None, True)


def test_a_seeded_plan_is_the_same_each_time_and_keeps_its_shares() -> None:
    """Whatever order it is asked in."""
    shares = {Fault.LATE: 0.25, Fault.HUNG: 0.25}
    one, two = seeded(3, shares), seeded(3, shares)
    drawn = [one(i) for i in range(2000)]
    assert drawn == [two(i) for i in reversed(range(2000))][::-1]
    assert drawn != [seeded(4, shares)(i) for i in range(2000)]
    assert all(400 < drawn.count(fault) < 600 for fault in shares)
    assert 900 < drawn.count(None) < 1100


def test_what_the_inner_transport_tells_is_told() -> None:
    """That a ticket is not quiet and, later, that it is: here a faulty transport in a faulty transport."""
    for outer, first in ((None, 0), (Fault.PARTIAL, 2)):
        inner = FaultyTransport(InprocTransport(), {first: Fault.LATE}.get)
        rig = Rig(Fault.LATE)
        rig.use(FaultyTransport(inner, {0: outer}.get))
        ticket = rig.submit()
        assert rig.events() == [("TransportError", ticket, False)]
        inner.release()
        assert rig.events() == [("settled", ticket, True)]
        inner.release()
        late = rig.submit()
        assert rig.events() == [("ended", late, True)]


def test_a_late_batch_is_settled_only_when_the_inner_transport_says_so() -> None:
    """Not when it was released."""
    inner = FaultyTransport(InprocTransport(), {2: Fault.LATE}.get)
    rig = Rig(Fault.LATE)
    rig.use(FaultyTransport(inner, {0: Fault.LATE}.get))
    ticket = rig.submit()
    assert rig.events() == [("TransportError", ticket, False)]
    rig.faulty.release()
    assert rig.events() == []
    inner.release()
    assert rig.events() == [("settled", ticket, True)]
    assert rig.landed() == N


class _Never:
    """An event that does not happen."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise AssertionError("nobody may wait for this")


class Mapped:
    """A faulty source that maps, by a plan, a target that it is connected to."""

    def __init__(self, plan: MappingPlan | None, inner: Callable[[], Transport] = InprocTransport) -> None:
        self.faulty = FaultyTransport(inner(), mappings=plan)
        self.pair = Pair(End(lambda: self.faulty, HostMemory()), End(inner, HostMemory()), N, 5.0)

    def map(self) -> Buffer:
        """The target's region."""
        return self.faulty.map(self.pair.peer, self.pair.remote, "cpu")

    def refusal(self) -> str | None:
        """Why it cannot be mapped."""
        return self.faulty.unmappable(self.pair.peer, [self.pair.remote], "cpu")


@pytest.mark.parametrize("inner", [InprocTransport, ShmTransport])
def test_a_mapping_that_is_refused_may_succeed_the_next_time(inner: Callable[[], Transport]) -> None:
    """It is found out only by the call, and what was mapped before stays."""
    mapped = Mapped({1: MappingFault.REFUSED}.get, inner)
    before = mapped.map()
    assert mapped.refusal() is None
    with pytest.raises(TransportError, match="injected: the system refuses"):
        mapped.map()
    assert mapped.map() == before


@pytest.mark.parametrize("later", [False, True])
def test_an_owner_that_ends_is_lost_and_its_memory_stays_mapped(later: bool) -> None:
    """Once; it is not mapped again, and every batch to it fails."""
    mapped = Mapped({1: MappingFault.PEER_LOST}.get)
    buffer, pair = mapped.map(), mapped.pair
    if later:
        mapped.faulty.lose(pair.peer)
    for _ in range(2):
        with pytest.raises(PeerLostError, match="is lost"):
            mapped.map()
    assert "no open peer" in (mapped.refusal() or "")
    assert [event for event in pair.source.events() if isinstance(event, PeerLost)] == [PeerLost(pair.peer)]
    HostMemory().write(buffer, pair.data)
    assert pair.target.read(pair.remote).tobytes() == pair.data.tobytes()
    pair.submit((0, 0, 9))
    (ended,) = [event for event in pair.source.events() if isinstance(event, WriteEnded)]
    assert isinstance(ended.error, PeerLostError)


def test_nothing_is_mapped_where_that_was_not_asked_for_or_the_inner_transport_maps_nothing() -> None:
    """The reason says it before, and the error afterwards."""
    for mapped in (Mapped(None), Mapped(faultless, lambda: emulate(InprocTransport(), 1e9))):
        assert "does not map memory of peers" in (mapped.refusal() or "")
        with pytest.raises(RegistrationError, match="does not map memory of peers"):
            mapped.map()


def test_a_peer_that_is_disconnected_is_not_mapped() -> None:
    """Also while something is held for it."""
    mapped = Mapped(faultless)
    mapped.faulty._plan = {0: Fault.DELAYED}.get
    mapped.pair.submit((0, 0, 9))
    mapped.faulty.disconnect(mapped.pair.peer)
    assert "no open peer" in (mapped.refusal() or "")
    with pytest.raises(TransportError, match="no peer"):
        mapped.map()
