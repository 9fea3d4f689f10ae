"""How the ranks of one instance agree; what holds under any network is a property of its own."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from disagg_kv.ids import Epoch, Generation, Rank, RoomId
from disagg_kv.protocol import Agreement, Decided, Options, Outcome, RoomKey, Send
from disagg_kv.protocol.agreement import LIVES
from disagg_kv.protocol.frames import Ballot, Verdict

ROOM = RoomId(b"r")
E = [Epoch(bytes([r] * 16)) for r in range(5)]
LOST = "of our instance is lost"


def key(generation: int, room: RoomId = ROOM) -> RoomKey:
    return RoomKey(room, Generation(generation))


def leader(world: int = 3, options: Options | None = None) -> Agreement:
    one = Agreement(Rank(0), world, E[0], options or Options())
    for rank in range(1, world):
        assert one.joined(E[rank], Rank(rank), 0.0) == []
    return one


def follower(met: bool = True, options: Options | None = None) -> Agreement:
    one = Agreement(Rank(1), 3, E[1], options or Options())
    if met:
        one.joined(E[0], Rank(0), 0.0)
    return one


def ballot(src: int, generation: int, ok: bool | None, room: RoomId = ROOM, open_ms: int = 0) -> Ballot:
    return Ballot(src=E[src], dst=E[0], room=room, generation=generation, ok=ok, reason="because", open_ms=open_ms)


def verdict(generation: int, ok: bool | None, src: int = 0, shared: bool = False) -> Verdict:
    return Verdict(src=E[src], dst=E[1], room=ROOM, generation=generation, ok=ok, shared=shared, reason="because")


def outcomes(effects: list[Send | Outcome]) -> list[tuple[int, bool]]:
    return [(e.key.generation, e.decided.ok) for e in effects if isinstance(e, Outcome)]


def verdicts(effects: list[Send | Outcome]) -> list[tuple[Epoch, int, bool | None]]:
    return [
        (e.to, e.frame.generation, e.frame.ok) for e in effects if isinstance(e, Send) and isinstance(e.frame, Verdict)
    ]


def said(effects: list[Send | Outcome] | list[Send]) -> list[tuple[int, bool | None]]:
    return [(e.frame.generation, e.frame.ok) for e in effects if isinstance(e, Send) and isinstance(e.frame, Ballot)]


def test_one_rank_alone_decides_at_once() -> None:
    one = Agreement(Rank(0), 1, E[0], Options())
    assert one.vote(key(1), None, "", 0.0) == []
    assert one.vote(key(1), True, "", 0.0) == [Outcome(key(1), Decided(True, ""))]
    assert one.vote(key(2), False, "why", 0.0) == [Outcome(key(2), Decided(False, "why"))]
    assert one.next_at() is None


def test_success_needs_every_rank_and_each_hears_it_in_its_own_generation() -> None:
    one = leader()
    one.vote(key(1), None, "", 0.0)
    assert verdicts(one.on_ballot(ballot(1, 11, None), 0.0)) == [(E[1], 11, None)]
    assert outcomes(one.vote(key(1), True, "", 0.0)) == []
    assert verdicts(one.on_ballot(ballot(1, 11, True), 0.0)) == [(E[1], 11, None)]
    effects = one.on_ballot(ballot(2, 22, True), 0.0)
    assert outcomes(effects) == [(1, True)]
    assert sorted(verdicts(effects)) == [(E[1], 11, True), (E[2], 22, True)]


def test_a_decided_room_is_answered_again_and_never_otherwise() -> None:
    one = leader(2)
    one.vote(key(1), True, "", 0.0)
    one.on_ballot(ballot(1, 11, True), 0.0)
    assert verdicts(one.on_ballot(ballot(1, 11, False), 0.0)) == [(E[1], 11, True)]
    assert outcomes(one.vote(key(1), False, "too late", 0.0)) == [(1, True)]


def test_ballots_of_strangers_and_to_other_ranks_are_dropped() -> None:
    assert leader(2).on_ballot(ballot(4, 1, True), 0.0) == []
    assert follower().on_ballot(ballot(2, 1, True), 0.0) == []
    one = follower()
    one.vote(key(1), None, "", 0.0)
    assert one.on_verdict(verdict(1, True, src=2), 0.0) == []
    assert one.on_verdict(verdict(9, True), 0.0) == []


def test_a_ballot_is_repeated_until_it_is_decided_and_rarely_once_it_is_known() -> None:
    """Should a verdict be lost, the room is not open until its deadline."""
    one = follower()
    assert said(one.vote(key(1), None, "", 0.0)) == [(1, None)]
    assert said(one.tick(0.2)) == [(1, None)]
    assert one.on_verdict(verdict(1, None), 0.0) == []
    assert one.tick(5.0) == []
    assert said(one.tick(11.0)) == [(1, None)]
    assert said(one.vote(key(1), True, "", 12.0)) == [(1, True)]
    assert one.on_verdict(verdict(1, None), 0.0) == []
    assert said(one.tick(12.2)) == [(1, True)]
    assert outcomes(one.on_verdict(verdict(1, True), 0.0)) == [(1, True)]
    assert (one.next_at(), one.undecided) == (None, 0)
    assert one.vote(key(1), False, "too late", 13.0) == []


def test_success_may_be_taken_back_until_it_is_decided() -> None:
    one = leader()
    one.on_ballot(ballot(1, 11, True), 0.0)
    assert (E[1], 11, False) in verdicts(one.on_ballot(ballot(1, 11, False), 0.0))


def test_failure_is_not_taken_back_by_a_success_that_comes_after_it() -> None:
    """What landed cannot be stored: the ballot that says so may be lost, and is what has to be repeated then."""
    one = follower()
    for generation in (1, 2):
        one.vote(key(generation), None, "", 0.0)
    assert said(one.vote(key(1), False, "no room for aux", 0.0)) == [(1, False)]
    assert one.vote(key(1), True, "", 0.0) == []
    assert said(one.tick(0.2)) == [(1, False)]
    assert one.vote(key(2), False, "waits for the first life's verdict", 0.3) == []
    assert one.vote(key(2), True, "", 0.3) == []
    assert said([e for e in one.on_verdict(verdict(1, False), 0.0) if isinstance(e, Send)]) == [(2, False)]


def test_a_rank_that_is_lost_fails_the_rooms_that_need_it() -> None:
    one = leader()
    for generation in (1, 2):
        one.vote(key(generation, RoomId(b"%d" % generation)), None, "", 0.0)
    one.on_ballot(ballot(1, 11, True, RoomId(b"2")), 0.0)
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
    one.on_ballot(ballot(1, 11, True), 0.0)
    assert one.lost(E[1], 0.0) == []
    effects = one.on_ballot(ballot(2, 22, True), 0.0)
    assert (outcomes(effects), verdicts(effects)) == ([(1, True)], [(E[2], 22, True)])


def test_another_life_of_a_rank_that_comes_before_its_end_is_noticed_is_the_end_of_the_first() -> None:
    """At another address nothing else says so; what needs the first would wait until its deadline."""
    one = leader()
    one.vote(key(1), None, "", 0.0)
    effects = one.joined(E[3], Rank(1), 1.0)
    assert outcomes(effects) == [(1, False)]
    assert one.lost(E[1], 2.0) == []
    one.vote(key(2, RoomId(b"2")), True, "", 3.0)
    one.on_ballot(ballot(2, 22, True, RoomId(b"2")), 3.0)
    assert outcomes(one.on_ballot(ballot(3, 1, True, RoomId(b"2")), 3.0)) == [(2, True)]


def test_a_life_that_another_has_followed_is_told_that_what_it_begins_has_failed() -> None:
    """Rank 0 answers it the same however often it asks, and nobody's room pairs with its own."""
    one = leader()
    one.joined(E[3], Rank(1), 1.0)
    one.followed(E[1], Rank(1))
    one.vote(key(1), None, "", 1.0)
    for ok in (None, True, False):
        (answer,) = one.on_ballot(ballot(1, 11, ok), 2.0)
        assert verdicts([answer]) == [(E[1], 11, False)]
        assert isinstance(answer, Send)
        assert isinstance(answer.frame, Verdict)
        assert answer.frame.reason == "another life of rank 1 is there"
    one.vote(key(1), True, "", 3.0)
    one.on_ballot(ballot(2, 22, True), 3.0)
    assert outcomes(one.on_ballot(ballot(3, 1, True), 3.0)) == [(1, True)]


