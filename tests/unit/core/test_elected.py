"""How the ranks of one instance agree; what holds under any network is a property of its own."""

from __future__ import annotations

import msgspec
import pytest

from disagg_kv.core import Decided, Elected, Options, Outcome, RoomKey, Send
from disagg_kv.core.verdict.elected import USED_TWICE
from disagg_kv.core.wire.frames import Decision, Vote
from disagg_kv.ids import Epoch, Generation, Rank, RoomId

ROOM = RoomId(b"r")
E = [Epoch(bytes([r] * 16)) for r in range(5)]
LOST = "of instance 'P' is lost"


def remembered(one: Elected) -> int:
    """Rooms that are kept, decided or not."""
    return len(one._rooms) + len(one._pending)


def key(generation: int, room: RoomId = ROOM) -> RoomKey:
    return RoomKey(room, Generation(generation))


def leader(world: int = 3, options: Options | None = None) -> Elected:
    one = Elected(Rank(0), world, E[0], options or Options(), "P")
    for rank in range(1, world):
        assert one.joined(E[rank], Rank(rank), 0.0) == []
    return one


def follower(met: bool = True, options: Options | None = None) -> Elected:
    one = Elected(Rank(1), 3, E[1], options or Options(), "P")
    if met:
        one.joined(E[0], Rank(0), 0.0)
    return one


def vote(src: int, generation: int, ok: bool | None, room: RoomId = ROOM) -> Vote:
    return Vote(src=E[src], dst=E[0], room=room, generation=generation, ok=ok, reason="because")


def decision(generation: int, ok: bool | None, src: int = 0, shared: bool = False, room: RoomId = ROOM) -> Decision:
    return Decision(src=E[src], dst=E[1], room=room, generation=generation, ok=ok, shared=shared, reason="because")


def outcomes(effects: list[Send | Outcome]) -> list[tuple[int, bool]]:
    return [(e.key.generation, e.decided.ok) for e in effects if isinstance(e, Outcome)]


def decisions(effects: list[Send | Outcome]) -> list[tuple[Epoch, int, bool | None]]:
    return [
        (e.to, e.frame.generation, e.frame.ok) for e in effects if isinstance(e, Send) and isinstance(e.frame, Decision)
    ]


def votes(effects: list[Send | Outcome] | list[Send]) -> list[tuple[int, bool | None]]:
    return [(e.frame.generation, e.frame.ok) for e in effects if isinstance(e, Send) and isinstance(e.frame, Vote)]


def test_one_rank_alone_decides_at_once() -> None:
    one = Elected(Rank(0), 1, E[0], Options(), "P")
    assert one.vote(key(1), None, "", 0.0) == []
    assert one.vote(key(1), True, "", 0.0) == [Outcome(key(1), Decided(True, ""))]
    assert one.vote(key(2), False, "why", 0.0) == [Outcome(key(2), Decided(False, "why"))]
    assert one.next_at() is None


def test_success_needs_every_rank_and_each_hears_it_in_its_own_generation() -> None:
    one = leader()
    one.vote(key(1), None, "", 0.0)
    assert decisions(one.on_vote(vote(1, 11, None), 0.0)) == [(E[1], 11, None)]
    assert outcomes(one.vote(key(1), True, "", 0.0)) == []
    assert decisions(one.on_vote(vote(1, 11, True), 0.0)) == [(E[1], 11, None)]
    effects = one.on_vote(vote(2, 22, True), 0.0)
    assert outcomes(effects) == [(1, True)]
    assert sorted(decisions(effects)) == [(E[1], 11, True), (E[2], 22, True)]


def test_a_decided_room_is_answered_again_and_never_otherwise() -> None:
    one = leader(2)
    one.vote(key(1), True, "", 0.0)
    one.on_vote(vote(1, 11, True), 0.0)
    assert decisions(one.on_vote(vote(1, 11, False), 0.0)) == [(E[1], 11, True)]
    assert outcomes(one.vote(key(1), False, "too late", 0.0)) == [(1, True)]


def test_votes_of_strangers_and_to_other_ranks_are_dropped() -> None:
    assert leader(2).on_vote(vote(4, 1, True), 0.0) == []
    assert follower().on_vote(vote(2, 1, True), 0.0) == []
    one = follower()
    one.vote(key(1), None, "", 0.0)
    assert one.on_decision(decision(1, True, src=2), 0.0) == []
    assert one.on_decision(decision(9, True), 0.0) == []


