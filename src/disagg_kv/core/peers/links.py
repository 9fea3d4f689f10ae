"""The links that an endpoint holds, and which of them it drops. Sans IO.

A link is what an endpoint holds for one life: the connections of its channel and of its transport, and the watch of the
life's process. Links are bounded by a budget. Above it, links are dropped that no room uses, the least recently used
first, and lost lives before all others. A frame counts as a use: a life that has a room asks for heartbeats. A room
uses its peers until it is forgotten here, so until no memory of it waits for evidence. So no link is dropped of a life
that holds a lease, or memory in quarantine.

A life whose link was dropped stays known. It is *parted*: its ``Hello`` and its address stay, so that it may return
without a look-up.

A link that a room needs is made even above the budget. The limit is harder: there is no further link at it, unless one
can be dropped for it.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf

from ...errors import CapacityError
from ...ids import Epoch


class Links:
    """Links by life. All calls cost the same for any number of links.

    Args:
        most: the budget, in links.
        limit: how many there may be if rooms use all of them.
        rest_s: seconds for which a link above the budget stays after its last use: a room may be about to use it.
    """

    def __init__(self, most: float = inf, limit: float = inf, rest_s: float = 1.0) -> None:
        self.most = most
        self.limit = limit
        self._rest_s = rest_s
        self._held: dict[Epoch, None] = {}
        self._idle: OrderedDict[Epoch, float] = OrderedDict()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, epoch: object) -> bool:
        return epoch in self._held

    def open(self, epoch: Epoch, now: float, *, used: bool) -> None:
        """There is a link to a life."""
        self._held[epoch] = None
        if not used:
            self._idle[epoch] = now
            self._idle.move_to_end(epoch)

    def close(self, epoch: Epoch) -> None:
        """There is none any more."""
        self._held.pop(epoch, None)
        self._idle.pop(epoch, None)

    def use(self, epoch: Epoch) -> None:
        """A room uses a link."""
        self._idle.pop(epoch, None)

    def heard(self, epoch: Epoch, now: float) -> None:
        """A frame came: a room of the life may use this endpoint."""
        if epoch in self._idle:
            self._idle[epoch] = now
            self._idle.move_to_end(epoch)

    def release(self, epoch: Epoch, now: float, *, lost: bool) -> None:
        """No room uses a link any more, or its life is lost: then it is the first to be dropped."""
        if epoch in self._held:
            self._idle[epoch] = -inf if lost else now
            self._idle.move_to_end(epoch, last=not lost)

    def surplus(self, now: float) -> Epoch | None:
        """The link that is to be dropped now; None: none is."""
        due = self.next_at()
        return next(iter(self._idle)) if due is not None and due <= now else None

    def next_at(self) -> float | None:
        """When a link is to be dropped; None: not before another event."""
        if len(self._held) <= self.most or not self._idle:
            return None
        return next(iter(self._idle.values())) + self._rest_s

    @property
    def full(self) -> bool:
        """Whether there may be no further link unless one is dropped."""
        return len(self._held) >= self.limit

    def oldest(self) -> Epoch | None:
        """The link that may be dropped in place of a further one; None: rooms use all."""
        return next(iter(self._idle), None)

    def used_up(self) -> CapacityError:
        """Why there is no further link."""
        reason = f"rooms use all {len(self)} links that there may be: see the option link_descriptors"
        return CapacityError(reason)

    def check_integrity(self, known: set[Epoch], used: set[Epoch]) -> None:
        """Raise AssertionError if there is a link to no life, or to one that is used and may be dropped."""
        assert self._held.keys() <= known, "a link leads to no known life"
        assert self._idle.keys() == self._held.keys() - used, "a link in use may be dropped, or an idle one may not"
