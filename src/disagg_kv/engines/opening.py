"""A rank's endpoints over an engine's cache, from the options that all adapters have."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
from attrs import frozen
from torch import distributed

from ..channels import Channel, Keys, UnixChannel, ZmqChannel
from ..channels.reach import reached_at
from ..core import Alone, Options
from ..endpoints import DecodeEndpoint, PrefillEndpoint, threads_on
from ..errors import ConfigurationError, StoreUnreachableError
from ..geometry import Shard
from ..ids import Role
from ..memory import Event, MemoryPool
from ..rendezvous import EtcdRendezvous, Rendezvous, RequestRendezvous
from ..transports import Transports, between_processes
from .meeting import meet_at
from .options import EngineOptions
from .shown import Shown

T = TypeVar("T")

CPU_STAGING_BYTES = 64 << 20
SLOTS = 8
GATHERED_BYTES = 4096
"""Bytes that each rank sends to the others at the start: two addresses, or an error."""


@frozen
class Opened:
    """A rank's endpoints.

    Args:
        sender: prefill's; None: the instance does not prefill for others.
        receiver: decode's; None: the instance does not decode for others.
        address: of ``sender``; "": there is none.
        addresses: of all prefill ranks, in order; empty: the rendezvous knows them.
        on_cpu: the cache is in CPU memory.
        scratch: a directory of socket files that :meth:`close` removes; None: the user's own.
        shown: what shows the endpoints to an operator.
        meeting: how the endpoints find others.
    """

    sender: PrefillEndpoint | None
    receiver: DecodeEndpoint | None
    address: str
    addresses: tuple[str, ...]
    on_cpu: bool
    scratch: Path | None
    shown: Shown
    meeting: Rendezvous

    def close(self) -> None:
        """End both endpoints, and what shows them."""
        for endpoint in (self.sender, self.receiver):
            if endpoint is not None:
                endpoint.close()
        if isinstance(self.meeting, EtcdRendezvous):
            self.meeting.close()
        self.shown.close()
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)


def open_endpoints(
    options: EngineOptions,
    pool_of: Callable[[], tuple[MemoryPool, Sequence[Shard]]],
    *,
    instance: str,
    strategy: str,
    tp: int,
    rank: int,
    group: Any,
    produces: bool,
    consumes: bool,
) -> Opened:
    """Open the endpoints of a rank. All ranks of the instance call; none waits for one that cannot.

    Args:
        options: of the adapter.
        pool_of: makes the rank's cache, and the shards of all ranks.
        instance: name of the instance, equal on all ranks.
        strategy: path, schedule and selection.
        tp: number of tensor-parallel ranks.
        rank: this one.
        group: the engine's group of the tensor-parallel ranks on the CPU; not used by a single rank.
        produces: the instance prefills for others.
        consumes: the instance decodes for others.

    Raises:
        ConfigurationError: an option that does not fit, or another rank has failed. What ``pool_of`` raises, too.
    """
    with ExitStack() as undo:

        def begin() -> tuple[tuple[Rendezvous, Opened], dict[str, Any]]:
            meeting = meet_at(options.rendezvous)
            if isinstance(meeting, EtcdRendezvous):
                undo.callback(meeting.close)
            try:
                opened = _open(undo, options, *pool_of(), meeting, instance, strategy, rank, produces, consumes)
            except StoreUnreachableError as exc:
                raise exc.about(f"option rendezvous {options.rendezvous!r}") from exc
            return (meeting, opened), {"addresses": opened.addresses}

        (meeting, opened), everyone = agreed(begin, instance, tp, group)
        addresses: tuple[str, ...] = ()
        if isinstance(meeting, RequestRendezvous):
            if produces:
                addresses = tuple(one["addresses"][0] for one in everyone)
                meeting.learn(instance, addresses)
            if consumes:
                meeting.learn(decode_name(instance), [one["addresses"][1] for one in everyone])
        undo.pop_all()
    return attrs.evolve(opened, addresses=addresses)


def _open(
    undo: ExitStack,
    options: EngineOptions,
    pool: MemoryPool,
    shards: Sequence[Shard],
    meeting: Rendezvous,
    instance: str,
    strategy: str,
    rank: int,
    produces: bool,
    consumes: bool,
) -> Opened:
    """This rank's part; ``addresses`` are those of its own prefill and decode endpoint, "" where there is none."""
    device = str(pool.buffers[0].device)
    on_cpu = device == "cpu"
    staging = options.staging_bytes or (CPU_STAGING_BYTES if on_cpu else None)
    scratch = None if options.listen or options.channel != "unix" else Path(tempfile.mkdtemp(prefix="disagg_kv-"))
    if scratch is not None:
        undo.callback(shutil.rmtree, scratch, ignore_errors=True)
    common = {"rank": rank, "shards": shards, "rendezvous": meeting, "verify": options.verify, "strategy": strategy}
    common["verdict"] = Alone  # engines reduce over ranks
    common["options"] = Options(silence_s=options.silence_s, claim_s=options.claim_s, total_s=options.total_s)
    own, sender, receiver = ["", ""], None, None
    shown = Shown(options.metrics, options.status_socket, rank)
    undo.callback(shown.close)

    def connections(role: Role, name: str) -> dict[str, Any]:
        channel = _channel(options, scratch, f"{role}{rank}")
        undo.callback(channel.close)
        carrier = _transport(options, device, channel)
        undo.callback(carrier.close, 0.0)
        own[role == "decode"] = channel.address
        observer = shown.observer(role, name)
        return {"transport": carrier, "channel": channel, "instance": name, "observer": observer, **common}

    with _other_cores():
        if produces:
            slot = None if staging is None else max(1 << 12, staging // SLOTS)
            sender = PrefillEndpoint(pool, slot_bytes=slot, slots=SLOTS, **connections("prefill", instance))
            undo.callback(sender.close)
            shown.show("prefill", sender)
        if consumes:
            receiver = DecodeEndpoint(pool, ring_bytes=staging, **connections("decode", decode_name(instance)))
            undo.callback(receiver.close)
            shown.show("decode", receiver)
    return Opened(sender, receiver, own[0], tuple(own), on_cpu, scratch, shown, meeting)


def agreed(
    act: Callable[[], tuple[T, dict[str, Any]]], name: str, tp: int, group: Any
) -> tuple[T, list[dict[str, Any]]]:
    """What ``act`` makes here, and what it says on each rank. All ranks call. If one fails, none waits for it.

    Args:
        act: makes something, and what the other ranks have to know of it.
        name: of the instance, for errors.
        tp: number of tensor-parallel ranks.
        group: of these ranks on the CPU; not used by a single rank.

    Raises:
        ConfigurationError: another rank has failed. What ``act`` raises, too.
    """
    try:
        made, own = act()
    except Exception as exc:
        gathered({"error": f"{type(exc).__name__}: {exc}"[:500]}, tp, group)
        raise
    everyone = gathered(own, tp, group)
    for other, one in enumerate(everyone):
        if "error" in one:
            raise ConfigurationError(f"rank {other} of {name} cannot start: {one['error']}")
    return made, everyone


def gathered(own: dict[str, Any], tp: int, group: Any) -> list[dict[str, Any]]:
    """What all ranks give. It crosses as JSON in tensors: ``all_gather_object`` would unpickle it."""
    if tp == 1:
        return [own]
    mine = torch.zeros(GATHERED_BYTES, dtype=torch.uint8)
    text = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    mine[: len(text)] = text
    every = [torch.empty_like(mine) for _ in range(tp)]
    distributed.all_gather(every, mine, group=group)
    return [json.loads(bytes(one.tolist()).rstrip(b"\0")) for one in every]


def decode_name(instance: str) -> str:
    """An instance that does both is two to this library."""
    return f"{instance}/decode"


def selecting(strategy: str) -> str:
    """The strategy with the selection ``incremental``.

    An engine shares the pages of its prefix cache between requests, so rows that decode holds are never written again.
    Without a prefix cache decode holds none.
    """
    return strategy if "incremental" in strategy.split("+") else f"{strategy}+incremental"


def queued_work(stream: torch.cuda.Stream | None = None) -> Event:
    """An event that fires when a stream of the GPU, by default the current one, has done what is queued now."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _channel(options: EngineOptions, scratch: Path | None, name: str) -> Channel:
    if options.channel == "unix":
        folder = scratch or Path(options.listen)
        folder.mkdir(parents=True, exist_ok=True)
        return UnixChannel(f"unix://{folder}/{name}-{os.getpid()}.sock")
    keys = None
    if options.keys:
        secret, allowed = options.keys.split(",")
        keys = Keys.load(secret, allowed)
    return ZmqChannel(options.listen or "tcp://127.0.0.1:0", keys=keys)


def _transport(options: EngineOptions, device: str, channel: Channel) -> Transports:
    """The transports of the options for memory on a device, as far as a channel reaches.

    Raises:
        UnknownNameError: a transport, or an option of one, of another name.
        ConfigurationError: none can move such memory.
    """
    return between_processes(options.transport, device, reached_at(channel.address), **options.transport_options)


@contextmanager
def _other_cores() -> Iterator[None]:
    """Place the endpoints' threads beside the cores to which an engine pins a worker's computation."""
    own = os.sched_getaffinity(0)
    others = set(range(os.cpu_count() or 1)) - own
    if not others:
        yield
        return
    with threads_on(others):
        yield
