"""A one-rank instance that vLLM's connector makes of its options, as a process that a test starts on some host.

    python -m tests.support.adapter_rank {prefill,decode} NAME OPTIONS

It prints JSON, a line each: first ``{"address": ...}``, or ``{"error": ...}`` as it cannot start. Each line of its
input is the id of a transfer from the instance ``P``, which ends in ``{"transfer": id, "failed": ..., "log": ...}``.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import torch

from disagg_kv.engines.options import EngineOptions
from disagg_kv.engines.vllm.endpoints import open_worker
from disagg_kv.engines.vllm.host import facts
from disagg_kv.engines.vllm.params import Origin
from disagg_kv.engines.vllm.work import Chunk, Load, StepWork
from disagg_kv.errors import DisaggKVError
from disagg_kv.ids import GroupId
from disagg_kv.rendezvous import Source
from tests.support.vllm_like import Model, configs, layer_name

SHAPE = (33, 4, 4, 8)
GROUP = GroupId("group 0")
THEIRS, OURS = (5, 6), (8, 9)
"""Blocks of prefill, and those of decode."""


def rows(transfer: str, layer: int) -> torch.Tensor:
    """What prefill computes: two blocks, other ones for each transfer and layer."""
    start = sum(transfer.encode()) + 7 * layer
    return (torch.arange(2 * 4 * 4 * 8).reshape(2, 4, 4, 8) + start).to(torch.float16)


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())


def say(**what: Any) -> None:
    """One line for the test."""
    print(json.dumps(what), flush=True)


def main(role: str, name: str, options: str) -> None:
    """Serve until the input ends."""
    log = Lines()
    logging.getLogger().addHandler(log)
    tensors = {layer_name(number): torch.full(SHAPE, -1.0, dtype=torch.float16) for number in range(3)}
    try:
        side, opened = open_worker(
            EngineOptions(**json.loads(options)), facts(*configs(Model(), name), tiles=True), tensors, {},
            e4m3="float8_e4m3fn", rank=0, group=None, produces=role == "prefill", consumes=role == "decode",
        )  # fmt: skip
    except DisaggKVError as exc:
        say(error=f"{type(exc).__name__}: {exc}")
        return
    say(address=opened.address)
    for line in sys.stdin:
        transfer = line.strip()
        if role == "prefill":
            for layer, tensor in enumerate(tensors.values()):
                tensor[list(THEIRS)] = rows(transfer, layer)
            side.begin(StepWork(chunks={transfer: Chunk(transfer, 2, 2, ((GROUP, THEIRS, 0),), True, b"tag")}))
            side.end()
        else:
            origin = Origin(transfer, Source("P", ()))
            load = Load(origin, 2, ((GROUP, OURS, 0),), {}, b"tag")
            side.begin(StepWork(loads={transfer: load}, idle=True))
        over = failed = False
        while not over:
            found = side.results({transfer})
            over, failed = transfer in found.sent | found.received, failed or transfer in found.failed
            time.sleep(0.001)
        right = all(torch.equal(one[list(OURS)], rows(transfer, at)) for at, one in enumerate(tensors.values()))
        assert role == "prefill" or failed != right, "the rows that were loaded are wrong"
        say(transfer=transfer, failed=failed, log=log.lines)
        log.lines = []
    opened.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
