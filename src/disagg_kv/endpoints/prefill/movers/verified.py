"""Checksums around a mover: what decode compares is announced with the sums of our pages.

They cover the pages, not what was gathered, so they detect a wrong gather, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import define, field

from ....core import WriteFailed, Wrote
from ....ids import Epoch
from ....kernels import Kernels
from ....planning import PartView, Segment
from ...checksums import PendingChecksums, layer_sums
from ...loop.timing import Budget
from ..room import PrefillRoom
from .base import Mover
from .posts import Moved, Outcome, Post, Posts


@define(eq=False)
class Summing:
    """Sums of one segment; outcomes are ``held`` until they are there."""

    room: PrefillRoom
    pending: PendingChecksums[PartView] | None = None
    found: Mapping[PartView, bytes] = field(factory=dict)
    error: Exception | None = None
    held: list[Moved] = field(factory=list)

    def outcome(self, moved: Moved) -> Moved:
        """How a transfer went, now that its sums are there."""
        segment, sums = moved.event.segment, self.found.get(self.room.routes[moved.to].view)
        event = Wrote(segment, sums) if self.error is None else WriteFailed(segment, self.error, True)
        return Moved(moved.room, moved.to, event)


class VerifiedMover:
    """A :class:`~.base.Mover` around another. Sums are computed from when their transfer has begun.

    Args:
        mover: moves.
        posts: the account of what has begun.
        kernels: sum.
        clock: seconds.
    """

    def __init__(self, mover: Mover, posts: Posts, kernels: Kernels, clock: Callable[[], float]) -> None:
        self._mover = mover
        self.add, self.withdraw = mover.add, mover.withdraw
        self._posts = posts
        self._kernels = kernels
        self._clock = clock
        self._summing: list[Summing] = []
        self._of: dict[tuple[PrefillRoom, Epoch, Segment], Summing] = {}

    def start(self, budget: Budget) -> Sequence[Post]:
        """See :class:`~.base.Mover`."""
        begun = self._mover.start(budget)
        together: dict[tuple[PrefillRoom, Segment, int], list[Post]] = {}
        for post in begun:
            segment = post.transfer.segment
            if post.route.verifies(post.room.key.room, segment):
                together.setdefault((post.room, segment, id(post.route.pool)), []).append(post)
        for (room, segment, _), posts in together.items():
            self._sum(room, segment, posts)
        return begun

    def _sum(self, room: PrefillRoom, segment: Segment, posts: list[Post]) -> None:
        """Begin to sum the parts of one segment, each once however many destinations it has."""
        one, first, started = Summing(room), posts[0], self._clock()
        self._of.update({(room, post.transfer.to, segment): one for post in posts})
        self._posts.reading(room, 1)
        self._summing.append(one)
        self._posts.summing += 1
        try:
            layouts = {post.route.view: post.route.view.layout(segment) for post in posts}
            one.pending = layer_sums(self._kernels, first.route.pool, segment, layouts, first.tables, first.after)
        except Exception as exc:
            one.error = exc
        room.handle.report.spend("checksum", self._clock() - started)
        self._look(one)

    def look(self) -> None:
        """See :class:`~.base.Mover`."""
        self._mover.look()
        for one in list(self._summing):
            self._look(one)

    def _look(self, one: Summing) -> None:
        """Take in sums that are there, and what was held for them."""
        try:
            if one.pending is not None:
                if one.pending.event is not None and not one.pending.event.query():
                    return
                one.found = one.pending.read()
        except Exception as exc:
            one.error = exc
        self._summing.remove(one)
        self._posts.summing -= 1
        self._posts.outcomes += map(one.outcome, one.held)
        self._posts.reading(one.room, -1)

    def outcome(self) -> Outcome | None:
        """See :class:`~.base.Mover`."""
        while isinstance(found := self._mover.outcome(), Moved) and isinstance(found.event, Wrote | WriteFailed):
            one = self._of.pop((found.room, found.to, found.event.segment), None)
            if one is None or isinstance(found.event, WriteFailed):
                return found
            if one not in self._summing:
                return one.outcome(found)
            one.held.append(found)
        return found
