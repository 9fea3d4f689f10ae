"""Two ranks of a prefill server, in processes of their own: one instance, with the addresses of both."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import attrs
import pytest
from torch import distributed

from disagg_kv.engines.sglang.host import ServerFacts, open_side
from disagg_kv.engines.sglang.options import SGLangOptions
from disagg_kv.errors import UnsupportedError

from .test_host import FACTS, Memory


def read(facts: ServerFacts) -> tuple[SGLangOptions, ServerFacts]:
    """As the plug-in reads its server; it may refuse."""
    if facts.dtype == "refused":
        raise UnsupportedError("there is none")
    return SGLangOptions(), facts


def rank(number: int, store: str, dtype: str, answers: Any) -> None:
    """What a rank's process does."""
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    facts = attrs.evolve(FACTS, tp=2, rank=number, heads=4, dtype=dtype if number else "float16")
    try:
        side, source = open_side(lambda: read(facts), Memory().args, tp=2, produces=True, group=distributed.group.WORLD)
    except Exception as exc:
        answers.put((number, str(exc), []))
    else:
        answers.put((number, source.instance, list(source.addresses)))
        side.close()
    distributed.destroy_process_group()


def ranks(store: Path, dtype: str) -> list[tuple[int, str, list[str]]]:
    """What both answered."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=rank, args=(number, str(store), dtype, answers)) for number in range(2)]
    for process in processes:
        process.start()
    found = sorted(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(30)
    return found


def test_ranks_agree_on_one_name_and_all_addresses(tmp_path: Path) -> None:
    (_, first, addresses), (_, second, others) = ranks(tmp_path / "store", "float16")
    assert first == second
    assert addresses == others
    assert len(set(addresses)) == 2
    assert all(address.startswith("unix://") for address in addresses)


@pytest.mark.parametrize("dtype", ["there is none", "refused"])
def test_a_rank_that_cannot_start_stops_the_other(tmp_path: Path, dtype: str) -> None:
    """Whether its cache cannot be, or the server's options are refused before anything is opened."""
    (_, first, _), (_, second, _) = ranks(tmp_path / "store", dtype)
    assert "rank 1" in first
    assert "there is none" in first
    assert "there is none" in second
