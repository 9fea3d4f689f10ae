"""Above the budget of links, peers that no room uses are forgotten, and return."""

from __future__ import annotations

from math import inf

import pytest
from msgspec import structs

from disagg_kv.core import (
    VERSION,
    Forget,
    Forgotten,
    Greeted,
    Hello,
    KnownPeer,
    LinkBudget,
    Lost,
    Options,
    PeerEffect,
    PeerTable,
    SendTo,
    Up,
)
from disagg_kv.core.wire.frames import Disconnected, Heartbeat, Refused, WireSite, WireSpec
from disagg_kv.errors import CapacityError, TransportError
from disagg_kv.ids import Epoch


def epoch(n: int) -> Epoch:
    return Epoch(bytes([n]) * 16)


ME = epoch(1)


def hello(n: int, dst: bytes = ME) -> Hello:
    return Hello(
        src=epoch(n), dst=dst, version=VERSION, address=f"p{n}", role="decode", instance="i", rank=0, host="h", pid=1,
        started=1, born=n, spec=WireSpec(b"", (), ()), shards=(), site=WireSite((), (), ()), regions=(),
        transport="inproc", descriptor=b"", paths=(), conversions=(),
        verdict="elected", slot_bytes=0, ring_region=0, ring_bytes=0,
        lease_bytes=0,
    )  # fmt: skip


def table(most: float, limit: float = inf, peers: int = 16) -> PeerTable[KnownPeer]:
    def own(dst: bytes) -> Hello:
        return hello(1, dst)

    return PeerTable(ME, "p1", own, lambda _: None, KnownPeer, Options(peers=peers), LinkBudget(most, limit))


def meet(a: PeerTable[KnownPeer], *numbers: int, now: float = 0.0) -> list[PeerEffect]:
    return [effect for n in numbers for effect in a.on_hello(hello(n), now + n / 100)]


def tick(a: PeerTable[KnownPeer], now: float) -> list[PeerEffect]:
    """What is due, but for the ``Hello`` frames to peers that may not know us."""
    effects = a.tick(now)
    a.check_integrity()
    return [e for e in effects if not (isinstance(e, SendTo) and isinstance(e.frame, Hello))]


def use(a: PeerTable[KnownPeer], n: int, now: float) -> None:
    assert a.use(epoch(n), now) is not None


def release(a: PeerTable[KnownPeer], n: int) -> None:
    peer = a.known(epoch(n))
    assert peer is not None
    a.release(peer)


def forgotten(effects: list[PeerEffect]) -> list[Epoch]:
    return [effect.peer.epoch for effect in effects if isinstance(effect, Forgotten)]


def two() -> PeerTable[KnownPeer]:
    """Has forgotten 2, and knows 3."""
    a = table(1)
    meet(a, 2, 3)
    assert forgotten(tick(a, 2.0)) == [epoch(2)]
    return a


def test_above_the_budget_the_peers_that_were_used_longest_ago_are_forgotten() -> None:
    a = table(2)
    meet(a, 2, 3, 4, 5)
    use(a, 2, 0.1)
    a.tick(0.2)
    release(a, 2)
    assert forgotten(tick(a, 0.9)) == [], "a room may be about to use it"
    assert a.next_at() == pytest.approx(1.03)
    effects = tick(a, 2.0)
    assert forgotten(effects) == [epoch(3), epoch(4)]
    assert [e.frame for e in effects if isinstance(e, SendTo)] == [Disconnected(src=ME, dst=epoch(n)) for n in (3, 4)]
    assert not [e for e in effects if isinstance(e, Lost)], "it is no failure"
    assert (a.at("p3"), a.at("p2"), set(a.epochs())) == (None, epoch(2), {epoch(2), epoch(5)})
    assert not a.lively(epoch(3), 2.0)
    assert tick(a, 2.5) == [], "the notice is on its way"
    assert tick(a, 3.0) == [Forget("p3"), Forget("p4")]
    assert forgotten(tick(a, 90.0)) == []


