"""Who is there, in which life, and whether we can work together."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from disagg_kv.core import (
    VERSION,
    Forget,
    Forgotten,
    Greeted,
    Hello,
    KnownPeer,
    Lost,
    Options,
    PeerTable,
    SendTo,
    Unreachable,
    Up,
)
from disagg_kv.core.peers.known_peers import FORGET_AFTER
from disagg_kv.core.peers.peer_effects import PeerEffect
from disagg_kv.core.peers.refusals import MAX_REFUSED, Answers
from disagg_kv.core.wire.frames import Heartbeat, Refused, WireSite, WireSpec
from disagg_kv.errors import IncompatiblePeerError, PeerLostError, RemoteProtocolError, TransportError
from disagg_kv.ids import Epoch


def epoch(n: int) -> Epoch:
    return Epoch(bytes([n] * 16))


def hello(
    src: Epoch, dst: bytes, address: str, *, born: int = 1, started: int = 1, version: int = VERSION, role: str = "any"
) -> Hello:
    return Hello(
        src=src,
        dst=dst,
        version=version,
        address=address,
        role=role,
        instance="i",
        rank=0,
        host="h",
        pid=1,
        started=started,
        born=born,
        spec=WireSpec(b"", (), ()),
        shards=(),
        site=WireSite((), (), ()),
        regions=(),
        transport="inproc",
        descriptor=b"",
        paths=(),
        conversions=(),
        verdict="elected",
        slot_bytes=0,
        ring_region=0,
        ring_bytes=0,
        lease_bytes=0,
    )


def admit(hello: Hello) -> None:
    if hello.role == "strange":
        raise IncompatiblePeerError("spec", "ours", "theirs")
    if hello.role == "broken":
        raise RemoteProtocolError("a shard that cannot be")


def table(n: int, address: str) -> PeerTable[KnownPeer]:
    return PeerTable(epoch(n), address, lambda dst: hello(epoch(n), dst, address), admit, KnownPeer, Options())


def met() -> PeerTable[KnownPeer]:
    """``a`` that has dialled ``b`` and knows it."""
    a = table(1, "a")
    a.dial("b", 0.0)
    a.on_hello(hello(epoch(2), epoch(1), "b"), 0.0)
    return a


def forgotten(effects: list[PeerEffect]) -> list[Epoch]:
    return [effect.peer.epoch for effect in effects if isinstance(effect, Forgotten)]


def silent(peers: PeerTable[KnownPeer], epoch: Epoch, now: float) -> float:
    """Seconds since a peer's last frame, up to what was taken in."""
    return min(now, peers._caught_up) - peers._peers[epoch].heard


def used() -> PeerTable[KnownPeer]:
    """The same, with a room that uses ``b``."""
    a = met()
    a.use(epoch(2), 0.0)
    return a


def losses(effects: list[PeerEffect]) -> list[tuple[Epoch, str]]:
    return [(e.peer, str(e.error)) for e in effects if isinstance(e, Lost)]


def beats(effects: list[PeerEffect]) -> list[str]:
    return [e.address for e in effects if isinstance(e, SendTo) and isinstance(e.frame, Heartbeat)]


def test_one_dial_makes_both_sides_know_each_other() -> None:
    a, b = table(1, "a"), table(2, "b")
    flying = [("b", e.frame) for e in a.dial("b", 0.0) if isinstance(e, SendTo)]
    ups = []
    hops = 0
    while flying:
        to, frame = flying.pop()
        assert isinstance(frame, Hello)
        hops += 1
        for effect in (a if to == "a" else b).on_hello(frame, 0.1):
            if isinstance(effect, SendTo):
                flying.append((effect.address, effect.frame))
            elif isinstance(effect, Up):
                ups.append((to, effect.peer))
    assert ups == [("b", epoch(1)), ("a", epoch(2))]
    assert hops == 2
    assert (a.at("b"), b.at("a")) == (epoch(2), epoch(1))
    assert a.epochs() == (epoch(2),)
    assert a.address(epoch(2)) == "b"
    assert a.dial("b", 0.2) == []


def test_a_dial_is_repeated_until_somebody_names_our_epoch_or_silence_is_over() -> None:
    a = table(1, "a")
    assert len(a.dial("b", 0.0)) == 1
    assert a.dial("b", 0.1) == []
    assert a.next_at() == pytest.approx(0.2)
    sent = [now for now in (0.1, 0.25, 0.3, 0.7, 1.6) if any(isinstance(e, SendTo) for e in a.tick(now))]
    assert sent == [0.25, 0.7, 1.6]
    a.on_hello(hello(epoch(2), b"", "b"), 1.5)
    assert any(isinstance(e, SendTo) and isinstance(e.frame, Hello) for e in a.tick(3.3))
    c = table(3, "c")
    c.dial("b", 0.0)
    (effect,) = c.tick(30.0)
    assert isinstance(effect, Unreachable)
    assert (effect.address, str(effect.error)) == ("b", "no answer from b within 30 s")
    assert all(isinstance(effect, SendTo) for effect in c.tick(59.9)), "it goes on"
    assert c.tick(60.0) == [Forget("b")], "nothing else would drop the connection"
    assert not c.tick(61.0)


