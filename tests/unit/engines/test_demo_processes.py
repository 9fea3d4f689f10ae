"""A real model's cache crosses between real processes; and however that ends, nothing is left behind."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import attrs
import pytest

from disagg_kv.engines.hf.demo import DemoConfig, Message, Report, run_demo, steps
from disagg_kv.engines.hf.demo.config import Model
from disagg_kv.errors import ConfigurationError, DeadlineError, PeerLostError
from tests.support.leftovers import abandoned
from tests.support.processes import wait

pytestmark = pytest.mark.slow

QUICK = DemoConfig(prefill_tp=1, decode_tp=1, requests=2, max_new_tokens=6, layers=2)


def watch(pids: set[int]) -> list[int]:
    """A pidfd for each of them that there still is."""
    there: list[int] = []
    for pid in pids:
        with suppress(ProcessLookupError):
            there.append(os.pidfd_open(pid))
    return there


def ended(pidfds: list[int]) -> bool:
    """Whether all of these processes have ended, or do so within a minute."""
    for pidfd in pidfds:
        with selectors.DefaultSelector() as selector:  # readable once the process has ended
            selector.register(pidfd, selectors.EVENT_READ)
            if not selector.select(60.0):
                return False
        os.close(pidfd)
    return True


def run(
    config: DemoConfig, then: Callable[[Message], None] = lambda _: None
) -> tuple[Report | Exception, list[Message]]:
    """Run a demo; whatever comes of it, its processes must end with it and leave nothing in /dev/shm.

    The kernel takes those apart that were killed; on a busy host it takes a moment.
    """
    lines: list[Message] = []
    before = abandoned()

    def told(line: Message) -> None:
        lines.append(line)
        then(line)

    try:
        result: Report | Exception = run_demo(config, told)
    except Exception as error:
        result = error
    assert ended(watch({line.pid for line in lines}))
    wait(lambda: abandoned() <= before, lambda: f"left in /dev/shm: {abandoned() - before}")
    return result, lines


def proved(config: DemoConfig) -> Report:
    """The report of a demo that must work."""
    report, lines = run(config)
    if isinstance(report, Exception):
        raise report
    assert report.ok
    assert report.tokens_equal
    assert report.wrong_bytes == report.stray_bytes == 0
    sent = [
        rows
        for turn in range(config.turns)
        for rows in (config.lacking(turn) if "incremental" in config.strategy else config.lengths(turn))
    ]
    assert report.kv_bytes == sum(nbytes(config, rows) for rows in sent)
    assert sum(rank.nbytes for rank in report.ranks if rank.role == "decode") == report.kv_bytes
    assert sum(rank.nbytes for rank in report.ranks if rank.role == "prefill") == report.kv_bytes
    assert len(lines) == steps(config)
    assert len({rank.pid for rank in report.ranks} | {os.getpid()}) == config.prefills + config.decodes + 2
    return report


def nbytes(config: DemoConfig, rows: int) -> int:
    """What all decode ranks together have to get of a request."""
    row = 2 * config.kv_heads * config.head_dim * 4  # keys and values of a layer
    half = config.layers // 2
    match config.model:
        case "llama":
            return rows * config.layers * row
        case "mla":
            return rows * config.layers * 3 * config.head_dim * 4 * config.decode_tp
        case "window":
            return half * row * (rows + min(rows, 127))
        case "hybrid":
            net = (2 * 4 * 16 + 8 * 16) * 4 + 8 * 16 * 16  # conv of q, k and v, and the net's state
            return half * (rows * row + net * 4 * config.decode_tp)
        case "mamba":
            mamba = (8 * 16 + 2 * 16) * 4 + 8 * 16 * 16
            return config.layers * (rows * row + mamba * 4) * config.decode_tp


@pytest.mark.parametrize(
    ("model", "tp"),
    [("mla", (2, 1)), ("mamba", (1, 2)), ("window", (2, 1))],
)
def test_latents_states_and_windows_of_real_architectures_cross(model: Model, tp: tuple[int, int]) -> None:
    """Replicas share what all of them hold, and every byte arrives once.

    Hybrid models, and windows to two ranks: below, with pipeline stages.
    """
    report = proved(attrs.evolve(QUICK, model=model, prefill_tp=tp[0], decode_tp=tp[1]))
    assert report.model == model
    sent = [rank.nbytes for rank in report.ranks if rank.role == "prefill"]
    assert all(sent), "every replica's link works"


@pytest.mark.parametrize("model", ["mla", "hybrid", "window"])
def test_a_changed_sign_is_noticed_in_latents_states_and_windows(model: Model) -> None:
    """The negative control: generation depends on what crossed. Rows that change places would prove nothing."""
    report, _ = run(attrs.evolve(QUICK, model=model, prefill_tp=2, inject="negate"))
    assert isinstance(report, Report)
    assert not report.ok
    assert not report.tokens_equal
    assert report.wrong_bytes > 0
    assert report.stray_bytes == 0


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "strategy"),
    [
        ("llama", (2, 2), (1, 1), "slice"),
        ("hybrid", (1, 2), (2, 1), "auto"),
        ("window", (1, 1), (2, 2), "staged"),
    ],
)
def test_pipeline_stages_send_their_own_layers(
    model: Model, prefill: tuple[int, int], decode: tuple[int, int], strategy: str
) -> None:
    """Stages on either side, tensor parallelism inside them; the last stage knows the token."""
    report = proved(
        attrs.evolve(
            QUICK,
            model=model,
            layers=4,
            prefill_tp=prefill[0],
            prefill_pp=prefill[1],
            decode_tp=decode[0],
            decode_pp=decode[1],
            strategy=strategy,
        )
    )
    sent = [rank.nbytes for rank in report.ranks if rank.role == "prefill"]
    assert all(sent)
    assert (report.prefill_pp, report.decode_pp) == (prefill[1], decode[1])
    assert strategy not in ("staged", "slice") or report.paths == (strategy,)
    # The report counts the writes of the per-token path right without running it.
    assert (report.descriptors == report.descriptors_slice) is (report.paths == ("slice",))


@pytest.mark.parametrize("tp", [(2, 4), (8, 1)], ids=lambda tp: f"{tp[0]}-to-{tp[1]}")
def test_decode_generates_what_one_process_would_from_a_cache_that_crossed(tp: tuple[int, int]) -> None:
    """Chunked prefill, tensor-parallel sizes that differ, staged over shared memory.

    Two ranks to one, four to two and one to two: the conversations below; four to one: the session ``demo``.
    """
    report = proved(attrs.evolve(QUICK, prefill_tp=tp[0], decode_tp=tp[1]))
    each = 8 // tp[0]
    held = [rank.kv_heads for rank in report.ranks if rank.role == "prefill"]
    assert held == [tuple(range(rank * each, (rank + 1) * each)) for rank in range(tp[0])]
    assert report.paths == ("staged",)
    assert 0 < report.descriptors < report.descriptors_slice / 50


@pytest.mark.parametrize(
    ("tp", "strategy", "page"),
    [
        ((4, 2), "staged+layer_pipelined", 16),
        ((2, 1), "staged", 64),
        ((1, 2), "slice", 16),
    ],
)
def test_each_turn_of_a_conversation_moves_only_what_decode_lacks(
    tp: tuple[int, int], strategy: str, page: int
) -> None:
    """Decode keeps what came and what it computed itself; byte for byte, and the same tokens."""
    config = attrs.evolve(
        QUICK,
        prefill_tp=tp[0],
        decode_tp=tp[1],
        strategy=f"{strategy}+incremental",
        decode_page_size=page,
        turns=3,
    )
    report = proved(config)
    assert [turn.prompt_tokens for turn in report.turns] == [sum(config.lengths(turn)) for turn in range(3)]
    assert all(turn.kv_bytes == turn.kv_bytes_ideal for turn in report.turns)
    held = [turn.prompt_tokens - sum(config.lacking(number)) for number, turn in enumerate(report.turns)]
    assert [turn.held_tokens for turn in report.turns] == held
    assert held[0] == 0
    assert min(held[1:]) > 600


@pytest.mark.parametrize(
    ("tp", "strategy", "pages", "instances", "evict"),
    [
        ((2, 1), "staged", (16, 16), 1, None),
        ((1, 2), "auto+layer_pipelined", (16, 32), 2, None),
        ((2, 1), "slice", (32, 16), 1, 2),
    ],
)
def test_prefill_takes_back_only_what_decode_has_and_it_lacks(
    tp: tuple[int, int], strategy: str, pages: tuple[int, int], instances: int, evict: int | None
) -> None:
    """Rows of answers, and of prompts that another instance computed; what decode has evicted is computed again."""
    config = attrs.evolve(
        QUICK,
        prefill_tp=tp[0],
        decode_tp=tp[1],
        strategy=strategy,
        prefill_page_size=pages[0],
        decode_page_size=pages[1],
        turns=4,
        max_new_tokens=20,
        both_ways=True,
        prefill_instances=instances,
        evict=evict,
    )
    report, lines = run(config)
    if isinstance(report, Exception):
        raise report
    assert report.ok
    assert report.wrong_bytes == report.stray_bytes == 0
    assert len(lines) == steps(config)
    assert all(turn.kv_bytes == turn.kv_bytes_ideal for turn in report.turns)
    assert all(turn.returned_bytes == turn.returned_bytes_ideal for turn in report.turns)
    there = [turn.returned_bytes > 0 for turn in report.turns]
    assert there == [turn not in (0, evict) for turn in range(4)]
    assert report.evicted == (config.requests if evict else 0)
    assert report.returned_bytes == sum(turn.returned_bytes for turn in report.turns)
    both = report.kv_bytes + report.returned_bytes
    assert {sum(rank.nbytes for rank in report.ranks if rank.role == role) for role in ("prefill", "decode")} == {both}
    assert len([rank for rank in report.ranks if rank.role == "prefill"]) == tp[0] * instances


def test_wrong_rows_are_noticed_where_they_go_both_ways() -> None:
    """The negative control: decode's model answers from them, and its rows go back and forth."""
    config = attrs.evolve(QUICK, prefill_tp=2, turns=2, both_ways=True, inject="swap-heads", kv_heads=4)
    report, _ = run(config)
    assert isinstance(report, Report)
    assert not report.tokens_equal
    assert report.wrong_bytes > 0
    assert report.stray_bytes == 0, "prefill had more rows than decode's whole pages"


