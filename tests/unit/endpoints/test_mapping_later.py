"""Decode maps the pool of a prefill rank for the first room that may read it, while its thread goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from disagg_kv.core import Hello, Options, Phase
from disagg_kv.core.peers.peer_effects import Up
from disagg_kv.endpoints.peers.connections import READY_S, Connections
from disagg_kv.endpoints.peers.mapping import Mapping
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Epoch, Peer, RegionId
from disagg_kv.memory import Buffer, MappedPool
from disagg_kv.testing import FakeClock
from disagg_kv.trace import Recorder
from disagg_kv.transports import InprocTransport
from tests.support.rig import Memory, Rig, tp_shards
from tests.support.rig_parts import Later
from tests.unit.endpoints.test_connecting import Counted, nothing, rig_of_one, ups

SPEC = CacheSpec.kv(2, 4, 8, "float16")
QUICK = Options(silence_s=2.0, heartbeat_s=0.5)
TRIES_S = Options().silence_s


class Links:
    """A peer that is linked, and whose pool is mapped when the test says so; ``outcome`` is what that gives."""

    def __init__(self, later: Later | None = None) -> None:
        rig = rig_of_one()
        self.later, self.clock, self.transport = later or Later(), FakeClock(), Counted()
        member = rig.decodes[0]
        self.pool = MappedPool(member.pool.site, member.pool.buffers)
        self.outcome: Mapping | Exception = Mapping(self.pool)
        self.connections = Connections(
            self.transport, self.later, nothing, self.clock, Recorder(), Options(), None, self._map
        )
        (self.up,), self.there = ups(rig, 1)
        assert self.connections.begin(self.up) is None
        self.later.jobs.pop()()
        assert [one.up for one in self.connections.results()] == [self.up]

    def _map(self, peer: Peer, hello: Hello) -> Mapping:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    @property
    def epoch(self) -> Epoch:
        return self.up.epoch

    def run(self) -> None:
        """The helper thread gets there."""
        self.later.jobs.pop()()

    def mapped(self) -> Sequence[Epoch]:
        """What has been mapped, or refused."""
        assert self.connections.results() == []
        return self.connections.mapped()


def test_a_pool_is_mapped_once() -> None:
    """For all rooms that wait for it, and it stays."""
    links = Links()
    assert [links.connections.map(links.epoch) for _ in range(3)] == [False] * 3
    assert links.connections.mapping(links.epoch).pool is None
    links.run()
    assert links.mapped() == [links.epoch]
    assert links.connections.map(links.epoch)
    assert links.connections.mapping(links.epoch).pool is links.pool
    assert not links.later.jobs
    assert links.mapped() == []


def test_a_refusal_counts_for_a_while() -> None:
    """Then the next room has it tried again."""
    links = Links()
    links.outcome = Mapping(refused="no")
    assert not links.connections.map(links.epoch)
    links.run()
    assert links.mapped() == [links.epoch]
    assert links.connections.map(links.epoch)
    assert links.connections.mapping(links.epoch).refused == "no"
    links.clock.advance(TRIES_S)
    links.outcome = Mapping(links.pool)
    assert not links.connections.map(links.epoch)
    links.run()
    assert links.mapped() == [links.epoch]
    assert links.connections.map(links.epoch)
    assert links.connections.mapping(links.epoch).pool is links.pool


def test_an_attempt_that_ends_its_thread_is_a_refusal() -> None:
    """Its error is a bug, and no room waits for it."""
    links = Links()
    links.outcome = RuntimeError("a bug")
    assert not links.connections.map(links.epoch)
    with pytest.raises(RuntimeError, match="a bug"):
        links.run()
    assert links.mapped() == [links.epoch]
    assert links.connections.map(links.epoch)
    assert "ended without a result" in links.connections.mapping(links.epoch).refused


def test_without_a_thread_it_is_refused_at_once() -> None:
    """And tried again later."""

    class NoThread(Later):
        none = False

        def start(self, job: Callable[[], None]) -> None:
            if self.none:
                raise RuntimeError("can't start new thread")
            super().start(job)

    later = NoThread()
    links = Links(later)
    later.none = True
    assert links.connections.map(links.epoch)
    assert links.connections.mapping(links.epoch).refused == "can't start new thread"
    later.none = False
    assert links.connections.map(links.epoch)
    links.clock.advance(TRIES_S)
    assert not links.connections.map(links.epoch)
    links.run()
    assert links.mapped() == [links.epoch]


def test_an_attempt_that_does_not_return_is_a_refusal_until_it_does() -> None:
    """No second one begins meanwhile."""
    links = Links()
    assert not links.connections.map(links.epoch)
    links.clock.advance(READY_S)
    assert links.mapped() == [links.epoch]
    links.clock.advance(10 * TRIES_S)
    assert links.connections.map(links.epoch)
    assert f"were not ready in {READY_S:g} s" in links.connections.mapping(links.epoch).refused
    assert len(links.later.jobs) == 1
    links.run()
    assert links.mapped() == [links.epoch]
    assert links.connections.mapping(links.epoch).pool is links.pool


@pytest.mark.parametrize("returns", [False, True])
def test_a_link_that_is_dropped_meanwhile_is_disconnected_after_it(returns: bool) -> None:
    """Its thread still uses the link. A peer that is wanted again by then has it at once."""
    links = Links()
    assert not links.connections.map(links.epoch)
    links.connections.drop(links.epoch)
    assert links.connections.of(links.epoch) is None
    assert links.transport.disconnects == 0
    if returns:
        again = links.connections.begin(Up(links.up.hello))
        assert again is not None
        assert again.link == links.connections.of(links.epoch)
    links.run()
    assert links.mapped() == [links.epoch] * returns
    assert links.transport.disconnects == (not returns)
    if returns:
        assert links.connections.map(links.epoch)
        links.connections.drop(links.epoch)
        assert links.transport.disconnects == 1
    assert links.connections._under_way == 0
    assert not links.connections._owners


@pytest.mark.parametrize("late", [False, True])
def test_a_link_that_is_taken_again_waits_as_long_for_its_pool_as_before(late: bool) -> None:
    """Whether the attempt was late before the link was dropped, or would have been meanwhile."""
    links = Links()
    assert not links.connections.map(links.epoch, 2.0)
    links.clock.advance(2.0 if late else 1.0)
    assert links.mapped() == [links.epoch] * late
    links.connections.drop(links.epoch)
    links.clock.advance(10.0)
    assert links.mapped() == []
    again = links.connections.begin(Up(links.up.hello))
    assert again is not None
    assert not isinstance(again.link, Exception)
    assert links.mapped() == [links.epoch] * (not late)
    assert links.connections.map(links.epoch)
    assert "were not ready in 2 s" in links.connections.mapping(links.epoch).refused
    links.run()
    assert links.mapped() == [links.epoch]
    assert links.connections.mapping(links.epoch).pool is links.pool


class Slow(InprocTransport):
    """Counts what it maps, and may refuse to."""

    refuses = False

    def __init__(self) -> None:
        super().__init__()
        self.maps: list[Peer] = []

    def map(self, peer: Peer, region: RegionId, device: str) -> Buffer:
        self.maps.append(peer)
        return super().map(peer, region, device)


def test_only_ranks_that_rooms_come_from_are_mapped() -> None:
    """Once each, with the first room; connecting maps nothing."""
    rig = Rig(SPEC, options=QUICK)
    one = rig.prefill(tp_shards(SPEC, 2), "P", strategy="mapped_pull")
    rig.prefill(tp_shards(SPEC, 1), "Q", strategy="mapped_pull")
    decodes = rig.decode(tp_shards(SPEC, 1), memory=Memory(transport=Slow), strategy="mapped_pull")
    transport = decodes[0].transport
    assert isinstance(transport, Slow)
    assert not transport.maps
    for name in ("first", "second"):
        rig.request(name, one, decodes, 9).start(9).landed()
        assert len(transport.maps) == len(set(transport.maps)) * len(one[0].pool.buffers)
        assert len(set(transport.maps)) == 2
    rig.quiet()


def test_a_room_ends_by_name_while_a_pool_is_being_mapped() -> None:
    """Its engine may give it up, or it has waited for long; the endpoint's thread is free."""
    rig = Rig(SPEC, options=QUICK)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="mapped_pull")
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="mapped_pull")
    loop, later = decodes[0].endpoint.driver.loop, Later()
    given_up = rig.request("first", prefills, decodes, 9).open_decode().expect(9)
    slow = rig.request("second", prefills, decodes, 9).open_decode().expect(9)
    loop.connections._background = later
    rig.until(lambda: not loop.connections.linked() and bool(later.jobs), "the connection")
    later.jobs.pop()()
    rig.until(lambda: bool(loop.connections.linked()) and bool(later.jobs), "the mapping")
    given_up.receives[0].abort("enough")
    rig.until(lambda: given_up.receives[0].released, "the abort")
    rig.until(lambda: slow.receives[0].phase is Phase.FAILED, "the silence")
    assert "the pools of prefill instance 'P' were not mapped in 2 s" in str(slow.receives[0].error)
    other = rig.request("third", prefills, decodes, 9).start(9)
    later.jobs.pop()()
    other.landed()
    rig.quiet()


