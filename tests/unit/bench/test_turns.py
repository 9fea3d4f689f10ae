"""The benchmark of conversations between engines: what it asks, what prefill must have had, and what is red."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines_gpu import turns
from benchmarks.engines_gpu.turns import MODES, Run, arguments, document, shown, specs

FAKE = """
import json, sys, time
config = json.loads(sys.argv[1])
name, caches, fault = config["kv"]["engine_id"], config["args"]["enable_prefix_caching"], "FAULT"
known = []
print(json.dumps({"id": "ready", "start_s": 0.1}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    given, prompt, now = asked["params"], asked["prompt"], time.monotonic()
    answer = {"id": asked["id"], "tokens": [7] * asked["new"], "t0": now, "t1": now, "t2": now, "cached": 0}
    if given.get("do_remote_decode"):
        same = [len(one) // 8 * 8 for one in known if prompt[: len(one)] == one]
        answer["cached"] = given["earlier"]["tokens"] if "earlier" in given else max([0, *same]) if caches else 0
        known.append(prompt)
        answer["params"] = {"transfer_id": given["transfer_id"], "instance": name, "addresses": ["here"]}
    else:
        assert given["instance"] != "decode"
        held = {"tokens": len(prompt) + asked["new"] - 1}
        answer["params"] = {"earlier": held} if "hold_s" in given else None
    if fault == "computes" and "earlier" in given:
        answer["cached"] = 0
    print(json.dumps({"id": asked["id"], "error": fault} if fault == "fails" else answer), flush=True)
"""


def run(folder: Path, fault: str = "") -> tuple[Run, dict[str, Any]]:
    """A run with engines that compute nothing."""
    (folder / "fake.py").write_text(FAKE.replace("FAULT", fault))
    options = ["--cpu", "--block", "8", "--context", "30", "--new", "9", "--answer", "4", "--reps", "2"]
    given = arguments([*options, "--out", str(folder / "out"), "--commit", "f" * 40])
    made = Run(given, (sys.executable, str(folder / "fake.py")))
    asyncio.run(made.all())
    return made, json.loads(json.dumps(document(made, None)))


def test_each_mode_has_what_it_is_about(tmp_path: Path) -> None:
    """30 tokens, and 13 more in each turn, of which decode holds those before the last new ones and one."""
    made, found = run(tmp_path)
    assert (made.red, found["ok"]) == ([], True)
    assert {name: mode["cached"] for name, mode in found["modes"].items()} == {
        "no cache": [0, 0, 0, 0],
        "another instance": [0, 0, 24, 40],
        "both ways": [0, 33, 46, 59],
        "same instance": [0, 24, 40, 56],
    }
    assert found["modes"]["both ways"]["tokens"] == [30, 43, 56, 69]
    assert [len(mode["ttft_ms"]) for mode in found["modes"].values()] == [2] * 4
    assert shown(found).count("\n") == 1 + len(MODES)


def test_prefill_that_computes_what_it_should_load_is_red(tmp_path: Path) -> None:
    made, found = run(tmp_path, "computes")
    assert not found["ok"]
    assert made.red[0] == "both ways, turn 2: prefill had 0 tokens, not 33"


def test_a_request_that_fails_is_red(tmp_path: Path) -> None:
    made, found = run(tmp_path, "fails")
    assert made.red == ["plain: fails"]
    assert found["modes"] == {}


def test_gpus_are_shared_by_the_prefill_instances_alone() -> None:
    given = arguments(["--out", "out"])
    of = {one.name: one for one in specs(given)}
    assert {name: one.env["CUDA_VISIBLE_DEVICES"] for name, one in of.items()} == {
        "plain": "0", "one": "0", "two": "0", "decode": "1",
    }  # fmt: skip
    assert [one.config["args"]["enable_prefix_caching"] for one in of.values()] == [False, True, True, True]
    assert {one.config["kv"]["kv_role"] for one in of.values()} == {"kv_both"}


def test_the_command_writes_a_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PROGRAM", (sys.executable, "-c", "import sys; sys.exit('RuntimeError: no GPU')"))
    made = Run(arguments(["--cpu", "--out", str(tmp_path)]), turns.PROGRAM)
    asyncio.run(made.all())
    assert "RuntimeError: no GPU" in made.red[0]
