"""Channels between processes of one host over Unix-domain sockets, without threads of their own.

A frame goes straight from the thread that sends it to the thread that waits for it. ZeroMQ hands it to a thread of its
own on either side, and each of them has to wake first: ``disagg-kv bench grant`` has such a round trip beside ours.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from attrs import define, field

from ..errors import ConfigurationError
from ..transports import Home
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

SCHEME = "unix://"

BATCH = 64 << 20
"""Bytes that one ``poll`` takes in before it looks at anything else."""

READ = 1 << 18
"""Bytes that one look at a connection takes; more than a socket of Linux's default size holds."""

BACKLOG = 1024
"""Connections that may wait to be accepted."""

RECONNECT_S = 0.05, 1.0
"""Between two attempts to reach an address, at first and at most."""

LONGEST_S = 1e6
"""The longest wait; the kernel's numbers end somewhere."""

_COUNT = struct.Struct("<I")


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


@define(eq=False)
class _Link:
    """The way to one address.

    Args:
        address: it.
        sock: connected; None: not (again) by now.
        lost: what is sent is dropped until it is back; False and not connected: frames wait for the first connection.
        absent: nobody listened there when it was tried first, which was told.
        unsent: messages, the first perhaps in part.
        retry_at, pause_s: when it is tried again, and how long after that.
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
    """A connection that somebody made to us, and what has come of a message that is not whole yet."""

    sock: socket.socket
    rest: bytearray = field(factory=bytearray)


class UnixChannel:
    """A listening socket as inbox and one per destination; a :class:`Channel` that supports batches and naps.

    As :class:`ZmqChannel`: the first frames to an address are kept until its connection stands, and when a connection
    breaks, what was queued for it is thrown away, so that a process that comes back under the old address gets no old
    frames. Connections are tried again after 50 ms, then ever more slowly, up to 1 s.

    The kernel names the user at the other end: only processes of ours are talked to. The socket's file can be used by
    its owner alone and goes away at ``close``. Linux only.

    Args:
        bind: ``unix:///path``.
        high_water: messages that wait per destination; more are dropped. Frames that are sent together are one message.

    Raises:
        ConfigurationError: an address that is in use or cannot be bound.
    """

    def __init__(self, bind: str, *, high_water: int = 10_000) -> None:
        if not bind.startswith(f"{SCHEME}/"):
            raise ConfigurationError(f"channel {bind!r}: not {SCHEME}/path")
        if high_water < 1:
            raise ConfigurationError(f"channel {bind!r}: high_water {high_water}: out of range")
        self._home = Home(f"the channel {bind!r}")
        self._address = bind
        self._high_water = high_water
        self._file = Path(bind.removeprefix(SCHEME))
        if not hasattr(select, "epoll"):
            raise ConfigurationError(f"channel {bind!r}: needs Linux")
        self._ppoll = ctypes.CDLL(None).ppoll  # the waits of ``select`` are rounded up to milliseconds
        self._links: dict[str, _Link] = {}
        self._linked: dict[int, _Link] = {}
        self._callers: dict[int, _Caller] = {}
        self._news: list[News] = []
        self._accepts_at: float | None = None
        self._closed = False
        with ExitStack() as made:
            try:
                self._waker, self._woken = (made.enter_context(sock) for sock in socket.socketpair())
                self._epoll = made.enter_context(select.epoll())
                with claimed(bind, self._file):
                    self._inbox = made.enter_context(listening(self._file, BACKLOG))
                    self._inode = self._file.stat().st_ino
                for sock in (self._woken, self._waker):
                    sock.setblocking(False)
                self._epoll.register(self._inbox, select.EPOLLIN)
                self._epoll.register(self._woken, select.EPOLLIN)
            except (OSError, ValueError) as exc:
                raise ConfigurationError(f"channel {bind!r}: cannot be bound: {exc}") from exc
            self._made = made.pop_all()
        self._awaited = _PollFd(self._epoll.fileno(), select.POLLIN, 0)

    @property
    def address(self) -> str:
        """Where others reach this inbox."""
        return self._address

    def send(self, address: str, frame: bytes) -> bool:
        """Hand a frame over; never blocks. False: dropped, as the queue is full, the connection lost, the address bad.

        Raises:
            ConfigurationError: the frame is larger than MAX_FRAME.
        """
        check_frame(address, frame)
        return self.send_all(address, (frame,))

    def send_all(self, address: str, frames: Sequence[bytes]) -> bool:
        """See :class:`~disagg_kv.channels.SupportsBatches`."""
        self._home.check()
        check_together(address, frames)
        link = self._links.get(address)
        if link is None:
            if self._closed or not _reachable(address):
                return False
            link = self._links[address] = _Link(address)
            self._connect(link)
        if link.lost or len(link.unsent) >= self._high_water:
            return False
        head = struct.pack(f"<{1 + len(frames)}I", len(frames), *map(len, frames))
        link.unsent.append(b"".join((head, *frames)))
        if link.sock is not None and len(link.unsent) == 1:
            self._push(link, link.sock)
        return True

    def poll(self, timeout_s: float) -> Sequence[News]:
        """What came in; waits up to ``timeout_s`` for the first, and returns early after ``wake``.

        Frames come before news of connections: last words are heard before their speaker's end.
        """
        self._home.check()
        if self._closed:
            return ()
        if timeout_s > 0 and not self._news:
            self._wait(timeout_s)
        came: list[News] = []
        links: list[tuple[_Link, int]] = []
        callers: list[_Caller] = []
        for number, flags in self._epoll.poll(0):
            if number == self._woken.fileno():
                self._woken.recv(4096)
            elif number == self._inbox.fileno():
                callers += self._accept()
            elif number in self._linked:
                links.append((self._linked[number], flags))
            else:
                callers.append(self._callers[number])
        heard = self._hear(callers, came)
        broken = [link for link, flags in links if flags & ~select.EPOLLOUT and _is_broken(link)]
        # What a process has said before its end is here by now, perhaps from a connection that is new.
        if broken and heard and self._hear(self._everybody(), came):
            for link in broken:
                self._lose(link)
        for link, flags in links:
            if flags & select.EPOLLOUT and link.sock is not None:
                self._push(link, link.sock)
        self._retry()
        came += self._news
        self._news = []
        return came

    def nap(self, timeout_s: float) -> None:
        """See :class:`~disagg_kv.channels.SupportsNaps`."""
        if not self._closed and not self._news:
            self._wait(timeout_s)

    def wake(self) -> None:
        """Make a waiting ``poll`` return; from any thread, also after ``close``."""
        with suppress(OSError):  # full: it is awake already; closed: nobody waits
            self._waker.send(b"\0")

    def forget(self, address: str) -> None:
        """Drop the connection towards an address that is no longer needed, and what is queued for it."""
        link = self._links.pop(address, None)
        if link is not None:
            self._unlink(link)
        self._news = [one for one in self._news if getattr(one, "address", None) != address]

    def close(self) -> None:
        """Stop; nothing is received or sent afterwards. What a peer's socket holds by now still arrives there."""
        self._home.check()
        if self._closed:
            return
        self._closed = True
        for address in list(self._links):
            self.forget(address)
        for caller in list(self._callers.values()):
            self._hang_up(caller)
        with suppress(OSError):  # it was taken away before
            if self._file.stat().st_ino == self._inode:
                self._file.unlink()
        self._made.close()

    def _wait(self, timeout_s: float) -> None:
        """Until something can be read or written, ``wake``, a link is to be tried again, or the time is over."""
        again = [link.retry_at for link in self._links.values() if link.sock is None]
        if self._accepts_at is not None:
            again.append(self._accepts_at)
        if again:
            timeout_s = max(0.0, min(timeout_s, min(again) - time.monotonic()))
        whole, part = divmod(min(timeout_s, LONGEST_S), 1)
        limit = _Timespec(int(whole), int(part * 1e9))
        self._ppoll(ctypes.byref(self._awaited), 1, ctypes.byref(limit), None)

    # What comes in.

    def _accept(self) -> Iterator[_Caller]:
        while True:
            try:
                sock, _ = self._inbox.accept()
            except BlockingIOError:
                return
            except OSError:
                # The process has no descriptor left, perhaps for long: who called waits, and so do we.
                if self._accepts_at is None:
                    self._epoll.unregister(self._inbox)
                self._accepts_at = time.monotonic() + RECONNECT_S[0]
                return
            if not _ours(sock) or not self._await(sock):
                sock.close()
                self._news.append(Rejected(connections=1))
                continue
            sock.setblocking(False)
            caller = self._callers[sock.fileno()] = _Caller(sock)
            yield caller

    def _await(self, sock: socket.socket) -> bool:
        """Hear when a socket can be read; False: the kernel lets this user wait for no more of them."""
        try:
            self._epoll.register(sock, select.EPOLLIN)
        except OSError:
            return False
        return True

    def _everybody(self) -> list[_Caller]:
        """Who calls just now, too."""
        deque(self._accept(), maxlen=0)
        return list(self._callers.values())

    def _hear(self, callers: Iterable[_Caller], came: list[News]) -> bool:
        """Take in whole messages, of everybody some; False: there is more, so nobody's end may be told yet."""
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
                self._news.append(Rejected(messages=1))
                data = b""
            taken += len(data) + 1024 * (len(came) - before)  # a flood of empty frames would keep us here
            if not data:
                self._hang_up(caller)
            elif len(data) == READ:
                whole &= taken < BATCH
                if taken < BATCH:
                    waiting.append(caller)
        return whole

    @staticmethod
    def _parse(caller: _Caller, came: list[News]) -> bool:
        """Cut whole messages off what has come; False: it is none of ours."""
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

    def _hang_up(self, caller: _Caller) -> None:
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
                self._news.append(Closed(link.address))
            self._connect_later(link)
            return
        if not _ours(sock):
            sock.close()
            del self._links[link.address]  # the next frame tries again
            link.lost = True
            self._news.append(Denied(link.address))
            return
        if not self._await(sock):
            sock.close()
            self._connect_later(link)
            return
        link.sock, link.lost, link.pause_s = sock, False, RECONNECT_S[0]
        self._linked[sock.fileno()] = link
        self._news.append(Opened(link.address))
        self._push(link, sock)

    @staticmethod
    def _connect_later(link: _Link) -> None:
        link.retry_at = time.monotonic() + link.pause_s
        link.pause_s = min(2 * link.pause_s, RECONNECT_S[1])

    def _push(self, link: _Link, sock: socket.socket) -> None:
        """Write what the socket takes; the rest when it takes more."""
        waits = False
        while link.unsent:
            try:
                sent = sock.send(link.unsent[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                waits = True
                break
            except (BrokenPipeError, ConnectionResetError):
                break  # its end is news of its own
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
        link.lost, link.retry_at = True, time.monotonic() + link.pause_s
        self._news.append(Closed(link.address))

    def _retry(self) -> None:
        if self._accepts_at is not None and self._accepts_at <= time.monotonic():
            self._accepts_at = None if self._await(self._inbox) else time.monotonic() + RECONNECT_S[0]
        for link in list(self._links.values()):
            if link.sock is None and link.retry_at <= time.monotonic():
                self._connect(link)

    def _unlink(self, link: _Link) -> None:
        link.unsent.clear()
        if link.sock is not None:
            del self._linked[link.sock.fileno()]
            self._epoll.unregister(link.sock)
            link.sock.close()
            link.sock = None


def _connected(address: str) -> socket.socket:
    """Raises OSError: nobody listens there, too many wait to be heard, or the process has no descriptor left."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(address.removeprefix(SCHEME))
    except BaseException:
        sock.close()
        raise
    return sock


def _is_broken(link: _Link) -> bool:
    """Whether its end has come, or something else: nobody ever writes to us on it."""
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
    told = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", told)
    return bool(user == os.geteuid())


def _reachable(address: str) -> bool:
    """Whether it is an address of our kind that can exist; the kernel's longest path has 107 bytes."""
    try:
        path = os.fsencode(address.removeprefix(SCHEME))
    except UnicodeEncodeError:
        return False
    return address.startswith(f"{SCHEME}/") and len(path) <= 107 and b"\0" not in path
