"""Timers against a plain list: what is due comes, in order, whatever is scheduled or raised meanwhile."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg_kv.core.timers import Timers

KEYS = st.integers(0, 5)
TIMES = st.integers(-5, 20).map(float)
STEPS = st.lists(st.tuples(KEYS, st.none() | TIMES), max_size=30)


@given(STEPS, st.lists(st.tuples(st.integers(0, 20), st.dictionaries(KEYS, TIMES)), max_size=8))
def test_every_key_comes_once_when_it_is_due(
    steps: list[tuple[int, float | None]], rounds: list[tuple[int, dict[int, float]]]
) -> None:
    """A key whose handling schedules it again, perhaps for a time that has passed, keeps no other key from its turn."""
    timers: Timers[int] = Timers()
    model: dict[int, float] = {}
    for key, when in steps:
        timers.schedule(key, when)
        model.pop(key, None)
        if when is not None:
            model[key] = when
    for now, again in rounds:
        due = sorted((when, key) for key, when in model.items() if when <= now)
        came = []
        for key in timers.due(float(now)):
            came.append(key)
            del model[key]
            if key in again:
                timers.schedule(key, again[key])
                model[key] = again[key]
        assert sorted(came) == sorted(key for _, key in due)
        assert timers.next_at() == min(model.values(), default=None)


@given(st.dictionaries(KEYS, TIMES, min_size=1), st.integers(0, 5))
def test_an_error_leaves_the_others_their_times(model: dict[int, float], wrong: int) -> None:
    """They come with the next call."""
    timers: Timers[int] = Timers()
    for key, when in model.items():
        timers.schedule(key, when)
    came: list[int] = []
    try:
        for key in timers.due(20.0):
            came.append(key)
            if key == wrong:
                timers.schedule(key, -1.0)
                raise ValueError(key)
    except ValueError:
        came += timers.due(20.0)
    assert sorted(came) == sorted([*model, *([wrong] if wrong in model else [])])
    assert timers.next_at() is None