def test_a_life_that_another_has_followed_hears_how_a_room_ends_that_it_voted_for() -> None:
    """Its success was counted, so it is no failure of its rank that another life has come."""
    one = leader()
    one.vote(key(1), True, "", 0.0)
    one.on_ballot(ballot(1, 11, True), 0.0)
    one.joined(E[3], Rank(1), 1.0)
    one.followed(E[1], Rank(1))
    assert verdicts(one.on_ballot(ballot(1, 11, True), 2.0)) == [(E[1], 11, None)]
    assert outcomes(one.on_ballot(ballot(2, 22, True), 3.0)) == [(1, True)]
    assert verdicts(one.on_ballot(ballot(1, 11, True), 4.0)) == [(E[1], 11, True)]
    assert verdicts(one.on_ballot(ballot(1, 10, None), 5.0)) == [(E[1], 10, False)]


def test_a_life_that_another_has_followed_counts_again_when_that_one_is_lost() -> None:
    """Late echoes of what it began meanwhile pair with nothing; once lost itself it is answered no more."""
    one = leader(2)
    one.joined(E[3], Rank(1), 1.0)
    one.followed(E[1], Rank(1))
    one.on_ballot(ballot(1, 11, None), 2.0)
    one.lost(E[3], 3.0)
    assert one.joined(E[1], Rank(1), 3.0) == []
    assert verdicts(one.on_ballot(ballot(1, 11, None), 4.0)) == [(E[1], 11, False)]
    one.vote(key(1), True, "", 4.0)
    assert outcomes(one.on_ballot(ballot(1, 12, True), 5.0)) == [(1, True)]
    one.joined(E[3], Rank(1), 6.0)
    one.followed(E[1], Rank(1))
    one.lost(E[1], 7.0)
    assert one.on_ballot(ballot(1, 13, None), 8.0) == []


