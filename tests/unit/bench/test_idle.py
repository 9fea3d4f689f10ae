"""The benchmark of the idle policy switches off what it says, and its ratios are those of its samples."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing import Pipe

import numpy as np
import pytest

from bench.ranks import Ranks
from benchmarks.idle import AS_IT_IS, Turns, Without, policy
from disagg_kv.endpoints.loop import event_loop
from disagg_kv.endpoints.loop.timing import LONGEST_PAUSE_S, SHORTEST_PAUSE_S, IdlePolicy
from disagg_kv.transports import Capabilities

SLOW = Capabilities(bytes_per_s=8e9)


def without(*off: str, caps: Capabilities = SLOW) -> Without:
    return Without(frozenset(off), caps)


def rests(policy: IdlePolicy, count: int, *, busy: bool = True, in_pass_s: float = 0.0) -> Sequence[float]:
    """What an endpoint does after steps, one a millisecond."""
    return [policy.rest(1e-3 * (n + 1), 1.0, busy=busy, in_pass_s=in_pass_s) for n in range(count)]


def test_each_knob_is_off_alone() -> None:
    grown = [max(SHORTEST_PAUSE_S, 1e-3 * n / 32) for n in range(5)]
    assert rests(without(), 5) == pytest.approx(grown)
    assert set(rests(without("growing pauses"), 5)) == {SHORTEST_PAUSE_S}
    assert set(rests(without("short pauses"), 5)) == {LONGEST_PAUSE_S}
    assert set(rests(without(), 3, in_pass_s=0.1)) == {0.1}
    assert rests(without("pause of a pass"), 3, in_pass_s=0.1) == pytest.approx(grown[:3])
    assert rests(without(), 1, busy=False) == [1.0]


def test_only_endpoints_that_are_made_meanwhile_lack_a_knob() -> None:
    with policy(frozenset({"growing pauses"})):
        assert vars(event_loop)["IdlePolicy"] is not IdlePolicy
    assert vars(event_loop)["IdlePolicy"] is IdlePolicy


def test_a_ratio_of_samples_has_an_interval_over_rounds() -> None:
    ours, _ = Pipe()
    turns = Turns(Ranks("prefill", [ours], 0.0), Ranks("decode", [ours], 0.0), [AS_IT_IS])
    base = [1.0, 2.0, 4.0, 8.0]
    double = [2 * seconds for seconds in base]
    assert turns._compare([(double, base)], np.median) == {"ratio": 2.0, "low": 2.0, "high": 2.0}
    assert turns._compare([(double, base), (base, double)], np.mean) == {"ratio": 1.0, "low": 1.0, "high": 1.0}
    wide = turns._compare([([1.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0])], np.mean)
    assert wide["low"] < wide["ratio"] == 1.0 < wide["high"]
