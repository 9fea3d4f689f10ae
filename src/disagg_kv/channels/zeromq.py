"""Channels over ZeroMQ: TCP and Unix-domain sockets.

How ``ZmqChannel.wait`` loses nothing. No two threads may use one ZeroMQ socket at a time, so ``wait`` makes no call of
ZeroMQ. It waits for one epoll object with the descriptor of ``wake`` and one of each socket that receives: the inbox,
the monitors of connections, authentication. ZeroMQ makes such a descriptor readable when it sends a command to the
socket's mailbox, for example "a connection that was found empty has a message". The next call that works through the
mailbox takes that back, even if it leaves the message unread. A further message on a connection that was not found
empty since sends no command. So an edge could be lost in two ways:

* A call works through the mailbox, and its caller leaves messages unread. Only ``poll`` makes such calls of these
  sockets. It reads each until ZeroMQ answers ``Again``, which means: the mailbox was empty, and then every connection
  was. Whatever comes later sends a command, which stays until the next such call. Where ``poll`` ends earlier, at BATCH
  or by an exception, ``_unread`` makes the next poll read every socket, and ``wake`` makes the next wait return.
* A connection was never found empty, because it is new. It first sends a command that attaches it, and is read in the
  poll that this brings about. A monitor is attached without one, and is read once before its socket binds or connects.

Other threads' waits never take anything back: they read no descriptor. PUSH sockets receive nothing, and no wait needs
theirs.
"""

from __future__ import annotations

import re
import select
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext, suppress
from enum import Enum
from pathlib import Path

import zmq
from attrs import define
from zmq.utils.monitor import recv_monitor_message

from .. import arguments
from ..errors import ConfigurationError
from ..transports import Home, LinkCost
from .advertise import reached_at
from .authenticator import KeyAuthenticator
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
    fit_together,
)
from .files import claimed, listening
from .keys import Keys, split_key
from .reach import is_loopback
from .waiting import Waiter, Waits

_HARD_LIMIT = 2 * MAX_FRAME
"""A larger part is not even read: ZeroMQ cuts its connection. Messages that are still too large are counted.

ZeroMQ bounds the parts of a message, not how many it has, and shows nothing of a message before its last part.
"""

INBOX = 256
"""Messages of one connection that ZeroMQ reads ahead of us; of our kind, each has MAX_FRAME bytes at most."""

BACKLOG = 1024
"""Connections that may wait to be accepted at an ``ipc`` address."""

BATCH = 64 << 20
"""Bytes that one ``poll`` receives before it does anything else."""

MOST_INT = 2**31 - 1
"""The largest number that an option of ZeroMQ takes."""

_RECONNECT_MS = (50, 1000)
_REFUSED = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
_EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.CLOSED | _REFUSED


class _State(Enum):
    NEW = "new"
    OPEN = "open"
    LOST = "lost"


@define(eq=False)
class _Link:
    """The connection to one address. NEW: frames wait for the connection; LOST: they are dropped until it is back.

    ``absent``: the first attempt found no listener, and ``Closed`` was reported.
    """

    push: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    state: _State
    absent: bool = False


