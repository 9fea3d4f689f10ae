"""Memory in quarantine has a name: which life it waits for, how much it is, and what an operator says to free it."""

from __future__ import annotations

import re

import pytest
from attrs import evolve

from disagg_kv.core import Options
from disagg_kv.endpoints import DecodeEndpoint, PeerInfo, PrefillEndpoint, RecoveringReceiver, Retry
from disagg_kv.errors import PeerLostError, UnknownNameError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Epoch
from disagg_kv.testing import Fault, FaultyTransport
from disagg_kv.testing.faults import Plan
from disagg_kv.transports import InprocTransport
from tests.support.rig import Memory, Request, Rig, tp_shards

SPEC = CacheSpec.kv(2, 2, 8, "float16")
OPTIONS = Options(silence_s=5.0, peers=4)


def faulty(plan: Plan) -> tuple[list[FaultyTransport], Memory]:
    """Transports of ranks to come, in order, and the memory that makes them."""
    made: list[FaultyTransport] = []

    def transport() -> FaultyTransport:
        made.append(FaultyTransport(InprocTransport(), plan))
        return made[-1]

    return made, Memory(transport=transport)


def lost(rig: Rig, path: str, rows: int = 12) -> Request:
    """A request whose write hangs, of a prefill instance that falls silent."""
    transports, memory = faulty(lambda number: Fault.HUNG)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy=path)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy=path)
    request = rig.request("room", prefills, decodes, rows).start(rows)
    rig.until(lambda: bool(transports[0].held), "the hung write")
    prefills[0].frozen = True
    rig.until(lambda: request.receives[0].error is not None, "the loss")
    return request


def only(end: PrefillEndpoint | DecodeEndpoint) -> PeerInfo:
    """The one peer."""
    (peer,) = end.peers()
    return peer


@pytest.mark.parametrize("path", ["staged", "slice"])
def test_a_lost_peer_is_named_until_its_end_is_confirmed(path: str) -> None:
    """What it may still write to, the room that waits, and the text of the error that frees it."""
    rig = Rig(SPEC, options=OPTIONS)
    request = lost(rig, path)
    end, epoch = request.decodes[0].endpoint, request.prefills[0].endpoint.driver.loop.me.epoch
    peer = only(end)
    assert (peer.instance, peer.rank, peer.address, peer.epoch) == ("P", 0, "inproc://P0", epoch)
    assert (peer.state, peer.rooms) == ("lost", (request.room,))
    exposed = sum(len(table.pages) for table in request.taken) * pool_page_bytes(request)
    assert peer.ring_bytes == end.usage().quarantined_bytes
    assert (peer.ring_bytes, peer.page_bytes)[path == "slice"] > 0
    assert peer.page_bytes == (exposed if path == "slice" else 0)
    assert peer.slot_bytes == 0
    assert peer.silent_s == pytest.approx(5.0, abs=0.2)
    error = request.receives[0].error
    assert isinstance(error, PeerLostError)
    (said,) = re.findall(r"P/0 \(epoch ([0-9a-f]{32})\)", str(error))
    end.confirm_terminated(said)
    rig.until(lambda: request.receives[0].released and not end.usage().ring_used_bytes, "the evidence")
    assert end.peers() == ()


def pool_page_bytes(request: Request) -> int:
    """Bytes of one page of the decode rank's pool, over all of its planes."""
    pool = request.decodes[0].pool
    return sum(pool.view(number)[0].nbytes for number in range(len(pool.site.planes)))


def test_a_peer_that_is_there_is_listed_with_what_it_holds() -> None:
    """A connected peer whose aborted write is late; once it has landed it holds nothing, and is still listed."""
    rig = Rig(SPEC, options=OPTIONS)
    transports, memory = faulty({0: Fault.DELAYED}.get)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged", slot_bytes=4096)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    request = rig.request("room", prefills, decodes, 12).start(12)
    rig.until(lambda: bool(transports[0].held), "the held write")
    ends = (prefills[0].endpoint, decodes[0].endpoint)
    assert [(only(end).state, only(end).rooms) for end in ends] == [("connected", ())] * 2
    request.receives[0].abort("changed my mind")
    request.failed()
    assert (only(ends[1]).state, only(ends[1]).rooms) == ("connected", (request.room,))
    assert only(ends[1]).ring_bytes == ends[1].usage().quarantined_bytes > 0
    assert (only(ends[0]).slot_bytes, only(ends[0]).rooms) == (4096, (request.room,))
    prefills[0].frozen = True
    rig.wait(4.0)
    assert only(ends[1]).state == "silent"
    prefills[0].frozen = False
    transports[0].release()
    rig.quiet()
    for end in ends:
        assert (only(end).state, only(end).rooms, only(end).ring_bytes, only(end).slot_bytes) == ("connected", (), 0, 0)


