"""Rank 0 of an instance counts its votes; here another process takes its place while rooms are open or begin.

It may have another address than the first, so that nothing says that this one is gone.
"""

from __future__ import annotations

import pytest

from disagg_kv.core import Options, Phase
from disagg_kv.endpoints import PrefillEndpoint
from disagg_kv.geometry import CacheSpec
from tests.support.rig import Member, Prefills, Request, Rig, tp_shards

SPEC = CacheSpec.kv(2, 4, 8, "float16")
OPTIONS = Options(silence_s=10.0, total_s=1000.0)
SECONDS = 15.0
"""Every rank knows by then how a room ended: far below ``total_s``."""


def restarted(rig: Rig) -> Prefills:
    """Prefill's ranks once the first was killed and replaced; the second has not noticed yet."""
    rig.prefills[0].crash()
    rig.prefills[:1] = rig.prefill(tp_shards(SPEC, 2), only=[0])
    del rig.prefills[2:]
    return rig.prefills


def agreed(request: Request) -> Phase:
    """How a room ended, on all ranks."""
    rig = request.rig
    end = rig.clock() + SECONDS
    rig.until(lambda: all(h.released for h in request.handles) or rig.clock() > end, f"room {request.room.decode()}")
    (phase,) = {h.phase for h in request.handles}
    assert phase in (Phase.DONE, Phase.FAILED), request.errors()
    return phase


@pytest.mark.parametrize("turns", [0, 1, 5, 50, 200, 500, 700, 1000])
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_room_that_begins_when_rank_0_has_restarted_succeeds_on_all_ranks(turns: int, first: str) -> None:
    """The other rank finds the new rank 0 before, while, or after the room's bytes have moved."""
    rig = Rig(SPEC, options=OPTIONS)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 2)), rig.decode(tp_shards(SPEC, 1))
    rig.request("warm", prefills, decodes, 8).start().landed()
    prefills = restarted(rig)
    for _ in range(turns):
        rig.turn()
    request = rig.request("fresh", prefills, decodes, 8)
    if first == "prefill":
        request.open_prefill().send(8).finish()
        rig.turn()
        request.open_decode().expect(None)
    else:
        request.open_decode().expect(None)
        rig.turn()
        request.open_prefill().send(8).finish()
    assert agreed(request) is Phase.DONE
    request.done()
    rig.check()
    rig.quiet()


def test_a_room_that_the_lost_rank_0_had_too_fails_and_the_next_one_succeeds() -> None:
    """The surviving rank's room ended with the life of rank 0 that had it."""
    rig = Rig(SPEC, options=OPTIONS)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 2)), rig.decode(tp_shards(SPEC, 1))
    old = rig.request("old", prefills, decodes, 8).open_decode().expect().open_prefill()
    rig.until(lambda: all(h.phase is Phase.READY for h in old.sends), "the expectation")
    prefills = restarted(rig)
    new = rig.request("new", prefills, decodes, 8).start()
    assert agreed(new) is Phase.DONE
    assert (old.sends[1].phase, old.receives[0].phase) == (Phase.FAILED, Phase.FAILED)


def test_a_room_that_the_new_rank_0_never_opens_fails_within_seconds() -> None:
    """Nobody has told decode of it, so nothing but the agreement ends it."""
    rig = Rig(SPEC, options=OPTIONS)
    rig.prefill(tp_shards(SPEC, 2))
    rig.until(lambda: all(len(m.endpoint.peers()) == 1 for m in rig.prefills), "the ranks to meet")
    prefills = restarted(rig)
    request = rig.request("room", prefills[1:], [], 8).open_prefill()
    assert agreed(request) is Phase.FAILED
    assert "rank 0 of instance 'P' is lost" in request.errors()
    late = rig.request("room", prefills[:1], [], 8).open_prefill()
    assert agreed(late) is Phase.FAILED
    rig.quiet()


def test_a_room_that_has_failed_elsewhere_ends_as_it_begins() -> None:
    """Rank 0 opens it when the other's vote against it is known; what decode asked before is answered."""
    rig = Rig(SPEC, options=OPTIONS)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 2)), rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 8).open_decode().expect(None)
    rig.wait(1.0)
    decodes[0].frozen = True
    request.sends = [prefills[1].endpoint.open(request.room)]
    request.sends[0].abort("the user went away")
    rig.wait(0.5)
    request.sends.append(prefills[0].endpoint.open(request.room))
    rig.wait(0.5)
    assert request.sends[1].released
    decodes[0].frozen = False
    assert agreed(request) is Phase.FAILED
    rig.quiet()


def test_retries_of_a_room_that_only_the_survivor_had_opened_succeed() -> None:
    """The new rank 0 learns how that room ended, and its later attempts are other rooms."""
    rig = Rig(SPEC, options=OPTIONS)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 2)), rig.decode(tp_shards(SPEC, 1))
    rig.until(lambda: len(prefills[1].endpoint.peers()) == 1, "the ranks to meet")
    prefills = restarted(rig)
    assert agreed(rig.request("room", prefills[1:], [], 8).open_prefill()) is Phase.FAILED
    for attempt in (2, 3):
        request = rig.request("room", prefills, decodes, 8, attempt=attempt).start()
        assert agreed(request) is Phase.DONE
        request.done()
    rig.check()
    rig.quiet()


def there(one: Member[PrefillEndpoint], other: Member[PrefillEndpoint]) -> bool:
    """Whether one rank is known to another."""
    return one.channel.address in {peer.address for peer in other.endpoint.peers()}