def test_a_vote_is_repeated_until_it_is_decided_and_rarely_once_it_is_known() -> None:
    """Should a decision be lost, the room is not open until its deadline."""
    one = follower()
    assert votes(one.vote(key(1), None, "", 0.0)) == [(1, None)]
    assert votes(one.tick(0.2)) == [(1, None)]
    assert one.on_decision(decision(1, None), 0.0) == []
    assert one.tick(5.0) == []
    assert votes(one.tick(11.0)) == [(1, None)]
    assert votes(one.vote(key(1), True, "", 12.0)) == [(1, True)]
    assert one.on_decision(decision(1, None), 0.0) == []
    assert votes(one.tick(12.2)) == [(1, True)]
    assert outcomes(one.on_decision(decision(1, True), 0.0)) == [(1, True)]
    assert (one.next_at(), one.undecided) == (None, 0)
    assert one.vote(key(1), False, "too late", 13.0) == []


def test_success_may_be_taken_back_until_it_is_decided() -> None:
    one = leader()
    one.on_vote(vote(1, 11, True), 0.0)
    assert (E[1], 11, False) in decisions(one.on_vote(vote(1, 11, False), 0.0))


def test_failure_is_not_taken_back_by_a_success_that_comes_after_it() -> None:
    """Aux data cannot be stored: the vote that says so may be lost, and must be repeated then."""
    one = follower()
    one.vote(key(1), None, "", 0.0)
    assert votes(one.vote(key(1), False, "no space for aux", 0.0)) == [(1, False)]
    assert one.vote(key(1), True, "", 0.0) == []
    assert votes(one.tick(0.2)) == [(1, False)]


def test_a_rank_that_is_lost_fails_the_rooms_that_need_it() -> None:
    one = leader()
    for generation in (1, 2):
        one.vote(key(generation, RoomId(b"%d" % generation)), None, "", 0.0)
    one.on_vote(vote(1, 11, True, RoomId(b"2")), 0.0)
    effects = one.lost(E[1], 1.0)
    assert outcomes(effects) == [(1, False)]
    assert LOST in effects[0].decided.reason if isinstance(effects[0], Outcome) else False
    assert one.lost(E[1], 1.0) == []
    other = follower()
    other.joined(E[2], Rank(2), 0.0)
    other.vote(key(1), None, "", 0.0)
    assert other.lost(E[2], 0.0) == other.lost(E[2], 0.0) == []


def test_a_rank_that_succeeded_and_then_was_lost_does_not_fail_the_room() -> None:
    one = leader()
    one.vote(key(1), True, "", 0.0)
    one.on_vote(vote(1, 11, True), 0.0)
    assert one.lost(E[1], 0.0) == []
    effects = one.on_vote(vote(2, 22, True), 0.0)
    assert (outcomes(effects), decisions(effects)) == ([(1, True)], [(E[2], 22, True)])


def test_another_life_of_a_rank_that_comes_before_its_end_is_noticed_is_the_end_of_the_first() -> None:
    """At another address nothing else says so; what needs the first would wait until its deadline."""
    one = leader()
    one.vote(key(1), None, "", 0.0)
    effects = one.joined(E[3], Rank(1), 1.0)
    assert outcomes(effects) == [(1, False)]
    assert one.lost(E[1], 2.0) == []
    one.vote(key(2, RoomId(b"2")), True, "", 3.0)
    one.on_vote(vote(2, 22, True, RoomId(b"2")), 3.0)
    assert outcomes(one.on_vote(vote(3, 1, True, RoomId(b"2")), 3.0)) == [(2, True)]


def test_what_an_older_incarnation_of_a_rank_begins_has_failed() -> None:
    """Rank 0 answers each of its votes the same, and its uses take no part in the rooms of the younger life."""
    one = leader()
    one.joined(E[3], Rank(1), 1.0)
    one.followed(E[1], Rank(1))
    one.vote(key(1), None, "", 1.0)
    for ok in (None, True, False):
        (answer,) = one.on_vote(vote(1, 11, ok), 2.0)
        assert decisions([answer]) == [(E[1], 11, False)]
        assert isinstance(answer, Send)
        assert isinstance(answer.frame, Decision)
        assert answer.frame.reason == "another incarnation of rank 1 is there"
    one.vote(key(1), True, "", 3.0)
    one.on_vote(vote(2, 22, True), 3.0)
    assert outcomes(one.on_vote(vote(3, 1, True), 3.0)) == [(1, True)]


