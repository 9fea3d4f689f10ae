"""Two hosts that are network namespaces joined by one cable, and endpoints on them that find each other through it.

A host's processes have a PID namespace of their own as well, so that nobody can watch the processes of the other one.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, overload

import numpy as np
from attrs import field, frozen
from torch._C._distributed_c10d import TCPStore  # torch.distributed does not export it to type checkers

from disagg_kv import (
    CacheSpec,
    DecodeEndpoint,
    GroupId,
    Options,
    PagedPool,
    PageTable,
    PrefillEndpoint,
    Source,
    shard,
)
from disagg_kv.channels import ZmqChannel
from disagg_kv.endpoints import Expectation
from disagg_kv.endpoints.decode.handle import ReceptionHandle
from disagg_kv.endpoints.prefill.handle import DeliveryHandle
from disagg_kv.ids import Role, RoomId
from disagg_kv.memory import U8
from disagg_kv.rendezvous import StoreRendezvous
from disagg_kv.transports import between_processes
from tests.support.answering import answer

ROOT = Path(__file__).parents[2]
PREFIX = "disagg-kv-"
CABLE = "eth0"
"""Both ends are called the same, as on hosts of one kind."""

UCX = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": CABLE}
"""What keeps UCX from copying between the processes in another way: they do share a kernel."""

LAYERS, HEADS, HEAD_BYTES, PAGE = 4, 4, 512, 64
"""A token has 16 KiB: K and V of four layers, four heads of 512 bytes each."""

POISON = 0xA5
STORE_PORT = 29500
"""Nobody else is on these hosts."""

DEADLINE_S = 120.0
"""How long anything may take before a test calls it a hang."""


def refusal() -> str:
    """Why there can be no namespaces here; empty: there can be."""
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            return f"needs network namespaces: there is no program {program!r} (Debian: iproute2, util-linux)"
    cable = f"ip link add {CABLE} type veth peer name other && tc qdisc add dev {CABLE} {' '.join(_rate(1))}"
    apart = ["unshare", "--net", "--pid", "--mount", "--fork", "sh", "-c", cable]
    probe = subprocess.run(apart, capture_output=True, text=True)
    return f"needs network namespaces: {probe.stderr.strip()}" if probe.returncode else ""


def _rate(mbit: int) -> Sequence[str]:
    """A queue of tc's that lets so many Mbit/s out."""
    return ("root", "tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "50ms")


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr.strip()}"
    return done.stdout


