"""``plan`` says what each path would post, rank pair by rank pair."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from attrs import define

from disagg_kv.cli.main import run
from disagg_kv.transports import registry


@define
class Cli:
    """Runs ``plan`` and reads its document."""

    capsys: pytest.CaptureFixture[str]

    def plan(self, line: str, code: int = 0) -> dict[str, object]:
        assert run(["plan", *line.split(), "--json"]) == code
        found: dict[str, object] = json.loads(self.capsys.readouterr().out)
        return found


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


BIG = "--layers 64 --kv-heads 8 --head-dim 128 --dtype bfloat16 --tokens 8192 --page-size 64"
BIG_BYTES = 64 * 2 * 8 * 128 * 2 * 8192


def numbers(found: dict[str, object], path: str) -> tuple[int, int]:
    """(descriptors, bytes) of one path that can."""
    paths = found["paths"]
    assert isinstance(paths, dict)
    return paths[path]["descriptors"], paths[path]["bytes"]


def test_staged_posts_at_least_1000_times_fewer_writes_than_slice(cli: Cli) -> None:
    """8,192 tokens, 64 layers, TP 4 -> 1."""
    found = cli.plan(f"{BIG} --prefill-tp 4 --decode-tp 1")
    staged, slices = numbers(found, "staged"), numbers(found, "slice")
    assert slices == (64 * 2 * 8192 * 4, BIG_BYTES)
    assert staged[1] == BIG_BYTES
    assert staged[0] * 1000 <= slices[0]


def test_a_path_that_cannot_says_why_and_auto_names_its_choice(cli: Cli) -> None:
    found = cli.plan(f"{BIG} --prefill-tp 4 --decode-tp 1")
    paths, auto = found["paths"], found["auto"]
    assert isinstance(paths, dict)
    assert isinstance(auto, dict)
    assert "2 units" in paths["direct"]["refused"]
    assert (paths["direct"]["descriptors"], paths["direct"]["bytes"]) == (None, None)
    assert auto["path"] == "mapped"
    assert "staged would take" in auto["reason"]
    far = cli.plan(f"{BIG} --prefill-tp 4 --decode-tp 1 --decode-hosts b")["auto"]
    assert isinstance(far, dict)
    assert far["path"] == "staged"
    assert "mapped cannot: prefill rank 0: transport 'nixl' does not map" in far["reason"]


def test_equal_layouts_may_go_direct(cli: Cli) -> None:
    found = cli.plan(f"{BIG} --prefill-tp 2 --decode-tp 2")
    assert numbers(found, "direct") == (64 * 2 * 128 * 2, BIG_BYTES)


def test_replicated_heads_are_planned_once(cli: Cli) -> None:
    """TP 8 over 2 heads holds each head four times, and every byte is sent once."""
    found = cli.plan("--layers 8 --kv-heads 2 --head-dim 64 --tokens 1024 --prefill-tp 8 --decode-tp 1")
    pairs = found["pairs"]
    assert isinstance(pairs, list)
    assert sum(pair["bytes"] for pair in pairs) == found["bytes"] == 8 * 2 * 2 * 64 * 2 * 1024
    assert {pair["prefill_rank"] for pair in pairs} == set(range(8))


def test_pipeline_stages_latents_page_sizes_and_orders_are_options(cli: Cli) -> None:
    latent = cli.plan("--layers 6 --mla-latent 576 --tokens 100 --prefill-tp 2 --prefill-pp 2 --decode-tp 1")
    assert latent["bytes"] == 6 * 576 * 2 * 100
    stages = cli.plan("--layers 4 --kv-heads 2 --head-dim 8 --tokens 10 --prefill-pp 2 --decode-pp 4")
    pairs = stages["pairs"]
    assert isinstance(pairs, list)
    assert [(p["prefill_rank"], p["decode_rank"]) for p in pairs] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    mixed = cli.plan(
        "--layers 1 --kv-heads 2 --head-dim 8 --v-head-dim 4 --dtype float32 --tokens 64 --page-size 16"
        " --decode-page-size 32 --order NHD --decode-order HND"
    )
    assert mixed["bytes"] == 2 * (8 + 4) * 4 * 64


def test_slots_bound_the_segments(cli: Cli) -> None:
    """A smaller slot means more, smaller writes of the same bytes."""
    wide = numbers(cli.plan(f"{BIG} --prefill-tp 4 --slot-mib 64"), "staged")
    narrow = numbers(cli.plan(f"{BIG} --prefill-tp 4 --slot-mib 1 --ring-mib 64"), "staged")
    assert narrow[0] > wide[0]
    assert narrow[1] == wide[1] == BIG_BYTES


@pytest.mark.parametrize(
    ("line", "code", "error", "words"),
    [
        ("--tokens 8", 2, "ConfigurationError", "--layers is needed, or --config"),
        ("--config none.json --layers 2 --tokens 8", 2, "ConfigurationError", "--config replaces --layers"),
        ("--layers 2 --tokens 8", 2, "ConfigurationError", "--kv-heads"),
        ("--layers 2 --tokens 8 --mla-latent 64 --kv-heads 2", 2, "ConfigurationError", "--mla-latent"),
        ("--layers 2 --tokens 8 --kv-heads 7 --head-dim 8 --prefill-tp 3", 2, "GeometryError", "7 units"),
        ("--layers 2 --tokens 8 --kv-heads 2 --head-dim 8 --dtype int3", 2, "GeometryError", "bfloat16"),
        ("--layers 2 --tokens 8 --kv-heads 2 --head-dim 8 --prefill-pp 3", 2, "GeometryError", "3 pipeline stages"),
        ("--layers 2 --tokens 8 --kv-heads 2 --head-dim 8 --order DNH", 2, "ConfigurationError", "HND"),
        ("--layers 2 --tokens 8 --kv-heads 8 --head-dim 999999 --slot-mib 1", 1, "OversizeError", "1048576"),
    ],
)
def test_what_cannot_be_planned_is_an_error_that_says_why(
    cli: Cli, line: str, code: int, error: str, words: str
) -> None:
    found = cli.plan(line, code)
    assert found["ok"] is False
    said = found["error"]
    assert isinstance(said, dict)
    assert said["type"] == error
    assert words in said["message"]


def test_people_get_tables_and_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *BIG.split(), "--prefill-tp", "8", "--decode-tp", "4"]) == 0
    out = capsys.readouterr().out
    assert "What each pair of ranks takes" in out
    assert "mapped takes" in out


def test_many_pairs_are_cut_short_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --layers 8 --kv-heads 32 --head-dim 64 --tokens 64 --prefill-tp 32 --decode-tp 16"
    assert run(line.split()) == 0
    assert "and 16 more pairs: --json" in capsys.readouterr().out


def test_layer_groups_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    """What the schedule would do with the request; with times of the user, by its cost model."""
    model = ["plan", "--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--tokens", "8192", "--json"]

    def planned(*more: str) -> dict[str, object]:
        assert run([*model, *more]) == 0
        found: dict[str, object] = json.loads(capsys.readouterr().out)["layer_pipelined"]
        return found

    assert planned()["reason"] == "the adaptive formula gives 5.0 groups for 8192 tokens per room"
    measured = planned("--layer-us", "8000", "--wire-gb-s", "4", "--group-us", "100")
    assert "256.00 ms of computing and 268.44 ms of wire take" in str(measured["reason"])
    assert planned("--layer-group", "8", "--prefill-pp", "2") == {
        "groups": 2,
        "layers": 8,
        "reason": "groups of 8 layers were asked for",
    }
    assert run(model[:-1]) == 0
    assert "layer_pipelined: 6 groups of 6 layers" in " ".join(capsys.readouterr().out.split())


TIME = re.compile(r"\d\s?(?:[mun]?s|seconds)\b")


def test_no_time_is_shown_that_nobody_measured_or_stated(
    cli: Cli, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Those of the wire and of copies are of the rank that moves most, here decode's."""
    line = f"{BIG} --prefill-tp 4 --decode-tp 1"
    assert run(["plan", *line.split()]) == 0
    assert TIME.search(capsys.readouterr().out) is None
    assert cli.plan(line)["times"] is None
    assert cli.plan(f"{line} --wire-gb-s 50 --copy-gb-s 400")["times"] == {
        "busiest_rank_bytes": BIG_BYTES,
        "wire_s": pytest.approx(BIG_BYTES / 50e9),
        "staged_copies_s": pytest.approx(2 * BIG_BYTES / 400e9),
        "wire_gb_s": 50.0,
        "copy_gb_s": 400.0,
        "source": "stated",
    }
    assert run(["plan", *line.split(), "--wire-gb-s", "50"]) == 0
    said = capsys.readouterr().out
    assert "times (stated): the busiest rank's 2,147,483,648 bytes take 42.9 ms on the wire at 50 GB/s" in said
    assert "copies" not in said
    assert run(["plan", *line.split(), "--copy-gb-s", "400"]) == 0
    assert "take 10.7 ms of copies if staged at 400 GB/s" in capsys.readouterr().out
    for given in ("--layer-us 8000 --group-us 100", "--layer-us 8000 --wire-gb-s 4"):
        assert "--layer-us needs --group-us, and --wire-gb-s or --probe" in str(cli.plan(f"{line} {given}", 2))