def test_what_an_elder_life_begins_takes_no_memory() -> None:
    one = leader()
    one.joined(E[3], Rank(1), 1.0)
    one.followed(E[1], Rank(1))
    for n in range(50):
        assert decisions(one.on_vote(vote(1, n, None, RoomId(b"%d" % n)), 1.0)) == [(E[1], n, False)]
    assert remembered(one) == 0


def test_a_life_that_another_has_followed_hears_how_a_room_ends_that_it_voted_for() -> None:
    """Its success was counted, so it is no failure of its rank that another life has come."""
    one = leader()
    one.vote(key(1), True, "", 0.0)
    one.on_vote(vote(1, 11, True), 0.0)
    one.joined(E[3], Rank(1), 1.0)
    one.followed(E[1], Rank(1))
    assert decisions(one.on_vote(vote(1, 11, True), 2.0)) == [(E[1], 11, None)]
    assert outcomes(one.on_vote(vote(2, 22, True), 3.0)) == [(1, True)]
    assert decisions(one.on_vote(vote(1, 11, True), 4.0)) == [(E[1], 11, True)]
    assert decisions(one.on_vote(vote(1, 10, None), 5.0)) == [(E[1], 10, False)]


def test_a_life_that_another_has_followed_counts_again_when_that_one_is_lost() -> None:
    """Late echoes of what it began meanwhile pair with nothing; once lost itself it is answered no more."""
    one = leader(2)
    one.joined(E[3], Rank(1), 1.0)
    one.followed(E[1], Rank(1))
    one.on_vote(vote(1, 11, None), 2.0)
    one.lost(E[3], 3.0)
    assert one.joined(E[1], Rank(1), 3.0) == []
    assert decisions(one.on_vote(vote(1, 11, None), 4.0)) == [(E[1], 11, False)]
    one.vote(key(1), True, "", 4.0)
    assert outcomes(one.on_vote(vote(1, 12, True), 5.0)) == [(1, True)]
    one.joined(E[3], Rank(1), 6.0)
    one.followed(E[1], Rank(1))
    one.lost(E[1], 7.0)
    assert one.on_vote(vote(1, 13, None), 8.0) == []


def test_another_life_of_rank_0_that_comes_before_the_end_of_the_first_is_noticed_leads() -> None:
    """What the first had fails, what it did not have goes to the next one, or fails soon."""
    one = follower()
    for n in (1, 2, 3):
        one.vote(key(n, RoomId(b"%d" % n)), None, "", 0.0)
    shared = decision(1, None, shared=True)
    one.on_decision(msgspec.structs.replace(shared, room=b"1"), 0.0)
    effects = one.joined(E[4], Rank(0), 1.0)
    assert (outcomes(effects), votes(effects)) == ([(1, False)], [(1, False), (2, None), (3, None)])
    assert one.lost(E[0], 2.0) == []
    assert one.on_decision(msgspec.structs.replace(decision(2, None, src=4, shared=True), room=b"2"), 2.0) == []
    assert votes(one.tick(4.0))[-1] == (3, False)
    one.vote(key(2, RoomId(b"2")), True, "", 5.0)
    assert outcomes(one.on_decision(msgspec.structs.replace(decision(2, True, src=4), room=b"2"), 9.0)) == [(2, True)]


def test_a_life_that_is_there_already_joins_once() -> None:
    """Saying so again neither fails nor repeats anything."""
    one = follower()
    one.vote(key(1), None, "", 0.0)
    assert one.joined(E[0], Rank(0), 1.0) == []
    assert one.undecided == 1


def test_without_rank_0_open_rooms_fail_and_it_hears_of_that_when_it_is_heard_again() -> None:
    """It may have counted a success of ours that is none any more."""
    one = follower()
    one.vote(key(1), None, "", 0.0)
    one.on_decision(decision(1, None, shared=True), 0.0)
    one.vote(key(1), True, "", 0.0)
    assert outcomes(one.lost(E[0], 1.0)) == [(1, False)]
    assert one.tick(9.0) == []
    assert one.vote(key(1), True, "", 1.0) == []
    assert one.undecided == 0
    assert votes(one.joined(E[0], Rank(0), 2.0)) == [(1, False)]
    assert one.lost(E[0], 3.0) == []
    assert votes(one.joined(E[0], Rank(0), 4.0)) == [(1, False)]
    assert outcomes(one.on_decision(decision(1, False), 0.0)) == []
    assert remembered(one) == 0


