"""The benchmark of engines on GPUs: what it starts, whose turn it is, what is red, and its figures."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines_gpu import __main__ as cli
from benchmarks.engines_gpu import engines, measure, sglang, sglang_tables, slow_wire
from benchmarks.engines_gpu.cases import (
    BLOCKS,
    CACHE_TOKENS,
    LENGTHS,
    LOAD_TOKENS,
    LOADS,
    PAIRS,
    PEERS,
    SHARED,
    TOPOLOGIES,
    Mode,
    modes_of,
    pairs_of,
    places,
    specs,
)
from benchmarks.engines_gpu.engines import Live
from benchmarks.engines_gpu.figures import quantile, ratio
from benchmarks.engines_gpu.measure import turns
from benchmarks.engines_gpu.plot import plot
from benchmarks.engines_gpu.tables import headline, merged, whole
from disagg_kv.transports import transport
from tests.support import fake_engine
from tests.support.pages import ROOT

FAKE = (sys.executable, str(ROOT / "tests" / "support" / "fake_engine.py"))
TWO = cli.Gpus(("GPU of a test",) * 2, "driver 1")


def arguments(out: Path, *more: str) -> argparse.Namespace:
    common = ("--out", str(out), "--limit-s", "240", "--reps", "3", "--rounds", "2", "--commit", "f" * 40)
    return cli.arguments(["run", "--topology", "1to1", "--block", "64", *common, *more])


def run(out: Path, *more: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the document of a run with engines that compute nothing."""
    given = arguments(out, *more)
    code = cli.measure(given, TWO, FAKE)
    document: dict[str, Any] = json.loads((out / f"engines_{given.topology}_{given.block}.json").read_text())
    return code, document


@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_each_rank_has_a_gpu_and_some_bytes_cross_between_gpus(topology: str, gpus: int) -> None:
    prefill, decode = TOPOLOGIES[topology]
    if prefill + decode > 3 and gpus == 2:
        with pytest.raises(ValueError, match=f"{topology} needs 4 GPUs, and there are 2"):
            places(topology, gpus)
        return
    of_prefill, of_decode = places(topology, gpus)
    assert (len(set(of_prefill)), len(set(of_decode))) == (prefill, decode)
    assert set(of_prefill) | set(of_decode) <= set(range(gpus))
    assert set(of_prefill) != set(of_decode)
    assert gpus < prefill + decode or not set(of_prefill) & set(of_decode)


def test_the_packed_layout_runs_only_between_equal_sizes_and_another_tree_only_if_there_is_one(tmp_path: Path) -> None:
    assert [pair.name for pair in pairs_of("1to1")] == ["ours", "nixl", "push", "nixl-packed", "push-packed"]
    assert [pair.name for pair in pairs_of("2to1", other=tmp_path)] == ["ours", "nixl", "push", "other"]
    with pytest.raises(ValueError, match="1to2 has no pairs push-packed: there are ours, nixl, push, other"):
        pairs_of("1to2", ["ours", "push-packed"])
    for names, other in ((["other"], None), (["ours"], tmp_path)):
        with pytest.raises(ValueError, match="go together"):
            pairs_of("1to1", names, other)


def test_instances_share_no_port_and_no_id_and_the_cache_is_divided_among_ranks(tmp_path: Path) -> None:
    pairs = pairs_of("2to1", other=tmp_path)
    made = specs(pairs, "2to1", 16, 2, Path("model"))
    every = [one for both in made.values() for one in both]
    assert len({one.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for one in every}) == len(every)
    assert len({one.config["kv"]["engine_id"] for one in every}) == len(every)
    prefill, decode = made["ours"]
    assert (prefill.env["CUDA_VISIBLE_DEVICES"], decode.env["CUDA_VISIBLE_DEVICES"]) == ("0,1", "1")
    assert 2 * prefill.config["args"]["kv_cache_memory_bytes"] == decode.config["args"]["kv_cache_memory_bytes"]
    assert prefill.config["args"]["block_size"] == 16
    assert made["other"][0].env["PYTHONPATH"].split(":")[0] == str(tmp_path)
    assert prefill.env["PYTHONPATH"].split(":")[0] == str(ROOT / "src")
    packed = specs(pairs_of("1to1"), "1to1", 16, 2, Path("model"))["push-packed"]
    assert {one.env["VLLM_KV_CACHE_LAYOUT"] for one in packed} == {"BHLNC"}


