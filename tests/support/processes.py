"""Endpoints in processes of their own, which a test may kill and freeze, with caches that anybody can recompute."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Literal, TypeVar, overload

import numpy as np
import torch
from attrs import astuple, field, frozen
from torch._C._distributed_c10d import TCPStore  # torch.distributed does not export it to type checkers

from disagg_kv import CacheSpec, DecodeEndpoint, GroupId, Options, PagedPool, PageTable, PrefillEndpoint, Source, shard
from disagg_kv.channels import UnixChannel, ZmqChannel
from disagg_kv.endpoints import Expectation, attempt_id
from disagg_kv.endpoints.decode.handle import ReceptionHandle
from disagg_kv.endpoints.prefill.handle import DeliveryHandle
from disagg_kv.ids import Role, RoomId, Ticket
from disagg_kv.kernels import CpuKernels, PageMove
from disagg_kv.kernels.tensors import plane_of
from disagg_kv.memory import U8, Event, Flag
from disagg_kv.rendezvous import StoreRendezvous
from disagg_kv.testing import Fault, FaultyTransport
from disagg_kv.transports import (
    PeerLost,
    Settled,
    SupportsAllocate,
    Transport,
    Transports,
    WriteEnded,
    between_processes,
    decode,
)
from tests.support.answering import answer

KV = GroupId("kv")
SPEC = CacheSpec.kv(2, 4, 16, "float32")
PAGES, PLANES, POISON = 256, 4, 0xA5
DEADLINE_S = 120.0
"""How long anything may take before a test calls it a hang."""

Wire = Literal["ipc", "tcp", "unix"]
T = TypeVar("T")


@frozen
class Knobs:
    """What differs between tests.

    Args:
        path: strategy.
        page_size: tokens of a page.
        layout: order inside a page.
        ring_bytes: decode: the ring's size.
        slot_bytes: prefill: a staging slot's size.
        held_from: prefill: this write and all after it are in flight until the test releases them; None: none is.
        options: times and bounds.
        transport: what carries the writes.
        pages: pages of the pool.
        slots: prefill: staging slots.
        bind: the channel's address; empty: one of its own.
        drain_s: the transport's option of that name; None: its default.
        aux_slots: rows of aux data; rooms that name none of their own share the first.
        late: prefill: writes are in flight for a random while.
        copying: prefill: copies into mapped pages are in flight until the test releases them.
        device: of the pool.
        pinned: whether the pool's memory, on the host, is pinned.
    """

    path: str = "staged"
    page_size: int = 16
    layout: Literal["NHD", "HND"] = "NHD"
    ring_bytes: int = 1 << 20
    slot_bytes: int = 1 << 16
    held_from: int | None = None
    options: Options = field(factory=Options)
    transport: str = "shm"
    pages: int = PAGES
    slots: int = 8
    bind: str = ""
    drain_s: float | None = None
    aux_slots: int = 1
    late: bool = False
    copying: bool = False
    device: str = "cpu"
    pinned: bool = False


@frozen
class Setup:
    """One endpoint: which side, its instance, its rank there, its channel's address, the store's port."""

    role: Role
    instance: str
    rank: int
    ranks: int
    bind: str
    store: int
    knobs: Knobs


@frozen
class Look:
    """A room on one rank, at one moment."""

    phase: str
    released: bool
    error: str
    message: str
    nbytes: int
    path: str
    transport: str
    transport_reason: str
    segments: int


@frozen
class State:
    """A room over its attempts on one rank, at one moment; ``attempt`` is 1 for the first."""

    phase: str
    released: bool
    error: str
    message: str
    attempt: int

    @property
    def final(self) -> bool:
        """Whether its outcome is known."""
        return self.phase in ("DONE", "FAILED")


def cells(content: bytes, tokens: int) -> Sequence[U8]:
    """The whole cache of that name, ``[tokens, heads, head bytes]`` per plane: K, then V, layer after layer."""
    draw = np.random.default_rng(zlib.crc32(content))
    return [draw.integers(0, 256, (tokens, 4, 64), np.uint8) for _ in range(PLANES)]


@frozen
class Footprint:
    """What a process has open.

    Args:
        fds: file descriptors, but for those in ``ended``.
        ended: TCP connections that the other side has ended, and this one not (CLOSE_WAIT).
        shared: mappings of shared memory.
        regions: that its transport knows.
    """

    fds: int
    ended: int
    shared: int
    regions: int

    def within(self, most: Footprint) -> bool:
        """Whether nothing is more than it was."""
        return all(mine <= theirs for mine, theirs in zip(astuple(self), astuple(most), strict=True))


class _Gate(FaultyTransport):
    """A transport whose writes, from one on, are in flight until the gate opens; ``poll`` is called by one thread."""

    def __init__(self, inner: Transport, first: int) -> None:
        super().__init__(inner, lambda n: Fault.DELAYED if n >= first and not self.opened else None)
        self.opened = False

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        if self.opened:
            self.release()
        return super().poll()


class _Late(FaultyTransport):
    """A transport whose writes are in flight for a random while, one in a hundred for long; one thread polls."""

    def __init__(self, inner: Transport, seed: int) -> None:
        super().__init__(inner, lambda n: Fault.DELAYED)
        self.caps = inner.caps  # as far as its process lives: what it holds ends with it
        self._due: dict[Ticket, float] = {}
        self._draw = np.random.default_rng(seed)

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        now = time.monotonic()
        for ticket in self.held:
            if ticket not in self._due:
                self._due[ticket] = now + float(self._draw.choice([0.0, 0.02, 0.5], p=[0.6, 0.39, 0.01]))
            if self._due[ticket] <= now:
                del self._due[ticket]
                self.release(ticket)
        return super().poll()


class _Copying(Thread):
    """A copy that writes the same bytes over and over until it may end; also the event of its end."""

    def __init__(self, kernels: _Copies, moves: Sequence[PageMove]) -> None:
        super().__init__(daemon=True)
        self._kernels = kernels
        self._moves = moves

    def run(self) -> None:
        """Write, as a device does."""
        while not self._kernels.opened.wait(0.001):
            CpuKernels().copy(self._moves, None)
        CpuKernels().copy(self._moves, None)

    def query(self) -> bool:
        """True once it writes nothing any more."""
        return not self.is_alive()

    def synchronize(self) -> None:
        """Wait for that."""
        self.join()


class _Copies(CpuKernels):
    """Copies that are in flight until the test releases them."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.held: list[_Copying] = []

    def orders(self, event: Event) -> bool:
        """No event is left to these copies."""
        return False

    def copy(  # type: ignore[override]
        self, moves: Sequence[PageMove], after: Event | None, flags: Sequence[Flag] = ()
    ) -> Event | None:
        """Begin."""
        self.held.append(_Copying(self, moves))
        self.held[-1].start()
        return self.held[-1]


