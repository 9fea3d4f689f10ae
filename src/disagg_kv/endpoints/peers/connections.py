"""Connections of the transports, at most one per incarnation of a peer.

``Transport.connect`` may block for seconds, so it runs on a helper thread. Until it has returned, the peer is
*linking*: no room uses it, and its frames about rooms wait here, bounded. Where prefill has a path that needs decode's
pool mapped, the same thread maps it, and compiles kernels where they have to be. The thread that advances begins
with :meth:`Connections.begin` and takes results with :meth:`Connections.results`. A failure is remembered from when it
happened, so that the next frame of that peer does not begin another attempt at once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import TypeVar

from attrs import frozen

from ...core import Frame, Hello, Options
from ...core.room.machine import ours
from ...errors import CapacityError, DisaggKVError, IncompatiblePeerError, TransportError, text_of, without_frames
from ...ids import Epoch, Peer, peer_name
from ...trace import Observer
from ...transports import Carrier, Transport, Transports
from .background import Background
from .limited_log import LimitedLog
from .mapping import UNMAPPED, Mapping
from .session import Link, PeerSession

F = TypeVar("F", bound=Frame)
log = logging.getLogger("disagg_kv")

CONNECT_S = 10.0
"""Seconds that a transport may take to reach a peer. A busy host's library needs seconds; no room of others waits."""

OVERDUE_S = 2 * CONNECT_S
"""An attempt that has not returned by then has failed; what it reaches later is disconnected."""

READY_S = 120.0
"""The same for what comes after that: compiling kernels, one peer after the other, and mapping a peer's pool."""

LATE = f"kernels and a mapping for it were not ready in {READY_S:g} s"

EARLY_BYTES, FRAME_BYTES = 16 << 20, 1024
"""Bytes of frames that wait until their peers are linked, and what each of them counts beside its own bytes. Those
beyond it are dropped: their sender repeats what matters."""


@frozen
class ConnectResult:
    """An attempt has ended. ``link`` is what carries writes to the peer, or why nothing does.

    ``frames`` take in what has come meanwhile.
    """

    session: PeerSession
    link: Carrier | DisaggKVError
    frames: Sequence[Callable[[], None]] = ()