def test_what_lives_that_others_have_followed_begin_is_bounded() -> None:
    """It is answered, however much it is, and forgotten like any room that is decided."""
    one = leader(options=Options(tombstones=4))
    one.joined(E[3], Rank(1), 1.0)
    one.followed(E[1], Rank(1))
    for n in range(50):
        assert verdicts(one.on_ballot(ballot(1, n, None, RoomId(b"%d" % n)), 1.0)) == [(E[1], n, False)]
    for n in range(50, 100):
        assert verdicts(one.on_ballot(ballot(1, n, None), 1.0)) == [(E[1], n, False)]
    assert one.remembered <= 4 * LIVES


def test_another_life_of_rank_0_that_comes_before_the_end_of_the_first_is_noticed_leads() -> None:
    """What the first had fails, what it did not have goes to the next one, or fails soon."""
    one = follower()
    for n in (1, 2, 3):
        one.vote(key(n, RoomId(b"%d" % n)), None, "", 0.0)
    shared = verdict(1, None, shared=True)
    one.on_verdict(msgspec.structs.replace(shared, room=b"1"), 0.0)
    effects = one.joined(E[4], Rank(0), 1.0)
    assert (outcomes(effects), said(effects)) == ([(1, False)], [(2, None), (3, None)])
    assert one.lost(E[0], 2.0) == []
    assert one.on_verdict(msgspec.structs.replace(verdict(2, None, src=4, shared=True), room=b"2"), 2.0) == []
    assert said(one.tick(4.0))[-1] == (3, False)
    assert outcomes(one.on_verdict(msgspec.structs.replace(verdict(2, True, src=4), room=b"2"), 9.0)) == [(2, True)]


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
    one.on_verdict(verdict(1, None, shared=True), 0.0)
    one.vote(key(1), True, "", 0.0)
    assert outcomes(one.lost(E[0], 1.0)) == [(1, False)]
    assert one.tick(9.0) == []
    assert one.vote(key(1), True, "", 1.0) == []
    assert one.undecided == 0
    assert said(one.joined(E[0], Rank(0), 2.0)) == [(1, False)]
    assert one.lost(E[0], 3.0) == []
    assert said(one.joined(E[0], Rank(0), 4.0)) == [(1, False)]
    assert outcomes(one.on_verdict(verdict(1, False), 0.0)) == []
    assert one.remembered == 0


