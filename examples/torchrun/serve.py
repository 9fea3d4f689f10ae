"""A rank of a prefill job or of a decode job, as torchrun starts it on each host of the job.

Prefill computes prompts of a small model with random weights, tensor-parallel over the ranks of its job. Decode takes
the caches, answers, and compares its tokens with those of the whole model. The jobs share no store and no launcher:
they meet in etcd. docs/deploying.md has the commands.

Rank 0 of decode prints a line of JSON for each request. It ends with 1 if a token differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed.configuration_utils import DistributedConfig

from disagg_kv import (
    DecodeEndpoint,
    Expectation,
    Options,
    PagedPool,
    PageTable,
    Phase,
    PrefillEndpoint,
    Source,
    ZmqChannel,
    room_id,
    shard,
    transport,
)
from disagg_kv.channels import Keys
from disagg_kv.endpoints import Handle
from disagg_kv.engines.hf import PagedHFCache, spec_from_config
from disagg_kv.observe.prometheus import MetricsServer
from disagg_kv.observe.status_socket import StatusSocket
from disagg_kv.rendezvous import EtcdRendezvous

PAGE, AUX_BYTES = 16, 16
MODEL = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, head_dim=32, initializer_range=0.15, dtype="float32",
)  # fmt: skip
"""Weights spread wider than usual: with the default the model would repeat one token."""


def arguments() -> argparse.Namespace:
    """What both jobs are started with."""
    parser = argparse.ArgumentParser(description="a rank of a prefill job or of a decode job")
    parser.add_argument("role", choices=("prefill", "decode"))
    parser.add_argument("--host", required=True, help="address of this host for the other job")
    parser.add_argument("--etcd", required=True, nargs="+", help="URLs of etcd's members")
    parser.add_argument("--keys", type=Path, required=True, help="folder with ROLE.key_secret and both .key files")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8, help="of an answer")
    parser.add_argument("--every", type=float, default=0.0, help="seconds between two requests")
    parser.add_argument(
        "--metrics-port", type=int, default=9100, help="of a host's first rank; the next takes the next"
    )
    return parser.parse_args()


def prompt(request: int) -> torch.Tensor:
    """The prompt of a request, ``[1, tokens]``. Both jobs know it; in a service, a router tells them."""
    draw = torch.Generator().manual_seed(request)
    return torch.randint(MODEL.vocab_size, (1, 100 + 37 * request % 64), generator=draw)


def save_model(folder: str) -> None:
    """Write the model. Its weights depend on the seed alone, so each rank writes its own."""
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM
    make.from_config(MODEL).save_pretrained(folder)


def load_model(folder: str, ranks: int) -> Any:
    """This rank's part of the model, cut by transformers."""
    make: Any = AutoModelForCausalLM
    if ranks == 1:
        return make.from_pretrained(folder, dtype=torch.float32)
    plan = DistributedConfig(tp_plan="auto", tp_size=ranks)
    return make.from_pretrained(folder, dtype=torch.float32, distributed_config=plan)


