"""Writes straight from a room's pages into exposed pages of decode ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....core import Transfer
from ....errors import LocalProtocolError
from ....geometry import I32
from ....ids import Epoch
from ....planning import Segment, Writes
from ....strategies import Tables
from ...loop.event_loop import EventLoop
from ...loop.timing import Budget
from ..room import PrefillRoom
from ..routes import Route
from .posts import Post, Posts, take_out


class PageLines:
    """Transfers that have not begun: a line per room and destination, served in the order in which they came.

    A transfer that comes again takes the place of the earlier one.

    ``of`` has the lines of a room.
    """

    def __init__(self) -> None:
        self.of: dict[PrefillRoom, dict[Epoch, dict[Segment, Transfer]]] = {}

    def add(self, room: PrefillRoom, transfer: Transfer) -> None:
        """It waits from now on."""
        self.of.setdefault(room, {}).setdefault(transfer.to, {})[transfer.segment] = transfer

    def remove(self, room: PrefillRoom, to: Epoch, segment: Segment) -> None:
        """It begins, or is not wanted any more."""
        take_out(self.of[room], to, segment)
        if not self.of[room]:
            del self.of[room]

    def forget(self, room: PrefillRoom) -> None:
        """Nothing of a room is wanted any more."""
        self.of.pop(room, None)

    def lines(self) -> Sequence[tuple[PrefillRoom, Epoch, Sequence[Transfer]]]:
        """Rooms and destinations between which something waits, and what, in order."""
        return [(room, to, tuple(line.values())) for room, lines in self.of.items() for to, line in lines.items()]


class DirectMover:
    """A :class:`~.base.Mover`.

    Of a room and a destination only the first transfer is considered: rows become final in order.

    Args:
        loop: the endpoint's.
        posts: the account of what has begun.
    """

    def __init__(self, loop: EventLoop, posts: Posts) -> None:
        self._posts = posts
        self._regions: I32 = np.array(loop.me.regions, np.int32)
        self.lines = PageLines()
        self.add, self.withdraw, self.outcome = self.lines.add, self.lines.forget, posts.outcome
        self.waits = False
        """Whether a transfer waits for an event that only polling finds."""

    def look(self) -> None:
        """Nothing to do: the transport reports the ends of its writes."""

    def start(self, budget: Budget) -> list[Post]:
        """See :class:`~.base.Mover`."""
        begun: list[Post] = []
        self.waits = False
        for room, to, transfers in self.lines.lines():
            for transfer in transfers:
                try:
                    after = room.ready_events.before(transfer.segment)
                    queued = room.routes[to].carrier.caps.waits_events
                    waits = after is not None and not queued and not after.query()
                except Exception as exc:
                    self.lines.remove(room, to, transfer.segment)
                    self._posts.broken(room, exc)
                    continue
                self.waits |= waits
                if waits or not budget.take():
                    break
                self.lines.remove(room, to, transfer.segment)
                one = self._posts.begin(room, transfer, self._plan)
                if one is not None:
                    post, writes = one
                    self._posts.post(post, writes, post.after if queued else None)
                    begun.append(post)
                    if post.route.verifies(room.key.room, transfer.segment):
                        return begun  # to sum it is a piece of work of its own
        return begun

    def _plan(self, route: Route, transfer: Transfer, tables: Tables) -> Writes:
        """The writes, with the regions of both sides."""
        plan = route.plan(Writes, "writes into pages", transfer, tables)
        if route.pool.site.converts is not None:
            raise LocalProtocolError(f"path {route.path.name!r} plans writes of rows that decode converts")
        return plan.renamed(self._regions, np.array(route.remote.hello.regions, np.int32))