def test_another_life_of_rank_0_hears_nothing_of_the_rooms_that_the_first_took_with_it() -> None:
    one = follower()
    one.vote(key(1), None, "", 0.0)
    one.on_verdict(verdict(1, None, shared=True), 0.0)
    one.lost(E[0], 1.0)
    one.vote(key(2), None, "", 1.0)
    one.vote(key(3, RoomId(b"3")), None, "", 1.0)
    one.vote(key(3, RoomId(b"3")), False, "why", 1.0)
    assert outcomes(one.lost(E[0], 1.0)) == []
    assert said(one.joined(E[4], Rank(0), 2.0)) == [(2, None), (3, False)]


def test_a_room_that_no_life_of_rank_0_has_opened_waits_for_the_next_one() -> None:
    """It began when rank 0 had restarted and nobody had noticed yet."""
    one = follower()
    one.vote(key(1), None, "", 0.0)
    assert one.on_verdict(verdict(1, None), 0.0) == []
    one.vote(key(1), True, "", 0.0)
    assert one.lost(E[0], 1.0) == []
    assert one.next_at() == 4.0
    assert said(one.joined(E[4], Rank(0), 2.0)) == [(1, True)]
    assert one.on_verdict(verdict(1, None, src=4, shared=True), 2.0) == []
    assert outcomes(one.tick(9.0)) == []
    assert outcomes(one.on_verdict(verdict(1, True, src=4), 9.0)) == [(1, True)]
    assert one.next_at() is None


def test_a_room_that_the_next_life_of_rank_0_does_not_have_is_voted_against() -> None:
    """Within ``closed_s``; rank 0 may have counted our success, so it has the last word."""
    one = follower()
    one.vote(key(1), None, "", 0.0)
    one.vote(key(1), True, "", 0.0)
    one.lost(E[0], 1.0)
    one.joined(E[4], Rank(0), 2.0)
    assert one.on_verdict(verdict(1, None, src=4), 2.0) == []
    effects = one.tick(4.0)
    assert (outcomes(effects), said(effects)[-1]) == ([], (1, False))
    assert outcomes(one.on_verdict(verdict(1, False, src=4), 4.0)) == [(1, False)]


def test_a_room_fails_when_no_life_of_rank_0_comes_and_the_one_that_comes_later_hears_of_it() -> None:
    one = follower()
    one.vote(key(1), None, "", 0.0)
    one.lost(E[0], 1.0)
    one.vote(key(2, RoomId(b"2")), None, "", 1.5)
    one.vote(key(2, RoomId(b"2")), False, "why", 1.5)
    assert outcomes(one.tick(3.9)) == []
    assert outcomes(one.tick(4.0)) == [(1, False)]
    assert said(one.joined(E[4], Rank(0), 9.0)) == [(1, False), (2, False)]


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
    assert said(one.joined(E[4], Rank(0), 2.0)) == [(1, False)]


def test_rank_0_says_when_its_engine_has_opened_the_room_too() -> None:
    """Before or after the other rank's: from then on the room ends with that life of rank 0."""
    one = leader(2)
    (first,) = one.on_ballot(ballot(1, 11, None), 0.0)
    (then,) = one.vote(key(1), None, "", 0.0)
    (again,) = one.on_ballot(ballot(1, 11, None), 0.0)
    shared = [e.frame.shared for e in (first, then, again) if isinstance(e, Send) and isinstance(e.frame, Verdict)]
    assert shared == [False, True, True]


def test_a_room_that_fails_before_rank_0_is_known_fails_at_once_and_a_success_waits() -> None:
    one = follower(met=False)
    one.vote(key(1), None, "", 0.0)
    assert outcomes(one.vote(key(1), False, "why", 0.0)) == [(1, False)]
    one.vote(key(2, RoomId(b"2")), None, "", 0.0)
    assert one.vote(key(2, RoomId(b"2")), True, "", 0.0) == []
    assert said(one.joined(E[0], Rank(0), 1.0)) == [(1, False), (2, True)]


