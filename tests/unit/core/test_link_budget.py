"""Links above the budget are dropped, and what is dropped returns."""

from __future__ import annotations

from math import inf

import attrs
import pytest
from msgspec import structs

from disagg_kv.core import (
    VERSION,
    Forget,
    Hello,
    KnownPeer,
    Links,
    Lost,
    Options,
    PeerEffect,
    PeerTable,
    SendTo,
    Unlink,
    Unreachable,
    Up,
)
from disagg_kv.core.wire.frames import Heartbeat, Parted, Refused, WireSite, WireSpec
from disagg_kv.errors import CapacityError, PeerLostError, TransportError
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


def table(most: float, limit: float = inf, peers: int = 16) -> PeerTable:
    def own(dst: bytes) -> Hello:
        return hello(1, dst)

    return PeerTable(ME, "p1", own, lambda _: None, Options(peers=peers), Links(most, limit))


def meet(a: PeerTable, *numbers: int, now: float = 0.0) -> list[PeerEffect]:
    return [effect for n in numbers for effect in a.on_hello(hello(n), now + n / 100)]


def tick(a: PeerTable, now: float) -> list[PeerEffect]:
    """What is due, but for the ``Hello`` frames to peers that may not know us."""
    effects = a.tick(now)
    a.check_integrity()
    return [e for e in effects if not (isinstance(e, SendTo) and isinstance(e.frame, Hello))]


def known(a: PeerTable, n: int) -> KnownPeer:
    found = a.known(epoch(n))
    assert found is not None
    return found


def unlinked(effects: list[PeerEffect]) -> list[Epoch]:
    return [effect.peer for effect in effects if isinstance(effect, Unlink)]


def parted() -> PeerTable:
    """Knows 2 and 3, and has a link to 3 alone."""
    a = table(1)
    meet(a, 2, 3)
    assert unlinked(tick(a, 2.0)) == [epoch(2)]
    return a


def test_above_the_budget_the_links_that_were_used_longest_ago_are_dropped() -> None:
    a = table(2)
    meet(a, 2, 3, 4, 5)
    a.use(epoch(2), 0.1)
    a.tick(0.2)
    a.release(epoch(2))
    assert unlinked(tick(a, 0.9)) == [], "a room may be about to use it"
    assert a.next_at() == pytest.approx(1.03)
    effects = tick(a, 2.0)
    assert unlinked(effects) == [epoch(3), epoch(4)]
    assert [e.frame for e in effects if isinstance(e, SendTo)] == [Parted(src=ME, dst=epoch(n)) for n in (3, 4)]
    assert (a.at("p3"), a.at("p2"), set(a.epochs())) == (None, epoch(2), {epoch(2), epoch(5)})
    assert not a.lively(epoch(3), 2.0)
    assert tick(a, 2.5) == [], "the notice is on its way"
    assert tick(a, 3.0) == [Forget("p3"), Forget("p4")]
    assert a.links.next_at() is None


def test_a_link_that_a_room_uses_is_never_dropped() -> None:
    """However many there are: rooms keep theirs, above the budget too."""
    a = table(1)
    meet(a, 2, 3, 4)
    for n in (2, 3, 4):
        a.use(epoch(n), 0.1)
    assert unlinked(tick(a, 50.0)) == []
    assert len(a.links) == 3
    a.release(epoch(3))
    assert unlinked(tick(a, 52.0)) == [epoch(3)]


def test_of_a_lost_peer_that_a_room_waits_for_the_link_stays_and_goes_first_after_that() -> None:
    """The room may have memory that waits for evidence; without one nothing is awaited of the peer."""
    a = table(1)
    meet(a, 2, 3)
    a.use(epoch(3), 0.1)
    a.lose(epoch(3), TransportError("gone"))
    assert unlinked(tick(a, 2.0)) == [epoch(2)]
    meet(a, 4, now=2.0)
    assert unlinked(tick(a, 2.1)) == []
    a.release(epoch(3))
    effects = tick(a, 2.2)
    assert unlinked(effects) == [epoch(3)]
    assert Forget("p3") in effects, "it is not there: there is no peer to notify"
    assert a.known(epoch(3)) is None


def test_a_frame_brings_a_parted_peer_back_with_what_it_said_of_itself() -> None:
    a = parted()
    good, effects = a.on_frame(Heartbeat(src=epoch(2), dst=ME, ask=True), 2.5)
    assert good
    assert [e for e in effects if isinstance(e, Up)] == [Up(hello(2))]
    assert a.at("p2") == epoch(2)
    a.check_integrity()


