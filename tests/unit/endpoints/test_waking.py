"""Layers cost the engine's thread a wake only where more can cross after them, and nothing waits for want of one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from disagg_kv.channels import Channel, News
from disagg_kv.endpoints.delivery import Cuts, ForwardPass, Handed
from disagg_kv.geometry import CacheSpec, Component
from disagg_kv.ids import LayerId
from disagg_kv.memory import Event
from disagg_kv.planning import Groups, LayerRun
from disagg_kv.strategies import LayerPipelined
from tests.support.rig import Memory, Request, Rig, tp_shards
from tests.support.rig_parts import Flag

SPEC = CacheSpec.kv(6, 4, 8, "float16")
PIPELINED = "staged+layer_pipelined"
ATTENTION = (Component("k", "int8", 4, 8), Component("v", "float16", 4, 8))
NET = (Component("ssm", "float32", 4, 64, tokens_per_row=0, rows=2),)


class Doors:
    """Which endpoints would sleep by now, and how often each was woken by its own engine."""

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.wakes: list[str] = []


class Door(Channel):
    """A channel of an endpoint whose clock stands still: who waits sleeps until a frame or a wake comes."""

    def __init__(self, inner: Channel, doors: Doors) -> None:
        self._inner, self._doors = inner, doors

    @property
    def address(self) -> str:
        return self._inner.address

    def send(self, address: str, frame: bytes) -> bool:
        self._doors.asleep.discard(address)
        return self._inner.send(address, frame)

    def poll(self, timeout_s: float) -> Sequence[News]:
        news = self._inner.poll(0.0)
        if timeout_s and not news:
            self._doors.asleep.add(self.address)
        return news

    def wake(self) -> None:
        self._doors.wakes.append(self.address)
        self._doors.asleep.discard(self.address)
        self._inner.wake()

    def forget(self, address: str) -> None:
        self._inner.forget(address)

    def close(self) -> None:
        self._inner.close()


class House:
    """A prefill and a decode endpoint that know each other, and are turned only while they would not sleep."""

    def __init__(self, schedule: LayerPipelined, spec: CacheSpec = SPEC) -> None:
        self.doors = Doors()
        self.rig = rig = Rig(spec)
        memory = Memory(channel=lambda inner: Door(inner, self.doors))
        (self.prefill,) = rig.prefill(tp_shards(spec, 1), memory=memory, strategy=PIPELINED, schedule=schedule)
        (self.decode,) = rig.decode(tp_shards(spec, 1), memory=memory, strategy="staged")
        self.request("first", 4).start(4).landed()
        rig.quiet()
        self.doors.asleep.clear()
        self.settle()

    def request(self, name: str, rows: int) -> Request:
        return self.rig.request(name, self.rig.prefills, self.rig.decodes, rows)

    def settle(self) -> None:
        """Until both would sleep. No time passes, so nothing happens because a clock says so."""
        for _ in range(1000):
            awake = [m for m in self.rig.members if m.channel.address not in self.doors.asleep]
            if not awake:
                return
            for member in awake:
                member.endpoint.driver.turn(1.0)
                member.endpoint.check_integrity()
        raise AssertionError("they do not come to rest")

    def step(self, stops: dict[Request, tuple[int, int]]) -> ForwardPass:
        """A forward pass over rows of some rooms."""
        chunks = {}
        for request, (start, stop) in stops.items():
            chunks[request.room] = stop, self.prefill.pages(request.pages(start, stop)[0])
        return self.prefill.endpoint.step(chunks)


@pytest.mark.parametrize("size", [1, 4, 5, 32])
def test_a_pass_wakes_once_for_each_group(size: int) -> None:
    """B1: of 32 layers in N groups N wake; no other does, and every group lands before the pass is closed."""
    house = House(LayerPipelined(fixed=size), CacheSpec.kv(32, 4, 8, "float16"))
    request = house.request("room", 1).open_decode().expect(1).open_prefill()
    house.settle()
    step = house.step({request: (0, 1)})
    house.settle()
    house.doors.wakes.clear()
    for layer in range(32):
        step.layer_ready(LayerId(layer))
        closes = -(-(layer + 1) // size) if layer == 31 else (layer + 1) // size
        assert house.doors.wakes == ["inproc://P0"] * closes
        house.settle()
        assert request.receives[0].report.segments == closes
    house.doors.wakes.clear()
    step.close()
    assert house.doors.wakes == ["inproc://P0"]
    request.finish().landed()
    house.rig.quiet()


@pytest.mark.parametrize("looked", [(), (0,), (2,), (0, 1, 2, 3, 4, 5)])
@pytest.mark.parametrize("asked", [0, 1, 3, 6])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (3, 0, 5, 2, 1, 4)])
def test_no_group_waits_for_want_of_a_wake(order: tuple[int, ...], asked: int, looked: tuple[int, ...]) -> None:
    """B1: rooms of one pass may be cut apart, layers come in any order, and decode may ask in the midst of the pass.

    ``asked``: before which layer; ``looked``: after which layers the endpoint runs before the engine goes on.
    """

    class ByRows(LayerPipelined):
        def groups(self, run: LayerRun) -> Groups:
            return Groups(run.layers, 2 if run.rows == 8 else 3, "by rows")

    house = House(ByRows())
    pairs, triples = house.request("pairs", 8).open_prefill(), house.request("triples", 4).open_prefill()
    pairs.open_decode().expect(8)
    step = house.step({pairs: (0, 8), triples: (0, 4)})
    seen: set[int] = set()
    for number, layer in enumerate(order):
        if number == asked:
            triples.open_decode().expect(4)
        step.layer_ready(LayerId(layer))
        seen.add(layer)
        if number in looked:
            house.settle()
            assert pairs.receives[0].report.segments == sum({2 * g, 2 * g + 1} <= seen for g in range(3))
            whole = sum({3 * g, 3 * g + 1, 3 * g + 2} <= seen for g in range(2))
            assert number < asked or triples.receives[0].report.segments == whole
    if asked == 6:
        triples.open_decode().expect(4)
    house.settle()
    assert [r.receives[0].report.segments for r in (pairs, triples)] == [3, 2]
    step.close()
    for request in (pairs, triples):
        request.finish()
    for request in (pairs, triples):
        request.released().done()
    house.rig.check()
    house.rig.quiet()


def test_rows_that_are_given_again_by_other_passes_wait_for_no_wake() -> None:
    """E12: a chunk that was withdrawn is cut as before, and the last of its new passes completes its groups."""
    house = House(LayerPipelined(fixed=2))
    request = house.request("room", 8).open_decode().expect(8).open_prefill()
    old = house.step({request: (0, 8)})
    house.settle()
    request.sends[0].withdraw()
    old.close()
    house.settle()
    first = house.step({request: (0, 4)})
    request.given[0].clear()
    second = house.step({request: (4, 8)})
    for layer in range(6):
        second.layer_ready(LayerId(layer))
    second.close()
    house.settle()
    assert request.receives[0].report.segments == 0
    for layer in range(6):
        first.layer_ready(LayerId(layer))
        house.settle()
        assert request.receives[0].report.segments == (layer + 1) // 2
    first.close()
    request.finish().landed()
    house.rig.quiet()


def test_a_group_is_complete_without_the_layers_that_keep_a_state_alone() -> None:
    """B7: they are never announced; the last layer that rows wait for wakes."""
    spec = CacheSpec({LayerId(0): ATTENTION, LayerId(1): NET, LayerId(2): ATTENTION, LayerId(3): NET})
    house = House(LayerPipelined(fixed=2), spec)
    request = house.request("room", 4).open_decode().expect(4).open_prefill()
    step = house.step({request: (0, 4)})
    house.settle()
    for number, layer in enumerate((0, 2), 1):
        step.layer_ready(LayerId(layer))
        house.settle()
        assert request.receives[0].report.segments == number
    step.close()
    request.finish().landed()
    house.rig.quiet()


class Office:
    """Notes what a pass says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def final(self, handed: Sequence[Handed], layers: Collection[LayerId] | None, ready: Event | None) -> None:
        self.said.append(f"final {sorted(layers or ())}")

    def closed(self, handed: Sequence[Handed], ready: Event | None) -> None:
        self.said.append("closed")

    def wake(self) -> None:
        self.said.append("wake")


@pytest.mark.parametrize("traced", [False, True])
def test_when_an_event_happens_is_looked_for_where_it_counts(traced: bool) -> None:
    """B3: the pace is measured from the first layer to the last; a trace shows each of them."""
    office, cuts, layers = Office(), Cuts(), [LayerId(n) for n in range(4)]
    cuts.add({frozenset(layers)})
    step = ForwardPass([], layers, office, cuts, layered=True, traced=traced)  # type: ignore[arg-type]
    wakes = []
    for layer in layers:
        step.layer_ready(layer, Flag())
        wakes.append("wake" in office.said)
        assert office.said[0] == f"final [{layer}]", "first said, then woken"
        office.said.clear()
    assert wakes == [True, traced, traced, True]
    step.close()
    assert office.said == ["final []", "closed"]
