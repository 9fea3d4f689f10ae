"""Another process has taken the place of a rank whose first one lives on: that one is told, and takes no more rooms."""

from __future__ import annotations

import os

import pytest

from disagg_kv.channels import Arrived, InprocChannel
from disagg_kv.core import Codec, Options, Phase
from disagg_kv.core.wire import frames as f
from disagg_kv.endpoints import DecodeEndpoint, Incarnation, PrefillEndpoint
from disagg_kv.endpoints.decode.handle import ReceptionHandle
from disagg_kv.endpoints.prefill.handle import DeliveryHandle
from disagg_kv.errors import DisaggKVError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import RoomId
from disagg_kv.rendezvous import Source, StaticRendezvous
from disagg_kv.transports.process import Ending, Process
from tests.support.rig import Decodes, Prefills, Rig, tp_shards
from tests.support.rig_parts import Later

SPEC = CacheSpec.kv(2, 12, 8, "float16")
OPTIONS = Options(silence_s=10.0, total_s=1000.0)
TOLD_S = 3 * OPTIONS.heartbeat_s
"""A life that another has followed knows it by then."""


def ranks(rig: Rig, side: str, world: int, rank: int | None = None, host: str = "") -> Prefills | Decodes:
    """The ranks of an instance, or another life of one of them, elsewhere."""
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
    """A room that an engine opens on the first life of a rank."""
    return opened_on(rig.members[rank].endpoint, name)


def opened_on(endpoint: PrefillEndpoint | DecodeEndpoint, name: str) -> DeliveryHandle | ReceptionHandle:
    """A room that an engine opens."""
    if isinstance(endpoint, PrefillEndpoint):
        return endpoint.open(RoomId(name.encode()))
    return endpoint.open(RoomId(name.encode()), Source("P"))


def refused(rig: Rig, rank: int, name: str) -> str:
    """What the first life of a rank says to an engine that opens a room; empty: it takes the room."""
    try:
        opened(rig, rank, name)
    except DisaggKVError as exc:
        return str(exc)
    return ""


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(("world", "rank"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 2)])
@pytest.mark.parametrize("still_s", [0.0, 2.0, 40.0], ids=["running", "paused", "paused for long"])
def test_a_life_that_another_has_followed_is_told(side: str, world: int, rank: int, still_s: float) -> None:
    """Its open rooms fail and new ones are refused at once, with an error that says where its rank is now."""
    rig = Rig(SPEC, options=OPTIONS)
    first = ranks(rig, side, world)[rank]
    rig.wait(1.0)
    handle = opened(rig, rank, "open")
    rig.wait(0.2)
    first.frozen = still_s > 0
    (second,) = ranks(rig, side, world, rank)
    rig.wait(still_s)
    first.frozen = False
    rig.wait(TOLD_S)
    instance = "P" if side == "prefill" else "D"
    said = f"rank {rank} of instance '{instance}' lives elsewhere"
    where = second.endpoint.driver.loop.me.epoch.hex()
    assert handle.released
    assert said in refused(rig, rank, "new")
    if still_s < OPTIONS.silence_s:  # else its own silence may have ended the room before it heard anything
        assert type(handle.error).__name__ == "SupersededError"
        assert said in str(handle.error)
        assert where in str(handle.error)
    fresh = opened_on(second.endpoint, "fresh")
    rig.wait(1.0)
    assert fresh.phase is Phase.CONNECTING


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_of_lives_on_two_hosts_the_one_that_was_there_first_is_told(world: int, rank: int) -> None:
    """No clocks are compared there: what counts is who took whose place."""
    if rank >= world:
        pytest.skip("there is no such rank")
    rig = Rig(SPEC, options=OPTIONS)
    ranks(rig, "decode", world)
    rig.wait(1.0)
    handle = opened(rig, rank, "open")
    (second,) = ranks(rig, "decode", world, rank, "elsewhere")
    rig.wait(TOLD_S)
    assert f"rank {rank} of instance 'D' lives elsewhere" in str(handle.error)
    assert "lives elsewhere" in refused(rig, rank, "new")
    assert not second.endpoint.poll()
    opened_on(second.endpoint, "new")


def test_a_room_that_was_handed_over_before_its_rank_was_told_ends_with_the_same_error() -> None:
    """The engine opened it in the same moment: it does not wait for its deadline."""
    rig = Rig(SPEC, options=OPTIONS)
    (first,) = rig.decode(tp_shards(SPEC, 1))
    rig.wait(1.0)
    rig.decode(tp_shards(SPEC, 1), at="Q")
    rig.wait(TOLD_S)
    node = first.endpoint.driver.loop
    node.succession._younger, younger = None, node.succession._younger
    handle = opened(rig, 0, "room")
    node.succession._younger = younger
    rig.turn()
    assert "lives elsewhere" in str(handle.error)
    rig.quiet()
    assert first.endpoint.open_rooms == 0


def test_a_rank_takes_rooms_again_when_the_life_that_followed_it_has_ended() -> None:
    """The younger one is lost; whoever is left of the rank counts."""
    rig = Rig(SPEC, options=OPTIONS)
    rig.prefill(tp_shards(SPEC, 2))
    rig.wait(1.0)
    (second,) = rig.prefill(tp_shards(SPEC, 2), only=[0], at="Q")
    rig.wait(TOLD_S)
    assert refused(rig, 0, "new")
    second.crash()
    rig.wait(OPTIONS.closed_s + 1.0)
    assert not refused(rig, 0, "new")


def test_a_hint_alone_ends_nothing() -> None:
    """Only the younger life itself is believed: no rank of ours, and no stranger, can name one that is not there."""
    rig = Rig(SPEC, options=OPTIONS)
    first, other = rig.decode(tp_shards(SPEC, 2))
    rig.wait(1.0)
    handle = opened(rig, 0, "room")
    me, you = (m.endpoint.driver.loop.me.epoch for m in (other, first))
    for address in ("inproc://nowhere", first.channel.address, other.channel.address):
        other.channel.send(first.channel.address, Codec().encode(f.Superseded(src=me, dst=you, address=address)))
        rig.wait(TOLD_S)
    assert handle.phase is Phase.CONNECTING
    assert not refused(rig, 0, "new")


def test_who_is_no_rank_of_the_instance_must_not_name_another_life() -> None:
    """It is counted and refused."""
    rig = Rig(SPEC, options=OPTIONS)
    (prefill,), (decode,) = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    decode.endpoint.open(RoomId(b"room"), Source("P"))
    rig.wait(1.0)
    me, you = prefill.endpoint.driver.loop.me.epoch, decode.endpoint.driver.loop.me.epoch
    decode.channel.send(prefill.channel.address, Codec().encode(f.Superseded(src=you, dst=me, address="x")))
    rig.wait(0.5)
    assert prefill.observer.counters["frames.refused"] == 1


def test_a_prefill_rank_that_is_being_connected_may_say_that_it_was_followed() -> None:
    """Decode knows who it is, and looks its instance up again."""
    rig, later = Rig(SPEC, options=OPTIONS), Later()
    (prefill,), (decode,) = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    loop = decode.endpoint.driver.loop
    loop.connections._background = later
    decode.endpoint.open(RoomId(b"room"), Source("P"))
    rig.until(lambda: bool(later.jobs), "the connection")
    me, you = prefill.endpoint.driver.loop.me.epoch, loop.me.epoch
    prefill.channel.send(decode.channel.address, Codec().encode(f.Superseded(src=me, dst=you, address="x")))
    decode.endpoint.driver.step(0.0)
    assert decode.observer.counters["frames.refused"] == 0
    assert loop.directory.known(Source("P")) is None


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
