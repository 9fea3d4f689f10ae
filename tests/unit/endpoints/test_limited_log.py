"""What can happen again and again fills no log."""

from __future__ import annotations

import logging

import pytest

from disagg_kv.endpoints.peers.limited_log import LimitedLog
from disagg_kv.testing import FakeClock


def test_one_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    """The next line after that says how many were left out, and errors keep their traceback."""
    clock = FakeClock(1.0)
    limited = LimitedLog(clock)
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            limited.say(logging.WARNING, "a peer sends what is no frame")
        clock.advance(1.0)
        limited.say(logging.ERROR, "it failed", ValueError("why"))
        clock.advance(1.0)
        limited.say(logging.WARNING, "again")
    assert [r.getMessage() for r in caplog.records] == [
        "a peer sends what is no frame",
        "it failed (4 lines like this were left out)",
        "again",
    ]
    assert caplog.records[1].exc_info is not None