@pytest.mark.parametrize(
    ("change", "field"),
    [({"version": VERSION + 1}, "version"), ({"role": "strange"}, "spec"), ({"role": "broken"}, "hello")],
)
def test_who_cannot_work_with_us_is_refused_with_the_field(change: dict[str, object], field: str) -> None:
    a = table(1, "a")
    a.dial("b", 0.0)
    theirs = msgspec.structs.replace(hello(epoch(2), epoch(1), "b"), **change)
    sent, lost = a.on_hello(theirs, 0.0)
    assert isinstance(sent, SendTo)
    assert isinstance(sent.frame, Refused)
    assert (sent.address, sent.frame.field, sent.frame.dst) == ("b", field, epoch(2))
    assert isinstance(lost, Unreachable)
    assert field in str(lost.error)
    assert a.at("b") is None
    assert a.on_hello(theirs, 0.5) == []


def test_a_refusal_ends_the_dial_and_names_the_field_and_both_values() -> None:
    a = table(1, "a")
    a.dial("b", 0.0)
    refused = Refused(src=epoch(2), dst=epoch(1), address="b", field="spec", ours="1", theirs="2")
    assert a.on_refused(msgspec.structs.replace(refused, dst=epoch(9)), 0.0) == []
    (gone,) = a.on_refused(refused, 0.0)
    assert isinstance(gone, Unreachable)
    assert str(gone.error) == "peer at b: incompatible peer: spec: ours is 1, theirs is 2"
    assert a.on_refused(refused, 0.0) == []


def test_frames_for_another_life_are_dropped_and_answered_with_hello_once_a_second() -> None:
    a = met()
    stale = Heartbeat(src=epoch(2), dst=epoch(9))
    ok, (answer,) = a.on_frame(stale, 5.0)
    assert not ok
    assert isinstance(answer, SendTo)
    assert isinstance(answer.frame, Hello)
    assert answer.frame.dst == epoch(2)
    assert a.on_frame(stale, 5.9) == (False, [])
    assert len(a.on_frame(stale, 6.0)[1]) == 1
    assert a.on_frame(Heartbeat(src=epoch(8), dst=epoch(1)), 6.0) == (False, [])
    assert silent(a, epoch(2), 6.0) == 6.0


def test_our_own_hello_is_no_peer() -> None:
    a = table(1, "a")
    assert a.on_hello(hello(epoch(1), b"", "a"), 0.0) == []


def test_another_life_at_the_address_retires_the_first_for_ever() -> None:
    """A restarted peer under its old address; a retired epoch never returns."""
    a = met()
    lost, gone, answer, up = a.on_hello(hello(epoch(3), b"", "b", born=2), 1.0)
    assert losses([lost])[0][0] == epoch(2)
    assert forgotten([gone]) == [epoch(2)]
    assert isinstance(up, Up)
    assert isinstance(answer, SendTo)
    assert a.at("b") == epoch(3)
    assert a.on_hello(hello(epoch(2), epoch(1), "b", born=2), 2.0) == []
    assert a.on_frame(Heartbeat(src=epoch(2), dst=epoch(1)), 2.0) == (False, [])
    assert a.address(epoch(2)) is None


def test_a_life_that_was_lost_already_is_not_lost_again_when_its_address_is_taken() -> None:
    a = met()
    a.lose(epoch(2), PeerLostError("seen"))
    effects = a.on_hello(hello(epoch(3), epoch(1), "b"), 1.0)
    assert [type(e) for e in effects] == [Forgotten, Up]


def test_a_late_hello_of_an_older_life_does_not_take_the_address_back() -> None:
    """Else the newer life would be retired, and never heard again."""
    a = table(1, "a")
    a.on_hello(hello(epoch(3), epoch(1), "b", born=5), 0.0)
    assert a.on_hello(hello(epoch(2), b"", "b", born=4), 1.0) == []
    assert a.at("b") == epoch(3)
    a.lose(epoch(3), PeerLostError("silent"))
    assert a.on_hello(hello(epoch(2), b"", "b", born=4), 2.0) == []
    assert any(isinstance(e, Up) for e in a.on_hello(hello(epoch(3), epoch(1), "b", born=5), 3.0))
    a.lose(epoch(3), PeerLostError("its process has ended"), ended=True)
    assert any(isinstance(e, Up) for e in a.on_hello(hello(epoch(2), b"", "b", born=4), 4.0))


