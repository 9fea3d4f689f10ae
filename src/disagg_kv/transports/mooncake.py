"""Mooncake's transfer engine: tcp for CPU memory, NVLink between the GPUs of one host, RDMA by option."""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, Queue

import attrs

from ..errors import (
    ConfigurationError,
    MissingDependencyError,
    PeerLostError,
    RegistrationError,
    RemoteProtocolError,
    TransportError,
)
from ..ids import Peer, RegionId, Ticket
from ..memory import Buffer, Event
from ..planning import Writes
from .base import Capabilities, PeerLost, Settled, WriteEnded
from .connected import Connected
from .descriptor import Region, decode, pack, unpack
from .mooncake_flight import ADDRESS, Address, Flight, Remote, Shared, cut
from .mooncake_library import NOTHING, SWITCHES, Engine, load, reach
from .mooncake_single import Singles
from .mooncake_workers import WorkerPool
from .near_side import NearSide
from .process import Process, keep_in_children
from .regions import Extents
from .waiting import happened, not_posted

LOOK_S = 0.02
"""Seconds between two checks of the processes of peers."""

PAUSE_S = 0.0005
"""Seconds between two polls of the writes that ``close`` waits for."""

_LOOPBACK = "127.0.0.1"

_LEAST_TIMEOUT_S = 5
"""The library takes any shorter one for this."""


