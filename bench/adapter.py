"""The cost that a transport adds to its library: the same write through both, in turns."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
from attrs import field, frozen

from disagg_kv.errors import ConfigurationError, DeadlineError, DisaggKVError, IntegrityError
from disagg_kv.ids import RegionId
from disagg_kv.memory import bytes_of, new_buffer
from disagg_kv.planning import Writes
from disagg_kv.transports import WriteEnded, transport

from .data import POISON
from .machine import Machine
from .raw import Raw, Target, raw
from .transfer import Quantiles

PAUSE_S = 20e-6
"""Between two polls of the transport: a thread that does not pause takes the core from the one that writes."""


@frozen
class Size:
    """One size of write; times in seconds.

    Args:
        nbytes: size of the write.
        writes: number of measured writes of each kind.
        raw: the library's own call.
        adapter: from ``submit`` until ``poll`` reports the end.
        overhead_s: the median of the differences between adjacent writes.
        overhead_share: the same as a share of the raw median.
    """

    nbytes: int
    writes: int
    raw: Quantiles
    adapter: Quantiles
    overhead_s: float
    overhead_share: float


@frozen
class AdapterReport:
    """The results of one run."""

    transport: str
    sizes: Sequence[Size]
    machine: Machine = field(factory=Machine.here)


@frozen
class _There:
    """The target's addresses for raw writes and for the transport's."""

    raw: Target
    descriptor: bytes
    region: RegionId


def run_adapter(name: str, writes: Mapping[int, int], timeout_s: float = 60.0) -> AdapterReport:
    """Measure. Before and after each size, one write of it is checked, through the library and through the transport.

    Args:
        name: a transport with a library behind it.
        writes: number of writes, by their size in bytes.
        timeout_s: seconds after which a write has failed.

    Raises:
        ConfigurationError: no sizes, or a transport that does not exist or has no library.
        IntegrityError: wrong bytes; there is no report then.
        DeadlineError: a write does not end.
    """
    if not writes or min(*writes, *writes.values()) < 1:
        raise ConfigurationError(f"writes {dict(writes)}: at least one size, all of them and their numbers positive")
    most = max(writes)
    memory = new_buffer(most, "cpu")
    library = raw(name, memory, "source")
    with _target(name, most, timeout_s) as (pipe, there):
        side = transport(name)
        (region,) = side.register([memory])
        peer = side.connect(there.descriptor, timeout_s)

        def write(writes: Writes) -> None:
            ticket = side.submit(peer, writes)
            until = time.monotonic() + timeout_s
            while True:
                for event in side.poll():
                    if isinstance(event, WriteEnded) and event.ticket == ticket:
                        if event.error is not None:
                            raise event.error
                        return
                if time.monotonic() > until:
                    raise DeadlineError(f"a write of {int(writes.nbytes[0])} bytes has not ended after {timeout_s:g} s")
                time.sleep(PAUSE_S)

        try:
            content = np.random.default_rng(0).bytes(most)
            bytes_of(memory)[:] = np.frombuffer(content, np.uint8)

            def checked(what: str, call: Callable[[], None], nbytes: int) -> None:
                """One more write, into memory without bytes of earlier writes; returns the bytes that have landed."""
                for said, act in ((nbytes, call), (content[:nbytes], None)):
                    pipe.send(said)
                    if not pipe.poll(timeout_s) or not pipe.recv():
                        raise IntegrityError(f"{what} of {name!r}: {nbytes} bytes did not arrive as they were sent")
                    if act is not None:
                        act()

            sizes = []
            for n, count in writes.items():
                through = partial(write, Writes.one(region, 0, there.region, 0, n))
                kinds: dict[str, Callable[[], None]] = {"library": library.prepare(there.raw, n), "transport": through}
                for what, call in kinds.items():
                    checked(what, call, n)
                size = _size(n, count, kinds["library"], kinds["transport"])
                for what, call in kinds.items():
                    checked(what, call, n)
                sizes.append(size)
        finally:
            side.close(1.0)
    return AdapterReport(name, sizes)


def _size(nbytes: int, count: int, plain: Callable[[], None], through: Callable[[], None]) -> Size:
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(-2, count):
        for call, times in zip((plain, through), taken, strict=True):
            began = time.perf_counter()
            call()
            if number >= 0:
                times.append(time.perf_counter() - began)
    library, adapter = (Quantiles.of(times) for times in taken)
    over = float(np.median(np.subtract(taken[1], taken[0])))
    return Size(nbytes, count, library, adapter, over, over / library.p50)


@contextmanager
def _target(name: str, nbytes: int, timeout_s: float) -> Iterator[tuple[Connection, _There]]:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, name, nbytes), daemon=True)
    process.start()
    theirs.close()
    try:
        if not pipe.poll(timeout_s):
            raise DeadlineError(f"the target of {name!r} does not start within {timeout_s:g} s")
        there = pipe.recv()
        if isinstance(there, DisaggKVError):
            raise there
        yield pipe, there
    finally:
        pipe.close()
        process.join(10.0)
        if process.is_alive():
            process.kill()
            process.join()


def serve(pipe: Connection, name: str, nbytes: int) -> None:
    """Be the target until the pipe is closed."""
    with pipe:
        try:
            memory = new_buffer(nbytes, "cpu")
            library: Raw = raw(name, memory, "target")
            side = transport(name)
            (region,) = side.register([memory])
        except DisaggKVError as error:
            pipe.send(error)
            return
        pipe.send(_There(library.target(), side.local_descriptor(), region))
        try:
            while True:
                while not pipe.poll(library.pause_s):
                    library.work()
                asked = pipe.recv()
                if isinstance(asked, int):
                    bytes_of(memory)[:asked] = POISON
                    pipe.send(True)
                else:
                    pipe.send(bytes(bytes_of(memory)[: len(asked)]) == asked)
        except (EOFError, ConnectionError):
            side.close(0.0)
