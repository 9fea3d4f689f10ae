"""Times and bounds that cannot work are refused when they are given."""

from __future__ import annotations

import attrs
import pytest

from disagg_kv.core import Options
from disagg_kv.errors import ConfigurationError


@pytest.mark.parametrize("field", [f.name for f in attrs.fields(Options)])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_every_option_is_a_positive_number(field: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"option {field}"):
        attrs.evolve(Options(), **{field: value})  # type: ignore[arg-type]


def test_a_number_that_is_too_large_is_refused_with_both_bounds() -> None:
    with pytest.raises(ConfigurationError, match=rf"option window must be 1 to {2**62}, not {10**30}"):
        Options(window=10**30)


def test_times_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"beats every 1 s \(heartbeat_s\) would be lost after 0.5 s"):
        Options(silence_s=0.5)


def test_a_room_s_own_times_are_checked_and_zero_is_not_the_default() -> None:
    own = Options().of_room(2.0, None)
    assert (own.total_s, own.claim_s) == (2.0, 30.0)
    with pytest.raises(ConfigurationError, match="total_s must be more than 0"):
        Options().of_room(0, None)