def test_a_process_that_was_there_before_may_follow_one_that_began_after_it() -> None:
    """A spare that waited takes the address at once, and a late greeting of the first does not take it back."""
    a = table(1, "a")
    a.on_hello(hello(epoch(2), epoch(1), "b", born=7, started=5), 0.0)
    assert Up(epoch(3)) in a.on_hello(hello(epoch(3), epoch(1), "b", born=8, started=4), 1.0)
    assert a.on_hello(hello(epoch(2), b"", "b", born=7, started=5), 2.0) == []
    assert a.at("b") == epoch(3)


def test_a_life_keeps_its_address() -> None:
    a = met()
    assert a.on_hello(hello(epoch(2), epoch(1), "elsewhere"), 1.0) == []
    assert a.address(epoch(2)) == "b"


def test_a_peer_that_a_room_uses_is_asked_for_a_heartbeat_when_it_sent_nothing_for_a_second() -> None:
    a = met()
    assert (a.tick(0.0), a.next_at()) == ([], None), "no room, no heartbeat, and nothing is due"
    a.use(epoch(2), 10.0)
    a.use(epoch(2), 10.5)
    assert a.next_at() == pytest.approx(11.0)
    assert beats(a.tick(10.9)) == []
    (sent,) = a.tick(11.0)
    assert isinstance(sent, SendTo)
    assert sent.frame == Heartbeat(src=epoch(1), dst=epoch(2), ask=True)
    assert a.tick(11.9) == []
    a.on_frame(Heartbeat(src=epoch(2), dst=epoch(1)), 11.9)
    assert a.tick(12.0) == [], "any frame saves a heartbeat"
    assert beats(a.tick(12.9)) == ["b"]
    a.release(a._peers[epoch(2)])
    assert beats(a.tick(13.9)) == ["b"]
    a.release(a._peers[epoch(2)])
    assert (a.tick(100.0), a.next_at()) == ([], None)


def test_a_heartbeat_that_asks_is_answered_at_once_by_one_that_does_not() -> None:
    """So two peers never keep each other awake."""
    a, b = met(), table(2, "b")
    b.on_hello(hello(epoch(1), epoch(2), "a"), 0.0)
    _, (answer,) = b.on_frame(Heartbeat(src=epoch(1), dst=epoch(2), ask=True), 50.0)
    assert answer == SendTo("a", Heartbeat(src=epoch(2), dst=epoch(1), ask=False))
    assert a.on_frame(answer.frame, 50.0) == (True, [])


def test_the_silence_of_a_peer_counts_from_the_beginning_of_its_use() -> None:
    """Before that nobody asked it for anything."""
    a = met()
    assert a.tick(1000.0) == []
    assert a.at("b") == epoch(2)
    a.use(epoch(2), 1000.0)
    assert silent(a, epoch(2), 1000.5) == 0.5
    assert a.lively(epoch(2), 1003.0)
    assert not a.lively(epoch(2), 1003.1)
    assert losses(a.tick(1029.9)) == []
    assert len(losses(a.tick(1030.0))) == 1


def test_a_peer_that_a_room_uses_is_not_forgotten_however_long_it_is_lost() -> None:
    """A room waits for evidence about it; it returns as it was."""
    a = used()
    a.tick(30.0)
    assert a.tick(30.0 * FORGET_AFTER) == []
    assert any(isinstance(e, Up) for e in a.on_hello(hello(epoch(2), b"", "b"), 700.0))
    assert len(losses(a.tick(730.0))) == 1
    a.release(a._peers[epoch(2)])
    assert Forget("b") in a.tick(730.0 + 30.0 * FORGET_AFTER)


def test_where_a_connection_is_restored_another_life_may_listen_so_it_is_greeted() -> None:
    """No room uses it, so nothing else would notice; the next room would begin with a life that is gone."""
    a, restarted = met(), table(3, "b")
    a.tick(0.9)
    a.on_closed("b", 1.0)
    a.on_opened("b")
    (sent,) = a.tick(1.1)
    assert isinstance(sent, SendTo)
    assert isinstance(sent.frame, Hello)
    answer = next(e.frame for e in restarted.on_hello(sent.frame, 1.2) if isinstance(e, SendTo))
    assert isinstance(answer, Hello)
    assert [type(e) for e in a.on_hello(answer, 1.3)] == [Lost, Forgotten, Up]
    assert a.at("b") == epoch(3)


