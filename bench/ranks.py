"""Starts ranks, in processes or threads, sends commands to all of them at once, and ends them."""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from disagg_kv.engines.hf.demo.devices import spread
from disagg_kv.errors import DeadlineError, DisaggKVError, PeerLostError
from disagg_kv.ids import Role
from disagg_kv.strategies import Explanation
from disagg_kv.transports import between_processes

from .rank import Setup, serve
from .shape import TransferShape

GRACE_S = 10.0
"""Seconds that a rank gets to end by itself."""

ROLES: tuple[Role, ...] = ("prefill", "decode")

T = TypeVar("T")
S = TypeVar("S")


class Ranks:
    """The ranks of one role."""

    def __init__(self, role: Role, pipes: Sequence[Connection], timeout_s: float) -> None:
        self._role = role
        self._pipes = pipes
        self._timeout_s = timeout_s

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self._pipes)

    def tell(self, name: str, *args: object) -> None:
        """Have all of them do something; the answers are still to be taken."""
        for pipe in self._pipes:
            pipe.send((name, args))

    def give(self, name: str, args: Sequence[object]) -> None:
        """Have each of them do something with an argument of its own, and wait."""
        self.send(name, args)
        self.answers(type(None))

    def send(self, name: str, args: Sequence[object]) -> None:
        """The same; the answers are still to be taken."""
        for pipe, arg in zip(self._pipes, args, strict=True):
            pipe.send((name, (arg,)))

    def ask(self, kind: type[T], name: str, *args: object) -> list[T]:
        """Have all of them do something, and wait."""
        self.tell(name, *args)
        return self.answers(kind)

    def answers(self, kind: type[T]) -> list[T]:
        """One answer of each.

        Raises:
            DisaggKVError: what one of them met.
            PeerLostError: one of them has ended.
            DeadlineError: one of them does not answer.
        """
        until = time.monotonic() + self._timeout_s + GRACE_S
        found: list[T] = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, until - time.monotonic())):
                raise DeadlineError(f"bench: {self._role} rank {rank} does not answer")
            try:
                answer: object = pipe.recv()
            except EOFError as exc:
                raise PeerLostError(f"bench: {self._role} rank {rank} has ended") from exc
            if isinstance(answer, DisaggKVError):
                raise answer
            assert isinstance(answer, kind)
            found.append(answer)
        return found


@contextmanager
def started(shape: TransferShape, explanation: Explanation) -> Iterator[tuple[Ranks, Ranks]]:
    """All prefill ranks and all decode ranks; none is left afterwards.

    They are processes, unless the transport works only within one: then they are threads.
    """
    devices = _devices(shape)
    with tempfile.TemporaryDirectory(prefix="disagg-kv-bench-") as folder:

        def setup(role: Role, rank: int) -> Setup:
            incoming = sum(p.nbytes for p in explanation.pairs if role == "decode" and p.target == rank)
            return Setup(shape, role, rank, folder, incoming, devices[role][rank])

        setups = {role: [setup(role, rank) for rank in range(shape.ranks(role))] for role in ROLES}
        threads = shape.device == "cpu" and within_one_process(shape.transport)
        with running(serve, setups, shape.timeout_s, threads=threads) as ranks:
            yield ranks


def within_one_process(name: str) -> bool:
    """Whether a transport reaches no other process."""
    carriers = between_processes(name)
    carriers.close(0.0)
    return all(one.caps.in_process_only for one in carriers)


@contextmanager
def running(
    target: Callable[[Connection, S], None], setups: Mapping[Role, Sequence[S]], timeout_s: float, *, threads: bool
) -> Iterator[tuple[Ranks, Ranks]]:
    """A process or a thread for each setup; none is left afterwards.

    Args:
        target: what each runs, with its end of a pipe and its setup; see :func:`~bench.rank.attend`.
        setups: of both roles.
        timeout_s: within which each must answer.
        threads: not processes.
    """
    # A server that has imported everything once forks the ranks; it has one thread, which makes that safe.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([target.__module__])
    started: list[multiprocessing.process.BaseProcess | threading.Thread] = []
    pipes: dict[Role, list[Connection]] = {role: [] for role in ROLES}
    try:
        for role in ROLES:
            for setup in setups[role]:
                ours, theirs = context.Pipe()
                pipes[role].append(ours)
                make = threading.Thread if threads else context.Process
                one = make(target=target, args=(theirs, setup), daemon=True)
                one.start()
                started.append(one)
                if not threads:
                    theirs.close()
        prefill, decode = (Ranks(role, of, timeout_s) for role, of in pipes.items())
        decode.answers(type(None))
        prefill.answers(type(None))
        yield prefill, decode
        decode.tell("close")
        prefill.ask(type(None), "close")
        decode.answers(type(None))
    finally:
        for pipe in (*pipes["prefill"], *pipes["decode"]):
            pipe.close()
        _end(started)


def _devices(shape: TransferShape) -> Mapping[Role, Sequence[str]]:
    """Where each rank's memory lies."""
    if shape.device == "cpu":
        return {"prefill": ["cpu"] * shape.prefill_tp, "decode": ["cpu"] * shape.decode_tp}
    # Asks the driver's management library: this process must not begin to use CUDA, which no child can inherit.
    prefill, decode = spread(shape.prefill_tp, shape.decode_tp, torch.cuda.device_count())
    return {"prefill": [f"cuda:{gpu}" for gpu in prefill], "decode": [f"cuda:{gpu}" for gpu in decode]}


def _end(started: Sequence[multiprocessing.process.BaseProcess | threading.Thread]) -> None:
    until = time.monotonic() + GRACE_S
    for one in started:
        one.join(max(0.0, until - time.monotonic()))
        if isinstance(one, multiprocessing.process.BaseProcess) and one.is_alive():
            one.kill()
            one.join()