def test_a_room_that_no_life_of_rank_0_has_opened_waits_for_the_next_one() -> None:
    """It began when rank 0 had restarted and nobody had noticed yet."""
    one = follower()
    one.vote(key(1), None, "", 0.0)
    assert one.on_decision(decision(1, None), 0.0) == []
    one.vote(key(1), True, "", 0.0)
    assert one.lost(E[0], 1.0) == []
    assert one.next_at() == 4.0
    assert votes(one.joined(E[4], Rank(0), 2.0)) == [(1, True)]
    assert one.on_decision(decision(1, None, src=4, shared=True), 2.0) == []
    assert outcomes(one.tick(9.0)) == []
    assert outcomes(one.on_decision(decision(1, True, src=4), 9.0)) == [(1, True)]
    assert one.next_at() is None


def test_a_room_that_the_next_life_of_rank_0_does_not_have_is_voted_against() -> None:
    """Within ``closed_s``; rank 0 may have counted our success, so it has the last word."""
    one = follower()
    one.vote(key(1), None, "", 0.0)
    one.vote(key(1), True, "", 0.0)
    one.lost(E[0], 1.0)
    one.joined(E[4], Rank(0), 2.0)
    assert one.on_decision(decision(1, None, src=4), 2.0) == []
    effects = one.tick(4.0)
    assert (outcomes(effects), votes(effects)[-1]) == ([], (1, False))
    assert outcomes(one.on_decision(decision(1, False, src=4), 4.0)) == [(1, False)]


def test_a_room_fails_when_no_life_of_rank_0_comes_and_the_one_that_comes_later_hears_of_it() -> None:
    one = follower()
    one.vote(key(1), None, "", 0.0)
    one.lost(E[0], 1.0)
    one.vote(key(2, RoomId(b"2")), None, "", 1.5)
    one.vote(key(2, RoomId(b"2")), False, "why", 1.5)
    assert outcomes(one.tick(3.9)) == []
    assert outcomes(one.tick(4.0)) == [(1, False)]
    assert votes(one.joined(E[4], Rank(0), 9.0)) == [(1, False), (2, False)]


def test_a_room_that_begins_while_rank_0_is_lost_waits_for_it_as_long_as_for_anybody_silent() -> None:
    """Within ``silence_s`` it is there again and has the room, or the room fails."""
    one = follower()
    one.lost(E[0], 1.0)
    for n in (1, 2):
        assert one.vote(key(n, RoomId(b"%d" % n)), None, "", 2.0) == []
        assert one.vote(key(n, RoomId(b"%d" % n)), True, "", 3.0) == []
    assert one.tick(31.9) == []
    assert outcomes(one.tick(32.0)) == [(1, False), (2, False)]
    assert (one.next_at(), one.undecided) == (None, 0)


def test_a_failure_that_the_lost_life_of_rank_0_did_not_answer_is_told_to_the_next() -> None:
    """Else the next one would wait for our vote until its deadline."""
    one = follower()
    one.vote(key(1), None, "", 0.0)
    one.vote(key(1), False, "why", 0.0)
    assert outcomes(one.lost(E[0], 1.0)) == [(1, False)]
    assert votes(one.joined(E[4], Rank(0), 2.0)) == [(1, False)]


def test_rank_0_says_when_its_engine_has_opened_the_room_too() -> None:
    """Before or after the other rank's: from then on the room ends with that life of rank 0."""
    one = leader(2)
    (first,) = one.on_vote(vote(1, 11, None), 0.0)
    (then,) = one.vote(key(1), None, "", 0.0)
    (again,) = one.on_vote(vote(1, 11, None), 0.0)
    shared = [e.frame.shared for e in (first, then, again) if isinstance(e, Send) and isinstance(e.frame, Decision)]
    assert shared == [False, True, True]


def test_a_room_that_fails_before_rank_0_is_known_fails_at_once_and_a_success_waits() -> None:
    one = follower(met=False)
    one.vote(key(1), None, "", 0.0)
    assert outcomes(one.vote(key(1), False, "why", 0.0)) == [(1, False)]
    one.vote(key(2, RoomId(b"2")), None, "", 0.0)
    assert one.vote(key(2, RoomId(b"2")), True, "", 0.0) == []
    assert votes(one.joined(E[0], Rank(0), 1.0)) == [(1, False), (2, True)]


def test_a_new_life_of_a_rank_is_not_taken_for_its_old_one() -> None:
    """Its generations begin again."""
    one = leader(2)
    one.vote(key(1), True, "", 0.0)
    one.on_vote(vote(1, 1, True), 0.0)
    one.lost(E[1], 0.0)
    one.joined(E[3], Rank(1), 0.0)
    assert decisions(one.on_vote(vote(3, 1, None, RoomId(b"next")), 0.0)) == [(E[3], 1, None)]