def test_a_peer_that_made_room_is_greeted_when_it_sends_a_frame() -> None:
    """It does not know that it was forgotten; its room waits for a moment, and not until it counts as silent."""
    a = crowd()
    a.on_hello(hello(epoch(100), epoch(1), "p0"), 1.0)
    for n in range(1, 4):
        a.on_frame(Heartbeat(src=epoch(100 + n), dst=epoch(1)), 1.0 + n)
        a.use(epoch(100 + n), 1.0)
    assert forgotten(a.on_hello(hello(epoch(50), b"", "new"), 9.0)) == [epoch(100)]
    ok, (sent,) = a.on_frame(Heartbeat(src=epoch(100), dst=epoch(1)), 10.0)
    assert not ok
    assert isinstance(sent, SendTo)
    assert isinstance(sent.frame, Hello)
    assert (sent.address, sent.frame.dst) == ("p0", b""), "which it answers with its own"


def test_a_life_that_knows_us_and_was_forgotten_is_greeted() -> None:
    """It may wait for what we gave up when we lost it; a heartbeat would not say that we did."""
    a = table(1, "a")
    a.on_hello(hello(epoch(2), epoch(1), "b"), 0.0)
    for second in range(4):
        (sent,) = a.tick(float(second))
        assert isinstance(sent, SendTo)
        assert isinstance(sent.frame, Hello)
        a.on_frame(Heartbeat(src=epoch(2), dst=epoch(1)), second + 0.5)
    assert (a.tick(4.0), a.next_at()) == ([], None)


def test_a_life_that_a_transport_does_not_reach_is_told_so_and_stays_lost_for_a_while() -> None:
    """Whatever it says meanwhile; else each of its frames would be another loss."""
    a = met()
    refused, lost = a.shut(epoch(2), TransportError("no route"), 10.0)
    assert isinstance(refused, SendTo)
    assert isinstance(refused.frame, Refused)
    assert isinstance(lost, Lost)
    assert a.on_frame(Heartbeat(src=epoch(2), dst=epoch(1)), 10.5) == (True, [])
    assert a.on_hello(hello(epoch(2), epoch(1), "b"), 10.6) == []
    assert a.on_hello(hello(epoch(2), epoch(1), "b"), 11.6) == [refused]
    assert a.epochs() == ()
    assert any(isinstance(e, Up) for e in a.on_hello(hello(epoch(2), epoch(1), "b"), 13.1))
    b = table(2, "b")
    b.on_hello(hello(epoch(1), epoch(2), "a"), 0.0)
    stranger = msgspec.structs.replace(refused.frame, src=epoch(3))
    assert b.on_refused(stranger, 1.0) == []
    ((peer, why),) = losses(b.on_refused(refused.frame, 1.0))
    assert (peer, why) == (epoch(1), "the transport of the peer at a does not reach us: no route")
    b.dial("a", 2.0)
    (unreachable,) = b.on_refused(refused.frame, 2.5)
    assert isinstance(unreachable, Unreachable)


def test_who_missed_heartbeats_is_greeted_so_that_another_life_there_can_answer() -> None:
    """A restarted peer does not know us, but it can answer a Hello; no need to wait for the silence to end."""
    a, restarted = used(), table(3, "b")
    sent, asked = a.tick(3.5)
    assert isinstance(sent, SendTo)
    assert isinstance(sent.frame, Hello)
    assert isinstance(asked, SendTo)
    assert isinstance(asked.frame, Heartbeat)
    assert restarted.on_frame(asked.frame, 3.5) == (False, [])
    effects = restarted.on_hello(sent.frame, 3.5)
    answer = next(e.frame for e in effects if isinstance(e, SendTo))
    assert isinstance(answer, Hello)
    assert [type(e) for e in a.on_hello(answer, 3.6)] == [Lost, Up]


def test_a_peer_that_knows_us_answers_after_missed_heartbeats() -> None:
    """It answers no ``Hello`` that names it. It answers the heartbeat, so lost frames are no silence."""
    a, b = used(), table(2, "b")
    b.on_hello(hello(epoch(1), epoch(2), "a"), 0.0)
    answers = [
        e.frame
        for one in a.tick(3.5)
        if isinstance(one, SendTo)
        for e in (b.on_hello(one.frame, 3.5) if isinstance(one.frame, Hello) else b.on_frame(one.frame, 3.5)[1])
        if isinstance(e, SendTo)
    ]
    assert [type(frame) for frame in answers] == [Heartbeat]


def test_a_used_peer_that_has_never_named_us_is_greeted_at_once() -> None:
    """Our only ``Hello`` to it was lost: it drops heartbeats of a life that it does not know."""
    a = table(1, "a")
    a.on_hello(hello(epoch(2), b"", "b"), 0.0)
    a.use(epoch(2), 0.0)
    assert [type(e.frame) for e in a.tick(1.5) if isinstance(e, SendTo)] == [Hello, Heartbeat]


