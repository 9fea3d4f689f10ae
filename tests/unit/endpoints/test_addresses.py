"""Addresses in the request: decode finds prefill by what the engine carries, and wrong addresses end with a name."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from disagg_kv.core import Phase
from disagg_kv.errors import IncompatiblePeerError, PeerLostError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Rank, RoomId
from disagg_kv.rendezvous import RequestRendezvous, Source
from tests.support.rig import Decodes, Prefills, Rig, tp_shards

SPEC = CacheSpec.kv(2, 4, 8, "float16")


def carried(rig: Rig, name: str, world: int) -> tuple[str, ...]:
    """What the engines of an instance read of their own ranks and hand to each other."""
    rendezvous = rig.rendezvous
    assert isinstance(rendezvous, RequestRendezvous)
    published = [rendezvous.published(name, Rank(rank)) for rank in range(world)]
    addresses = tuple(address for address in published if address is not None)
    rendezvous.learn(name, addresses)
    return addresses


def instances(prefill: int, decode: int, *, threaded: bool = False) -> tuple[Rig, Prefills, Decodes]:
    """Two instances that share no store."""
    rig = Rig(SPEC, threaded=threaded)
    rig.rendezvous = RequestRendezvous()
    sides = rig.prefill(tp_shards(SPEC, prefill)), rig.decode(tp_shards(SPEC, decode))
    carried(rig, "D", decode)
    return rig, *sides


@pytest.mark.parametrize("split", [(1, 1), (2, 1), (1, 2)])
def test_a_request_that_carries_addresses_crosses(split: tuple[int, int]) -> None:
    """Between any splits; the ranks of an instance agree by what they learned."""
    rig, prefills, decodes = instances(*split)
    request = rig.request("room", prefills, decodes, 13)
    request.source = Source("P", carried(rig, "P", split[0]))
    request.start(13).landed()
    rig.quiet()


def test_instances_that_close_withdraw_their_addresses() -> None:
    """With threads of their own, between which addresses pass."""
    rig, prefills, decodes = instances(2, 2, threaded=True)
    request = rig.request("room", prefills, decodes, 13)
    request.source = Source("P", carried(rig, "P", 2))
    request.start(13).landed()
    rig.close()
    assert isinstance(rig.rendezvous, RequestRendezvous)
    for name in ("P", "D"):
        assert rig.rendezvous.lookup(Source(name)) is None
        assert rig.rendezvous.published(name, Rank(1)) is None


@pytest.mark.parametrize(
    ("addresses", "field"),
    [
        (["P1", "P0"], "rank of inproc://P1"),
        (["P0"], "ranks of inproc://P0"),
        (["P0", "P1", "Q0"], "ranks of inproc://P0"),
        (["Q0"], "instance of inproc://Q0"),
        (["P0", "P0"], "rank of inproc://P0"),
        (["E0"], "role"),
    ],
    ids=["order", "too few", "too many", "another instance", "one twice", "a decode rank"],
)
def test_addresses_of_other_ranks_end_with_the_name_of_the_field(addresses: Sequence[str], field: str) -> None:
    """Never another request's bytes; and the right addresses work afterwards."""
    rig, prefills, decodes = instances(2, 1)
    rig.prefill(tp_shards(SPEC, 1), name="Q")
    rig.decode(tp_shards(SPEC, 1), name="E")
    handle = decodes[0].endpoint.open(RoomId(b"wrong"), Source("P", [f"inproc://{one}" for one in addresses]))
    rig.until(lambda: handle.released, "the refusal")
    assert handle.phase is Phase.FAILED
    assert isinstance(handle.error, IncompatiblePeerError), handle.error
    assert handle.error.field == field
    request = rig.request("room", prefills, decodes, 13)
    request.source = Source("P", carried(rig, "P", 2))
    request.start(13).landed()


def test_without_addresses_an_unknown_instance_is_not_found() -> None:
    """A request that was to carry them: the room fails after its silence."""
    rig, _, decodes = instances(1, 1)
    handle = decodes[0].endpoint.open(RoomId(b"room"), Source("P"))
    rig.wait(31.0)
    assert handle.released
    assert isinstance(handle.error, PeerLostError)
    assert "prefill instance 'P' was not found in 30 s" in str(handle.error)


class Watched(RequestRendezvous):
    """Notes what is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Source] = []

    def lookup(self, source: Source) -> tuple[str, ...] | None:
        """Note and pass on."""
        self.asked.append(source)
        return super().lookup(source)


def test_a_source_is_forgotten_once_no_room_waits_for_it() -> None:
    """Until then it is asked for."""
    rig = Rig(SPEC)
    rig.rendezvous = watched = Watched()
    (decode,) = rig.decode(tp_shards(SPEC, 1))
    watched.asked.clear()
    rooms = [decode.endpoint.open(RoomId(b"%d" % n), Source("P", ["inproc://P0"])) for n in range(4)]
    rig.turn()
    assert set(watched.asked) == {Source("P", ["inproc://P0"])}
    rig.until(lambda: all(room.released for room in rooms), "the end of all rooms")
    watched.asked.clear()
    rig.wait(10.0)
    assert not watched.asked


def test_an_instance_that_restarted_elsewhere_is_another_source() -> None:
    """Rooms of the old addresses fail; those of the new ones do not wait for that."""
    rig, (dead,), decodes = instances(1, 1)
    source = Source("P", carried(rig, "P", 1))
    before = rig.request("before", [dead], decodes, 5)
    before.source = source
    before.start(5).landed()
    dead.crash()
    rig.prefills.remove(dead)
    late = decodes[0].endpoint.open(RoomId(b"late"), source)
    (back,) = rig.prefill(tp_shards(SPEC, 1), at="again")
    request = rig.request("after", [back], decodes, 9)
    request.source = Source("P", carried(rig, "P", 1))
    assert request.source.addresses == ("inproc://again0",)
    request.start(9).landed()
    rig.until(lambda: late.released, "the end of the room of the dead instance")
    assert late.phase is Phase.FAILED
    assert isinstance(late.error, PeerLostError)
