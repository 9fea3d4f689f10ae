"""The ranks of our own instance, and other lives of our own rank, as an endpoint's thread meets and loses them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ...errors import RemoteProtocolError
from ...ids import Epoch, Rank
from ...protocol import Hello, Send
from ...protocol.frames import Superseded
from .succession import Succession

if TYPE_CHECKING:
    from .event_loop import EventLoop

log = logging.getLogger("disagg_kv")


class Siblings:
    """Tells the agreement which life of each rank counts, and lives that do not count that they do not."""

    def __init__(self, loop: EventLoop, succession: Succession) -> None:
        self._loop = loop
        self._succession = succession
        self._ranks: dict[Epoch, Rank] = {}

    def __contains__(self, epoch: bytes) -> bool:
        return epoch in self._ranks

    def knows(self, rank: Rank) -> bool:
        """Whether some life of a rank is there."""
        return rank in self._ranks.values()

    def up(self, hello: Hello) -> None:
        """A rank of our instance is there."""
        self._ranks[Epoch(hello.src)] = Rank(hello.rank)
        self._join(Rank(hello.rank))

    def lost(self, epoch: Epoch) -> None:
        """A rank of our instance is lost; another life of it may be there."""
        rank = self._ranks.pop(epoch)
        self._succession.lost(epoch)
        self._loop.agree(self._loop.agreement.lost(epoch, self._loop.now))
        self._join(rank)

    def beat(self, epoch: Epoch) -> None:
        """A life that another one has followed is still there: say so each time, as such a word may be lost."""
        loop, address = self._loop, self._succession.successor(epoch)
        if address is not None:
            loop.send(Send(epoch, Superseded(src=loop.me.epoch, dst=epoch, address=address)))

    def on_superseded(self, frame: Superseded) -> None:
        """Another rank knows a younger life of ours: that one tells by its own ``Hello`` whether it is."""
        if frame.src not in self._ranks:
            raise RemoteProtocolError(f"{type(frame).__name__} from no rank of our own instance")
        if frame.address != self._loop.me.address:
            self._succession.named(frame.address)
            self._loop.dial(frame.address)
            self._join(self._loop.me.rank)

    def _join(self, rank: Rank) -> None:
        """Of the lives of a rank that are there, one counts."""
        loop = self._loop
        lives = [loop.peers.hello(epoch) for epoch in loop.peers.epochs() if self._ranks.get(epoch) == rank]
        if rank == loop.me.rank:
            error = self._succession.of_our_rank(lives)
            if error is not None:
                log.warning("%s; open rooms fail, and new ones are refused", error)
                # Of an instance of one rank, rooms that both sides have met need nobody else.
                loop.side.integrity_failure(error, unmet=len(loop.me.shards) == 1)
        elif lives:
            youngest, *elders = self._succession.counts(lives)
            loop.agree(loop.agreement.joined(Epoch(youngest.src), rank, loop.now))
            for elder in elders:
                loop.agreement.followed(Epoch(elder.src), rank)
        for life in lives:
            self.beat(Epoch(life.src))
