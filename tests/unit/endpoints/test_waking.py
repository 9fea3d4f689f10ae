"""Layers cost the engine's thread a wake only where more can cross after them, and nothing waits for want of one."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import pytest

from disagg_kv.channels import Channel, News
from disagg_kv.core import RoomKey
from disagg_kv.endpoints.prefill.handle import ForwardPass, LayerGroups, SubmittedChunk
from disagg_kv.errors import ConfigurationError
from disagg_kv.geometry import CacheSpec, Component
from disagg_kv.ids import Generation, LayerId, RoomId
from disagg_kv.memory import Event
from disagg_kv.planning import Groups, LayerRun
from disagg_kv.strategies import LayerPipelined
from sim.accounts import check_side
from tests.support.rig import Memory, Request, Rig, tp_shards
from tests.support.rig_parts import FiredEvent

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
        self._waits = False

    @property
    def eager(self) -> bool:
        return False

    @property
    def address(self) -> str:
        return self._inner.address

    def send(self, address: str, frame: bytes) -> bool:
        self._doors.asleep.discard(address)
        return self._inner.send(address, frame)

    def wait(self, timeout_s: float) -> None:
        self._waits = True

    def poll(self) -> Sequence[News]:
        news = self._inner.poll()
        if self._waits and not news:
            self._doors.asleep.add(self.address)
        self._waits = False
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
                member.endpoint.driver.step(1.0)
                check_side(member.endpoint.inspect())
        raise AssertionError("they do not come to rest")

    def step(self, stops: dict[Request, tuple[int, int]]) -> ForwardPass:
        """A forward pass over rows of some rooms."""
        chunks = {}
        for request, (start, stop) in stops.items():
            chunks[request.room] = stop, self.prefill.pages(request.pages(start, stop)[0])
        return self.prefill.endpoint.step(chunks)


@pytest.mark.parametrize("size", [1, 4, 5, 32])
def test_a_pass_wakes_once_for_each_group(size: int) -> None:
    """Of 32 layers in N groups N wake; no other does, and every group lands before the pass is closed.

    One group crosses as it does per chunk: when the pass is closed.
    """
    house = House(LayerPipelined(fixed=size), CacheSpec.kv(32, 4, 8, "float16"))
    request = house.request("room", 1).open_decode().expect(1).open_prefill()
    house.settle()
    step = house.step({request: (0, 1)})
    house.settle()
    house.doors.wakes.clear()
    for layer in range(32):
        step.layer_ready(LayerId(layer))
        closes = 0 if size == 32 else -(-(layer + 1) // size) if layer == 31 else (layer + 1) // size
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
    """Rooms of one pass may be cut apart, layers come in any order, and decode may ask in the midst of the pass.

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
    """A chunk that was withdrawn is cut as before, and the last of its new passes completes its groups."""
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
    """They are never announced; the last layer that rows wait for wakes."""
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


class Commands:
    """Notes what a pass says: a driver, its loop and its side in one."""

    def __init__(self) -> None:
        self.loop = self
        self.clock = time.monotonic
        self.said: list[str] = []
        self.events: list[Event | None] = []

    def check(self, what: str) -> None:
        """Every call is taken."""

    def post(self, command: Callable[[], None]) -> None:
        command()

    def final_at(
        self, handed: Sequence[SubmittedChunk], layers: Collection[LayerId] | None, ready: Event | None, said: float
    ) -> None:
        self.events.append(ready)
        self.said.append(f"final {sorted(layers or ())}")

    def closed_at(self, handed: Sequence[SubmittedChunk], ready: Event | None, said: float) -> None:
        self.said.append("closed")

    def begun(self, handed: Sequence[SubmittedChunk], at: float) -> None:
        self.said.append("begun")

    def drive(self) -> None:
        self.said.append("wake")


LAYERS = [LayerId(n) for n in range(4)]
ROOM = RoomKey(RoomId(b"room"), Generation(1))
HALVES = {frozenset(LAYERS[:2]), frozenset(LAYERS[2:])}


def a_pass(*, traced: bool = False) -> tuple[Commands, LayerGroups, ForwardPass]:
    """A pass over one room, whose groups are not known yet."""
    commands, cuts = Commands(), LayerGroups([ROOM], frozenset(LAYERS))
    step = ForwardPass([], LAYERS, commands, commands, cuts, layered=True, traced=traced)  # type: ignore[arg-type]
    return commands, cuts, step