@frozen
class Host:
    """One network namespace.

    Args:
        name: of the namespace.
        address: on the cable.
    """

    name: str
    address: str

    @property
    def launch(self) -> tuple[str, ...]:
        """Words that begin a command on this host; the command itself keeps its process id."""
        return ("ip", "netns", "exec", self.name)

    def received(self) -> int:
        """Bytes that came in through the cable."""
        (link,) = json.loads(_ip("-n", self.name, "-s", "-j", "link", "show", "dev", CABLE))
        return int(link["stats64"]["rx"]["bytes"])

    def limit(self, mbit: int) -> None:
        """Let no more than so many Mbit/s leave."""
        subprocess.run(["tc", "-n", self.name, "qdisc", "add", "dev", CABLE, *_rate(mbit)], check=True)

    def unplug(self) -> None:
        """Take the cable out: packets of both directions are lost, and nobody is told."""
        _ip("-n", self.name, "link", "set", CABLE, "down")

    def plug(self) -> None:
        """Put it back."""
        _ip("-n", self.name, "link", "set", CABLE, "up")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts and the cable; they are gone afterwards, with every packet that was under way."""
    _sweep()
    before = namespaces()
    with ExitStack() as undo:
        hosts = tuple(Host(f"{PREFIX}{os.getpid()}-{end}", f"10.213.77.{end}") for end in (1, 2))
        for host in hosts:
            _ip("netns", "add", host.name)
            undo.callback(_ip, "netns", "delete", host.name)
        a, b = hosts
        _ip("link", "add", CABLE, "netns", a.name, "type", "veth", "peer", "name", CABLE, "netns", b.name)
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", CABLE)
            _ip("-n", host.name, "link", "set", "lo", "up")
            host.plug()
        yield a, b
    assert namespaces() == before


def namespaces() -> set[str]:
    """Names of the network namespaces that this process made."""
    return {name for name in _names() if name.startswith(f"{PREFIX}{os.getpid()}-")}


def _names() -> Sequence[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines()]


def apart(clock_s: int = 0) -> Sequence[str]:
    """The beginning of a command that gets its own process ids, and clocks that are ``clock_s`` seconds ahead.

    Whatever it has started ends with it.
    """
    ahead = ("--time", "--monotonic", str(clock_s), "--boottime", str(clock_s))
    return ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *(ahead if clock_s else ()))


def _sweep() -> None:
    """Delete what a killed process left: not even the kernel does that for it."""
    for name in _names():
        pid = name.removeprefix(PREFIX).partition("-")[0]
        if name.startswith(PREFIX) and not Path(f"/proc/{pid}").exists():
            subprocess.run(["ip", "netns", "delete", name], check=False)  # another process may be faster


@frozen
class Setup:
    """One endpoint.

    Args:
        role: which side.
        instance: its instance; empty: named like the role.
        apart: its process has process ids of its own.
        rank, ranks: which of how many.
        host: where.
        store: the host whose first decode rank keeps the store.
        transport: a name.
        options: of the transport.
        times: of the endpoint.
        ring_bytes, slot_bytes: sizes of staging memory.
        tokens: which its pool has pages for.
        clock_s: seconds by which the host's clocks are ahead.
    """

    role: Role
    rank: int
    ranks: int
    host: Host
    store: Host
    transport: str
    options: Mapping[str, object] = field(factory=dict)
    times: Options = field(factory=Options)
    ring_bytes: int = 8 << 20
    slot_bytes: int = 1 << 20
    tokens: int = 2048
    clock_s: int = 0
    instance: str = ""
    apart: bool = True

    @property
    def name(self) -> str:
        """Of the instance."""
        return self.instance or self.role


@frozen
class Look:
    """A room on one rank, at one moment."""

    phase: str
    released: bool
    error: str
    message: str
    nbytes: int


def cells(room: bytes, tokens: int) -> Sequence[U8]:
    """The whole cache of a room, ``[tokens, heads, head bytes]`` per plane: K, then V, layer after layer."""
    draw = np.random.default_rng(zlib.crc32(room))
    return [draw.integers(0, 256, (tokens, HEADS, HEAD_BYTES), np.uint8) for _ in range(2 * LAYERS)]


class _Member:
    """On the host: a pool, its endpoint, and the rooms on it. Rooms take new pages each time, in a random order."""

    def __init__(self, setup: Setup) -> None:
        spec = CacheSpec.kv(LAYERS, HEADS, HEAD_BYTES // 4, "float32")
        shards = [shard(spec, tp=setup.ranks, rank=rank) for rank in range(setup.ranks)]
        pages = setup.tokens // PAGE
        carrier = between_processes(setup.transport, **({setup.transport: setup.options} if setup.options else {}))
        self._setup = setup
        self._heads = slice(setup.rank * HEADS // setup.ranks, (setup.rank + 1) * HEADS // setup.ranks)
        self._pool = PagedPool.allocate(spec, shards[setup.rank], pages=pages, page_size=PAGE)
        for plane in range(2 * LAYERS):
            self._pool.view(plane)[...] = POISON
        self._free = np.random.default_rng(setup.rank).permutation(pages).astype(np.int32)
        self._pages: dict[bytes, PageTable] = {}
        self._rooms: dict[bytes, DeliveryHandle | ReceptionHandle] = {}
        self._store = TCPStore(
            setup.store.address,
            STORE_PORT,
            is_master=(setup.role, setup.rank) == ("decode", 0),
            timeout=timedelta(seconds=DEADLINE_S),
            wait_for_workers=False,
        )
        channel = ZmqChannel(f"tcp://{setup.host.address}:0", unencrypted_network=True)
        found = StoreRendezvous(self._store)
        self._sender: PrefillEndpoint | None = None
        self._receiver: DecodeEndpoint | None = None
        if setup.role == "prefill":
            self._sender = PrefillEndpoint(
                self._pool, transport=carrier, channel=channel, rendezvous=found, instance=setup.name,
                rank=setup.rank, shards=shards, strategy="staged", slot_bytes=setup.slot_bytes, options=setup.times,
            )  # fmt: skip
        else:
            self._receiver = DecodeEndpoint(
                self._pool, transport=carrier, channel=channel, rendezvous=found, instance=setup.name,
                rank=setup.rank, shards=shards, strategy="staged", ring_bytes=setup.ring_bytes, options=setup.times,
            )  # fmt: skip

    def _fill(self, planes: Sequence[U8], room: bytes, tokens: int) -> None:
        """Put a room's rows into its pages, row by row."""
        table = self._pages[room].pages
        for plane, rows in zip(planes, cells(room, tokens), strict=True):
            for token in range(tokens):
                plane[table[token // PAGE], token % PAGE] = rows[token, self._heads]

    def _take(self, room: bytes, tokens: int) -> PageTable:
        count = -(-tokens // PAGE)
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count
        table = self._pages[room] = PageTable(GroupId("kv"), taken)
        return table

    def send(self, room: bytes, tokens: int) -> None:
        """Prefill: a room whose cache is computed, all of it."""
        assert self._sender is not None
        table = self._take(room, tokens)
        self._fill([self._pool.view(plane) for plane in range(2 * LAYERS)], room, tokens)
        delivery = self._rooms[room] = self._sender.open(RoomId(room))
        delivery.send_chunk(tokens, [table])
        delivery.finish(tokens)

    def expect(self, room: bytes, tokens: int, source: str = "prefill") -> None:
        """Decode: a room of a prefill instance."""
        assert self._receiver is not None
        reception = self._rooms[room] = self._receiver.open(RoomId(room), Source(source))
        reception.expect(Expectation(tokens, [self._take(room, tokens)]))

    def look(self, room: bytes) -> Look:
        """A room, now."""
        handle = self._rooms[room]
        error = handle.error
        return Look(handle.phase.name, handle.released, type(error).__name__, str(error), handle.report.nbytes)

    def wrong(self, rooms: Mapping[bytes, int], failed: Sequence[bytes] = ()) -> int:
        """Bytes of the pool that are not as they must be: these rooms, poison elsewhere, anything in failed rooms."""
        want = [np.full_like(self._pool.view(plane), POISON) for plane in range(2 * LAYERS)]
        for room in failed:
            for plane, pages in enumerate(want):
                pages[self._pages[room].pages] = self._pool.view(plane)[self._pages[room].pages]
        for room, tokens in rooms.items():
            self._fill(want, room, tokens)
        return sum(int((self._pool.view(plane) != pages).sum()) for plane, pages in enumerate(want))

    def transports(self) -> Mapping[str, str]:
        """The transport to each peer that is there, by its instance, and those that carried rooms of prefill."""
        end = self._sender or self._receiver
        assert end is not None
        carried = {f"room {room.decode()}": handle.report.transport for room, handle in self._rooms.items()}
        return {peer.instance: peer.transport for peer in end.peers() if peer.state != "lost"} | carried

    def open_rooms(self) -> int:
        """Rooms that are not forgotten."""
        end = self._sender or self._receiver
        assert end is not None
        return end.open_rooms

    def waiting(self) -> int:
        """Staging memory that waits for evidence: bytes of the ring on decode, slots on prefill."""
        if self._sender is not None:
            return self._sender.usage().slots_used
        assert self._receiver is not None
        return self._receiver.usage().quarantined_bytes

    def confirm(self) -> None:
        """The operator says that every peer's process has ended."""
        end = self._sender or self._receiver
        assert end is not None
        for peer in self._known:
            end.confirm_terminated(peer)

    def meet(self) -> int:
        """How many peers of the other side are there; those that ``confirm`` will speak of."""
        end = self._sender or self._receiver
        assert end is not None
        self._known = [peer.epoch for peer in end.peers() if peer.instance != self._setup.role]
        return len(self._known)

    def clock(self) -> float:
        """The clock of the endpoint."""
        return time.monotonic()

    def held(self) -> tuple[int, int]:
        """Threads and file descriptors of this process."""
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def close(self) -> Sequence[str]:
        """Close the endpoint; names of the threads that are left of it."""
        end = self._sender or self._receiver
        assert end is not None
        end.close(2.0)
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("disagg_kv")]


def serve(fd: int) -> None:
    """A process on a host: do what the pipe says."""
    pipe = Connection(fd)
    setup: Setup = pipe.recv()
    answer(pipe, _Member(setup))


class Node:
    """In the test: one such process."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        ours, theirs = socket.socketpair()
        self._pipe = Connection(ours.detach())
        fd = theirs.fileno()
        command = [sys.executable, "-c", f"from {__name__} import serve; serve({fd})"]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        with theirs:
            self._process = subprocess.Popen(
                [*setup.host.launch, *(apart(setup.clock_s) if setup.apart else ()), *command],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **UCX, "PYTHONPATH": path},
                pass_fds=[fd],
            )
        self._pipe.send(setup)

    @overload
    def ask(self, name: Literal["look"], *args: object) -> Look: ...
    @overload
    def ask(self, name: Literal["transports"]) -> Mapping[str, str]: ...
    @overload
    def ask(self, name: Literal["close"]) -> Sequence[str]: ...
    @overload
    def ask(self, name: Literal["held"]) -> tuple[int, int]: ...
    @overload
    def ask(self, name: Literal["clock"]) -> float: ...
    @overload
    def ask(self, name: Literal["wrong", "open_rooms", "waiting", "meet"], *args: object) -> int: ...
    @overload
    def ask(self, name: Literal["send", "expect", "confirm"], *args: object) -> None: ...
    def ask(self, name: str, *args: object) -> object:
        """Have the process do something."""
        self._pipe.send((name, args))
        assert self._pipe.poll(DEADLINE_S), f"{self.setup.role} {self.setup.rank} did not answer {name!r}"
        answer: object = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def until(self, room: bytes, seen: Callable[[Look], bool], within_s: float = DEADLINE_S) -> Look:
        """Look at a room until it is as wanted."""
        look = self.ask("look", room)

        def good() -> bool:
            nonlocal look
            look = self.ask("look", room)
            return seen(look)

        wait(good, lambda: f"{self.setup.role} {self.setup.rank}, room {room!r}: {look}", within_s)
        return look

    def kill(self) -> None:
        """End it as the kernel does when memory is short."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    def stop(self) -> Sequence[str]:
        """Close the endpoint and end the process; what the endpoint left."""
        if self._process.poll() is not None:
            return ()
        left = self.ask("close")
        self._pipe.close()
        assert self._process.wait(DEADLINE_S) == 0
        return left


@contextmanager
def endpoints(*setups: Setup) -> Iterator[list[Node]]:
    """Endpoints; those that still run end well, or are killed if the test does not."""
    with ExitStack() as undo:
        nodes: list[Node] = []
        for setup in setups:
            nodes.append(Node(setup))
            undo.callback(nodes[-1].kill)
        yield nodes
        for node in nodes:
            assert not node.stop(), node.setup


def wait(good: Callable[[], bool], what: Callable[[], str], within_s: float = DEADLINE_S) -> None:
    """Until ``good()``; an AssertionError that says ``what()`` after the deadline."""
    until = time.monotonic() + within_s
    while not good():
        assert time.monotonic() < until, f"after {within_s} s: {what()}"
        time.sleep(0.005)
