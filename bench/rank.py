"""One rank of a benchmark: a pool, an endpoint per strategy, and a loop that carries out the parent's commands."""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from copy import copy
from functools import partial
from multiprocessing.connection import Connection
from typing import Protocol, TypedDict

import torch
from attrs import evolve, frozen

from disagg_kv.channels import UnixChannel
from disagg_kv.core import Alone, Options, Verify
from disagg_kv.endpoints import DecodeEndpoint, Environment, Expectation, PrefillEndpoint
from disagg_kv.endpoints.handle import RoomHandle
from disagg_kv.endpoints.prefill.handle import ForwardPass
from disagg_kv.errors import DisaggKVError
from disagg_kv.geometry import PageTable
from disagg_kv.ids import GroupId, RegionId, Role, RoomId
from disagg_kv.kernels import Kernels, gpu_kernels
from disagg_kv.kernels.tensors import plane_of
from disagg_kv.memory import Event, PagedPool
from disagg_kv.rendezvous import Source, StaticRendezvous
from disagg_kv.strategies import LayerPipelined, Schedule, strategy
from disagg_kv.transports import Transport, Transports, between_processes

from .bulk import BulkSource, BulkTarget
from .data import SPARE, blank, fill, page_ids, poison, wrong
from .decode_load import DecodeLoad
from .emulated import emulate
from .engine import LOOK_S, POLL_S, between_polls, wait_until
from .shape import WIRE, TransferShape
from .timing import Queued, Still, Timed

ALONE = 8
"""Steps of a decode rank before each transfer."""

GRANTED_S = 0.02
"""Seconds after which the grants for announced rows have arrived."""

KV = GroupId("kv")


@frozen
class Setup:
    """Who a rank is.

    Args:
        shape: what is moved.
        role: which side.
        rank: which rank of it.
        folder: where the channels' sockets are.
        incoming: decode: bytes that arrive in one transfer.
        device: where its memory lies.
    """

    shape: TransferShape
    role: Role
    rank: int
    folder: str
    incoming: int
    device: str = "cpu"

    @property
    def plain(self) -> Transport:
        """For the plain writes: between GPUs always what copies from one to the other without any library."""
        name = self.shape.transport if self.device == "cpu" else "cuda_ipc"
        (only,) = between_processes(name, self.device)
        return only

    def address(self, role: Role, rank: int, strategy: str) -> str:
        """Where a rank's endpoint for a strategy is reached."""
        return f"unix://{self.folder}/{role}-{rank}-{self.shape.runs.index(strategy)}"

    def everybody(self, strategy: str) -> StaticRendezvous:
        """The addresses of all endpoints for a strategy."""
        roles: tuple[Role, ...] = ("prefill", "decode")
        return StaticRendezvous(
            {role: [self.address(role, r, strategy) for r in range(self.shape.ranks(role))] for role in roles}
        )


@frozen
class Moved:
    """One transfer on one rank.

    Args:
        began: prefill: when it handed the rows over, or they were final; decode: when it began to wait.
        ended: when its engine saw that the room was released.
        known: when its endpoint knew the outcome; decode: that all ranks had their rows. Like ``began`` and ``ended``,
            seconds of the clock that all processes of a host share.
        seconds: per phase, as the endpoint's report has them.
        nbytes: bytes that it sent or received.
        descriptors: writes that it posted.
        segments: segments that it sent or received.
        path: how they crossed.
        grants: prefill: seconds from asking for each segment's grant until it was there.
        groups: prefill: into how many groups the layers were cut.
        placed: decode: when its own rows were all in its pages.
        called: prefill: seconds of the call that makes the last rows final.
        steps, alone: decode, with a load: seconds of its steps during the transfer, and of as many as :data:`ALONE`
            before it.
    """

    began: float
    ended: float
    known: float
    seconds: Mapping[str, float]
    nbytes: int
    descriptors: int
    segments: int
    path: str
    grants: tuple[float, ...] = ()
    groups: int = 1
    placed: float = 0.0
    called: float = 0.0
    steps: tuple[float, ...] = ()
    alone: tuple[float, ...] = ()


