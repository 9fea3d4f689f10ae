"""Which endpoints we know, in which life, and whether they are still there. Sans IO.

An endpoint's life is its epoch. ``Hello`` is repeated towards an address until the endpoint there answers with one that
names our epoch. Whatever arrives for another life of ours, or from a life we do not know, is counted, dropped and
answered with ``Hello``, at most once a second and address. A life that is lost stays lost when another life takes its
address, but one that was only silent may be heard again; one whose process has ended is not, whatever of it is still
under way. A life says the same of itself for ever.

Anybody may send a ``Hello``, so the number of peers is bounded. Who has never named our epoch has perhaps not even the
address that it gave: it is the first to make room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from math import inf

from attrs import define, frozen
from msgspec import structs

from ..errors import DisaggKVError, IncompatiblePeerError, PeerLostError, RemoteProtocolError, TransportError
from ..ids import Epoch, peer_name
from .base import Lost, Options
from .frames import VERSION, Frame, Heartbeat, Hello, Refused, words


@frozen
class SendTo:
    """Hand this frame to the channel; the receiver's life may not be known yet."""

    address: str
    frame: Frame


@frozen
class Up:
    """An endpoint is there, and both sides can work together."""

    hello: Hello

    @property
    def epoch(self) -> Epoch:
        """Its life."""
        return Epoch(self.hello.src)


@frozen
class Greeted:
    """A peer that we know introduces itself once more: it had lost us, or has not heard us for a while."""

    peer: Epoch


@frozen
class Unreachable:
    """Nobody that we can work with answers at this address."""

    address: str
    error: DisaggKVError


@frozen
class Forget:
    """Nobody has been heard at this address for so long that it is dropped."""

    address: str


PeerEffect = SendTo | Up | Greeted | Lost | Unreachable | Forget


@define(eq=False)
class KnownPeer:
    """One life. Whoever keeps this object sees it ``lost`` once the table has forgotten it.

    Args:
        hello: what it said of itself.
        heard: when it was last heard.
        proved: it has named our epoch.
        closed: when the connection to its address broke.
        greeted: when it last introduced itself although it knew us.
        greet_until: it was lost, and is greeted instead of sent heartbeats until then.
        shut: its transport does not reach us, or ours does not reach it: it is told so, and is not revived until then.
        shut_for: why.
        lost: it is silent, was reported lost, or is not in the table any more.
        ended: its process has ended: seen, or confirmed by an operator.
    """

    hello: Hello
    heard: float
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
        return f"peer {peer_name(self.hello.src, self.hello.instance, self.hello.rank)} at {self.hello.address}"


FORGET_AFTER = 20
"""A lost peer is forgotten after so many times the silence that made it lost; once, where its connection is broken."""


GREETINGS = 4
"""As many heartbeats, about, are replaced by a ``Hello`` once a lost peer is heard again: one of them may get lost."""

LINK = "link"
"""The field of a ``Refused`` which says that nothing is wrong with the receiver but that a transport does not reach."""

ROUNDING_S = 1e-6
"""So much earlier than it may be due a tick looks: a sum of times is rounded otherwise than a difference."""


@define
class _Dial:
    since: float
    next_at: float
    pause: float
    patience_s: float
    closed: float | None = None
    opened: bool = False


