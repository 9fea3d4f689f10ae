"""How an endpoint meets, reaches and loses its peers: what the table of peers asks for is done here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVarTuple

from ...channels import Channel
from ...core import (
    Codec,
    Forget,
    Forgotten,
    Greeted,
    Lost,
    Options,
    PeerEffect,
    PeerTable,
    Send,
    SendTo,
    Unreachable,
    Up,
)
from ...errors import DisaggKVError, PeerLostError, RemoteProtocolError, TransportError
from ...ids import Epoch
from ...trace import Guarded, Observer, Silent
from ...transports import Carrier
from ...transports.process import Exits, Process
from ..peers.background import Background
from ..peers.connections import Connections, ConnectResult
from ..peers.handshake import EndpointInfo, RemoteEndpoint
from ..peers.limited_log import LimitedLog
from ..peers.link_budget import budget_of
from ..peers.mapping import open_decode
from ..peers.session import PeerSession, Sessions
from .buffers import SendBuffer
from .failures import Failures
from .ranks import InstanceRanks
from .side import Side

log = logging.getLogger("disagg_kv")

LINKS = 32
"""Connections of the transport that run at a time, apart from those that take long."""

A = TypeVarTuple("A")


class Peering:
    """The base of :class:`~.event_loop.EventLoop`, which has time, messages and commands; one thread at a time.

    ``landing``: the peers whose end was seen or confirmed, and when. Their last writes may not have landed.
    """

    ranks: InstanceRanks
    side: Side

    def __init__(
        self,
        me: EndpointInfo,
        channel: Channel,
        options: Options,
        observer: Observer,
        clock: Callable[[], float],
        background: Callable[[str, int], Background],
        end_rooms: Callable[[DisaggKVError], None],
    ) -> None:
        self.me = me
        self.channel = channel
        self.options = options
        self.observer: Observer = observer if isinstance(observer, Silent) else Guarded(observer)
        self.clock = clock
        self.now = clock()
        self.codec = Codec()
        self.failures = Failures(f"{me.instance}/{me.rank}", self.observer, clock, end_rooms)
        self._send_buffer = SendBuffer(channel, self.observer, LimitedLog(clock), self.failures.defer)
        budget = budget_of(channel, me.transports.link, options)
        self.peers = PeerTable(me.epoch, me.address, me.hello(), me.admit, PeerSession, options, budget)
        helpers = background(f"disagg_kv {me.instance}/{me.rank} links", LINKS)
        ready = partial(open_decode, me) if me.role == "prefill" else None
        self._helped = False
        self.connections = Connections(me.transports, helpers, self._on_help, clock, self.observer, options, ready)
        self.sessions = Sessions(self.peers, options, clock)
        self._exits: Exits[PeerSession] = Exits()
        self._ended: list[PeerSession] = []  # since they were asked for
        self.landing: dict[PeerSession, float] = {}

    def _on_help(self) -> None:
        """On a helper thread: a call that may block has returned."""
        self._helped = True
        self.channel.wake()

    def of_peer(self, epoch: Epoch, act: Callable[[*A], None], *about: *A) -> None:
        """Act on a frame of a peer, or on its link. An error ends this peer, and concerns no room of another one."""
        try:
            act(*about)
        except RemoteProtocolError:
            raise
        except Exception as exc:
            self._blame(epoch, exc)

    def _blame(self, epoch: Epoch | None, exc: Exception) -> None:
        """An error was met while a frame or a link of a peer (None: of none) was handled: end what it may concern."""
        if epoch is None:
            raise exc
        name, address = self.sessions.name(epoch), self.peers.address(epoch) or ""
        error = self.failures.note(exc, f"rooms with {name}").about(name, **self.sessions.who(epoch))
        self._peer_effects(self.peers.shut(epoch, error, self.now))
        self.side.on_unreachable(address, error)

    def _peer_effects(self, effects: Sequence[PeerEffect]) -> None:
        if not effects:
            return
        for effect in effects:
            match effect:
                case SendTo(address, frame):
                    self._send_buffer.put(address, self.codec.encode(frame))
                case Up(epoch):
                    self._up(epoch)
                case Greeted(epoch):
                    if epoch not in self.ranks:
                        self.side.on_greeted(epoch)
                case Lost():
                    self._on_lost(effect)
                case Forgotten(PeerSession() as session):
                    self._drop(session)
                case Unreachable(address, error):
                    self.side.on_unreachable(address, error)
                case Forget(address):
                    self._send_buffer.unsent.pop(address, None)
                    self.channel.forget(address)

    def _up(self, epoch: Epoch) -> None:
        session = self.peers.known(epoch)
        assert session is not None
        if session.hello.role == self.me.role:
            self.ranks.up(session)
            return
        if (linked := self.connections.begin(session)) is not None:
            self._on_linked(linked)
        self._take_links()

    def _take_links(self) -> None:
        for linked in self.connections.results():
            self.failures.guard(self.of_peer, linked.session.epoch, self._on_linked, linked)

    def _on_linked(self, linked: ConnectResult) -> None:
        """The transport has reached a peer, or has not; the frames that waited for that come next."""
        session, link = linked.session, linked.link
        error = link if isinstance(link, DisaggKVError) else self._unwatched(session)
        if error is not None:
            self._peer_effects(self.peers.shut(session.epoch, error, self.now))
            self.side.on_unreachable(session.hello.address, error)
        else:
            session.remote = RemoteEndpoint.of(session.hello)
            self.side.on_up(session)
        for take_in in linked.frames:
            self.failures.guard(self.of_peer, session.epoch, take_in)

    def _unwatched(self, session: PeerSession) -> DisaggKVError | None:
        """Watch the process of a peer that was reached; why that cannot be now, and its link is dropped then.

        Not before it is reached: until then it writes nothing here. An end meanwhile is noticed now. Of a process of
        another host only its operator can know. One of our own process never ends before us.
        """
        hello, me = session.hello, self.me.incarnation
        process = Process(hello.pid, hello.started, hello.host)
        if process == me.process or session in self._exits or session in self.landing:
            return None
        try:
            self._exits.add(session, me.watch(process))
        except TransportError as exc:
            return self.connections.refuse(session, exc) if exc.retryable else None
        except PeerLostError:
            self._end(session)
        return None

    def exited(self, *, at_once: bool = False) -> list[PeerSession]:
        """Peers whose process has ended since the last call; unless ``at_once``, an end a moment ago may be missing.

        That is evidence where silence is not.
        """
        if len(self._exits) or self._ended:
            for session in self._exits.ended(at_once=at_once):
                self._end(session)
        found, self._ended = self._ended, []
        return found

    def _end(self, session: PeerSession) -> None:
        self.landing.setdefault(session, self.clock())
        self._ended.append(session)

    def drained(self) -> list[PeerSession]:
        """Peers whose last writes have landed: they ended ``drain_s`` of their transport ago, where that is known.

        A peer without a link may have written over any transport: the longest ``drain_s`` counts.
        """
        found, now, longest_s = [], self.clock(), self.me.transports.drain_s
        for session, ended_at in self.landing.items():
            drain_s = longest_s if session.carrier is None else session.carrier.caps.drain_s
            if drain_s is not None and now - ended_at >= drain_s:
                found.append(session)
        return found

    def dial(self, address: str) -> None:
        """Learn which endpoint is at an address."""
        self._peer_effects(self.peers.dial(address, self.now))

    def lose(self, epoch: Epoch, error: DisaggKVError, *, ended: bool = False) -> None:
        """A peer is lost for a reason that the peer table does not see by itself; ``ended``: for good."""
        self._peer_effects(self.peers.lose(epoch, error, ended=ended))

    def _on_lost(self, lost: Lost) -> None:
        self.observer.count("peers.lost")
        log.info("%s", lost.error)
        if lost.peer in self.ranks:
            self.ranks.lost(lost.peer)
        else:
            session = self.peers.known(lost.peer)
            if session is not None:
                self.connections.give_up(session)
            self.side.on_lost(lost)
            if session is not None:
                session.depart()

    def _drop(self, session: PeerSession) -> None:
        """The table has forgotten a peer that no room uses: nothing is left of it."""
        self.side.forget(session)
        session.depart()
        if session.linked:
            self.observer.count("links.dropped")
        self._unlink(session)

    def confirm_terminated(self, epoch: Epoch) -> None:
        """The operator has confirmed that a process ended: that is evidence once its last writes must have landed."""
        self.lose(epoch, self._lost(epoch, "its end was confirmed"), ended=True)
        if (session := self.peers.known(epoch)) is not None:
            self.landing.setdefault(session, self.clock())

    def _lost(self, epoch: Epoch, reason: str) -> PeerLostError:
        return PeerLostError(f"{self.sessions.name(epoch)}: {reason}", **self.sessions.who(epoch))

    def _gone(self, session: PeerSession) -> None:
        self.side.on_gone(session)
        session.depart()
        self._unlink(session)

    def _unlink(self, session: PeerSession) -> None:
        """No evidence about this peer is awaited any more: it was used, or nothing is owed to the peer."""
        self.landing.pop(session, None)
        self._exits.remove(session)
        self.connections.drop(session)

    def send(self, send: Send) -> None:
        """To an incarnation, wherever it is; dropped if it is not known any more."""
        address = self.peers.address(send.to)
        if address is None:
            self.observer.count("frames.unroutable")
            return
        self._send_buffer.put(address, self.codec.encode(send.frame))

    def flush(self) -> None:
        """Hand over what was said: when a step ends, and before this thread does something that may take long."""
        self._send_buffer.flush()

    def reach(self, epoch: Epoch) -> Carrier:
        """What carries bytes to a peer now.

        Raises:
            TransportError: it is lost. Evidence counts from the moment when a peer's end was seen: nothing may begin
                to read or write after it.
        """
        session = self.peers.known(epoch)
        if session is None or session.carrier is None or session.remote is None:
            raise TransportError(f"{self.sessions.name(epoch)} is lost", **self.sessions.who(epoch))
        if why := self.me.transports.failed(session.carrier.transport):
            raise TransportError(f"{self.sessions.name(epoch)}: {why}", **self.sessions.who(epoch))
        return session.carrier

    def there(self, epoch: Epoch) -> PeerSession | None:
        """A peer of the other side to which rooms may be bound; None: it is not there."""
        session = self.peers.known(epoch)
        return None if session is None or session.remote is None else session

    def all_there(self) -> Iterator[PeerSession]:
        """All of those, in the order in which they came."""
        return (session for session in self.peers.all() if session.remote is not None)

    def use(self, epoch: Epoch, used: list[PeerSession]) -> None:
        """A room uses a peer, if it is known, from now on; ``used`` has those that it uses, each once."""
        if all(one.epoch != epoch for one in used) and (session := self.peers.use(epoch, self.now)) is not None:
            used.append(session)

    def release(self, used: list[PeerSession]) -> None:
        """The room is over."""
        while used:
            self.peers.release(used.pop())