def elsewhere(rig: Rig, rank: int) -> Prefills:
    """Prefill's ranks once one of two stands still, and another process for it has met the other one."""
    first, other = rig.prefills[rank], rig.prefills[1 - rank]
    first.frozen = True
    (second,) = rig.prefill(tp_shards(SPEC, 2), only=[rank], at="Q")
    rig.until(lambda: there(second, other) and there(other, second), "the ranks to meet")
    assert there(first, other)
    return [second, other] if rank == 0 else [other, second]


@pytest.mark.parametrize("rank", [0, 1])
def test_another_life_of_a_rank_at_another_address_is_the_end_of_the_first(rank: int) -> None:
    """The other rank's room that needs the first fails before its silence does, and others succeed."""
    rig = Rig(SPEC, options=OPTIONS)
    rig.prefill(tp_shards(SPEC, 2))
    rig.until(lambda: all(len(m.endpoint.peers()) == 1 for m in rig.prefills), "the ranks to meet")
    old = rig.request("old", list(rig.prefills), [], 8).open_prefill()
    rig.wait(0.5)
    began = rig.clock()
    prefills = elsewhere(rig, rank)
    survivor = old.sends[1 - rank]
    rig.until(lambda: survivor.released, "the room")
    assert rig.clock() - began < OPTIONS.silence_s / 2
    assert survivor.phase is Phase.FAILED
    assert f"rank {rank} of instance 'P' is lost" in str(survivor.error)
    new = rig.request("new", prefills, rig.decode(tp_shards(SPEC, 1)), 8).start()
    assert agreed(new) is Phase.DONE


@pytest.mark.parametrize("rank", [0, 1])
def test_a_life_that_speaks_again_when_another_is_there_for_its_rank_changes_nothing(rank: int) -> None:
    """It stood still for long; before, while and after it is heard again the ranks agree without it."""
    rig = Rig(SPEC, options=OPTIONS)
    rig.prefill(tp_shards(SPEC, 2))
    rig.until(lambda: all(len(m.endpoint.peers()) == 1 for m in rig.prefills), "the ranks to meet")
    (first, other), decodes = rig.prefills, rig.decode(tp_shards(SPEC, 1))
    if rank:
        first, other = other, first
    prefills = elsewhere(rig, rank)

    def works(name: str) -> None:
        request = rig.request(name, prefills, decodes, 8).start()
        assert agreed(request) is Phase.DONE
        request.done()

    rig.until(lambda: not there(first, other), "its silence")
    works("while it is silent")
    first.frozen = False
    open_room = rig.request("while it speaks", prefills, decodes, 8).open_decode().expect(None).open_prefill()
    rig.until(lambda: there(first, other), "its voice")
    open_room.send(8).finish()
    assert agreed(open_room) is Phase.DONE
    open_room.done()
    works("while it is there")
    first.crash()
    rig.until(lambda: not there(first, other), "its end")
    works("when it has ended")
    rig.check()
    rig.quiet()


def test_an_incarnation_that_was_replaced_hears_that_its_rooms_have_failed() -> None:
    """It has all that it waited for, and rank 0, which knows it, agrees with another incarnation of its rank."""
    rig = Rig(SPEC, options=OPTIONS)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 2))
    rig.until(lambda: all(len(m.endpoint.peers()) == 1 for m in decodes), "the ranks to meet")
    leader, first = decodes
    first.frozen = True
    (second,) = rig.decode(tp_shards(SPEC, 2), only=[1], at="E")
    rig.until(lambda: len(leader.endpoint.peers()) == 2 and len(second.endpoint.peers()) == 1, "the ranks to meet")
    first.frozen = False
    began = rig.clock()
    request = rig.request("room", prefills, [leader, first], 8).start()
    old = request.receives[1]
    rig.until(lambda: old.released, "the room")
    assert old.phase is Phase.FAILED
    assert "another incarnation of rank 1 is there" in str(old.error)
    assert rig.clock() - began < SECONDS


def test_rooms_of_a_rank_0_that_stood_still_and_was_replaced_end_at_once() -> None:
    """It asks, and its word ends the rooms that the other ranks and prefill have with it."""
    rig = Rig(SPEC, options=OPTIONS)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 2))
    rig.until(lambda: all(len(m.endpoint.peers()) == 1 for m in decodes), "the ranks to meet")
    first, other = decodes
    first.frozen = True
    rig.decode(tp_shards(SPEC, 2), only=[0], at="E")
    rig.until(lambda: len(other.endpoint.peers()) == 2, "the ranks to meet")
    rig.wait(OPTIONS.missed * OPTIONS.heartbeat_s)
    first.frozen = False
    request = rig.request("room", prefills, [first, other], 8).start()
    began = rig.clock()
    rig.until(lambda: all(h.released for h in request.handles), "the room")
    assert request.all(Phase.FAILED)
    assert "rank 0 of instance 'D' lives elsewhere" in str(request.receives[0].error)
    assert rig.clock() - began < OPTIONS.silence_s / 2


def test_a_life_that_another_has_followed_leads_again_when_that_one_ends() -> None:
    """Nobody is without rank 0 for good while a life of it is there."""
    rig = Rig(SPEC, options=OPTIONS)
    rig.prefill(tp_shards(SPEC, 2))
    rig.until(lambda: all(len(m.endpoint.peers()) == 1 for m in rig.prefills), "the ranks to meet")
    first, other = rig.prefills
    second, _ = elsewhere(rig, 0)
    first.frozen = False
    rig.wait(1.0)
    second.crash()
    rig.until(lambda: not there(second, other), "its end")
    request = rig.request("room", [first, other], [], 8).open_prefill()
    rig.wait(0.5)
    request.sends[0].abort("the user went away")
    assert agreed(request) is Phase.FAILED
    assert "the user went away" in str(request.sends[1].error)