class Connections:
    """The transport connections of one endpoint.

    Args:
        transports: they connect.
        background: where it does so.
        wake: called on a helper thread when an attempt has ended.
        clock: time, in seconds.
        observer: counts what fails.
        options: ``silence_s`` is how long a failure is remembered; at most ``peers`` attempts run at a time.
        get_ready: makes this side ready for a peer that was connected, on the thread that connected it; gives the
            mapping of the peer's pool. None: nothing is to be done.
    """

    def __init__(
        self,
        transports: Transports,
        background: Background,
        wake: Callable[[], None],
        clock: Callable[[], float],
        observer: Observer,
        options: Options,
        get_ready: Callable[[Carrier, Hello], Mapping] | None = None,
    ) -> None:
        self._transports = transports
        self._background = background
        self._wake = wake
        self._get_ready = get_ready
        self._clock = clock
        self._observer = observer
        self._options = options
        self._log = LimitedLog(clock)
        self._owners: dict[tuple[str, Peer], Link] = {}
        self._under_way = 0
        self._due_at = inf
        self._early_bytes = 0
        self._results: deque[tuple[Link, Mapping, DisaggKVError | None, float]] = deque()

    def begin(self, session: PeerSession) -> ConnectResult | None:
        """Link to a peer; None: the result comes out of :meth:`results`. What is known already is returned at once."""
        link = session.link
        if link is not None and link.error is not None:
            return ConnectResult(session, link.error)
        if link is not None and link.linked:
            return ConnectResult(session, _reached(link))
        if link is not None:
            link.wanted = True
            return None
        if session.failed is not None and self._clock() - session.failed_at < self._options.silence_s:
            return ConnectResult(session, session.failed)
        session.failed = None
        try:
            link = self._claim(session)
            if link is not None:
                self._background.start(partial(self._connect, link))
        except Exception as exc:
            failed = _failed(exc, session.hello)
            self._fail(session, failed, self._clock())
            if link is not None:
                self._forget(link)
            return ConnectResult(session, failed)
        return None

    def _claim(self, session: PeerSession) -> Link | None:
        """What a peer names of any transport is its own, from before it is connected until it is disconnected.

        Descriptors are no secrets. Another peer with one of them would receive, or divert, the bytes of the first one,
        and its end would end the first one's link. None: an attempt that was begun before the peer was
        forgotten has not returned; what it brings is used.

        Raises:
            CapacityError: as many attempts run as are allowed.
            IncompatiblePeerError: another peer has named one before, or the sides share no transport.
            RemoteProtocolError: the descriptor is garbage.
        """
        hello = session.hello
        until, late = self._clock() + OVERDUE_S, f"its connect has not returned for {OVERDUE_S:g} s"
        link = Link(session, self._transports.shared(hello.descriptor), until, late)
        owners = [self._owners[name] for name in link.claims if name in self._owners]
        owner = next((one for one in owners if one.session.epoch != session.epoch), None)
        if owner is None and owners:
            owner = owners[0]
        if owner is not None and owner.session.epoch == session.epoch and owner.error is None:
            session.link, owner.session, owner.wanted = owner, session, True
            return None
        if owner is not None:
            ours, theirs = (peer_name(one.src, one.instance, one.rank) for one in (owner.session.hello, hello))
            raise owner.error or IncompatiblePeerError("descriptor", f"that of {ours}", theirs)
        if self._under_way >= self._options.peers:
            raise CapacityError(f"{self._under_way} connections are under way, and no more may be")
        session.link = link
        self._owners |= dict.fromkeys(link.claims, link)
        self._under_way += 1
        self._due_at = min(self._due_at, until)
        return link

    def _connect(self, link: Link) -> None:
        """On a helper thread."""
        hello = link.session.hello
        mapping, lost = UNMAPPED, f"{_name(hello)}: the attempt ended without a result"
        error: DisaggKVError | None = TransportError(lost, **hello.who)
        try:
            link.carrier = self._transports.connect(link.shared, CONNECT_S, self._clock)
            if self._get_ready is not None:
                link.until, link.late = self._clock() + READY_S, LATE
                mapping = self._get_ready(link.carrier, hello)
            error = None
        except Exception as exc:
            error = _failed(exc, hello)
        finally:
            self._results.append((link, mapping, error, self._clock()))
            self._wake()

    def results(self) -> Sequence[ConnectResult]:
        """The attempts that have ended since the last call, and that are still wanted."""
        out: list[ConnectResult] = []
        while self._results:
            link, mapping, error, at = self._results.popleft()
            link.mapping = mapping
            if error is None and (why := self._transports.failed(_reached(link).transport)):
                error = TransportError(f"{_name(link.session.hello)}: {why}", **link.session.hello.who)
            wanted, frames = link.wanted, self._take(link)
            link.linked = error is None and wanted
            if error is not None:
                self._fail(link.session, error, at)
            if link.linked:
                self._under_way -= 1
            else:
                if link.carrier is not None:
                    self._disconnect(link)
                self._forget(link)
            if wanted:
                out.append(ConnectResult(link.session, error or _reached(link), frames))
        if self._clock() >= self._due_at:
            out += self._overdue()
        return out

    def _overdue(self) -> list[ConnectResult]:
        """Attempts that have not returned fail now; until they return, no other one of that peer may begin."""
        now, out = self._clock(), list[ConnectResult]()
        waiting = [link for link in self._links() if not link.linked and link.error is None]
        for link in waiting:
            if now >= link.until:
                hello = link.session.hello
                link.error = TransportError(f"{_name(hello)}: {link.late}", **hello.who)
                if link.wanted:
                    out.append(ConnectResult(link.session, link.error, self._take(link)))
                link.wanted = False
        self._due_at = min((link.until for link in waiting if link.error is None), default=inf)
        return out

    def _links(self) -> Sequence[Link]:
        """Each once, in the order in which its attempt began."""
        return tuple(dict.fromkeys(self._owners.values()))

    def _take(self, link: Link) -> Sequence[Callable[[], None]]:
        """What has come for an attempt, which is not held any more."""
        frames, link.frames = link.frames, []
        self._early_bytes -= link.nbytes
        link.nbytes = 0
        return frames

    def _fail(self, session: PeerSession, error: DisaggKVError, at: float) -> None:
        without_frames(error)
        session.failed_at, session.failed = at, error

    def _disconnect(self, link: Link) -> None:
        """A transport that cannot is left with what it has."""
        try:
            carrier = _reached(link)
            carrier.transport.disconnect(carrier.peer)
        except Exception as exc:
            self._observer.count("disconnects.failed")
            name = _name(link.session.hello)
            self._log.say(logging.WARNING, f"{name}: it could not be disconnected: {text_of(exc)}")

    def _forget(self, link: Link) -> None:
        """Another peer may name what it has named from now on."""
        link.session.link = None
        for name in link.claims:
            del self._owners[name]
        self._under_way -= not link.linked

    def hold(self, session: PeerSession | None, frame: F, nbytes: int, then: Callable[[F], None]) -> bool:
        """Keep a frame of a peer that is linking; False: its sender is not. Raises nothing, drops beyond a bound.

        ``then`` takes it, on the thread that advances.
        """
        link = None if session is None else session.link
        if link is None or link.linked or not link.wanted:
            return False
        nbytes += FRAME_BYTES
        if self._early_bytes + nbytes <= EARLY_BYTES:
            link.frames.append(partial(then, frame))
            link.nbytes += nbytes
            self._early_bytes += nbytes
        return True

    def refuse(self, session: PeerSession, exc: DisaggKVError) -> DisaggKVError:
        """A linked peer cannot be used now: disconnect it, as if the attempt had failed with this error.

        Returns the error, with the name of the peer.
        """
        error = _failed(exc, session.hello)
        self.drop(session)
        self._fail(session, error, self._clock())
        return error

    def give_up(self, session: PeerSession) -> None:
        """The peer is lost: drop the frames that wait for its attempt, and the attempt's result when it comes."""
        link = session.link
        if link is not None and not link.linked:
            link.wanted = False
            self._take(link)

    def drop(self, session: PeerSession) -> None:
        """Nothing is awaited of this peer any more: disconnect, now or when the attempt returns."""
        self.give_up(session)
        link = session.link
        if link is not None and link.linked:
            self._disconnect(link)
            self._forget(link)

    def carried(self, by: Transport, peer: Peer | None = None) -> Sequence[Link]:
        """The links that a transport carries; with ``peer``, the one of which it speaks."""
        links = self._links() if peer is None else [link for link in [self._owners.get((by.name, peer))] if link]
        return [link for link in links if link.linked and _reached(link).transport is by]

    def linked(self) -> Sequence[Epoch]:
        """Every peer that is linked, in the order in which its attempt began."""
        return tuple(link.session.epoch for link in self._links() if link.linked)

    def close(self, until: float, then: Callable[[], None]) -> None:
        """Begin no attempt, and close the transports (``then``) once none runs.

        If an attempt still runs at ``until``, its thread closes the transports after it.
        """
        if not self._background.close(max(0.0, until - self._clock()), then):
            log.warning("a peer is still being connected; the transport of the closed endpoint closes after that")


def _reached(link: Link) -> Carrier:
    """Of a link whose attempt has succeeded."""
    assert link.carrier is not None
    return link.carrier


def _name(hello: Hello) -> str:
    """A peer and what reaches it, for messages."""
    return f"{hello.name}: transport {hello.transport!r}"


def _failed(exc: Exception, hello: Hello) -> DisaggKVError:
    """Why a peer cannot be reached. Its name comes first: a transport knows it by another one."""
    name, who = _name(hello), hello.who
    return exc.about(name, **who) if isinstance(exc, DisaggKVError) else ours(exc, name, **who)