class Rank:
    """This process: its place in its job, its pages, and the parts of its endpoint."""

    def __init__(self, given: argparse.Namespace, folder: str, undo: ExitStack) -> None:
        self.given, self.folder, self.undo = given, folder, undo
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        spec = spec_from_config(MODEL, "float32", model=b"torchrun example, seed 0")
        shards = [shard(spec, tp=self.ranks, rank=rank) for rank in range(self.ranks)]
        self.pool = PagedPool.allocate(
            spec, shards[self.rank], pages=64, page_size=PAGE, aux_slots=1, aux_bytes=AUX_BYTES
        )
        self.paged = PagedHFCache(self.pool)
        server = MetricsServer(f"{given.host}:{given.metrics_port + int(os.environ['LOCAL_RANK'])}")
        undo.callback(server.close)
        self.observer = undo.enter_context(server.metrics.observer(given.role, given.role, self.rank))
        # One per process: it owns the lease under which the address of this rank is in etcd.
        where = undo.enter_context(EtcdRendezvous(given.etcd, "torchrun-example"))
        keys = Keys.load(given.keys / f"{given.role}.key_secret", given.keys)
        self.parts: dict[str, Any] = {
            "pool": self.pool,
            "transport": transport("nixl"),
            "channel": ZmqChannel(f"tcp://{given.host}:0", keys=keys),
            "rendezvous": where,
            "instance": given.role,
            "rank": self.rank,
            "shards": shards,
            "observer": self.observer,
        }

    def opened(self, endpoint: PrefillEndpoint | DecodeEndpoint) -> None:
        """Show an endpoint to Prometheus and to ``disagg-kv top``, and close it in the end."""
        self.undo.callback(endpoint.close)
        self.observer.watch(endpoint)
        self.undo.enter_context(StatusSocket(endpoint))

    def pages(self, tokens: int) -> PageTable:
        """Pages for a prompt. Requests follow one another here, so each may take the same ones."""
        return PageTable(self.paged.group.id, list(range(-(-tokens // PAGE))))


def until(done: Callable[[], bool], handle: Handle) -> None:
    """Wait for a room; an engine looks at it between its steps instead."""
    while not done():
        time.sleep(0.001)
    if handle.phase is Phase.FAILED:
        raise SystemExit(f"{handle.room.decode()}: {handle.error}")


def prefill(rank: Rank) -> None:
    """Compute each prompt and send its cache."""
    endpoint = PrefillEndpoint(**rank.parts)
    rank.opened(endpoint)
    model = load_model(rank.folder, rank.ranks)
    for request in range(rank.given.requests):
        ids = prompt(request)
        tokens, table = ids.shape[1], rank.pages(ids.shape[1])
        delivery = endpoint.open(room_id(f"request-{request}"), claim_s=300.0)
        until(lambda handle=delivery: handle.phase is not Phase.CONNECTING, delivery)  # type: ignore[misc]
        step = endpoint.step({delivery.room: (tokens, [table])})
        cache = rank.paged.recording(table)
        cache.layer_ready = step.layer_ready
        output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        step.close()
        rank.pool.write_aux(0, int(output.logits[0, -1].argmax()).to_bytes(4, "little"))
        delivery.finish(tokens, aux=0)
        until(lambda handle=delivery: handle.released, delivery)  # type: ignore[misc]


def decode(rank: Rank) -> bool:
    """Take each cache and answer; whether all tokens are those of the whole model."""
    good = True
    # Prefill may take longer to start: until it is found, its requests wait for that long.
    endpoint = DecodeEndpoint(**rank.parts, options=Options(silence_s=120.0))
    rank.opened(endpoint)
    model, whole = load_model(rank.folder, rank.ranks), load_model(rank.folder, 1)
    for request in range(rank.given.requests):
        ids = prompt(request)
        tokens, table = ids.shape[1], rank.pages(ids.shape[1])
        reception = endpoint.open(room_id(f"request-{request}"), Source("prefill"))
        reception.expect(Expectation(tokens, [table], aux=0))
        until(lambda handle=reception: handle.released, reception)  # type: ignore[misc]
        answer = [int.from_bytes(rank.pool.read_aux(0)[:4], "little")]
        cache = rank.paged.load(table, tokens)
        while len(answer) < rank.given.tokens:
            output = model(torch.tensor([answer[-1:]]), past_key_values=cache, use_cache=True)
            answer.append(int(output.logits[0, -1].argmax()))
        right = whole.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=rank.given.tokens
        )
        equal = answer == right[0, tokens:].tolist()
        good = good and equal
        if rank.rank == 0:
            print(json.dumps({"request": request, "tokens": answer, "tokens_equal": equal}), flush=True)
        time.sleep(rank.given.every)
    while any(peer.instance == "prefill" and peer.state in ("connected", "idle") for peer in endpoint.peers()):
        time.sleep(0.01)  # prefill ends first: frames that end its last room may be on their way
    return good


@contextmanager
def job() -> Iterator[None]:
    """The group of this job's ranks; transformers cuts the model by it."""
    dist.init_process_group("gloo")
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def main() -> int:
    """One rank, from its start to its end."""
    given = arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)  # before there is a group: in one, transformers writes on rank 0 only
        return work(given, folder)


def work(given: argparse.Namespace, folder: str) -> int:
    """What the job is for; returns the exit code."""
    with job(), ExitStack() as undo, torch.inference_mode():
        rank = Rank(given, folder, undo)
        if given.role == "prefill":
            prefill(rank)
            return 0
        return 0 if decode(rank) else 1


if __name__ == "__main__":
    sys.exit(main())
