"""The benchmark of requests that decode computes while others are loaded: its turns, and what is red."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines_gpu.beside import MODES, Run, arguments, document, shown
from benchmarks.engines_gpu.engines import Live, RequestError, Sample

FAKE = (sys.executable, "-m", "tests.support.fake_engine")


def run(folder: Path) -> dict[str, Any]:
    """A run with engines that compute nothing."""
    options = ["--cpu", "--block", "8", "--tokens", "30", "--answer", "4", "--reps", "2", "--running", "3"]
    made = Run(arguments([*options, "--out", str(folder), "--commit", "f" * 40]), 2, FAKE)
    asyncio.run(made.all())
    found: dict[str, Any] = json.loads(json.dumps(document(made, None)))
    return found


def test_turns_with_and_without_loads(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert (found["ok"], found["red"]) == (True, [])
    for kind in ("alone_ms", "beside_ms"):
        assert {mode: len(of) for mode, of in found[kind].items()} == {mode.name: 2 for mode in MODES}
    alone, beside = {"ours, at once": [2.0, 4.0]}, {"ours, at once": [3.0, 6.0]}
    rows = shown({**found, "alone_ms": alone, "beside_ms": beside}).splitlines()
    assert rows[-1] == "| ours, at once | 3.00 / 3.80 | 4.50 / 5.70 | **1.50 (1.50 to 1.50)** |"


def test_a_request_that_fails_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ENGINE", "ours-decode=error")
    found = run(tmp_path)
    assert not found["ok"]
    assert "ours-decode" in found["red"][0]


@pytest.mark.parametrize("fails", [1, 2])
def test_a_load_that_fails_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int) -> None:
    """The first one makes contact; the second one is beside running requests."""
    whole, asked = Live.ask, []

    async def ask(live: Live, *given: Any) -> Sample:
        asked.append(given)
        if len(asked) == 2 + fails:
            raise RequestError("as asked for")
        return await whole(live, *given)

    monkeypatch.setattr(Live, "ask", ask)
    found = run(tmp_path)
    assert (found["ok"], found["red"]) == (False, ["as asked for"])
