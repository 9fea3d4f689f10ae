"""The summary of a suite."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MINE = """
from disagg_kv.testing.receiver import ReceiverSuite


class TestMine(ReceiverSuite):
    def receiver(self, inner):
        return inner


class TestAll(ReceiverSuite):
    begins = 2

    def test_close_ends_rooms_that_wait(self):
        pass

    def receiver(self, inner):
        return inner
"""


def test_the_summary_says_in_a_line_what_was_skipped_and_why(tmp_path: Path) -> None:
    """For each class that skips some of its tests, without options of pytest."""
    (tmp_path / "test_mine.py").write_text(MINE)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-k", "test_close", "--rootdir"]
    done = subprocess.run([*command, str(tmp_path), str(tmp_path)], capture_output=True, text=True, cwd=tmp_path)
    assert not done.returncode, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if "skipped:" in line]
    assert said == ["test_mine.py::TestMine skipped: begins is None: no room waits (1)"]
