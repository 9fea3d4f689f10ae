"""What connected idle peers cost a real endpoint: an empty poll, the round trip of a grant, memory, descriptors.

Processes with prefill endpoints and one decode endpoint each are connected any to any: each decode endpoint asks
several prefill endpoints of other processes for a page. Then this process connects one decode endpoint to few of the
prefill endpoints, and another one to all of them. Every byte is compared. Both decode endpoints are measured in turns,
while all peers are idle:

* an empty ``poll`` of the channel, and an empty step of the endpoint, in processor time of the thread;
* the round trip of a grant, for a prefill endpoint of this process: from the request to the grant, on one thread.

Memory and descriptors per peer are what this process has grown by while the rest of the peers were connected.

    python -m benchmarks.scale --json benchmarks/results/cpu_scale.json

The exit code is 1 if a limit does not hold: 1.2 times the few for polls, steps and grants, and 20 KB of memory a peer.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import attrs
from attrs import define, frozen

from bench.machine import Machine
from disagg_kv import (
    CacheSpec,
    DecodeEndpoint,
    Expectation,
    GroupId,
    Options,
    PagedPool,
    PageTable,
    Phase,
    PrefillEndpoint,
    Source,
    shard,
)
from disagg_kv.channels import Arrived, Channel, News, UnixChannel, ZmqChannel
from disagg_kv.core import Codec
from disagg_kv.core.wire.frames import Grant, StagingRequest
from disagg_kv.endpoints import Environment
from disagg_kv.endpoints.decode.handle import ReceptionHandle
from disagg_kv.errors import DeadlineError, IntegrityError
from disagg_kv.ids import RoomId
from disagg_kv.rendezvous import RequestRendezvous
from disagg_kv.transports import ShmTransport

RATIO_LIMIT, MEMORY_LIMIT = 1.2, 20_000
WAIT_S = 300.0
"""Seconds after which whatever is awaited has failed."""

FEW, FANOUT, BATCH = 2, 4, 16
"""Peers of the endpoint with few; prefill endpoints that each process asks; rooms that this process has open."""

POLLS, GRANTS = 200, 7
"""Empty polls of a round; grants of a round, after one that does not count."""

SPEC = CacheSpec.kv(1, 1, 16, "float16")
ROWS, KV = 16, GroupId("kv")
STEPPED = Environment(thread=False, engine=False)
OPTIONS = Options(claim_s=WAIT_S, silence_s=WAIT_S, closed_s=WAIT_S / 5)


@frozen
class Field:
    """Where the endpoints are.

    Args:
        kind: of the channels, ``unix`` or ``zeromq``.
        folder: for their sockets.
        peers: number of prefill endpoints.
        processes: that hold them.
    """

    kind: str
    folder: str
    peers: int
    processes: int

    def address(self, name: str) -> str:
        """Of an endpoint."""
        return f"{'unix' if self.kind == 'unix' else 'ipc'}://{self.folder}/{name}"

    def channel(self, name: str) -> Channel:
        """Of an endpoint."""
        return UnixChannel(self.address(name)) if self.kind == "unix" else ZmqChannel(self.address(name))

    def source(self, number: int) -> Source:
        """A prefill endpoint."""
        return Source(f"P{number}", (self.address(f"P{number}"),))

    def asked_by(self, process: int) -> list[int]:
        """The prefill endpoints that a process asks: the next ones after its own."""
        return [(process + 1 + self.processes * n // FANOUT + n) % self.peers for n in range(min(FANOUT, self.peers))]


def pool(pages: int) -> PagedPool:
    """A tiny cache."""
    return PagedPool.allocate(SPEC, shard(SPEC), pages=pages, page_size=ROWS)


def room_of(name: str, number: int) -> RoomId:
    """The room in which a decode endpoint meets a prefill endpoint."""
    return RoomId(f"{name} {number}".encode())


def prefill(field: Field, number: int, askers: Sequence[str], stack: ExitStack) -> None:
    """A prefill endpoint that serves a page to each decode endpoint that asks it."""
    made = pool(1)
    made.view(0)[:] = made.view(1)[:] = 1 + number % 200
    end = PrefillEndpoint(
        made, transport=ShmTransport(), channel=field.channel(f"P{number}"), rendezvous=RequestRendezvous(),
        instance=f"P{number}", strategy="staged", slot_bytes=4096, slots=2, options=OPTIONS,
    )  # fmt: skip
    stack.callback(end.close, 0.0)
    for name in askers:
        room = end.open(room_of(name, number))
        room.send_chunk(ROWS, [PageTable(KV, [0])])
        room.finish(ROWS)


def decode(
    field: Field, name: str, stack: ExitStack, *, thread: bool = True
) -> tuple[DecodeEndpoint, PagedPool, Channel]:
    """A decode endpoint, its pages and its channel."""
    made, channel = pool(BATCH), field.channel(name)
    end = DecodeEndpoint(
        made, transport=ShmTransport(), channel=channel, rendezvous=RequestRendezvous(), instance=name,
        strategy="staged", ring_bytes=1 << 18, options=OPTIONS, environment=Environment(thread=thread, engine=thread),
    )  # fmt: skip
    stack.callback(end.close, 0.0)
    return end, made, channel


def until(good: Callable[[], bool], step: Callable[[], object]) -> None:
    """Step until something holds."""
    end = time.monotonic() + WAIT_S
    while not good():
        step()
        if time.monotonic() > end:
            raise DeadlineError(f"nothing has come for {WAIT_S:g} s")


def meet(
    field: Field, name: str, end: DecodeEndpoint, made: PagedPool, numbers: Sequence[int], step: Callable[[], object]
) -> None:
    """Be served a page by each of these prefill endpoints, and compare the bytes."""
    for some in (numbers[first : first + BATCH] for first in range(0, len(numbers), BATCH)):
        rooms: list[ReceptionHandle] = []
        for page, number in enumerate(some):
            made.view(0)[page] = made.view(1)[page] = 0
            rooms.append(end.open(room_of(name, number), field.source(number)))
            rooms[-1].expect(Expectation(ROWS, [PageTable(KV, [page])]))
        until(lambda: all(room.released for room in rooms), step)  # noqa: B023
        for page, (number, room) in enumerate(zip(some, rooms, strict=True)):
            if room.error is not None:
                raise room.error
            if any((made.view(plane)[page] != 1 + number % 200).any() for plane in range(2)):
                raise IntegrityError(f"{name}: the bytes of P{number} are wrong")


def serve(pipe: Connection, field: Field, process: int) -> None:
    """A process with prefill endpoints and a decode endpoint; it waits to be terminated."""
    with ExitStack() as stack:
        for number in range(process, field.peers, field.processes):
            asking = [f"D{other}" for other in range(field.processes) if number in field.asked_by(other)]
            prefill(field, number, [*asking, "few", "many"] if number < FEW else [*asking, "many"], stack)
        end, made, _ = decode(field, f"D{process}", stack)
        pipe.send("ready")
        pipe.recv()
        meet(field, f"D{process}", end, made, field.asked_by(process), lambda: time.sleep(0.01))
        pipe.send("served")
        signal.pause()


@contextmanager
def processes(field: Field) -> Iterator[None]:
    """All processes, once they have met."""
    context = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    with ExitStack() as stack:
        for number in range(field.processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, field, number), daemon=True)
            process.start()
            stack.callback(process.join, WAIT_S)
            stack.callback(process.terminate)
            pipes.append(ours)
        for wanted in ("ready", "served"):
            for number, pipe in enumerate(pipes):
                if not pipe.poll(WAIT_S) or pipe.recv() != wanted:
                    raise DeadlineError(f"process {number} is not {wanted} after {WAIT_S:g} s")
            if wanted == "ready":
                for pipe in pipes:
                    pipe.send("go")
        yield


class Timed:
    """A channel that notes when requests for grants leave and grants come; satisfies ``Channel``."""

    def __init__(self, inner: Channel) -> None:
        self._inner = inner
        self._codec = Codec()
        self._asked = 0.0
        self.took: list[float] = []
        self.address, self.eager = inner.address, inner.eager
        self.wait, self.wake, self.forget, self.close = inner.wait, inner.wake, inner.forget, inner.close

    def send(self, address: str, frame: bytes) -> bool:
        """Pass a frame on."""
        if isinstance(self._codec.decode(frame), StagingRequest):
            self._asked = time.perf_counter()
        return self._inner.send(address, frame)

    def poll(self) -> Sequence[News]:
        """What came in."""
        came, at = self._inner.poll(), time.perf_counter()
        if any(isinstance(one, Arrived) and isinstance(self._codec.decode(one.frame), Grant) for one in came):
            self.took.append(at - self._asked)
        return came


@define
class Measured:
    """A decode endpoint of this process, and a prefill endpoint beside it whose grants are timed."""

    field: Field
    name: str
    end: DecodeEndpoint
    pool: PagedPool
    channel: Channel
    near: PrefillEndpoint
    timed: Timed
    rounds: int = 0
    poll_s: list[float] = attrs.field(factory=list)
    step_s: list[float] = attrs.field(factory=list)

    @classmethod
    def made(cls, field: Field, name: str, stack: ExitStack) -> Measured:
        """Both, stepped by hand."""
        end, made, channel = decode(field, name, stack, thread=False)
        timed = Timed(field.channel(f"near-{name}"))
        near = PrefillEndpoint(
            pool(GRANTS + 1), transport=ShmTransport(), channel=timed, rendezvous=RequestRendezvous(), instance="near",
            strategy="staged", slot_bytes=4096, slots=2, options=OPTIONS, environment=STEPPED,
        )  # fmt: skip
        stack.callback(near.close, 0.0)
        return cls(field, name, end, made, channel, near, timed)

    def meet(self, numbers: Sequence[int]) -> None:
        """Be served by these peers."""
        meet(self.field, self.name, self.end, self.pool, numbers, lambda: self.end.driver.step(0.01))

    def step(self) -> None:
        """One of both endpoints."""
        self.near.driver.step()
        self.end.driver.step()

    def measure(self) -> None:
        """One round."""
        began = time.thread_time()
        for _ in range(POLLS):
            self.channel.poll()
        middle = time.thread_time()
        for _ in range(POLLS):
            self.end.driver.step()
        self.poll_s.append((middle - began) / POLLS)
        self.step_s.append((time.thread_time() - middle) / POLLS)
        self.grants()

    def grants(self) -> None:
        """A room of this process, one grant after another; the first one ends a silence, and does not count."""
        self.rounds += 1
        name = room_of("near", self.rounds)
        sent = self.near.open(name)
        got = self.end.open(name, Source("near", (self.timed.address,)))
        got.expect(Expectation((GRANTS + 1) * ROWS, [PageTable(KV, range(GRANTS + 1))]))
        until(lambda: sent.phase is Phase.READY, self.step)
        before = len(self.timed.took)
        for page in range(GRANTS + 1):
            sent.send_chunk((page + 1) * ROWS, [PageTable(KV, [page], page * ROWS)])
            until(lambda: len(self.timed.took) > before + page, self.step)  # noqa: B023
        sent.finish((GRANTS + 1) * ROWS)
        until(lambda: sent.released and got.released, self.step)
        if got.error is not None:
            raise got.error
        del self.timed.took[before]

    def found(self) -> dict[str, float]:
        """Microseconds: the medians of all rounds."""
        series = {"poll_us": self.poll_s, "step_us": self.step_s, "grant_us": self.timed.took}
        return {name: 1e6 * statistics.median(values) for name, values in series.items()}


@frozen
class Scale:
    """The result for one kind of channel: microseconds with few peers and with many; bytes and descriptors per peer."""

    kind: str
    few: dict[str, float]
    many: dict[str, float]
    memory_per_peer: float
    descriptors_per_peer: float
    joined_s: float

    def document(self) -> dict[str, object]:
        """With the ratios, many over few, and whether the limits hold."""
        ratios = {name.removesuffix("_us"): self.many[name] / self.few[name] for name in self.few}
        ok = max(ratios.values()) <= RATIO_LIMIT and self.memory_per_peer <= MEMORY_LIMIT
        return attrs.asdict(self) | {"ratios": ratios, "ok": ok}


def held() -> tuple[int, int]:
    """Bytes of this process in memory, and its descriptors."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resident, len(list(Path("/proc/self/fd").iterdir()))


