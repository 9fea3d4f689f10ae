"""Into how many groups layers are cut: the published formula and the cost model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_kv.errors import ConfigurationError
from disagg_kv.planning import Adaptive, Batch, Groups, LayerRun, Pace, exposed_s, fastest, whole

PACE = Pace(layer_token_s=1e-6, bytes_per_s=1e9, group_s=1e-4)
LAYERS = st.integers(1, 200)
TOKENS = st.lists(st.integers(0, 200_000), max_size=5)
ADAPTIVE = st.builds(
    Adaptive,
    min_tokens=st.integers(1, 10_000),
    saturation=st.floats(1.01, 100.0),
    most=st.integers(8, 300),
    least=st.integers(1, 8),
    few_layers=st.integers(0, 8),
)


def run(layers: int = 32, tokens: tuple[int, ...] = (1000,), row_bytes: int = 1000) -> LayerRun:
    return LayerRun(layers, tokens[0], tokens[0] * row_bytes, Batch(tokens, layered=True))


@given(LAYERS, TOKENS, ADAPTIVE)
def test_the_formula_always_gives_a_group_of_some_of_the_layers(
    layers: int, tokens: list[int], adaptive: Adaptive
) -> None:
    """No input divides by zero or leaves 1..layers, and thresholds hold."""
    groups = adaptive.groups(layers, tokens)
    assert 1 <= groups.size <= layers
    assert groups.reason
    few = not tokens or sum(tokens) / len(tokens) < adaptive.min_tokens or layers <= adaptive.few_layers
    assert not few or groups.count == 1


@pytest.mark.parametrize(
    ("tokens", "size"), [(3071, 32), (3072, 3), (4608, 3), (6144, 4), (7680, 5), (9216, 8), (100_000, 8)]
)
def test_the_formula_at_its_published_defaults(tokens: int, size: int) -> None:
    """Between 3,072 and 9,216 tokens the groups go from ten to four."""
    assert Adaptive().groups(32, [tokens]).size == size


def test_the_mean_of_a_pass_counts() -> None:
    assert Adaptive().groups(32, [2000, 4200]).size == Adaptive().groups(32, [3100]).size < 32
    assert Adaptive().groups(32, []).reason == "an empty pass has no groups"
    assert Adaptive().groups(4, [9000]).reason == "4 layers are too few to group"


@pytest.mark.parametrize(
    "change", [{"min_tokens": 0}, {"saturation": 1.0}, {"most": 0}, {"least": 0}, {"least": 11}], ids=str
)
def test_numbers_that_cannot_be_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=f"layer groups: {next(iter(change))}"):
        Adaptive(**change)


@pytest.mark.parametrize("size", [0, -1, 5])
def test_a_group_holds_some_of_the_layers(size: int) -> None:
    with pytest.raises(ConfigurationError, match=f"groups of {size} layers out of 4"):
        Groups(4, size, "")


@given(LAYERS, st.integers(0, 50), st.data())
def test_groups_cut_a_run_without_gaps(layers: int, first: int, data: st.DataObject) -> None:
    groups = Groups(layers, data.draw(st.integers(1, layers)), "")
    cut = groups.cut(range(first, first + layers))
    assert [layer for part in cut for layer in part] == list(range(first, first + layers))
    assert len(cut) == groups.count
    assert all(len(part) == groups.size for part in cut[:-1])


@given(st.floats(0, 10), st.floats(0, 10), st.integers(1, 100), st.floats(0, 0.1))
def test_exposed_time(compute: float, wire: float, groups: int, overhead: float) -> None:
    """C + T/N where computing takes longer, C/N + T where the wire does, and the overhead of each group."""
    expected = compute + wire / groups if wire < compute else compute / groups + wire
    assert exposed_s(compute, wire, groups, overhead) == pytest.approx(expected + groups * overhead)


@given(
    LAYERS,
    st.lists(st.integers(1, 20_000), min_size=1, max_size=4),
    st.integers(0, 10**6),
    st.builds(Pace, st.floats(1e-9, 1e-3), st.floats(1e6, 1e12), st.floats(0, 1e-2)),
)
def test_the_cost_model_takes_the_best_of_all_group_counts_and_never_loses(
    layers: int, tokens: list[int], row_bytes: int, pace: Pace
) -> None:
    """Within the margin of the best, and never slower than one group."""
    of = run(layers, tuple(tokens), row_bytes)
    groups = fastest(of, pace)
    compute, wire = pace.layer_token_s * layers * sum(tokens), row_bytes * sum(tokens) / pace.bytes_per_s
    times = [exposed_s(compute, wire, -(-layers // size), pace.group_s) for size in range(1, layers + 1)]
    seconds = exposed_s(compute, wire, groups.count, pace.group_s)
    assert seconds <= times[-1]
    assert seconds <= min(times) / 0.98 * (1 + 1e-9)


def test_a_decision_says_why() -> None:
    """Short prompts are one group, where the published version lost 18 %."""
    assert fastest(run(tokens=(10,)), PACE).count == 1
    groups = fastest(run(tokens=(4096,)), PACE)
    assert groups.count > 4
    assert "131.07 ms of computing and 4.10 ms of wire take" in groups.reason
    assert f"in {groups.count} groups" in groups.reason
    assert whole(7, "so").cut(range(2, 9)) == [range(2, 9)]


@pytest.mark.parametrize("change", [{"layer_token_s": 0}, {"bytes_per_s": float("nan")}, {"group_s": -1}], ids=str)
def test_a_pace_is_positive(change: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=f"pace: {next(iter(change))}"):
        Pace(**{"layer_token_s": 1.0, "bytes_per_s": 1.0, **change})