def test_a_cache_holds_all_prompts_that_are_in_flight() -> None:
    blocks = -(-(LOAD_TOKENS + measure.LOAD_NEW) // max(BLOCKS)) * max(BLOCKS)
    assert max(LOADS) * blocks < CACHE_TOKENS


def test_peers_are_modes_that_exist() -> None:
    names = {mode.name for mode in modes_of([*PAIRS.values(), *sglang.PAIRS.values()])}
    assert set(PEERS) | {peer for peers in PEERS.values() for peer in peers} <= names


def test_every_mode_has_every_place_in_a_turn_equally_often() -> None:
    modes = modes_of(pairs_of("1to1"))
    places_of = Counter((mode, place) for n in range(2 * len(modes)) for place, mode in enumerate(turns(modes, n)))
    assert set(places_of.values()) == {2}


@pytest.mark.parametrize("name", ["ours", "push"])
def test_asked_at_once_decode_is_asked_before_prefill_has_answered(name: str) -> None:
    """And after prefill, only then."""
    asked: list[str] = []

    class Stub:
        def __init__(self, role: str, waits: bool = False) -> None:
            self.role, self.other = role, asyncio.Event()
            self.waits = waits
            connector = "DisaggKVConnector" if name == "ours" else "NixlPushConnector"
            self.config = {"kv": {"kv_role": role, "kv_connector": connector}}

        async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
            asked.append(self.role)
            if self.waits:
                await asyncio.wait_for(self.other.wait(), 10)
            found = fake_engine.answer(self.config, dict(request), "")
            assert "error" not in found
            return found

    class Noticed(Stub):
        async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
            prefill.other.set()
            return await super().ask(request)

    async def both() -> None:
        live = Live(PAIRS[name], prefill, decode)  # type: ignore[arg-type]
        await live.ask(Mode(name, "after prefill"), 1, 10, 4)
        assert asked == ["kv_producer", "kv_consumer"]
        assert prefill.other.is_set()
        prefill.waits = True
        prefill.other.clear()
        sample = await live.ask(Mode(name, "at once"), 1, 10, 4)
        assert sample.ttft >= 0
        assert sorted(asked[2:]) == ["kv_consumer", "kv_producer"]

    prefill, decode = Stub("kv_producer"), Noticed("kv_consumer")
    asyncio.run(both())


def test_a_ratio_is_that_of_pairs_and_its_interval_is_the_same_each_time() -> None:
    slow = [1.0, 10.0, 2.0, 4.0]
    found = ratio([one / 2 for one in slow], slow)
    assert (found.median, found.low, found.high) == (0.5, 0.5, 0.5)
    spread = ratio([1.0, 2.0, 3.0, 4.0, 5.0, 100.0], [1.0] * 7)
    assert spread.low < spread.median < spread.high
    assert spread == ratio([1.0, 2.0, 3.0, 4.0, 5.0, 100.0], [1.0] * 7)
    assert str(found) == "0.50 (0.50 to 0.50)"
    assert quantile([1.0, 2.0], 0.5) == 1.5
    with pytest.raises(ValueError, match="no repetition"):
        ratio([], [1.0])


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    """A run of all pairs."""
    return run(tmp_path_factory.mktemp("complete"))


def test_a_run_gives_all_modes_the_same_prompts_in_turn_and_ends_well(complete: tuple[int, dict[str, Any]]) -> None:
    code, document = complete
    assert (code, document["ok"], document["red"]) == (0, True, [])
    assert document["oracle"] == "nixl, after prefill"
    names = {mode.name for mode in modes_of(pairs_of("1to1"))}
    assert {one["mode"] for one in document["singles"]} == names == {one["mode"] for one in document["loads"]}
    for one in document["singles"]:
        assert one["samples"] == one["equal"] == len(one["gap_ms"]) == len(one["ttft_ms"]) == len(one["itl_ms"]) == 3
    for one in document["loads"]:
        assert len(one["requests_per_s"]) == len(one["gap_ms"]) == 2
        assert one["compared"] == one["equal"] == one["first_equal"] == 2 * len(one["gap_ms"][0])
    assert document["gpus"] == list(TWO.names)
    assert document["commit"] == "f" * 40
    assert set(document["ended_s"]) == {"start", "warm-up", "singles", "loads", "all"}
    assert "| ours, at once / push, at once |" in whole(document)
    assert "| TP 1->1, blocks of 64 |" in headline(document)


def test_the_plot_shows_every_mode_and_no_words_overlap(complete: tuple[int, dict[str, Any]]) -> None:
    document = json.loads(json.dumps(complete[1]))
    for one in document["singles"]:
        one["gap_ms"] = [one["tokens"] / 100 + len(one["mode"]), one["tokens"] / 80, one["tokens"] / 60]
    document = merged([document, {**document, "block": 16}, {**document, "block": 128}])
    assert [one["block"] for one in document["runs"]] == [16, 64, 128]
    picture = plot(document, "1to1")
    assert list(picture.clashes()) == []
    assert all(f">{mode.name}<" in picture.svg() for mode in modes_of(pairs_of("1to1")))
    with pytest.raises(ValueError, match="no run has the topology 2to1"):
        plot(document, "2to1")


def test_commands_print_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, document = run(tmp_path, "--pairs", "ours,nixl")
    file, svg = tmp_path / "engines_1to1_64.json", tmp_path / "plot.svg"
    assert whole(document) in capsys.readouterr().out
    assert cli.main(["table", str(file)]) == 0
    assert capsys.readouterr().out.strip() == whole(document)
    assert cli.main(["merge", str(file)]) == 0
    assert json.loads(capsys.readouterr().out) == merged([document])
    assert cli.main(["plot", str(file), str(svg)]) == 0
    assert svg.read_text() == plot(document, "1to1").svg()


@pytest.mark.parametrize(
    ("fault", "reason", "still"),
    [
        ("push-decode=wrong", "push, at once, 512 tokens: 0 of 3 answers have the tokens of nixl, after prefill", True),
        ("push-decode=error", "push, after prefill, 512 tokens: push-decode: as asked for", False),
        ("push-prefill=end", "push has not started: push-prefill: the process has ended; RuntimeError: no such", False),
    ],
)
def test_a_mode_with_wrong_tokens_or_failed_requests_is_red_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str, still: bool
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", fault)
    code, document = run(tmp_path, "--pairs", "ours,nixl,push")
    assert code == 1
    assert any(why.startswith(reason) for why in document["red"]), document["red"]
    assert all(why.startswith("push") for why in document["red"])
    modes = Counter(one["mode"] for one in document["singles"])
    assert (modes["ours, at once"], modes["nixl, after prefill"]) == (3, 3)
    assert bool(modes["push, at once"]) is still
    with pytest.raises(ValueError, match="red"):
        merged([document])


def test_without_any_instance_a_run_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ENGINE", "nixl-decode=end")
    code, document = run(tmp_path, "--pairs", "nixl")
    assert code == 1
    assert document["red"][0].startswith("nixl has not started")
    assert document["singles"] == []


def test_a_run_that_comes_to_its_limit_measures_less_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repetitions and rounds are whole: each has all modes."""
    clock = iter(range(10_000))
    monkeypatch.setattr(measure.Run, "now", property(lambda _: float(next(clock))))
    code, document = run(tmp_path, "--pairs", "ours,nixl", "--reps", "1000")
    assert code == 0
    lengths = Counter(one["samples"] for one in document["singles"])
    assert len(lengths) == 1
    assert next(iter(lengths)) < 1000


def test_an_instance_that_does_not_answer_fails_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "ASK_S", 0.2)
    monkeypatch.setenv("FAKE_ENGINE", "push-decode=silent")
    code, document = run(tmp_path, "--pairs", "nixl,push")
    assert code == 1
    assert document["red"][0].endswith("push-decode has not answered push 1 within 0 s")
    assert {one["mode"] for one in document["singles"]} == {"nixl, after prefill"}


@pytest.mark.parametrize("name", ["push", "ours"])
def test_a_peer_may_fail_once_before_anything_counts_and_ours_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", f"{name}-decode=once")
    code, document = run(tmp_path, "--pairs", "nixl,push,ours")
    assert code == (name == "ours")
    found = document["red"] if name == "ours" else document["retried"]
    assert [why.split(":")[0] for why in found] == [f"{name}, after prefill, 512 tokens"]
    assert ("First contact failed once" in whole(document)) is (name == "push")


def test_a_run_that_an_error_ends_leaves_a_red_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: measure.Run, __: float) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(measure.Run, "_loads", fail)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, "--pairs", "nixl")
    document = json.loads((tmp_path / "engines_1to1_64.json").read_text())
    assert document["red"] == ["the run did not come to its end"]
    assert document["singles"]


def test_a_run_that_hangs_ends_after_its_limit_with_a_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "GRACE_S", 0.0)
    monkeypatch.setenv("FAKE_ENGINE", "push-decode=silent")
    code, document = run(tmp_path, "--pairs", "push", "--limit-s", "3")
    assert code == 1
    assert document["red"] == ["the run was not over 0 s after its limit", "the run did not come to its end"]


def test_runs_of_other_hardware_are_not_merged_and_each_keeps_its_commit(tmp_path: Path) -> None:
    _, document = run(tmp_path, "--pairs", "ours,nixl")
    with pytest.raises(ValueError, match="differ in gpus"):
        merged([document, {**document, "gpus": ["another"]}])
    both = merged([document, {**document, "commit": "0" * 40}])
    assert [one["commit"] for one in both["runs"]] == ["f" * 40, "0" * 40]
    assert both["commit"] == "0" * 40


@pytest.mark.slow
def test_the_names_of_the_weights_are_those_of_a_llama(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors")
    import torch

    from benchmarks.engines_gpu.model import Shape, write

    write(tmp_path, Shape(layers=2, hidden=64, heads=2, kv_heads=1, intermediate=32, vocabulary=100))
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        shapes: dict[str, Sequence[int]] = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(tmp_path))
    assert {name: list(one.shape) for name, one in model.state_dict().items()} == {
        n: list(s) for n, s in shapes.items()
    }


def run_of_sglang(out: Path, topology: str = "2to1") -> tuple[int, dict[str, Any]]:
    """The exit code and the document of a run with engines that compute nothing."""
    given = arguments(out, "--engine", "sglang", "--topology", topology, "--block", "16")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(measure, "SLOW_S", 2.5 * fake_engine.LATER_S)
        code = cli.measure(given, TWO, FAKE)
    document: dict[str, Any] = json.loads((out / f"sglang_{topology}_16.json").read_text())
    return code, document


def test_sglangs_staging_buffer_is_a_peer_where_sizes_differ(tmp_path: Path) -> None:
    names = ["ours", "nixl", "nixl-staging", "mooncake", "mooncake-staging", "alone"]
    assert [pair.name for pair in sglang.pairs_of("1to2")] == names
    assert [pair.name for pair in sglang.pairs_of("1to1")] == ["ours", "nixl", "mooncake", "alone"]
    (other,) = sglang.pairs_of("1to1", ["other"], tmp_path)
    assert other.source == tmp_path
    with pytest.raises(ValueError, match="1to1 has no pairs nixl-staging"):
        sglang.pairs_of("1to1", ["nixl-staging"])
    with pytest.raises(ValueError, match="go together"):
        sglang.pairs_of("1to1", ["other"])


def test_pairs_of_sglang_over_a_slow_wire_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each instance has the options of its pair, and finds the transport by its name."""
    assert not {pair.name for pair in sglang.pairs_of("1to1")} & set(sglang.ASKED)
    names = [name for name in sglang.ASKED if name not in ("whole", "other")]
    made = sglang.specs(sglang.pairs_of("1to1", names), "1to1", 16, 2, Path("model"))
    options = {name: {spec.env["DISAGG_KV_SGLANG"] for spec in specs_of} for name, specs_of in made.items()}
    layers = {"strategy": "auto+layer_pipelined"}
    assert {name: [json.loads(one) for one in several] for name, several in options.items()} == {
        "layered": [layers],
        "wire": [{"transport": "wire"}],
        "wire-layered": [{"transport": "wire", **layers}],
        "tcp": [{"transport": "nixl"}],
        "tcp-layered": [{"transport": "nixl", **layers}],
    }
    for path in made["wire"][0].env["PYTHONPATH"].split(os.pathsep):
        monkeypatch.syspath_prepend(path)
    found = transport("wire")
    assert found.caps.bytes_per_s == slow_wire.BYTES_PER_S
    found.close(0.0)


def test_ranks_may_share_a_gpu() -> None:
    """Their number is that of the topology."""
    made = sglang.specs(sglang.pairs_of("4to1"), "4to1", 16, 1, Path("model"), share=True)
    for prefill, *decode in made.values():
        assert prefill.config["args"]["tp_size"] == 4
        assert [one.config["args"]["tp_size"] for one in decode] == [1] * len(decode)
        assert {one.env["CUDA_VISIBLE_DEVICES"] for one in (prefill, *decode)} == {"0"}
        assert prefill.env[SHARED] == "1"
    plain = sglang.specs(sglang.pairs_of("1to1"), "1to1", 16, 1, Path("model"))
    assert SHARED not in plain["ours"][0].env


def test_lengths_may_be_given(tmp_path: Path) -> None:
    assert arguments(tmp_path, "--lengths", "1024,4096").lengths == (1024, 4096)
    assert tuple(arguments(tmp_path).lengths) == LENGTHS


def test_instances_of_sglang_share_no_port_and_both_of_a_pair_know_the_bootstrap_server() -> None:
    made = sglang.specs(sglang.pairs_of("2to1"), "2to1", 16, 2, Path("model"), {"dtype": "float32"})
    ports = [spec.config["args"]["port"] for specs_of in made.values() for spec in specs_of]
    assert len(set(ports)) == len(ports) == 11
    for name, specs_of in made.items():
        assert {spec.config["args"]["dtype"] for spec in specs_of} == {"float32"}
        modes = [spec.config["args"].get("disaggregation_mode") for spec in specs_of]
        assert modes == ([None] if name == sglang.ALONE else ["prefill", "decode"])
        assert len({spec.config["bootstrap_port"] for spec in specs_of}) == 1
        staged = {"SGLANG_DISAGG_STAGING_BUFFER" in spec.env for spec in specs_of}
        assert staged == {name.endswith("staging")}


def test_the_table_of_sglang_names_the_best_backend(tmp_path: Path) -> None:
    _, document = run_of_sglang(tmp_path)
    shown = sglang_tables.headline(document)
    assert re.search(r"TP 2->1, pages of 16 \| \d+\.\d / \d+\.\d \((nixl|mooncake)(-staging)?\): \*\*[01]\.\d\d", shown)
    rows = [run for run in document["singles"] if run["mode"] != "mooncake-staging, at once"]
    for one in rows:
        one["ttft_ms"] = [5.0 if one["mode"].startswith("mooncake") else 10.0] * 3
    left = sglang_tables.headline({**document, "singles": rows})
    assert "10.0 / 5.0 (mooncake): **2.00 (2.00 to 2.00)**" in left
    assert "alone" not in left


def test_a_gap_of_sglang_is_what_the_first_token_takes_longer_than_on_one_server(tmp_path: Path) -> None:
    code, document = run_of_sglang(tmp_path)
    assert code == 0, document["red"]
    assert document["oracle"] == "nixl, at once"
    assert not document["dropped"]
    for one in document["singles"]:
        late = 0 if one["mode"] == "alone, at once" else fake_engine.LATER_S * 1e3
        assert one["equal"] == one["samples"] == 3
        assert one["gap_ms"] == pytest.approx([late] * 3, abs=2e3)


@pytest.mark.parametrize("topology", ["1to1", "2to1"])
def test_all_tokens_of_one_server_are_compared_where_decode_has_its_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topology: str
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", "None-None=wrong")
    _, document = run_of_sglang(tmp_path, topology)
    assert {one["equal"] for one in document["singles"] if one["mode"] == "alone, at once"} == {0}
    red = [why for why in document["red"] if why.startswith("alone, at once, 512 tokens")]
    assert len(red) == (1 if topology == "1to1" else 0)


@pytest.mark.parametrize("fault", ["error", "end"])
def test_a_backend_of_sglang_that_fails_is_left_out_and_ours_makes_the_run_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", f"mooncake-decode={fault}")
    code, document = run_of_sglang(tmp_path, "1to1")
    assert code == 0
    assert "mooncake" in document["dropped"][0]
    assert "mooncake, at once" not in {one["mode"] for one in document["singles"]}
    monkeypatch.setenv("FAKE_ENGINE", "nixl-decode=slow")
    code, document = run_of_sglang(tmp_path, "1to1")
    assert (code, document["oracle"]) == (0, "ours, at once")
    assert document["dropped"] == [f"nixl, at once, 512 tokens: {3 * fake_engine.LATER_S:.1f} s"]
    monkeypatch.setenv("FAKE_ENGINE", f"disagg_kv-decode={fault}")
    code, document = run_of_sglang(tmp_path, "1to1")
    assert code == 1
    assert "ours" in document["red"][0]