def test_without_the_selection_every_turn_moves_everything() -> None:
    """The control: the bytes at best are told beside those that crossed."""
    report = proved(attrs.evolve(QUICK, prefill_tp=2, turns=2))
    first, second = report.turns
    assert first.kv_bytes == first.kv_bytes_ideal
    assert second.held_tokens == 0
    assert second.kv_bytes > 5 * second.kv_bytes_ideal


def test_six_heads_from_three_ranks_to_two_and_pages_of_other_sizes() -> None:
    """Boxes that overlap in part; page 16 to page 48, neither a multiple of the chunk."""
    proved(attrs.evolve(QUICK, prefill_tp=3, decode_tp=2, kv_heads=6, decode_page_size=48))


def test_direct_is_refused_where_layouts_differ() -> None:
    """With the reason, in finite time."""
    error, _ = run(attrs.evolve(QUICK, prefill_tp=2, strategy="direct"))
    assert isinstance(error, (ConfigurationError, PeerLostError))
    assert "direct" in str(error)


def test_swapped_heads_are_noticed_where_each_is_on_a_rank_of_its_own() -> None:
    """The negative control: tokens differ, and at most the bytes of two of four heads are wrong."""
    report, _ = run(attrs.evolve(QUICK, prefill_tp=4, kv_heads=4, inject="swap-heads"))
    assert isinstance(report, Report)
    assert not report.ok
    assert not report.tokens_equal
    assert 0.5 * report.kv_bytes / 2 < report.wrong_bytes <= report.kv_bytes / 2
    assert report.stray_bytes == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_rank_ends_the_demo_with_its_name(role: str) -> None:
    """Never a hang, and the processes that are left are ended too."""

    def kill(line: Message) -> None:
        if line.kind == "ready" and line.role == role:
            os.kill(line.pid, signal.SIGKILL)

    error, _ = run(attrs.evolve(QUICK, prefill_tp=2), kill)
    assert isinstance(error, PeerLostError)
    assert f"{role} rank 0" in str(error) or f"{role} rank 1" in str(error)
    assert "killed by signal 9" in str(error)


