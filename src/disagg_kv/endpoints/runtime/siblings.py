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

    def __init__(self, node: EventLoop, succession: Succession) -> None:
        self._node = node
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
        self._node.agree(self._node.agreement.lost(epoch, self._node.now))
        self._join(rank)

    def beat(self, epoch: Epoch) -> None:
        """A life that another one has followed is still there: say so each time, as such a word may be lost."""
        node, address = self._node, self._succession.successor(epoch)
        if address is not None:
            node.send(Send(epoch, Superseded(src=node.me.epoch, dst=epoch, address=address)))

    def on_superseded(self, frame: Superseded) -> None:
        """Another rank knows a younger life of ours: that one tells by its own ``Hello`` whether it is."""
        if frame.src not in self._ranks:
            raise RemoteProtocolError(f"{type(frame).__name__} from no rank of our own instance")
        if frame.address != self._node.me.address:
            self._succession.named(frame.address)
            self._node.dial(frame.address)
            self._join(self._node.me.rank)

    def _join(self, rank: Rank) -> None:
        """Of the lives of a rank that are there, one counts."""
        node = self._node
        lives = [node.peers.hello(epoch) for epoch in node.peers.epochs() if self._ranks.get(epoch) == rank]
        if rank == node.me.rank:
            error = self._succession.of_our_rank(lives)
            if error is not None:
                log.warning("%s; open rooms fail, and new ones are refused", error)
                # Of an instance of one rank, rooms that both sides have met need nobody else.
                node.role.integrity_failure(error, unmet=len(node.me.shards) == 1)
        elif lives:
            youngest, *elders = self._succession.counts(lives)
            node.agree(node.agreement.joined(Epoch(youngest.src), rank, node.now))
            for elder in elders:
                node.agreement.followed(Epoch(elder.src), rank)
        for life in lives:
            self.beat(Epoch(life.src))
