"""The ranks of an instance start together, in processes of their own."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from disagg_kv.engines.options import EngineOptions
from disagg_kv.engines.vllm import endpoints
from disagg_kv.engines.vllm.host import facts
from disagg_kv.errors import DisaggKVError
from disagg_kv.rendezvous import RequestRendezvous
from tests.support.vllm_like import Model, configs, layer_name


def rank(number: int, store: str, wrong: bool, answers: Connection) -> None:
    """Answer a rank's address and those that it knows, or its error.

    ``wrong``: rank 1 has tensors of another shape.
    """
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    heads = 3 if wrong and number == 1 else 2
    tensors = {layer_name(n): torch.zeros((33, heads, 4, 8), dtype=torch.float16) for n in range(3)}
    options = EngineOptions(staging_bytes=1 << 16)
    try:
        _, opened = endpoints.open_worker(
            options, facts(*configs(Model(), "P", tp=2), tiles=True), tensors, {}, e4m3="float8_e4m3fn",
            rank=number, group=distributed.group.WORLD, produces=True, consumes=True,
        )  # fmt: skip
    except DisaggKVError as exc:
        answers.send(f"{type(exc).__name__}: {exc}")
    else:
        assert isinstance(opened.meeting, RequestRendezvous)
        answers.send((opened.address, opened.meeting._learned["P"]))
        opened.close()
    distributed.destroy_process_group()


def started(folder: Path, *, wrong: bool) -> list[Any]:
    """What both ranks answer."""
    spawn = multiprocessing.get_context("spawn")
    ends = [spawn.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        spawn.Process(target=rank, args=(number, str(folder / "store"), wrong, theirs))
        for number, (_, theirs) in enumerate(ends)
    ]
    for one in ranks:
        one.start()
    answers = [ours.recv() if ours.poll(120) else None for ours, _ in ends]
    for one in ranks:
        one.join(60)
    return answers


def test_each_rank_knows_the_addresses_of_all(tmp_path: Path) -> None:
    (first, known), (second, also_known) = started(tmp_path, wrong=False)
    assert known == also_known == (first, second)
    assert first != second


def test_a_rank_that_cannot_start_ends_the_others(tmp_path: Path) -> None:
    """They would wait for it."""
    others, own = started(tmp_path, wrong=True)
    assert str(own).startswith("GeometryError")
    assert others == f"ConfigurationError: rank 1 of P cannot start: {own}"
