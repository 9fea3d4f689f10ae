"""The states of an endpoint between two steps, and the pauses between its polls."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from disagg_kv.endpoints.loop.timing import FAST_BYTES_PER_S, LONGEST_PAUSE_S, SHORTEST_PAUSE_S, IdlePolicy
from disagg_kv.transports import Capabilities

SLOW, FAST = Capabilities(bytes_per_s=8e9), Capabilities(bytes_per_s=FAST_BYTES_PER_S)


def rest(policy: IdlePolicy, at: float = 0.0, *, busy: bool, in_pass_s: float = 0.0) -> float:
    """How long an endpoint with open rooms waits after a step."""
    return policy.rest(at, 1.0, busy=busy, in_pass_s=in_pass_s)


def pauses(caps: Capabilities, at: Sequence[float]) -> list[float]:
    """Of steps of an endpoint that waits for a write; then of one that does not, and of one that does again."""
    policy = IdlePolicy(caps)
    more = [rest(policy, at[-1] + n, busy=busy) for n, busy in ((1, False), (2, True))]
    return [*[rest(policy, one, busy=True) for one in at], *more]


def test_on_a_slow_wire_pauses_are_a_share_of_the_time_that_has_passed() -> None:
    """A write may take seconds there: the thread polls 2,000 times a second, not 20,000 times."""
    at = [1.0, 1.001, 1.004, 1.008, 1.016, 9.0]
    least, most = SHORTEST_PAUSE_S, LONGEST_PAUSE_S
    assert pauses(SLOW, at) == pytest.approx([least, least, 0.004 / 32, 0.008 / 32, most, most, 1.0, least])
    assert pauses(FAST, at) == [least] * 6 + [1.0, least]


@pytest.mark.parametrize("busy", [False, True])
def test_during_a_pass_it_blocks(busy: bool) -> None:
    policy = IdlePolicy(SLOW)
    assert rest(policy, busy=busy, in_pass_s=0.01) == (0.01 if busy else 1.0)
