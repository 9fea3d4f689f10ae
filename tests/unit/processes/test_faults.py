"""Two prefill and two decode processes in which anything dies, freezes, comes back or gives up, round after round."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.faults import REPORTED_S, ROUNDS, SETTLED_S, Field, killed
from tests.support.leftovers import abandoned
from tests.support.needs import needs_mooncake, needs_nixl
from tests.support.processes import Cluster, wait

pytestmark = pytest.mark.slow

STORM = 12
CASES = [
    ("shm", "staged"),
    ("shm", "mapped"),
    pytest.param("nixl", "staged", marks=needs_nixl),
    pytest.param("mooncake", "staged", marks=needs_mooncake),
]


def frozen(field: Field, usual_s: float) -> None:
    """One prefill rank stands still until the others have given it up, and goes on."""
    victim = field.draw.choice(field.prefill)
    room = field.begin()
    time.sleep(field.draw.uniform(0.0, usual_s))
    victim.freeze()
    for node in field.decode:
        node.until(room, lambda look: look.phase in ("DONE", "FAILED"), SETTLED_S)
    victim.thaw()
    field.end(room, field.nodes, SETTLED_S)


def storm(field: Field, usual_s: float) -> None:
    """Many requests at once, each given up by somebody at some moment."""
    rooms = [field.begin() for _ in range(STORM)]
    for room in field.draw.sample(rooms, len(rooms)):
        time.sleep(field.draw.uniform(0.0, usual_s / STORM))
        field.draw.choice(field.nodes).ask("abort", room)
    for room in rooms:
        field.end(room, field.nodes, SETTLED_S)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Endpoints that end with the test, and leave nothing in /dev/shm."""
    before = abandoned()
    made = Cluster(tmp_path)
    yield made
    made.stop()
    wait(lambda: abandoned() <= before, lambda: f"left in /dev/shm: {abandoned() - before}")


@pytest.mark.parametrize(("name", "path"), CASES)
def test_survivors_are_correct_and_clean_after_every_fault(cluster: Cluster, name: str, path: str) -> None:
    """Killed, frozen, restarted, aborted; then bytes, descriptors, regions and pages are checked."""
    field = Field(cluster, name, path)
    usual_s = min(field.usual() for _ in range(3))
    field.settle()
    for _ in range(ROUNDS):
        killed(field, "prefill", usual_s)
        field.settle()
        killed(field, "decode", usual_s)
        field.settle()
        frozen(field, usual_s)
        field.settle()
        storm(field, usual_s)
        field.settle()
    p99 = float(np.percentile(field.reported, 99))
    assert p99 <= REPORTED_S
    print(f"{name}, {path}: usually {usual_s:.3f} s; {field.ends}; ends of peers told within {p99:.3f} s (p99)")