def test_rates_come_from_a_probe_of_the_transport_that_all_pairs_take(cli: Cli, tmp_path: Path) -> None:
    probe = tmp_path / "probe.json"
    lanes = [
        {"transport": "cuda_ipc", "gb_s": 380.0},
        {"transport": "nixl", "gb_s": 40.0},
        {"transport": "mooncake", "gb_s": None},
    ]
    probe.write_text(json.dumps({"transports": lanes, "copy_gb_s": 2000}))
    line = f"{BIG} --prefill-tp 2 --decode-tp 2 --probe {probe}"
    for hosts, name, rate in (("a", "cuda_ipc", 380.0), ("b", "nixl", 40.0)):
        times = cli.plan(f"{line} --decode-hosts {hosts}")["times"]
        assert isinstance(times, dict)
        assert (times["wire_gb_s"], times["copy_gb_s"], times["source"]) == (rate, 2000.0, f"measured, {name}")
    assert "measured cuda_ipc, nixl; the pairs of ranks take cuda_ipc, nixl" in str(
        cli.plan(f"{line} --decode-hosts a,b", 2)
    )
    assert "the pairs of ranks take mooncake" in str(cli.plan(f"{line} --transport mooncake", 2))
    assert "--probe replaces" in str(cli.plan(f"{line} --wire-gb-s 4", 2))
    for text in ("[]", "{", '{"transports": [], "copy_gb_s": "fast"}'):
        probe.write_text(text)
        assert "not what 'disagg-kv doctor --between --json' prints" in str(cli.plan(line, 2))