def test_a_peer_that_missed_three_heartbeats_gets_nothing_new() -> None:
    """Frozen, not dead."""
    a = used()
    assert a.lively(epoch(2), 3.0)
    assert not a.lively(epoch(2), 3.1)
    assert not a.lively(epoch(9), 0.0)


def test_a_lost_peer_that_may_never_have_heard_of_us_still_hears_who_we_are() -> None:
    """Our only Hello may have been lost; without one it could never say that a failed room is drained."""
    a = table(1, "a")
    a.on_hello(hello(epoch(2), b"", "b"), 0.0)
    a.use(epoch(2), 0.0)
    assert losses(a.tick(30.0)) == [
        (epoch(2), "peer i/0 (epoch 02020202020202020202020202020202) at b: silent for 30.0 s")
    ]
    assert [e.frame.dst for e in a.tick(31.0) if isinstance(e, SendTo) and isinstance(e.frame, Hello)] == [epoch(2)]
    b = used()
    b.on_frame(Heartbeat(src=epoch(2), dst=epoch(1)), 0.0)
    b.tick(30.0)
    assert b.tick(31.0) == [], "it knows us"


def test_silence_is_loss_and_a_word_after_it_brings_the_peer_back() -> None:
    a = used()
    assert losses(a.tick(29.9)) == []
    assert losses(a.tick(30.0)) == [
        (epoch(2), "peer i/0 (epoch 02020202020202020202020202020202) at b: silent for 30.0 s")
    ]
    assert a.tick(31.0) == []
    assert (a.at("b"), a.epochs(), a.lively(epoch(2), 30.0)) == (None, (), False)
    ok, effects = a.on_frame(Heartbeat(src=epoch(2), dst=epoch(1)), 40.0)
    assert ok
    assert [type(e) for e in effects] == [Up]
    assert a.on_frame(Heartbeat(src=epoch(2), dst=epoch(1)), 43.0) == (True, [])
    beats = [e.frame for now in (43.0, 44.0) for e in a.tick(now) if isinstance(e, SendTo)]
    assert [type(frame) for frame in beats] == [Hello, Heartbeat, Heartbeat], "it is told that it had been lost"
    a.lose(epoch(2), PeerLostError("again"))
    assert [type(e) for e in a.on_hello(hello(epoch(2), epoch(1), "b"), 42.0)] == [Up]
    assert a.on_hello(hello(epoch(2), epoch(1), "b"), 43.0) == [Greeted(epoch(2))]
    assert a.on_hello(hello(epoch(2), epoch(1), "b"), 43.1) == [], "at most twice a heartbeat"


def test_silence_is_judged_up_to_what_was_taken_in() -> None:
    """A thread that stood still has frames to look at before it may say that their sender was silent."""
    a = used()
    a.caught_up(1.0)
    assert losses(a.tick(40.0)) == []
    assert silent(a, epoch(2), 40.0) == 1.0
    a.on_frame(Heartbeat(src=epoch(2), dst=epoch(1)), 40.0)
    a.caught_up(40.0)
    assert losses(a.tick(40.0)) == []
    a.caught_up(70.0)
    assert len(losses(a.tick(70.0))) == 1


def test_a_connection_that_is_not_back_in_three_seconds_is_loss() -> None:
    a = met()
    a.on_closed("b", 0.5)
    a.on_closed("b", 3.0)
    a.on_closed("nobody", 3.0)
    assert losses(a.tick(3.4)) == []
    a.on_opened("b")
    a.on_opened("nobody")
    assert losses(a.tick(9.0)) == []
    a.on_closed("b", 10.0)
    assert losses(a.tick(13.0)) == [
        (epoch(2), "peer i/0 (epoch 02020202020202020202020202020202) at b: its connection broke 3.0 s ago")
    ]


def test_a_transports_report_is_loss_once() -> None:
    a = met()
    error = TransportError("its link is down")
    assert a.lose(epoch(2), error) == [Lost(epoch(2), error)]
    assert a.lose(epoch(2), error) == []
    assert a.lose(epoch(7), error) == []


def test_a_life_that_has_ended_is_not_revived_by_what_of_it_is_still_under_way() -> None:
    """Lost by silence or not, known or forgotten by now; another life at its address is welcome."""
    a = used()
    assert losses(a.tick(40.0)) != []
    assert a.lose(epoch(2), PeerLostError("it has ended"), ended=True) == []
    late = Heartbeat(src=epoch(2), dst=epoch(1))
    for now in (40.1, 40.1 + FORGET_AFTER * Options().silence_s):
        assert a.on_frame(late, now) == (False, [])
        assert a.on_hello(hello(epoch(2), epoch(1), "b"), now) == []
        a.tick(now)
    assert a.epochs() == ()
    assert [e for e in a.on_hello(hello(epoch(3), epoch(1), "b"), 700.0) if isinstance(e, Up)]


