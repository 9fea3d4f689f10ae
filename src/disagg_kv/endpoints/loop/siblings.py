"""The other ranks of the instance, and other lives of this rank, as the endpoint's thread meets and loses them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ...core import Hello, Send
from ...core.wire.frames import Superseded
from ...errors import RemoteProtocolError
from ...ids import Epoch, Rank
from ...rendezvous import Source
from ..peers.directory import LOOKUP_FAILED_S, LOOKUP_S, LookupResult
from ..peers.succession import Succession

if TYPE_CHECKING:
    from .event_loop import EventLoop

log = logging.getLogger("disagg_kv")


class Siblings:
    """Finds rank 0, decides which life of each rank takes part in the agreement, and notifies lives that do not.

    ``look_at`` is when rank 0 is looked up next; None: it is not looked for.
    """

    def __init__(self, loop: EventLoop, succession: Succession) -> None:
        self._loop = loop
        self._succession = succession
        self._ranks: dict[Epoch, Rank] = {}
        self.look_at: float | None = None if len(loop.me.shards) == 1 else loop.now
        self._ticked = loop.now

    def tick(self) -> None:
        """Rank 0 counts the votes of our instance: look it up until it is here, and introduce ourselves to it.

        Rank 0 itself looks the others up once: they may know an earlier rank 0, which still seems to live.
        """
        now = self._loop.now
        if now - self._ticked >= self._loop.options.silence_s:
            # We stood still until all others had lost us: another life may have our place.
            self.look_at = now
        self._ticked = now
        if self.look_at is None or now < self.look_at:
            return
        if Rank(0) in self._ranks.values():
            self.look_at = None
            return
        self.look_at = now + LOOKUP_S
        self._loop.look_up(Source(self._loop.me.instance))

    def on_answer(self, answer: LookupResult) -> None:
        """The rendezvous has answered where our own instance is."""
        loop, me = self._loop, self._loop.me
        if self.look_at is None:
            return
        if answer.error is not None:
            self.look_at = loop.now + LOOKUP_FAILED_S
        elif answer.addresses is not None:
            first = me.rank == 0
            self.look_at = None if first else loop.now + loop.options.heartbeat_s
            # Whoever is found in our own place has taken it.
            others = answer.addresses if first else (answer.addresses[0], *answer.addresses[me.rank :][:1])
            for address in others:
                if address != me.address:
                    loop.dial(address)

    def __contains__(self, epoch: bytes) -> bool:
        return epoch in self._ranks

    def up(self, hello: Hello) -> None:
        """A rank of the instance is there."""
        epoch = Epoch(hello.src)
        if epoch not in self._ranks:
            self._loop.peers.use(epoch, self._loop.now)  # its votes may be awaited at any time
        self._ranks[epoch] = Rank(hello.rank)
        self._join(Rank(hello.rank))

    def lost(self, epoch: Epoch) -> None:
        """A rank of the instance is lost; another life of it may be there."""
        self.look_at = None if self._loop.me.rank == 0 else self._loop.now
        rank = self._ranks.pop(epoch)
        self._loop.peers.release(epoch)
        self._succession.lost(epoch)
        self._loop.agree(self._loop.verdict.lost(epoch, self._loop.now))
        self._join(rank)

    def beat(self, epoch: Epoch) -> None:
        """A frame of a life that a younger one has followed: answer ``Superseded`` each time, since it may be lost."""
        loop, address = self._loop, self._succession.successor(epoch)
        if address is not None:
            loop.send(Send(epoch, Superseded(src=loop.me.epoch, dst=epoch, address=address)))

    def point_on(self, peer: Epoch) -> None:
        """Tell a decode rank that another life has our place, if one has: its new rooms belong there."""
        loop, address = self._loop, self._succession.follower
        if address is not None:
            loop.send(Send(peer, Superseded(src=loop.me.epoch, dst=peer, address=address)))

    def on_superseded(self, frame: Superseded) -> None:
        """Another rank knows a younger life of this rank: only the ``Hello`` of that life itself proves it.

        From a prefill rank to decode: that rank itself has been followed. Its instance is looked up before the next
        room; open rooms stay with it.
        """
        if frame.src not in self._ranks:
            peer = self._loop.peers.known(Epoch(frame.src))
            if peer is None or self._loop.me.role == "prefill":
                raise RemoteProtocolError(f"{type(frame).__name__} from no rank of our own instance")
            self._loop.directory.forget(peer.hello.instance)
            return
        if frame.address != self._loop.me.address:
            self._succession.named(frame.address)
            self._loop.dial(frame.address)
            self._join(self._loop.me.rank)

    def _join(self, rank: Rank) -> None:
        """Of the lives of a rank that are there, one counts."""
        loop = self._loop
        there = [epoch for epoch, of in self._ranks.items() if of == rank]
        if len(there) > 1:
            there = [epoch for epoch in loop.peers.epochs() if epoch in there]  # in the order of their first frames
        lives = [loop.peers.hello(epoch) for epoch in there]
        if rank == loop.me.rank:
            error = self._succession.of_our_rank(lives)
            if error is not None:
                log.warning("%s; open rooms fail, and new ones are refused", error)
                for peer in loop.remotes if loop.me.role == "prefill" else ():
                    self.point_on(peer)
                # In an instance of one rank, rooms that both sides know need no other rank.
                loop.side.integrity_failure(error, unmet=len(loop.me.shards) == 1)
        elif lives:
            youngest, *elders = self._succession.counts(lives)
            loop.agree(loop.verdict.joined(Epoch(youngest.src), rank, loop.now))
            for elder in elders:
                loop.verdict.followed(Epoch(elder.src), rank)
        for life in lives:
            self.beat(Epoch(life.src))
