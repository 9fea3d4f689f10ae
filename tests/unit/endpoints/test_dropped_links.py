"""Endpoints with a small budget of links: rooms never suffer from it, and a peer that was forgotten returns."""

from __future__ import annotations

import attrs
import pytest

from disagg_kv.channels import UNKNOWN_LINK, Hub, InprocChannel
from disagg_kv.core import Options, Phase
from disagg_kv.endpoints.peers.link_budget import OWN_LINK, allowed_links, link_cost
from disagg_kv.errors import CapacityError
from disagg_kv.geometry import CacheSpec
from disagg_kv.testing import Fault, FaultyTransport
from disagg_kv.transports import InprocTransport, LinkCost
from sim.accounts import check_side
from tests.support.held_links import forget
from tests.support.rig import Decodes, Memory, Prefills, Rig, tp_shards

SPEC = CacheSpec.kv(2, 4, 8, "float16")
ONE = link_cost(InprocChannel(Hub(), "x"), InprocTransport.caps.link).nbytes
FEW = Options(link_bytes=ONE)


def rig_of(options: Options = FEW, names: str = "PQ") -> tuple[Rig, list[Prefills], Decodes]:
    """A decode rank, and prefill instances."""
    rig = Rig(SPEC, options=options)
    instances = [rig.prefill(tp_shards(SPEC, 1), name, strategy="staged") for name in names]
    return rig, instances, rig.decode(tp_shards(SPEC, 1), strategy="staged")


def serve(rig: Rig, name: str, prefills: Prefills, decodes: Decodes, of: str) -> None:
    rig.request(name, prefills, decodes, 12, of=of).start(12).released().done()


def states(end: object) -> dict[str, str]:
    return {peer.instance: peer.state for peer in end.peers()}  # type: ignore[attr-defined]


def check(rig: Rig) -> None:
    for member in rig.members:
        check_side(member.endpoint.inspect())
        member.endpoint.driver.loop.peers.check_integrity()


def test_an_idle_peer_above_the_budget_is_forgotten_on_both_sides_and_the_next_room_meets_it() -> None:
    rig, (p, q), decodes = rig_of()
    serve(rig, "one", p, decodes, "P")
    serve(rig, "two", q, decodes, "Q")
    rig.wait(3.0)
    decode = decodes[0].endpoint
    assert states(decode) == {"Q": "idle"}
    assert states(p[0].endpoint) == {}, "the other side forgets it too, although it knows but this one"
    assert (decode.usage().links, decode.usage().links_most) == (1, 1)
    assert [len(end.driver.loop.connections.linked()) for end in (decode, p[0].endpoint)] == [1, 0]
    serve(rig, "three", p, decodes, "P")
    rig.wait(3.0)
    assert states(decode) == {"P": "idle"}
    assert decodes[0].observer.counters["links.dropped"] == 2
    assert "peers.lost" not in decodes[0].observer.counters
    check(rig)


