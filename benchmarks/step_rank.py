"""One rank of ``benchmarks.step``: an endpoint, and an engine's thread that makes steps.

It imports only public names of the library, and nothing of ``bench``, so that it also runs with the library of an
older checkout.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import closing, suppress
from math import inf
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from attrs import frozen

import disagg_kv
from disagg_kv import (
    CacheSpec,
    DecodeEndpoint,
    DisaggKVError,
    Expectation,
    GroupId,
    Options,
    PagedPool,
    PageTable,
    PrefillEndpoint,
    Source,
    shard,
    transport,
)
from disagg_kv.channels import UnixChannel, ZmqChannel
from disagg_kv.ids import RoomId
from disagg_kv.rendezvous import StaticRendezvous

Role = Literal["prefill", "decode"]

KV = GroupId("kv")
PAGE, SPARE = 16, 2
"""Tokens of a page, and pages of a pool that no request uses."""
POISON = 0xA5
"""Content of decode's pages before each request."""
TIMEOUT_S = 60.0


@frozen
class Cache:
    """What one request moves: bfloat16, keys and values."""

    layers: int = 32
    heads: int = 4
    head_dim: int = 64
    tokens: int = 256

    @property
    def nbytes(self) -> int:
        """Of one request."""
        return self.layers * self.heads * self.head_dim * self.tokens * 2 * 2


@frozen
class Setup:
    """Who a rank is.

    Args:
        role: which side.
        path: of both sides.
        channel: ``"unix"`` or ``"zmq"``.
        folder: where the channels' sockets are.
        cache: what a request moves.
    """

    role: Role
    path: str
    channel: str
    folder: str
    cache: Cache

    def address(self, role: Role) -> str:
        """Where a rank is reached."""
        return f"{'ipc' if self.channel == 'zmq' else 'unix'}://{self.folder}/{role}"


@frozen
class Load:
    """What an engine's thread does between two polls.

    Args:
        name: its row in the table.
        python_s: seconds of Python code.
        sleep_s: seconds without the interpreter lock, after that. ``time.sleep`` stands for a forward pass, which waits
            for its GPU in C++.
    """

    name: str
    python_s: float
    sleep_s: float

    def step(self) -> None:
        """Do it once."""
        until = time.monotonic() + self.python_s
        while time.monotonic() < until:
            pass
        if self.sleep_s:
            time.sleep(self.sleep_s)


@frozen
class Ask:
    """One request.

    Args:
        room: its name.
        load: of both engine threads.
        lag_s: by how much this side's first step is late, so that the steps of both sides do not keep time.
        stop_s: from when on this side's engine polls no more; infinite: it goes on. See :meth:`Engine.until`.
    """

    room: str
    load: Load
    lag_s: float = 0.0
    stop_s: float = inf


@frozen
class Seen:
    """One request as one engine saw it; seconds of the clock that all processes of a host share.

    Args:
        opened: its room was open; decode: and awaited.
        sent: prefill: before ``send_chunk``; decode: as ``opened``.
        known: the endpoint knew the outcome.
        released: the engine saw the room released.
        longest_s: of the engine's calls (``poll``, ``send_chunk``, ``finish``) from ``sent`` on, the longest.
    """

    opened: float
    sent: float
    known: float
    released: float
    longest_s: float


class Engine:
    """An engine's thread: it makes steps, and takes the time of its calls.

    Args:
        poll: the endpoint's.
        ask: the request.
    """

    def __init__(self, poll: Callable[[], Any], ask: Ask) -> None:
        self._poll = poll
        self._load = ask.load
        self._stop_at = time.monotonic() + ask.stop_s
        self._polls = True
        self.longest_s = 0.0
        if ask.lag_s:
            time.sleep(ask.lag_s)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """One call of the endpoint."""
        began = time.monotonic()
        answer = function(*args)
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        return answer

    def until(self, good: Callable[[], bool], handle: Any) -> None:
        """Make steps until it is good.

        An engine stops after a poll that reports nothing: a handle that a poll reports shows that state until the next
        poll.
        """
        give_up = time.monotonic() + TIMEOUT_S
        while True:
            if self._polls:
                changed = self.call(self._poll)
                self._polls = bool(changed) or time.monotonic() < self._stop_at
            if handle.error is not None:
                raise handle.error
            if good():
                return
            if time.monotonic() > give_up:
                raise DisaggKVError(f"{handle.room!r}: not done after {TIMEOUT_S:g} s")
            self._load.step()