def run(kind: str, peers: int, parts: int, rounds: int) -> Scale:
    """Measure one kind of channel."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="disagg-kv-scale-") as folder, ExitStack() as stack:
        field = Field(kind, folder, peers, parts)
        stack.enter_context(processes(field))
        joined_s = time.monotonic() - began
        few, many = (Measured.made(field, name, stack) for name in ("few", "many"))
        for side in (few, many):
            side.meet(range(FEW))
            side.grants()
            side.timed.took.clear()
        before = held()
        many.meet(range(FEW, peers))
        memory, descriptors = ((b - a) / (peers - FEW) for a, b in zip(before, held(), strict=True))
        for _ in range(rounds):
            few.measure()
            many.measure()
    return Scale(kind, few.found(), many.found(), memory, descriptors, joined_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=200)
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    if not given.peers > FEW or not 1 <= given.processes <= given.peers or given.rounds < 1:
        parser.error(f"more than {FEW} peers, at least one round, and no more processes than peers")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    results = []
    for kind in ("unix", "zeromq"):
        results.append(run(kind, given.peers, given.processes, given.rounds).document())
        print(json.dumps(results[-1]), file=sys.stderr)
    document = {
        "peers": given.peers,
        "processes": given.processes,
        "few": FEW,
        "rounds": given.rounds,
        "limits": {"ratio": RATIO_LIMIT, "memory_per_peer": MEMORY_LIMIT},
        "results": results,
        "machine": attrs.asdict(Machine.here()),
        "ok": all(one["ok"] for one in results),
    }
    text = json.dumps(document, indent=2) + "\n"
    if given.json is not None:
        given.json.write_text(text)
    print(text)
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