class Member:
    """In the child: a pool, its endpoint, and the rooms on it. Rooms take new pages each time, in a random order."""

    def __init__(self, setup: Setup) -> None:
        shards = [shard(SPEC, tp=setup.ranks, rank=rank) for rank in range(setup.ranks)]
        knobs = setup.knobs
        self.setup = setup
        self.settled()  # UCX finds a GPU through the context that this has made
        own = {} if knobs.drain_s is None else {knobs.transport: {"drain_s": knobs.drain_s}}
        inner = between_processes(knobs.transport, knobs.device, **own)
        self._transports: Transports | Sequence[Transport] = inner
        self._transport = next(iter(inner))
        if knobs.held_from is not None or knobs.late:
            held = _Gate(self._transport, knobs.held_from or 0)
            self._transport = _Late(self._transport, setup.rank) if knobs.late else held
            self._transports = [self._transport]
        self._copies = _Copies() if knobs.copying else None
        self.pool = PagedPool.allocate(
            SPEC,
            shards[setup.rank],
            pages=knobs.pages,
            page_size=knobs.page_size,
            layout=knobs.layout,
            aux_slots=knobs.aux_slots,
            aux_bytes=16,
            allocator=self._transport.allocate if isinstance(self._transport, SupportsAllocate) else None,
            device=knobs.device,
            pinned=knobs.pinned,
        )
        self.planes = [plane_of(self.pool, plane) for plane in range(PLANES)]
        for plane in self.planes:
            plane.fill_(POISON)
        self.settled()
        self.heads = slice(setup.rank * 4 // setup.ranks, (setup.rank + 1) * 4 // setup.ranks)
        self.unused = np.random.default_rng(setup.rank).permutation(knobs.pages).astype(np.int32)
        self.pages: dict[bytes, PageTable] = {}
        self.contents: dict[bytes, bytes] = {}
        self.rows: dict[bytes, int] = {}
        self._store = TCPStore("127.0.0.1", setup.store, is_master=False, timeout=timedelta(seconds=DEADLINE_S))
        channel = UnixChannel(setup.bind) if setup.bind.startswith("unix:") else ZmqChannel(setup.bind)
        found = StoreRendezvous(self._store)
        self.sender: PrefillEndpoint | None = None
        self.receiver: DecodeEndpoint | None = None
        self.rooms: dict[bytes, DeliveryHandle | ReceptionHandle] = {}
        if setup.role == "prefill":
            self.sender = PrefillEndpoint(
                self.pool,
                transport=self._transports,
                channel=channel,
                rendezvous=found,
                instance=setup.instance,
                rank=setup.rank,
                shards=shards,
                strategy=knobs.path,
                slot_bytes=knobs.slot_bytes,
                slots=knobs.slots,
                options=knobs.options,
                kernels=self._copies,
            )
        else:
            self.receiver = DecodeEndpoint(
                self.pool,
                transport=self._transports,
                channel=channel,
                rendezvous=found,
                instance=setup.instance,
                rank=setup.rank,
                shards=shards,
                strategy=knobs.path,
                ring_bytes=knobs.ring_bytes,
                options=knobs.options,
            )

    def take(self, room: bytes, tokens: int) -> PageTable:
        count = -(-tokens // self.setup.knobs.page_size)
        taken, self.unused = self.unused[:count], self.unused[count:]
        assert len(taken) == count
        for plane in self.planes:
            assert bool((plane[torch.from_numpy(taken)] == POISON).all()), f"room {room!r}: free pages were written to"
        table = self.pages[room] = PageTable(KV, taken)
        return table

    def settled(self) -> None:
        """Wait for what this process has had its GPU do."""
        if self.setup.knobs.device != "cpu":
            torch.cuda.synchronize()

    def rows_of(self, room: bytes, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The page of each of a room's tokens, and its row in there."""
        at, size = torch.arange(tokens), self.setup.knobs.page_size
        return torch.from_numpy(self.pages[room].pages)[at // size], at % size

    def fill(self, planes: Sequence[torch.Tensor], room: bytes, tokens: int) -> None:
        """Put a room's rows into its pages."""
        for plane, rows in zip(planes, cells(self.contents.get(room, room), tokens), strict=True):
            plane[self.rows_of(room, tokens)] = torch.from_numpy(rows[:, self.heads]).to(plane.device)
        self.settled()

    def begin(self, room: bytes, tokens: int, attempt: int = 1) -> None:
        """Prefill: an attempt at a room whose cache is computed."""
        assert self.sender is not None
        self.take(room, tokens)
        self.fill(self.planes, room, tokens)
        self.rooms[room] = self.sender.open(attempt_id(RoomId(room), attempt))

    def send(self, room: bytes, start: int, stop: int, last: bool) -> None:
        """Prefill: hand over rows; pages from ``start``'s on."""
        delivery, size = self.rooms[room], self.setup.knobs.page_size
        assert isinstance(delivery, DeliveryHandle)
        pages = self.pages[room].pages[start // size : -(-stop // size)]
        delivery.send_chunk(stop, [PageTable(KV, pages, start // size * size)])
        if last:
            row = self.rows.get(room, 0)
            self.pool.write_aux(row, self.contents.get(room, room)[:16])
            delivery.finish(stop, aux=row)

    def expect(self, room: bytes, source: str, tokens: int) -> None:
        """Decode: a room from that instance."""
        assert self.receiver is not None
        reception = self.receiver.open(RoomId(room), Source(source))
        reception.expect(Expectation(tokens, [self.take(room, tokens)], aux=0))
        self.rooms[room] = reception

    def look(self, room: bytes) -> Look:
        """A room, as an engine sees it that polls."""
        self.poll()
        handle = self.rooms[room]
        released, phase, error = handle.released, handle.phase, handle.error
        report = handle.report
        how = report.path, report.transport, report.transport_reason, report.segments
        return Look(phase.name, released, type(error).__name__, str(error), report.nbytes, *how)

    def aux(self) -> bytes:
        """The last aux row."""
        return self.pool.read_aux(0).rstrip(b"\0")

    def wrong(self, rooms: Mapping[bytes, int]) -> int:
        """Bytes of the whole pool that are not as they must be with these rooms, and no others, in it."""
        want = [torch.full_like(plane, POISON) for plane in self.planes]
        for room, tokens in rooms.items():
            self.fill(want, room, tokens)
        return sum(int((plane != wanted).sum()) for plane, wanted in zip(self.planes, want, strict=True))

    def differing(self, room: bytes, tokens: int, content: bytes = b"") -> int:
        """Bytes of a room's own rows that are not as they must be."""
        return sum(
            int((plane[self.rows_of(room, tokens)].cpu() != torch.from_numpy(rows[:, self.heads])).sum())
            for plane, rows in zip(self.planes, cells(content or room, tokens), strict=True)
        )

    def abort(self, room: bytes) -> None:
        """Give a room up."""
        self.rooms[room].abort("the test gives it up")

    def rss(self) -> int:
        """Bytes of memory that this process occupies."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def poll(self) -> None:
        """Take the changes of the endpoint."""
        end = self.sender or self.receiver
        assert end is not None
        end.poll()

    def free(self, room: bytes) -> None:
        """Forget a room that is released; its pages are poisoned, and taken again last."""
        self.poll()  # else it keeps the room, with its error and all that this refers to, for the next call
        if room in self.rooms:
            assert self.rooms.pop(room).released
        taken = self.pages.pop(room).pages
        for plane in self.planes:
            plane[torch.from_numpy(taken)] = POISON
        self.settled()
        self.unused = np.concatenate([self.unused, taken])

    def footprint(self) -> Footprint:
        """What this process has open now."""
        gc.collect()
        ended = _ended_connections()
        return Footprint(
            len(os.listdir("/proc/self/fd")) - ended,
            ended,
            Path("/proc/self/maps").read_text().count("/memfd:"),
            len(decode(self._transport.local_descriptor(), self._transport.name).regions),
        )

    def open_rooms(self) -> int:
        """Rooms that are not forgotten."""
        end = self.sender or self.receiver
        assert end is not None
        return end.open_rooms

    def quarantined(self) -> int:
        """Decode: bytes that wait for evidence."""
        assert self.receiver is not None
        return self.receiver.usage().quarantined_bytes

    def pinned_slots(self) -> int:
        """Prefill: staging slots that a write may still read."""
        assert self.sender is not None
        return self.sender.usage().slots_used

    def held(self) -> int:
        """Prefill: writes that the transport does not move yet, or copies that have not ended."""
        if self._copies is not None:
            return sum(one.is_alive() for one in self._copies.held)
        assert isinstance(self._transport, _Gate)
        return len(self._transport.held)

    def release(self) -> None:
        """Prefill: let them move, or end."""
        if self._copies is not None:
            self._copies.opened.set()
            return
        assert isinstance(self._transport, _Gate)
        self._transport.opened = True

    def close(self) -> None:
        """Close the endpoint."""
        end = self.sender or self.receiver
        assert end is not None
        end.close(2.0)


def _ended_connections() -> int:
    """Sockets of this process in the state CLOSE_WAIT (8 in the kernel's table)."""
    tables = [Path(f"/proc/self/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    inodes = {row.split()[9] for table in tables for row in table if row.split()[3] == "08"}
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists the directory
            count += os.readlink(link).removeprefix("socket:[").removesuffix("]") in inodes
    return count


def _serve(pipe: Connection, setup: Setup, kind: type[Member]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answer(pipe, kind(setup))


class Node:
    """In the test: one such process."""

    def __init__(self, setup: Setup, kind: type[Member] = Member) -> None:
        # A server that has imported everything once forks them; it runs one thread only, which makes forking safe.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.setup = setup
        self.kind = kind
        self._awaited: deque[Callable[[object], None]] = deque()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, setup, kind), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @overload
    def ask(self, name: Literal["look"], *args: object) -> Look: ...
    @overload
    def ask(self, name: Literal["aux"]) -> bytes: ...
    @overload
    def ask(self, name: Literal["states"]) -> Mapping[bytes, State]: ...
    @overload
    def ask(self, name: Literal["prefill", "decode"], *args: object) -> bool: ...
    @overload
    def ask(self, name: Literal["audit"]) -> Sequence[str]: ...
    @overload
    def ask(self, name: Literal["footprint"]) -> Footprint: ...
    @overload
    def ask(
        self,
        name: Literal["wrong", "differing", "mismatch", "open_rooms", "quarantined", "pinned_slots", "held", "rss"],
        *args: object,
    ) -> int: ...
    @overload
    def ask(
        self,
        name: Literal["begin", "send", "expect", "release", "abort", "free", "close", "give_up", "drop"],
        *args: object,
    ) -> None: ...
    def ask(self, name: str, *args: object) -> object:
        """Have the child do something."""
        answers: list[object] = []
        self.tell(answers.append, name, *args)
        while not answers:
            assert self._pipe.poll(DEADLINE_S), f"{self.setup.instance}/{self.setup.rank} did not answer {name!r}"
            self.take()
        return answers[0]

    def tell(self, answered: Callable[[object], None], name: str, *args: object) -> None:
        """Have the child do something, also one that stands still: :meth:`take` hands over its answer."""
        self._awaited.append(answered)
        self._pipe.send((name, args))

    def take(self) -> int:
        """Hand over the answers that are there, in order; how many are still awaited."""
        while self._awaited and self._pipe.poll(0):
            answer: object = self._pipe.recv()
            answered = self._awaited.popleft()
            if isinstance(answer, Exception):
                raise answer
            answered(answer)
        return len(self._awaited)

    def until(self, room: bytes, seen: Callable[[Look], bool], within_s: float = DEADLINE_S) -> Look:
        """Look at a room until it is as wanted."""
        look = self.ask("look", room)

        def good() -> bool:
            nonlocal look
            look = self.ask("look", room)
            return seen(look)

        wait(good, lambda: f"{self.setup.instance}/{self.setup.rank}, room {room!r}: {look}", within_s)
        return look

    def kill(self) -> None:
        """End it as the kernel does when memory is short; returns once it has ended."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.join(DEADLINE_S)

    def freeze(self) -> None:
        """Stop every thread of it."""
        os.kill(self.pid, signal.SIGSTOP)
        wait(lambda: self._states() == {"T"}, lambda: f"{self.pid} to stand still")

    def thaw(self) -> None:
        """Let it run again."""
        os.kill(self.pid, signal.SIGCONT)

    def _states(self) -> set[str]:
        states: set[str] = set()
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends just now
                states.add((task / "stat").read_text().rpartition(")")[2].split()[0])
        return states

    def stop(self) -> None:
        """Close the endpoint if the process still runs, and end it."""
        if self._process.is_alive():
            self.thaw()
            self.ask("close")
            self._pipe.close()
            self._process.join(DEADLINE_S)
        assert not self._process.is_alive(), f"{self.setup.instance}/{self.setup.rank} does not end"
        wait(lambda: not Path(f"/proc/{self.pid}").exists(), lambda: f"process {self.pid} to be gone")


class Cluster:
    """Instances of endpoints, and the store through which they find each other."""

    def __init__(self, folder: Path, wire: Wire = "ipc") -> None:
        self._folder = folder
        self._wire = wire
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._nodes: list[Node] = []

    def start(
        self, role: Role, instance: str, ranks: int = 1, knobs: Knobs | None = None, kind: type[Member] = Member
    ) -> list[Node]:
        """The ranks of an instance."""
        knobs = knobs or Knobs()
        started = []
        for rank in range(ranks):
            place = knobs.bind or (
                "tcp://127.0.0.1:0" if self._wire == "tcp" else f"{self._wire}://{self._folder}/{instance}-{rank}"
            )
            started.append(Node(Setup(role, instance, rank, ranks, place, self._store.port, knobs), kind))
        self._nodes += started
        return started

    def again(self, node: Node) -> Node:
        """A new process in the place of one that has ended, under its address."""
        self._nodes.remove(node)
        self._nodes.append(Node(node.setup, node.kind))
        return self._nodes[-1]

    def stop(self) -> None:
        """End every process; each must end by itself when told to."""
        for node in self._nodes:
            node.stop()


def wait(good: Callable[[], bool], what: Callable[[], str], within_s: float = DEADLINE_S) -> None:
    """Until ``good()``; an AssertionError that says ``what()`` after the deadline."""
    until = time.monotonic() + within_s
    while not good():
        assert time.monotonic() < until, f"after {within_s} s: {what()}"
        time.sleep(0.005)