class Rank:
    """One side."""

    def __init__(self, setup: Setup) -> None:
        self._cache = cache = setup.cache
        carrier: Any = transport("shm")
        channel: Any = (ZmqChannel if setup.channel == "zmq" else UnixChannel)(setup.address(setup.role))
        spec, pages = CacheSpec.kv(cache.layers, cache.heads, cache.head_dim, "bfloat16"), -(-cache.tokens // PAGE)
        self._pool = PagedPool.allocate(
            spec, shard(spec), pages=pages + SPARE, page_size=PAGE, allocator=carrier.allocate
        )
        drawn = np.random.default_rng([setup.role == "decode"]).permutation(pages + SPARE).astype(np.int32)
        self._ids, self._spare = drawn[:pages], drawn[pages:]
        self._table = PageTable(KV, self._ids)
        self._planes = [self._pool.view(number) for number in range(2 * cache.layers)]
        roles: tuple[Role, Role] = ("prefill", "decode")
        self._end: Any = {"prefill": PrefillEndpoint, "decode": DecodeEndpoint}[setup.role](
            self._pool,
            transport=carrier,
            channel=channel,
            rendezvous=StaticRendezvous({role: [setup.address(role)] for role in roles}),
            instance=setup.role,
            options=Options(silence_s=TIMEOUT_S, total_s=TIMEOUT_S, claim_s=TIMEOUT_S),
            strategy=setup.path,
        )

    def poison(self) -> None:
        """Let nothing of an earlier request be in the pages."""
        for plane in self._planes:
            plane[:] = POISON

    def close(self) -> None:
        """End the endpoint."""
        self._end.close(1.0)

    def _rows(self, plane: int) -> Any:
        """What prefill has: ``[pages, tokens of a page, heads, bytes]``."""
        size = len(self._ids), *self._planes[plane].shape[1:]
        return np.random.default_rng(plane).integers(256, size=size, dtype=np.uint8)

    def _seen(self, handle: Any, opened: float, sent: float, longest_s: float) -> Seen:
        released = time.monotonic()
        return Seen(opened, sent, handle.report.ended, released, longest_s)


class Prefill(Rank):
    """Sends the request at the end of a step, as soon as it knows that decode awaits it."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.fill()

    def fill(self) -> None:
        """Write the request's rows."""
        for number, plane in enumerate(self._planes):
            plane[self._ids] = self._rows(number)

    def move(self, ask: Ask) -> Seen:
        """Make steps until the room is released."""
        delivery = self._end.open(RoomId(ask.room.encode()))
        opened, engine = time.monotonic(), Engine(self._end.poll, ask)
        engine.until(lambda: delivery.held is not None, delivery)
        ask.load.step()
        engine.longest_s, sent = 0.0, time.monotonic()
        engine.call(delivery.send_chunk, self._cache.tokens, [self._table])
        engine.call(delivery.finish, self._cache.tokens)
        engine.until(lambda: delivery.released, delivery)
        return self._seen(delivery, opened, sent, engine.longest_s)


class Decode(Rank):
    """Awaits the request in pages that hold nothing of an earlier one."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._right = [self._rows(number) for number in range(len(self._planes))]

    def move(self, ask: Ask) -> Seen:
        """Make steps until the room is released."""
        reception = self._end.open(RoomId(ask.room.encode()), Source("prefill"))
        reception.expect(Expectation(self._cache.tokens, [self._table]))
        opened, engine = time.monotonic(), Engine(self._end.poll, ask)
        engine.until(lambda: reception.released, reception)
        return self._seen(reception, opened, opened, engine.longest_s)

    def wrong(self) -> int:
        """Bytes that are not as they must be, in the request's pages and beside them."""
        bad = 0
        for plane, right in zip(self._planes, self._right, strict=True):
            bad += int(np.count_nonzero(plane[self._ids] != right)) + int(
                np.count_nonzero(plane[self._spare] != POISON)
            )
        return bad


def main(descriptor: int) -> None:
    """Carry out commands from a pipe until it is closed; the first answer is where the library was imported from."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted, and closes the pipe
    torch.set_num_threads(1)
    pipe = Connection(descriptor)
    with suppress(EOFError, ConnectionError):
        setup: Setup = pipe.recv()
        try:
            rank = Prefill(setup) if setup.role == "prefill" else Decode(setup)
        except Exception as error:
            pipe.send(_portable(error))
            return
        with closing(rank):
            pipe.send(str(Path(disagg_kv.__file__).parents[1]))
            while True:
                name, args = pipe.recv()
                try:
                    answer = getattr(rank, name)(*args)
                except Exception as error:
                    answer = _portable(error)
                pipe.send(answer)


def _portable(error: Exception) -> DisaggKVError:
    """An error in words, which cross a pipe between two versions of the library."""
    return DisaggKVError(f"{type(error).__name__}: {error}")
