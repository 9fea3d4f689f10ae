"""A room ends within its own ``total_s``, whatever it waits for, and what it was told of the other side ends too."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disagg_kv.channels import Arrived
from disagg_kv.core import Codec, Options, Phase
from disagg_kv.core.room.tables import Sending
from disagg_kv.core.wire.frames import Abort
from disagg_kv.endpoints import Expectation
from disagg_kv.endpoints.decode.handle import ReceptionHandle
from disagg_kv.endpoints.loop.timing import LONGEST_PAUSE_S
from disagg_kv.endpoints.prefill.handle import DeliveryHandle
from disagg_kv.errors import DeadlineError
from disagg_kv.geometry import CacheSpec, PageTable
from disagg_kv.ids import RoomId
from disagg_kv.rendezvous import Source, StaticRendezvous
from tests.support.rig import KV, Request, Rig, tp_shards

SPEC = CacheSpec.kv(2, 4, 8, "float16")
OPTIONS = Options(silence_s=10.0, total_s=1000.0)
TOTAL_S = 1.0
STEP_S = 0.02
"""Of the rig's clock, and of the sides' ticks."""

SLACK_S = 3 * STEP_S
"""A tick, the turn that takes the vote, and the turn that takes the verdict."""


def took(rig: Rig, handle: DeliveryHandle | ReceptionHandle, most_s: float) -> float:
    """How long from now on until a room has failed."""
    began = rig.clock()
    while handle.phase is not Phase.FAILED:
        assert rig.clock() - began < most_s, (handle.phase, handle.error)
        rig.turn(STEP_S)
    return rig.clock() - began


@pytest.mark.parametrize("known", [False, True], ids=["no address", "nobody answers"])
def test_a_room_whose_prefill_is_never_met_ends_at_its_deadline(known: bool) -> None:
    """Neither a look-up that finds nothing nor a Hello without an answer puts the deadline off."""
    rig = Rig(SPEC, options=OPTIONS)
    if known:
        rig.rendezvous = StaticRendezvous({"P": ["inproc://nobody"]})
    (decode,) = rig.decode(tp_shards(SPEC, 1))
    handle = decode.endpoint.open(RoomId(b"room"), Source("P"), total_s=TOTAL_S)
    assert took(rig, handle, 5.0) <= TOTAL_S + SLACK_S
    assert isinstance(handle.error, DeadlineError)
    assert handle.released
    rig.quiet()


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_deadline_of_decode_before_it_has_met_all_of_prefill_ends_the_room_of_those_it_has_met(first: str) -> None:
    """They do not wait until decode has given the missing one up, nor for a deadline of their own."""
    rig = Rig(SPEC, options=OPTIONS)
    missing, there = rig.prefill(tp_shards(SPEC, 2))
    (decode,) = rig.decode(tp_shards(SPEC, 1))
    missing.frozen = True
    if first == "prefill":
        sent = there.endpoint.open(RoomId(b"room"))
        rig.wait(0.2)
    received = decode.endpoint.open(RoomId(b"room"), Source("P"), total_s=TOTAL_S)
    if first == "decode":
        rig.wait(0.2)
        sent = there.endpoint.open(RoomId(b"room"))
    assert took(rig, received, 5.0) <= TOTAL_S + SLACK_S
    assert took(rig, sent, 1.0) <= SLACK_S
    assert "the prefill ranks were not found" in str(sent.error)
    missing.crash()
    rig.quiet()


def test_a_rank_that_decode_meets_only_after_another_proved_unreachable_is_told() -> None:
    """Its engine has opened the room: it does not wait for its own deadline."""
    rig = Rig(SPEC, options=OPTIONS)
    dead, late = rig.prefill(tp_shards(SPEC, 2))
    rig.until(lambda: len(late.endpoint.peers()) == 1, "the ranks to meet")
    (decode,) = rig.decode(tp_shards(SPEC, 1))
    late.frozen = True
    received = decode.endpoint.open(RoomId(b"room"), Source("P"))
    dead.crash()
    assert took(rig, received, 30.0) <= OPTIONS.silence_s + 1.0
    late.frozen = False
    sent = late.endpoint.open(RoomId(b"room"))
    assert took(rig, sent, 2.0) < 1.0
    assert "decode gave up" in str(sent.error)


def test_a_word_that_is_lost_is_said_again() -> None:
    """The rank that is there may miss it once."""
    codec = Codec()
    rig = Rig(SPEC, options=OPTIONS)
    missing, there = rig.prefill(tp_shards(SPEC, 2))
    (decode,) = rig.decode(tp_shards(SPEC, 1))
    missing.frozen = True
    sent = there.endpoint.open(RoomId(b"room"))
    received = decode.endpoint.open(RoomId(b"room"), Source("P"))
    rig.wait(0.5)
    there.frozen = True
    received.abort("the user went away")
    rig.turn()
    lost = there.channel.poll()
    assert any(isinstance(codec.decode(e.frame), Abort) for e in lost if isinstance(e, Arrived))
    there.frozen = False
    assert took(rig, sent, 2.0) < 1.0


def test_the_end_of_an_attempt_does_not_end_the_next() -> None:
    """Also where prefill learns of it late."""
    rig = Rig(SPEC, options=OPTIONS)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 2)), rig.decode(tp_shards(SPEC, 1))
    prefills[0].frozen = True
    early = rig.request("room", prefills, decodes, 8).open_prefill().open_decode(TOTAL_S)
    took(rig, early.receives[0], 5.0)
    prefills[0].frozen = False
    early.failed()
    rig.request("room", prefills, decodes, 8, attempt=2).start().landed()
    rig.quiet()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_finished_room_that_no_decode_rank_asks_for_releases_its_pages_in_time(ranks: int) -> None:
    """``claim_s`` counts from ``finish``, on each rank; the decode that comes later fails at once and by name."""
    rig = Rig(SPEC, options=OPTIONS)
    prefills, decodes = rig.prefill(tp_shards(SPEC, ranks)), rig.decode(tp_shards(SPEC, 1))
    rig.request("warm", prefills, decodes, 8).start().landed()
    request = rig.request("room", prefills, decodes, 8).open_prefill()
    rig.wait(100.0)
    assert {send.phase for send in request.sends} == {Phase.CONNECTING}, "nothing is computed yet"
    request.send(8).finish()
    spent = [took(rig, send, 40.0) for send in request.sends]
    assert OPTIONS.claim_s - SLACK_S <= spent[0] <= OPTIONS.claim_s + SLACK_S
    assert sum(spent) <= OPTIONS.claim_s + 2 * SLACK_S
    assert all(send.released for send in request.sends)
    assert any("no decode rank asked for it within 30 s" in str(send.error) for send in request.sends)
    request.open_decode().expect(8)
    assert took(rig, request.receives[0], 5.0) <= SLACK_S
    assert "no decode rank asked for it within 30 s" in str(request.receives[0].error)
    rig.quiet()


def test_a_time_of_its_own_that_is_shorter_than_a_repeat_ends_a_room_in_time() -> None:
    """Each event puts off when the room is looked at next, by no more than that time."""
    rig = Rig(SPEC, options=OPTIONS)
    (prefill,) = rig.prefill(tp_shards(SPEC, 1))
    claim_s = OPTIONS.retry_s / 2
    sent = prefill.endpoint.open(RoomId(b"room"), claim_s=claim_s)
    rig.turn(STEP_S)
    sent.finish(0)
    assert took(rig, sent, 5.0) <= claim_s + SLACK_S


def test_each_decode_rank_that_asks_gives_the_others_another_claim_s() -> None:
    """They may have ended before they asked, which nothing shows prefill."""
    rig = Rig(SPEC, options=OPTIONS)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 2))
    request = rig.request("room", prefills, decodes, 8).open_prefill().send(8).finish().open_decode()
    rig.wait(20.0)
    request.receives[0].expect(Expectation(8, [PageTable(KV, range(2))]))
    rig.wait(25.0)
    assert [send.phase for send in request.sends] == [Phase.CONNECTING]
    assert request.receives[1].phase is Phase.READY
    rig.wait(10.0)
    assert request.sends[0].phase is Phase.FAILED
    assert "1 of 2 decode ranks asked for it within 30 s" in str(request.sends[0].error)
    rig.until(lambda: all(handle.released for handle in (*request.sends, *request.receives)), "the end")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_room_that_prefill_does_not_open_fails_in_time(ranks: int) -> None:
    """An unknown room costs decode ``claim_s`` at most, and prefill nothing: the room fails there as it is opened."""
    rig = Rig(SPEC, options=OPTIONS)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, ranks))
    rig.request("warm", prefills, decodes, 8).start().landed()
    request = rig.request("room", prefills, decodes, 8).open_decode().expect(8)
    rig.wait(1.0)
    assert {receive.phase for receive in request.receives} == {Phase.WAITING}
    assert took(rig, request.receives[0], 40.0) <= OPTIONS.claim_s
    assert any("have not opened it within 30 s" in str(receive.error) for receive in request.receives)
    request.open_prefill()
    assert took(rig, request.sends[0], 5.0) <= SLACK_S
    assert "decode gave up" in str(request.sends[0].error)
    rig.quiet()


def test_a_room_may_have_its_own_time_to_be_claimed() -> None:
    """On both sides; None is the endpoint's."""
    rig = Rig(SPEC, options=OPTIONS)
    (prefill,), (decode,) = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    sent = prefill.endpoint.open(RoomId(b"sent"), claim_s=2.0)
    sent.finish(0)
    received = decode.endpoint.open(RoomId(b"received"), Source("P"), claim_s=4.0)
    received.expect(Expectation(0, []))
    assert took(rig, sent, 5.0) == pytest.approx(2.0, abs=SLACK_S)
    assert took(rig, received, 5.0) == pytest.approx(2.0, abs=SLACK_S)


