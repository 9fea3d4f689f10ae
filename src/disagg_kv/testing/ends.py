"""One end of a transport under test: here, or in a child process that takes commands."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
from attrs import frozen

from ..errors import DisaggKVError
from ..ids import Peer, RegionId, Ticket
from ..memory import U8, Buffer, Flag, bytes_of
from ..memory.flag import raise_flags
from ..planning import Writes
from ..transports import PeerLost, Settled, SupportsAllocate, SupportsFlags, Transport, WriteEnded
from ..transports.flags import words_of

TransportEvent = WriteEnded | Settled | PeerLost

P = ParamSpec("P")
R = TypeVar("R")


class Memory(Protocol):
    """How a suite gets, fills and reads the kind of memory that it tests with. Must be picklable."""

    def allocate(self, transport: Transport, nbytes: int) -> Buffer:
        """Memory that ``transport`` can register and peers can write to."""
        ...

    def write(self, buffer: Buffer, data: U8) -> None:
        """Fill the whole buffer."""
        ...

    def read(self, buffer: Buffer) -> U8:
        """A copy of the whole buffer."""
        ...

    def raise_flag(self, flag: Flag) -> None:
        """Store a flag's word, as kernels of the memory's device do."""
        ...


class HostMemory:
    """CPU memory: the transport's own where it gives some, else NumPy's."""

    def allocate(self, transport: Transport, nbytes: int) -> Buffer:
        """See :meth:`Memory.allocate`."""
        if isinstance(transport, SupportsAllocate):
            return transport.allocate(nbytes)
        return plain(np.zeros(nbytes, np.uint8))

    def write(self, buffer: Buffer, data: U8) -> None:
        """See :meth:`Memory.write`."""
        bytes_of(buffer)[:] = data

    def read(self, buffer: Buffer) -> U8:
        """See :meth:`Memory.read`."""
        return bytes_of(buffer).copy()

    def raise_flag(self, flag: Flag) -> None:
        """See :meth:`Memory.raise_flag`."""
        raise_flags([flag])


def plain(array: U8) -> Buffer:
    """The memory of a contiguous array as a buffer."""
    return Buffer(array.ctypes.data, array.nbytes, "cpu", array)


class End:
    """A transport with its buffers. Every method takes and returns what a pipe can carry."""

    def __init__(self, factory: Callable[[], Transport], memory: Memory) -> None:
        self.transport = factory()
        self._memory = memory
        self._buffers: dict[RegionId, Buffer] = {}
        self._wholes: dict[RegionId, Buffer] = {}
        self._events: list[TransportEvent] = []
        self._again: tuple[Peer, Writes] | None = None
        self._resting = False
        self._page: Buffer | None = None

    def add(self, data: U8) -> RegionId:
        """Allocate, fill with ``data`` and register."""
        buffer = self._memory.allocate(self.transport, len(data))
        self._memory.write(buffer, data)
        return self._register(buffer)

    def add_plain(self, data: U8) -> RegionId:
        """Register CPU memory that the transport did not allocate."""
        return self._register(plain(data.copy()))

    def _register(self, buffer: Buffer) -> RegionId:
        (region,) = self.transport.register([buffer])
        self._buffers[region] = buffer
        return region

    def add_part(self, data: U8, first: int, nbytes: int) -> RegionId:
        """Allocate, fill with ``data``, and register only ``nbytes`` bytes from byte ``first`` on."""
        whole = self._memory.allocate(self.transport, len(data))
        self._memory.write(whole, data)
        region = self._register(Buffer(whole.addr + first, nbytes, whole.device, whole.owner))
        self._wholes[region] = whole
        return region

    def read_whole(self, region: RegionId) -> U8:
        """What lies in the allocation of a region of :meth:`add_part`."""
        return self._memory.read(self._wholes[region])

    def rest(self, resting: bool) -> None:
        """While True, do not poll."""
        self._resting = resting

    def release(self, region: RegionId) -> object:
        """Forget the buffer, and return what keeps its memory alive; it is still registered."""
        return self._buffers.pop(region).owner

    def buffer(self, region: RegionId) -> Buffer:
        """The region's memory."""
        return self._buffers[region]

    def read(self, region: RegionId) -> U8:
        """What lies in the region's memory."""
        return self._memory.read(self._buffers[region])

    def fill(self, region: RegionId, data: U8) -> None:
        """Put something else into the region's memory."""
        self._memory.write(self._buffers[region], data)

    def flag_page(self, nbytes: int) -> bytes:
        """Make a flag page; where it is."""
        assert isinstance(self.transport, SupportsFlags)
        self._page, place = self.transport.flag_page(nbytes)
        return place

    def words(self) -> list[int]:
        """What is in the flag page."""
        assert self._page is not None
        return words_of(self._page).tolist()

    def descriptor(self) -> bytes:
        """The transport's own."""
        return self.transport.local_descriptor()

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """Make the other end a peer."""
        return self.transport.connect(descriptor, timeout_s)

    def submit(self, peer: Peer, writes: Writes) -> Ticket:
        """Post a batch."""
        return self.transport.submit(peer, writes)

    def write_on(self, peer: Peer, writes: Writes) -> None:
        """Post this batch at each poll from now on, until the process is killed."""
        self._again = (peer, writes)

    def events(self) -> Sequence[TransportEvent]:
        """What the transport reported since the last call."""
        self.work()
        events, self._events = self._events, []
        return events

    def work(self) -> None:
        """One poll; what it returns is kept for :meth:`events`."""
        if self._resting:
            return
        if self._again is not None:
            self.transport.submit(*self._again)
            self.transport.poll()
            return
        self._events.extend(self.transport.poll())

    def close(self, drain_s: float) -> Sequence[Ticket]:
        """Close the transport."""
        return self.transport.close(drain_s)

    def stacks(self) -> str:
        """Where each thread of the process is, the transport's among them."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"{names.get(ident, 'unknown')}:\n{''.join(traceback.format_stack(frame))}"
            for ident, frame in sys._current_frames().items()
        )


@frozen
class _Raised:
    error: DisaggKVError


def _serve(pipe: Connection, factory: Callable[[], Transport], memory: Memory) -> None:
    """The child: run the pipe's commands on an end of its own, and poll between them."""
    end: End | None = None
    while True:
        while not pipe.poll(0.0005):
            if end is not None:
                end.work()
        try:
            name, args, named = pipe.recv()
        except EOFError:
            return
        try:
            if end is None or name == "open":
                end = End(factory, memory)
            pipe.send(None if name == "open" else getattr(end, name)(*args, **named))
        except DisaggKVError as error:
            pipe.send(_Raised(error))