def test_open_rooms_are_never_forgotten_by_rank_0() -> None:
    one = leader(2, Options(tombstones=2))
    for n in range(1, 6):
        one.vote(key(n, RoomId(b"%d" % n)), None, "", 0.0)
    assert remembered(one) == 5


def test_rooms_that_wait_for_an_absent_rank_0_stay_and_those_that_ended_are_bounded() -> None:
    """What the next rank 0 is told of; a room that waits is never given up for the number of others."""
    one = follower(met=False, options=Options(tombstones=2))
    keys = [key(n, RoomId(b"%d" % n)) for n in range(1, 9)]
    assert not [e for k in keys for e in one.vote(k, None, "", 0.0)]
    assert one.undecided == remembered(one) == 8
    assert outcomes([e for k in keys[:5] for e in one.vote(k, False, "given up", 1.0)]) == [
        (n, False) for n in range(1, 6)
    ]
    assert (one.undecided, remembered(one)) == (3, 5)
    one.joined(E[0], Rank(0), 2.0)
    assert remembered(one) == 5


def test_rank_0_remembers_rooms_that_a_rank_may_still_open_while_others_end() -> None:
    """Decided before all ranks have opened them: whoever opens one later hears how it ended."""
    one = leader(3, Options(tombstones=2))
    one.vote(key(1, RoomId(b"early")), None, "", 0.0)
    one.vote(key(1, RoomId(b"early")), False, "given up", 0.0)
    for n in range(2, 30):
        name = RoomId(b"%d" % n)
        one.vote(key(n, name), True, "", 1.0)
        for rank in (1, 2):
            one.on_vote(vote(rank, n, True, name), 1.0)
    assert remembered(one) <= 4
    assert decisions(one.on_vote(vote(1, 50, None, RoomId(b"early")), 2.0)) == [(E[1], 50, False)]


def used_twice(effects: list[Send | Outcome]) -> bool:
    """One answer or outcome, and it is this failure."""
    (one,) = effects
    if isinstance(one, Outcome):
        return one.decided == Decided(False, USED_TWICE)
    return isinstance(one.frame, Decision) and (one.frame.ok, one.frame.reason) == (False, USED_TWICE)


@pytest.mark.parametrize("first", [True, False, None])
def test_another_use_of_an_id_never_gets_the_outcome_of_the_first(first: bool | None) -> None:
    """On rank 0 and on a follower, in any order of generations, and whether or not the room is decided."""
    one = leader(2)
    one.vote(key(1), None, "", 0.0)
    one.on_vote(vote(1, 11, None), 0.0)
    if first is not None:
        one.vote(key(1), True, "", 0.0)
        one.on_vote(vote(1, 11, first), 0.0)
    for generation in (12, 10):
        for ok in (None, True):
            (answer,) = one.on_vote(vote(1, generation, ok), 1.0)
            assert decisions([answer]) == [(E[1], generation, False)]
            assert used_twice([answer])
    for ok in (None, True):
        assert used_twice(one.vote(key(2), ok, "", 1.0))
    if first is None:
        one.vote(key(1), True, "", 2.0)
        assert outcomes(one.on_vote(vote(1, 11, True), 2.0)) == [(1, True)]
    else:
        assert decisions(one.on_vote(vote(1, 11, True), 2.0)) == [(E[1], 11, first)]


def test_an_id_that_another_life_of_a_rank_has_used_is_used() -> None:
    """Its success was counted, and the next life's part is another one."""
    one = leader()
    one.vote(key(1), True, "", 0.0)
    one.on_vote(vote(1, 11, True), 0.0)
    one.joined(E[3], Rank(1), 1.0)
    assert used_twice(one.on_vote(vote(3, 1, None), 2.0))
    assert outcomes(one.on_vote(vote(2, 22, True), 3.0)) == [(1, True)]


@pytest.mark.parametrize("met", [True, False])
def test_a_follower_fails_another_use_while_the_first_is_undecided(met: bool) -> None:
    """Also where the first has ended without rank 0; it alone is voted on."""
    one = follower(met)
    one.vote(key(1), None, "", 0.0)
    if not met:
        one.vote(key(1), False, "why", 0.0)
    assert used_twice(one.vote(key(2), None, "", 1.0))
    assert one.vote(key(2), True, "", 1.0) == []
    one.lost(E[0], 1.0)
    assert votes(one.joined(E[4], Rank(0), 2.0)) == [(1, None if met else False)]