class PeerTable:
    """Everyone we talk to.

    Args:
        epoch: our life.
        address: our channel's address.
        hello: makes our ``Hello`` towards a life (empty: not known).
        admit: raises IncompatiblePeerError or RemoteProtocolError if we cannot work with whom a ``Hello`` is from.
        options: times.
    """

    MAX_RETIRED = 4096
    MAX_REFUSED = 64
    """Connections that are kept towards those whom we refused, so that the answer gets there."""

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
        self._quiet_until = 0.0
        """A tick has nothing to do before; 0: something happened to a peer since that was worked out."""
        self._caught_up = inf
        self.dropped = 0

    def caught_up(self, at: float) -> None:
        """Every frame that had come by then has been taken in: silence is judged up to then, and no further."""
        self._caught_up = at

    def dial(self, address: str, now: float) -> list[PeerEffect]:
        """Want to know who is at an address; harmless if we do already.

        Where a life was lost, or nobody answered before, whoever asks again is told soon that there is still nobody:
        one that has come meanwhile answers at once.
        """
        if address in self._dials or self.at(address) is not None:
            return []
        o = self._options
        patience_s = min(o.closed_s, o.silence_s) if address in self._at or address in self._absent else o.silence_s
        self._dials[address] = _Dial(now, now + o.retry_s, o.retry_s, patience_s)
        self._quiet_until = 0.0
        return [SendTo(address, self._hello(b""))]

    @property
    def addresses(self) -> Mapping[str, Epoch]:
        """The last life at each address, lost or not; read only."""
        return self._at

    def at(self, address: str) -> Epoch | None:
        """The life at an address, unless it is lost."""
        epoch = self._at.get(address)
        return None if epoch is None or self._peers[epoch].lost else epoch

    def hello(self, epoch: Epoch) -> Hello:
        """What a peer said of itself."""
        return self._peers[epoch].hello

    def known(self, epoch: Epoch) -> KnownPeer | None:
        """What is known of a life; None: nothing, or it was forgotten. From any thread."""
        return self._peers.get(epoch)

    def address(self, epoch: Epoch) -> str | None:
        """Where a life is or was; None: never heard of it."""
        peer = self._peers.get(epoch)
        return None if peer is None else peer.hello.address

    def lively(self, epoch: Epoch, now: float) -> bool:
        """False: the peer has missed heartbeats and should get nothing new."""
        peer = self._peers.get(epoch)
        return (
            peer is not None and not peer.lost and now - peer.heard <= self._options.missed * self._options.heartbeat_s
        )

    def silent_for(self, epoch: Epoch, now: float) -> float:
        """Seconds since the peer was last heard, without those whose frames still wait; infinite if it never was."""
        peer = self._peers.get(epoch)
        return inf if peer is None else max(0.0, min(now, self._caught_up) - peer.heard)

    def epochs(self) -> tuple[Epoch, ...]:
        """Every life that is not lost, in the order in which we first heard of them."""
        return tuple(e for e, p in self._peers.items() if not p.lost)

    def on_hello(self, hello: Hello, now: float) -> list[PeerEffect]:
        """Somebody introduces itself."""
        epoch = Epoch(hello.src)
        self._quiet_until = 0.0
        if epoch == self._epoch or epoch in self._retired:
            self.dropped += 1
            return []
        known = self._peers.get(epoch)
        if known is not None and known.ended:
            self.dropped += 1
            return []
        # Whoever repeats what was admitted need not be looked at again; all of it is compared, but for whom it is to.
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
                # It knew us, and we had forgotten it: it may wait for what we gave up when we lost it.
                peer.greet_until = now + GREETINGS * self._options.heartbeat_s
            self._at[hello.address] = epoch
            self._absent.pop(hello.address, None)
            out.append(Up(hello))
        else:
            known.hello, known.heard = hello, now
            if known.lost:
                out += self._revive(known, now)
            elif known.proved and now - known.greeted >= self._options.closed_s:
                # Not the end of the introduction, and not each time: what follows from it costs a peer that is behind.
                known.greeted = now
                out.append(Greeted(epoch))
            known.proved |= hello.dst == self._epoch
        if hello.dst == self._epoch:
            self._dials.pop(hello.address, None)
        else:
            out.append(SendTo(hello.address, self._hello(hello.src)))
        return out

    def _revive(self, peer: KnownPeer, now: float) -> list[PeerEffect]:
        """A life that was lost is heard again. It is greeted: it may wait for what we gave up when we lost it."""
        peer.lost, peer.closed = False, None
        peer.greet_until = now + GREETINGS * self._options.heartbeat_s
        self._quiet_until = 0.0
        return [Up(peer.hello)]

    def _stale(self, hello: Hello) -> bool:
        """An older life does not take the address back from one that is there, or was lost and may be heard again."""
        epoch = self._at.get(hello.address)
        if epoch is None:
            return False
        there = self._peers[epoch]
        return not there.ended and is_older(hello, there.hello)

    def _replace(self, address: str, epoch: Epoch) -> list[PeerEffect]:
        """A new life at a known address retires the old one; that is no evidence that its process has ended."""
        old = self._at.get(address)
        if old is None or old == epoch:
            return []
        was_lost = self._peers[old].lost
        peer = self._drop(old, retire=True)
        if was_lost:
            return []
        return [Lost(old, PeerLostError(f"{peer.name}: another life has taken its address"))]

    def _drop(self, epoch: Epoch, *, retire: bool) -> KnownPeer:
        """Forget a life; one that is retired never returns, and neither does one whose process has ended."""
        peer = self._peers.pop(epoch)
        peer.lost = True
        if retire or peer.ended:
            self._retired[epoch] = None
            while len(self._retired) > self.MAX_RETIRED:
                self._retired.popitem(last=False)
        return peer

    def _make_room(self, out: list[PeerEffect]) -> bool:
        """See to it that one more peer may be known: forget who was lost first, or proved nothing for longest."""
        if len(self._peers) < self._options.peers:
            return True
        spare = [(not p.lost, p.heard, e) for e, p in self._peers.items() if p.lost or not p.proved]
        if not spare:
            return False
        there, _, epoch = min(spare)
        peer = self._drop(epoch, retire=False)
        address = peer.hello.address
        if self._at.get(address) == epoch:
            del self._at[address]
        if there:
            out.append(Lost(epoch, PeerLostError(f"{peer.name}: it made room for another")))
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
            out.append(Unreachable(hello.address, exc))
        return out

    def _forget_refused(self, address: str) -> list[PeerEffect]:
        """Every answer opens a connection, and who is refused may come again and again from other addresses."""
        self._refused[address] = None
        self._refused.move_to_end(address)
        if len(self._refused) <= self.MAX_REFUSED:
            return []
        oldest, _ = self._refused.popitem(last=False)
        return [] if oldest in self._at or oldest in self._dials else [Forget(oldest)]

    def on_refused(self, refused: Refused, now: float) -> list[PeerEffect]:
        """A peer cannot work with us, or does not reach us any more. Its own ``Hello`` may say so before."""
        if refused.dst != self._epoch:
            self.dropped += 1
            return []
        error: DisaggKVError = IncompatiblePeerError(refused.field, refused.ours, refused.theirs)
        out: list[PeerEffect] = []
        if refused.field == LINK:
            error = TransportError(
                f"the transport of the peer at {refused.address} does not reach us: {refused.theirs}"
            )
            if self._at.get(refused.address) == refused.src:
                out += self.lose(Epoch(refused.src), error)
        if self._dials.pop(refused.address, None) is not None:
            out.append(Unreachable(refused.address, error))
        return out

    def on_frame(self, frame: Frame, now: float) -> tuple[bool, list[PeerEffect]]:
        """Any other frame: is it from a life we know, to this life of ours?"""
        epoch = Epoch(frame.src)
        peer = self._peers.get(epoch)
        if peer is None or peer.ended or frame.dst != self._epoch:
            self.dropped += 1
            if peer is not None and not peer.ended and self._may_answer(peer.hello.address, now):
                return False, [SendTo(peer.hello.address, self._hello(frame.src))]
            return False, []
        if now < peer.shut:
            # What it says of rooms counts: it may give up some of them. But it is not there for new ones.
            return True, self._tell_shut(peer, now)
        peer.heard, peer.proved = now, True
        return True, self._revive(peer, now) if peer.lost else []

    def shut(self, epoch: Epoch, error: DisaggKVError, now: float) -> list[PeerEffect]:
        """The transport does not reach a life, whose frames do: it is lost, and told why, until a little later."""
        peer = self._peers.get(epoch)
        if peer is None:
            return []
        peer.shut, peer.shut_for = now + self._options.closed_s, error
        return [*self._tell_shut(peer, now), *self.lose(epoch, error)]

    def _tell_shut(self, peer: KnownPeer, now: float) -> list[PeerEffect]:
        """At most once a second."""
        hello = peer.hello
        if not self._may_answer(hello.address, now):
            return []
        why = words(peer.shut_for)
        refused = Refused(src=self._epoch, dst=hello.src, address=self._address, field=LINK, ours="", theirs=why)
        return [SendTo(hello.address, refused)]

    def _may_answer(self, address: str, now: float) -> bool:
        """At most one unasked ``Hello`` or ``Refused`` a second and address."""
        if now - self._answered.get(address, -1.0) < 1.0:
            return False
        self._answered[address] = now
        self._answered.move_to_end(address)
        while len(self._answered) > self.MAX_RETIRED:
            self._answered.popitem(last=False)
        return True

    def on_closed(self, address: str, now: float) -> None:
        """The connection towards an address broke, or there was none to be had."""
        self._quiet_until = 0.0
        epoch = self._at.get(address)
        for one in (self._dials.get(address), None if epoch is None else self._peers[epoch]):
            if one is not None and one.closed is None:
                one.closed = now

    def on_denied(self, address: str) -> list[PeerEffect]:
        """Nothing can be sent there: one side does not allow the other. Whoever is known there falls silent."""
        if self._dials.pop(address, None) is None:
            return []
        error = PeerLostError(f"{address}: one of the two sides does not allow the other's public key or user")
        return [Unreachable(address, error)]

    def on_opened(self, address: str) -> None:
        """It is back."""
        epoch = self._at.get(address)
        for one in (self._dials.get(address), None if epoch is None else self._peers[epoch]):
            if one is not None:
                one.closed = None
        if (dial := self._dials.get(address)) is not None:
            dial.opened = True

    def lose(self, epoch: Epoch, error: DisaggKVError, *, ended: bool = False) -> list[PeerEffect]:
        """A transport's report, or (``ended``) an observed exit: then nothing revives this life."""
        peer = self._peers.get(epoch)
        if peer is None:
            return []
        peer.ended |= ended
        if peer.lost:
            return []
        peer.lost = True
        self._quiet_until = 0.0
        return [Lost(epoch, error)]

    def tick(self, now: float) -> list[PeerEffect]:
        """Dial again, beat, and notice who is silent."""
        if now < self._quiet_until:
            return []
        o = self._options
        out: list[PeerEffect] = []
        seen = min(now, self._caught_up)
        for address, dial in list(self._dials.items()):
            if seen - dial.since >= dial.patience_s:
                out += self._give_up(address)
                error = PeerLostError(f"nobody answered at {address} within {dial.patience_s:g} s")
                out.append(Unreachable(address, error))
            elif dial.closed is not None and seen - dial.closed >= o.closed_s:
                out += self._give_up(address)
                for_s = f"{now - dial.closed:.1f} s"
                broke = f"its connection broke {for_s} ago, before it said who it is"
                gone = broke if dial.opened else f"nobody listens there, for {for_s}"
                out.append(Unreachable(address, PeerLostError(f"peer at {address}: {gone}")))
            elif now >= dial.next_at:
                dial.pause = min(2 * dial.pause, o.retry_most_s)
                dial.next_at = now + dial.pause
                out.append(SendTo(address, self._hello(b"")))
        beat = now >= self._beat_at
        if beat:
            self._beat_at = now + o.heartbeat_s
        for epoch, peer in list(self._peers.items()):
            if peer.lost:
                if now - peer.heard >= o.silence_s * (FORGET_AFTER if peer.closed is None else 1):
                    self._drop(epoch, retire=False)
                    del self._at[peer.hello.address]
                    self._note_absent(peer.hello.address)
                    out.append(Forget(peer.hello.address))
                elif beat and not peer.proved and not peer.ended:
                    # It may never have heard of us; then it cannot answer what rooms that end still ask of it.
                    out.append(SendTo(peer.hello.address, self._hello(epoch)))
                continue
            if seen - peer.heard >= o.silence_s:
                peer.lost = True
                out.append(Lost(epoch, PeerLostError(f"{peer.name}: silent for {seen - peer.heard:.1f} s")))
            elif peer.closed is not None and seen - peer.closed >= o.closed_s:
                peer.lost = True
                error = PeerLostError(f"{peer.name}: its connection broke {now - peer.closed:.1f} s ago")
                out.append(Lost(epoch, error))
            elif beat and self.lively(epoch, now) and now >= peer.greet_until:
                out.append(SendTo(peer.hello.address, Heartbeat(src=self._epoch, dst=epoch)))
            elif beat:
                # Or another life has taken the address: it does not know us, and can answer only a Hello.
                out.append(SendTo(peer.hello.address, self._hello(epoch)))
        self._quiet_until = self._due_at()
        return out

    def _due_at(self) -> float:
        """When a tick may have something to do; whoever is heard until then only puts that off."""
        o = self._options
        times = [self._beat_at]
        for dial in self._dials.values():
            times += [dial.next_at, dial.since + dial.patience_s]
            if dial.closed is not None:
                times.append(dial.closed + o.closed_s)
        for peer in self._peers.values():
            if peer.lost:
                times.append(peer.heard + o.silence_s * (FORGET_AFTER if peer.closed is None else 1))
                continue
            times.append(peer.heard + o.silence_s)
            if peer.closed is not None:
                times.append(peer.closed + o.closed_s)
        return min(times) - ROUNDING_S

    def _give_up(self, address: str) -> list[PeerEffect]:
        """Nobody is there: without a life that was, nothing else would ever drop the connection."""
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
    """Whether a life began before another, as far as can be told: clocks of several hosts are not compared.

    When their processes began says nothing of it: a process that was there already may follow one that has ended.
    """
    return hello.host == other.host and hello.born < other.born