def test_a_later_life_of_a_room_is_not_spoken_of_before_the_earlier_one_is_decided() -> None:
    """Else rank 0 would pair the wrong lives when ballots overtake each other."""
    one = follower(met=False)
    one.vote(key(1), None, "", 0.0)
    one.vote(key(1), False, "why", 0.0)
    one.vote(key(2), None, "", 0.0)
    assert said(one.joined(E[0], Rank(0), 1.0)) == [(1, False)]
    assert one.vote(key(2), True, "", 1.0) == []
    assert said(one.on_verdict(verdict(1, False), 0.0)) == [(2, True)]


def test_lives_of_one_room_are_paired_in_order() -> None:
    one = leader(2)
    one.vote(key(1), False, "why", 0.0)
    one.vote(key(5), True, "", 0.0)
    assert verdicts(one.on_ballot(ballot(1, 30, None), 0.0)) == [(E[1], 30, False)]
    assert outcomes(one.on_ballot(ballot(1, 31, True), 0.0)) == [(5, True)]


def test_a_life_that_rank_0_never_opened_does_not_fail_all_later_ones() -> None:
    """For a while what rank 0 opens may be the life that failed elsewhere; then it is the next one."""
    soon, later = leader(2), leader(2)
    for one in (soon, later):
        one.on_ballot(ballot(1, 1, False), 0.0)
    assert outcomes(soon.vote(key(1), None, "", 29.9)) == [(1, False)]
    assert outcomes(later.vote(key(1), None, "", 30.0)) == []
    assert verdicts(later.on_ballot(ballot(1, 1, False), 30.0)) == [(E[1], 1, False)]
    later.vote(key(1), True, "", 31.0)
    assert outcomes(later.on_ballot(ballot(1, 2, True), 31.0)) == [(1, True)]


def test_a_life_that_another_rank_never_opened_does_not_fail_all_later_ones() -> None:
    """The same holds for every rank."""
    soon, later = leader(2), leader(2)
    for one in (soon, later):
        one.vote(key(1), False, "why", 0.0)
        one.vote(key(2), None, "", 29.0)
    assert verdicts(soon.on_ballot(ballot(1, 1, None), 29.9)) == [(E[1], 1, False)]
    assert verdicts(later.on_ballot(ballot(1, 1, None), 30.0)) == [(E[1], 1, None)]
    later.vote(key(2), True, "", 31.0)
    assert outcomes(later.on_ballot(ballot(1, 1, True), 31.0)) == [(2, True)]


def test_a_life_that_was_opened_in_time_and_is_heard_of_late_is_none_of_the_next_room() -> None:
    """Its success must not count for a room that began after it."""
    one = leader(2)
    one.vote(key(1), False, "why", 0.0)
    one.vote(key(2), None, "", 39.0)
    assert verdicts(one.on_ballot(ballot(1, 1, True, open_ms=11_000), 40.0)) == [(E[1], 1, False)]
    assert verdicts(one.on_ballot(ballot(1, 2, None, open_ms=0), 40.0)) == [(E[1], 2, None)]


def test_a_ballot_says_how_long_its_room_has_been_open_whenever_it_is_sent() -> None:
    """That may be long after it was opened, to another life of rank 0, or behind an earlier life of the room."""
    one = follower(met=False)
    one.vote(key(1), None, "", 1.0)

    def ages(effects: Sequence[Send | Outcome]) -> list[int]:
        return [e.frame.open_ms for e in effects if isinstance(e, Send) and isinstance(e.frame, Ballot)]

    assert ages(one.joined(E[0], Rank(0), 3.0)) == [2000]
    assert ages(one.tick(3.5)) == [2500]
    assert ages(one.vote(key(1), False, "why", 4.0)) == [3000]
    one.vote(key(2), None, "", 5.0)
    assert ages(one.on_verdict(verdict(1, False), 11.0)) == [6000]


def test_a_new_life_of_a_rank_is_not_taken_for_its_old_one() -> None:
    """Its generations begin again."""
    one = leader(2)
    one.vote(key(1), True, "", 0.0)
    one.on_ballot(ballot(1, 1, True), 0.0)
    one.lost(E[1], 0.0)
    one.joined(E[3], Rank(1), 0.0)
    assert verdicts(one.on_ballot(ballot(3, 1, None), 0.0)) == [(E[3], 1, None)]


