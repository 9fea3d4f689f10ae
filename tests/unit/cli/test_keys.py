"""``disagg-kv keys`` makes what ``Keys.load`` takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disagg_kv.channels import Keys
from disagg_kv.cli.main import run


def test_a_pair_is_made_and_can_be_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["keys", str(tmp_path), "prefill", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert Keys.load(made["secret"], tmp_path).allowed == {Keys.load(made["secret"], tmp_path).public}


def test_no_pair_is_written_over_and_the_secret_is_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["keys", str(tmp_path), "prefill"]) == 0
    assert Keys.load(tmp_path / "prefill.key_secret", tmp_path).secret not in capsys.readouterr().out
    assert run(["keys", str(tmp_path), "prefill"]) == 2
    assert "prefill.key" in capsys.readouterr().err