def test_a_peer_that_a_room_uses_is_never_forgotten() -> None:
    """However many there are: rooms keep theirs, above the budget too."""
    a = table(1)
    meet(a, 2, 3, 4)
    for n in (2, 3, 4):
        use(a, n, 0.1)
    a.lose(epoch(4), TransportError("gone"))
    for now in (50.0, 5000.0):
        assert forgotten(tick(a, now)) == []
    assert len(a) == 3
    release(a, 3)
    assert forgotten(tick(a, 5002.0)) == [epoch(3)]


def test_a_lost_peer_is_forgotten_before_all_others_once_no_room_waits_for_it() -> None:
    """The room may have memory that waits for evidence; without one nothing is awaited of the peer."""
    a = table(1)
    meet(a, 2, 3)
    use(a, 3, 0.1)
    a.lose(epoch(3), TransportError("gone"))
    assert forgotten(tick(a, 2.0)) == [epoch(2)]
    meet(a, 4, now=2.0)
    assert forgotten(tick(a, 2.1)) == []
    release(a, 3)
    effects = tick(a, 2.2)
    assert forgotten(effects) == [epoch(3)]
    assert Forget("p3") in effects, "it is not there: there is no peer to notify"
    assert a.known(epoch(3)) is None


def test_a_forgotten_peer_that_sends_a_frame_gets_a_hello_and_returns() -> None:
    """Its room waits for that answer alone. The connection for it is dropped again if none comes."""
    a = two()
    tick(a, 3.0)
    good, effects = a.on_frame(Heartbeat(src=epoch(2), dst=ME, ask=True), 3.5)
    assert (good, effects) == (False, [SendTo("p2", hello(1, b""))])
    assert a.on_frame(Heartbeat(src=epoch(2), dst=ME, ask=True), 3.6) == (False, []), "once a second"
    assert tick(a, 4.5) == [Forget("p2")]
    assert Up(epoch(2)) in a.on_hello(hello(2), 4.6)
    assert a.at("p2") == epoch(2)
    a.check_integrity()


def test_a_peer_that_another_one_has_forgotten_says_who_it_is_and_then_repeats_what_its_rooms_ask() -> None:
    """Frames arrive in the order of the effects: what is asked again finds that the other side knows the peer."""
    b = table(16)
    meet(b, 2)
    stale = hello(2, b"")
    assert b.on_hello(stale, 9.0) == [SendTo("p2", hello(1, epoch(2))), Greeted(epoch(2))]


def test_a_dial_finds_a_forgotten_peer() -> None:
    a = two()
    assert [e.address for e in a.dial("p2", 2.5) if isinstance(e, SendTo)] == ["p2"]
    assert not [e for e in tick(a, 3.0) if isinstance(e, Forget)], "the connection is in use by the dial"
    assert Up(epoch(2)) in a.on_hello(hello(2), 3.1)
    assert "p2" not in a._dials


def test_a_peer_that_disconnects_is_forgotten_unless_a_room_uses_it() -> None:
    a = table(16)
    meet(a, 2, 3)
    use(a, 3, 0.1)
    good, effects = a.on_frame(Disconnected(src=epoch(2), dst=ME), 1.0)
    assert (good, forgotten(effects), effects[1:]) == (True, [epoch(2)], [Forget("p2")])
    for now in (1.0, 1.1):
        assert a.on_frame(Disconnected(src=epoch(3), dst=ME), now) == (True, [])
    a.check_integrity()
    assert len(a) == 1


def test_a_peer_that_closes_is_not_forgotten() -> None:
    """It never returns: the owner of the table says that it is lost, also where it is lost already."""
    a = table(16)
    meet(a, 3, 4)
    a.lose(epoch(4), TransportError("its link broke"))
    for n in (3, 4):
        assert a.on_frame(Disconnected(src=epoch(n), dst=ME, closed=True), 3.0) == (True, [])
        assert a.known(epoch(n)) is not None
    assert a.epochs() == (epoch(3),)
    a.check_integrity()


