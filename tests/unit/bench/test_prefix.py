"""The workload of shared prefixes on an event-driven clock: what it must add up to, whatever the numbers."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from xml.etree import ElementTree

import attrs
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.__main__ import run
from bench.prefix import Figures, plot_svg, run_prefix
from bench.prefix_emulation import PARAMETERS, Emulation, Emulator, Run
from bench.prefix_workload import PrefixShape, prompts_of
from disagg_kv.errors import CapacityError, ConfigurationError

TINY = PrefixShape(groups=4, prompts=3, shared_tokens=900, own_tokens=120, answer_tokens=20, concurrency=4)
EMULATION = Emulation.read(PARAMETERS)
TOKEN_BYTES = 64 * 2 * 8 * 128 * 2


RUNS = ((True, True), (True, False), (False, False))


def still() -> float:
    """A clock for which index and planner take no time."""
    return 0.0


def emulated(
    shape: PrefixShape, emulation: Emulation = EMULATION, incremental: bool = True, ideal: bool = False
) -> Run:
    """One run, the same every time."""
    return Emulator(
        emulation, prompts_of(shape), shape.concurrency, incremental=incremental, ideal=ideal, clock=still
    ).run()


def test_prompts_of_a_group_share_their_beginning_and_nothing_else() -> None:
    """The published shape: lengths from half to all, order shuffled over the groups."""
    prompts = prompts_of(TINY)
    assert len(prompts) == 12
    assert [p.group for p in prompts] != sorted(p.group for p in prompts)
    for p in prompts:
        assert 450 <= p.shared <= 900
        assert 60 <= len(p.tokens) - p.shared <= 120
        assert 10 <= p.answer <= 20
        for q in prompts:
            if p is not q:
                same = p.group == q.group
                assert np.array_equal(p.tokens[: p.shared], q.tokens[: p.shared]) is same
                assert p.tokens[p.shared :].tolist() != q.tokens[q.shared :].tolist()
    assert [p.tokens.tolist() for p in prompts] == [p.tokens.tolist() for p in prompts_of(TINY)]


def test_bytes_on_the_wire_are_those_of_the_tokens_that_are_not_held() -> None:
    """At most 1.02 of the ideal; here every page is kept, so exactly that. Without prefixes: everything."""
    on, off = emulated(TINY), emulated(TINY, incremental=False)
    tokens = sum(len(p.tokens) for p in prompts_of(TINY))
    assert (off.prompt_tokens, off.held_tokens, off.kv_bytes) == (tokens, 0, tokens * TOKEN_BYTES)
    assert on.kv_bytes == (tokens - on.held_tokens) * TOKEN_BYTES == on.kv_bytes_ideal
    assert 0.3 < on.held_tokens / tokens < 0.8
    assert on.evicted == 0
    assert len(on.ttft) == len(off.ttft) == 12


def test_nothing_is_faster_than_the_ideal_and_prefixes_help() -> None:
    """TTFT with prefixes lies between the ideal and the run without them; so does throughput."""
    figures = [Figures.of(emulated(TINY, incremental=on, ideal=ideal)) for on, ideal in RUNS]
    ideal, on, off = figures
    assert ideal.ttft_mean <= on.ttft_mean < off.ttft_mean
    assert ideal.requests_per_s >= on.requests_per_s > off.requests_per_s
    assert ideal.latency_at_equal_batch == 1.0
    assert on.ttft_mean < 1.1 * ideal.ttft_mean


def test_alone_a_request_takes_what_its_parts_take() -> None:
    """One request, worked out by hand: pass, wire, one round trip each way, then a step per token but the first."""
    shape = attrs.evolve(TINY, groups=1, prompts=1, concurrency=1)
    (prompt,) = prompts_of(shape)
    e, found = EMULATION, emulated(shape)
    nbytes = len(prompt.tokens) * TOKEN_BYTES
    compute = e.pass_s + len(prompt.tokens) / e.prefill_tokens_per_s
    scatter = nbytes / e.decode_tp / e.scatter_bytes_per_s
    ttft = compute + nbytes / e.wire_bytes_per_s + 2 * e.round_trip_s + scatter
    assert list(found.ttft) == pytest.approx([ttft], rel=1e-3)
    assert len(found.steps) == prompt.answer - 1
    step = e.step_s + e.step_s_per_request
    assert found.seconds == pytest.approx(ttft + (prompt.answer - 1) * step, rel=1e-3)


def test_unpaced_arrivals_would_hold_up_decoding() -> None:
    """With slow scatters latency at equal batch grows; a pace of 4 % of them keeps it within 1.05."""
    slow = attrs.evolve(EMULATION, scatter_bytes_per_s=1e9, wire_bytes_per_s=1e10)
    shape = attrs.evolve(TINY, answer_tokens=200)
    fast = Figures.of(emulated(shape, attrs.evolve(slow, pace_bytes_per_s=1e15), incremental=False))
    paced = Figures.of(emulated(shape, attrs.evolve(slow, pace_bytes_per_s=4e7), incremental=False))
    assert fast.latency_at_equal_batch > 1.08
    assert paced.latency_at_equal_batch < 1.05


def test_arrivals_that_all_join_one_step_would_hold_it_up() -> None:
    """Each request that joins costs the engine's thread time; few at once keep every step short."""

    def emulate(most: int) -> Figures:
        ticks = count()
        emulation = attrs.evolve(EMULATION, arrivals_per_step=most, prefill_tokens_per_s=1e8, pass_s=1e-4)
        emulation = attrs.evolve(emulation, round_trip_s=0.05, wire_bytes_per_s=1e12)
        shape = attrs.evolve(TINY, groups=12, concurrency=36, answer_tokens=60)
        return Figures.of(
            Emulator(emulation, prompts_of(shape), 36, incremental=True, clock=lambda: next(ticks) * 5e-3).run()
        )

    one, every = emulate(1), emulate(36)
    assert one.worst_step < every.worst_step - 0.2
    assert one.ttft_mean > every.ttft_mean


