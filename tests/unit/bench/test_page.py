"""The pages show the committed results, all of them, and nothing else; and those are within their limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.catalogue import CATALOGUE
from benchmarks.gpu_tables import gpu_peer
from benchmarks.page import BY_FILE, MARK, PAGES, RESULTS, VIEWS, by_file, filled, loaded, shown
from tests.support.pages import ROOT, name_of


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_pages_show_what_was_measured(page: Path) -> None:
    assert filled(page.read_text()) == page.read_text(), "run python -m benchmarks.page"


def test_the_page_of_all_results_is_made_of_them_and_has_a_section_for_each_file() -> None:
    text = by_file()
    assert BY_FILE.read_text() == text, "run python -m benchmarks.page"
    named = [name for group in CATALOGUE.values() for name in group]
    assert sorted(named) == sorted(path.name for path in RESULTS.glob("*.json"))
    headings = [line for line in text.splitlines() if line.startswith("### ")]
    assert len(set(headings)) == len(headings) == len(named), "two sections of one name"


def test_no_table_of_the_page_of_all_results_is_longer_than_a_reader_looks_at() -> None:
    parts = BY_FILE.read_text().split("\n\n")
    assert max(part.count("\n") for part in parts if part.startswith("|")) <= 40


def test_everything_that_can_be_shown_is_and_a_mark_that_names_nothing_is_noticed() -> None:
    marks = [m["view"] for page in PAGES for m in MARK.finditer(page.read_text())]
    assert sorted(marks) == sorted(VIEWS)
    assert sum(page.read_text().count("<!-- from ") for page in PAGES) == len(marks), "a mark without its end"
    with pytest.raises(KeyError, match="none"):
        filled("<!-- from none.json -->\n\nold\n\n<!-- end -->")
    with pytest.raises(KeyError, match="none"):
        loaded("none*.json")


def test_a_column_that_was_not_measured_is_left_out() -> None:
    """What older results do not have is not shown as if it were nothing."""
    found = json.loads((RESULTS / "h200_peer.json").read_text())
    for case in found["cases"]:
        case.pop("ours_prepared_us", None)
    assert "prepared" not in gpu_peer(found)
    found["cases"][1]["ours_prepared_us"] = 87.6
    head, _, gather, scatter = gpu_peer(found).splitlines()
    assert head.count("|") == gather.count("|") == scatter.count("|") == 6
    assert "| ours, launch of a prepared kernel, us |" in head
    assert "| 88 |" in scatter


def test_what_stands_between_marks_is_made_anew_and_nothing_else_is() -> None:
    page = "# Page\n\n<!-- from cpu_recovery.json -->\n\n{}\n\n<!-- end -->\n\nafter\n"
    recovery = shown("cpu_recovery.json")
    assert filled(page.format("old")) == page.format(recovery)
    assert "`benchmarks/results/cpu_recovery.json`" in recovery


@pytest.mark.parametrize("result", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_every_result_says_where_it_comes_from(result: Path) -> None:
    found = json.loads(result.read_text())
    where = found.get("machine") or found.get("hardware", {})
    assert found.get("gpu") or found.get("gpus") or (where["cpu"] and where["cores"])
    assert found.get("versions") or where["versions"]
    assert len(found.get("commit") or where["commit"]) == 40, "measure in a clean checkout"


def test_the_committed_transfer_was_measured_at_a_commit_with_right_bytes_and_within_the_limit() -> None:
    """The limit: staged is faster than one write per token and head slice."""
    found = json.loads((RESULTS / "cpu_transfer_shm.json").read_text())
    assert found["ok"] is True
    assert len(found["machine"]["commit"]) == 40, "measure in a clean checkout"
    staged, slices = (found["strategies"][name] for name in ("staged", "slice"))
    assert found["ratio_staged_over_slice"] == pytest.approx(staged["gb_per_s"] / slices["gb_per_s"])
    assert found["ratio_staged_over_slice"] > 1
    assert staged["descriptors"] * 1000 < slices["descriptors"]


@pytest.mark.parametrize(("name", "ratio"), [("nixl", 3), ("mooncake", 20)])
def test_staged_over_a_real_library_is_as_much_faster_as_it_has_to_be(name: str, ratio: float) -> None:
    """Over one write per token and head slice, in the same run."""
    found = json.loads((RESULTS / f"cpu_transfer_{name}.json").read_text())
    assert (found["ok"], len(found["machine"]["commit"])) == (True, 40)
    shape = found["shape"]
    assert (shape["prefill_tp"], shape["decode_tp"], shape["tokens"], shape["layers"]) == (4, 1, 1024, 32)
    assert (shape["kv_heads"], shape["head_dim"], shape["dtype"], shape["page_size"]) == (8, 128, "bfloat16", 64)
    assert shape["repeats"] >= 20
    assert found["ratio_staged_over_slice"] >= ratio


@pytest.mark.parametrize("name", ["nixl", "nixl_1to1", "mooncake"])
def test_the_wire_phase_of_staged_is_close_to_plain_writes(name: str) -> None:
    """85 % of what the transport itself can do."""
    found = json.loads((RESULTS / f"cpu_transfer_{name}.json").read_text())
    assert found["strategies"]["staged"]["share_of_ceiling"] >= 0.85


@pytest.mark.parametrize("name", ["nixl", "mooncake"])
def test_a_committed_small_write_costs_little_more_than_the_librarys_call(name: str) -> None:
    """80 us for 64 KiB."""
    found = json.loads((RESULTS / f"cpu_adapter_{name}.json").read_text())
    small, large = found["sizes"]
    assert (small["nbytes"], large["nbytes"]) == (64 << 10, 16 << 20)
    assert small["overhead_s"] <= 80e-6


def test_a_committed_grant_in_a_row_is_there_within_its_limit() -> None:
    """Half of the round trips from a request to its grant take less than 300 us."""
    found = json.loads((RESULTS / "cpu_grant.json").read_text())
    assert (found["ok"], found["in_a_row"]["pause_s"]) == (True, 0.0)
    assert found["repeats"] >= 1000
    assert found["in_a_row"]["grant"]["p50"] < 300e-6


def test_the_committed_worlds_broke_no_rule_and_reached_all_that_a_gate_reaches() -> None:
    """Every batch is a range of seeds of its own."""
    found = json.loads((RESULTS / "simulation.json").read_text())
    batches = found["batches"]
    assert (found["violations"], found["coverage_missing"]) == (0, [])
    assert sum(batch["seeds"] for batch in batches) == found["seeds"]
    ends = [batch["seed_from"] + batch["seeds"] for batch in batches]
    assert all(end <= batch["seed_from"] for end, batch in zip(ends, batches[1:], strict=False))


def test_committed_layer_groups_are_within_their_limits() -> None:
    """At most 10 % above the bound, 90 % of what can be hidden is, and no length is more than 3 % slower."""
    found = json.loads((RESULTS / "cpu_pipeline.json").read_text())
    assert all(of["over_bound"] <= 1.1 and of["hidden"] >= 0.9 for of in found["overlaps"])
    assert all(of["ratio"] <= 1.03 for of in found["lengths"])


def test_the_committed_prefix_index_is_within_its_limits() -> None:
    """10 ms for 128K tokens at pages of 64, 400 bytes a page beside the token ids."""
    found = json.loads((RESULTS / "cpu_prefix_index.json").read_text())
    assert max(found["miss_and_insert_ms"], found["hit_ms"]) < 10
    assert max(found["bytes_per_page"].values()) < 400


def test_the_committed_workload_of_prefixes_is_the_published_shape_and_within_its_limits() -> None:
    """Bytes at most 1.02 of the ideal, TTFT 1.10, latency at equal decode batch 1.05; and the picture is its."""
    found = json.loads((RESULTS / "cpu_prefix_workload.json").read_text())
    assert found["ok"] is True
    assert len(found["machine"]["commit"]) == 40, "measure in a clean checkout"
    shape = found["shape"]
    sizes = [shape[key] for key in ("groups", "prompts", "shared_tokens", "own_tokens", "range_ratio", "concurrency")]
    assert sizes == [80, 8, 7000, 1000, 0.5, 128]
    assert found["limits"] == {"bytes_over_ideal": 1.02, "ttft_over_ideal": 1.1, "latency_at_equal_batch": 1.05}
    assert all(found["ratios"][name] <= limit for name, limit in found["limits"].items())
    picture = (ROOT / "docs" / "images" / "bench-prefix.svg").read_text()
    assert f">{found['on']['requests_per_s']:.3g}<" in picture
    assert "images/bench-prefix.svg" in BY_FILE.read_text()
