"""The endpoints that this one knows: the life of each, and whether it is lost. Sans IO.

An endpoint's life is its epoch. ``Hello`` is repeated towards an address until the endpoint there answers with one that
names our epoch. A frame for another life of ours, or from an unknown life, is counted and dropped. The answer is a
``Hello``, at most once a second per address.

A lost life stays lost once another life takes its address. A life that was only silent is revived by its next frame.
A life whose process has ended is never revived, even if frames of it arrive later. The ``Hello`` of a life never
changes, but for its receiver.

**Heartbeats.** A peer is *in use* while a room here depends on it (:meth:`PeerTable.use`). Only the silence of such a
peer matters, so only it is measured, from the peer's last frame or from the beginning of the use. A peer in use that
sent nothing for ``heartbeat_s`` gets a ``Heartbeat`` that asks for another one, which it answers at once. So each side
decides alone, a frame of any kind saves a heartbeat, and two peers without a room exchange nothing. They keep their
connection, and notice that it breaks. SWIM (Das, Gupta and Motivala, 2002) asks its members for answers, too.

**Cost.** What is due lies in a heap. A frame only notes its time: a time in the heap that has become too early is
corrected when it comes. So a tick costs nothing for a peer that is not in use.

**Links.** A life whose link was dropped is *parted*, see :mod:`.links`. It learns that by ``Parted``, and drops its own
link unless a room there uses it. Any other frame of it brings it back, as does its answer to a dial. A ``Parted`` that
crosses the first frame of a room costs one such return.

Which lives are known, and which make room for others, is in :mod:`.peer_lives`.
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
from ..wire.frames import VERSION, Frame, Heartbeat, Hello, Parted, Refused, words
from .dials import RECHECK_S, ROUNDING_S, Dials
from .known_peer import KnownPeer
from .links import Links
from .peer_effects import Forget, Greeted, PeerEffect, SendTo, Unlink, Unreachable, Up
from .peer_lives import PeerLives
from .refusals import ENDINGS, LINK, LINKS, Answers, Refusals, RefusedLife, error_of, refusal

GREETINGS = 4
"""About this many heartbeats to a revived peer come with a ``Hello``: a single one might be lost."""


class PeerTable(PeerLives):
    """All peers, and the addresses that are being dialled.

    Args:
        epoch: our life.
        address: our channel's address.
        hello: makes our ``Hello`` towards a life (empty: not known).
        admit: raises IncompatiblePeerError or RemoteProtocolError if we cannot work with the sender of a ``Hello``.
        options: times.
        links: those that are held; None: without a bound.
    """

    def __init__(
        self,
        epoch: Epoch,
        address: str,
        hello: Callable[[bytes], Hello],
        admit: Callable[[Hello], None],
        options: Options,
        links: Links | None = None,
    ) -> None:
        super().__init__(options, Links() if links is None else links)
        self._epoch = epoch
        self._address = address
        self._hello = hello
        self._admit = admit
        self._dials = Dials(options, lambda: hello(b""))
        self._answers_to = Answers(self.MAX_RETIRED)
        self._refusals = Refusals()
        self.dropped = 0

    def use(self, epoch: Epoch, now: float) -> None:
        """A room depends on a life: its silence counts from now on. Each call needs a :meth:`release`."""
        self._users[epoch] = self._users.get(epoch, 0) + 1
        self.links.use(epoch)
        peer = self._peers.get(epoch)
        if peer is not None and peer.used_since is None:
            self._begin_use(epoch, peer, now)

    def _begin_use(self, epoch: Epoch, peer: KnownPeer, now: float) -> None:
        peer.used_since = now
        self._schedule(epoch, peer)

    def release(self, epoch: Epoch) -> None:
        """A room that used a life has ended."""
        left = self._users[epoch] - 1
        if left:
            self._users[epoch] = left
            return
        del self._users[epoch]
        self._full_until = -inf
        if (peer := self._peers.get(epoch)) is not None:
            peer.used_since = None
            self.links.release(epoch, self._now, lost=peer.lost)
        else:
            self._timers.schedule(epoch, self._now)  # it was forgotten while rooms used it: its link goes now

    def dialled(self, address: str) -> bool:
        """Whether an address gets ``Hello`` until an endpoint answers."""
        return address in self._dials

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
        if new and there is not None and self._peers[there].closed is not None:
            return [Forget(address), *effects]  # a fresh connection shows at once whether a process listens there
        return effects

    def address(self, epoch: Epoch) -> str | None:
        """The address of a life, lost, refused or not; None: it is unknown."""
        peer = self._peers.get(epoch)
        if peer is not None:
            return peer.hello.address
        refused = self._refusals.get(epoch)
        return None if refused is None else refused.address

    def route(self, epoch: Epoch) -> str | None:
        """The same, for a frame that leaves now: one to a parted life opens a connection, which is dropped again."""
        peer = self._peers.get(epoch)
        if peer is None or not peer.parted:
            return self.address(epoch)
        peer.forget_at = self._now + self._options.heartbeat_s
        self._schedule(epoch, peer)
        return peer.hello.address

    def refused(self, epoch: Epoch) -> RefusedLife | None:
        """The entry of a life that cannot work with us; None: it is none of those that are remembered."""
        return None if epoch in self._peers else self._refusals.get(epoch)

    def useless_at(self, address: str, now: float) -> Epoch | None:
        """The life at an address that cannot work with us, or that a transport does not connect; None: there is none.

        It takes frames that end a room.
        """
        if (refused := self._refusals.at(address)) is not None:
            return refused.epoch
        epoch = self._at.get(address)
        return epoch if epoch is not None and now < self._peers[epoch].shut else None

    def on_hello(self, hello: Hello, now: float) -> list[PeerEffect]:
        """Admit, refresh, revive or refuse the sender of a ``Hello``."""
        epoch = Epoch(hello.src)
        known = self._peers.get(epoch)
        if epoch == self._epoch or epoch in self._retired or (known is not None and known.ended):
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
            self._dials.end(hello.address)
            return self._tell_shut(known, now)
        out: list[PeerEffect] = []
        if known is None:
            out += self._replace(hello.address, epoch)
        if not self._make_link(epoch, now, out):
            return out + self._refuse(hello, self.links.used_up(), now)
        if known is None:
            if not self._make_room(now, out):
                return out + self._refuse(hello, IncompatiblePeerError("peers", f"at most {len(self._peers)}", 1), now)
            self._meet(epoch, hello, now)
            out.append(Up(hello))
        else:
            known.last_frame_at = now
            if not known.there:
                out += self._revive(epoch, known, now)
            elif known.proved and now - known.greeted >= self._options.closed_s:
                # Not at the end of the handshake, and not each time: a Greeted makes work for a peer that is behind.
                known.greeted = now
                out.append(Greeted(epoch))
            known.proved |= hello.dst == self._epoch
        if hello.dst == self._epoch:
            self._dials.end(hello.address)
        else:
            out.append(SendTo(hello.address, self._hello(hello.src)))
        return out

    def _meet(self, epoch: Epoch, hello: Hello, now: float) -> None:
        """A life is there that the table did not know."""
        peer = self._peers[epoch] = KnownPeer(hello, now, hello.dst == self._epoch)
        self.links.open(epoch, now, used=epoch in self._users)
        self._displaced.pop(epoch, None)
        self._refusals.discard(hello.address)
        self._at[hello.address] = epoch
        self._dials.found(hello.address)
        if peer.proved and hello.address not in self._dials:
            # It knew us, and we had forgotten it: it may wait for rooms that we gave up when we lost it.
            self._greet(epoch, peer, now)
        if epoch in self._users:
            self._begin_use(epoch, peer, now)

    def _greet(self, epoch: Epoch, peer: KnownPeer, now: float) -> None:
        peer.greet_until, peer.beaten = now + GREETINGS * self._options.heartbeat_s, -inf
        self._schedule(epoch, peer)

    def _revive(self, epoch: Epoch, peer: KnownPeer, now: float) -> list[PeerEffect]:
        """A lost or parted life has sent a frame.

        If it was lost it gets ``Hello``, as it may wait for rooms that we gave up when we lost it.
        """
        was_lost, peer.lost, peer.parted, peer.closed, peer.forget_at = peer.lost, False, False, None, inf
        self.links.open(epoch, now, used=epoch in self._users)
        if was_lost:
            self._greet(epoch, peer, now)
        else:
            self._schedule(epoch, peer)
        return [Up(peer.hello)]

    def bring_back(self, epoch: Epoch, now: float) -> list[PeerEffect]:
        """A frame of a parted life is used only now; does nothing for another life."""
        peer = self._peers.get(epoch)
        return self._link_again(epoch, peer, now) if peer is not None and peer.parted else []

    def _link_again(self, epoch: Epoch, peer: KnownPeer, now: float) -> list[PeerEffect]:
        """A lost or parted life has sent a frame: it is there again if there may be a link to it."""
        out: list[PeerEffect] = []
        if not self._make_link(epoch, now, out):
            return out + self._refuse(peer.hello, self.links.used_up(), now)
        return out + self._revive(epoch, peer, now)

    def _replace(self, address: str, epoch: Epoch) -> list[PeerEffect]:
        """A new life at a known address retires the old one. This does not prove that the old process has ended."""
        old = self._at.get(address)
        if old is None or old == epoch:
            return []
        peer = self._peers[old]
        error = PeerLostError(f"{peer.name}: another life has taken its address", **peer.who)
        return [*([Lost(old, error)] if peer.there else []), *self._drop(old, retire=True)]

    def _make_link(self, epoch: Epoch, now: float, out: list[PeerEffect]) -> bool:
        """Make room for a link to a life, unless it has one; False: rooms use as many as there may be."""
        if epoch in self.links or not self.links.full:
            return True
        if (oldest := self.links.oldest()) is not None:
            out += self._part(oldest, now)
        return oldest is not None

    def _part(self, epoch: Epoch, now: float, *, notify: bool = True) -> list[PeerEffect]:
        """Drop the link of a life that no room uses; a lost one is forgotten but for its address."""
        peer, self.links.dropped = self._peers[epoch], self.links.dropped + 1
        if peer.lost:
            return self._displace(epoch, peer)
        self.links.close(epoch)
        peer.parted, peer.closed, peer.greet_until = True, None, -inf
        peer.forget_at = now + self._options.heartbeat_s if notify else inf
        self._schedule(epoch, peer)
        address = peer.hello.address
        return [Unlink(epoch), SendTo(address, Parted(src=self._epoch, dst=epoch)) if notify else Forget(address)]

    def _refuse(self, hello: Hello, exc: IncompatiblePeerError | CapacityError, now: float) -> list[PeerEffect]:
        self.dropped += 1
        refused, error = refusal(exc, self._epoch, hello, self._address), exc.about(hello.name, **hello.who)
        out: list[PeerEffect] = [SendTo(hello.address, refused)] if self._answers_to.may(hello.address, now) else []
        if out and Epoch(hello.src) not in self._peers:  # else it lacks only a link: it stays known, and returns
            out += self._remember(RefusedLife.of_hello(hello, error))
        if self._dials.end(hello.address):
            out.append(Unreachable(hello.address, error))
        return out

    def _remember(self, life: RefusedLife) -> list[PeerEffect]:
        """Remember a refused life; the connections to such lives are bounded, as they may change their addresses."""
        left = self._refusals.add(life)
        return [] if left is None or left in self._at or left in self._dials else [Forget(left)]

    def on_refused(self, refused: Refused, now: float) -> list[PeerEffect]:
        """A peer cannot work with us, or its transport no longer reaches us. Its own ``Hello`` may show it before."""
        if refused.dst != self._epoch:
            self.dropped += 1
            return []
        error, out = error_of(refused), list[PeerEffect]()
        if refused.field in (LINK, LINKS):
            if self._at.get(refused.address) == refused.src:
                out += self.lose(Epoch(refused.src), error)
        elif refused.address in self._dials:
            out += self._remember(RefusedLife.of_refused(refused, error, now))
        if self._dials.end(refused.address):
            out.append(Unreachable(refused.address, error))
        return out

    def on_frame(self, frame: Frame, now: float) -> tuple[bool, list[PeerEffect]]:
        """Accept any other frame if it is from a known life to this life of ours; True: it is accepted."""
        epoch = Epoch(frame.src)
        peer = self._peers.get(epoch)
        if peer is None and frame.dst == self._epoch and self._refusals.ends_a_room(frame):
            return True, []
        if peer is None or peer.ended or frame.dst != self._epoch:
            self.dropped += 1
            if peer is not None and not peer.ended and self._answers_to.may(peer.hello.address, now):
                return False, [SendTo(peer.hello.address, self._hello(frame.src))]
            address = self._displaced.get(epoch)
            if peer is None and address is not None and self._answers_to.may(address, now):
                return False, [SendTo(address, self._hello(b""))]  # it answers with its own
            return False, []
        if now < peer.shut:
            # Its frames about rooms count: it may give up some of them. But it stays lost for new rooms.
            return True, [] if isinstance(frame, ENDINGS) else self._tell_shut(peer, now)
        peer.last_frame_at, peer.proved = now, True
        if isinstance(frame, Parted):
            parts = peer.there and epoch not in self._users and not frame.closed
            return True, self._part(epoch, now, notify=False) if parts else []
        self.links.heard(epoch, now)
        effects = [] if peer.there else self._link_again(epoch, peer, now)
        if not peer.there:
            self.dropped += 1
            return False, effects
        if isinstance(frame, Heartbeat) and frame.ask:
            effects.append(SendTo(peer.hello.address, Heartbeat(src=self._epoch, dst=epoch, ask=False)))
        return True, effects

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
        if not self._answers_to.may(hello.address, now):
            return []
        why = words(peer.shut_for)
        refused = Refused(src=self._epoch, dst=hello.src, address=self._address, field=LINK, ours="", theirs=why)
        return [SendTo(hello.address, refused)]

    def on_closed(self, address: str, now: float) -> None:
        """The connection to an address broke, or could not be made."""
        self._dials.on_closed(address, now)
        epoch = self._at.get(address)
        if epoch is not None and (peer := self._peers[epoch]).closed is None and not peer.parted:
            peer.closed = now
            self._schedule(epoch, peer)

    def on_denied(self, address: str, why: str = "") -> list[PeerEffect]:
        """The channel sends nothing there; empty: one side does not allow the other. A known peer becomes silent."""
        if not self._dials.end(address):
            return []
        if why:
            return [Unreachable(address, ConfigurationError(f"{address}: {why}", address=address))]
        reason = f"{address}: one of the two sides does not allow the other's public key or user"
        return [Unreachable(address, PeerLostError(reason, address=address))]

    def on_opened(self, address: str) -> None:
        """The connection to an address is open again."""
        self._dials.on_opened(address)
        epoch = self._at.get(address)
        if epoch is not None and (peer := self._peers[epoch]).closed is not None:
            peer.closed = None
            # Perhaps another life listens there now. It does not know us, and can answer only a Hello.
            self._greet(epoch, peer, self._now)

    def lose(self, epoch: Epoch, error: DisaggKVError, *, ended: bool = False) -> list[PeerEffect]:
        """A transport reports the life lost, or (``ended``) its exit was observed: then nothing revives it."""
        peer = self._peers.get(epoch)
        if peer is None:
            return []
        peer.ended |= ended
        return [] if peer.lost else [self._lose(epoch, peer, error, self._now)]

    def _lose(self, epoch: Epoch, peer: KnownPeer, error: DisaggKVError, now: float) -> Lost:
        peer.lost, peer.lost_at, peer.parted = True, now, False
        if epoch not in self._users:
            self.links.release(epoch, now, lost=True)
        self._spare.clear()
        self._full_until = -inf
        self._schedule(epoch, peer)
        return Lost(epoch, error)

    def tick(self, now: float) -> list[PeerEffect]:
        """Repeat dials, send heartbeats, and report the peers that are lost."""
        self._now = now
        seen = min(now, self._caught_up)
        out, given_up = self._dials.tick(now, seen)
        # The connection stays where a life is known: it is dropped with the life.
        out += [Forget(one) for one in given_up if one not in self._at or self._peers[self._at[one]].parted]
        while (surplus := self.links.surplus(now)) is not None:
            out += self._part(surplus, now)
        for epoch in self._timers.due(now + ROUNDING_S):
            peer = self._peers.get(epoch)
            if peer is None:
                out += [] if epoch in self._users else [Unlink(epoch)]
            elif peer.lost:
                out += self._look_at_lost(epoch, peer, now)
            elif peer.parted:
                peer.forget_at = inf
                out += [] if peer.hello.address in self._dials else [Forget(peer.hello.address)]
            else:
                out += self._look_at(epoch, peer, now, seen)
            if peer is not None and epoch in self._peers:
                self._schedule(epoch, peer, now + RECHECK_S if seen < now else 0.0)
        return out

    def _look_at_lost(self, epoch: Epoch, peer: KnownPeer, now: float) -> list[PeerEffect]:
        """Something may be due for a peer that is lost."""
        if now >= peer.forgotten_at(self._options):
            self._dials.absent(peer.hello.address)
            return [*self._drop(epoch, retire=False), Forget(peer.hello.address)]
        if peer.proved or peer.ended or now < peer.beaten + self._options.heartbeat_s:
            return []
        # It may not know us; then it cannot answer the requests of rooms that end.
        peer.beaten = now
        return [SendTo(peer.hello.address, self._hello(epoch))]

    def _look_at(self, epoch: Epoch, peer: KnownPeer, now: float, seen: float) -> list[PeerEffect]:
        """Something may be due for a peer that is not lost."""
        o, used = self._options, peer.used_since is not None
        if used and seen - peer.heard >= o.silence_s:
            silent = f"{peer.name}: silent for {lasting(seen - peer.heard)}"
            return [self._lose(epoch, peer, PeerLostError(silent, **peer.who), now)]
        if peer.closed is not None and seen - peer.closed >= o.closed_s:
            broke = f"{peer.name}: its connection broke {lasting(now - peer.closed)} ago"
            return [self._lose(epoch, peer, PeerLostError(broke, **peer.who), now)]
        beat_at = peer.beat_at(self._options, now)
        if beat_at is None or now < beat_at - ROUNDING_S:
            return []
        peer.beaten = now
        asked = [SendTo(peer.hello.address, Heartbeat(src=self._epoch, dst=epoch, ask=True))] if used else []
        if used and peer.proved and now >= peer.greet_until and self._answers(peer, now):
            return [*asked]
        # It may not know us, or another life has taken the address: then it can answer only a Hello. But one that knows
        # us answers a heartbeat, and no Hello.
        return [SendTo(peer.hello.address, self._hello(epoch)), *asked]

    def next_at(self) -> float | None:
        """When a tick is due; None: never."""
        due = (self._dials.next_at(), self._timers.next_at(), self.links.next_at())
        times = [at for at in due if at is not None]
        return min(times) if times else None