@pytest.mark.parametrize("forgets", ["prefill", "decode"])
def test_a_room_with_a_peer_that_was_forgotten_unheard_waits_for_one_answer(forgets: str) -> None:
    """Its notice was lost. The first frame of the room is answered with ``Hello``, and repeated at once."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="staged")
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    serve(rig, "one", prefills, decodes, "P")
    rig.wait(5.0)
    ends = (prefills[0].endpoint, decodes[0].endpoint)
    loop, other = (end.driver.loop for end in (ends if forgets == "prefill" else ends[::-1]))
    forget(loop, other.me.epoch)
    began = rig.clock()
    serve(rig, "two", prefills, decodes, "P")
    assert rig.clock() - began < 0.15, "it waited for a repetition"
    check(rig)


def test_rooms_with_more_peers_than_the_budget_keep_all_links() -> None:
    """Of several instances at once, and of one instance with more ranks than there may be links."""
    rig = Rig(SPEC)
    instances = [rig.prefill(tp_shards(SPEC, 2), name, strategy="staged") for name in "PQ"]
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged", options=FEW)
    requests = [rig.request(f"r{n}", one, decodes, 12, of="PQ"[n]) for n, one in enumerate(instances)]
    for request in requests:
        request.open_decode().expect()
    rig.wait(5.0)
    assert decodes[0].endpoint.usage().links == 4
    for request in requests:
        request.open_prefill().send(12).finish().released().done()
    rig.wait(3.0)
    assert decodes[0].endpoint.usage().links == 1
    for n, one in enumerate(instances):
        serve(rig, f"again {n}", one, decodes, "PQ"[n])
    check(rig)


def test_an_instance_that_moved_while_it_was_forgotten_is_found() -> None:
    """Nothing answers at its old address, or another one does."""
    for elsewhere in (False, True):
        rig, (p, q), decodes = rig_of()
        serve(rig, "one", p, decodes, "P")
        serve(rig, "two", q, decodes, "Q")
        rig.wait(3.0)
        p[0].crash()
        fresh = rig.prefill(tp_shards(SPEC, 1), "P", at="M", strategy="staged")
        if elsewhere:
            rig.prefill(tp_shards(SPEC, 1), "O", at="P", strategy="staged")
        serve(rig, "three", fresh, decodes, "P")
        check(rig)


def test_an_instance_that_ended_while_it_was_forgotten_fails_its_room_by_name() -> None:
    rig, (p, q), decodes = rig_of()
    serve(rig, "one", p, decodes, "P")
    serve(rig, "two", q, decodes, "Q")
    rig.wait(3.0)
    p[0].crash()
    request = rig.request("three", [], decodes, 12, of="P").open_decode().expect()
    rig.until(lambda: request.all(Phase.FAILED), "the failure", turns=2000)
    assert "no process listens there" in request.errors() or "no answer" in request.errors()


def test_a_peer_whose_room_waits_for_this_side_keeps_its_link() -> None:
    """Its ``Expect`` is parked: no room of this side uses it, but it asks for heartbeats."""
    rig = Rig(SPEC, options=FEW)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="staged")
    first = rig.decode(tp_shards(SPEC, 1), "A", strategy="staged", options=Options())
    second = rig.decode(tp_shards(SPEC, 1), "B", strategy="staged", options=Options())
    late = rig.request("late", prefills, first, 12).open_decode().expect()
    rig.wait(1.0)
    serve(rig, "other", prefills, second, "P")
    rig.wait(6.0)
    assert states(prefills[0].endpoint) == {"A": "connected"}
    late.open_prefill().send(12).finish().released().done()
    check(rig)


def test_a_parked_expectation_of_a_peer_that_is_forgotten_is_repeated() -> None:
    """The peer made room for another one at the limit. Its next heartbeat shows that."""
    rig = Rig(SPEC, options=Options(silence_s=180.0))
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="staged")
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    late = rig.request("late", prefills, decodes, 12).open_decode().expect()
    rig.wait(0.5)
    loop = prefills[0].endpoint.driver.loop
    forget(loop, decodes[0].endpoint.driver.loop.me.epoch)
    assert states(prefills[0].endpoint) == {}
    began = rig.clock()
    late.open_prefill().send(12).finish().released().done()
    assert rig.clock() - began < 2 * loop.options.heartbeat_s
    check(rig)


def test_the_link_of_a_lost_peer_with_memory_in_quarantine_stays() -> None:
    """Evidence about it comes through the link; it goes once its memory is free, before all others."""
    rig = Rig(SPEC, options=attrs.evolve(FEW, silence_s=3.0))
    memory = Memory(transport=lambda: FaultyTransport(InprocTransport(), lambda number: Fault.HUNG))
    p = rig.prefill(tp_shards(SPEC, 1), "P", memory, strategy="staged")
    q = rig.prefill(tp_shards(SPEC, 1), "Q", strategy="staged")
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    request = rig.request("one", p, decodes, 12, of="P").start(12)
    rig.until(lambda: bool(decodes[0].endpoint.usage().ring_used_bytes), "the lease")
    rig.wait(0.5)
    p[0].frozen = True
    rig.until(lambda: request.receives[0].phase is Phase.FAILED, "the failure")
    decode, epoch = decodes[0].endpoint, p[0].endpoint.driver.loop.me.epoch
    serve(rig, "two", q, decodes, "Q")
    rig.wait(20.0)
    assert decode.usage().ring_used_bytes
    assert states(decode) == {"P": "lost"}
    assert list(decode.driver.loop.connections.linked()) == [epoch]
    decode.confirm_terminated(epoch)
    rig.until(lambda: not decode.usage().ring_used_bytes, "the release")
    serve(rig, "three", q, decodes, "Q")
    rig.wait(3.0)
    assert states(decode) == {"Q": "idle"}
    check(rig)


def test_where_rooms_use_all_links_that_there_may_be_a_further_peer_is_refused_by_name() -> None:
    rig, instances, decodes = rig_of(Options(link_descriptors=1), names="PQR")
    requests = [rig.request(f"r{n}", one, decodes, 12, of="PQR"[n]) for n, one in enumerate(instances)]
    for request in requests:
        request.open_decode().expect()
    rig.until(lambda: requests[2].receives[0].phase is Phase.FAILED, "the refusal")
    error = requests[2].receives[0].error
    assert isinstance(error, CapacityError)
    assert "rooms use all 2 peers" in str(error)
    for request in requests[:2]:
        request.open_prefill().send(12).finish().released().done()
    rig.wait(3.0)
    serve(rig, "again", instances[2], decodes, "R")


@pytest.mark.parametrize(
    ("cost", "options", "soft", "most", "limit"),
    [
        (LinkCost(1000, 8), Options(), 1024, 76, 95),
        (LinkCost(100_000, 8), Options(link_bytes=10**6), 1024, 10, 95),
        (LinkCost(1000, 8), Options(link_descriptors=80), 1024, 10, 12),
        (LinkCost(1000, 8), Options(link_bytes=1), 64, 1, 2),
        (LinkCost(0, 0), Options(), 64, float("inf"), float("inf")),
        (LinkCost(1 << 20, 8), Options(), -1, 128, float("inf")),
    ],
)
def test_the_budget_comes_from_options_and_the_limit_of_the_process(
    cost: LinkCost, options: Options, soft: int, most: float, limit: float
) -> None:
    """With a quarter more, they are within the limit of the process, and 256 descriptors are left."""
    links = allowed_links(cost, options, soft)
    assert (links.most, links.limit) == (most, limit)


def test_a_channel_that_does_not_know_what_a_peer_costs_counts_as_one_that_takes_much() -> None:
    class Plain:
        """No channel of ours."""

    transport = InprocTransport()
    assert link_cost(Plain(), transport.caps.link) == OWN_LINK + UNKNOWN_LINK + transport.caps.link  # type: ignore[arg-type]