def test_where_another_path_is_left_a_room_waits_for_half_its_silence() -> None:
    """It is staged then, and so are the next ones at once, until the pool is mapped."""
    rig = Rig(SPEC, options=QUICK)
    prefills = rig.prefill(tp_shards(SPEC, 1))
    decodes = rig.decode(tp_shards(SPEC, 1), waits_for_peers=False)
    loop, later = decodes[0].endpoint.driver.loop, Later()
    rig.wait(0.3)
    first = rig.request("first", prefills, decodes, 9).start(9)
    loop.connections._background = later
    rig.until(lambda: not loop.connections.linked() and bool(later.jobs), "the connection")
    later.jobs.pop()()
    rig.until(lambda: bool(loop.connections.linked()) and bool(later.jobs), "the mapping")
    began = rig.clock()
    first.landed()
    assert first.receives[0].report.path == "staged"
    assert rig.clock() - began <= 0.6 * QUICK.silence_s
    began = rig.clock()
    second = rig.request("second", prefills, decodes, 9).start(9).landed()
    assert second.receives[0].report.path == "staged"
    assert rig.clock() - began < 0.2 * QUICK.silence_s
    later.jobs.pop()()
    third = rig.request("third", prefills, decodes, 9).start(9).landed()
    assert third.receives[0].report.path == "mapped_pull"
    rig.quiet()