def test_at_the_limit_an_idle_peer_makes_room_at_once_else_the_newcomer_is_refused_by_name() -> None:
    a = table(2, limit=3)
    meet(a, 2, 3, 4)
    for n in (2, 3):
        use(a, n, 0.1)
    assert forgotten(meet(a, 5, now=0.2)) == [epoch(4)]
    use(a, 5, 0.3)
    effects = meet(a, 6, now=0.4)
    (frame,) = [e.frame for e in effects if isinstance(e, SendTo)]
    assert isinstance(frame, Refused)
    assert (frame.field, "link_descriptors" in frame.theirs) == ("links", True)
    assert a.at("p6") is None
    a.check_integrity()
    release(a, 2)
    effects = meet(a, 6, now=3.0)
    assert forgotten(effects) == [epoch(2)]
    assert (a.at("p6"), a.useless_at("p6", 3.1)) == (epoch(6), None), "nothing is left of the refusal"
    a.check_integrity()


def test_who_is_refused_for_want_of_a_link_gets_a_capacity_error() -> None:
    a = table(16)
    refused = Refused(src=epoch(2), dst=ME, address="p2", field="links", ours="", theirs="rooms use all 3 peers")
    a.dial("p2", 0.0)
    (effect,) = [e for e in a.on_refused(refused, 0.1) if not isinstance(e, SendTo)]
    assert isinstance(effect.error, CapacityError)  # type: ignore[union-attr]
    assert str(effect.error) == "peer at p2: rooms use all 3 peers"  # type: ignore[union-attr]
    meet(a, 3)
    refused = Refused(src=epoch(3), dst=ME, address="p3", field="links", ours="", theirs="rooms use all")
    (lost,) = [e for e in a.on_refused(refused, 0.1) if isinstance(e, Lost)]
    assert isinstance(lost.error, CapacityError)


def test_an_incarnation_that_is_replaced_while_rooms_use_it_is_forgotten_when_they_end() -> None:
    """Not before: its process is watched, and its link is there, as long as evidence about it is awaited."""
    a = table(16)
    meet(a, 2)
    use(a, 2, 0.1)
    other = structs.replace(hello(9), address="p2")
    effects = a.on_hello(other, 1.0)
    assert [e.peer for e in effects if isinstance(e, Lost)] == [epoch(2)]
    assert forgotten(effects) == []
    assert (a.at("p2"), a.address(epoch(2))) == (epoch(9), None)
    assert a.on_frame(Heartbeat(src=epoch(2), dst=ME), 1.1) == (False, []), "it never returns"
    use(a, 2, 1.1)
    release(a, 2)
    assert forgotten(tick(a, 2.0)) == []
    release(a, 2)
    use(a, 2, 2.1)
    assert forgotten(tick(a, 3.0)) == []
    release(a, 2)
    due = a.next_at()
    assert due is not None
    assert due <= 3.0
    assert forgotten(tick(a, 3.0)) == [epoch(2)]
    assert a.on_hello(hello(2), 4.0) == []


@pytest.mark.parametrize("end", ["not admitted", "no link", "denied"])
def test_no_connection_stays_to_an_address_without_a_peer(end: str) -> None:
    """Neither to those that a known peer names as its own, nor to those that refuse us."""
    a = table(inf)
    meet(a, 2)
    opened, forgotten = set[str](), set[str]()

    def take(effects: list[PeerEffect]) -> None:
        opened.update(effect.address for effect in effects if isinstance(effect, SendTo))
        forgotten.update(effect.address for effect in effects if isinstance(effect, Forget))

    for i in range(40):
        now, address = 1.0 + i / 10, f"x{i}"
        if end == "not admitted":
            take(a.on_hello(structs.replace(hello(2), version=VERSION + 1, address=address), now))
            continue
        take(a.dial(address, now))
        if end == "denied":
            take(a.on_denied(address))
        else:
            take(
                a.on_refused(
                    Refused(src=epoch(100 + i), dst=ME, address=address, field="links", ours="", theirs="full"), now
                )
            )
    for second in range(5, 30):
        a.on_frame(Heartbeat(src=epoch(2), dst=ME, ask=False), float(second))
        take(tick(a, float(second)))
    assert len(opened) >= 40
    assert opened - forgotten <= {"p2"}
