"""Addresses of connected instances are kept: a store gets few look-ups, and an instance that moves is still found."""

from __future__ import annotations

from collections.abc import Callable

from disagg_kv.channels import Channel, InprocChannel
from disagg_kv.endpoints.runtime.background import inline
from disagg_kv.endpoints.runtime.directory import DOUBT_S, REFRESH_S, Directory
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Rank
from disagg_kv.protocol import Options, Phase
from disagg_kv.rendezvous import Source, StaticRendezvous
from disagg_kv.testing import FakeClock
from tests.support.rig import Memory, Rig, tp_shards

SPEC = CacheSpec.kv(2, 4, 8, "float16")


class Counting(StaticRendezvous):
    """Counts look-ups of prefill."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def lookup(self, source: Source) -> tuple[str, ...] | None:
        self.asked += source.instance == "P"
        return super().lookup(source)


def pair() -> tuple[Rig, Counting, Callable[[str], Phase]]:
    """Two connected endpoints, and a request of some name from its beginning to its end."""
    rig, store = Rig(SPEC), Counting()
    rig.rendezvous = store
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))

    def serve(name: str) -> Phase:
        request = rig.request(name, prefills, decodes, 8).start()
        request.landed()
        return request.receives[0].phase

    assert serve("first") is Phase.DONE
    return rig, store, serve


def known(store: Counting, clock: FakeClock, *names: str) -> Directory:
    """A directory that has just looked up instances."""
    directory = Directory(store, inline("", 1), lambda: None, clock, Options())
    for name in names:
        store.publish(name, Rank(0), 1, f"at {name}")
        directory.ask(Source(name))
    assert len(directory.answers()) == len(names)
    return directory


def test_rooms_of_connected_ranks_ask_nobody() -> None:
    """However many there are."""
    rig, store, serve = pair()
    before = store.asked
    for n in range(10):
        rig.wait(0.5)
        assert serve(f"room {n}") is Phase.DONE
    assert store.asked == before
    rig.quiet()


def test_a_failed_room_makes_the_next_one_ask() -> None:
    """At most once a second; a room that its own engine gives up says nothing about the other side."""
    rig, store, serve = pair()
    prefill, decode = rig.members
    before = store.asked
    for n in range(3):
        late = rig.request(f"given up {n}", [prefill], [decode], 8).open_decode().expect(8)  # type: ignore[list-item]
        rig.wait(0.1)
        late.receives[0].abort("the client has gone")
        rig.wait(0.1)
    assert serve("after an abort here") is Phase.DONE
    assert store.asked == before
    rig.wait(DOUBT_S)
    for n in range(3):
        failing = rig.request(f"failing {n}", [prefill], [decode], 8).start()  # type: ignore[list-item]
        failing.sends[0].abort("prefill has no memory")
        rig.until(lambda: failing.receives[0].phase is Phase.FAILED, "the failure")  # noqa: B023
        assert serve(f"after it {n}") is Phase.DONE
    assert store.asked == before + 1
    rig.quiet()


def test_without_a_reason_one_instance_is_asked_for_now_and_then() -> None:
    """Of all instances together: a store's load does not depend on how many are used."""
    store, clock = Counting(), FakeClock()
    directory = known(store, clock, "a", "b", "c")
    sources = [Source(name) for name in "abc"]
    assert not any(directory.stale(one, lively=True) for one in sources)
    clock.advance(REFRESH_S)
    assert [directory.stale(one, lively=True) for one in sources] == [True, False, False]
    clock.advance(REFRESH_S - 1.0)
    assert not any(directory.stale(one, lively=True) for one in sources)
    clock.advance(1.0)
    assert directory.stale(sources[1], lively=True)


def test_a_rank_that_misses_heartbeats_is_asked_for_once_a_second() -> None:
    """And so is one whose rooms fail, until it was found again; also while the store is away."""
    store, clock = Counting(), FakeClock()
    directory, source = known(store, clock, "a"), Source("a")
    clock.advance(DOUBT_S)
    assert directory.stale(source, lively=False)
    directory.ask(source)
    assert not directory.stale(source, lively=False)
    directory.answers()
    assert not directory.stale(source, lively=True)
    directory.doubt(source)
    directory.doubt(Source("unknown"))
    assert not directory.stale(source, lively=True)
    clock.advance(DOUBT_S)
    assert directory.stale(source, lively=True)
    directory.ask(source)
    directory.answers()
    clock.advance(DOUBT_S)
    assert not directory.stale(source, lively=True)


def test_a_prefill_rank_that_was_replaced_sends_decode_to_the_new_one() -> None:
    """At once, and once more to a decode rank that asks it for rows later: a store may still have the old address."""
    rig, store = Rig(SPEC), Counting()
    rig.rendezvous = store

    def elsewhere(given: Channel) -> Channel:
        given.close()
        return InprocChannel(rig.hub, "elsewhere")

    first, decodes = rig.prefill(tp_shards(SPEC, 1), memory=Memory(channel=elsewhere)), rig.decode(tp_shards(SPEC, 1))
    rig.request("early", first, decodes, 8).start().landed()
    second = rig.prefill(tp_shards(SPEC, 1))
    rig.wait(0.2)
    asked = store.asked
    rig.request("late", second, decodes, 8).start().landed()
    assert store.asked == asked + 1
    store.publish("P", Rank(0), 1, "inproc://elsewhere")
    decodes[0].endpoint.driver.loop.directory.forget("P")
    stale = rig.request("stale", second, decodes, 8).open_decode().expect(8)
    rig.wait(0.2)
    store.publish("P", Rank(0), 1, second[0].channel.address)
    rig.request("found", second, decodes, 8).start().landed()
    stale.receives[0].abort("its prefill rank was replaced")
    rig.quiet()
