"""The endpoints that this one knows: the life of each, and whether it is lost. Sans IO.

An endpoint's life is its epoch. ``Hello`` is repeated towards an address until the endpoint there answers with one that
names our epoch. A frame for another life of ours, or from an unknown life, is counted and dropped. The answer is a
``Hello``, at most once a second per address.

A lost life stays lost once another life takes its address. A life that was only silent is revived by its next frame.
A life whose process has ended is never revived, even if frames of it arrive later. The ``Hello`` of a life never
changes, but for its receiver.

Any process may send a ``Hello``, so the number of peers is bounded. Lost peers make room first, then peers that have
never named our epoch: the address in their ``Hello`` is not proved.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from math import inf

from attrs import define, frozen
from msgspec import structs

from ..errors import DisaggKVError, IncompatiblePeerError, PeerLostError, RemoteProtocolError, TransportError
from ..ids import Epoch
from .base import Lost, Options
from .frames import VERSION, Frame, Heartbeat, Hello, Refused, words


@frozen
class SendTo:
    """Pass this frame to the channel; the receiver's life may not be known yet."""

    address: str
    frame: Frame


@frozen
class Up:
    """An endpoint is alive, and both sides can work together."""

    hello: Hello

    @property
    def epoch(self) -> Epoch:
        """Its life."""
        return Epoch(self.hello.src)


@frozen
class Greeted:
    """A known peer sent ``Hello`` again: it had lost us, or has received no frame from us for a while."""

    peer: Epoch


@frozen
class Unreachable:
    """No endpoint that we can work with answers at this address."""

    address: str
    error: DisaggKVError


@frozen
class Forget:
    """The address has no peer any more: drop the connection to it."""

    address: str


PeerEffect = SendTo | Up | Greeted | Lost | Unreachable | Forget


@define(eq=False)
class KnownPeer:
    """One life of a peer. ``lost`` is True, too, once the table has forgotten the life.

    Args:
        hello: its latest ``Hello``; ``last_frame_at`` is the time of its last frame.
        proved: it has named our epoch.
        closed: when the connection to its address broke; None: it is not broken.
        greeted: when it last sent ``Hello`` although it knew us.
        greet_until: it was lost, and gets ``Hello`` in place of heartbeats until this time.
        shut: a transport does not connect the two sides. Until this time frames of the peer are answered with
            ``Refused`` and do not revive it.
        shut_for: the reason of ``shut``.
        lost: it is silent, was reported lost, or is not in the table any more.
        ended: its process has ended: observed, or confirmed by an operator.
    """

    hello: Hello
    last_frame_at: float
    proved: bool
    closed: float | None = None
    greeted: float = -inf
    greet_until: float = -inf
    shut: float = -inf
    shut_for: DisaggKVError | None = None
    lost: bool = False
    ended: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        return self.hello.name


FORGET_AFTER = 20
"""A lost peer is forgotten after this multiple of ``silence_s``; after ``silence_s`` if its connection is broken."""


GREETINGS = 4
"""About this many heartbeats to a revived peer are replaced by ``Hello``: a single one might be lost."""

LINK = "link"
"""The ``field`` of a ``Refused`` whose receiver is compatible, but not connected by a transport."""

ROUNDING_S = 1e-6
"""Seconds by which a tick checks early: a sum of times is rounded differently from a difference."""


@define
class _Dial:
    """An address where no endpoint has answered yet.

    Args:
        since: when the dial began.
        wanted_at: when it failed, or was asked for after that.
        next_at, pause: when ``Hello`` is repeated, and the seconds since the last one.
        patience_s: seconds after which it fails.
        closed: when the connection broke, or could not be made; None: it is not broken.
        opened: there has been a connection.
        again: a peer was lost there.
        failed: why it failed; empty: it has not. It goes on for a while, so that an endpoint that starts is found.
    """

    since: float
    wanted_at: float
    next_at: float
    pause: float
    patience_s: float
    closed: float | None = None
    opened: bool = False
    again: bool = False
    failed: str = ""

    def grace_s(self, options: Options) -> float:
        """How long a connection may be broken: an endpoint may be starting, unless a peer was lost there."""
        return 0.0 if self.again else options.closed_s