def test_a_peer_that_stays_lost_is_forgotten_and_may_come_back() -> None:
    """Nobody is kept for ever; a long partition is no death."""
    a = used()
    a.tick(30.0)
    a.release(a._peers[epoch(2)])
    assert a.tick(30.0 * FORGET_AFTER - 1) == []
    effects = a.tick(30.0 * FORGET_AFTER)
    assert (forgotten(effects), effects[1:]) == ([epoch(2)], [Forget("b")])
    assert a.address(epoch(2)) is None
    assert any(isinstance(e, Up) for e in a.on_hello(hello(epoch(2), epoch(1), "b"), 9999.0))


def test_lives_and_addresses_that_came_and_went_are_bounded() -> None:
    a = table(1, "a")
    a.MAX_FORGOTTEN = 8
    a._answers_to = Answers(8)
    for n in range(2, 60):
        a.on_hello(hello(epoch(n), b"", "b", born=n), float(n))
        a.on_hello(hello(epoch(200), b"", f"x{n}", version=VERSION + 1), float(n))
    assert len(a._forgotten) == len(a._answers_to._answered) == 8
    assert a.epochs() == (epoch(59),)


def crowd(peers: int = 4) -> PeerTable[KnownPeer]:
    """A table that may know so many, and knows as many who have only introduced themselves, the first one longest."""
    options = Options(peers=peers)
    a = PeerTable(epoch(1), "a", lambda dst: hello(epoch(1), dst, "a"), admit, KnownPeer, options)
    for n in range(peers):
        a.on_hello(hello(epoch(100 + n), b"", f"p{n}"), 0.1 * n)
    return a


def test_a_flood_of_introductions_is_bounded_and_newcomers_still_get_in() -> None:
    """Who never named our epoch makes room, the oldest first."""
    a = crowd()
    effects = a.on_hello(hello(epoch(50), b"", "new"), 1.0)
    assert losses(effects) == []
    assert (forgotten(effects[:1]), effects[1]) == ([epoch(100)], Forget("p0"))
    assert any(isinstance(e, Up) for e in effects)
    assert len(a.epochs()) == 4
    for n in range(60_000):
        src = Epoch(n.to_bytes(16, "big"))
        a.on_hello(hello(src, b"", f"flood{n}"), 2.0)
    assert len(a.epochs()) == 4


def test_a_peer_that_named_our_epoch_makes_room_after_those_that_did_not() -> None:
    """By a Hello or by any other frame; the one that was silent for longest goes first."""
    a = crowd()
    a.on_frame(Heartbeat(src=epoch(100), dst=epoch(1)), 1.0)
    for n, src in enumerate((101, 102, 103, 100)):
        assert forgotten(a.on_hello(hello(epoch(50 + n), epoch(1), f"new{n}"), 2.0)) == [epoch(src)]


def test_a_peer_in_use_keeps_its_place() -> None:
    """A newcomer is refused by name when all are in use, and is welcome when one is not any more."""
    a = crowd()
    for n in range(4):
        a.use(epoch(100 + n), 1.0)
    effects = a.on_hello(hello(epoch(50), b"", "new"), 2.0)
    assert [e.frame for e in effects if isinstance(e, SendTo)] == [
        Refused(
            src=epoch(1),
            dst=epoch(50),
            address="a",
            field="links",
            ours="",
            theirs="rooms use all 4 peers that there may be: see the options peers and link_descriptors",
        )
    ]
    assert set(a.epochs()) == {epoch(100 + n) for n in range(4)}
    a.release(a._peers[epoch(102)])
    a.on_hello(hello(epoch(50), b"", "new"), 4.0)
    assert set(a.epochs()) == {epoch(n) for n in (100, 101, 103, 50)}


def test_a_lost_peer_that_a_room_uses_keeps_its_place() -> None:
    """Memory may wait for evidence about it: it makes room once no room uses it, and nothing is left of it then."""
    a = crowd()
    for n in range(4):
        a.use(epoch(100 + n), 0.5)
    a.lose(epoch(102), TransportError("gone"))
    effects = a.on_hello(hello(epoch(50), b"", "new"), 2.0)
    assert not any(isinstance(e, Up | Forgotten) for e in effects)
    assert a.known(epoch(102)) is not None
    a.release(a._peers[epoch(102)])
    effects = a.on_hello(hello(epoch(50), b"", "new"), 4.0)
    assert [type(e) for e in effects] == [Forgotten, Forget, SendTo, Up]
    assert forgotten(effects) == [epoch(102)]


