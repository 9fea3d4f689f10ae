"""The simulator: its promises about itself, and the gate that every change to the library passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from disagg_kv.channels import MAX_FRAME, MAX_TOGETHER, SupportsBatches
from disagg_kv.errors import ConfigurationError, UnknownNameError
from sim import EVERY, FaultClass, Kind, Scenario, Summary, simulate, simulate_many, trace
from sim.__main__ import run
from sim.fault import named
from sim.node import SimNode
from sim.report import MARKS, UNREACHED
from sim.world import World

SEEDS = 128
DIGEST = "from sim import simulate; print(*(simulate(s).digest for s in range(12)))"


@pytest.fixture(scope="module")
def summary() -> Summary:
    """Some seeds, once for all tests."""
    return simulate_many(SEEDS, 1_000_000)


def test_no_rule_is_broken(summary: Summary) -> None:
    """I1 to I7 hold after every event of seeds that nobody looked at before."""
    assert not summary.found


def test_worlds_are_large_enough(summary: Summary) -> None:
    """On average at least 3 ranks, 4 rooms and 3 segments a room; most fault classes happen in a few seeds."""
    drawn = [Scenario.draw(seed, EVERY) for seed in range(1000)]
    assert sum(one.ranks for one in drawn) >= 3 * len(drawn)
    assert sum(len(one.requests) for one in drawn) >= 4 * len(drawn)
    assert summary.landed >= 3 * summary.finished
    assert len(summary.faults) >= len(FaultClass) - 2
    assert 2 * len(summary.kinds) >= len(Kind)
    assert len(summary.missing()) < 48


def test_engines_change_their_minds_within_a_step(summary: Summary) -> None:
    """They give rooms up, and take pages away, before the endpoint has begun what came just before."""
    seen = {mark.removeprefix("at once:") for mark in summary.marks if mark.startswith("at once:")}
    assert {mark.split()[0] for mark in seen} == {"abort", "withdraw"}
    assert {mark.split(maxsplit=1)[1] for mark in seen} >= {"after Expect", "after rows"}


@pytest.mark.parametrize("seed", [4106285, 4039386])
def test_a_room_that_prefill_ends_for_its_own_silence_is_told_to_decode(seed: int) -> None:
    """Only that room had lost the peer, which heard no more of it, and waited for its deadline."""
    assert not simulate(seed).violations


@pytest.mark.parametrize("seed", [3065339, 3125778, 3195063])
def test_a_room_that_a_peer_gives_up_which_cannot_be_connected_is_forgotten(seed: int) -> None:
    """Such a peer acknowledges nothing; the room was kept, and the peer told again and again, for ever."""
    assert not simulate(seed).violations


def test_the_same_seed_is_the_same_run_in_any_process() -> None:
    """I8: not even the hashes of strings matter, which differ from process to process."""
    found = {
        subprocess.run(
            [sys.executable, "-c", DIGEST], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    here = " ".join(simulate(s).digest for s in range(12))
    assert found == {f"{here}\n".encode()}


def test_a_summary_does_not_depend_on_the_number_of_processes() -> None:
    """The digest of many seeds is that of their outcomes in order."""
    one, two = simulate_many(30, 7), simulate_many(30, 7, jobs=2)
    assert one.trace_digest == two.trace_digest
    assert (one.events, one.faults, one.marks, one.cells) == (two.events, two.faults, two.marks, two.cells)


def test_only_what_is_allowed_happens() -> None:
    """Faults can be restricted; without any, every request succeeds."""
    allowed = named(["drop", "LATE"])
    assert allowed == {FaultClass.DROP, FaultClass.LATE}
    some = simulate_many(20, faults=allowed)
    assert not some.found
    assert set(some.faults) <= allowed
    calm = simulate_many(20, faults=frozenset())
    assert not calm.found
    assert not calm.faults
    with pytest.raises(UnknownNameError, match=r"'rain'; known: .*truncated"):
        named(["rain"])


def test_a_frame_out_of_turn_must_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """I7: one that is neither counted nor answered is seen, by itself, whatever else happens in that turn."""
    only = frozenset({FaultClass.OUT_OF_TURN})
    seed = next(seed for seed in range(100) if simulate(seed, only).faults)
    monkeypatch.setattr(SimNode, "take_in", lambda node, frame: None)
    assert {violation.rule for violation in simulate(seed, only).violations} == {"I7"}


@pytest.mark.parametrize("frames", [[], [b""] * (MAX_TOGETHER + 1), [b"x", b"x" * MAX_FRAME]])
def test_the_simulated_channel_refuses_what_no_channel_sends_together(frames: list[bytes]) -> None:
    """As the contract says; an endpoint that tried would count an error that it did not foresee."""
    world = World(next(s for s in (Scenario.draw(seed, EVERY) for seed in range(100)) if s.together))
    channel = world.nodes[0].channel
    assert isinstance(channel, SupportsBatches)
    with pytest.raises(ConfigurationError, match=f"one message takes 1 to 64 of {MAX_FRAME} bytes"):
        channel.send_all("sim://prefill0", frames)


def test_a_trace_tells_the_events() -> None:
    """Every frame, write and fault is a line, with its time."""
    seed = next(s for s in range(50) if FaultClass.TRUNCATED in Scenario.draw(s, EVERY).faults)
    lines: list[str] = []
    outcome = trace(seed, lines.append)
    assert outcome.digest == simulate(seed).digest
    assert lines[0].startswith("Scenario(seed=")
    assert any("sent sim://" in line and "Hello" in line for line in lines)
    assert any("FAULT" in line for line in lines)


def test_what_is_not_reached_is_named() -> None:
    """A run that has reached nothing misses every fault, cell and release."""
    missing = Summary().missing()
    assert {"fault:drop", "kind:prefix", "cell:moving/sending/Grant", *MARKS} <= set(missing)
    assert len(UNREACHED) == 9


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON document with what the run did, equal digests for equal runs, and no verdict on too small a coverage."""
    documents = []
    for _ in range(2):
        assert run(["--seeds", "10", "--seed-from", "3", "--json"]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    first, second = documents
    assert first["trace_digest"] == second["trace_digest"]
    assert (first["ok"], first["violations"], first["coverage_missing"], first["seeds"]) == (True, 0, None, 10)
    assert first["seeds_per_second"] > 0
    assert set(first["kinds"]) == {kind.name.lower() for kind in Kind}
    assert run(["--seeds", "5", "--faults", "drop,crash"]) == 2
    assert run(["--seeds", "2", "--trace"]) == 2
    capsys.readouterr()
    assert run(["--seeds", "1", "--seed-from", "5", "--trace", "--faults", "duplicate"]) == 0
    said = capsys.readouterr()
    assert "violations: 0" in said.out
    assert "Hello" in said.err
