"""The other ranks of the instance, and whether another incarnation has the place of this one.

A process that stood still may go on after its launcher has started another one in its place. So an incarnation that
stood still asks the rendezvous where its rank is. It yields to another address for good. Without an answer it goes on.
Of several incarnations of another rank, the newest counts. On one host, ``born`` of ``Hello`` shows which one that is.
Clocks of two hosts are not compared: there it is the one whose first ``Hello`` came last.
"""

from __future__ import annotations

import logging
from functools import reduce
from typing import TYPE_CHECKING

from ...core.peers.known_peers import is_older
from ...errors import SupersededError
from ...ids import Epoch, Rank
from ...rendezvous import Source
from ..peers.directory import LOOKUP_FAILED_S, LOOKUP_S, LookupResult
from ..peers.session import PeerSession

if TYPE_CHECKING:
    from .event_loop import EventLoop

log = logging.getLogger("disagg_kv")


class InstanceRanks:
    """Finds rank 0, and says which incarnation of each rank takes part in the agreement.

    ``look_at`` is when the instance is looked up next; None: not at all. ``superseded``, from any thread, is why this
    rank takes no rooms: another incarnation has its place; None: none has.
    """

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._there: dict[PeerSession, None] = {}
        self.look_at: float | None = None if len(loop.me.shards) == 1 else loop.now
        self._ticked = loop.now
        self._stood_still, self._went_on = False, loop.now
        self.superseded: SupersededError | None = None

    def tick(self) -> None:
        """Rank 0 counts the votes of our instance: look it up until it is here, and introduce ourselves to it.

        Rank 0 itself looks the others up once: they may know an earlier rank 0, which still seems to live.
        """
        now, options = self._loop.now, self._loop.options
        if now - self._ticked >= options.missed * options.heartbeat_s:
            self.look_at, self._stood_still, self._went_on = now, True, now
        self._ticked = now
        if self.look_at is None or now < self.look_at:
            return
        if not self._stood_still and any(peer.hello.rank == 0 for peer in self._there):
            self.look_at = None
            return
        self.look_at = now + LOOKUP_S
        self._loop.look_up(Source(self._loop.me.instance))

    def on_answer(self, answer: LookupResult) -> None:
        """The rendezvous has answered where our own instance is; before we stood still, it may have been elsewhere."""
        loop, me = self._loop, self._loop.me
        if self.look_at is None or answer.at < self._went_on:
            return
        addresses, stood_still, self._stood_still = answer.addresses or (), self._stood_still, False
        if stood_still and me.rank < len(addresses) and addresses[me.rank] != me.address:
            self._yield(addresses[me.rank])
        if len(me.shards) == 1:
            self.look_at = None
        elif answer.error is not None:
            self.look_at = loop.now + LOOKUP_FAILED_S
        elif addresses:
            self.look_at = None if me.rank == 0 else loop.now + loop.options.heartbeat_s
            for address in addresses if me.rank == 0 else addresses[:1]:
                if address != me.address:
                    loop.dial(address)

    def _yield(self, address: str) -> None:
        if self.superseded is None:
            me = self._loop.me
            self.superseded = error = SupersededError(me.instance, me.rank, address)
            log.warning("%s; open rooms fail, and new ones are refused", error)
            # In an instance of one rank, rooms that both sides know need no other rank.
            self._loop.side.integrity_failure(error, unmet=len(me.shards) == 1)

    def __contains__(self, epoch: bytes) -> bool:
        peer = self._loop.peers.known(Epoch(epoch))
        return peer is not None and peer.hello.role == self._loop.me.role

    def up(self, peer: PeerSession) -> None:
        """A rank of the instance is there."""
        self._loop.peers.use(peer.epoch, self._loop.now)  # its votes may be awaited at any time
        self._there[peer] = None
        self._join(peer.hello.rank)

    def lost(self, epoch: Epoch) -> None:
        """A rank of the instance is lost; another incarnation of it may be there."""
        peer = self._loop.peers.known(epoch)
        assert peer is not None
        self.look_at = None if self._loop.me.rank == 0 and not self._stood_still else self._loop.now
        del self._there[peer]
        self._loop.peers.release(peer)
        self._loop.agree(self._loop.verdict.lost(epoch, self._loop.now))
        self._join(peer.hello.rank)

    def _join(self, rank: int) -> None:
        """Of the incarnations of another rank that are there, the newest counts."""
        loop = self._loop
        there = [peer for peer in self._there if peer.hello.rank == rank]
        if rank == loop.me.rank or not there:
            return
        if len(there) > 1:
            first_frames = loop.peers.epochs()
            there.sort(key=lambda peer: first_frames.index(peer.epoch))
        newest = reduce(lambda a, b: a if is_older(b.hello, a.hello) else b, there)
        loop.agree(loop.verdict.joined(newest.epoch, Rank(rank), loop.now))
        for peer in there:
            if peer is not newest:
                loop.verdict.followed(peer.epoch, Rank(rank))