def test_the_lost_make_room_before_anybody_else() -> None:
    a = crowd()
    a.on_frame(Heartbeat(src=epoch(102), dst=epoch(1)), 1.0)
    a.lose(epoch(102), TransportError("gone"))
    effects = a.on_hello(hello(epoch(50), b"", "new"), 2.0)
    assert losses(effects) == []
    assert Forget("p2") in effects
    assert epoch(102) not in a.epochs()
    assert a.address(epoch(102)) is None


def test_a_life_says_the_same_of_itself_for_ever() -> None:
    """Another address, rank or memory under a known epoch is somebody else's word."""
    a = met()
    first = a._peers[epoch(2)].hello
    for change in ({"address": "c"}, {"rank": 1}, {"descriptor": b"other"}, {"pid": 2}, {"regions": (1,)}):
        assert a.on_hello(msgspec.structs.replace(first, **change), 1.0) == []
    assert a._peers[epoch(2)].hello == first


def unreachable(effects: list[PeerEffect]) -> list[str]:
    return [str(e.error) for e in effects if isinstance(e, Unreachable)]


def test_who_asks_again_for_a_lost_peer_is_told_soon() -> None:
    """Within the time that a broken connection may take to come back; a life that has come answers at once."""
    a, o = met(), Options()
    a.lose(epoch(2), PeerLostError("its process has ended"))
    a.dial("b", 1.0)
    assert unreachable(a.tick(1.0 + o.closed_s - 0.1)) == []
    assert unreachable(a.tick(1.0 + o.closed_s)) == [f"no answer from b within {o.closed_s:g} s"]
    (said,) = unreachable(a.dial("b", 10.0))
    assert said == "no answer from b within 3 s; still so 9.0 s after the first attempt"
    ups = [e for e in a.on_hello(hello(epoch(3), epoch(1), "b", born=2), 10.1) if isinstance(e, Up)]
    assert [up.peer for up in ups] == [epoch(3)]
    assert a.dial("b", 10.2) == []
    assert unreachable(a.tick(20.0)) == []
    a.lose(epoch(3), PeerLostError("its process has ended"))
    assert unreachable(a.dial("b", 30.0)) == [], "nothing is known of the next life"


def test_where_a_peer_was_lost_a_connection_that_cannot_be_made_is_the_answer() -> None:
    """A fresh connection shows it; one that was never broken is kept."""
    a = met()
    a.lose(epoch(2), PeerLostError("its process has ended"))
    (hello_only,) = a.dial("b", 1.0)
    assert isinstance(hello_only, SendTo)
    a.on_closed("b", 1.1)
    assert unreachable(a.tick(1.1)) == ["peer at b: no process listens there, for less than 0.1 s"]
    b = met()
    b.on_closed("b", 1.0)
    b.lose(epoch(2), PeerLostError("its process has ended"))
    assert [type(effect) for effect in b.dial("b", 1.2)] == [Forget, SendTo]
    assert unreachable(b.tick(1.3)) == []
    b.on_closed("b", 1.4)
    assert len(unreachable(b.tick(1.4))) == 1


def test_an_address_that_failed_is_dialled_for_as_long_as_it_is_asked_for() -> None:
    """So an endpoint that starts there is found within a heartbeat, and until then nothing waits for it."""
    a, o = table(1, "a"), Options()
    a.dial("b", 0.0)
    a.on_closed("b", 0.0)
    assert len(unreachable(a.tick(o.closed_s))) == 1
    greeted = [o.closed_s]
    for step in range(600):
        now = o.closed_s + step / 10
        out = a.tick(now)
        assert not [e for e in out if isinstance(e, Forget | Unreachable)], "each failure is reported once"
        greeted += [now for e in out if isinstance(e, SendTo)]
        assert step % 200 or len(unreachable(a.dial("b", now))) == 1
    assert all(later - sooner < o.heartbeat_s + 0.2 for sooner, later in pairwise(greeted[2:]))
    assert len(greeted) > 50
    assert Forget("b") in a.tick(now + o.silence_s)


def test_where_nobody_answered_once_the_next_is_told_soon() -> None:
    """The first waits, since an endpoint may be about to start; whoever has come is waited for as ever."""
    a, o = table(1, "a"), Options()
    a.dial("b", 0.0)
    assert unreachable(a.tick(o.silence_s - 0.1)) == []
    assert len(unreachable(a.tick(o.silence_s))) == 1
    assert Forget("b") in a.tick(2 * o.silence_s)
    a.dial("b", 100.0)
    assert len(unreachable(a.tick(100.0 + o.closed_s))) == 1
    a.on_hello(hello(epoch(2), epoch(1), "b"), 200.0)
    assert a.at("b") == epoch(2)


