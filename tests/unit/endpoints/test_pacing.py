"""How fast an instance is, as its endpoints measure it, and how little the measuring takes from the engine."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

from disagg_kv.channels import Hub, InprocChannel
from disagg_kv.core import RoomKey
from disagg_kv.endpoints import Environment, PrefillEndpoint
from disagg_kv.endpoints.loop.timing import FAST_BYTES_PER_S, SHORTEST_PAUSE_S
from disagg_kv.endpoints.prefill.handle import SubmittedChunk
from disagg_kv.endpoints.prefill.throughput import FRAMES_S, LEAST_S, MOST_S, PASSES, EventFifo, ThroughputEstimator
from disagg_kv.geometry import CacheSpec, PageTable, shard
from disagg_kv.ids import Generation, GroupId, LayerId, RoomId
from disagg_kv.memory import PagedPool
from disagg_kv.planning import Batch
from disagg_kv.rendezvous import StaticRendezvous
from disagg_kv.testing import FakeClock
from disagg_kv.transports import InprocTransport
from tests.support.rig_parts import FiredEvent


def handed(turn: int = 1) -> list[SubmittedChunk]:
    """Ten rows of a room."""
    key = RoomKey(RoomId(b"room"), Generation(1))
    return [SubmittedChunk(key, turn, 0, 10, {}, Batch((10,), layered=True))]


def computed(pacer: ThroughputEstimator, clock: FakeClock) -> None:
    """A forward pass of two layers, each a second long."""
    pacer.begin(handed(), clock())
    clock.advance(1.0)
    pacer.first(handed(), clock())
    clock.advance(1.0)
    pacer.closed(handed(), clock(), queued=False)


def test_what_was_queued_behind_a_gpu_counts_from_when_it_is_on_the_wire() -> None:
    """Waiting for a layer to be computed is no part of the wire's time."""
    clock = FakeClock()
    pacer = ThroughputEstimator(clock, 2)
    computed(pacer, clock)
    pacer.began("a", "shm", queued=True)
    pacer.began("b", "shm", queued=True)
    clock.advance(100.0)
    pacer.crossing("a", clock())
    clock.advance(0.02)
    pacer.ended("a", 1000)
    clock.advance(50.0)
    pacer.crossing("b", clock())
    clock.advance(0.02)
    pacer.ended("b", 1000)
    pace = pacer.pace("shm")
    assert pace is not None
    assert pace.bytes_per_s == pytest.approx(50_000)
    assert pace.layer_token_s == pytest.approx(0.1)


def test_what_one_lane_moves_says_nothing_about_another() -> None:
    """Each has its own rate, also while both move."""
    clock = FakeClock()
    pacer = ThroughputEstimator(clock, 2)
    computed(pacer, clock)
    pacer.began("a", "shm", queued=False)
    pacer.began("b", "nixl", queued=True)
    pacer.crossing("b", clock())
    clock.advance(0.01)
    pacer.ended("a", 1000)
    assert pacer.pace("nixl") is None
    clock.advance(0.01)
    pacer.ended("b", 100)
    rates = [pace.bytes_per_s for name in ("shm", "nixl") if (pace := pacer.pace(name)) is not None]
    assert rates == pytest.approx([100_000, 5_000])


def test_an_end_that_was_seen_late_counts_no_moment_twice() -> None:
    """A beginning is told as of the last look; what came before belongs to the transfer before."""
    clock = FakeClock()
    pacer = ThroughputEstimator(clock, 2)
    computed(pacer, clock)
    looked = clock()
    for name in ("a", "b"):
        pacer.began(name, "shm", queued=True)
    clock.advance(0.02)
    for name in ("a", "b"):
        pacer.crossing(name, looked)
        pacer.ended(name, 1000)
        clock.advance(0.02)
    pace = pacer.pace("shm")
    assert pace is not None
    assert pace.bytes_per_s == pytest.approx(50_000)