def test_a_dial_brings_a_parted_peer_back() -> None:
    a = parted()
    assert [e.address for e in a.dial("p2", 5.0) if isinstance(e, SendTo)] == ["p2"]
    assert tick(a, 5.0) == [], "the connection is in use by the dial"
    assert Up(hello(2)) in a.on_hello(hello(2), 5.1)
    assert not a.dialled("p2")


def test_a_parted_peer_that_has_ended_is_not_found_soon() -> None:
    a = parted()
    tick(a, 3.0)
    a.dial("p2", 5.0)
    a.on_closed("p2", 5.1)
    (failed,) = [e for e in tick(a, 5.1) if isinstance(e, Unreachable)]
    assert isinstance(failed.error, PeerLostError)
    assert Forget("p2") in [e for now in range(6, 40) for e in tick(a, float(now))]


def test_another_life_at_the_address_of_a_parted_one_retires_it() -> None:
    a = parted()
    younger = hello(9)
    effects = a.on_hello(Hello(**{f: getattr(younger, f) for f in Hello.__struct_fields__} | {"address": "p2"}), 5.0)
    assert unlinked(effects) == [epoch(2)]
    assert not [e for e in effects if isinstance(e, Lost)]
    assert a.at("p2") == epoch(9)


def test_a_peer_that_parts_loses_its_link_here_unless_a_room_uses_it() -> None:
    a = table(16)
    meet(a, 2, 3)
    a.use(epoch(3), 0.1)
    for n, expected in ((2, [Unlink(epoch(2)), Forget("p2")]), (3, [])):
        assert a.on_frame(Parted(src=epoch(n), dst=ME), 1.0) == (True, expected)
        assert a.on_frame(Parted(src=epoch(n), dst=ME), 1.1) == (True, []), "again, and late"
    a.check_integrity()
    assert len(a.links) == 1


def test_a_peer_that_closes_is_not_parted() -> None:
    """It never returns: the owner of the table says that it is lost, also where it is parted or lost already."""
    a = parted()
    meet(a, 4)
    a.lose(epoch(4), TransportError("its link broke"))
    for n in (2, 3, 4):
        before = attrs.asdict(peer := known(a, n))
        assert a.on_frame(Parted(src=epoch(n), dst=ME, closed=True), 3.0) == (True, [])
        assert attrs.asdict(peer) | {"last_frame_at": before["last_frame_at"]} == before


def test_a_frame_to_a_parted_peer_opens_a_connection_that_is_dropped_again() -> None:
    a = parted()
    tick(a, 3.5)
    assert (a.route(epoch(2)), a.route(epoch(3)), a.route(epoch(7))) == ("p2", "p3", None)
    assert Forget("p2") in tick(a, 5.0)


def test_at_the_limit_an_idle_link_makes_room_at_once_else_the_newcomer_is_refused_by_name() -> None:
    a = table(2, limit=3)
    meet(a, 2, 3, 4)
    for n in (2, 3):
        a.use(epoch(n), 0.1)
    assert unlinked(meet(a, 5, now=0.2)) == [epoch(4)]
    a.use(epoch(5), 0.3)
    effects = meet(a, 6, now=0.4)
    (frame,) = [e.frame for e in effects if isinstance(e, SendTo)]
    assert isinstance(frame, Refused)
    assert (frame.field, "link_descriptors" in frame.theirs) == ("links", True)
    good, effects = a.on_frame(Heartbeat(src=epoch(4), dst=ME), 0.5)
    assert not good, "a parted one is refused too"
    assert any(isinstance(e, SendTo) and isinstance(e.frame, Refused) for e in effects)
    a.release(epoch(2))
    good, effects = a.on_frame(Heartbeat(src=epoch(4), dst=ME), 3.0)
    assert good
    assert unlinked(effects) == [epoch(2)]
    a.check_integrity()


def test_who_is_refused_for_want_of_a_link_gets_a_capacity_error() -> None:
    a = table(16)
    refused = Refused(src=epoch(2), dst=ME, address="p2", field="links", ours="", theirs="rooms use all 3 links")
    a.dial("p2", 0.0)
    (effect,) = [e for e in a.on_refused(refused, 0.1) if isinstance(e, Unreachable)]
    assert isinstance(effect.error, CapacityError)
    assert str(effect.error) == "peer at p2: rooms use all 3 links"
    meet(a, 3)
    refused = Refused(src=epoch(3), dst=ME, address="p3", field="links", ours="", theirs="rooms use all")
    (lost,) = [e for e in a.on_refused(refused, 0.1) if isinstance(e, Lost)]
    assert isinstance(lost.error, CapacityError)


