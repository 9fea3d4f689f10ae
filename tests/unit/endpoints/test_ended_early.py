"""Ids of rooms that were over before both sides had met: remembered for a while, and only a number of them."""

from __future__ import annotations

import pytest

from disagg_kv.core import Options, Phase
from disagg_kv.endpoints.prefill.ended_early import EndedEarly
from disagg_kv.errors import AbortedError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import RoomId
from tests.support.rig import Rig, tp_shards

SPEC = CacheSpec.kv(2, 4, 8, "float16")
A, B, C = (RoomId(name) for name in (b"a", b"b", b"c"))


def test_the_first_reason_stands_until_it_expires() -> None:
    ended = EndedEarly(Options(total_s=10.0))
    assert ended.next_at() is None
    ended.add(A, "decode gave up", 0.0)
    ended.add(A, "another", 5.0)
    ended.add(B, "later", 5.0)
    assert (ended.reason(A, b""), ended.reason(C, b""), ended.next_at()) == ("decode gave up", None, 10.0)
    ended.expire(9.9)
    assert ended.reason(A, b"") is not None
    ended.expire(10.0)
    assert (ended.reason(A, b""), ended.reason(B, b""), ended.next_at()) == (None, "later", 15.0)


def test_a_reason_counts_for_its_own_tag_and_for_rooms_without_one() -> None:
    """What an instance with another tag gave up is another request's; a few tags of a room are remembered."""
    ended = EndedEarly(Options())
    ended.add(A, "a stray gave up", 0.0, b"x")
    assert (ended.reason(A, b"y"), ended.reason(A, b"x"), ended.reason(A, b"")) == (None, *["a stray gave up"] * 2)
    ended.add(A, "decode gave up", 0.0, b"y")
    assert ended.reason(A, b"y") == "decode gave up"
    ended.add(B, "gave up without a tag", 0.0)
    assert ended.reason(B, b"y") == "gave up without a tag"
    for number in range(100):
        ended.add(C, "over", 0.0, b"%d" % number)
    assert sum(ended.reason(C, b"%d" % number) is not None for number in range(100)) == 4


def test_the_oldest_are_forgotten_beyond_a_bound() -> None:
    ended = EndedEarly(Options(parked=2))
    for number, room in enumerate((A, B, C)):
        ended.add(room, "over", float(number))
    assert [ended.reason(room, b"") for room in (A, B, C)] == [None, "over", "over"]


@pytest.mark.parametrize("world", [1, 2])
def test_every_decode_rank_that_asks_for_such_a_room_is_refused_at_once(world: int) -> None:
    """Also a rank that asks long after the others."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, world))
    rig.request("warm", prefills, decodes, 8).start().landed()
    request = rig.request("room", prefills, decodes, 8).open_prefill().open_decode()
    request.sends[0].abort("the user went away")
    rig.until(lambda: request.sends[0].released, "prefill's end")
    rig.wait(20.0)
    began = rig.clock()
    request.expect()
    rig.until(lambda: all(handle.released for handle in request.receives), "decode's end")
    assert rig.clock() - began < 2.0
    assert {handle.phase for handle in request.receives} == {Phase.FAILED}
    assert any("the user went away" in str(handle.error) for handle in request.receives)
    assert isinstance(request.sends[0].error, AbortedError)
    rig.quiet()
