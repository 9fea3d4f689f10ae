"""Every frame, from every sender that may send it, in every state of a room and of the agreement: a product of tables.

A frame has its effect, is ignored, or is the sender's own error, ``RemoteProtocolError``. No frame meets a bug of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import product

import pytest

from disagg_kv.core import (
    Cancel,
    Decided,
    Effect,
    Elected,
    Gone,
    Leased,
    Lost,
    Options,
    Outcome,
    Receiving,
    Reserve,
    RoomKey,
    Scattered,
    Send,
    Tick,
    Transfer,
    Wrote,
)
from disagg_kv.core.room.tables import Sending
from disagg_kv.core.wire.frames import Complete, Decision, Head, Vote
from disagg_kv.errors import AbortedError, PeerLostError, RemoteProtocolError
from disagg_kv.ids import Epoch, Generation, Rank, RoomId, VirtualOffset
from disagg_kv.staging import Lease
from tests.support import receive_room as decode
from tests.support import send_room as prefill
from tests.support.every_frame import FIELDS, KINDS, frames_about

LEASE = Lease(VirtualOffset(0), 0, 65536)
GIVEN_UP = AbortedError("the engine gave up")
LOST = PeerLostError("lost")


def test_no_frame_about_a_room_is_left_out() -> None:
    assert set(FIELDS) == KINDS


# A room on a decode rank.


def _opened() -> decode.Room:
    return decode.Room(begun=False)


def _introduced() -> decode.Room:
    room = decode.Room(begun=False)
    room.say(room.introduced)
    return room


def _asked(*, exposed: bool = False) -> decode.Room:
    room = decode.Room(exposed=exposed)
    room.say(decode.request(0), decode.request(1))
    return room


def _leased(*, exposed: bool = False) -> decode.Room:
    room = decode.Room(exposed=exposed, aux_bytes=16)
    room.lease(decode.A, LEASE)
    return room


def _half() -> decode.Room:
    room = _leased()
    room.say(decode.chunk(0, decode.A, LEASE), decode.done(0, 2))
    return room


def _scattering() -> decode.Room:
    room = _leased()
    room.say(decode.chunk(0, decode.A, LEASE), decode.chunk(1, decode.A, LEASE))
    return room


def _placed() -> decode.Room:
    room = decode.Room()
    room.landed()
    return room


def _failed(of: Callable[[], decode.Room]) -> Callable[[], decode.Room]:
    def made() -> decode.Room:
        room = of()
        room.say(Cancel(GIVEN_UP))
        return room

    return made


def _lost() -> decode.Room:
    room = _leased()
    room.say(Lost(decode.P[0], LOST))
    return room


def _doubted() -> decode.Room:
    room = _placed()
    room.say(Cancel(GIVEN_UP))
    return room


RECEIVE: Mapping[str, Callable[[], decode.Room]] = {
    "opened": _opened,
    "introduced": _introduced,
    "moving": decode.Room,
    "moving, exposed": lambda: decode.Room(exposed=True),
    "moving, no end": lambda: decode.Room(stop=None),
    "asked": _asked,
    "asked, exposed": lambda: _asked(exposed=True),
    "leased": _leased,
    "leased, exposed": lambda: _leased(exposed=True),
    "half": _half,
    "scattering": _scattering,
    "placed": _placed,
    "doubted": _doubted,
    "failed, opened": _failed(_opened),
    "failed, introduced": _failed(_introduced),
    "failed, exposed": _failed(lambda: decode.Room(exposed=True)),
    "failed, asked": _failed(_asked),
    "failed, leased": _failed(_leased),
    "failed, scattering": _failed(_scattering),
    "lost": _lost,
}


def _answered(room: decode.Room, effects: list[Effect]) -> None:
    """What the ring and the kernels then do."""
    for effect in effects:
        if isinstance(effect, Reserve):
            room.say(Leased(effect.segment, LEASE))
    inbound = room.machine.inbound
    for segment in list(inbound):
        if inbound[segment].scattering:
            room.say(Scattered(segment))


def test_every_state_of_a_decode_room_is_reached() -> None:
    assert {made().machine.state for made in RECEIVE.values()} == set(Receiving) - {Receiving.CLOSED}


@pytest.mark.parametrize("at", RECEIVE)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_no_frame_to_a_decode_room_meets_a_bug(at: str, rank: int) -> None:
    """From a writer before and after its part, and from a rank that is none; the room can always end after it."""
    for frame in frames_about(decode.head(rank)):
        room = RECEIVE[at]()
        effects: list[Effect] = []
        with suppress(RemoteProtocolError):
            effects = room.say(frame)
        _answered(room, effects)
        room.say(Tick(), Cancel(GIVEN_UP), Decided(False, "no"), *map(Gone, decode.P[:2]))
        assert room.machine.released, frame


# A room on a prefill rank.


def _send(*, chunks: int = 2, ready: bool = True, exposed: bool = False) -> prefill.Room:
    room = prefill.Room(chunks=chunks, ready=ready)
    room.expect(given=prefill.plan(exposed=exposed))
    return room


def _granted() -> prefill.Room:
    room = _send()
    room.say(prefill.grant())
    return room


def _writing(*, exposed: bool = False) -> prefill.Room:
    room = _send(exposed=exposed)
    if not exposed:
        room.say(prefill.grant())
    assert room.begin(lease=None if exposed else -1)
    return room


def _announced() -> prefill.Room:
    room = _send()
    room.write()
    return room


def _withdrawn() -> prefill.Room:
    room = _granted()
    room.machine.withdraw(0.0)
    return room


def _finished() -> prefill.Room:
    room = _send()
    room.write(prefill.A)
    room.write(prefill.B)
    room.machine.finish(8, b"aux", 0.0)
    return room


def _complete(world: int = 1) -> prefill.Room:
    room = prefill.Room()
    room.expect(world=world)
    room.write(prefill.A)
    room.write(prefill.B)
    room.machine.finish(8, None, 0.0)
    room.say(Complete(**prefill.head()))
    return room


def _ending() -> prefill.Room:
    """The engine has handed over all rows, of which none is written."""
    room = _send()
    room.machine.finish(8, b"aux", 0.0)
    return room


def _cancelled(of: Callable[[], prefill.Room]) -> Callable[[], prefill.Room]:
    def made() -> prefill.Room:
        room = of()
        room.machine.cancel(GIVEN_UP, 0.0)
        return room

    return made


def _declined() -> prefill.Room:
    room = prefill.Room()
    room.machine.decline(prefill.D[0], Generation(5), prefill.abort(), 0.0)
    return room


def _refused() -> prefill.Room:
    room = prefill.Room()
    room.machine.refuse(prefill.D[0], Generation(5), GIVEN_UP, 0.0)
    return room


def _away(of: Callable[[], prefill.Room], event: object) -> Callable[[], prefill.Room]:
    def made() -> prefill.Room:
        room = of()
        room.say(event)
        return room

    return made


SEND: Mapping[str, Callable[[], prefill.Room]] = {
    "no rows": lambda: _send(chunks=0),
    "ahead": lambda: _send(ready=False),
    "asked": _send,
    "exposed": lambda: _send(exposed=True),
    "granted": _granted,
    "writing": _writing,
    "writing, exposed": lambda: _writing(exposed=True),
    "announced": _announced,
    "withdrawn": _withdrawn,
    "ending": _ending,
    "finished": _finished,
    "complete": _complete,
    "complete, not alone": lambda: _complete(2),
    "aborting": _cancelled(_writing),
    "draining": _cancelled(_granted),
    "draining, complete": _cancelled(_complete),
    "draining, finished": _cancelled(_finished),
    "declined": _declined,
    "refused": _refused,
    "lost": _away(_writing, Lost(prefill.D[0], LOST)),
    "gone": _away(_writing, Gone(prefill.D[0])),
}


def test_every_state_of_a_prefill_flow_is_reached() -> None:
    states = {flow.state for made in SEND.values() for flow in made().machine.flows.values()}
    assert states == set(Sending) - {Sending.CLOSED}


@pytest.mark.parametrize("at", SEND)
def test_no_frame_to_a_prefill_room_meets_a_bug(at: str) -> None:
    """The room can always end after it."""
    for frame in frames_about(prefill.head()):
        room = SEND[at]()
        flow = room.machine.flows[prefill.D[0]]
        writing = flow.busy
        effects: list[Effect] = []
        with suppress(RemoteProtocolError):
            effects = room.say(frame)
        for effect in effects:
            if isinstance(effect, Transfer) and flow.begin(effect):
                room.say(Wrote(effect.segment))
        if writing:
            room.say(Wrote(prefill.A))
        room.machine.tick(1.0)
        room.machine.cancel(GIVEN_UP, 1.0)
        room.machine.decided(Decided(False, "no"), 1.0)
        room.machine.check_integrity()
        if flow.state is not Sending.CLOSED:
            room.say(Gone(prefill.D[0]))
        assert room.machine.released, frame


# The agreement of a follower, and of rank 0, with rooms in each of these states.

ROOM = RoomId(b"r")
KEY = RoomKey(ROOM, Generation(1))
E = [Epoch(bytes([16 + rank] * 16)) for rank in range(5)]
"""Of three ranks; then an older life of rank 2, and a stranger."""


def agreement(rank: int, *, met: bool = True) -> Elected:
    one = Elected(Rank(rank), 3, E[rank], Options(), "I")
    for other in range(3):
        if other != rank and met:
            one.joined(E[other], Rank(other), 0.0)
    one.followed(E[3], Rank(2))
    return one


VOTES: Mapping[str, tuple[bool | None, ...]] = {
    "not opened": (),
    "opened": (None,),
    "for it": (None, True),
    "against it": (None, False),
    "taken back": (None, True, False),
}
"""What this rank has said of the room."""

NEWS: Mapping[str, Callable[[Elected], object]] = {
    "nothing": lambda one: None,
    "others opened": lambda one: [one.on_vote(_vote(rank, None), 0.0) for rank in (1, 2)],
    "others for it": lambda one: [one.on_vote(_vote(rank, True), 0.0) for rank in (1, 2)],
    "another against it": lambda one: one.on_vote(_vote(2, False), 0.0),
    "rank 0 opened": lambda one: one.on_decision(_decision(None, shared=True), 0.0),
    "failed": lambda one: one.on_decision(_decision(False), 0.0),
    "rank 0 lost": lambda one: one.lost(E[0], 0.0),
    "rank 0 lost, and another life": lambda one: [one.lost(E[0], 0.0), one.joined(E[4], Rank(0), 1.0)],
    "rank 2 lost": lambda one: one.lost(E[2], 0.0),
}
"""What this rank has learnt of the others then."""


def _vote(rank: int, ok: bool | None) -> Vote:
    return Vote(src=E[rank], dst=E[0], room=ROOM, generation=1, ok=ok, reason="")


def _decision(ok: bool | None, *, shared: bool = False) -> Decision:
    return Decision(src=E[0], dst=E[1], room=ROOM, generation=1, ok=ok, shared=shared, reason="")


def _said(rank: int) -> Iterator[Vote | Decision]:
    for src in E:
        for room in (ROOM, b"other"):
            for generation in (1, 2) if room == ROOM else (1,):
                for frame in frames_about(Head(src=src, dst=E[rank], room=room, generation=generation), Vote, Decision):
                    assert isinstance(frame, Vote | Decision)
                    yield frame


@pytest.mark.parametrize("news", NEWS)
@pytest.mark.parametrize("said", VOTES)
@pytest.mark.parametrize("rank", [0, 1])
def test_no_frame_to_the_agreement_meets_a_bug_or_makes_a_success_that_was_not_voted_for(
    rank: int, said: str, news: str
) -> None:
    """From each other rank, an older life and a stranger; twice, since frames are repeated."""
    for frame in _said(rank):
        one, voted = agreement(rank), True in VOTES[said]
        for ok in VOTES[said]:
            one.vote(KEY, ok, "", 0.0)
        NEWS[news](one)
        out: list[Send | Outcome] = []
        for _ in range(2):
            out += one.on_frame(frame, 1.0)
        out += one.tick(100.0)
        assert voted or not any(isinstance(e, Outcome) and e.decided.ok and e.key == KEY for e in out), frame


def _opinion(room: decode.Room | prefill.Room) -> tuple[bool | None, ...]:
    """How a room in this state has voted."""
    machine = room.machine
    if machine.error is not None:
        return None, False
    if isinstance(room, decode.Room):
        return (None, True) if room.machine.state is Receiving.PLACED else (None,)
    flows = room.machine.flows.values()
    done = room.machine.world == len(flows) and all(flow.state is Sending.COMPLETE for flow in flows)
    return (None, True) if done else (None,)


@pytest.mark.parametrize("at", [*RECEIVE, *(f"prefill: {name}" for name in SEND)])
def test_no_decision_of_rank_0_brings_a_room_a_success_that_it_did_not_vote_for(at: str) -> None:
    """The agreement's outcome reaches the room in each of its states; a success without a vote is a failure there."""
    made = SEND[at.removeprefix("prefill: ")] if at.startswith("prefill") else RECEIVE[at]
    votes = _opinion(made())
    head = Head(src=E[0], dst=E[1], room=ROOM, generation=1)
    for frame, shared in product(frames_about(head, Decision), (False, True)):
        assert isinstance(frame, Decision)
        room, one = made(), agreement(1)
        for ok in votes:
            one.vote(KEY, ok, "", 0.0)
        if shared:
            NEWS["rank 0 opened"](one)
        effects = one.on_decision(frame, 1.0)
        if frame.ok and True not in votes:
            (end,) = (effect.decided for effect in effects if isinstance(effect, Outcome))
            assert (end.ok, end.reason) == (False, "rank 0 decided a success that rank 1 has not voted for")
            against = [effect.frame for effect in effects if isinstance(effect, Send)]
            assert [isinstance(vote, Vote) and vote.ok for vote in against] == [False]
            assert one.undecided == 0
            assert one.on_decision(frame, 1.0) == [], "rank 0 insists"
            assert one.next_at() is None
        for effect in effects:
            if not isinstance(effect, Outcome):
                continue
            if isinstance(room, decode.Room):
                room.say(effect.decided)
            else:
                room.machine.decided(effect.decided, 1.0)
                room.machine.check_integrity()
