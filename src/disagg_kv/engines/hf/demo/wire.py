"""The demo's use of the library: endpoints over the chosen transport, created, polled and closed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch.distributed.distributed_c10d import Store

from ....channels import ZmqChannel
from ....core import Options, Phase
from ....endpoints import DecodeEndpoint, Handle, PrefillEndpoint
from ....errors import PeerLostError
from ....ids import RoomId
from ....memory import PagedPool
from ....rendezvous import Source, StoreRendezvous
from ....strategies import LayerPipelined, Schedule, strategy
from ....transports import between_processes
from .config import DemoConfig, Kind
from .inject import WrongGather
from .member import Member, wait_for
from .pool import make_pool, shards_of
from .results import Moved

SOURCE = Source("prefill")
"""Where every request's cache comes from."""

PAUSE_S = 0.001
"""Seconds between two polls of the handles; an engine would poll once per scheduler step."""


def room(request: int, turn: int) -> RoomId:
    """The room id of a request; both sides know it beforehand, as from a router."""
    return RoomId(f"request-{request}-{turn}".encode())


def publish_answer(store: Store, request: int, turn: int, tokens: Sequence[int]) -> None:
    """Publish an answer for the next turn's prefill, as a client would."""
    store.set(f"answer {request} {turn}", json.dumps(list(tokens)))


def publish_own(store: Store, rank: int) -> None:
    """The files of a prefill rank's own caches are there."""
    store.set(f"own {rank}", "")


def await_own(store: Store, prefills: int) -> None:
    """Wait for the files of all prefill ranks' own caches."""
    for rank in range(prefills):
        wait_for(store, f"own {rank}")


def answer(store: Store, request: int, turn: int) -> list[int]:
    """Wait for an answer."""
    tokens: list[int] = json.loads(wait_for(store, f"answer {request} {turn}"))
    return tokens


@contextmanager
def prefill(
    member: Member, store: Store, wrong: WrongGather | None = None
) -> Iterator[tuple[PrefillEndpoint, PagedPool]]:
    """This rank's sender, and its pages; ``wrong`` in place of the right kernels, where something is to go wrong."""
    config = member.config
    carrier = between_processes(config.transport, member.device)
    pool = make_pool(config, member.role, member.rank, config.prefill_page_size, carrier, member.device)
    endpoint = PrefillEndpoint(
        pool,
        transport=carrier,
        channel=ZmqChannel(),
        rendezvous=StoreRendezvous(store),
        instance=SOURCE.instance,
        rank=member.rank,
        shards=shards_of(config, member.role),
        strategy=config.strategy,
        schedule=_schedule(config),
        observer=member.observer,
        options=_options(config),
        verify=config.verify,
        kernels=wrong,
    )
    try:
        yield endpoint, pool
        member.meet(store)
    finally:
        endpoint.close()


@contextmanager
def decode(member: Member, store: Store) -> Iterator[tuple[DecodeEndpoint, PagedPool]]:
    """This rank's receiver, and its pages."""
    config = member.config
    carrier = between_processes(config.transport, member.device)
    pool = make_pool(config, member.role, member.rank, config.decode_page_size, carrier, member.device)
    endpoint = DecodeEndpoint(
        pool,
        transport=carrier,
        channel=ZmqChannel(),
        rendezvous=StoreRendezvous(store),
        instance="decode",
        rank=member.rank,
        shards=shards_of(config, member.role),
        strategy=config.strategy,
        observer=member.observer,
        options=_options(config),
        verify=config.verify,
    )
    try:
        yield endpoint, pool
        member.meet(store)
    finally:
        endpoint.close()


def _options(config: DemoConfig) -> Options:
    """Silence fails no room here: the parent sees when a rank ends, and a busy host may delay heartbeats."""
    return Options(
        silence_s=max(config.timeout_s, Options().silence_s), total_s=config.timeout_s, claim_s=config.timeout_s
    )


def _schedule(config: DemoConfig) -> Schedule | None:
    """Prompts of a demo are too short for the schedule's own rules, so the size of its groups is fixed."""
    layered = isinstance(strategy(config.strategy).schedule, LayerPipelined)
    return LayerPipelined(fixed=config.layer_group) if layered else None


def awaited(handle: Handle) -> None:
    """Wait for decode's ``Expect``. Engines too compute a prompt only after it, so that its layers can be sent.

    Raises:
        DisaggKVError: the room failed; do not compute it.
    """
    while handle.phase is Phase.CONNECTING:
        time.sleep(PAUSE_S)
    _check(handle)


def released(
    poll: Callable[[], Sequence[Handle]], handles: Sequence[Handle], member: Member, kind: Kind
) -> tuple[Moved, ...]:
    """Wait until all rooms have succeeded and are released; sends a message of ``kind`` for each.

    Raises:
        DisaggKVError: the reason why a room failed.
    """
    waiting = set(handles)
    while waiting:
        for handle in poll():
            _check(handle)
            if handle.released:
                waiting.discard(handle)
                member.notify(kind)
        time.sleep(PAUSE_S)
    return tuple(_moved(handle) for handle in handles)


def _check(handle: Handle) -> None:
    if handle.phase is Phase.FAILED:
        raise handle.error or PeerLostError(f"{handle.room.decode()} failed")


def _moved(handle: Handle) -> Moved:
    report = handle.report
    return Moved(report.nbytes, report.descriptors, report.path, report.transport, dict(report.seconds))
