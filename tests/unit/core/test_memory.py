"""What is repeated, and what is remembered."""

from __future__ import annotations

import pytest

from disagg_kv.core import Options, RoomOutcome, Send, Tombstones
from disagg_kv.core.timers import Repeater
from disagg_kv.core.tombstones import BLOCK, GENERATIONS
from disagg_kv.core.wire.frames import Heartbeat
from disagg_kv.ids import Epoch, Generation

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
    """A lost frame costs one bounded retry."""
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
    assert repeater.next_at() == 5.2
    assert repeater.tick(5.2) == [BEAT]
    assert repeater.next_at() == pytest.approx(5.6)
    repeater.clear()
    assert (repeater.tick(1e9), repeater.next_at()) == ([], None)


def test_a_request_that_is_known_is_repeated_rarely() -> None:
    repeater = Repeater(Options())
    repeater.start("a", BEAT, 0.0)
    repeater.slow("a")
    repeater.slow("a")
    repeater.slow("never started")
    assert times(repeater, 35) == [10.0, 20.0, 30.0]


def blocks(tombs: Tombstones) -> int:
    """Blocks of bits that are kept: each takes ``BLOCK / 4`` bytes at most."""
    return sum(len(known.blocks) for known in tombs._known.values())


def test_an_outcome_is_remembered_per_peer_and_generation_and_the_first_stands() -> None:
    """A room id that is used again is another room."""
    tombs = Tombstones()
    tombs.remember(PEER, Generation(3), RoomOutcome.DONE)
    tombs.remember(PEER, Generation(3), RoomOutcome.FAILED)
    assert tombs.outcome(PEER, Generation(3)) is RoomOutcome.DONE
    assert tombs.outcome(PEER, Generation(4)) is None
    assert tombs.outcome(PEER, Generation(2)) is None
    assert tombs.outcome(OTHER, Generation(3)) is None


def test_a_generation_that_waits_is_not_forgotten_while_very_many_end() -> None:
    """In a bounded number of bytes, and each of the others is still known by its outcome."""
    tombs, waits, many = Tombstones(), Generation(5), 300_000
    for g in range(1, many):
        if g != waits:
            tombs.remember(PEER, Generation(g), RoomOutcome.DONE if g % 3 else RoomOutcome.FAILED)
    assert tombs.outcome(PEER, waits) is None
    assert all(tombs.outcome(PEER, Generation(g)) is RoomOutcome.DONE for g in range(7, many, 999))
    assert all(tombs.outcome(PEER, Generation(g)) is RoomOutcome.FAILED for g in range(6, many, 999))
    assert tombs.outcome(PEER, Generation(many)) is None
    assert blocks(tombs) == many // BLOCK + 1


def test_what_a_peer_can_make_us_remember_is_bounded_and_what_is_older_is_refused() -> None:
    """Whatever generations it names; below what is remembered nothing is taken for a new room."""
    tombs = Tombstones()
    for g in range(0, 4 * GENERATIONS, BLOCK // 2):
        tombs.remember(PEER, Generation(g), RoomOutcome.DONE)
    assert blocks(tombs) <= GENERATIONS // BLOCK + 2
    tombs.remember(PEER, Generation(2**62), RoomOutcome.FAILED)
    tombs.remember(PEER, Generation(7), RoomOutcome.DONE)
    assert blocks(tombs) <= GENERATIONS // BLOCK + 2
    assert tombs.outcome(PEER, Generation(7)) is RoomOutcome.EVICTED
    assert tombs.outcome(PEER, Generation(2**62 - GENERATIONS)) is RoomOutcome.EVICTED
    assert tombs.outcome(PEER, Generation(2**62 - GENERATIONS + 1)) is None
    assert tombs.outcome(PEER, Generation(2**62)) is RoomOutcome.FAILED


def test_evicted_generations_never_go_back_though_rooms_end_out_of_order() -> None:
    tombs = Tombstones(generations=1)
    for g in (9, 2, 3):
        tombs.remember(PEER, Generation(g), RoomOutcome.DONE)
    assert tombs.outcome(PEER, Generation(8)) is RoomOutcome.EVICTED
    assert tombs.outcome(PEER, Generation(9)) is RoomOutcome.DONE


def test_peers_are_bounded_too() -> None:
    """Epochs of endpoints that came and went do not add up."""
    tombs = Tombstones(peers=2)
    for p in range(5):
        tombs.remember(Epoch(bytes([p] * 16)), Generation(2), RoomOutcome.DONE)
    assert blocks(tombs) == 2
    assert tombs.outcome(Epoch(bytes([4] * 16)), Generation(2)) is RoomOutcome.DONE
    assert tombs.outcome(Epoch(bytes([0] * 16)), Generation(2)) is None