class PrefillRank:
    """Sends. Without ``threaded``, the caller that waits steps the endpoint, too."""

    polls = False
    threaded = True
    pause_s = POLL_S

    def __init__(self, setup: Setup) -> None:
        shape, shards = setup.shape, setup.shape.shards("prefill")
        self._shape = shape
        self._ids = page_ids(shape, "prefill", setup.rank)
        size, layout = shape.pages("prefill")
        self._pool = PagedPool.allocate(
            shape.spec(),
            shards[setup.rank],
            pages=len(self._ids) + SPARE,
            page_size=size,
            layout=layout,
            device=setup.device,
        )
        fill(self._pool, shape, self._ids)
        self._channels = {name: Timed(UnixChannel(setup.address("prefill", setup.rank, name))) for name in shape.runs}
        self._ends = {
            name: PrefillEndpoint(
                self._pool,
                transport=_wire(setup),
                channel=self._channels[name],
                rendezvous=setup.everybody(name),
                instance="prefill",
                rank=setup.rank,
                shards=shards,
                slot_bytes=shape.slot_bytes,
                slots=shape.slots,
                verdict=Alone,
                options=_options(shape),
                schedule=_schedule(shape, name),
                environment=Environment(thread=self.threaded),
                **_how(shape, name),
            )
            for name in shape.runs
        }
        self._bulk = BulkSource(setup.plain, self._pool.buffers, shape.timeout_s)
        self._step: ForwardPass | None = None
        self._called = 0.0

    def connect(self, targets: Sequence[tuple[bytes, RegionId, int, int]]) -> None:
        """Learn where the plain writes go."""
        self._bulk.connect(targets)

    def plain_sums(self) -> list[int]:
        """Of each plain write, what its bytes sum up to."""
        return self._bulk.sums()

    def bulk(self) -> tuple[float, float]:
        """Write plainly; when it began and ended."""
        return self._bulk.move(self._queued())

    def _queued(self) -> Queued | None:
        return Queued(self._shape.queued_s) if self._shape.queued_s else None

    def prepare(self, strategy: str, room: bytes) -> None:
        """Open a room, and wait until decode has announced that it expects it; slots hold nothing of earlier rooms."""
        self._end, self._channel = self._ends[strategy], self._channels[strategy]
        if strategy != WIRE:
            blank(self._end.staging)
        self._delivery = self._end.open(RoomId(room))
        delivery, shape = self._delivery, self._shape
        # Not busy: helper threads that connect ranks may get no turn beside an engine that never sleeps.
        self._until(lambda: delivery.held is not None)
        if shape.announced:
            self._step = self._end.step({delivery.room: (shape.tokens, [PageTable(KV, self._ids)])})
            until = time.monotonic() + GRANTED_S
            self._until(lambda: time.monotonic() > until)

    def move(self) -> Moved:
        """Hand all rows over, and wait until the room is released: no process reads them any more."""
        delivery, tokens = self._delivery, self._shape.tokens
        queued = self._queued()
        began = time.monotonic()
        if self._shape.compute_s:
            self._compute(began)
        elif self._step is not None:
            self._close(None if queued is None else queued.over)
        else:
            delivery.send_chunk(tokens, [PageTable(KV, self._ids)])
            self._called = time.monotonic() - began
        delivery.finish(tokens)
        self._until(lambda: delivery.released, busy=self._shape.busy)
        ended = time.monotonic()
        return self.moved(began if queued is None else queued.ended(), ended)

    def moved(self, began: float, ended: float) -> Moved:
        """The transfer that is over."""
        grants = tuple(one.seconds for one in self._channel.taken())
        return evolve(_moved(self._delivery, began, ended, grants), called=self._called)

    def _until(self, good: Callable[[], bool], *, busy: bool = False) -> None:
        between = between_polls(busy=busy, pause_s=self.pause_s)
        wait_until(self._end.poll, good, self._delivery, self._shape.timeout_s, between)

    def _compute(self, began: float) -> None:
        """A forward pass that takes its time and computes nothing: the rows are there already."""
        layers = self._pool.site.shard.layers()
        if self._step is None:
            self._step = self._end.step({self._delivery.room: (self._shape.tokens, [PageTable(KV, self._ids)])})
        for number, layer in enumerate(layers, 1):
            time.sleep(max(0.0, began + self._shape.compute_s * number / len(layers) - time.monotonic()))
            self._step.layer_ready(layer)
        self._close(None)

    def _close(self, ready: Event | None) -> None:
        assert self._step is not None
        before = time.monotonic()
        self._step.close(ready)
        self._called = time.monotonic() - before
        self._step = None

    def idle(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """End all endpoints."""
        for end in self._ends.values():
            end.close(1.0)
        self._bulk.close()


class DecodeRank:
    """Receives; has a pool per strategy, because memory may have to be the transport's own."""

    pause_s = POLL_S

    def __init__(self, setup: Setup) -> None:
        shape, shards = setup.shape, setup.shape.shards("decode")
        self._shape = shape
        self._load = DecodeLoad(setup.device) if shape.decode_load else None
        self._alone: tuple[float, ...] = ()
        self._ids = page_ids(shape, "decode", setup.rank)
        self._pools: dict[str, PagedPool] = {}
        self._right: list[torch.Tensor] = []
        self._ends: dict[str, DecodeEndpoint] = {}
        size, layout = shape.pages("decode")
        for name in shape.runs:
            carrier = between_processes(shape.transport, setup.device)
            pool = self._pools[name] = PagedPool.allocate(
                shape.spec("decode"),
                shards[setup.rank],
                pages=len(self._ids) + SPARE,
                page_size=size,
                layout=layout,
                allocator=carrier.allocator,
                device=setup.device,
            )
            poison(pool)
            self._ends[name] = DecodeEndpoint(
                pool,
                transport=carrier,
                channel=UnixChannel(setup.address("decode", setup.rank, name)),
                rendezvous=setup.everybody(name),
                instance="decode",
                rank=setup.rank,
                shards=shards,
                ring_bytes=shape.ring_bytes,
                verdict=Alone,
                options=_options(shape),
                **_how(shape, name),
            )
        plain = setup.plain
        self.polls = plain.caps.needs_target_polling
        self._bulk = BulkTarget(plain, setup.incoming, setup.device)

    def describe(self) -> tuple[bytes, RegionId]:
        """Where the plain writes go."""
        return self._bulk.describe()

    def blank_plain(self) -> None:
        """Let nothing of an earlier plain write be there."""
        self._bulk.blank()

    def plain_sums(self, parts: Sequence[tuple[int, int]]) -> list[int]:
        """What the bytes of each part, (where it begins, how many), sum up to."""
        return self._bulk.sums(parts)

    def prepare(self, strategy: str, room: bytes) -> None:
        """Await a room, in pages and by a ring that hold nothing of an earlier one."""
        if strategy != WIRE:
            poison(self._pools[strategy])
            blank(self._ends[strategy].staging)
        self._end = self._ends[strategy]
        self._reception = self._end.open(RoomId(room), Source("prefill"))
        self._reception.expect(Expectation(self._shape.tokens, [PageTable(KV, self._ids)]))
        if self._load is not None:
            self._alone = tuple(self._load.step() for _ in range(ALONE))

    def move(self) -> Moved:
        """Make an engine's steps until it sees that the room is released: all rows are in its pages, for good."""
        reception, shape = self._reception, self._shape
        steps: list[float] = []
        between = between_polls(busy=shape.busy, pause_s=self.pause_s)
        if self._load is not None:
            between = partial(_take_step, self._load, steps)
        began = time.monotonic()
        wait_until(self._end.poll, lambda: reception.released, reception, shape.timeout_s, between)
        return evolve(_moved(reception, began, time.monotonic()), steps=tuple(steps), alone=self._alone)

    def wrong(self, strategy: str) -> int:
        """Bytes of the pool that are not as they must be: looked up once, and compared with what was right then."""
        pool = self._pools[strategy]
        if self._right:
            return sum(int((plane_of(pool, n) != right).sum()) for n, right in enumerate(self._right))
        bad = wrong(pool, self._shape, self._ids)
        if not bad:
            self._right = [plane_of(pool, n).clone() for n in range(len(pool.site.planes))]
        return bad

    def idle(self) -> None:
        """Let plain writes progress where that is up to the target."""
        self._bulk.work()

    def close(self) -> None:
        """End all endpoints."""
        for end in self._ends.values():
            end.close(1.0)
        self._bulk.close()


def _wire(setup: Setup) -> Transports | Sequence[Transport]:
    speed = setup.shape.wire_bytes_per_s
    carriers = between_processes(setup.shape.transport, setup.device)
    return carriers if speed is None else [emulate(one, speed) for one in carriers]


class _How(TypedDict, total=False):
    strategy: str
    verify: Verify
    kernels: Kernels


def _how(shape: TransferShape, name: str) -> _How:
    """An endpoint's arguments for one of the shape's runs."""
    if name == WIRE:
        return {"strategy": "staged", "kernels": Still()}
    again = {other: of for of, other in shape.verified.items()}
    how: _How = {"strategy": again.get(name, name)}
    if name in shape.verified.values():
        how["verify"] = shape.verify
    if shape.programs is not None:
        how["kernels"] = gpu_kernels(shape.programs)
    return how


def _options(shape: TransferShape) -> Options:
    """Silence is no end here: the benchmark sees when a rank ends, and a busy host may not let one speak in time."""
    silence_s, most_s = max(shape.timeout_s, Options().silence_s), shape.timeout_s
    return Options(silence_s=silence_s, total_s=most_s, claim_s=most_s)


def _schedule(shape: TransferShape, name: str) -> Schedule | None:
    """In place of the one that a run's name chooses."""
    name = name.partition(",")[0]
    if shape.group is None or name == WIRE or not isinstance(strategy(name).schedule, LayerPipelined):
        return None
    return LayerPipelined(fixed=shape.group)


class Served(Protocol):
    """An object whose methods a parent calls by name; if ``polls``, ``idle`` is called repeatedly between commands."""

    polls: bool

    def idle(self) -> None:
        """Called while no command waits."""
        ...

    def close(self) -> None:
        """End everything."""
        ...


TIMER_SLACK = 29
"""See prctl(2): Linux wakes a thread up to 50 us late to save power, as long as a pause of ours."""


def serve(pipe: Connection, setup: Setup) -> None:
    """Be a rank until the pipe is closed."""
    attend(pipe, setup.device, lambda: PrefillRank(setup) if setup.role == "prefill" else DecodeRank(setup))


def attend(pipe: Connection, device: str, make: Callable[[], Served]) -> None:
    """Carry out commands until the pipe is closed; the first answer, None, means that the rank has been made."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted, and ends us
        torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(device)
        ctypes.CDLL(None).prctl(TIMER_SLACK, 1)
    with suppress(EOFError, ConnectionError):
        try:
            rank = make()
        except Exception as error:
            pipe.send(_portable(error))
            return
        with closing(rank):
            pipe.send(None)
            _obey(pipe, rank, rank.polls)


def _obey(pipe: Connection, rank: Served, polls: bool) -> None:
    while True:
        while polls and not pipe.poll(LOOK_S):
            rank.idle()
        name, args = pipe.recv()
        try:
            answer = getattr(rank, name)(*args)
        except Exception as error:
            answer = _portable(error)
        pipe.send(answer)


def _portable(error: Exception) -> DisaggKVError:
    """A copy of the error without its cause, which may not survive a pipe; the words of one that is not ours."""
    if not isinstance(error, DisaggKVError):
        return DisaggKVError(f"{type(error).__name__}: {error}")
    made = copy(error)
    made.__cause__ = None
    return made


def _take_step(load: DecodeLoad, seconds: list[float]) -> None:
    seconds.append(load.step())


def _moved(handle: RoomHandle, began: float, ended: float, grants: tuple[float, ...] = ()) -> Moved:
    if handle.error is not None:
        raise handle.error
    r = handle.report
    assert r.ended is not None, "a room was released before its outcome was known"
    counts = r.nbytes, r.descriptors, r.segments
    placed = r.placed or r.ended
    return Moved(began, ended, r.ended, dict(r.seconds), *counts, r.path, grants, max(1, r.groups), placed)