def test_a_frozen_rank_ends_the_demo_at_its_deadline() -> None:
    """A process that neither works nor dies; the error names who is still at work."""

    def freeze(line: Message) -> None:
        if line.kind == "ready" and line.role == "reference":
            os.kill(line.pid, signal.SIGSTOP)

    error, _ = run(attrs.evolve(QUICK, timeout_s=40.0), freeze)
    assert isinstance(error, DeadlineError)
    assert "not done after 40 s; not finished: " in str(error)
    assert "reference rank 0" in str(error)


def test_a_frozen_launcher_is_killed_with_all_that_it_started() -> None:
    """When even the process that should end the others does not answer."""

    def freeze(line: Message) -> None:
        if line.kind == "ready":
            parent = Path(f"/proc/{line.pid}/stat").read_text().rpartition(")")[2].split()[1]
            os.kill(int(parent), signal.SIGSTOP)

    error, _ = run(attrs.evolve(QUICK, timeout_s=40.0), freeze)
    assert isinstance(error, DeadlineError)


def test_a_process_whose_parent_is_gone_already_ends_at_once() -> None:
    """The kernel tells only of deaths that are yet to come."""
    command = "from disagg_kv.engines.hf.demo.lifetime import die_with; die_with(0)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.returncode == 1
    assert "parent 0 ended before this process began" in done.stderr


