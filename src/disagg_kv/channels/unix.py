"""Channels between processes of one host over Unix-domain sockets, without threads of their own.

A frame goes directly from the sending thread to the waiting thread. ZeroMQ passes it through a thread of its own on
either side, and each of them has to wake first. ``python -m bench grant`` measures both.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from math import inf
from pathlib import Path

from attrs import define, field

from .. import arguments
from ..errors import ConfigurationError
from ..transports import Home, LinkCost
from .base import (
    MAX_FRAME,
    MAX_TOGETHER,
    Arrived,
    Closed,
    Denied,
    News,
    Opened,
    Rejected,
    check_frame,
    check_together,
)
from .files import claimed, listening
from .waiting import Timer, Waiter, Waits

SCHEME = "unix://"

BATCH = 64 << 20
"""Bytes that one ``poll`` receives before it does anything else."""

READ = 1 << 18
"""Bytes of one read from a connection; more than a socket of Linux's default size holds."""

BACKLOG = 1024
"""Connections that may wait to be accepted."""

RECONNECT_S = 0.05, 1.0
"""Between two attempts to reach an address, at first and at most."""

_COUNT = struct.Struct("<I")


@define(eq=False)
class _Link:
    """The outgoing connection to one address.

    Args:
        address: the destination.
        sock: the connected socket; None: not connected.
        lost: True: frames are dropped until it is connected again. False and not connected: frames wait for the first
            connection.
        absent: the first attempt found no listener, and ``Closed`` was reported.
        unsent: messages; the first may be a remainder.
        retry_at, pause_s: the time of the next attempt, and the pause after it.
    """

    address: str
    sock: socket.socket | None = None
    lost: bool = False
    absent: bool = False
    unsent: deque[bytes] = field(factory=deque)
    retry_at: float = 0.0
    pause_s: float = RECONNECT_S[0]


@define(eq=False)
class _Caller:
    """An incoming connection, and the received part of an incomplete message."""

    sock: socket.socket
    rest: bytearray = field(factory=bytearray)