def test_an_impatient_room_shortens_the_wait_of_others() -> None:
    """An attempt is late once it is for one of them."""
    links = Links()
    assert not links.connections.map(links.epoch, 10.0)
    links.clock.advance(1.0)
    assert not links.connections.map(links.epoch, 2.0)
    assert not links.connections.map(links.epoch, 20.0)
    links.clock.advance(1.9)
    assert links.mapped() == []
    links.clock.advance(0.1)
    assert links.mapped() == [links.epoch]
    assert "were not ready in 2 s" in links.connections.mapping(links.epoch).refused
    links.run()
    assert links.mapped() == [links.epoch]
    assert links.connections.map(links.epoch)
    assert links.connections.mapping(links.epoch).pool is links.pool


class One(Slow):
    """It maps only the first peer that is asked for."""

    def unmappable(self, peer: Peer, regions: Sequence[RegionId], device: str) -> str | None:
        return "on another host" if self.maps and peer not in self.maps else super().unmappable(peer, regions, device)


@pytest.mark.parametrize("strategy", ["auto", "mapped_pull"])
def test_only_ranks_that_send_rows_here_are_mapped(strategy: str) -> None:
    """The others need not be: whether they could be changes nothing."""
    rig = Rig(SPEC, options=QUICK)
    prefills = rig.prefill(tp_shards(SPEC, 2))
    memory = Memory(transport=One)
    decodes = rig.decode(tp_shards(SPEC, 2), memory=memory, waits_for_peers=False, strategy=strategy)
    request = rig.request("room", prefills, decodes, 9).start(9).landed()
    assert [handle.report.path for handle in request.receives] == ["mapped_pull"] * 2
    mapped = [set(one.transport.maps) for one in decodes if isinstance(one.transport, One)]
    assert [len(of) for of in mapped] == [1, 1]
    assert mapped[0] != mapped[1]
    rig.quiet()


@pytest.mark.parametrize("strategy", ["auto", "mapped_pull"])
def test_a_rank_that_sends_rows_and_cannot_be_mapped_bars_the_path(strategy: str) -> None:
    """Of several that send, all are needed."""
    rig = Rig(SPEC, options=QUICK)
    prefills = rig.prefill(tp_shards(SPEC, 2))
    memory = Memory(transport=One)
    decodes = rig.decode(tp_shards(SPEC, 1), memory=memory, waits_for_peers=False, strategy=strategy)
    request = rig.request("room", prefills, decodes, 9).start(9)
    if strategy == "auto":
        assert request.landed().receives[0].report.path == "staged"
    else:
        assert "path 'mapped_pull' cannot: on another host" in str(request.failed().receives[0].error)
    rig.quiet()


def test_a_pool_that_is_mapped_in_the_instant_when_it_is_late_is_kept() -> None:
    """The helper thread returns while the endpoint's thread looks at what is late."""
    links = Links()
    connections, clock = links.connections, links.clock
    assert not connections.map(links.epoch, 2.0)
    clock.advance(2.0)

    def look() -> float:
        if links.later.jobs:
            links.run()
        return clock()

    connections._clock = look
    assert links.mapped() == [links.epoch]
    assert links.mapped() == [links.epoch]
    assert connections.mapping(links.epoch).pool is links.pool