def _asked(method: Callable[Concatenate[End, P], R]) -> Callable[Concatenate[Child, P], R]:
    """The same method of the end in the child."""

    def ask(child: Child, /, *args: P.args, **named: P.kwargs) -> R:
        answer: R = child._ask(method.__name__, *args, **named)
        return answer

    return ask


class Child:
    """The same as :class:`End`, in a process of its own."""

    def __init__(self, factory: Callable[[], Transport], memory: Memory, timeout_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._timeout_s = timeout_s
        self._owed: str | None = None
        self._process = context.Process(target=_serve, args=(theirs, factory, memory), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def open(self) -> None:
        """Begin again with a new transport; the one before must be closed."""
        self._ask("open")

    add = _asked(End.add)
    add_plain = _asked(End.add_plain)
    add_part = _asked(End.add_part)
    read_whole = _asked(End.read_whole)
    rest = _asked(End.rest)
    read = _asked(End.read)
    fill = _asked(End.fill)
    flag_page = _asked(End.flag_page)
    words = _asked(End.words)
    descriptor = _asked(End.descriptor)
    connect = _asked(End.connect)
    submit = _asked(End.submit)
    write_on = _asked(End.write_on)
    events = _asked(End.events)
    close = _asked(End.close)
    stacks = _asked(End.stacks)

    def pause(self) -> None:
        """Freeze the process; returns once every thread of it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """Let it run again."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the process at once, as the kernel does when memory is short; it stays unreaped until :meth:`stop`."""
        self._process.kill()

    def wait(self) -> None:
        """Until the kernel has taken the killed process apart; it stays unreaped."""
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def stop(self) -> None:
        """End the process and forget it."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()

    def _ask(self, name: str, *args: object, **named: object) -> Any:
        # A late answer would be taken for that to the next question.
        assert self._owed is None, f"the child did not answer {self._owed!r} before"
        self._pipe.send((name, args, named))
        self._owed = name
        assert self._pipe.poll(self._timeout_s), f"the child did not answer {name!r} within {self._timeout_s} s"
        self._owed = None
        answer = self._pipe.recv()
        if isinstance(answer, _Raised):
            raise answer.error
        return answer