def test_parted_peers_make_room_in_the_table_before_those_that_are_there() -> None:
    a = table(1, peers=2)
    meet(a, 2, 3)
    tick(a, 2.0)
    effects = meet(a, 4, now=3.0)
    assert unlinked(effects) == [epoch(2)]
    assert a.known(epoch(2)) is None


def test_a_parted_peer_whose_end_is_confirmed_is_lost() -> None:
    a = parted()
    assert [e.peer for e in a.lose(epoch(2), PeerLostError("gone"), ended=True) if isinstance(e, Lost)] == [epoch(2)]
    a.check_integrity()
    assert a.on_frame(Heartbeat(src=epoch(2), dst=ME), 3.0) == (False, [])


def test_what_was_kept_of_a_parted_peer_is_used_later() -> None:
    a = parted()
    assert a.bring_back(epoch(3), 3.0) == []
    assert a.bring_back(epoch(7), 3.0) == []
    assert a.bring_back(epoch(2), 3.0) == [Up(hello(2))]


def full() -> PeerTable:
    """Knows 2, 3 and 4; rooms use the links to 3 and 4, and there may be no further one; 2 is parted."""
    a = table(2, limit=2)
    meet(a, 2, 3)
    a.use(epoch(3), 0.1)
    assert unlinked(meet(a, 4, now=0.2)) == [epoch(2)]
    a.use(epoch(4), 0.3)
    return a


@pytest.mark.parametrize("frame", [hello(2), Heartbeat(src=epoch(2), dst=ME)])
def test_a_parted_peer_that_is_lost_returns_only_if_there_is_a_link_for_it(frame: Hello | Heartbeat) -> None:
    def arrives(now: float) -> list[PeerEffect]:
        return a.on_hello(frame, now) if isinstance(frame, Hello) else a.on_frame(frame, now)[1]

    a = full()
    a.lose(epoch(2), TransportError("gone"))
    effects = arrives(2.0)
    assert any(isinstance(e, SendTo) and isinstance(e.frame, Refused) for e in effects)
    assert not any(isinstance(e, Up) for e in effects)
    assert len(a.links) == 2
    a.check_integrity()
    a.release(epoch(3))
    assert Up(hello(2)) in arrives(4.0)
    assert len(a.links) == 2
    a.check_integrity()


def test_a_peer_that_is_refused_for_want_of_a_link_is_not_remembered_as_one_that_cannot_work_with_us() -> None:
    """It stays known: once there is a link, nothing is left of the refusal."""
    a = full()
    assert not a.on_frame(Heartbeat(src=epoch(2), dst=ME), 2.0)[0]
    assert a.useless_at("p2", 2.0) is None
    a.release(epoch(3))
    assert a.on_frame(Heartbeat(src=epoch(2), dst=ME), 4.0)[0]
    assert (a.at("p2"), a.useless_at("p2", 4.0)) == (epoch(2), None)


def test_a_life_that_takes_the_address_of_a_parted_one_and_gets_no_link_leaves_the_table_whole() -> None:
    """The parted one is retired, the other one is refused: nothing is known at the address until a link is free."""
    a, other = full(), structs.replace(hello(9), address="p2")
    assert not any(isinstance(e, Up) for e in a.on_hello(other, 2.0))
    assert a.at("p2") is None
    a.on_closed("p2", 2.1)
    a.on_opened("p2")
    tick(a, 3.0)
    a.release(epoch(3))
    assert Up(other) in a.on_hello(other, 9.0)
    a.check_integrity()


def test_a_life_that_is_forgotten_while_rooms_use_it_is_unlinked_when_they_end() -> None:
    """Not before: its process is watched, and its link is there, as long as evidence about it is awaited."""
    a = table(16)
    meet(a, 2)
    a.use(epoch(2), 0.1)
    other = structs.replace(hello(9), address="p2")
    effects = a.on_hello(other, 1.0)
    assert [e.peer for e in effects if isinstance(e, Lost)] == [epoch(2)]
    assert unlinked(effects) == []
    a.use(epoch(2), 1.1)
    a.release(epoch(2))
    assert unlinked(tick(a, 2.0)) == []
    a.release(epoch(2))
    a.use(epoch(2), 2.1)
    assert unlinked(tick(a, 3.0)) == []
    a.release(epoch(2))
    due = a.next_at()
    assert due is not None
    assert due <= 3.0
    assert unlinked(tick(a, 3.0)) == [epoch(2)]