ACTS = ("open prefill", "open decode", "expect", "send", "finish", "freeze", "thaw", "wait", "look away", "look")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    worlds=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    acts=st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 3)), min_size=2, max_size=12),
)
def test_a_room_ends_by_its_deadline_in_every_state(worlds: tuple[int, int], acts: list[tuple[str, int]]) -> None:
    """Processes stand still and go on, stores know nobody; rooms of those that run end in time.

    One wait is longer: a rank that has voted for success and cannot hear rank 0, which may have counted that vote,
    ends its room once rank 0 is lost.
    """
    rig = Rig(SPEC, options=OPTIONS)
    prefills, decodes = rig.prefill(tp_shards(SPEC, worlds[0])), rig.decode(tp_shards(SPEC, worlds[1]))
    table = rig.rendezvous
    request = rig.request("room", prefills, decodes, 8)
    done: set[str] = set()
    for act, number in acts:
        member = rig.members[number % len(rig.members)]
        if act == "freeze":
            member.frozen = True
        elif act == "thaw":
            member.frozen = False
        elif act == "wait":
            for _ in range(1 + 3 * number):
                rig.turn(0.0005)
        elif act in ("look away", "look"):
            decodes[0].endpoint.driver.loop.directory._rendezvous = table if act == "look" else StaticRendezvous()
        elif act not in done:
            done.add(act)
            _act(act, request, done)
    opened = rig.clock()
    late = {id(h): 0.0 for h in request.handles}
    while rig.clock() - opened < TOTAL_S + OPTIONS.silence_s + 1.0:
        rig.turn(STEP_S)
        for h in request.handles:
            if h.phase not in (Phase.DONE, Phase.FAILED):
                late[id(h)] = rig.clock() - opened
    leaders = {"prefill": prefills[0].frozen, "decode": decodes[0].frozen}
    ends: list[tuple[str, int, bool, DeliveryHandle | ReceptionHandle]]
    ends = [("prefill", r, prefills[r].frozen, h) for r, h in enumerate(request.sends)]
    ends += [("decode", r, decodes[r].frozen, h) for r, h in enumerate(request.receives)]
    for side, rank, frozen, handle in ends:
        voted = handle.report.placed is not None or side == "prefill"
        most = TOTAL_S + SLACK_S + (OPTIONS.silence_s if rank and leaders[side] and voted else 0.0)
        assert frozen or late[id(handle)] <= most, (side, rank, handle.phase, handle.error)
    for member in rig.members:
        member.frozen = False
    rig.wait(2 * OPTIONS.silence_s)
    rig.quiet()