def test_a_transfer_that_failed_in_the_queue_counts_for_nothing() -> None:
    clock = FakeClock()
    pacer = ThroughputEstimator(clock, 2)
    computed(pacer, clock)
    pacer.began("a", "shm", queued=True)
    clock.advance(9.0)
    pacer.ended("a", 0)
    assert pacer.pace("shm") is None
    pacer.began("a", "shm", queued=False)
    pacer.crossing("a", clock() - 5)
    clock.advance(0.5)
    pacer.ended("a", 1000)
    pace = pacer.pace("shm")
    assert pace is not None
    assert pace.bytes_per_s == pytest.approx(2000)


def test_launching_and_planning_are_part_of_what_a_group_costs() -> None:
    """Both take the host's time for every group."""
    clock = FakeClock()
    pacer = ThroughputEstimator(clock, 2)
    computed(pacer, clock)
    pacer.began("a", "shm", queued=False)
    clock.advance(0.5)
    pacer.ended("a", 1000)
    pacer.planned(0.002)
    pacer.launched(0.003)
    pace = pacer.pace("shm")
    assert pace is not None
    assert pace.group_s == pytest.approx(0.005 + FRAMES_S)


def test_the_engine_s_thread_is_in_a_pass_until_it_has_asked_for_all_of_it() -> None:
    clock = FakeClock()
    pacer = ThroughputEstimator(clock, 2)
    assert not pacer.patience_s
    for turn in (1, 2):
        pacer.begin(handed(turn), clock())
    pacer.asked(handed(1))
    still = pacer.patience_s
    pacer.asked(handed(2))
    assert (still, pacer.patience_s) == (LEAST_S, 0.0)
    pacer.asked(handed(3))
    pacer.asked([])


def test_a_pass_that_its_engine_gave_up_ends_with_its_room() -> None:
    """Who never closes it has raised: this thread must not keep out of the way for ever."""
    pacer = ThroughputEstimator(FakeClock(), 2)
    other = RoomKey(RoomId(b"other"), Generation(1))
    pacer.begin(handed(), 1.0)
    pacer.room_ended(other)
    still = pacer.patience_s
    pacer.room_ended(handed()[0].key)
    assert (still, pacer.patience_s) == (LEAST_S, 0.0)
    assert pacer.closed(handed(), 2.0, queued=False) is None


class Waits(InprocChannel):
    """How long it was asked to wait; it never does."""

    def __init__(self) -> None:
        super().__init__(Hub(), "prefill")
        self.waits: list[float] = []

    def wait(self, timeout_s: float) -> None:
        """Note it."""
        self.waits.append(timeout_s)


def test_this_thread_looks_seldom_while_the_engine_s_launches_kernels() -> None:
    """Both need the interpreter, so it blocks until a message comes or a poll is due. After the pass it polls often."""
    spec = CacheSpec.kv(2, 4, 8, "float16")
    pool = PagedPool.allocate(spec, shard(spec), pages=4, page_size=16)
    carrier, channel = InprocTransport(), Waits()
    carrier.caps = attrs.evolve(carrier.caps, bytes_per_s=2 * FAST_BYTES_PER_S)
    clock = FakeClock()
    end = PrefillEndpoint(
        pool,
        transport=carrier,
        channel=channel,
        rendezvous=StaticRendezvous(),
        instance="prefill",
        strategy="staged+layer_pipelined",
        environment=Environment(clock=clock, thread=False, engine=False),
    )
    room, event = RoomId(b"room"), FiredEvent()
    end.open(room)
    step = end.step({room: (20, [PageTable(GroupId("kv"), [0, 1])])})
    step.layer_ready(LayerId(0), event)
    for _ in range(10):
        end.driver.step(1.0)
    assert channel.waits == [LEAST_S] * 10
    step.close(event)
    for _ in range(3):
        end.driver.step(1.0)
    assert channel.waits[10:] == [SHORTEST_PAUSE_S] * 3
    event.fired = True
    end.close(0.0)


