"""How fast lanes are, as measured, and that ``auto`` chooses by it."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest

from disagg_kv.endpoints.prefill.lane_rates import KNOWN_S, LaneRates
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Epoch
from disagg_kv.kernels import CpuKernels, PageMove
from disagg_kv.memory import Bell, Event
from disagg_kv.planning import MeasuredRates
from disagg_kv.testing import FakeClock
from disagg_kv.transports import Capabilities, InprocTransport, Lane
from tests.support.rig import Memory, Rig, tp_shards

SPEC = CacheSpec.kv(2, 4, 8, "float16")
LANE = Lane("shm", Capabilities(write_s=1e-6, bytes_per_s=1e9), "the first lane")
ENOUGH = 1 << 20
PEER, OTHER = Epoch(b"p" * 16), Epoch(b"o" * 16)


def moved(rates: LaneRates, seconds: float, *, at: float = 0.0, writes: int = 1, nbytes: int = ENOUGH) -> None:
    """One write on its own."""
    rates.begins(PEER, LANE, False, at)
    rates.ends(PEER, LANE, False, at + seconds, writes, nbytes)


def known(rates: LaneRates) -> float | None:
    return rates.of(LANE).writes


def test_a_rate_rises_at_once_and_sinks_little_by_little() -> None:
    """A look that comes late makes a write slower, and nothing makes it faster."""
    rates = LaneRates(FakeClock())
    assert rates.of(LANE) == MeasuredRates()
    moved(rates, 0.02)
    moved(rates, 0.01, at=1.0)
    assert known(rates) == pytest.approx(ENOUGH / 0.01, rel=0.1)
    moved(rates, 0.1, at=2.0)
    assert known(rates) == pytest.approx(0.73 * ENOUGH / 0.01, rel=0.1)
    for at in range(3, 40):
        moved(rates, 0.1, at=at)
    assert known(rates) == pytest.approx(ENOUGH / 0.1, rel=0.1)


@pytest.mark.parametrize(("writes", "nbytes"), [(1, 4096), (1, 0), (1000, ENOUGH)])
def test_few_bytes_and_many_small_writes_say_nothing_of_a_lane_s_rate(writes: int, nbytes: int) -> None:
    """Their time is that of the writes, and of the notice that they have ended."""
    rates = LaneRates(FakeClock())
    moved(rates, 0.02, writes=writes, nbytes=nbytes)
    assert known(rates) is None


def test_writes_that_cross_together_are_measured_together() -> None:
    rates = LaneRates(FakeClock())
    for _ in range(4):
        rates.begins(PEER, LANE, False, 1.0)
    for _ in range(4):
        rates.ends(PEER, LANE, False, 1.01, 1, ENOUGH)
    assert known(rates) == pytest.approx(4 * ENOUGH / 0.01, rel=0.1)


def test_writes_without_a_pause_are_measured_after_a_while() -> None:
    rates = LaneRates(FakeClock())
    rates.begins(PEER, LANE, False, 0.0)
    rates.begins(PEER, LANE, False, 0.0)
    rates.ends(PEER, LANE, False, 0.2, 1, ENOUGH)
    assert known(rates) == pytest.approx(ENOUGH / 0.2, rel=0.1)


def test_a_write_that_hangs_says_nothing_of_other_peers() -> None:
    """The time between their writes does not count."""
    rates = LaneRates(FakeClock())
    rates.begins(OTHER, LANE, False, 0.0)
    for at in range(1, 40):
        moved(rates, 0.01, at=at)
    assert known(rates) == pytest.approx(ENOUGH / 0.01, rel=0.1)
    rates.ends(OTHER, LANE, False, 40.0, 1, 0)
    moved(rates, 0.01, at=41.0)
    assert known(rates) == pytest.approx(ENOUGH / 0.01, rel=0.1)


def test_a_rate_that_is_not_renewed_is_forgotten() -> None:
    """So a path that lost is tried again; what it shows then is not mixed with the old rate."""
    clock = FakeClock()
    rates = LaneRates(clock)
    moved(rates, 0.1, at=clock())
    moved(rates, 0.1, at=clock() + 1.0)
    clock.advance(KNOWN_S)
    assert known(rates) == pytest.approx(ENOUGH / 0.1, rel=0.1)
    clock.advance(1.2)
    assert known(rates) is None
    moved(rates, 0.2, at=clock())
    assert known(rates) == pytest.approx(ENOUGH / 0.2, rel=0.1)


def test_copies_into_mapped_pages_and_other_lanes_have_rates_of_their_own() -> None:
    rates = LaneRates(FakeClock())
    rates.begins(PEER, LANE, True, 0.0)
    moved(rates, 0.02)
    rates.ends(PEER, LANE, True, 0.01, 1, ENOUGH)
    found = rates.of(LANE)
    assert found.writes == pytest.approx(ENOUGH / 0.02, rel=0.1)
    assert found.copies == pytest.approx(ENOUGH / 0.01, rel=0.1)
    assert rates.of(attrs.evolve(LANE, name="nixl")) == MeasuredRates()


def test_rates_that_differ_little_are_one() -> None:
    """Else each request would have costs of its own, and no choice could be remembered."""
    seen = set()
    for percent in range(100, 300):
        rates = LaneRates(FakeClock())
        moved(rates, 0.01 * percent / 100)
        seen.add(known(rates))
    assert len(seen) <= 8


class Slow(CpuKernels):
    """Kernels whose copies take a second."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def copy(self, moves: Sequence[PageMove], after: Event | None, bells: Sequence[Bell] = ()) -> None:
        self._clock.advance(1.0)
        super().copy(moves, after, bells)


class Link(InprocTransport):
    """It states that it is slow, so that a few rows show a rate."""

    caps = attrs.evolve(InprocTransport.caps, bytes_per_s=2e6, write_s=1e-5)


def test_auto_leaves_a_path_that_is_slower_than_its_nominal_rate_and_says_why() -> None:
    """The second room knows the rate of the first; the path that was never used keeps its nominal costs."""
    rig = Rig(SPEC)
    kernels, shards = Slow(rig.clock), tp_shards(SPEC, 1)
    prefills = rig.prefill(shards, memory=Memory(transport=Link), strategy="auto", kernels=kernels)
    decodes = rig.decode(shards, memory=Memory(page_size=8, transport=Link), strategy="auto")
    reports = [rig.request(name, prefills, decodes, 9).start(9).landed().sends[0].report for name in ("one", "two")]
    assert [report.path for report in reports] == ["mapped", "staged"]
    assert "as measured" not in reports[0].reason
    assert reports[1].reason.count("as measured") == 1
    (mapped,) = [part for part in reports[1].reason.split("; ") if "as measured" in part]
    assert mapped.startswith("mapped would take "), mapped
    assert mapped.endswith("bytes at 2.44e-06 GB/s, as measured"), mapped
    rig.quiet()
