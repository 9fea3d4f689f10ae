"""What is repeated, and what is remembered."""

from __future__ import annotations

from disagg_kv.ids import Epoch, Generation, RoomId
from disagg_kv.protocol import Ended, Options, Send, Tombstones
from disagg_kv.protocol.frames import Heartbeat
from disagg_kv.protocol.retry import Repeater

PEER, OTHER = Epoch(bytes(16)), Epoch(bytes([1] * 16))
BEAT = Send(PEER, Heartbeat(src=OTHER, dst=PEER))


def times(repeater: Repeater, until: float) -> list[float]:
    """When something went out."""
    sent = []
    while (at := repeater.next_at()) is not None and at <= until:
        assert repeater.tick(at - 1e-6) == []
        assert repeater.tick(at) == [BEAT]
        sent.append(round(at, 3))
    return sent


def test_a_request_is_repeated_ever_more_slowly_until_it_is_answered() -> None:
    """E2: a lost frame costs one bounded retry."""
    repeater = Repeater(Options())
    assert repeater.next_at() is None
    assert repeater.start("a", BEAT, 0.0) is BEAT
    assert times(repeater, 10) == [0.2, 0.6, 1.4, 3.0, 5.0, 7.0, 9.0]
    repeater.stop("a")
    repeater.stop("a")
    assert repeater.next_at() is None
    assert repeater.tick(1e9) == []


def test_a_new_request_under_a_key_replaces_the_old_one() -> None:
    repeater = Repeater(Options())
    repeater.start("a", BEAT, 0.0)
    repeater.start("a", BEAT, 5.0)
    repeater.start("b", BEAT, 6.0)
    assert list(repeater.keys()) == ["a", "b"]
    assert repeater.next_at() == 5.2
    repeater.clear()
    assert list(repeater.keys()) == []


def test_a_request_that_is_known_is_repeated_rarely() -> None:
    repeater = Repeater(Options())
    repeater.start("a", BEAT, 0.0)
    repeater.slow("a")
    repeater.slow("a")
    repeater.slow("never started")
    assert times(repeater, 35) == [10.0, 20.0, 30.0]


def test_an_outcome_is_remembered_per_peer_room_and_generation_and_the_first_stands() -> None:
    """E11: a room id that is used again is another room."""
    tombs = Tombstones(10)
    room = RoomId(b"r")
    tombs.remember(PEER, room, Generation(3), Ended.DONE)
    tombs.remember(PEER, room, Generation(3), Ended.FAILED)
    assert tombs.outcome(PEER, room, Generation(3)) is Ended.DONE
    assert tombs.outcome(PEER, room, Generation(4)) is None
    assert tombs.outcome(PEER, room, Generation(2)) is None
    assert tombs.outcome(OTHER, room, Generation(3)) is None


def test_tombstones_are_bounded_and_what_they_evicted_is_refused() -> None:
    """E14: 4,096 per peer; at or below the highest evicted generation nothing is taken for a new room."""
    limit = Options().tombstones
    tombs = Tombstones(limit)
    for g in range(1, limit + 101):
        tombs.remember(PEER, RoomId(b"%d" % g), Generation(g), Ended.FAILED)
    tombs.remember(OTHER, RoomId(b"1"), Generation(1), Ended.DONE)
    assert len(tombs) == limit + 1 == 4097
    assert tombs.outcome(PEER, RoomId(b"100"), Generation(100)) is Ended.EVICTED
    assert tombs.outcome(PEER, RoomId(b"never seen"), Generation(1)) is Ended.EVICTED
    assert tombs.outcome(PEER, RoomId(b"101"), Generation(101)) is Ended.FAILED
    assert tombs.outcome(PEER, RoomId(b"new"), Generation(limit + 101)) is None


def test_evicted_generations_never_go_back_though_rooms_end_out_of_order() -> None:
    tombs = Tombstones(1)
    for g in (9, 2, 3):
        tombs.remember(PEER, RoomId(b"r"), Generation(g), Ended.DONE)
    assert tombs.outcome(PEER, RoomId(b"r"), Generation(9)) is Ended.EVICTED


def test_peers_are_bounded_too() -> None:
    """E6, E14: epochs of endpoints that came and went do not add up."""
    tombs = Tombstones(1, peers=2)
    for p in range(5):
        for g in (1, 2):
            tombs.remember(Epoch(bytes([p] * 16)), RoomId(b"r"), Generation(g), Ended.DONE)
    assert len(tombs) == 2
    assert tombs.outcome(Epoch(bytes([4] * 16)), RoomId(b"r"), Generation(1)) is Ended.EVICTED
    assert tombs.outcome(Epoch(bytes([0] * 16)), RoomId(b"r"), Generation(2)) is None