class Marks:
    """Counts the events that it makes."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> Event:
        self.made += 1
        return FiredEvent()


def test_each_layer_with_an_event_wakes_where_a_trace_shows_it() -> None:
    commands, cuts, step = a_pass(traced=True)
    cuts.add(ROOM, [frozenset(LAYERS)], decided=True)
    for layer in LAYERS:
        step.layer_ready(layer, FiredEvent())
        assert commands.said[-2:] == [f"final [{layer}]", "wake"], "first said, then woken"
    step.close()
    assert commands.said[-2:] == ["final []", "closed"]


def test_only_what_completes_a_group_is_marked() -> None:
    """An event takes time; behind it all is final that the device was asked to do before."""
    commands, cuts, step = a_pass()
    cuts.add(ROOM, HALVES, decided=True)
    marks, made = Marks(), []
    for layer in LAYERS:
        assert step.layer_ready(layer, marks)
        made.append(marks.made)
    assert made == [0, 1, 1, 2]
    assert commands.said == ["begun", "final [0, 1]", "wake", "final [2, 3]", "wake"]
    step.close(FiredEvent())
    assert commands.said[-2:] == ["final []", "closed"]


@pytest.mark.parametrize("event", [None, FiredEvent()])
def test_nothing_is_marked_or_said_where_all_layers_are_one_group(event: Event | None) -> None:
    """A pass for which one group is chosen costs what it costs per chunk, and an event when it is closed.

    That of ``close`` may be another stream's than the layers'.
    """
    commands, cuts, step = a_pass()
    cuts.add(ROOM, [frozenset(LAYERS)], decided=True)
    marks = Marks()
    for layer in LAYERS:
        assert not step.layer_ready(layer, marks)
    assert (commands.said, marks.made) == (["begun"], 0)
    step.close(event)
    assert marks.made == 1
    assert "final [0, 1, 2, 3]" in commands.said
    assert commands.said[-1] == "closed"
    assert "wake" not in commands.said


def test_a_function_that_makes_no_event_is_refused() -> None:
    """None would say that rows are final now, which are not computed yet; the layer can be announced again."""
    commands, cuts, step = a_pass()
    cuts.add(ROOM, HALVES, decided=True)
    step.layer_ready(LAYERS[0], lambda: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigurationError, match="ready: what the function made: an event is needed, not None"):
        step.layer_ready(LAYERS[1], lambda: None)  # type: ignore[arg-type,return-value]
    assert commands.said == ["begun"]
    step.layer_ready(LAYERS[1], Marks())
    assert commands.said == ["begun", "final [0, 1]", "wake"]
    step.layer_ready(LAYERS[2], lambda: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigurationError, match="an event is needed"):
        step.close()
    assert commands.said[-1] == "wake"


def test_each_layer_is_marked_until_it_is_known_how_all_rooms_are_cut() -> None:
    """A host that runs ahead of its GPU has asked for all layers before decode asks; groups cross all the same."""
    commands, cuts, step = a_pass()
    marks = Marks()
    step.layer_ready(LAYERS[0], marks)
    step.layer_ready(LAYERS[1], marks)
    assert commands.said == ["begun", "final [0]", "final [1]"]
    cuts.add(ROOM, HALVES, decided=False)
    step.layer_ready(LAYERS[2], marks)
    assert marks.made == 3
    cuts.add(ROOM, HALVES, decided=True)
    step.layer_ready(LAYERS[3], marks)
    assert marks.made == 4
    assert commands.said[3:] == ["final [2]", "final [3]", "wake"]


def test_layers_that_are_not_marked_are_final_with_the_rest_of_the_pass() -> None:
    commands, cuts, step = a_pass()
    cuts.add(ROOM, HALVES, decided=True)
    marks = Marks()
    for layer in LAYERS[:3]:
        step.layer_ready(layer, marks)
    step.close(FiredEvent())
    assert marks.made == 2
    assert commands.said[-3:] == ["final [2]", "final [3]", "closed"]


@pytest.mark.parametrize("given", [False, True])
def test_an_engine_may_leave_out_the_layers_of_which_none_matters(given: bool) -> None:
    """They are final behind the event that close is given; without one behind what their stream was asked for."""
    commands, cuts, step = a_pass()
    cuts.add(ROOM, [frozenset(LAYERS)], decided=True)
    marks, event = Marks(), FiredEvent()
    assert not step.layer_ready(LAYERS[0], marks)
    step.close(event if given else None)
    assert marks.made == 1
    assert None not in commands.events
    assert (event in commands.events) == given
    assert commands.said[-1] == "closed"