class UnixChannel(Waits):
    """A listening socket as inbox and one per destination; a :class:`Channel` with batches.

    As with :class:`ZmqChannel`, the first frames to an address are kept until its connection is established. When a
    connection breaks, its queue is dropped. A process that returns at the old address therefore gets no old frames. The
    channel reconnects after 50 ms, then after ever longer pauses of up to 1 s.

    The kernel reports the user at the other end, and only processes of the same user are accepted. Only the owner can
    use the socket's file. ``close`` removes it. Linux only.

    ``wait`` waits for one epoll object with all sockets, the descriptor of ``wake`` and a timer for the next attempt to
    connect. Each stays readable until a poll has done what it stands for, so nothing is lost between the two.

    Args:
        bind: ``unix:///path``.
        high_water: messages that wait per destination; more are dropped. Frames that are sent together are one message.

    Attributes:
        address: where others reach this inbox.

    Raises:
        ConfigurationError: an address that is in use or cannot be bound.
    """

    eager = True
    link_cost = LinkCost(1_200, 2)
    """A socket in each direction; benchmarks/links.py measures both numbers."""

    def __init__(self, bind: str, *, high_water: int = 10_000) -> None:
        if not arguments.text(bind, "bind").startswith(f"{SCHEME}/"):
            raise ConfigurationError(f"channel {bind!r}: not {SCHEME}/path")
        high_water = arguments.count(high_water, f"channel {bind!r}: high_water", least=1)
        self._home = Home(f"the channel {bind!r}")
        self.address = bind
        self._high_water = high_water
        self._file = Path(bind.removeprefix(SCHEME))
        if not hasattr(select, "epoll"):
            raise ConfigurationError(f"channel {bind!r}: needs Linux")
        self._links: dict[str, _Link] = {}
        self._linked: dict[int, _Link] = {}
        self._down: dict[str, _Link] = {}
        self._callers: dict[int, _Caller] = {}
        self._events: list[News] = []
        self._accepts_at = inf
        with ExitStack() as made:
            try:
                self._epoll = made.enter_context(select.epoll())
                self._timer = made.enter_context(closing(Timer()))
                self._waiter = Waiter(self._epoll)
                with claimed(bind, self._file):
                    self._inbox = made.enter_context(listening(self._file, BACKLOG))
                    self._inode = self._file.stat().st_ino
                self._epoll.register(self._inbox, select.EPOLLIN)
                self._epoll.register(self._timer, select.EPOLLIN)
            except (OSError, ValueError) as exc:
                raise ConfigurationError(f"channel {bind!r}: cannot be bound: {exc}") from exc
            self._made = made.pop_all()

    def send(self, address: str, frame: bytes) -> bool:
        """Hand a frame over; never blocks. False: dropped, as the queue is full, the connection lost, the address bad.

        Raises:
            ConfigurationError: the frame is larger than MAX_FRAME.
        """
        check_frame(address, frame)
        return self.send_all(address, (frame,))

    def send_all(self, address: str, frames: Sequence[bytes]) -> bool:
        """Hand over frames that arrive together and in this order; False: they were dropped."""
        self._home.check()
        check_together(address, frames)
        link = self._links.get(address)
        if link is None:
            if self._waiter is None:
                return False
            if (reason := _unreachable(address)) is not None:
                if (denied := Denied(address, reason)) not in self._events:
                    self._events.append(denied)
                    self.wake()
                return False
            link = self._links[address] = _Link(address)
            self._connect(link)
            self._timer.set(self._next_at())
            if self._events:
                self.wake()
        if link.lost or len(link.unsent) >= self._high_water:
            return False
        head = struct.pack(f"<{1 + len(frames)}I", len(frames), *map(len, frames))
        link.unsent.append(b"".join((head, *frames)))
        if link.sock is not None and len(link.unsent) == 1:
            self._push(link, link.sock)
        return True

    def poll(self) -> Sequence[News]:
        """Events since the last call; never blocks.

        Frames come before events of connections: a process's last frames precede its ``Closed``.
        """
        self._home.check()
        if (waiter := self._waiter) is None:
            return ()
        came: list[News] = []
        links: list[tuple[_Link, int]] = []
        callers: list[_Caller] = []
        for number, flags in self._epoll.poll(0):
            if number in (waiter.fileno(), self._timer.fileno()):
                continue  # which is for waits alone, or set anew below
            if number == self._inbox.fileno():
                callers += self._accept()
            elif number in self._linked:
                links.append((self._linked[number], flags))
            else:
                callers.append(self._callers[number])
        complete = self._receive(callers, came)
        broken = [link for link, flags in links if flags & ~select.EPOLLOUT and _is_broken(link)]
        # A process's frames from before its end have arrived, possibly on a new connection.
        if broken and complete and self._receive(self._all_callers(), came):
            for link in broken:
                self._lose(link)
        for link, flags in links:
            if flags & select.EPOLLOUT and link.sock is not None:
                self._push(link, link.sock)
        if self._down or self._timer.at < inf:
            self._retry()
            self._timer.set(self._next_at())
        came += self._events
        self._events = []
        return came

    def forget(self, address: str) -> None:
        """Close the connection to an address that is no longer needed, and drop its queue."""
        link = self._links.pop(address, None)
        if link is not None:
            self._unlink(link)
        self._events = [one for one in self._events if getattr(one, "address", None) != address]

    def close(self) -> None:
        """Stop; nothing is received or sent afterwards. Frames already in a peer's socket still arrive there."""
        self._home.check()
        waiter, self._waiter = self._waiter, None
        if waiter is None:
            return
        waiter.end()
        for address in list(self._links):
            self.forget(address)
        for caller in list(self._callers.values()):
            self._drop(caller)
        with suppress(OSError):  # it was taken away before
            if self._file.stat().st_ino == self._inode:
                self._file.unlink()
        self._made.close()

    # What comes in.

    def _accept(self) -> Iterator[_Caller]:
        while True:
            try:
                sock, _ = self._inbox.accept()
            except BlockingIOError:
                return
            except OSError:
                # The process has no descriptor left, perhaps for long: who called waits, and so do we.
                if self._accepts_at == inf:
                    self._epoll.unregister(self._inbox)
                self._accepts_at = time.monotonic() + RECONNECT_S[0]
                self._timer.set(self._next_at())
                return
            if not _ours(sock) or not self._await(sock):
                sock.close()
                self._events.append(Rejected(connections=1))
                continue
            sock.setblocking(False)
            caller = self._callers[sock.fileno()] = _Caller(sock)
            yield caller

    def _await(self, sock: socket.socket) -> bool:
        """Poll a socket for input; False: the kernel allows this user no more sockets to poll."""
        try:
            self._epoll.register(sock, select.EPOLLIN)
        except OSError:
            return False
        return True

    def _all_callers(self) -> list[_Caller]:
        """All callers, those that are connecting now included."""
        deque(self._accept(), maxlen=0)
        return list(self._callers.values())

    def _receive(self, callers: Iterable[_Caller], came: list[News]) -> bool:
        """Receive whole messages, in turn from all callers; False: more is waiting, so no end may be reported yet."""
        taken, waiting, whole = 0, deque(callers), True
        while waiting:
            caller = waiting.popleft()
            before = len(came)
            try:
                data = caller.sock.recv(READ)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            caller.rest += data
            if not self._parse(caller, came):
                self._events.append(Rejected(messages=1))
                data = b""
            taken += len(data) + 1024 * (len(came) - before)  # a flood of empty frames would keep us here
            if not data:
                self._drop(caller)
            elif len(data) == READ:
                whole &= taken < BATCH
                if taken < BATCH:
                    waiting.append(caller)
        return whole

    @staticmethod
    def _parse(caller: _Caller, came: list[News]) -> bool:
        """Cut whole messages off the received bytes; False: they do not follow this channel's format."""
        rest, at = caller.rest, 0
        while len(rest) - at >= _COUNT.size:
            (count,) = _COUNT.unpack_from(rest, at)
            if not 1 <= count <= MAX_TOGETHER:
                return False
            start = at + _COUNT.size * (1 + count)
            if len(rest) < start:
                break
            sizes = struct.unpack_from(f"<{count}I", rest, at + _COUNT.size)
            if sum(sizes) > MAX_FRAME:
                return False
            if len(rest) < start + sum(sizes):
                break
            for size in sizes:
                came.append(Arrived(bytes(rest[start : start + size])))
                start += size
            at = start
        del rest[:at]
        return True

    def _drop(self, caller: _Caller) -> None:
        del self._callers[caller.sock.fileno()]
        self._epoll.unregister(caller.sock)
        caller.sock.close()

    # What goes out.

    def _connect(self, link: _Link) -> None:
        """Reach the address, or try again later."""
        try:
            sock = _connected(link.address)
        except OSError as error:
            if isinstance(error, ConnectionRefusedError | FileNotFoundError) and not link.lost and not link.absent:
                link.absent = True
                self._events.append(Closed(link.address))
            self._connect_later(link)
            return
        if not _ours(sock):
            sock.close()
            del self._links[link.address]  # the next frame tries again
            self._down.pop(link.address, None)
            link.lost = True
            self._events.append(Denied(link.address))
            return
        if not self._await(sock):
            sock.close()
            self._connect_later(link)
            return
        link.sock, link.lost, link.pause_s = sock, False, RECONNECT_S[0]
        self._linked[sock.fileno()] = link
        self._down.pop(link.address, None)
        self._events.append(Opened(link.address))
        self._push(link, sock)

    def _connect_later(self, link: _Link) -> None:
        self._down[link.address] = link
        link.retry_at = time.monotonic() + link.pause_s
        link.pause_s = min(2 * link.pause_s, RECONNECT_S[1])

    def _push(self, link: _Link, sock: socket.socket) -> None:
        """Write as much as the socket takes; the rest follows when it takes more."""
        waits = False
        while link.unsent:
            try:
                sent = sock.send(link.unsent[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                waits = True
                break
            except (BrokenPipeError, ConnectionResetError):
                break  # its end is a separate event
            except OSError:  # the kernel has no memory for it just now
                waits = True
                break
            if sent == len(link.unsent[0]):
                link.unsent.popleft()
            else:
                link.unsent[0] = link.unsent[0][sent:]
        self._epoll.modify(sock, select.EPOLLIN | (select.EPOLLOUT if waits else 0))

    def _lose(self, link: _Link) -> None:
        self._unlink(link)
        self._down[link.address] = link
        link.lost, link.retry_at = True, time.monotonic() + link.pause_s
        self._events.append(Closed(link.address))

    def _retry(self) -> None:
        if self._accepts_at <= time.monotonic():
            self._accepts_at = inf if self._await(self._inbox) else time.monotonic() + RECONNECT_S[0]
        for link in list(self._down.values()):
            if link.retry_at <= time.monotonic():
                self._connect(link)

    def _next_at(self) -> float:
        """When a link is to be tried again, or connections are accepted again."""
        return min([self._accepts_at, *(link.retry_at for link in self._down.values())])

    def _unlink(self, link: _Link) -> None:
        link.unsent.clear()
        self._down.pop(link.address, None)
        if link.sock is not None:
            del self._linked[link.sock.fileno()]
            self._epoll.unregister(link.sock)
            link.sock.close()
            link.sock = None


def _connected(address: str) -> socket.socket:
    """Raises OSError: no listener, too many connections waiting there, or no descriptor left in this process."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(address.removeprefix(SCHEME))
    except BaseException:
        sock.close()
        raise
    return sock


def _is_broken(link: _Link) -> bool:
    """Whether the connection has ended or has data; a peer never writes on it, so data is an error too."""
    assert link.sock is not None
    try:
        link.sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _ours(sock: socket.socket) -> bool:
    """Whether the process at the other end is one of our user's."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.geteuid())


def _unreachable(address: str) -> str | None:
    """Why the address is not of our kind, or cannot exist; None: it can. The kernel's longest path has 107 bytes."""
    if not address.startswith(f"{SCHEME}/"):
        return "a Unix-socket channel sends to unix:///path alone"
    try:
        path = os.fsencode(address.removeprefix(SCHEME))
    except UnicodeEncodeError:
        return "no file has this name"
    if len(path) > 107 or b"\0" in path:
        return f"a path of {len(path)} bytes; a socket's has at most 107, and no zero byte"
    return None
