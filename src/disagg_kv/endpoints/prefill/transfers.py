"""Prefill's data path: each transfer to the mover of its path.

Theory of operation
===================

A transfer moves our part of one segment to one decode rank. It is ordered (:meth:`TransferQueue.add`) once its rows are
final, or will be at an event that a GPU waits for, and once it has its place at the destination.

::

    add -> pending -> gather into a slot -> post -> tickets end -> outcome       (movers/staged.py)
    add -> pending ----------------------> post -> tickets end -> outcome       (movers/direct.py)
    add -> pending -> copy into the peer's mapped pages --------> outcome       (movers/mapped.py)

Calls go one way. The endpoint's side calls ``look`` and ``start`` in each step of its loop, and ``posts.on_ticket``
for each report of the transport. None of them calls the side. What the side has to know waits until it takes it
(``outcome``): how a transfer went, that no page of a room is read any more, that an event of a room raised.

``room.machine.reads`` protects pages of a room: gathers, checksums, copies and direct writes each count from before
they begin until they cannot read any more. :mod:`.movers.posts` says when what has begun reads no more.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...core import Transfer
from ...ids import RegionId
from ...kernels import Kernels, SupportsStreams
from ...memory import Buffer, Event
from ...strategies import MoverName
from ..loop.event_loop import EventLoop
from ..loop.timing import Budget
from .movers.direct import DirectMover
from .movers.mapped import MappedMover
from .movers.posts import Post, Posts
from .movers.staged import StagedMover
from .room import PrefillRoom


class TransferQueue:
    """A :class:`~.movers.base.Mover` that has one for each kind of path.

    Args:
        loop: the endpoint's: its transport, peers, clock and observer.
        kernels: gather and copy.
        staging, region: the buffer that is cut into slots, as it is registered.
        posts: the account of what has begun.
    """

    def __init__(self, loop: EventLoop, kernels: Kernels, staging: Buffer, region: RegionId, posts: Posts) -> None:
        self._streams = kernels if isinstance(kernels, SupportsStreams) else None
        self.queues = self._streams is not None
        self.posts = posts
        self.outcome = posts.outcome
        self.mapped = MappedMover(loop, kernels, posts)
        self.failed, self.look_at_failed = self.mapped.failed, self.mapped.look_at_failed
        self.direct = DirectMover(loop, posts)
        self.staged = StagedMover(loop, kernels, staging, region, posts)
        self._movers: Mapping[MoverName, MappedMover | DirectMover | StagedMover] = {
            "mapped": self.mapped,
            "direct": self.direct,
            "staged": self.staged,
        }

    @property
    def pending(self) -> bool:
        """Whether a transfer has not begun."""
        return bool(self.mapped.lines.of or self.direct.lines.of or self.staged.lines.of)

    @property
    def waits(self) -> bool:
        """Whether something is in flight, or waits for an event, that only polling finds; or there is an outcome."""
        posts, copies, gathers = self.posts, self.mapped.running, self.staged.gathering
        waits = self.direct.lines.of and self.direct.waits
        return bool(posts.tickets or posts.outcomes or posts.summing or copies or gathers or waits)

    def orders(self, event: Event) -> bool:
        """Whether gathers wait for an event by themselves, so that no thread polls it."""
        try:
            return self._streams is not None and self._streams.orders(event)
        except Exception:
            return False  # it raises again when the endpoint asks it: then its rooms fail with the reason

    def add(self, room: PrefillRoom, transfer: Transfer) -> None:
        """See :class:`~.movers.base.Mover`."""
        self._movers[room.routes[transfer.to].path.mover].add(room, transfer)

    def withdraw(self, room: PrefillRoom) -> None:
        """See :class:`~.movers.base.Mover`."""
        for mover in self._movers.values():
            if room in mover.lines.of:
                mover.withdraw(room)
        self.forget_prepared(room)

    def forget_prepared(self, room: PrefillRoom) -> None:
        """A room has failed or ended, or its pages are taken away: nothing that is prepared for it is used."""
        if self.staged.prepared is not None:
            self.staged.prepared.forget(room)

    def start(self, budget: Budget) -> list[Post]:
        """See :class:`~.movers.base.Mover`."""
        begun: list[Post] = []
        for mover in self._movers.values():
            if mover.lines.of:
                begun += mover.start(budget)
        return begun

    def look(self) -> None:
        """See :class:`~.movers.base.Mover`."""
        if self.mapped.running:
            self.mapped.look()
        self.staged.look()
