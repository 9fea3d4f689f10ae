"""The demo's use of the library: endpoints over the chosen transport, created, polled and closed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import msgspec
from attrs import frozen
from torch.distributed.distributed_c10d import Store

from ....channels import ZmqChannel
from ....core import Options, Phase
from ....endpoints import DecodeEndpoint, Handle, PrefillEndpoint
from ....errors import AbortedError, PeerLostError
from ....ids import RoomId
from ....memory import PagedPool
from ....rendezvous import Source, StoreRendezvous
from ....strategies import LayerPipelined, Schedule, strategy
from ....transports import Transports, between_processes
from .config import DemoConfig, Kind
from .inject import WrongGather
from .member import Member, wait_for
from .pool import make_pool, shards_of
from .results import Moved

H = TypeVar("H", bound=Handle)

DECODE = "decode"
"""The instance that awaits every request's cache."""

BACK = " back"
"""Ends the names of the instances that take part in what goes from decode to prefill."""

PAUSE_S = 0.001
"""Seconds between two polls of the handles; an engine would poll once per scheduler step."""


def source(config: DemoConfig, turn: int) -> Source:
    """Where every request's cache comes from in a turn."""
    return Source(_prefill(turn % config.prefill_instances))


def _prefill(instance: int) -> str:
    return f"prefill {instance}"


def room(request: int, turn: int, *, back: bool = False) -> RoomId:
    """The room id of a request; both sides know it beforehand, as from a router."""
    return RoomId(f"{'back' if back else 'request'}-{request}-{turn}".encode())


@frozen
class Answer:
    """What decode answers, and where its rows are, which the next turn's prefill needs; a router would pass it on.

    Args:
        tokens: the answer.
        rows: leading rows of prompt and answer that decode has.
        source: the instance that sends them.
    """

    tokens: tuple[int, ...]
    rows: int
    source: str = DECODE + BACK


_ANSWER = msgspec.json.Decoder(Answer)


def publish_answer(store: Store, request: int, turn: int, answer: Answer) -> None:
    """Publish an answer for the next turn's prefill, as a client would."""
    store.set(f"answer {request} {turn}", msgspec.json.encode(answer).decode())


def answer(store: Store, request: int, turn: int) -> Answer:
    """Wait for an answer."""
    return _ANSWER.decode(wait_for(store, f"answer {request} {turn}"))


def publish_own(store: Store, rank: int) -> None:
    """The files of a prefill rank's own caches are there."""
    store.set(f"own {rank}", "")


def await_own(store: Store, prefills: int) -> None:
    """Wait for the files of all prefill ranks' own caches."""
    for rank in range(prefills):
        wait_for(store, f"own {rank}")


@frozen
class Ends:
    """What a rank moves rows with.

    Args:
        pool: its pages.
        sender: None: a decode rank that only receives.
        receiver: None: a prefill rank that only sends.
    """

    pool: PagedPool
    sender: PrefillEndpoint | None
    receiver: DecodeEndpoint | None


@contextmanager
def ends(member: Member, store: Store, wrong: WrongGather | None = None) -> Iterator[Ends]:
    """This rank's endpoints, and its pages; ``wrong`` in place of the right kernels, where something is to go wrong.

    Where rows go both ways, a rank has two endpoints over the same pages, each with transports of its own. Peers write
    to what the receiver's transports have allocated.
    """
    config, prefill = member.config, member.role == "prefill"
    page_size = config.prefill_page_size if prefill else config.decode_page_size
    name = _prefill(member.instance) if prefill else DECODE
    carrier = between_processes(config.transport, member.device)
    pool = make_pool(config, member.role, member.place, page_size, carrier, member.device)
    sender, receiver = None, None
    with ExitStack() as closing:
        if not prefill or config.both_ways:
            receiver = _receiver(member, store, pool, carrier, name + BACK if prefill else name)
            closing.callback(receiver.close)
        if prefill or config.both_ways:
            if receiver is not None:
                carrier = between_processes(config.transport, member.device)
            sender = _sender(member, store, pool, carrier, name if prefill else name + BACK, wrong)
            closing.callback(sender.close)
        yield Ends(pool, sender, receiver)
        member.meet(store)


def _sender(
    member: Member, store: Store, pool: PagedPool, carrier: Transports, instance: str, wrong: WrongGather | None
) -> PrefillEndpoint:
    config = member.config
    return PrefillEndpoint(
        pool,
        transport=carrier,
        channel=ZmqChannel(),
        rendezvous=StoreRendezvous(store),
        instance=instance,
        rank=member.place,
        shards=shards_of(config, member.role),
        strategy=config.selected,
        schedule=_schedule(config),
        observer=member.observer,
        options=_options(config),
        verify=config.verify,
        kernels=wrong,
    )


def _receiver(member: Member, store: Store, pool: PagedPool, carrier: Transports, instance: str) -> DecodeEndpoint:
    config = member.config
    return DecodeEndpoint(
        pool,
        transport=carrier,
        channel=ZmqChannel(),
        rendezvous=StoreRendezvous(store),
        instance=instance,
        rank=member.place,
        shards=shards_of(config, member.role),
        strategy=config.selected,
        observer=member.observer,
        options=_options(config),
        verify=config.verify,
    )


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
    for handle in ended(poll, handles):
        _check(handle)
        member.notify(kind)
    return tuple(map(moved, handles))


def ended(poll: Callable[[], Sequence[H]], handles: Collection[H]) -> Iterator[H]:
    """Wait until all rooms are released; yields each that is, also one that the other side has given up.

    Raises:
        DisaggKVError: another reason why a room failed.
    """
    waiting = set(handles)
    while waiting:
        for handle in poll():
            if not isinstance(handle.error, AbortedError):
                _check(handle)
            if handle.released and handle in waiting:
                waiting.discard(handle)
                yield handle
        time.sleep(PAUSE_S)


def _check(handle: Handle) -> None:
    if handle.phase is Phase.FAILED:
        raise handle.error or PeerLostError(f"{handle.room.decode()} failed")


def moved(handle: Handle) -> Moved:
    """The endpoint's report of a room."""
    report = handle.report
    return Moved(report.nbytes, report.descriptors, report.path, report.transport, dict(report.seconds))