def test_what_is_remembered_is_bounded_and_late_votes_on_forgotten_rooms_begin_nothing() -> None:
    """They get the outcome of their own use, whatever has become of the id since."""
    one = leader(2, Options(tombstones=4))
    for n in range(1, 60):
        ok = n % 2 == 1
        one.vote(key(n, RoomId(b"%d" % n)), ok, "why", 0.0)
        one.on_vote(vote(1, n, True, RoomId(b"%d" % n)), 0.0)
    assert remembered(one) == 4
    for n in (3, 4):
        assert decisions(one.on_vote(vote(1, n, None, RoomId(b"%d" % n)), 0.0)) == [(E[1], n, n == 3)]
    assert remembered(one) == 4


def test_a_forgotten_id_that_is_used_again_is_another_room() -> None:
    """It needs every rank again, and no late vote of the first use counts for it."""
    one = leader(2, Options(tombstones=1))
    for n, name in enumerate((ROOM, RoomId(b"other")), 1):
        one.vote(key(n, name), True, "", 0.0)
        one.on_vote(vote(1, n, True, name), 0.0)
    one.vote(key(3), True, "", 1.0)
    assert decisions(one.on_vote(vote(1, 1, True), 1.0)) == [(E[1], 1, True)]
    assert outcomes(one.on_vote(vote(1, 3, False), 2.0)) == [(3, False)]


def test_another_life_of_rank_0_receives_the_votes_against_rooms_that_ended_with_the_first() -> None:
    """Should its engine open one of them, that fails at once."""
    one = follower()
    one.vote(key(1), None, "", 0.0)
    one.on_decision(decision(1, None, shared=True), 0.0)
    assert outcomes(one.lost(E[0], 1.0)) == [(1, False)]
    one.vote(key(2, RoomId(b"2")), None, "", 1.0)
    one.vote(key(3, RoomId(b"3")), None, "", 1.0)
    one.vote(key(3, RoomId(b"3")), False, "why", 1.0)
    assert outcomes(one.lost(E[0], 1.0)) == []
    assert votes(one.joined(E[4], Rank(0), 2.0)) == [(1, False), (2, None), (3, False)]


def test_a_rank_0_that_was_only_silent_hears_again_of_rooms_whose_votes_were_too_many() -> None:
    """It knows them as open since before; a decision that it has made stays as it is."""
    rooms = [RoomId(bytes([n])) for n in range(3)]
    zero, one = leader(2, Options(tombstones=1)), follower(options=Options(tombstones=1))
    for n, room in enumerate(rooms, 1):
        one.vote(key(n, room), None, "", 0.0)
        zero.on_vote(vote(1, n, None, room), 0.0)
    one.lost(E[0], 1.0)
    for n, room in enumerate(rooms, 1):
        one.vote(key(n, room), False, "because", 1.0)
    assert votes(one.joined(E[0], Rank(0), 5.0)) == [(3, False)], "of the votes against rooms it keeps one"
    assert zero.undecided == 3
    for n, room in enumerate(rooms, 1):
        (again,) = one.on_decision(decision(n, None, room=room), 5.0) or [Send(E[0], vote(1, n, False, room))]
        assert isinstance(again, Send)
        assert isinstance(again.frame, Vote)
        assert decisions(zero.on_vote(again.frame, 5.0)) == [(E[1], n, False)]
    assert zero.undecided == 0
    zero.vote(key(9), None, "", 6.0)
    zero.on_vote(vote(1, 8, True), 6.0)
    zero.vote(key(9), True, "", 6.0)
    (late,) = one.on_decision(decision(8, None), 7.0)
    assert isinstance(late, Send)
    assert isinstance(late.frame, Vote)
    assert decisions(zero.on_vote(late.frame, 7.0)) == [(E[1], 8, True)], "the answer to a late frame changes nothing"


def test_a_room_that_only_lost_ranks_have_opened_has_failed() -> None:
    """No rank waits for it, and rank 0 would never forget it: its engine may not open it any more."""
    one = leader(3)
    one.on_vote(vote(1, 1, True), 0.0)
    one.on_vote(vote(2, 2, True), 0.0)
    assert decisions(one.lost(E[1], 1.0)) == []
    assert one.undecided == 1, "rank 2 waits for rank 0"
    assert one.lost(E[2], 2.0) == []
    assert one.undecided == 0
    assert outcomes(one.vote(key(3), None, "", 3.0)) == [(3, False)]
