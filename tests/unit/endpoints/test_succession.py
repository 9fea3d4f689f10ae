"""Another process has taken the place of a rank whose first one stood still: that one asks, and takes no more rooms."""

from __future__ import annotations

import os

import pytest

from disagg_kv.channels import Arrived, InprocChannel
from disagg_kv.core import Options, Phase
from disagg_kv.endpoints import DecodeEndpoint, Incarnation, PrefillEndpoint
from disagg_kv.endpoints.decode.handle import ReceptionHandle
from disagg_kv.endpoints.peers.directory import DOUBT_S
from disagg_kv.endpoints.prefill.handle import DeliveryHandle
from disagg_kv.errors import DisaggKVError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import RoomId
from disagg_kv.rendezvous import Source, StaticRendezvous
from disagg_kv.transports.process import Ending, Process
from tests.support.rig import Decodes, Member, Prefills, Rig, tp_shards
from tests.support.rig_parts import Later

SPEC = CacheSpec.kv(2, 12, 8, "float16")
OPTIONS = Options(silence_s=10.0, total_s=1000.0)
STOOD_S = OPTIONS.missed * OPTIONS.heartbeat_s
"""Who did not run for so long asks the rendezvous."""


def ranks(rig: Rig, side: str, world: int, rank: int | None = None, host: str = "") -> Prefills | Decodes:
    """The ranks of an instance, or another incarnation of one of them, elsewhere."""
    only, at = (None, None) if rank is None else ([rank], "Q")
    if side == "prefill":
        return rig.prefill(tp_shards(SPEC, world), only=only, at=at)
    if not host:
        return rig.decode(tp_shards(SPEC, world), only=only, at=at)
    life = Incarnation(process=Process(os.getpid(), 1, host), watch=_unseen)
    return rig.decode(tp_shards(SPEC, world), only=only, at=at, life=life)


def _unseen(process: Process) -> Ending:
    raise AssertionError("nobody of another host is watched")


def opened(rig: Rig, rank: int, name: str) -> DeliveryHandle | ReceptionHandle:
    """A room that an engine opens on the first incarnation of a rank."""
    return opened_on(rig.members[rank].endpoint, name)


def opened_on(endpoint: PrefillEndpoint | DecodeEndpoint, name: str) -> DeliveryHandle | ReceptionHandle:
    """A room that an engine opens."""
    if isinstance(endpoint, PrefillEndpoint):
        return endpoint.open(RoomId(name.encode()))
    return endpoint.open(RoomId(name.encode()), Source("P"))


def refused(rig: Rig, rank: int, name: str) -> str:
    """What the first incarnation of a rank says to an engine that opens a room; empty: it takes the room."""
    try:
        opened(rig, rank, name)
    except DisaggKVError as exc:
        return str(exc)
    return ""


def stood_still(rig: Rig, member: Member[PrefillEndpoint] | Member[DecodeEndpoint], seconds: float) -> None:
    """A process does not run for a while, and goes on."""
    member.frozen = True
    rig.wait(seconds)
    member.frozen = False
    rig.wait(0.3)


def replaced_while_it_stood() -> tuple[Rig, Member[DecodeEndpoint]]:
    """A decode rank that stands still, and whose place another process has taken meanwhile."""
    rig = Rig(SPEC, options=OPTIONS)
    (first,) = rig.decode(tp_shards(SPEC, 1))
    rig.wait(1.0)
    first.frozen = True
    rig.decode(tp_shards(SPEC, 1), at="Q")
    rig.wait(STOOD_S + 1.0)
    return rig, first


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(("world", "rank"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 2)])
@pytest.mark.parametrize("still_s", [STOOD_S + 1.0, 40.0], ids=["paused", "paused for long"])
def test_an_incarnation_that_stood_still_while_another_took_its_place_takes_no_more_rooms(
    side: str, world: int, rank: int, still_s: float
) -> None:
    """Its open rooms fail and new ones are refused at once, with an error that says where its rank is now."""
    rig = Rig(SPEC, options=OPTIONS)
    first = ranks(rig, side, world)[rank]
    rig.wait(1.0)
    handle = opened(rig, rank, "open")
    rig.wait(0.2)
    first.frozen = True
    (second,) = ranks(rig, side, world, rank)
    stood_still(rig, first, still_s)
    instance = "P" if side == "prefill" else "D"
    said = f"rank {rank} of instance '{instance}' lives elsewhere"
    assert handle.released
    assert said in refused(rig, rank, "new")
    assert second.channel.address in refused(rig, rank, "new")
    if still_s < OPTIONS.silence_s:  # else its own silence may have ended the room before it heard anything
        assert type(handle.error).__name__ == "SupersededError"
        assert said in str(handle.error)
    fresh = opened_on(second.endpoint, "fresh")
    rig.wait(1.0)
    assert fresh.phase is Phase.CONNECTING