@settings(max_examples=25)
@example(
    groups=3,
    prompts=4,
    shared=143,
    own=1,
    answer=2,
    concurrency=2,
    spare=(0, 31),
    pages=(16, 16),
    incremental=True,
    seed=4,
).via("two open requests of a group bring equal pages, and one of them cannot grow")
@given(
    groups=st.integers(1, 5),
    prompts=st.integers(1, 4),
    shared=st.integers(1, 500),
    own=st.integers(1, 200),
    answer=st.integers(2, 30),
    concurrency=st.integers(1, 9),
    spare=st.tuples(st.integers(0, 2000), st.integers(0, 4000)),
    pages=st.sampled_from([(16, 16), (16, 64), (64, 16)]),
    incremental=st.booleans(),
    seed=st.integers(0, 9),
)
def test_every_request_ends_and_every_page_is_accounted_for(
    groups: int,
    prompts: int,
    shared: int,
    own: int,
    answer: int,
    concurrency: int,
    spare: tuple[int, int],
    pages: tuple[int, int],
    incremental: bool,
    seed: int,
) -> None:
    """Pools that hold one request and little more, so that the indexes evict and admission waits."""
    shape = PrefixShape(groups, prompts, shared, own, answer, 0.5, concurrency, seed)
    room = shared + own + answer + 2 * max(pages)
    emulation = attrs.evolve(
        EMULATION,
        prefill_kv_tokens=room + spare[0],
        decode_kv_tokens=room + spare[1],
        prefill_page=pages[0],
        decode_page=pages[1],
    )
    found = emulated(shape, emulation, incremental)
    assert len(found.ttft) == groups * prompts
    assert sum(batch for batch, _, _ in found.steps) == sum(p.answer - 1 for p in prompts_of(shape))
    assert found.kv_bytes == (found.prompt_tokens - found.held_tokens) * TOKEN_BYTES


def test_numbers_that_cannot_work_are_refused(tmp_path: Path) -> None:
    """Bad input: by name, before anything runs."""
    for change in ({"groups": 0}, {"answer_tokens": 1}, {"range_ratio": 0.0}, {"range_ratio": 1.5}):
        with pytest.raises(ConfigurationError, match=next(iter(change))):
            attrs.evolve(TINY, **change)
    with pytest.raises(ConfigurationError, match="step_s must be positive"):
        attrs.evolve(EMULATION, step_s=0.0)
    with pytest.raises(CapacityError, match="does not fit decode's 1000"):
        emulated(TINY, attrs.evolve(EMULATION, decode_kv_tokens=1000))
    (tmp_path / "bad.json").write_text('{"layers": 2}')
    for name in ("bad.json", "missing.json"):
        with pytest.raises(ConfigurationError, match=name):
            Emulation.read(tmp_path / name)


def test_the_report_and_its_picture() -> None:
    """Limits decide; the picture is well-formed and has a bar per run and panel."""
    report = run_prefix(TINY, EMULATION, clock=still)
    assert report.ok
    assert set(report.limits) < set(report.ratios)
    assert report.ratios["published_throughput"] == pytest.approx(2.74 / 2.33)
    assert not attrs.evolve(report, ratios={**report.ratios, "bytes_over_ideal": 1.03}).ok
    root = ElementTree.fromstring(plot_svg(report))
    assert len(root.findall("{http://www.w3.org/2000/svg}rect")) == 1 + 6 * 3


@pytest.mark.slow
def test_the_command_as_json_with_a_real_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One document; a real model's conversations move the least there is, and everything without the selection."""
    code = run(["prefix", "--small", "--json", "--plot", str(tmp_path / "plot.svg")])
    found = json.loads(capsys.readouterr().out)
    assert code == (0 if found["ok"] else 1)
    assert found["model"]["ok"] is True
    assert found["model"]["on"]["kv_bytes"] == found["model"]["on"]["kv_bytes_ideal"]
    assert found["model"]["off"]["kv_bytes"] > 2 * found["model"]["off"]["kv_bytes_ideal"]
    assert found["ratios"]["bytes_over_ideal"] <= 1.02
    assert found["ratios"]["latency_at_equal_batch"] <= 1.05
    assert (tmp_path / "plot.svg").read_text().startswith("<svg")


def test_the_command_in_words(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A limit that is broken is exit code 1: a pool so small that what was held is gone."""
    file = tmp_path / "small.json"
    file.write_text(json.dumps({**attrs.asdict(EMULATION), "decode_kv_tokens": 1400}))
    sizes = ["--groups", "6", "--prompts", "4", "--shared-tokens", "900", "--own-tokens", "100"]
    more = ["--answer-tokens", "20", "--concurrency", "2", "--parameters", str(file)]
    assert run(["prefix", *sizes, *more]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "FAILED: bytes_over_ideal" in text
    assert "published on" in text
