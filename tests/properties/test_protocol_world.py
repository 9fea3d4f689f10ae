"""The protocol machines under any order of events, lost frames, late writes, crashes and changes of mind."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.protocol_world import Setup, run

pytestmark = pytest.mark.slow

# One world is some thousand events; the sizes keep it below a second, so the number of worlds is what is cut.
WORLDS = max(20, settings().max_examples // 4)

TP = st.sampled_from([1, 2, 4])
RATE = st.sampled_from([0.0, 0.1, 0.4])

calm = st.builds(
    Setup,
    prefill_tp=TP,
    prefill_pp=st.sampled_from([1, 2]),
    decode_tp=TP,
    heads=TP,
    layers=st.sampled_from([2, 3, 5]),
    rows=st.sampled_from([5, 24, 40]),
    held=st.sampled_from([0, 4]),
    chunks=st.integers(1, 3),
    rooms=st.integers(1, 2),
    attempts=st.integers(1, 2),
    exposed=st.booleans(),
    open_end=st.booleans(),
    look_ahead=st.booleans(),
    drop=RATE,
    duplicate=RATE,
    withdrawals=st.integers(0, 1),
    group=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
stormy = st.builds(
    attrs.evolve,
    calm,
    write_faults=st.sampled_from([0.0, 0.1, 0.3]),
    cancels=st.integers(0, 3),
    scatter_faults=st.sampled_from([0.0, 0.1]),
    crash=st.sampled_from(["", "prefill", "decode"]),
)
steps = st.sampled_from([50, 300, 800])


@settings(max_examples=WORLDS)
@given(calm, steps)
def test_lost_repeated_and_late_frames_cost_time_and_nothing_else(setup: Setup, steps: int) -> None:
    """Every room succeeds on every rank with exactly its cells, and well before any deadline."""
    world = run(setup, steps)
    assert world.now - world.faults_until < 60


@settings(max_examples=WORLDS)
@given(stormy, steps)
def test_whatever_fails_every_room_ends_and_no_write_hits_foreign_memory(setup: Setup, steps: int) -> None:
    """Ends agree, memory goes back on evidence only, and all of it does."""
    run(setup, steps)
