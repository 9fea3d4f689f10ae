"""Which of the rules decides, and the guards."""

from __future__ import annotations

import pytest

from disagg_kv.errors import ConfigurationError
from disagg_kv.planning import Batch, LayerRun, Pace
from disagg_kv.strategies import Feature, LayerPipelined
from disagg_kv.strategies.schedules import PerChunk

PACE = Pace(1e-6, 1e9, 1e-4)


def run(tokens: int = 8000, *, uses: frozenset[str] = frozenset(), layered: bool = True) -> LayerRun:
    return LayerRun(32, max(tokens, 1), tokens * 1000, Batch((tokens,), uses, layered), None)


def test_the_order_of_rules() -> None:
    """A fixed size outranks all thresholds, a known pace the formula; rows that come at once are one group."""
    assert LayerPipelined().groups(run()).reason.startswith("the adaptive formula")
    assert "ms of wire" in LayerPipelined(pace=PACE).groups(run()).reason
    fixed = LayerPipelined(fixed=3, pace=PACE)
    assert fixed.groups(run(1)).size == 3
    assert LayerPipelined(fixed=99).groups(run()).size == 32
    assert fixed.groups(run(layered=False)).count == 1
    assert LayerPipelined(pace=PACE).groups(run(0)).count == 1
    assert PerChunk().groups(run()).count == 1


@pytest.mark.parametrize("feature", Feature)
def test_a_declared_conflict_falls_back_to_per_chunk_with_its_reason(feature: Feature) -> None:
    groups = LayerPipelined(fixed=1).groups(run(uses=frozenset({feature})))
    assert groups.count == 1
    assert groups.reason == f"the engine uses {feature}: {feature.why}"


@pytest.mark.parametrize("size", [0, -2])
def test_a_group_of_no_layers_is_refused(size: int) -> None:
    with pytest.raises(ConfigurationError, match=f"at least 1, not {size}"):
        LayerPipelined(fixed=size)
