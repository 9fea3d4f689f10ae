"""A rank's endpoints over vLLM's tensors, from the connector's options."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import TCPStore  # torch.distributed does not export it to type checkers

from ...channels import Channel, Keys, UnixChannel, ZmqChannel
from ...endpoints import DecodeEndpoint, PrefillEndpoint, threads_on
from ...errors import ConfigurationError
from ...ids import LayerId
from ...memory import Event
from ...protocol import Options
from ...rendezvous import Rendezvous, RequestRendezvous, StoreRendezvous
from ...transports import default_transport, transport
from .cache import pool_of
from .host import EngineFacts
from .options import ConnectorOptions
from .worker import WorkerSide

CPU_STAGING_BYTES = 64 << 20
SLOTS = 8
GATHERED_BYTES = 4096
"""Bytes that each rank sends to the others at the start; two addresses take a few hundred."""


def open_worker(
    options: ConnectorOptions,
    facts: EngineFacts,
    tensors: Mapping[str, torch.Tensor],
    *,
    rank: int,
    group: Any,
    produces: bool,
    consumes: bool,
) -> tuple[WorkerSide, str]:
    """The connector's side of a rank, and the address of its prefill endpoint ("": it has none).

    Args:
        options: of the connector.
        facts: of the instance.
        tensors: vLLM's cache, by layer name.
        rank: tensor-parallel rank.
        group: vLLM's group of the tensor-parallel ranks on the CPU; all of them call.
        produces: the instance prefills for others.
        consumes: the instance decodes for others.
    """
    pool, shards = pool_of(
        facts.layers,
        tensors,
        blocks=facts.blocks,
        block=facts.block,
        row=facts.row,
        tp=facts.tp,
        rank=rank,
        model=facts.model,
    )
    device = str(pool.buffers[0].device)
    on_cpu = device == "cpu"
    staging = options.staging_bytes or (CPU_STAGING_BYTES if on_cpu else None)
    meeting = _rendezvous(options)
    folder = options.listen or tempfile.mkdtemp(prefix="disagg_kv-")
    common = {"rank": rank, "shards": shards, "rendezvous": meeting, "verify": options.verify}
    common["options"] = Options(silence_s=options.silence_s)
    addresses, sender, receiver = ["", ""], None, None

    def connections(role: str) -> dict[str, Any]:
        carrier = transport(options.transport or default_transport(device))
        channel = _channel(options, folder, f"{role}{rank}")
        addresses[role == "decode"] = channel.address
        return {"transport": carrier, "channel": channel, **common}

    with _other_cores():
        if produces:
            slot = None if staging is None else max(1 << 12, staging // SLOTS)
            sender = PrefillEndpoint(
                pool, instance=facts.instance, strategy=selecting(options.strategy), slot_bytes=slot, slots=SLOTS,
                **connections("prefill"),
            )  # fmt: skip
        if consumes:
            receiver = DecodeEndpoint(
                pool, instance=decode_name(facts.instance), strategy=selecting(options.strategy),
                ring_bytes=staging, **connections("decode"),
            )  # fmt: skip
    if isinstance(meeting, RequestRendezvous):
        everyone = _gathered(addresses, facts.tp, group)
        if produces:
            meeting.learn(facts.instance, [one[0] for one in everyone])
        if consumes:
            meeting.learn(decode_name(facts.instance), [one[1] for one in everyone])
    layers = {layer.name: LayerId(number) for number, layer in enumerate(facts.layers)}
    return WorkerSide(sender, receiver, layers, None if on_cpu else _mark), addresses[0]


def _gathered(addresses: list[str], tp: int, group: Any) -> list[list[str]]:
    """The addresses of all ranks. They cross as JSON in tensors: ``all_gather_object`` would unpickle them."""
    if tp == 1:
        return [addresses]
    own = torch.zeros(GATHERED_BYTES, dtype=torch.uint8)
    text = torch.frombuffer(bytearray(json.dumps(addresses).encode()), dtype=torch.uint8)
    own[: len(text)] = text
    every = [torch.empty_like(own) for _ in range(tp)]
    distributed.all_gather(every, own, group=group)
    return [json.loads(bytes(one.tolist()).rstrip(b"\0")) for one in every]


def decode_name(instance: str) -> str:
    """An instance that does both is two to this library."""
    return f"{instance}/decode"


def selecting(strategy: str) -> str:
    """The strategy with the selection ``incremental``.

    vLLM shares the blocks of its prefix cache between requests, so rows that decode holds are never written again.
    Without a prefix cache decode holds none.
    """
    return strategy if "incremental" in strategy.split("+") else f"{strategy}+incremental"


def _rendezvous(options: ConnectorOptions) -> Rendezvous:
    if not options.rendezvous:
        return RequestRendezvous()
    host, _, port = options.rendezvous.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigurationError(f"rendezvous {options.rendezvous!r}: not tcp://HOST:PORT")
    return StoreRendezvous(TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=30)))


def _channel(options: ConnectorOptions, folder: str, name: str) -> Channel:
    if options.channel == "unix":
        Path(folder).mkdir(parents=True, exist_ok=True)
        return UnixChannel(f"unix://{folder}/{name}-{os.getpid()}.sock")
    keys = None
    if options.keys:
        secret, allowed = options.keys.split(",")
        keys = Keys.load(secret, allowed)
    return ZmqChannel(options.listen or "tcp://127.0.0.1:0", keys=keys)


@contextmanager
def _other_cores() -> Iterator[None]:
    """Place the endpoints' threads beside the cores to which vLLM pins a CPU worker's computation."""
    own = os.sched_getaffinity(0)
    others = set(range(os.cpu_count() or 1)) - own
    if not others:
        yield
        return
    with threads_on(others):
        yield


def _mark() -> Event:
    event = torch.cuda.Event()
    event.record()
    return event
