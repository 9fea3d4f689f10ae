"""How long a request of very many chunks takes, and whether a chunk costs the same however many there are."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from statistics import median

from attrs import evolve, field, frozen

from disagg_kv.errors import ConfigurationError, IntegrityError
from disagg_kv.geometry import PageTable

from .data import poison
from .engine import SELDOM_S
from .machine import Machine
from .rank import KV, DecodeRank, Moved, PrefillRank, Setup, attend
from .ranks import ROLES, Ranks, running, within_one_process
from .shape import TransferShape
from .transfer import Quantiles

CPU = "cpu"

SMALLER = 4
"""The long request has this many times the chunks of the shorter one."""


@frozen
class Chunked:
    """One strategy.

    Args:
        strategy: its name.
        path: the path that the bytes took.
        segments: segments of the long request; one per chunk.
        seconds: from prefill's first chunk until decode's engine sees that the room is released.
        cpu_s: median processor time of prefill's process and of decode's in that time. If they are threads of one
            process, both are that process's time.
        chunk_us: median time per chunk, in microseconds.
        shorter_chunk_us: the same for a request with ``1 / SMALLER`` of the chunks.
    """

    strategy: str
    path: str
    segments: int
    seconds: Quantiles
    cpu_s: tuple[float, float]
    chunk_us: float
    shorter_chunk_us: float


@frozen
class ChunksReport:
    """The results of one run.

    Args:
        transport: the transport's name.
        tokens, chunk: tokens of the long request, and of each chunk.
        layers: number of layers, each with one head of two bytes.
        repeats: measured requests of each strategy and length.
        strategies: the result of each strategy.
    """

    transport: str
    tokens: int
    chunk: int
    layers: int
    repeats: int
    strategies: tuple[Chunked, ...]
    machine: Machine = field(factory=Machine.here)


class ChunkedPrefill(PrefillRank):
    """Submits a request chunk by chunk, as fast as it can."""

    pause_s = SELDOM_S

    def hand_over(self, tokens: int, chunk: int) -> Moved:
        """Submit the first ``tokens`` of the request, and wait until the pages are released."""
        delivery, size = self._delivery, self._shape.page_size
        began, used = time.monotonic(), time.process_time()
        for start in range(0, tokens, chunk):
            stop = min(start + chunk, tokens)
            delivery.send_chunk(stop, [PageTable(KV, self._ids[start // size : -(-stop // size)], start)])
        delivery.finish(tokens)
        self._until(lambda: delivery.released, busy=self._shape.busy)
        ended, used = time.monotonic(), time.process_time() - used
        return _with_cpu(self.moved(began, ended), used)


class ChunkedDecode(DecodeRank):
    """Awaits a request in pages that hold nothing before."""

    pause_s = SELDOM_S

    def forget(self, strategy: str) -> None:
        """Clear the memory, so that bytes of an earlier request are not taken for this one's."""
        poison(self._pools[strategy])

    def move(self) -> Moved:
        """See :meth:`DecodeRank.move`; called before prefill submits anything."""
        used = time.process_time()
        moved = super().move()
        return _with_cpu(moved, time.process_time() - used)


def _with_cpu(moved: Moved, seconds: float) -> Moved:
    return evolve(moved, seconds={**moved.seconds, CPU: seconds})


def serve(pipe: Connection, setup: Setup) -> None:
    """Be a rank until the pipe is closed."""
    attend(pipe, setup.device, lambda: (ChunkedPrefill if setup.role == "prefill" else ChunkedDecode)(setup))


def run_chunks(
    transport: str = "shm",
    strategies: Sequence[str] = ("staged", "direct"),
    tokens: int = 1_000_000,
    chunk: int = 64,
    layers: int = 1,
    repeats: int = 5,
    timeout_s: float = 120.0,
    progress: Callable[[str], None] = lambda _: None,
) -> ChunksReport:
    """Move requests of very many small chunks with few bytes, so that the time is the cost of a chunk.

    Args:
        transport: the transport's name.
        strategies: strategies to measure in turns.
        tokens: tokens of the long request.
        chunk: tokens of a chunk, and of a page.
        layers: layers of the cache.
        repeats: measured requests of each strategy and length.
        timeout_s: seconds after which a request has failed.
        progress: called with a line after each request.

    Raises:
        ConfigurationError: invalid numbers, or an unknown transport or strategy.
        IntegrityError: a request's bytes are wrong.
        DeadlineError, PeerLostError: a rank hangs, or has ended.
    """
    if repeats < 1 or chunk < 1 or tokens < SMALLER * chunk:
        raise ConfigurationError(f"{repeats} requests of {tokens} tokens in chunks of {chunk}: fewer than {SMALLER}")
    threads = within_one_process(transport)
    found: dict[tuple[str, int], list[tuple[Moved, Moved]]] = {}
    shorter = tokens // SMALLER // chunk * chunk
    for length in (shorter, tokens):
        shape = TransferShape(
            transport=transport,
            strategies=tuple(strategies),
            prefill_tp=1,
            tokens=length,
            layers=layers,
            kv_heads=1,
            head_dim=1,
            page_size=chunk,
            decode_page_size=chunk,
            timeout_s=timeout_s,
        )
        shape.explain()
        with tempfile.TemporaryDirectory(prefix="disagg-kv-bench-") as folder:
            setups = {role: [Setup(shape, role, 0, folder, 1)] for role in ROLES}
            with running(serve, setups, timeout_s, threads=threads) as (prefill, decode):
                for number in range(repeats + 1):
                    for name in strategies:
                        both = _request(prefill, decode, shape, name, f"{number}", chunk)
                        if number:
                            found.setdefault((name, length), []).append(both)
                        progress(f"{length:,} tokens, {name}: {both[1].ended - both[0].began:.2f} s")
    of = tuple(_chunked(name, found[name, tokens], found[name, shorter]) for name in strategies)
    return ChunksReport(transport, tokens, chunk, layers, repeats, of)


def _request(
    prefill: Ranks, decode: Ranks, shape: TransferShape, strategy: str, room: str, chunk: int
) -> tuple[Moved, Moved]:
    name = f"{strategy} {room}".encode()
    decode.ask(type(None), "forget", strategy)
    decode.ask(type(None), "prepare", strategy, name)
    prefill.ask(type(None), "prepare", strategy, name)
    decode.tell("move")
    (sent,) = prefill.ask(Moved, "hand_over", shape.tokens, chunk)
    (came,) = decode.answers(Moved)
    (bad,) = decode.ask(int, "wrong", strategy)
    if bad or sent.nbytes != came.nbytes:
        raise IntegrityError(
            f"{strategy}, {shape.tokens:,} tokens: {bad:,} bytes are wrong, {sent.nbytes:,} were sent and "
            f"{came.nbytes:,} came; its times are invalid"
        )
    return sent, came


def _chunked(name: str, long: Sequence[tuple[Moved, Moved]], short: Sequence[tuple[Moved, Moved]]) -> Chunked:
    seconds, shorter = (Quantiles.of([came.ended - sent.began for sent, came in some]) for some in (long, short))
    sent = long[0][0]
    cpu = median(one.seconds[CPU] for one, _ in long), median(one.seconds[CPU] for _, one in long)
    each = 1e6 * seconds.p50 / sent.segments, 1e6 * shorter.p50 / short[0][0].segments
    return Chunked(name, sent.path, sent.segments, seconds, cpu, *each)
