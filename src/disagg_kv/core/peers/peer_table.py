"""The endpoints that this one knows: each incarnation of them, and whether it is lost. Sans IO.

An incarnation is named by its epoch. ``Hello`` is repeated towards an address until the endpoint there answers with one
that names our epoch. A frame for another incarnation of ours, or from an unknown one, is counted and dropped. The
answer is a ``Hello``, at most once a second per address.

What a frame, or a loss, does to an incarnation depends on its state: see :mod:`.tables`. The ``Hello`` of an
incarnation never changes, but for its receiver.

**Heartbeats.** A peer is *in use* while a room here depends on it (:meth:`PeerTable.use`). Only the silence of such a
peer matters, so only it is measured, from the peer's last frame or from the beginning of the use. A peer in use that
sent nothing for ``heartbeat_s`` gets a ``Heartbeat`` that asks for another one, which it answers at once. So each side
decides alone, a frame of any kind saves a heartbeat, and two peers without a room exchange nothing. They keep their
connection, and notice that it breaks. SWIM (Das, Gupta and Motivala, 2002) asks its members for answers, too.

**Cost.** What is due lies in a heap. A frame only notes its time: a time in the heap that has become too early is
corrected when it comes. So a tick costs nothing for a peer that is not in use.

**Links.** Above the budget of links, a peer that no room uses is forgotten. A frame counts as a use: a peer that has a
room asks for heartbeats. The peer gets ``Disconnected``, and forgets this endpoint too unless a room there uses it. If
that frame was lost, or crosses the first frame of a room, the ``Hello`` that answers the latter makes the peer repeat
it.

Which incarnations are known is in :mod:`.known_peers`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from msgspec import structs

from ...errors import (
    CapacityError,
    ConfigurationError,
    DisaggKVError,
    IncompatiblePeerError,
    PeerLostError,
    RemoteProtocolError,
    lasting,
)
from ...ids import Epoch
from ..base import Lost, Options
from ..wire.frames import VERSION, Disconnected, Frame, Heartbeat, Hello, Refused, RoomFrame, words
from .dials import RECHECK_S, ROUNDING_S, Dials
from .known_peers import NEVER, KnownPeers, LinkBudget, P
from .peer_effects import Forget, Greeted, PeerEffect, SendTo, Unreachable, Up
from .refusals import ENDINGS, LINK, LINKS, Answers, Refusals, RefusedIncarnation, error_of, refusal
from .tables import KNOWN, Ended, Known, Replaced, Shut

GREETINGS = 4
"""About this many heartbeats to a revived peer come with a ``Hello``: a single one might be lost."""


class PeerTable(KnownPeers[P]):
    """All peers, and the addresses that are being dialled.

    Args:
        epoch: our incarnation.
        address: our channel's address.
        hello: makes our ``Hello`` towards an incarnation (empty: not known).
        admit: raises IncompatiblePeerError or RemoteProtocolError if we cannot work with the sender of a ``Hello``.
        meet: makes the entry of an incarnation from its first ``Hello``, the time, and whether it has named our epoch.
        options: times, and how many peers there may be.
        budget: of links.
    """

    def __init__(
        self,
        epoch: Epoch,
        address: str,
        hello: Callable[[bytes], Hello],
        admit: Callable[[Hello], None],
        meet: Callable[[Hello, float, bool], P],
        options: Options,
        budget: LinkBudget = LinkBudget(),  # noqa: B008 - it is frozen
    ) -> None:
        super().__init__(options, budget)
        self._epoch = epoch
        self._address = address
        self._hello = hello
        self._admit = admit
        self._new = meet
        self._limit = min(budget.limit, options.peers)
        self._dials = Dials(options, lambda: hello(b""))
        self._answers_to = Answers(self.MAX_FORGOTTEN)
        self._refusals = Refusals()
        self.displaced = 0

    def use(self, epoch: Epoch, now: float) -> P | None:
        """A room depends on an incarnation: its silence counts from now on. None: it is not known.

        Each call that returns a peer needs a :meth:`release`.
        """
        peer = self._peers.get(epoch)
        if peer is not None:
            peer.users += 1
            if peer.users == 1:
                self._idle.remove(peer)
                peer.used_since = now
                self._schedule(peer)
        return peer

    def release(self, peer: P) -> None:
        """A room that used an incarnation has ended."""
        peer.users -= 1
        if not peer.users:
            peer.used_since = None
            if not peer.replaced:
                self._idle.put(peer, self._now)
            self._schedule(peer)

    def dial(self, address: str, now: float) -> list[PeerEffect]:
        """Send ``Hello`` to an address until an endpoint answers; does nothing if a peer is known there.

        See :meth:`.dials.Dials.begin`.
        """
        if self.at(address) is not None:
            return []
        if (refused := self._refusals.still(address, now)) is not None:
            return [Unreachable(address, refused)]
        there, new = self._at.get(address), address not in self._dials
        effects = self._dials.begin(address, now, lost=there is not None)
        if new and there is not None and there.closed is not None:
            return [Forget(address), *effects]  # a fresh connection shows at once whether a process listens there
        return effects

    def address(self, epoch: Epoch) -> str | None:
        """The address of an incarnation, lost, refused or not; None: it is unknown, or another one has its address."""
        peer = self._peers.get(epoch)
        if peer is not None:
            return None if peer.replaced else peer.hello.address
        refused = self._refusals.get(epoch)
        return None if refused is None else refused.address

    def refused(self, epoch: Epoch) -> RefusedIncarnation | None:
        """The entry of an incarnation that cannot work with us; None: it is none of those that are remembered."""
        return None if epoch in self._peers else self._refusals.get(epoch)

    def useless_at(self, address: str, now: float) -> Epoch | None:
        """The incarnation at an address that cannot work with us, or that a transport does not connect; None: none is.

        It takes frames that end a room.
        """
        if (refused := self._refusals.at(address)) is not None:
            return refused.epoch
        there = self._at.get(address)
        return there.epoch if there is not None and now < there.shut_until and not there.over else None

    def on_hello(self, hello: Hello, now: float) -> list[PeerEffect]:
        """Admit, refresh, revive or refuse the sender of a ``Hello``."""
        epoch = Epoch(hello.src)
        known = self._peers.get(epoch)
        if epoch == self._epoch or self._forgotten.get(epoch) == NEVER:
            return []
        # A repetition of an admitted Hello need not be checked again; every field but its receiver is compared.
        if known is None or not (known.over or structs.replace(known.hello, dst=hello.dst) == hello):
            try:
                if hello.version != VERSION:
                    raise IncompatiblePeerError("version", VERSION, hello.version)
                self._admit(hello)
            except IncompatiblePeerError as exc:
                return self._refuse(hello, exc, now)
            except RemoteProtocolError as exc:
                return self._refuse(hello, IncompatiblePeerError("hello", "valid", str(exc)), now)
            # An incarnation never changes.
            if known is not None or self._stale(hello):
                return []
        if known is not None:
            return self._handle(known, hello, now)
        out = self._replace(hello.address, now)
        if not self._make_room(now, out):
            return out + self._refuse(hello, self._used_up(), now)
        self._meet(self._new(hello, now, hello.dst == self._epoch), now)
        return [*out, *self._introduce(hello), Up(epoch)]

    def _introduce(self, hello: Hello) -> list[PeerEffect]:
        """The sender of a ``Hello`` knows us, or learns who we are."""
        if hello.dst == self._epoch:
            self._dials.end(hello.address)
            return []
        return [SendTo(hello.address, self._hello(hello.src))]

    def _meet(self, peer: P, now: float) -> None:
        """An incarnation is there that the table did not know."""
        address = peer.hello.address
        self._peers[peer.epoch] = self._at[address] = peer
        self._rest(peer, now)
        self._forgotten.pop(peer.epoch, None)
        self._refusals.discard(address)
        self._dials.found(address)
        if peer.proved and address not in self._dials:
            # It knew us, and we had forgotten it: it may wait for rooms that we gave up when we lost it.
            self._greet(peer, now)

    def _rest(self, peer: P, now: float) -> None:
        """A frame of a peer came, which makes room later now, unless a room uses it: then it makes none."""
        if not peer.users:
            self._idle.put(peer, now)

    def _greet(self, peer: P, now: float) -> None:
        peer.greet_until, peer.beaten = now + GREETINGS * self._options.heartbeat_s, -inf
        self._schedule(peer)

    def _replace(self, address: str, now: float) -> list[PeerEffect]:
        """A new incarnation at a known address replaces the old one. This does not prove that its process has ended."""
        old = self._at.get(address)
        return [] if old is None else self._handle(old, Replaced(), now)

    def _make_room(self, now: float, out: list[PeerEffect]) -> bool:
        """Make room for a peer; False: rooms use all that there may be."""
        if len(self._peers) < self._limit:
            return True
        if (first := self._idle.first()) is not None:
            out += self._forget(first, now)
        return first is not None

    def _used_up(self) -> CapacityError:
        return CapacityError(
            f"rooms use all {len(self._peers)} peers that there may be: see the options peers and link_descriptors"
        )

    def _forget(self, peer: P, now: float) -> list[PeerEffect]:
        """Forget a peer that no room uses. It learns that if it knows us, and may return."""
        address, told = peer.hello.address, peer.proved and not peer.lost
        out, self.displaced = self._drop(peer), self.displaced + 1
        if not told:
            return [*out, Forget(address)]
        self._timers.schedule(address, now + self._options.heartbeat_s)
        return [*out, SendTo(address, Disconnected(src=self._epoch, dst=peer.epoch))]

    def _refuse(self, hello: Hello, exc: IncompatiblePeerError | CapacityError, now: float) -> list[PeerEffect]:
        refused, error = refusal(exc, self._epoch, hello, self._address), exc.about(hello.name, **hello.who)
        out: list[PeerEffect] = [SendTo(hello.address, refused)] if self._answers_to.may(hello.address, now) else []
        if out and Epoch(hello.src) not in self._peers:
            out += self._remember(RefusedIncarnation.of_hello(hello, error))
        elif out:
            self._timers.schedule(hello.address, now + self._options.heartbeat_s)
        if self._dials.end(hello.address):
            out.append(Unreachable(hello.address, error))
        return out

    def _remember(self, incarnation: RefusedIncarnation) -> list[PeerEffect]:
        """Remember who was refused; the connections to those are bounded, as they may change their addresses."""
        left = self._refusals.add(incarnation)
        return [] if left is None or left in self._at or left in self._dials else [Forget(left)]

    def on_refused(self, refused: Refused, now: float) -> list[PeerEffect]:
        """A peer cannot work with us, or its transport no longer reaches us. Its own ``Hello`` may show it before."""
        if refused.dst != self._epoch:
            return []
        error, out = error_of(refused), list[PeerEffect]()
        if refused.field in (LINK, LINKS):
            there = self._at.get(refused.address)
            if there is not None and there.epoch == refused.src:
                out += self.lose(there.epoch, error)
        elif refused.address in self._dials:
            out += self._remember(RefusedIncarnation.of_refused(refused, error, now))
        if self._dials.end(refused.address):
            self._timers.schedule(refused.address, now + self._options.heartbeat_s)
            out.append(Unreachable(refused.address, error))
        return out

    def on_frame(self, frame: Frame, now: float) -> tuple[bool, list[PeerEffect]]:
        """Accept any other frame if it is from a known incarnation to this one of ours; True: it is accepted."""
        epoch = Epoch(frame.src)
        peer = self._peers.get(epoch)
        if peer is None and frame.dst == self._epoch and self._refusals.ends_a_room(frame):
            return True, []
        if peer is None or (frame.dst != self._epoch and not peer.over):
            address = self._forgotten.get(epoch, NEVER) if peer is None else peer.hello.address
            if address == NEVER or not self._answers_to.may(address, now):
                return False, []
            if peer is None:  # it answers with its own
                self._timers.schedule(address, now + self._options.heartbeat_s)
            return False, [SendTo(address, self._hello(b"" if peer is None else frame.src))]
        return peer.state is not Known.OVER, self._handle(peer, frame, now)

    def shut(self, epoch: Epoch, error: DisaggKVError, now: float) -> list[PeerEffect]:
        """The transport does not reach a peer whose frames arrive: it is lost for ``closed_s`` and gets the reason."""
        peer = self._peers.get(epoch)
        return [] if peer is None else self._handle(peer, Shut(error), now)

    def lose(self, epoch: Epoch, error: DisaggKVError, *, ended: bool = False) -> list[PeerEffect]:
        """A transport reports the peer lost, or (``ended``) its exit was observed."""
        peer = self._peers.get(epoch)
        return [] if peer is None else self._handle(peer, Ended(error) if ended else Lost(epoch, error), self._now)

    # What an event does to an incarnation, by its state.

    def _handle(self, peer: P, event: object, now: float) -> list[PeerEffect]:
        if peer.state is Known.SHUT and now >= peer.shut_until:
            peer.state = Known.LOST
        cell = KNOWN[peer.state, RoomFrame if isinstance(event, RoomFrame) else type(event)]
        effects: list[PeerEffect] = getattr(self, cell.method)(peer, event, now)
        assert peer.state in cell.leads_to, (cell.action, peer.state)
        return effects

    def _on_ignore(self, peer: P, event: object, now: float) -> list[PeerEffect]:
        return []

    def _on_hello(self, peer: P, hello: Hello, now: float) -> list[PeerEffect]:
        out, lost = self._introduce(hello), peer.lost
        peer.last_frame_at = now
        if lost:
            out += self._revive(peer, now)
        elif peer.proved and now - peer.greeted >= self._options.closed_s:
            # Not at the end of the handshake, and not each time: a Greeted makes work for a peer that is behind.
            peer.greeted = now
            out.append(Greeted(peer.epoch))
        peer.proved |= hello.dst == self._epoch
        self._rest(peer, now)
        return out

    def _on_heard(self, peer: P, frame: Frame, now: float) -> list[PeerEffect]:
        peer.last_frame_at, peer.proved = now, True
        if not peer.users:
            self._idle.put(peer, now)
        return []

    def _on_frame(self, peer: P, frame: Frame, now: float) -> list[PeerEffect]:
        effects = self._revive(peer, now) if peer.lost else []
        return effects + self._on_heard(peer, frame, now)

    def _on_heartbeat(self, peer: P, frame: Heartbeat, now: float) -> list[PeerEffect]:
        effects = self._on_frame(peer, frame, now)
        if frame.ask:
            effects.append(SendTo(peer.hello.address, Heartbeat(src=self._epoch, dst=peer.epoch, ask=False)))
        return effects

    def _on_disconnected(self, peer: P, frame: Disconnected, now: float) -> list[PeerEffect]:
        """It has forgotten us; of one that has closed, the owner of the table says that it is lost."""
        self._on_heard(peer, frame, now)
        return [] if peer.users or frame.closed else [*self._drop(peer), Forget(peer.hello.address)]

    def _on_refuse(self, peer: P, frame: Frame, now: float) -> list[PeerEffect]:
        """Its frames about rooms count: it may give up some of them. But it stays lost for new rooms."""
        if isinstance(frame, Hello):
            self._dials.end(frame.address)
        return [] if isinstance(frame, ENDINGS) else self._tell_shut(peer, now)

    def _on_lost(self, peer: P, lost: Lost, now: float) -> list[PeerEffect]:
        return self._lose(peer, Known.LOST, lost.error, now)

    def _on_ended(self, peer: P, ended: Ended, now: float) -> list[PeerEffect]:
        peer.ended = True
        return self._lose(peer, Known.OVER, ended.error, now)

    def _on_shut(self, peer: P, shut: Shut, now: float) -> list[PeerEffect]:
        peer.shut_until, peer.shut_for = now + self._options.closed_s, shut.error
        return [*self._tell_shut(peer, now), *self._lose(peer, Known.SHUT, shut.error, now)]

    def _on_replaced(self, peer: P, replaced: Replaced, now: float) -> list[PeerEffect]:
        peer.replaced = True
        error = PeerLostError(f"{peer.name}: another incarnation has taken its address", **peer.who)
        return [*self._lose(peer, Known.OVER, error, now), *self._drop(peer)]

    def _lose(self, peer: P, state: Known, error: Exception, now: float) -> list[PeerEffect]:
        """No room may be bound to it from now on; none could before, if it was lost already."""
        was_lost, peer.state = peer.lost, state
        if was_lost:
            return []
        peer.lost_at = now
        self._rest(peer, now)
        self._schedule(peer)
        return [Lost(peer.epoch, error)]

    def _revive(self, peer: P, now: float) -> list[PeerEffect]:
        """A lost peer has sent a frame. It gets ``Hello``, as it may wait for rooms that we gave up when we lost it."""
        peer.state, peer.closed = Known.UP, None
        self._greet(peer, now)
        return [Up(peer.epoch)]

    def _tell_shut(self, peer: P, now: float) -> list[PeerEffect]:
        """Send the reason as a ``Refused``, at most once a second."""
        hello = peer.hello
        if not self._answers_to.may(hello.address, now):
            return []
        why = words(peer.shut_for)
        refused = Refused(src=self._epoch, dst=hello.src, address=self._address, field=LINK, ours="", theirs=why)
        return [SendTo(hello.address, refused)]

    def on_closed(self, address: str, now: float) -> None:
        """The connection to an address broke, or could not be made."""
        self._dials.on_closed(address, now)
        peer = self._at.get(address)
        if peer is not None and peer.closed is None:
            peer.closed = now
            self._schedule(peer)

    def on_denied(self, address: str, why: str = "") -> list[PeerEffect]:
        """The channel sends nothing there; empty: one side does not allow the other. A known peer becomes silent."""
        if not self._dials.end(address):
            return []
        self._timers.schedule(address, self._now + self._options.heartbeat_s)
        if why:
            return [Unreachable(address, ConfigurationError(f"{address}: {why}", address=address))]
        reason = f"{address}: one of the two sides does not allow the other's public key or user"
        return [Unreachable(address, PeerLostError(reason, address=address))]

    def on_opened(self, address: str) -> None:
        """The connection to an address is open again."""
        self._dials.on_opened(address)
        peer = self._at.get(address)
        if peer is not None and peer.closed is not None:
            peer.closed = None
            # Perhaps another incarnation listens there now. It does not know us, and can answer only a Hello.
            self._greet(peer, self._now)

    def tick(self, now: float) -> list[PeerEffect]:
        """Repeat dials, send heartbeats, report the peers that are lost, and forget those above the budget."""
        self._now = now
        seen = min(now, self._caught_up)
        out, given_up = self._dials.tick(now, seen)
        # The connection stays where a peer is known: it is dropped with the peer.
        out += [Forget(address) for address in given_up if address not in self._at]
        while (surplus := self._surplus()) is not None and surplus.idle_since + self.budget.rest_s <= now:
            out += self._forget(surplus, now)
        for peer in self._timers.due(now + ROUNDING_S):
            if isinstance(peer, str):
                out += [] if peer in self._at or peer in self._dials else [Forget(peer)]
                continue
            out += self._look_at_lost(peer, now) if peer.lost else self._look_at(peer, now, seen)
            if self._peers.get(peer.epoch) is peer:
                self._schedule(peer, now + RECHECK_S if seen < now else 0.0)
        return out

    def _surplus(self) -> P | None:
        """The peer that is forgotten next, as there are more than the budget; None: none is."""
        return self._idle.first() if len(self._peers) > self.budget.most else None

    def _look_at_lost(self, peer: P, now: float) -> list[PeerEffect]:
        """Something may be due for a peer that is lost."""
        if not peer.users and peer.replaced:
            return [*self._drop(peer)]
        if not peer.users and now >= peer.forgotten_at(self._options):
            self._dials.absent(peer.hello.address)
            return [*self._drop(peer), Forget(peer.hello.address)]
        if peer.proved or peer.over or now < peer.beaten + self._options.heartbeat_s:
            return []
        # It may not know us; then it cannot answer the requests of rooms that end.
        peer.beaten = now
        return [SendTo(peer.hello.address, self._hello(peer.epoch))]

    def _look_at(self, peer: P, now: float, seen: float) -> list[PeerEffect]:
        """Something may be due for a peer that is not lost."""
        o, used = self._options, peer.used_since is not None
        if used and seen - peer.heard >= o.silence_s:
            silent = f"{peer.name}: silent for {lasting(seen - peer.heard)}"
            return self._handle(peer, Lost(peer.epoch, PeerLostError(silent, **peer.who)), now)
        if peer.closed is not None and seen - peer.closed >= o.closed_s:
            broke = f"{peer.name}: its connection broke {lasting(now - peer.closed)} ago"
            return self._handle(peer, Lost(peer.epoch, PeerLostError(broke, **peer.who)), now)
        beat_at = peer.beat_at(self._options, now)
        if beat_at is None or now < beat_at - ROUNDING_S:
            return []
        peer.beaten = now
        asked = [SendTo(peer.hello.address, Heartbeat(src=self._epoch, dst=peer.epoch, ask=True))] if used else []
        if used and peer.proved and now >= peer.greet_until and self._answers(peer, now):
            return [*asked]
        # It may not know us, or another incarnation has its address: then it can answer only a Hello. But one that
        # knows us answers a heartbeat, and no Hello.
        return [SendTo(peer.hello.address, self._hello(peer.epoch)), *asked]

    def next_at(self) -> float | None:
        """When a tick is due; None: never."""
        surplus = self._surplus()
        idle_at = None if surplus is None else surplus.idle_since + self.budget.rest_s
        due = (self._dials.next_at(), self._timers.next_at(), idle_at)
        return min((at for at in due if at is not None), default=None)