def test_addresses_where_nobody_is_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disagg_kv.core.peers.dials.MAX_ABSENT", 2)
    a, o = table(1, "a"), Options()
    for address in "bcd":
        a.dial(address, 0.0)
    assert len(unreachable(a.tick(o.silence_s))) == 3
    assert len(a.tick(2 * o.silence_s)) == 3
    for address in "bcd":
        a.dial(address, 100.0)
    assert sorted(unreachable(a.tick(100.0 + o.closed_s))) == [
        f"no answer from {address} within {o.closed_s:g} s" for address in "cd"
    ], "the first is forgotten, and waited for"


def test_a_peer_that_ends_before_it_says_who_it_is_is_noticed_by_its_connection() -> None:
    """Not if the connection comes back."""
    a, o = table(1, "a"), Options()
    a.dial("b", 0.0)
    a.on_opened("b")
    a.on_closed("b", 1.0)
    a.on_opened("b")
    assert unreachable(a.tick(1.0 + o.closed_s)) == []
    a.on_closed("b", 5.0)
    a.on_closed("b", 5.5)
    assert unreachable(a.tick(5.0 + o.closed_s - 0.1)) == []
    (said,) = unreachable(a.tick(5.0 + o.closed_s))
    assert "its connection broke 3.0 s ago, before it said who it is" in said


def test_an_address_where_nobody_listens_is_given_up_soon() -> None:
    """Well before silence would tell; not if somebody listens there in time."""
    a, o = table(1, "a"), Options()
    a.dial("b", 0.0)
    a.dial("c", 0.0)
    for address in "bc":
        a.on_closed(address, 0.1)
    a.on_opened("c")
    (said,) = unreachable(a.tick(0.1 + o.closed_s))
    assert "peer at b: no process listens there, for 3.0 s" in said


def test_a_lost_peer_whose_connection_is_broken_is_forgotten_soon() -> None:
    """With its address, for which the channel holds descriptors."""
    a, o = used(), Options()
    a.on_closed("b", 1.0)
    (lost,) = [e for e in a.tick(1.0 + o.closed_s) if isinstance(e, Lost)]
    assert "its connection broke" in str(lost.error)
    a.release(a._peers[epoch(2)])
    assert Forget("b") not in a.tick(o.silence_s - 0.1)
    assert Forget("b") in a.tick(o.silence_s)
    assert a.address(epoch(2)) is None


def test_whoever_is_refused_from_ever_new_addresses_leaves_a_bounded_number_of_connections() -> None:
    """An answer opens a connection; one to a peer that was admitted since is not dropped."""
    a = table(1, "a")
    connected: set[str] = set()
    for n in range(3 * MAX_REFUSED):
        for effect in a.on_hello(hello(epoch(10 + n), b"", f"s{n}", role="strange"), float(n)):
            (connected.add if isinstance(effect, SendTo) else connected.remove)(effect.address)  # type: ignore[union-attr]
        if n == 5:
            assert a.on_hello(hello(epoch(3), epoch(1), "s3"), float(n))
    assert len(connected) == MAX_REFUSED + 1
    assert {"s3", f"s{n}"} <= connected


def test_a_life_that_is_refused_from_ever_new_addresses_leaves_one_connection() -> None:
    a = table(1, "a")
    for n in range(1, 9):
        effects = a.on_hello(hello(epoch(2), b"", f"s{n}", role="strange"), float(n))
        assert [effect.address for effect in effects if isinstance(effect, SendTo)] == [f"s{n}"]
        assert [effect.address for effect in effects if isinstance(effect, Forget)] == [f"s{n - 1}"][: n - 1]


def test_a_hello_that_is_repeated_is_admitted_once_and_one_that_differs_is_looked_at() -> None:
    """Who repeats its ``Hello`` costs a comparison; who says something else of itself is looked at again."""
    asked: list[Hello] = []
    a = PeerTable(epoch(1), "a", lambda dst: hello(epoch(1), dst, "a"), asked.append, KnownPeer, Options())
    a.on_hello(hello(epoch(2), b"", "b"), 0.0)
    again = a.on_hello(hello(epoch(2), epoch(1), "b"), 1.0)
    assert (len(asked), again) == (1, [])
    assert silent(a, epoch(2), 1.0) == 0
    changed = msgspec.structs.replace(hello(epoch(2), epoch(1), "b"), ring_bytes=4096)
    assert a.on_hello(changed, 2.0) == []
    assert (asked[1:], silent(a, epoch(2), 2.0)) == ([changed], 1.0)