@pytest.mark.parametrize("path", ["staged", "slice"])
def test_prefill_names_the_peer_to_which_its_slots_are_still_written(path: str) -> None:
    """The other side: a decode rank that fell silent while a write to it hangs."""
    rig = Rig(SPEC, options=OPTIONS)
    transports, memory = faulty({0: Fault.DELAYED}.get)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy=path, slot_bytes=4096)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy=path)
    request = rig.request("room", prefills, decodes, 12).start(12)
    rig.until(lambda: bool(transports[0].held), "the hung write")
    decodes[0].frozen = True
    end = prefills[0].endpoint
    rig.until(lambda: request.sends[0].error is not None, "the loss")
    peer = only(end)
    assert (peer.instance, peer.state, peer.rooms) == ("D", "lost", (request.room,))
    assert peer.slot_bytes == end.usage().slots_used * 4096
    assert (peer.page_bytes > 0) == (path == "slice")
    end.confirm_terminated(peer.epoch)
    rig.wait(1.0)
    # This transport has no bound for its last writes: only their ends are evidence.
    assert (only(end).state, only(end).held_bytes) == ("ended", peer.held_bytes)
    transports[0].release()
    rig.until(lambda: request.sends[0].released and not end.open_rooms, "the evidence")
    assert end.peers() == ()
    assert end.usage().slots_used == 0


def test_a_peer_that_was_lost_long_ago_is_still_named() -> None:
    """Memory that waits for it can be confirmed all the same."""
    rig = Rig(SPEC, options=OPTIONS)
    request = lost(rig, "staged")
    end, epoch = request.decodes[0].endpoint, request.prefills[0].endpoint.driver.loop.me.epoch
    before = only(end)
    rig.wait(150.0, 0.5)
    after = only(end)
    assert (after.epoch, after.address, after.ring_bytes, after.rooms, after.state, after.pid) == (
        epoch, before.address, before.ring_bytes, before.rooms, "lost", before.pid,
    )  # fmt: skip
    assert after.silent_s > 150.0
    end.confirm_terminated(epoch)
    rig.until(lambda: end.open_rooms == 0 and not end.usage().ring_used_bytes, "the evidence")
    assert end.peers() == ()


def test_a_life_whose_address_another_one_took_is_still_named() -> None:
    """The old life and the new one are two peers; only the old one's end frees its memory."""
    rig = Rig(SPEC, options=OPTIONS)
    transports, memory = faulty(lambda number: Fault.HUNG)
    old = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged")
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    request = rig.request("room", old, decodes, 12).start(12)
    rig.until(lambda: bool(transports[0].held), "the hung write")
    epoch, end = only(decodes[0].endpoint).epoch, decodes[0].endpoint
    old[0].closed = True
    old[0].channel.close()
    new = rig.prefill(tp_shards(SPEC, 1), strategy="staged")
    rig.until(lambda: request.receives[0].error is not None, "the loss")
    rig.request("next", new, decodes, 12).start(12).released()
    states = {peer.epoch: (peer.state, bool(peer.ring_bytes), peer.rooms) for peer in end.peers()}
    assert states == {
        new[0].endpoint.driver.loop.me.epoch: ("connected", False, ()),
        epoch: ("lost", True, (request.room,)),
    }
    assert epoch.hex() in str(request.receives[0].error)
    end.confirm_terminated(epoch.hex())
    rig.until(lambda: end.usage().ring_used_bytes == 0, "the evidence")
    assert [peer.epoch for peer in end.peers()] == [new[0].endpoint.driver.loop.me.epoch]


def test_where_no_bound_is_known_a_confirmed_end_is_seen_and_its_memory_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport whose last writes may land at any time: the life is ``ended``, and holds what it held."""
    monkeypatch.setattr(InprocTransport, "caps", evolve(InprocTransport.caps, drain_s=None))
    rig = Rig(SPEC, options=OPTIONS)
    request = lost(rig, "staged")
    member = request.decodes[0]
    end = member.endpoint
    end.confirm_terminated(only(end).epoch)
    rig.wait(1.0)
    assert (only(end).state, only(end).ring_bytes) == ("ended", end.usage().quarantined_bytes)
    rig.wait(150.0, 0.5)
    assert (only(end).state, only(end).ring_bytes) == ("ended", end.usage().quarantined_bytes)
    end.confirm_terminated(only(end).epoch)


@pytest.mark.parametrize("wrong", [Epoch(bytes(16)), "0" * 32, "p/0", "", "0" * 31, "é" * 32])
def test_an_epoch_that_nothing_is_known_of_is_refused(wrong: Epoch | str) -> None:
    """The error lists those that hold memory, as they would be accepted."""
    rig = Rig(SPEC, options=OPTIONS)
    request = lost(rig, "staged")
    end = request.decodes[0].endpoint
    with pytest.raises(UnknownNameError, match=only(end).epoch.hex()):
        end.confirm_terminated(wrong)
    rig.wait(1.0)
    assert only(end).ring_bytes == end.usage().quarantined_bytes > 0
    assert not end.driver.loop.landing


def test_a_receiver_that_tries_again_passes_both_on() -> None:
    """An operator may only have that one."""
    rig = Rig(SPEC, options=OPTIONS)
    request = lost(rig, "staged")
    end = request.decodes[0].endpoint
    outer = RecoveringReceiver(end, Retry(lambda failed: None), clock=rig.clock)
    assert [peer.epoch for peer in outer.peers()] == [only(end).epoch]
    outer.confirm_terminated(only(end).epoch.hex())
    rig.until(lambda: end.usage().ring_used_bytes == 0, "the evidence")
    assert not outer.peers()
