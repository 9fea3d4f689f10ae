"""A room that waits is never forgotten because others end, wherever it waits and however many end meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from disagg_kv.channels import Channel
from disagg_kv.core import Codec, Options, Phase, Tombstones
from disagg_kv.core.wire.frames import Complete, Decision, Expect, Frame, RoomFrame, Vote
from disagg_kv.endpoints.loop.timing import MOST
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Generation, RoomId
from tests.support.rig import Memory, Rig, tp_shards
from tests.support.rig_parts import Unreliable

SPEC = CacheSpec.kv(2, 4, 8, "float16")
FEW = Options(tombstones=2, parked=64)
OTHERS = 8


class Losing(Unreliable):
    """A channel that loses frames of one kind about one room for as long as ``lost`` is True."""

    lost = True

    def __init__(self, inner: Channel, kind: type[RoomFrame], room: RoomId) -> None:
        super().__init__(inner, lambda number, address: (0,))
        self._kind = kind
        self._room = room
        self._codec = Codec()

    def send(self, address: str, frame: bytes) -> bool:
        """The sender does not learn it."""
        found: Frame = self._codec.decode(frame)
        if self.lost and isinstance(found, self._kind) and found.room == self._room:
            return True
        return super().send(address, frame)


def losing(kind: type[RoomFrame]) -> Callable[[Channel], Channel]:
    """Channels that lose these frames about the room that waits."""
    return lambda inner: Losing(inner, kind, RoomId(b"old"))


def many_end(rig: Rig) -> None:
    """Rooms between the same instances, one after another."""
    for i in range(OTHERS):
        rig.request(f"other {i}", rig.prefills, rig.decodes, 8).start().released().done()


def heard(rig: Rig) -> None:
    """From now on nothing is lost."""
    for member in rig.members:
        if isinstance(member.channel, Losing):
            member.channel.lost = False


@pytest.mark.parametrize("waits", ["for pages", "for prefill", "for rows"])
def test_a_room_that_waits_at_either_side_lands(waits: str) -> None:
    """Its ``Expect`` is still to come, is parked, or has begun."""
    rig = Rig(SPEC, options=FEW)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    old = rig.request("old", prefills, decodes, 8).open_decode()
    if waits == "for rows":
        old.open_prefill()
    if waits != "for pages":
        old.expect()
    many_end(rig)
    rig.wait(11.0)  # what is parked is repeated meanwhile
    if waits == "for pages":
        old.expect()
    if waits != "for rows":
        old.open_prefill()
    old.send(8).finish().landed()
    rig.quiet()


def test_a_room_whose_first_expect_is_lost_for_long_lands() -> None:
    rig = Rig(SPEC, options=FEW)
    prefills = rig.prefill(tp_shards(SPEC, 1))
    decodes = rig.decode(tp_shards(SPEC, 1), memory=Memory(channel=losing(Expect)))
    old = rig.request("old", prefills, decodes, 8).start()
    many_end(rig)
    assert old.receives[0].phase is Phase.WAITING
    heard(rig)
    old.landed()
    rig.quiet()


def test_the_last_word_about_a_room_comes_however_many_end_before_it() -> None:
    """Decode has succeeded and says so whenever prefill asks again."""
    rig = Rig(SPEC, options=FEW)
    prefills = rig.prefill(tp_shards(SPEC, 1))
    decodes = rig.decode(tp_shards(SPEC, 1), memory=Memory(channel=losing(Complete)))
    old = rig.request("old", prefills, decodes, 8).start()
    rig.until(lambda: old.receives[0].released, "decode")
    old.wanted(0, 8)
    many_end(rig)
    assert old.sends[0].phase is Phase.MOVING
    heard(rig)
    old.landed()
    rig.quiet()


@pytest.mark.parametrize("kind", [Vote, Decision])
def test_ranks_agree_on_a_room_however_many_others_they_agree_on_meanwhile(kind: type[RoomFrame]) -> None:
    """What a rank says of a room, or what it is told, is lost for long."""
    rig = Rig(SPEC, options=FEW)
    memory = Memory(channel=losing(kind))
    prefills = rig.prefill(tp_shards(SPEC, 2), memory=memory)
    decodes = rig.decode(tp_shards(SPEC, 2), memory=memory)
    rig.request("first", prefills, decodes, 8).start().landed()
    old = rig.request("old", prefills, decodes, 8).start()
    many_end(rig)
    assert not all(handle.released for handle in old.handles)
    heard(rig)
    old.landed()
    rig.quiet()


def test_rooms_that_are_open_while_rank_0_is_away_are_not_given_up_for_their_number() -> None:
    rig = Rig(SPEC, options=FEW)
    shards = tp_shards(SPEC, 2)
    decodes = rig.decode(shards)
    late = rig.prefill(shards, only=[1])
    early = {room: late[0].endpoint.open(room) for room in (RoomId(b"room %d" % i) for i in range(OTHERS))}
    rig.wait(1.0)
    prefills = [*rig.prefill(shards, only=[0]), *late]
    rooms = [rig.request(f"room {i}", prefills, decodes, 8) for i in range(OTHERS)]
    for number, request in enumerate(rooms):
        request.open_decode().expect()
        request.sends = [prefills[0].endpoint.open(request.room), early[request.room]]
        assert request.sends[1].phase is not Phase.FAILED, request.sends[1].error
        assert number < late[0].endpoint.open_rooms
    for request in rooms:
        request.send(8).finish()
    for request in rooms:
        request.released().done()
    rig.check()
    rig.quiet()


def test_what_is_parked_is_not_refused_though_its_number_is_no_longer_remembered() -> None:
    """And what is not is: nothing says that it has not ended."""
    rig = Rig(SPEC, options=FEW)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    prefills[0].endpoint.driver.loop.tombstones = Tombstones(generations=2)
    unsaid = rig.request("unsaid", prefills, decodes, 8).open_decode()
    parked = rig.request("parked", prefills, decodes, 8).open_decode().expect()
    many_end(rig)
    rig.wait(11.0)  # repeated meanwhile
    parked.open_prefill().send(8).finish().landed()
    unsaid.expect()
    rig.until(lambda: unsaid.receives[0].released, "the refusal", 400)
    assert unsaid.receives[0].phase is Phase.FAILED


def test_a_generation_says_which_room_it_is() -> None:
    """Rooms of one endpoint are numbered without gaps, whatever their ids."""
    rig = Rig(SPEC, options=FEW)
    rig.prefill(tp_shards(SPEC, 1))
    decodes = rig.decode(tp_shards(SPEC, 1))
    many_end(rig)
    handle = rig.request("next", rig.prefills, decodes, 8).open_decode().receives[0]
    assert handle._key.generation == Generation(OTHERS + 1)


def test_rooms_that_failed_before_prefill_was_found_are_not_awaited_and_told_over_several_steps() -> None:
    """However many they are, a step tells no more of them than its budget allows, and other rooms go on."""
    rig = Rig(SPEC)
    decodes = rig.decode(tp_shards(SPEC, 1))
    given_up = [rig.request(f"{n}", [], decodes, 8).open_decode().receives[0] for n in range(MOST + 50)]
    for handle in given_up:
        handle.abort("no time left")
    end = decodes[0].endpoint
    rig.until(lambda: all(handle.phase is Phase.FAILED for handle in given_up), "the failures")
    assert (end.open_rooms, len(end.inspect().rooms)) == (0, len(given_up)), "closing would wait for them"
    discovery = end._side._discovery
    prefills = rig.prefill(tp_shards(SPEC, 1))
    rig.until(lambda: bool(discovery.untold or discovery.outcomes), "more than one step can tell")
    rig.until(lambda: not end.inspect().rooms, "all to have been told")
    rig.request("next", prefills, decodes, 8).start(8).released().done()