class MooncakeTransport(NearSide):
    """One transfer engine. Threads of its own make the calls that block; ``submit`` never does.

    Import this in a process that will not fork afterwards: the library brings a Go runtime with it.

    Args:
        host: name or address under which peers reach this host; the default serves one host only, and each engine has
            an address of its own in 127.0.0.0/8 then, if that is the host's.
        protocol: ``"tcp"``, ``"rdma"``, or ``"nvlink_intra"`` for GPU memory (and nothing else) on one host.
        device_name: RDMA devices to use, separated by commas; empty: all.
        workers: how many peers they write to at the same time; each of their calls spins on a core.
        timeout_s: after which a write without an end fails, at least 5; None: MC_TRANSFER_TIMEOUT, else 30.
        drain_s: see ``Capabilities.drain_s``; the library drops a connection without progress after 30.
        quiet: let the library write nothing to stdout and stderr.
        clock: seconds that never go back.

    Raises:
        MissingDependencyError: Mooncake, or a system library that it needs, is not installed.
        ConfigurationError: an option that cannot work.
    """

    name = "mooncake"
    caps = Capabilities(
        waits_events=True,
        detects_peer_death=True,
        late_writes=True,
        drain_s=30.0,
        bytes_per_s=1.2e9,
    )

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        protocol: str = "tcp",
        device_name: str = "",
        workers: int = 4,
        timeout_s: int | None = None,
        drain_s: float = 30.0,
        quiet: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check(host, protocol, workers, timeout_s, drain_s)
        if not (hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")):
            raise MissingDependencyError(
                "transport 'mooncake'", "needs memfd_create and pidfd_open", "run on Linux 5.3+"
            )
        module = load()
        if protocol == "nvlink_intra":
            if not module.SUPPORT_INTRA_NVLINK:
                raise ConfigurationError(
                    "mooncake: no nvlink_intra in this build; mooncake-transfer-engine-cuda13 has it"
                )
            self.caps = attrs.evolve(self.caps, devices=frozenset({"cuda"}), bytes_per_s=3.8e11)
        elif module.SUPPORT_CUDA:
            self.caps = attrs.evolve(self.caps, devices=frozenset({"cpu", "cuda"}))
        self.caps = attrs.evolve(self.caps, drain_s=drain_s)
        super().__init__()
        self._process = Process.own()
        if host == _LOOPBACK and "MC_TCP_BIND_ADDRESS" not in os.environ:
            host = loopback(f"127.{1 + self._me[0] % 254}.{self._me[1]}.{1 + self._me[2] % 254}")
        engine = Engine(
            module,
            host=host,
            protocol=protocol,
            device_name=device_name,
            timeout_s=timeout_s,
            quiet=quiet,
        )
        keep_in_children(engine)
        self._address = Address(engine.session, host, engine.port, protocol, self._process)
        self._shared = Shared(engine, max(_LEAST_TIMEOUT_S, timeout_s or _environment_timeout()))
        self._workers = WorkerPool(2 * workers if protocol == "nvlink_intra" else workers, "mooncake")
        self._singles = Singles(self._shared, self._workers, clock) if engine.begins else None
        weakref.finalize(self, self._workers.stop)
        self._clock = clock
        self._look_at = clock()
        self._peers: Connected[Remote] = Connected()
        self._sessions: dict[str, Peer] = {}
        self._meeting = threading.Lock()
        self._flights: dict[Ticket, Flight] = {}
        self._waiting: list[tuple[Event, Flight]] = []
        self._unquiet: dict[Ticket, Remote] = {}
        self._events: list[WriteEnded | Settled | PeerLost] = []

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        """Register buffers, as sources of writes and as targets of peers'.

        From now on every host that reaches this one can write to them.
        """
        engine = self._engine()
        regions = self._table.add(buffers)
        for number, buffer in enumerate(buffers):
            try:
                engine.register(buffer.addr, buffer.nbytes)
            except RegistrationError:
                for done in buffers[:number]:
                    engine.unregister(done.addr)
                self._table.remove(regions)
                raise
        return regions

    def local_descriptor(self) -> bytes:
        """Return what a peer passes to ``connect``: incarnation and regions."""
        regions = (Region(i, b.nbytes, b.device, b.addr) for i, b in self._table.items())
        return self._described(regions, pack(self._address))

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """Connect the peer of a descriptor, or add its new regions.

        Raises:
            TransportError: also where an earlier peer had the same address: the library would confuse them.
        """
        engine = self._engine()
        remote = decode(descriptor, self.name)
        address = unpack(remote.blob, ADDRESS)
        peer = remote.incarnation
        self._check_address(address, peer)
        known = self._peers.get(peer)
        if known is not None and known.lost:
            raise PeerLostError(f"{known} is lost")
        if known is not None and known.address != address:
            raise RemoteProtocolError(f"{known}: an engine at {address.host}:{address.port} takes its name")
        if known is not None and known.serial >= remote.serial:
            return peer
        extents = Extents(((r.id, r.base, r.nbytes) for r in remote.regions), f"peer {peer.hex()[:8]}'s")
        if known is not None and address.protocol == "nvlink_intra" and not known.extents.has_all(extents):
            raise TransportError(
                f"{known}: over nvlink_intra the library does not see what a peer registers after the first connect; "
                "register everything first"
            )
        if known is not None:
            with self._meeting:
                if known.serial < remote.serial:
                    known.serial, known.extents = remote.serial, extents
            return peer
        watch = address.process.watch() if address.process.host == self._process.host else None
        found = Remote(peer, address, remote.serial, extents, watch)
        _greet(self._shared, engine, found, timeout_s)
        with self._meeting:
            # Another thread may have met a peer at the same address meanwhile.
            self._check_address(address, peer)
            self._sessions[address.session] = peer
            self._peers.add(peer, found)
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Disconnect a peer; its tickets still end."""
        self._peers.remove(peer)

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        """Post a batch of writes, and return its ticket.

        Never blocks. :meth:`poll` sees that ``after`` has happened.
        """
        self._home.check()
        remote = self._peers.known(peer, self.name)
        devices = [(i, b.device) for i, b in self._table.items()] if "cuda" in self.caps.devices else ()
        calls = cut(writes, self._table.extents, remote.extents, devices)
        ticket = Ticket(next(self._tickets))
        if not calls:
            self._events.append(WriteEnded(ticket))
        elif remote.lost:
            self._events.append(WriteEnded(ticket, PeerLostError(f"{remote} is lost")))
        else:
            flight = self._flights[ticket] = Flight(ticket, remote, calls, self._shared)
            if after is None:
                self._begin(flight)
            else:
                self._waiting.append((after, flight))
                self._begin_due()
        return ticket

    def _begin(self, flight: Flight) -> None:
        remote = flight.remote
        if self._singles is not None and self._singles.takes(flight):
            self._singles.put(flight)
        elif self._address.protocol == "nvlink_intra":
            # Two at a time: the library copies on a stream of the calling thread, which is idle between two calls.
            remote.turn = 1 - remote.turn
            self._workers.put((remote.peer, remote.turn), flight.step)
        else:
            self._workers.put(remote.peer, flight.step)

    def _begin_due(self) -> None:
        """Begin what has waited for an event that has happened; one that never will, ends."""
        waiting, self._waiting = self._waiting, []
        for after, flight in waiting:
            try:
                due = flight.remote.lost or happened(after, str(flight.remote), flight.ticket)
            except TransportError as error:
                self._end(flight, WriteEnded(flight.ticket, error))
                continue
            if due:
                self._begin(flight)
            else:
                self._waiting.append((after, flight))

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        """Return the events since the last call."""
        if not self._home.here:
            return ()
        ended = self._collect()
        now = self._clock()
        # A write that failed may have found that its peer is gone.
        if ended or now >= self._look_at:
            self._look_at = now + LOOK_S
            self._look_at_peers(now)
        events, self._events = self._events, []
        return events

    def _look_at_peers(self, now: float) -> None:
        for remote in {id(r): r for r in (*self._peers.all.values(), *self._unquiet.values())}.values():
            self._look(remote, now)
        for ticket, remote in tuple(self._unquiet.items()):
            # The peer's memory is gone with it, and the sockets that read ours are closed for want of progress. Where
            # the library says that it still has the write, that is the better evidence.
            ended = remote.exited_at is not None and now - remote.exited_at >= (self.caps.drain_s or 0.0)
            if ended and (self._singles is None or not self._singles.has(ticket)):
                self._settle(ticket)

    def close(self, drain_s: float) -> Sequence[Ticket]:
        """Wait at most ``drain_s`` seconds for tickets, and return those that are not quiet.

        The engine ends at once, or with the last call that is still in it.
        """
        self._home.check()
        engine = self._shared.engine
        if engine is None:
            return ()
        self._drain(drain_s)
        with self._shared.gate:
            self._shared.engine = None
        self._workers.stop()
        self._collect()
        for ticket, flight in tuple(self._flights.items()):
            if flight.posting:
                flight.keep = self._table.items()
                self._unquiet[ticket] = flight.remote
            else:
                self._end(flight, WriteEnded(ticket, not_posted(str(flight.remote), ticket)))
        left = tuple(self._unquiet)
        for _, buffer in self._table.items():
            engine.unregister(buffer.addr)
        engine.hurry()
        del engine  # it ends here, or with the last call in it, and only then may the memory go
        self._table.clear()
        self._peers.clear()
        self._flights.clear()
        self._waiting.clear()
        self._unquiet.clear()
        return left

    def _drain(self, drain_s: float) -> None:
        until = time.monotonic() + drain_s
        while (self._waiting or (self._singles is not None and self._singles.flying())) and time.monotonic() < until:
            self._begin_due()
            if self._singles is not None:
                self._singles.look()
            time.sleep(PAUSE_S)
        self._workers.drain(until - time.monotonic())

    def _engine(self) -> Engine:
        self._home.check()
        engine = self._shared.engine
        if engine is None:
            raise TransportError("mooncake: this transport is closed")
        return engine

    def _check_address(self, address: Address, peer: Peer) -> None:
        if not 0 < address.port < 1 << 16 or not address.host or not address.session:
            raise RemoteProtocolError(f"mooncake: descriptor with an impossible address: {address}")
        if address.protocol != self._address.protocol:
            raise TransportError(
                f"mooncake: the peer uses protocol {address.protocol!r}, this side {self._address.protocol!r}"
            )
        if self._sessions.get(address.session, peer) != peer:
            raise TransportError(
                f"mooncake: an earlier peer was at {address.session}, and the library cannot forget it; "
                "let the new one, or this side, restart its transport"
            )

    def _collect(self) -> bool:
        """Begin what need not wait any more, and take over what has ended; False: nothing has."""
        if self._waiting and self._shared.engine is not None:
            self._begin_due()
        if self._singles is not None and self._shared.engine is not None:
            self._singles.look()
        results = self._shared.results
        some = bool(results)
        while results:
            flight, event = results.popleft()
            if isinstance(event, Settled):
                self._settle(event.ticket)
            elif flight.ticket in self._flights:
                self._end(flight, event)
        return some

    def _settle(self, ticket: Ticket) -> None:
        if self._unquiet.pop(ticket, None) is not None:
            self._events.append(Settled(ticket))

    def _end(self, flight: Flight, ended: WriteEnded) -> None:
        del self._flights[flight.ticket]
        self._events.append(ended)
        if not ended.quiesced:
            self._unquiet[flight.ticket] = flight.remote

    def _look(self, remote: Remote, now: float) -> None:
        """Note the end of a peer."""
        if remote.exited_at is None and remote.watch is not None and remote.watch.ended():
            remote.exited_at = now
        if not remote.lost and (remote.gone or remote.exited_at is not None):
            remote.lost = True
            self._events.append(PeerLost(remote.peer))


def _check(host: str, protocol: str, workers: int, timeout_s: int | None, drain_s: float) -> None:
    if protocol not in SWITCHES:
        raise ConfigurationError(f"mooncake: protocol {protocol!r}; known: {', '.join(SWITCHES)}")
    if not host or host.count(":") == 1:
        raise ConfigurationError(f"mooncake: host {host!r} must be a name or an address, without a port")
    if not drain_s >= 0:
        raise ConfigurationError(f"mooncake: drain_s of {drain_s}")
    if workers < 1:
        raise ConfigurationError(f"mooncake: {workers} workers")
    if timeout_s is not None and timeout_s < _LEAST_TIMEOUT_S:
        raise ConfigurationError(f"mooncake: timeout_s of {timeout_s}; the library needs {_LEAST_TIMEOUT_S} at least")


def loopback(wanted: str) -> str:
    """An address that hardly any other engine of this host has had; where it is not the host's, the usual one.

    The library can forget no address, and draws its ports from 2,000. Linux answers at all of 127.0.0.0/8, unless its
    loopback device was given less.
    """
    with socket.socket() as probe:
        try:
            probe.bind((wanted, 0))
        except OSError:
            return _LOOPBACK
    return wanted


def _environment_timeout() -> int:
    """As the library reads it."""
    given = os.environ.get("MC_TRANSFER_TIMEOUT", "30")
    return int(given) if given.isdecimal() else 0


def _greet(shared: Shared, engine: Engine, remote: Remote, timeout_s: float) -> None:
    """Find out that the peer is there, and let the library learn about it, for at most ``timeout_s`` seconds."""
    answer: Queue[Exception | int] = Queue()
    address = remote.address

    def greet() -> None:
        try:
            # The library comes second: it would wait a minute for a frozen peer, and block every other caller.
            reach(address.host, address.port, timeout_s)
            answer.put(engine.write(address.session, NOTHING, NOTHING, NOTHING))
        except Exception as error:
            answer.put(error)  # also that a peer's host is no name at all
        finally:
            shared.greeting.discard(remote.peer)

    shared.greeting.add(remote.peer)
    try:
        threading.Thread(target=greet, name="mooncake-greet", daemon=True).start()
    except RuntimeError as error:
        shared.greeting.discard(remote.peer)
        raise TransportError(f"{remote} cannot be met: {error}", retryable=True) from error
    try:
        got = answer.get(timeout=timeout_s)
    except Empty:
        raise TransportError(f"{remote} does not answer within {timeout_s:g} s", retryable=True) from None
    if isinstance(got, ConnectionRefusedError):
        raise PeerLostError(f"{remote} is gone: no process listens there") from got
    if isinstance(got, Exception):
        raise TransportError(f"{remote} cannot be reached: {got}", retryable=True) from got
    if got:
        raise TransportError(f"{remote}: the library cannot open {address.session!r} (code {got})", retryable=True)