@pytest.mark.parametrize(("pass_s", "looks_s"), [(2e-3, LEAST_S), (32e-3, 2e-3), (10.0, MOST_S)])
def test_a_pass_is_interrupted_a_few_times_however_long_it_is(pass_s: float, looks_s: float) -> None:
    """Unless it takes so long that something else would wait."""
    clock = FakeClock()
    pacer = ThroughputEstimator(clock, 2)
    for turn in (1, 2):
        pacer.begin(handed(turn), clock())
        pacer.first(handed(turn), clock())
        if turn == 2:
            assert pacer.patience_s == pytest.approx(looks_s)
        clock.advance(pass_s)
        pacer.closed(handed(turn), clock(), queued=True)


def test_passes_that_a_device_computes_one_after_the_other_are_counted_once() -> None:
    """The second was asked for long before the first had ended; a late beginning is no part of either."""
    clock = FakeClock()
    pacer = ThroughputEstimator(clock, 2)
    computed(pacer, clock)
    for turn in (1, 2):
        pacer.begin(handed(turn), clock())
    clock.advance(5.0)
    for turn in (1, 2):
        pacer.first(handed(turn), clock())
    for turn in (1, 2):
        clock.advance(2.0)
        pacer.closed(handed(turn), clock(), queued=True)
    pacer.began("a", "shm", queued=False)
    clock.advance(0.5)
    pacer.ended("a", 1000)
    pace = pacer.pace("shm")
    assert pace is not None
    assert pace.layer_token_s == pytest.approx(0.1)


class Counted(FiredEvent):
    """How often it was asked."""

    asked = 0

    def query(self) -> bool:
        """Count."""
        self.asked += 1
        return super().query()


class Broken(FiredEvent):
    """Raises."""

    def query(self) -> bool:
        """Raise."""
        raise RuntimeError("no such stream")


class Told:
    """What was told, in order."""

    def __init__(self) -> None:
        self.happened: list[tuple[int, float]] = []
        self.broken: list[str] = []

    def of(self, number: int) -> Callable[[float], None]:
        """Whom to tell of an event."""
        return lambda at: self.happened.append((number, at))

    def error(self, exc: Exception) -> None:
        """Whom to tell of its error."""
        self.broken.append(str(exc))


def test_only_the_first_of_a_line_is_asked() -> None:
    """However many layers wait, a look is short; what has happened is told in order, at once."""
    clock, told = FakeClock(), Told()
    lines = EventFifo(clock)
    events = [Counted() for _ in range(3)]
    for number, event in enumerate(events):
        lines.add("pass", event, told.of(number), told.error)
    for _ in range(10):
        assert lines.look()
    assert [event.asked for event in events] == [10, 0, 0]
    events[0].fired = events[1].fired = True
    clock.advance(1.0)
    assert lines.look()
    assert told.happened == [(0, 1.0), (1, 1.0)]
    events[2].fired = True
    assert not lines.look()
    assert [number for number, _ in told.happened] == [0, 1, 2]


def test_an_event_that_raises_is_told_and_holds_up_nobody() -> None:
    lines, told = EventFifo(FakeClock()), Told()
    lines.add("pass", Broken(), told.of(0), told.error)
    lines.add("other", FiredEvent(), told.of(1), told.error)
    assert lines.look()
    assert (told.happened, told.broken) == ([], ["no such stream"])


def test_lines_whose_events_never_happen_are_bounded() -> None:
    """The oldest goes."""
    lines, told, event = EventFifo(FakeClock()), Told(), FiredEvent()
    for number in range(PASSES + 1):
        lines.add(number, event, told.of(number), told.error)
    event.fired = True
    assert not lines.look()
    assert [number for number, _ in told.happened] == list(range(1, PASSES + 1))
