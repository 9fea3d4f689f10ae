"""``plan`` says what each path would post, rank pair by rank pair."""

from __future__ import annotations

import json
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
    assert auto["path"] == "staged"
    assert "slice would take" in auto["reason"]


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
    assert "Rank by rank" in out
    assert "auto: staged takes" in out


def test_many_pairs_are_cut_short_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --layers 8 --kv-heads 32 --head-dim 64 --tokens 64 --prefill-tp 32 --decode-tp 16"
    assert run(line.split()) == 0
    assert "and 16 more pairs: --json" in capsys.readouterr().out


def test_layer_groups_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    """What the schedule would do with the request; with a compute time by its cost model."""
    model = ["plan", "--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--tokens", "8192", "--json"]

    def planned(*more: str) -> dict[str, object]:
        assert run([*model, *more]) == 0
        found: dict[str, object] = json.loads(capsys.readouterr().out)["layer_pipelined"]
        return found

    assert planned()["reason"] == "the adaptive formula gives 5.0 groups for 8192 tokens per room"
    measured = planned("--layer-us", "8000")
    assert "256.00 ms of computing and 268.44 ms of wire take" in str(measured["reason"])
    assert planned("--layer-group", "8", "--prefill-pp", "2") == {
        "groups": 2,
        "layers": 8,
        "reason": "groups of 8 layers were asked for",
    }
    assert run(model[:-1]) == 0
    assert "layer_pipelined: 6 groups of 6 layers" in " ".join(capsys.readouterr().out.split())


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


def auto(found: dict[str, Any]) -> tuple[str, str]:
    """The path that ``auto`` takes, and why."""
    return found["auto"]["path"], found["auto"]["reason"]


def pairs(found: dict[str, object]) -> list[dict[str, Any]]:
    """What each pair of ranks takes."""
    assert found["auto"] is None
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
        ("--transport auto", "name them in its order, cuda_ipc+nixl for GPUs or shm+nixl for CPUs"),
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
    assert "auto:" not in text