def test_a_models_config_takes_the_place_of_its_options(cli: Cli, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({
            "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192,
            "torch_dtype": "bfloat16",
        })
    )  # fmt: skip
    same = "--page-size 64 --tokens 8192 --prefill-tp 4"
    assert cli.plan(f"--config {config} {same}") == cli.plan(f"{BIG} {same}")


def test_the_sizes_of_staging_memory_are_those_of_the_device(cli: Cli) -> None:
    """16 MiB slots on CPUs, 128 on GPUs."""
    line = f"{BIG} --prefill-tp 4"
    on_gpu, on_cpu = (numbers(cli.plan(f"{line} {more}"), "staged") for more in ("", "--device cpu"))
    assert on_gpu == numbers(cli.plan(f"{line} --slot-mib 128 --ring-mib 1024"), "staged")
    assert on_cpu == numbers(cli.plan(f"{line} --slot-mib 16 --ring-mib 256"), "staged")
    assert on_cpu[0] > on_gpu[0]
    assert numbers(cli.plan(f"{line} --transport shm"), "staged") == on_cpu


@pytest.mark.parametrize("more", ["", "--decode-hosts b", "--device cpu"])
def test_numbers_are_whole_at_80_columns(more: str, cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a large model and a long request."""
    line = "--layers 128 --kv-heads 128 --head-dim 256 --tokens 1000000 --page-size 16 --prefill-tp 8 --decode-tp 4"
    found = cli.plan(f"{line} {more}")
    assert run(["plan", *line.split(), *more.split()]) == 0
    shown = capsys.readouterr().out
    counted = found["pairs"]
    assert isinstance(counted, list)
    assert len(counted) == 8
    for pair, one in zip(counted, pairs(found), strict=True):
        row = f"{pair['bytes']:,} {pair['segments']} {pair['descriptors'][one['path']]:,} {one['path']}".split()
        (line,) = (
            line
            for line in shown.splitlines()
            if line.split()[:2] == [str(n) for n in (one["prefill_rank"], one["decode_rank"])]
        )
        assert line.split()[2:6] == row
        assert len(line) <= 80


def test_a_conversion_is_shown_halves_the_bytes_and_needs_a_kernel(cli: Cli) -> None:
    found = cli.plan(f"{BIG} --prefill-tp 4 --decode-tp 1 --decode-dtype float8_e4m3fn --maps")
    assert found["conversion"] == "bfloat16 to float8_e4m3fn"
    assert found["bytes"] == BIG_BYTES // 2
    paths = found["paths"]
    assert isinstance(paths, dict)
    assert all("no kernel is on this path" in paths[path]["refused"] for path in ("direct", "slice"))
    assert numbers(found, "mapped")[1] == BIG_BYTES // 2
    scaled = cli.plan(f"{BIG} --prefill-tp 4 --decode-tp 1 --decode-dtype float8_e4m3fn --decode-scales")
    assert scaled["bytes"] == BIG_BYTES // 2 + 64 * 2 * 8 * 4 * 8192
    assert cli.plan(BIG)["conversion"] is None


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--decode-dtype float16", "no conversion from bfloat16 to float16"),
        ("--decode-dtype float4", "unknown dtype"),
        ("--decode-scales", "needs --decode-dtype"),
        ("--decode-dtype float32 --decode-scales", "float32 has no scales"),
    ],
)
def test_a_conversion_that_there_is_not_is_an_error_that_says_why(cli: Cli, more: str, words: str) -> None:
    assert words in str(cli.plan(f"{BIG} {more}", 2))


def pairs(found: dict[str, object]) -> list[dict[str, Any]]:
    """What each pair of ranks takes."""
    chosen = found["transports"]
    assert isinstance(chosen, list)
    return chosen


def test_each_pair_of_ranks_takes_the_first_transport_that_reaches_it(cli: Cli) -> None:
    """Two decode ranks, of which one is on prefill's host: it is mapped there, and staged on the other host."""
    found = cli.plan(f"{BIG} --prefill-tp 1 --decode-tp 2 --transport cuda_ipc+nixl --decode-hosts a,b")
    near, far = pairs(found)
    assert (near["prefill_rank"], near["decode_rank"], far["decode_rank"]) == (0, 0, 1)
    assert (near["transport"], near["transport_reason"], near["path"]) == ("cuda_ipc", "the first transport", "mapped")
    assert (far["transport"], far["path"]) == ("nixl", "staged")
    assert far["transport_reason"] == "not cuda_ipc: the ranks are on different hosts"
    assert "transport 'nixl' does not map memory of peers" in far["path_reason"]


@pytest.mark.parametrize(("maps", "path"), [("", "staged"), ("--maps", "mapped")])
def test_on_a_cpu_pages_are_written_to_only_if_the_transport_allocated_them(cli: Cli, maps: str, path: str) -> None:
    near, far = pairs(cli.plan(f"{BIG} --decode-tp 2 --transport shm+nixl {maps} --decode-hosts a,b"))
    assert [(one["transport"], one["path"]) for one in (near, far)] == [("shm", path), ("nixl", "staged")]
    assert ("its pool is not the transport's own memory" in near["path_reason"]) is not bool(maps)


@pytest.mark.parametrize("several", ["cuda_ipc+nixl", "nixl"])
def test_over_a_network_all_is_staged(cli: Cli, several: str) -> None:
    """Also between equal layouts, of either memory."""
    (one,) = pairs(cli.plan(f"{BIG} --transport {several} --decode-hosts b"))
    assert (one["transport"], one["path"]) == ("nixl", "staged")


def test_a_pair_that_no_transport_reaches_says_why(cli: Cli) -> None:
    """A transport of one host between two, one for another memory, and one of a single process."""
    (one,) = pairs(cli.plan(f"{BIG} --transport inproc+shm+cuda_ipc --decode-hosts b"))
    assert (one["transport"], one["path"]) == (None, None)
    assert one["transport_reason"] == (
        "not inproc: it moves memory of kind cpu; not shm: it moves memory of kind cpu; "
        "not cuda_ipc: the ranks are on different hosts"
    )
    (one,) = pairs(cli.plan(f"{BIG} --transport inproc+shm"))
    assert (one["transport"], one["transport_reason"]) == ("shm", "not inproc: it reaches only peers of its process")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--transport pigeon", "unknown transport 'pigeon'"),
        ("--transport shm --prefill-hosts a,b", "--prefill-hosts 'a,b': one host, or one for each of the 4 ranks"),
        ("--transport shm --decode-hosts a,", "--decode-hosts 'a,'"),
        ("--transport made", "known only once it is started"),
    ],
)
def test_transports_and_hosts_that_cannot_be_are_refused(
    cli: Cli, line: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_registered", {"made": lambda: None})
    assert why in str(cli.plan(f"{BIG} --prefill-tp 4 {line}", code=2))


def test_people_see_each_pair_with_its_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    """Of many pairs the first ones."""
    more = "--prefill-tp 8 --decode-tp 8 --decode-pp 4 --transport shm+nixl"
    assert run(["plan", *BIG.split(), *more.split()]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "What each pair of ranks takes" in text
    assert "and 16 more pairs: --json" in text
    assert "auto" in text


def test_a_decode_rank_takes_one_path_for_all_that_send_to_it(cli: Cli) -> None:
    """As endpoints do: where one prefill rank cannot map its pool, no rank does."""
    two = cli.plan(f"{BIG} --prefill-tp 2 --decode-tp 1 --prefill-hosts a,b")
    assert [(one["transport"], one["path"]) for one in pairs(two)] == [("cuda_ipc", "staged"), ("nixl", "staged")]
    assert all("mapped cannot: prefill rank 1: transport 'nixl'" in one["path_reason"] for one in pairs(two))
    assert isinstance(two["auto"], dict)
    mixed = cli.plan(f"{BIG} --decode-tp 2 --decode-hosts a,b")
    assert mixed["auto"] is None
    assert [one["path"] for one in pairs(mixed)] == ["mapped", "staged"]
    lost = cli.plan(f"{BIG} --prefill-tp 2 --decode-tp 1 --prefill-hosts a,b --transport cuda_ipc")
    assert [one["path"] for one in pairs(lost)] == [None, None]
    assert {one["path_reason"] for one in pairs(lost)} == {"no transport reaches it from prefill rank 1"}


def test_auto_is_the_transport_of_the_device_and_a_network(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    """By the same table as for endpoints; both of plan's tables name the same path."""
    for device, near in (("cpu", "shm"), ("cuda", "cuda_ipc")):
        found = cli.plan(f"{BIG} --decode-tp 2 --decode-hosts a,b --device {device} --transport auto")
        assert [one["transport"] for one in pairs(found)] == [near, "nixl"]
    assert run(["plan", *BIG.split(), "--decode-tp", "2", "--decode-hosts", "a,b"]) == 0
    marked = [line for line in capsys.readouterr().out.splitlines() if "auto, for some" in line]
    assert [line.split()[0] for line in marked] == ["staged", "mapped"]