class PeerTable:
    """All peers, and the addresses that are being dialled.

    Args:
        epoch: our life.
        address: our channel's address.
        hello: makes our ``Hello`` towards a life (empty: not known).
        admit: raises IncompatiblePeerError or RemoteProtocolError if we cannot work with the sender of a ``Hello``.
        options: times.
    """

    MAX_RETIRED = 4096
    MAX_REFUSED = 64
    """Refused endpoints whose connections are kept, so that the answer arrives."""

    def __init__(
        self,
        epoch: Epoch,
        address: str,
        hello: Callable[[bytes], Hello],
        admit: Callable[[Hello], None],
        options: Options,
    ) -> None:
        self._epoch = epoch
        self._address = address
        self._hello = hello
        self._admit = admit
        self._options = options
        self._peers: dict[Epoch, KnownPeer] = {}
        self._at: dict[str, Epoch] = {}
        self._dials: dict[str, _Dial] = {}
        self._retired: OrderedDict[Epoch, None] = OrderedDict()
        self._answered: OrderedDict[str, float] = OrderedDict()
        self._absent: OrderedDict[str, None] = OrderedDict()
        self._refused: OrderedDict[str, None] = OrderedDict()
        self._beat_at = 0.0
        self._idle_until = 0.0
        """A tick has nothing to do before this time; 0: a peer has changed since it was computed."""
        self._caught_up = inf
        self.dropped = 0

    def caught_up(self, at: float) -> None:
        """Every frame that arrived before this time is processed: silence is measured up to this time only."""
        self._caught_up = at

    def dial(self, address: str, now: float) -> list[PeerEffect]:
        """Send ``Hello`` to an address until an endpoint answers; does nothing if a peer is known there, or is dialled.

        If a peer was lost there, or an earlier dial failed, this dial fails after ``closed_s`` in place of
        ``silence_s`` where that is shorter: an endpoint that has started meanwhile answers at once. It fails as soon as
        no connection can be made. A dial that has failed goes on for ``silence_s``, and as long after each further
        call, which fails at once.
        """
        if self.at(address) is not None:
            return []
        dial, o = self._dials.get(address), self._options
        if dial is not None:
            dial.wanted_at = now
            if not dial.failed:
                return []
            still = f"{dial.failed}; still so {now - dial.since:.1f} s after the first attempt"
            return [Unreachable(address, PeerLostError(still, address=address))]
        there = self._at.get(address)
        again = there is not None or address in self._absent
        patience_s = min(o.closed_s, o.silence_s) if again else o.silence_s
        self._dials[address] = _Dial(now, now, now + o.retry_s, o.retry_s, patience_s, again=again)
        self._idle_until = 0.0
        hello = SendTo(address, self._hello(b""))
        if there is not None and self._peers[there].closed is not None:
            return [Forget(address), hello]  # a fresh connection shows at once whether a process listens there
        return [hello]

    @property
    def addresses(self) -> Mapping[str, Epoch]:
        """The last life at each address, lost or not; read only."""
        return self._at

    def at(self, address: str) -> Epoch | None:
        """The life at an address, unless it is lost."""
        epoch = self._at.get(address)
        return None if epoch is None or self._peers[epoch].lost else epoch

    def hello(self, epoch: Epoch) -> Hello:
        """The latest ``Hello`` of a peer."""
        return self._peers[epoch].hello

    def known(self, epoch: Epoch) -> KnownPeer | None:
        """The entry of a life; None: it is unknown or forgotten. From any thread."""
        return self._peers.get(epoch)

    def address(self, epoch: Epoch) -> str | None:
        """The address of a life, lost or not; None: it is unknown."""
        peer = self._peers.get(epoch)
        return None if peer is None else peer.hello.address

    def lively(self, epoch: Epoch, now: float) -> bool:
        """False: the peer has missed heartbeats and should get nothing new."""
        peer = self._peers.get(epoch)
        return (
            peer is not None
            and not peer.lost
            and now - peer.last_frame_at <= self._options.missed * self._options.heartbeat_s
        )

    def silent_for(self, epoch: Epoch, now: float) -> float:
        """Seconds from the peer's last frame to now, or to :meth:`caught_up` if earlier; infinite if it is unknown."""
        peer = self._peers.get(epoch)
        return inf if peer is None else max(0.0, min(now, self._caught_up) - peer.last_frame_at)

    def epochs(self) -> tuple[Epoch, ...]:
        """Every life that is not lost, in the order of their first ``Hello``."""
        return tuple(e for e, p in self._peers.items() if not p.lost)

    def on_hello(self, hello: Hello, now: float) -> list[PeerEffect]:
        """Admit, refresh, revive or refuse the sender of a ``Hello``."""
        epoch = Epoch(hello.src)
        self._idle_until = 0.0
        if epoch == self._epoch or epoch in self._retired:
            self.dropped += 1
            return []
        known = self._peers.get(epoch)
        if known is not None and known.ended:
            self.dropped += 1
            return []
        # A repetition of an admitted Hello need not be checked again; every field but its receiver is compared.
        if known is None or structs.replace(known.hello, dst=hello.dst) != hello:
            try:
                if hello.version != VERSION:
                    raise IncompatiblePeerError("version", VERSION, hello.version)
                self._admit(hello)
            except IncompatiblePeerError as exc:
                return self._refuse(hello, exc, now)
            except RemoteProtocolError as exc:
                return self._refuse(hello, IncompatiblePeerError("hello", "valid", str(exc)), now)
            # A life never changes.
            if known is not None or self._stale(hello):
                self.dropped += 1
                return []
        if known is not None and now < known.shut:
            self._dials.pop(hello.address, None)
            return self._tell_shut(known, now)
        out: list[PeerEffect] = []
        if known is None:
            out += self._replace(hello.address, epoch)
            if not self._make_room(out):
                return out + self._refuse(hello, IncompatiblePeerError("peers", f"at most {len(self._peers)}", 1), now)
            peer = self._peers[epoch] = KnownPeer(hello, now, hello.dst == self._epoch)
            if peer.proved and hello.address not in self._dials:
                # It knew us, and we had forgotten it: it may wait for rooms that we gave up when we lost it.
                peer.greet_until = now + GREETINGS * self._options.heartbeat_s
            self._at[hello.address] = epoch
            self._absent.pop(hello.address, None)
            out.append(Up(hello))
        else:
            known.hello, known.last_frame_at = hello, now
            if known.lost:
                out += self._revive(known, now)
            elif known.proved and now - known.greeted >= self._options.closed_s:
                # Not at the end of the handshake, and not each time: a Greeted makes work for a peer that is behind.
                known.greeted = now
                out.append(Greeted(epoch))
            known.proved |= hello.dst == self._epoch
        if hello.dst == self._epoch:
            self._dials.pop(hello.address, None)
        else:
            out.append(SendTo(hello.address, self._hello(hello.src)))
        return out

    def _revive(self, peer: KnownPeer, now: float) -> list[PeerEffect]:
        """A lost life has sent a frame. It gets ``Hello``, as it may wait for rooms that we gave up when we lost it."""
        peer.lost, peer.closed = False, None
        peer.greet_until = now + GREETINGS * self._options.heartbeat_s
        self._idle_until = 0.0
        return [Up(peer.hello)]

    def _stale(self, hello: Hello) -> bool:
        """Whether a younger life has the address: an older one takes it only if the process of that life has ended."""
        epoch = self._at.get(hello.address)
        if epoch is None:
            return False
        there = self._peers[epoch]
        return not there.ended and is_older(hello, there.hello)

    def _replace(self, address: str, epoch: Epoch) -> list[PeerEffect]:
        """A new life at a known address retires the old one. This does not prove that the old process has ended."""
        old = self._at.get(address)
        if old is None or old == epoch:
            return []
        was_lost = self._peers[old].lost
        peer = self._drop(old, retire=True)
        if was_lost:
            return []
        return [Lost(old, PeerLostError(f"{peer.name}: another life has taken its address", **peer.hello.who))]

    def _drop(self, epoch: Epoch, *, retire: bool) -> KnownPeer:
        """Forget a life. A retired life never returns, and neither does one whose process has ended."""
        peer = self._peers.pop(epoch)
        peer.lost = True
        if retire or peer.ended:
            self._retired[epoch] = None
            while len(self._retired) > self.MAX_RETIRED:
                self._retired.popitem(last=False)
        return peer

    def _make_room(self, out: list[PeerEffect]) -> bool:
        """Make room for a peer: forget a lost one, else an unproved one, with the oldest last frame; False: none."""
        if len(self._peers) < self._options.peers:
            return True
        spare = [(not p.lost, p.last_frame_at, e) for e, p in self._peers.items() if p.lost or not p.proved]
        if not spare:
            return False
        there, _, epoch = min(spare)
        peer = self._drop(epoch, retire=False)
        address = peer.hello.address
        if self._at.get(address) == epoch:
            del self._at[address]
        if there:
            out.append(Lost(epoch, PeerLostError(f"{peer.name}: it made room for another", **peer.hello.who)))
        out.append(Forget(address))
        return True

    def _refuse(self, hello: Hello, exc: IncompatiblePeerError, now: float) -> list[PeerEffect]:
        self.dropped += 1
        refused = Refused(
            src=self._epoch,
            dst=hello.src,
            address=self._address,
            field=words(exc.field),
            ours=words(exc.theirs),
            theirs=words(exc.ours),
        )
        out: list[PeerEffect] = []
        if self._may_answer(hello.address, now):
            out += [SendTo(hello.address, refused), *self._forget_refused(hello.address)]
        if self._dials.pop(hello.address, None) is not None:
            out.append(Unreachable(hello.address, exc.about(hello.name, **hello.who)))
        return out

    def _forget_refused(self, address: str) -> list[PeerEffect]:
        """Bound the connections to refused endpoints: every answer opens one, and they may change their addresses."""
        self._refused[address] = None
        self._refused.move_to_end(address)
        if len(self._refused) <= self.MAX_REFUSED:
            return []
        oldest, _ = self._refused.popitem(last=False)
        return [] if oldest in self._at or oldest in self._dials else [Forget(oldest)]

    def on_refused(self, refused: Refused, now: float) -> list[PeerEffect]:
        """A peer cannot work with us, or its transport no longer reaches us. Its own ``Hello`` may show it before."""
        if refused.dst != self._epoch:
            self.dropped += 1
            return []
        error: DisaggKVError = IncompatiblePeerError(refused.field, refused.ours, refused.theirs)
        error = error.about(f"peer at {refused.address}", address=refused.address, epoch=refused.src)
        out: list[PeerEffect] = []
        if refused.field == LINK:
            reason = f"the transport of the peer at {refused.address} does not reach us: {refused.theirs}"
            error = TransportError(reason, address=refused.address, epoch=refused.src)
            if self._at.get(refused.address) == refused.src:
                out += self.lose(Epoch(refused.src), error)
        if self._dials.pop(refused.address, None) is not None:
            out.append(Unreachable(refused.address, error))
        return out

    def on_frame(self, frame: Frame, now: float) -> tuple[bool, list[PeerEffect]]:
        """Accept any other frame if it is from a known life to this life of ours; True: it is accepted."""
        epoch = Epoch(frame.src)
        peer = self._peers.get(epoch)
        if peer is None or peer.ended or frame.dst != self._epoch:
            self.dropped += 1
            if peer is not None and not peer.ended and self._may_answer(peer.hello.address, now):
                return False, [SendTo(peer.hello.address, self._hello(frame.src))]
            return False, []
        if now < peer.shut:
            # Its frames about rooms count: it may give up some of them. But it stays lost for new rooms.
            return True, self._tell_shut(peer, now)
        peer.last_frame_at, peer.proved = now, True
        return True, self._revive(peer, now) if peer.lost else []

    def shut(self, epoch: Epoch, error: DisaggKVError, now: float) -> list[PeerEffect]:
        """The transport does not reach a life whose frames arrive: it is lost for ``closed_s`` and gets the reason."""
        peer = self._peers.get(epoch)
        if peer is None:
            return []
        peer.shut, peer.shut_for = now + self._options.closed_s, error
        return [*self._tell_shut(peer, now), *self.lose(epoch, error)]

    def _tell_shut(self, peer: KnownPeer, now: float) -> list[PeerEffect]:
        """Send the reason as a ``Refused``, at most once a second."""
        hello = peer.hello
        if not self._may_answer(hello.address, now):
            return []
        why = words(peer.shut_for)
        refused = Refused(src=self._epoch, dst=hello.src, address=self._address, field=LINK, ours="", theirs=why)
        return [SendTo(hello.address, refused)]

    def _may_answer(self, address: str, now: float) -> bool:
        """Whether to answer an address: at most one unsolicited ``Hello`` or ``Refused`` a second."""
        if now - self._answered.get(address, -1.0) < 1.0:
            return False
        self._answered[address] = now
        self._answered.move_to_end(address)
        while len(self._answered) > self.MAX_RETIRED:
            self._answered.popitem(last=False)
        return True

    def on_closed(self, address: str, now: float) -> None:
        """The connection to an address broke, or could not be made."""
        self._idle_until = 0.0
        epoch = self._at.get(address)
        for one in (self._dials.get(address), None if epoch is None else self._peers[epoch]):
            if one is not None and one.closed is None:
                one.closed = now

    def on_denied(self, address: str) -> list[PeerEffect]:
        """One side does not allow the other, so the address gets no frames. A peer known there becomes silent."""
        if self._dials.pop(address, None) is None:
            return []
        reason = f"{address}: one of the two sides does not allow the other's public key or user"
        return [Unreachable(address, PeerLostError(reason, address=address))]

    def on_opened(self, address: str) -> None:
        """The connection to an address is open again."""
        epoch = self._at.get(address)
        for one in (self._dials.get(address), None if epoch is None else self._peers[epoch]):
            if one is not None:
                one.closed = None
        if (dial := self._dials.get(address)) is not None:
            dial.opened = True

    def lose(self, epoch: Epoch, error: DisaggKVError, *, ended: bool = False) -> list[PeerEffect]:
        """A transport reports the life lost, or (``ended``) its exit was observed: then nothing revives it."""
        peer = self._peers.get(epoch)
        if peer is None:
            return []
        peer.ended |= ended
        if peer.lost:
            return []
        peer.lost = True
        self._idle_until = 0.0
        return [Lost(epoch, error)]

    def tick(self, now: float) -> list[PeerEffect]:
        """Repeat dials, send heartbeats, and report the peers that are lost."""
        if now < self._idle_until:
            return []
        o = self._options
        out: list[PeerEffect] = []
        seen = min(now, self._caught_up)
        for address, dial in list(self._dials.items()):
            if not dial.failed and (reason := self._overdue(address, dial, seen, now)):
                dial.failed, dial.wanted_at = reason, now
                out.append(Unreachable(address, PeerLostError(reason, address=address)))
            elif dial.failed and now - dial.wanted_at >= o.silence_s:
                out += self._give_up(address)
            elif now >= dial.next_at:
                dial.pause = min(2 * dial.pause, o.heartbeat_s if dial.failed else o.retry_most_s)
                dial.next_at = now + dial.pause
                out.append(SendTo(address, self._hello(b"")))
        beat = now >= self._beat_at
        if beat:
            self._beat_at = now + o.heartbeat_s
        for epoch, peer in list(self._peers.items()):
            if peer.lost:
                if now - peer.last_frame_at >= o.silence_s * (FORGET_AFTER if peer.closed is None else 1):
                    self._drop(epoch, retire=False)
                    del self._at[peer.hello.address]
                    self._note_absent(peer.hello.address)
                    out.append(Forget(peer.hello.address))
                elif beat and not peer.proved and not peer.ended:
                    # It may not know us; then it cannot answer the requests of rooms that end.
                    out.append(SendTo(peer.hello.address, self._hello(epoch)))
                continue
            if seen - peer.last_frame_at >= o.silence_s:
                peer.lost = True
                silent = f"{peer.name}: silent for {seen - peer.last_frame_at:.1f} s"
                out.append(Lost(epoch, PeerLostError(silent, **peer.hello.who)))
            elif peer.closed is not None and seen - peer.closed >= o.closed_s:
                peer.lost = True
                broke = f"{peer.name}: its connection broke {now - peer.closed:.1f} s ago"
                out.append(Lost(epoch, PeerLostError(broke, **peer.hello.who)))
            elif beat and self.lively(epoch, now) and now >= peer.greet_until:
                out.append(SendTo(peer.hello.address, Heartbeat(src=self._epoch, dst=epoch)))
            elif beat:
                # Or another life has taken the address: it does not know us, and can answer only a Hello.
                out.append(SendTo(peer.hello.address, self._hello(epoch)))
        self._idle_until = self._due_at()
        return out

    def _overdue(self, address: str, dial: _Dial, seen: float, now: float) -> str:
        """Why a dial fails; empty: it does not yet."""
        if seen - dial.since >= dial.patience_s:
            return f"no answer from {address} within {dial.patience_s:g} s"
        if dial.closed is None or seen - dial.closed < dial.grace_s(self._options):
            return ""
        for_s = f"{now - dial.closed:.1f} s"
        if dial.opened:
            return f"peer at {address}: its connection broke {for_s} ago, before it said who it is"
        return f"peer at {address}: no process listens there, for {for_s}"

    def _due_at(self) -> float:
        """When a tick may have something to do; a frame that arrives before only postpones it."""
        o = self._options
        times = [self._beat_at]
        for dial in self._dials.values():
            times += [dial.next_at, dial.wanted_at + o.silence_s if dial.failed else dial.since + dial.patience_s]
            if dial.closed is not None and not dial.failed:
                times.append(dial.closed + dial.grace_s(o))
        for peer in self._peers.values():
            if peer.lost:
                times.append(peer.last_frame_at + o.silence_s * (FORGET_AFTER if peer.closed is None else 1))
                continue
            times.append(peer.last_frame_at + o.silence_s)
            if peer.closed is not None:
                times.append(peer.closed + o.closed_s)
        return min(times) - ROUNDING_S

    def _give_up(self, address: str) -> list[PeerEffect]:
        """End a dial: drop the connection, unless a life is known at the address and drops it later."""
        del self._dials[address]
        self._note_absent(address)
        return [] if address in self._at else [Forget(address)]

    def _note_absent(self, address: str) -> None:
        self._absent[address] = None
        while len(self._absent) > self.MAX_RETIRED:
            self._absent.popitem(last=False)

    def next_at(self) -> float:
        """When a tick is due."""
        return min([self._beat_at, *[d.next_at for d in self._dials.values()]]) if self._dials else self._beat_at


def is_older(hello: Hello, other: Hello) -> bool:
    """Whether a life began before another; False if their hosts differ, as clocks of two hosts are not compared.

    The start of the process does not count: a younger life may belong to an older process.
    """
    return hello.host == other.host and hello.born < other.born
