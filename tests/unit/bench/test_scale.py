"""Real endpoints in several processes: all meet, every byte is right, and what a peer costs is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve

from benchmarks.scale import FANOUT, FEW, Field, Scale
from tests.support.pages import ROOT


@pytest.mark.slow
def test_a_few_processes_meet_and_are_measured(tmp_path: Path) -> None:
    """Over both kinds of channel; the program ends by itself, and ends its processes."""
    line = ["--peers", "8", "--processes", "3", "--rounds", "1", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", *line], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode in (0, 1), done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert [one["kind"] for one in found["results"]] == ["unix", "zeromq"]
    for one in found["results"]:
        assert one["few"].keys() == one["many"].keys() == {"poll_us", "step_us", "grant_us"}
        assert 1 <= one["descriptors_per_peer"] <= 10
    assert done.returncode == (not found["ok"])


def test_a_limit_that_does_not_hold_is_noticed() -> None:
    """Each by itself."""
    times = {"poll_us": 1.0, "step_us": 1.0, "grant_us": 1.0}
    good = Scale("unix", times, dict.fromkeys(times, 1.2), 20_000.0, 3.0, 1.0)
    assert good.document()["ok"] is True
    assert evolve(good, memory_per_peer=20_001.0).document()["ok"] is False
    for name in times:
        assert evolve(good, many=good.many | {name: 1.21}).document()["ok"] is False


@pytest.mark.parametrize(("peers", "processes"), [(12, 3), (200, 20), (3, 1)])
def test_processes_ask_several_peers_mostly_of_others(peers: int, processes: int) -> None:
    field = Field("unix", "", peers, processes)
    for process in range(processes):
        asked = field.asked_by(process)
        assert len(set(asked)) == len(asked) == min(FANOUT, peers)
        if processes > FEW:
            assert sum(number % processes == process for number in asked) <= 1
