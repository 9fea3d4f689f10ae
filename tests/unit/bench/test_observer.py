"""The cost of an observer is measured over bytes that were compared, and is far below its limit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import observer
from disagg_kv.memory import bytes_of
from tests.support.needs import needs_prometheus

pytestmark = needs_prometheus


def test_events_and_transfers_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of every kind; the limit has room for a busy host."""
    assert observer.main(["--rounds", "3", "--repeats", "1", "--json", str(tmp_path / "out.json")]) in (0, 1)
    found = json.loads((tmp_path / "out.json").read_text())
    assert [one["event"] for one in found["events_ns"]] == list(observer.EVENTS_OF)
    assert set(found["transfer_s"]) == {"silent", "silent, again", "prometheus"}
    assert "span of a segment" in capsys.readouterr().out


def test_an_event_over_the_limit_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(observer, "LIMIT_NS", 1.0)
    assert observer.main(["--rounds", "1", "--repeats", "0"]) == 1
    assert "over the limit: span of a segment" in capsys.readouterr().err


def test_wrong_bytes_end_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = observer.Pair.made("silent", None)
    try:
        pair.check()
        monkeypatch.setattr(observer.Pair, "move", lambda self: 0.0)
        with pytest.raises(SystemExit, match="bytes are wrong"):
            pair.check()
        assert bytes_of(pair.target.buffers[0])[0] == 0xA5
    finally:
        pair.close()
