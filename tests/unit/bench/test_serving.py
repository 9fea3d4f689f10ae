"""The benchmark over HTTP: its servers, routers and rounds, and what is red."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines_gpu import serving, sglang
from benchmarks.engines_gpu.cases import Spec
from benchmarks.engines_gpu.model import write_tokenizer
from benchmarks.engines_gpu.serving import IN_FLIGHT, KEPT, Run, arguments, document, shown, words

PAIRS = ("ours", "nixl")


def report(given: argparse.Namespace, **other: Any) -> dict[str, Any]:
    """As SGLang's client reports a round."""
    answered = given.requests * given.turns
    return {"completed": answered, "generated_texts": ["w1 w2"] * answered, **dict.fromkeys(KEPT, 2.0), **other}


@pytest.fixture(autouse=True)
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that have nothing but what says that they run; those of ``mooncake`` end. Each worker has its ports."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    monkeypatch.setattr(serving, "FIRST_ROUTER", 23_000 + 20 * worker)
    monkeypatch.setattr(sglang, "FIRST_PORT", 24_000 + 200 * worker)
    monkeypatch.setattr(sglang, "STEP", 20)
    for name in ("model_info", "openapi.json"):
        (tmp_path / name).write_text("{}")

    def files(port: int) -> list[str]:
        return [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "-d", str(tmp_path)]

    def command(spec: Spec, *, cpu: bool) -> list[str]:
        ends = spec.name.startswith("mooncake")
        return [sys.executable, "-c", "print('no such library')"] if ends else files(spec.config["args"]["port"])

    monkeypatch.setattr(serving, "command", command)
    monkeypatch.setattr(serving, "router", lambda prefill, decode, port: files(port))


def run(folder: Path, ask: Any, *options: str) -> dict[str, Any]:
    own = ["--cpu", "--requests", "3", "--reps", "2", "--out", str(folder), "--commit", "f" * 40]
    made = Run(arguments([*own, *options]), 2, ask)
    made.all()
    found: dict[str, Any] = json.loads(json.dumps(document(made, None)))
    return found


def test_rounds_of_all_pairs(tmp_path: Path) -> None:
    """A backend of SGLang that does not start is left out; all others get the same prompts, in turns."""
    asked: list[tuple[int, int, int]] = []

    def ask(router: int, given: argparse.Namespace, in_flight: int, seed: int) -> dict[str, Any]:
        asked.append((router, in_flight, seed))
        return report(given)

    found = run(tmp_path, ask)
    assert (found["ok"], found["red"], found["equal"]) == (True, [], dict.fromkeys(PAIRS, 6))
    (why,) = found["left_out"]
    assert why.startswith("mooncake: ")
    assert "no such library" in why
    routers = {router for router, _, _ in asked}
    rounds = {(in_flight, seed) for _, in_flight, seed in asked}
    assert (len(routers), len(rounds)) == (2, 3 * len(IN_FLIGHT))
    assert len(asked) == len(routers) * len(rounds) == len({*asked})
    assert {name: {count: len(of["median_ttft_ms"]) for count, of in many.items()} for name, many in
            found["rounds"].items()} == {name: {"1": 2, "8": 2} for name in PAIRS}  # fmt: skip
    assert shown(found).splitlines()[2] == "| single | 1 | ours | 2.00 (2 rounds) | 2.0 / 2.0 | 2.0 / 2.0 |"


def test_rounds_of_several_runs_are_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(tmp_path, lambda router, given, in_flight, seed: report(given), "--pairs", "ours", "--turns", "2")
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for file in files:
        file.write_text(json.dumps(found))
    capsys.readouterr()
    assert serving.main(["--out", str(tmp_path), "--merge", *map(str, files)]) == 0
    rows = shown(json.loads(capsys.readouterr().out)).splitlines()
    assert rows[2:] == [f"| 2 turns | {count} | ours | 2.00 (4 rounds) | 2.0 / 2.0 | 2.0 / 2.0 |" for count in (1, 8)]


def test_other_texts_and_requests_that_fail_are_red(tmp_path: Path) -> None:
    def ask(router: int, given: argparse.Namespace, in_flight: int, seed: int) -> dict[str, Any]:
        if router == serving.FIRST_ROUTER and in_flight == 8 and seed > 2000:
            return report(given, completed=5)
        texts = ["w1 w3"] * 6 if router == serving.FIRST_ROUTER else ["w1 w2"] * 6
        return report(given, generated_texts=texts)

    found = run(tmp_path, ask, "--turns", "2", "--pairs", "ours,nixl")
    assert found["red"] == ["ours, 8 in flight: 5 requests"] * 2 + ["ours: 0 of 12 texts"]


def test_a_run_ends_within_its_limit(tmp_path: Path) -> None:
    """After one round that counts, at least."""
    found = run(tmp_path, lambda router, given, in_flight, seed: report(given), "--limit-s", "0", "--pairs", "ours")
    assert found["ok"]
    assert found["rounds"]["ours"]["8"]["median_ttft_ms"] == [2.0]


def test_servers_of_ours_that_end_are_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "command", lambda spec, cpu: [sys.executable, "-c", "raise SystemExit('no GPU')"])
    found = run(tmp_path, None)
    assert not found["ok"]
    assert "no GPU" in found["red"][0]


def test_servers_and_their_caches(tmp_path: Path) -> None:
    """In a conversation all have a radix cache, but for decode of one pair."""
    given = arguments(["--model", str(tmp_path), "--out", str(tmp_path), "--pairs", "ours,whole", "--turns", "2"])
    made = serving.specs(given, 1)
    held = {name: [one.config["args"].get("disaggregation_decode_enable_radix_cache") for one in both]
            for name, both in made.items()}  # fmt: skip
    assert held == {"ours": [None, True], "whole": [None, False]}
    assert {one.config["args"]["disable_radix_cache"] for both in made.values() for one in both} == {False}
    plain = serving.specs(arguments(["--out", str(tmp_path), "--pairs", "ours"]), 1)["ours"]
    assert plain[0].config["args"]["disable_radix_cache"]
    assert words({"page_size": 4, "sizes": [1, 2], "yes": True, "no": False}) == [
        "--page-size", "4", "--sizes", "1", "2", "--yes",
    ]  # fmt: skip


def test_a_text_of_so_many_words_has_so_many_tokens(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 50}))
    write_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode(tokenizer.decode([7, 3, 49])) == [7, 3, 49]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "w1 w2"}], tokenize=False)
    assert tokenizer.encode(text) == [1, 2]