def _act(act: str, request: Request, done: set[str]) -> None:
    """An engine's call, if its order allows it."""
    if act == "open prefill":
        request.open_prefill(TOTAL_S)
    elif act == "open decode":
        request.open_decode(TOTAL_S)
    elif act == "expect" and request.receives:
        request.expect(8)
    elif act == "send" and request.sends:
        request.send(8)
        done.add("sent")
    elif act == "finish" and "sent" in done:
        request.finish()


def test_a_room_that_waits_for_the_other_ranks_keeps_no_other_room_from_its_deadline() -> None:
    """Rank 0 stands still before it tells how a room has ended; on rank 1 time goes on for all other rooms."""
    rig = Rig(SPEC, options=OPTIONS)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 2)), rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 12)
    request.open_decode().expect(12).open_prefill(total_s=2 * TOTAL_S).send(12).finish()
    first, second = (member.endpoint.inspect() for member in prefills)
    for _ in range(1000):
        flows = [flow for room in first.rooms.values() for flow in room.machine.flows.values()]
        prefills[0].frozen |= any(flow.state is Sending.FINISHED for flow in flows)
        if any(room.machine._voted for room in second.rooms.values()):
            break
        rig.turn()
    assert prefills[0].frozen
    rig.wait(3 * TOTAL_S)
    other = prefills[1].endpoint.open(RoomId(b"other"), total_s=TOTAL_S)
    assert took(rig, other, 5.0) <= TOTAL_S + SLACK_S
    assert prefills[1].endpoint.driver.loop.rest(1.0) > LONGEST_PAUSE_S, "its thread may sleep"
    prefills[0].frozen = False
    rig.until(lambda: all(handle.phase in (Phase.DONE, Phase.FAILED) for handle in request.sends), "the verdict")
    assert len({handle.phase for handle in request.sends}) == 1
