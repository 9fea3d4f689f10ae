"""Addresses of connected instances are kept: a store gets few look-ups, and an instance that moves is still found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from disagg_kv.channels import Closed
from disagg_kv.core import Options, Phase
from disagg_kv.endpoints.peers.background import Inline
from disagg_kv.endpoints.peers.directory import DOUBT_S, REFRESH_S, Directory
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Rank
from disagg_kv.rendezvous import Source, StaticRendezvous
from disagg_kv.testing import FakeClock
from tests.support.rig import Rig, tp_shards
from tests.support.rig_parts import Later

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
    directory = Directory(store, Inline(), lambda: None, clock, Options())
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


def test_without_a_reason_each_instance_is_asked_for_now_and_then() -> None:
    """A store's load does not depend on how many are used, and a busy instance takes no turn of a quiet one."""
    store, clock = Counting(), FakeClock()
    directory = known(store, clock, "a", "b", "c")
    sources = [Source(name) for name in "abc"]
    asked: Counter[str] = Counter()
    for second in range(7 * int(REFRESH_S) * len(sources)):
        clock.advance(1.0)
        for one in sources if second % 60 == 59 else sources[:1]:
            if directory.stale(one, lively=True):
                asked[one.instance] += 1
                directory.ask(one)
                directory.answers()
    assert asked["a"] in (6, 7)
    assert asked["b"] == asked["c"] in (6, 7)


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


def test_an_answer_to_an_older_question_dispels_no_doubt() -> None:
    """The store was asked before a room failed."""
    store, clock, asking = Counting(), FakeClock(), Later()
    directory, source = Directory(store, asking, lambda: None, clock, Options()), Source("a")
    store.publish("a", Rank(0), 1, "early")

    def answer() -> None:
        asking.jobs.pop(0)()
        directory.answers()

    directory.ask(source)
    answer()
    clock.advance(DOUBT_S)
    directory.ask(source)
    clock.advance(0.1)
    directory.doubt(source)
    answer()
    assert directory.known(source) == ("early",)
    clock.advance(DOUBT_S)
    assert directory.stale(source, lively=True)
    directory.ask(source)
    store.publish("a", Rank(0), 1, "late")
    answer()
    assert directory.known(source) == ("late",)
    assert not directory.stale(source, lively=True)


@pytest.mark.parametrize("slow", [False, True])
def test_no_room_goes_to_a_rank_whose_connection_is_broken(slow: bool) -> None:
    """Nothing used it, so its end is known from the connection alone; the store knows another place already."""
    rig, _, _ = pair()
    (old,), decodes, jobs = rig.prefills, rig.decodes, Later()
    new = rig.prefill(tp_shards(SPEC, 1), at="new", only=[0])
    old.closed = True
    old.channel.close()
    rig.wait(0.1)
    if slow:
        decodes[0].endpoint.driver.loop.directory._background = jobs
    request = rig.request("room", new, decodes, 8).start()
    rig.wait(0.5)
    assert len(jobs.jobs) == slow
    for job in jobs.jobs:
        job()
    request.landed()
    rig.quiet()


def test_a_room_waits_no_longer_than_for_the_store_to_say_that_nothing_has_moved() -> None:
    """Its rank may be back before it is lost: no room fails, then."""
    rig, store, serve = pair()
    (prefill,), asked = rig.prefills, store.asked
    decode = rig.decodes[0].endpoint.driver.loop
    decode.take_in(Closed(prefill.channel.address))
    assert serve("room") is Phase.DONE
    assert store.asked == asked + 1
    rig.quiet()


def test_a_room_waits_for_its_instance_where_another_one_has_its_address() -> None:
    """The store was not asked since; the rooms of both instances succeed."""
    rig, _, _ = pair()
    (old,), decodes = rig.prefills, rig.decodes
    old.crash()
    rig.wait(4.0)
    others = rig.prefill(tp_shards(SPEC, 1), "Q", at="P")
    rig.request("other", others, decodes, 8, of="Q").start().landed()
    new = rig.prefill(tp_shards(SPEC, 1), at="new")
    rig.request("room", new, decodes, 8).start().landed()
    rig.quiet()