BROKEN = """
    import sys
    from disagg_kv.errors import RegistrationError
    from disagg_kv.transports import ShmTransport, register_transport

    class Broken(ShmTransport):
        def allocate(self, nbytes):
            raise RegistrationError(f"no {nbytes} bytes here" + ", none at all" * 1000)

    register_transport("broken", Broken)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module with a transport in the current folder."""
    path = tmp_path / "my_transport.py"
    path.write_text(textwrap.dedent(BROKEN))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_transport", raising=False)
    return path


def test_what_a_rank_raises_is_the_demos_error(module: Path) -> None:
    """With the rank's name and the reason."""
    error, _ = run(attrs.evolve(QUICK, transport="broken", transport_module=module.stem))
    assert isinstance(error, PeerLostError)
    assert "rank 0" in str(error)
    assert "bytes here" in str(error)


def test_a_launch_that_fails_says_what_it_said_last(module: Path) -> None:
    """The end of its log."""
    only_there = 'if "launch import main" in sys.orig_argv[-1]:\n    raise RuntimeError("not here")\n'
    module.write_text(module.read_text() + only_there)
    error, lines = run(attrs.evolve(QUICK, transport="broken", transport_module=module.stem))
    assert isinstance(error, PeerLostError)
    assert "could not be run (exit code 1)" in str(error)
    assert "not here" in str(error)
    assert not lines


PARENT = """
    import signal
    import sys
    import time
    from disagg_kv.engines.hf.demo import DemoConfig, run_demo

    signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs tests in the background has it ignored

    def told(line):
        print(line.kind, line.pid, flush=True)
        if line.kind == "prefilled":
            time.sleep(300)  # nobody knows how soon the blow comes, and it must come before the end

    if __name__ == "__main__":
        try:
            run_demo(DemoConfig(prefill_tp=2, requests=4, max_new_tokens=64, timeout_s=200.0), told)
        except KeyboardInterrupt:
            sys.exit(130)
"""


@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGKILL], ids=lambda blow: blow.name)
def test_an_interrupted_or_killed_parent_leaves_no_process_and_no_file(tmp_path: Path, blow: signal.Signals) -> None:
    """Ctrl-C in the middle; and where not even that is possible, the kernel tells the children."""
    (tmp_path / "parent.py").write_text(textwrap.dedent(PARENT))
    before = abandoned()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
        process_group=0,
    ) as parent:
        assert parent.stdout is not None
        pids = set()
        for line in parent.stdout:
            kind, pid = line.split()
            pids.add(int(pid))
            if kind == "prefilled":
                break
        pidfds = watch(pids)
        assert pidfds
        os.kill(parent.pid, blow)
        assert parent.wait() == (130 if blow == signal.SIGINT else -blow)
    if blow == signal.SIGINT:
        assert not list(temporary.iterdir())
    assert ended(pidfds)
    wait(lambda: abandoned() <= before, lambda: f"left in /dev/shm: {abandoned() - before}")