class ZmqChannel(Waits):
    """A PULL socket as inbox and a PUSH socket per destination; satisfies :class:`Channel` and ``SupportsBatches``.

    Frames that are sent together are the parts of one message, because every message wakes ZeroMQ's own thread on both
    sides.

    The first frames to an address are kept until its connection is established. When a connection breaks, its queue is
    dropped. A process that returns at the old address therefore gets no old frames. The channel reconnects after 50 ms,
    then after ever longer pauses of up to 1 s. With ``keys``, a process may accept and then cut the connection, because
    it lacks the key in the address. Then only the next frame tries again.

    With ``keys``, connections are encrypted and both sides prove their keys (CURVE). Each side accepts only its allowed
    keys. An address then ends with ``#`` and the public key of its listener, which a connecting endpoint requires.
    Connections are accepted only during ``poll``.

    Without keys, frames are neither encrypted nor authenticated. Only addresses that do not leave the host are allowed
    then. With ``unencrypted_network`` all addresses are allowed, and everything on the network can read and forge
    frames. Only the owner can use an ``ipc`` socket's file. ``close`` removes it.

    Args:
        bind: ``tcp://127.0.0.1:0`` (0: any free port, see ``address``), ``tcp://[::1]:0`` or ``ipc:///path``.
        advertise: host name or IP address at which peers reach this host; with ``:port`` if theirs is another one.
            None: the address of ``bind``. If that is every address of the host, such as ``tcp://0.0.0.0:0``, it is the
            address from which this host reaches others.
        keys: our key pair and the allowed keys.
        high_water: messages that wait per destination; more are dropped. Frames that are sent together are one message
            of at most MAX_FRAME bytes.
        unencrypted_network: True: addresses of other hosts are allowed without keys.

    Attributes:
        address: where others reach this inbox; with the real port, and our public key where there are keys.

    Raises:
        ConfigurationError: an address that leaves the host without keys, is in use or cannot be bound; keys together
            with ``unencrypted_network``; ``advertise`` is no such host, or none is found.
    """

    eager = False
    link_cost = LinkCost(68_000, 5)
    """ZeroMQ allocates queues in blocks of 256 messages, and a PUSH socket with its monitor has several queues.
    ``benchmarks/links.py`` measures both numbers."""

    def __init__(
        self,
        bind: str = "tcp://127.0.0.1:0",
        *,
        advertise: str | None = None,
        keys: Keys | None = None,
        high_water: int = 10_000,
        unencrypted_network: bool = False,
    ) -> None:
        bind = arguments.text(bind, "bind")
        if keys is not None:
            arguments.one(keys, f"channel {bind!r}: keys", Keys)
        if arguments.flag(unencrypted_network, f"channel {bind!r}: unencrypted_network") and keys is not None:
            raise ConfigurationError(f"channel {bind!r}: keys and unencrypted_network exclude each other")
        self._home = Home(f"the channel {bind!r}")
        self._keys = keys
        self._anywhere = unencrypted_network or keys is not None
        reason = _refusal(bind, self._anywhere)
        if reason is not None:
            raise ConfigurationError(f"channel {bind!r}: {reason}")
        if advertise is not None:
            arguments.text(advertise, f"channel {bind!r}: advertise", least=1)
        self._advertise = advertise
        self._high_water = arguments.count(high_water, f"channel {bind!r}: high_water", least=1, most=MOST_INT)
        self._links: dict[str, _Link] = {}
        self._denied: dict[str, str] = {}
        self._file: Path | None = None
        self._context = zmq.Context()
        # Three sockets a destination: the default of 1,023 would end at 340 peers.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._pull = self._context.socket(zmq.PULL)
        self._authenticator = KeyAuthenticator(self._context, self._pull, keys)
        self._authenticator.work()  # ZeroMQ signals the descriptor of a socket that was read until it was empty
        # A connection without news costs a poll nothing.
        self._epoll = select.epoll()
        self._waiter = Waiter(self._epoll)
        self._unread = False
        self._asked = {asked.fileno() for asked in self._authenticator.sockets}
        for descriptor in (self._pull.fileno(), *self._asked):
            self._epoll.register(descriptor, select.EPOLLIN)
        self._monitored: dict[int, str] = {}
        # ZeroMQ would silently replace the socket of another process.
        local = bind.startswith("ipc://")
        alone = claimed(bind, Path(bind.removeprefix("ipc://"))) if local else nullcontext()
        try:
            with alone:
                self.address = self._listen(bind)
        except ConfigurationError:
            self.close()
            raise
        except (zmq.ZMQError, OSError) as exc:
            self.close()
            raise ConfigurationError(f"channel {bind!r}: cannot be bound: {exc}") from exc

    def _listen(self, bind: str) -> str:
        self._pull.setsockopt(zmq.LINGER, 0)
        self._pull.setsockopt(zmq.RCVHWM, min(self._high_water, INBOX))
        self._pull.setsockopt(zmq.MAXMSGSIZE, _HARD_LIMIT)
        self._pull.setsockopt(zmq.IPV6, int("[" in bind))
        if bind.startswith("ipc://"):
            # ZeroMQ would make a file that, under some umasks, others may use until its mode is changed.
            path = Path(bind.removeprefix("ipc://"))
            with listening(path, BACKLOG) as inbox:
                self._file = path
                self._pull.setsockopt(zmq.USE_FD, inbox.fileno())
                self._pull.bind(bind)
                inbox.detach()
        else:
            self._pull.bind(bind)
        address = reached_at(bind, self._pull.getsockopt_string(zmq.LAST_ENDPOINT), self._advertise)
        if self._advertise is not None and (reason := _refusal(address, self._anywhere)) is not None:
            raise ConfigurationError(f"channel {bind!r}: advertise {self._advertise!r}: {reason}")
        return address if self._keys is None else f"{address}#{self._keys.public}"

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
        if self._waiter is None:
            return False
        link = self._links.get(address)
        if link is None:
            plain, key = split_key(address)
            reason = _refusal(plain, self._anywhere or bool(key))
            if reason is None and bool(key) is (self._keys is None):
                has = ("a public key", "has no keys") if key else ("no public key", "has keys")
                reason = "the address has {}, and this channel {}; both sides need keys, or neither".format(*has)
            if reason is not None:
                return self._deny(address, f"a ZeroMQ channel does not send there: {reason}")
            if self._keys is not None and not self._keys.allow(key):
                return self._deny(address, "")
            try:
                link = self._links[address] = self._connect(address, _State.NEW)
            except zmq.ZMQError:
                return False
        if link.state is _State.LOST:
            return False
        try:
            link.push.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _deny(self, address: str, reason: str) -> bool:
        self._denied[address] = reason
        self.wake()
        return False

    def poll(self) -> Sequence[News]:
        """Events since the last call; never blocks.

        Frames come before events of connections: a process's last frames precede its ``Closed``.
        """
        self._home.check()
        if (waiter := self._waiter) is None:
            return ()
        ready = dict(self._epoll.poll(0))
        ready.pop(waiter.fileno(), None)
        came: list[News] = []
        if self._unread:
            ready.update(dict.fromkeys((*self._asked, *self._monitored), select.EPOLLIN))
        if ready:
            self._unread = True
            try:
                whole = self._frames(came)
                self._of_connections(ready, came)
                self._unread = not whole
            finally:
                if self._unread:
                    self.wake()
        if self._denied:
            came += (Denied(address, reason) for address, reason in self._denied.items())
            self._denied.clear()
        return came

    def forget(self, address: str) -> None:
        """Close the connection to an address that is no longer needed, and drop its queue."""
        link = self._links.pop(address, None)
        if link is not None:
            self._disconnect(link)

    def close(self) -> None:
        """Stop; nothing is received or sent afterwards, and frames that are not sent yet are dropped."""
        self._home.check()
        waiter, self._waiter = self._waiter, None
        if waiter is None:
            return
        waiter.end()
        for link in self._links.values():
            self._disconnect(link)
        self._links.clear()
        self._authenticator.close()
        if self._file is not None:
            # First, so that it cannot be the file of a process that takes the address over.
            self._file.unlink(missing_ok=True)
        self._pull.close(0)
        self._context.term()
        self._epoll.close()

    def _connect(self, address: str, state: _State) -> _Link:
        plain, key = split_key(address)
        push = self._context.socket(zmq.PUSH)
        push.setsockopt(zmq.LINGER, 0)
        push.setsockopt(zmq.SNDHWM, self._high_water)
        push.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS[0])
        push.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS[1])
        push.setsockopt(zmq.IPV6, int("[" in plain))
        if self._keys is not None:
            push.setsockopt(zmq.CURVE_SERVERKEY, key.encode())
            push.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
            push.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
        link = _Link(push, push.get_monitor_socket(_EVENTS), state)
        descriptor = link.monitor.fileno()
        self._monitored[descriptor] = address
        self._epoll.register(descriptor, select.EPOLLIN)
        # ZeroMQ signals the descriptor of a socket that was read until it was empty, and no other.
        with suppress(zmq.Again):
            recv_monitor_message(link.monitor, zmq.NOBLOCK)
        try:
            push.connect(plain)
        except zmq.ZMQError:
            self._disconnect(link)
            raise
        return link

    def _disconnect(self, link: _Link) -> None:
        descriptor = link.monitor.fileno()
        del self._monitored[descriptor]
        self._epoll.unregister(descriptor)
        link.push.disable_monitor()
        link.monitor.close(0)
        link.push.close(0)

    def _frames(self, came: list[News]) -> bool:
        """Read the inbox until it is empty; False: it may not be, as there was too much."""
        taken = refused = 0
        while taken < BATCH:
            try:
                part = self._pull.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            # The authenticator has stored the key there that the connection has proved.
            key = "" if self._keys is None else str(part.get("User-Id"))
            frames = [part.bytes]
            while part.more:
                part = self._pull.recv(zmq.NOBLOCK, copy=False)
                if len(frames) <= MAX_TOGETHER:
                    frames.append(part.bytes)
            # Nothing is free, or a flood of empty messages would keep us here.
            taken += sum(map(len, frames)) + 1024
            if fit_together(frames):
                came.extend(Arrived(frame, key) for frame in frames)
            else:
                refused += 1
        if refused:
            came.append(Rejected(messages=refused))
        return taken < BATCH

    def _of_connections(self, ready: Collection[int], came: list[News]) -> None:
        if not self._asked.isdisjoint(ready) and (failed := self._authenticator.work()):
            came.append(Rejected(connections=failed))
        for descriptor in ready:
            address = self._monitored.get(descriptor)
            if address is not None and (link := self._links.get(address)) is not None:
                came.extend(self._news(address, link))

    def _news(self, address: str, link: _Link) -> Iterator[Closed | Denied | Opened]:
        while True:
            try:
                event = recv_monitor_message(link.monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                link.state = _State.OPEN
                yield Opened(address)
            elif event & _REFUSED and self._keys is not None:
                # ZeroMQ does not try again by itself; the next frame does.
                self.forget(address)
                yield Denied(address)
                return
            elif event == zmq.Event.DISCONNECTED and link.state is _State.NEW and self._keys is not None:
                # It was cut before a key was proved, as it would be every 50 ms: only the next frame tries again.
                self.forget(address)
                return
            elif link.state is _State.OPEN:
                # Only closing the socket throws away what it has queued; a new one tries again. Where the process has
                # no socket left for it, the next frame does.
                self.forget(address)
                with suppress(zmq.ZMQError):
                    self._links[address] = self._connect(address, _State.LOST)
                yield Closed(address)
                return
            elif event == zmq.Event.CLOSED and link.state is _State.NEW and not link.absent:
                link.absent = True
                yield Closed(address)


def _refusal(address: str, anywhere: bool) -> str | None:
    """Why the address is malformed or leaves the host (which ``anywhere`` allows); None: it is fine."""
    if re.fullmatch(r"ipc://[^@*].*", address):
        return None
    tcp = re.fullmatch(r"tcp://(?:\[([0-9a-fA-F:.]+)\]|([^:/\[\]]+)):(\d{1,5})", address)
    if tcp is None or int(tcp[3]) > 65535:
        return "neither tcp://host:port nor ipc:///path"
    if is_loopback(tcp[1] or tcp[2]) or anywhere:
        return None
    return "without keys frames are not encrypted: only loopback and ipc, or unencrypted_network=True"