def test_what_is_remembered_is_bounded_and_late_ballots_of_forgotten_lives_pair_with_nothing() -> None:
    one = leader(2, Options(tombstones=4))
    for n in range(1, 30):
        one.vote(key(n), True, "", 0.0)
        one.on_ballot(ballot(1, n, True), 0.0)
    assert one.remembered == LIVES
    for n in range(30, 60):
        name = RoomId(b"%d" % n)
        one.vote(key(n, name), True, "", 0.0)
        one.on_ballot(ballot(1, n, True, name), 0.0)
    assert one.remembered == 4
    one.vote(key(60), None, "", 0.0)
    assert verdicts(one.on_ballot(ballot(1, 3, True), 0.0)) == [(E[1], 3, True)]
    assert outcomes(one.vote(key(60), True, "", 0.0)) == []
    assert outcomes(one.on_ballot(ballot(1, 60, True), 0.0)) == [(60, True)]


def test_an_old_life_of_a_room_that_goes_on_is_recognised() -> None:
    """A ballot of a life that was trimmed does not join a later one."""
    one = leader(2)
    for n in range(1, 30):
        one.vote(key(n), True, "", 0.0)
        one.on_ballot(ballot(1, n, True), 0.0)
    one.vote(key(30), True, "", 0.0)
    assert verdicts(one.on_ballot(ballot(1, 3, True), 0.0)) == [(E[1], 3, True)]
    assert outcomes(one.on_ballot(ballot(1, 30, True), 0.0)) == [(30, True)]


def test_open_rooms_are_never_forgotten_by_rank_0() -> None:
    one = leader(2, Options(tombstones=2))
    for n in range(1, 6):
        one.vote(key(n, RoomId(b"%d" % n)), None, "", 0.0)
    assert one.remembered == 5


def test_rooms_that_wait_for_an_absent_rank_0_stay_and_those_that_ended_are_bounded() -> None:
    """What the next rank 0 is told of; a room that waits is never given up for the number of others."""
    one = follower(met=False, options=Options(tombstones=2))
    keys = [key(n, RoomId(b"%d" % n)) for n in range(1, 9)]
    assert not [e for k in keys for e in one.vote(k, None, "", 0.0)]
    assert one.undecided == one.remembered == 8
    assert outcomes([e for k in keys[:5] for e in one.vote(k, False, "given up", 1.0)]) == [
        (n, False) for n in range(1, 6)
    ]
    assert (one.undecided, one.remembered) == (3, 5)
    one.joined(E[0], Rank(0), 2.0)
    assert one.remembered == 5


def test_rank_0_remembers_rooms_that_a_rank_may_still_open_while_others_end() -> None:
    """Decided before all ranks have opened them: whoever opens one later hears how it ended."""
    one = leader(3, Options(tombstones=2))
    one.vote(key(1, RoomId(b"early")), None, "", 0.0)
    one.vote(key(1, RoomId(b"early")), False, "given up", 0.0)
    for n in range(2, 30):
        name = RoomId(b"%d" % n)
        one.vote(key(n, name), True, "", 1.0)
        for rank in (1, 2):
            one.on_ballot(ballot(rank, n, True, name), 1.0)
    assert one.remembered <= 4
    assert verdicts(one.on_ballot(ballot(1, 50, None, RoomId(b"early")), 2.0)) == [(E[1], 50, False)]


def test_lives_of_one_room_that_another_rank_alone_opens_are_bounded() -> None:
    """A rank that speaks of a later life votes on no earlier one: those have failed, and only a few are kept."""
    one = leader(2)
    for n in range(1, 500):
        assert verdicts(one.on_ballot(ballot(1, n, None), float(n)))[-1] == (E[1], n, None)
        assert one.remembered <= LIVES + 1
    one.vote(key(1), None, "", 600.0)
    one.vote(key(1), True, "", 600.0)
    assert outcomes(one.on_ballot(ballot(1, 499, True), 600.0)) == [(1, True)]


def test_an_earlier_life_ends_here_when_another_rank_speaks_of_a_later_one() -> None:
    """Our own part of it does not wait for a vote that cannot come."""
    one = leader(2)
    one.vote(key(1), None, "", 0.0)
    one.on_ballot(ballot(1, 1, None), 0.0)
    assert outcomes(one.on_ballot(ballot(1, 2, None), 1.0)) == [(1, False)]
    assert verdicts(one.on_ballot(ballot(1, 1, True), 1.0)) == [(E[1], 1, False)]
