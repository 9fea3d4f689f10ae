"""The benchmark of requests that decode computes while others are loaded: its turns, and what is red."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines_gpu.beside import Run, arguments, document, shown

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
    assert len(found["alone_ms"]) == len(found["beside_ms"]) == len(found["loads"]) == 2
    assert min(found["loads"]) >= 1
    assert "| 3 requests |" in shown({**found, "alone_ms": [2.0, 4.0], "beside_ms": [3.0, 6.0]})
    assert "**1.50 (1.50 to 1.50)**" in shown({**found, "alone_ms": [2.0, 4.0], "beside_ms": [3.0, 6.0]})


def test_a_request_that_fails_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ENGINE", "ours-decode=error")
    found = run(tmp_path)
    assert not found["ok"]
    assert "ours-decode" in found["red"][0]