@pytest.mark.parametrize("there", ["its own", "none", "no answer"])
def test_an_incarnation_that_stood_still_goes_on_unless_another_address_is_known(
    there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(SPEC, options=OPTIONS)
    (first,) = rig.decode(tp_shards(SPEC, 1))
    rig.wait(1.0)
    handle = opened(rig, 0, "open")
    if there == "none":
        monkeypatch.setattr(rig.rendezvous, "lookup", lambda source: None)
    elif there == "no answer":
        first.endpoint.driver.loop.directory._background = Later()
    stood_still(rig, first, STOOD_S + 1.0)
    assert handle.phase is Phase.CONNECTING
    assert not refused(rig, 0, "new")


@pytest.mark.parametrize("host", ["", "elsewhere"])
def test_of_two_incarnations_of_a_rank_the_newest_counts(host: str) -> None:
    """Both run: rank 0 takes the votes of the newest one, and fails what the other one begins."""
    rig = Rig(SPEC, options=OPTIONS)
    ranks(rig, "decode", 2)
    rig.wait(1.0)
    (second,) = ranks(rig, "decode", 2, 1, host)
    rig.wait(3.0)
    opened(rig, 0, "room")
    older = opened(rig, 1, "room")
    rig.wait(0.5)
    assert older.phase is Phase.FAILED
    opened(rig, 0, "other")
    newer = opened_on(second.endpoint, "other")
    rig.wait(0.5)
    assert newer.phase is Phase.CONNECTING


def test_a_room_that_was_handed_over_before_its_rank_learned_that_it_was_replaced_ends_with_the_same_error() -> None:
    """The engine opened it in the same moment: it does not wait for its deadline."""
    rig, first = replaced_while_it_stood()
    handle = opened(rig, 0, "room")
    first.frozen = False
    rig.wait(0.3)
    assert "lives elsewhere" in str(handle.error)
    rig.quiet()
    assert first.endpoint.open_rooms == 0


def test_a_decode_rank_that_asks_a_prefill_rank_that_was_replaced_is_refused_at_once() -> None:
    """Its next rooms look the instance up. Until the replaced rank runs again, it is not used either."""
    rig = Rig(SPEC, options=OPTIONS)
    (first,), decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    rig.request("early", [first], decodes, 8).start().landed().released()
    first.frozen = True
    second = rig.prefill(tp_shards(SPEC, 1), at="Q")
    stood_still(rig, first, STOOD_S + 0.5)
    late = rig.request("late", [first], decodes, 8).open_decode().expect(8)
    rig.until(lambda: late.receives[0].phase is Phase.FAILED, "the refusal", turns=200)
    assert "rank 0 of instance 'P' lives elsewhere" in str(late.receives[0].error)
    rig.wait(DOUBT_S)
    rig.request("found", second, decodes, 8).start().landed()


def test_what_a_store_holds_instead_of_an_address_keeps_nobody_from_starting() -> None:
    """The rank publishes its own place, as if nobody had been there."""
    rig = Rig(SPEC, options=OPTIONS)
    rig.rendezvous = StaticRendezvous({"P": ["gone://away"]})
    (member,) = rig.prefill(tp_shards(SPEC, 1))
    rig.wait(OPTIONS.silence_s + 1.0)
    assert rig.rendezvous.lookup(Source("P")) == (member.channel.address,)
    assert not member.endpoint.peers()
    stranger = InprocChannel(rig.hub, "stranger")
    assert not [event for event in stranger.poll() if isinstance(event, Arrived)]


def test_an_idle_incarnation_that_stood_still_asks_in_its_first_step() -> None:
    """Nothing was due."""
    rig, first = replaced_while_it_stood()
    first.endpoint.driver.step()
    assert "lives elsewhere" in refused(rig, 0, "new")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_look_up_that_began_before_an_incarnation_stood_still_says_nothing(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer comes late, and is from before the other incarnation came."""
    rig = Rig(SPEC, options=OPTIONS)
    first = ranks(rig, "decode", 2)[rank]
    rig.wait(1.0)
    directory, earlier = first.endpoint.driver.loop.directory, rig.rendezvous.lookup(Source("D"))
    directory._background = later = Later()
    directory.ask(Source("D"))
    first.frozen = True
    ranks(rig, "decode", 2, rank)
    stood_still(rig, first, STOOD_S + 1.0)
    with monkeypatch.context() as before:
        before.setattr(rig.rendezvous, "lookup", lambda source: earlier)
        later.jobs.pop(0)()
    rig.wait(0.3)
    for job in later.jobs:
        job()
    rig.wait(0.3)
    assert "lives elsewhere" in refused(rig, rank, "new")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stood_still_awaits_the_answer_although_another_rank_ends_meanwhile(rank: int) -> None:
    rig = Rig(SPEC, options=OPTIONS)
    members = ranks(rig, "decode", 2)
    first, other = members[rank], members[1 - rank]
    rig.wait(1.0)
    (known,) = first.endpoint.peers()
    first.endpoint.driver.loop.directory._background = later = Later()
    first.frozen = True
    ranks(rig, "decode", 2, rank)
    stood_still(rig, first, STOOD_S + 1.0)
    other.frozen = True
    first.endpoint.confirm_terminated(known.epoch)
    rig.wait(0.1)
    for job in later.jobs:
        job()
    rig.wait(0.3)
    assert "lives elsewhere" in refused(rig, rank, "new")
