"""The states of an endpoint between two steps, and the pauses between its polls."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from disagg_kv.endpoints.runtime.idle import (
    FAST_BYTES_PER_S,
    LONGEST_PAUSE_S,
    SHORTEST_PAUSE_S,
    IdlePolicy,
    Rest,
)
from disagg_kv.protocol import Options
from disagg_kv.transports import Capabilities

SLOW, FAST = Capabilities(bytes_per_s=8e9), Capabilities(bytes_per_s=FAST_BYTES_PER_S)


def rest(policy: IdlePolicy, at: float = 0.0, *, busy: bool, more: bool = False, in_pass_s: float = 0.0) -> Rest:
    """How an endpoint with open rooms waits after a step."""
    return policy.rest(at, 1.0, busy=busy, commanded=False, more=more, rooms=True, in_pass_s=in_pass_s)


def pauses(caps: Capabilities, busy: Sequence[bool]) -> list[float]:
    """Of an endpoint that makes a step each second."""
    policy = IdlePolicy(caps, Options(), 0.0)
    return [rest(policy, at, busy=one).pause_s for at, one in enumerate(busy)]


def test_on_a_slow_wire_pauses_grow_until_it_sleeps() -> None:
    """A write may take seconds there: the thread polls 2,000 times a second, not 20,000 times."""
    grown = [SHORTEST_PAUSE_S * 2**n for n in range(4)] + [LONGEST_PAUSE_S] * 2
    assert pauses(SLOW, [True] * 6 + [False, True]) == [*grown, 0.0, SHORTEST_PAUSE_S]
    assert pauses(FAST, [True] * 6 + [False, True]) == [SHORTEST_PAUSE_S] * 6 + [0.0, SHORTEST_PAUSE_S]


@pytest.mark.parametrize("busy", [False, True])
def test_during_a_pass_it_blocks_and_with_more_work_it_goes_on(busy: bool) -> None:
    policy = IdlePolicy(SLOW, Options(), 0.0)
    assert rest(policy, busy=busy, in_pass_s=0.01) == Rest(0.01 if busy else 1.0, 0.0)
    assert rest(policy, busy=busy, more=True, in_pass_s=0.01) == Rest(0.0, 0.0)


def test_on_a_fast_wire_it_polls_for_a_while_after_a_message() -> None:
    policy = IdlePolicy(FAST, Options(linger_s=0.002), 0.0)
    policy.on_message(1.0)
    assert rest(policy, 1.001, busy=False) == Rest(0.0, SHORTEST_PAUSE_S)
    assert rest(policy, 1.001, busy=False, in_pass_s=0.01) == Rest(1.0, 0.0)
    assert rest(policy, 1.002, busy=False) == Rest(1.0, 0.0)
