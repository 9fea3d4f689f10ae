"""``examples/minimal.py``, as a reader runs it: in one process, and in two."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.pages import ROOT

SCRIPT = ROOT / "examples" / "minimal.py"
EQUAL = "100 tokens, 204,800 bytes over 'shm' by 'staged': all equal\n"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def start(*line: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, str(SCRIPT), *line], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)


def test_both_sides_in_one_process() -> None:
    with start() as process:
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert out.endswith(EQUAL)


def test_each_side_in_a_process_of_its_own() -> None:
    with start("prefill") as prefill:
        assert prefill.stdout is not None
        address = prefill.stdout.readline().split()[-1]
        with start("decode", address) as decode:
            out, _ = decode.communicate(timeout=120)
        assert (decode.returncode, out) == (0, EQUAL)
        assert prefill.wait(timeout=60) == 0


def test_it_is_short() -> None:
    """A reader sees it on two screens."""
    assert SCRIPT.read_text().count("\n") <= 100
