"""How fast each lane carries bytes, for the choice of paths: gathers, plans and small transfers do not count."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define

from ...ids import Epoch
from ...planning import MeasuredRates
from ...planning.cost import rounded, shows_rate
from ...transports import Lane
from .throughput import LONG_S, NEW

KNOWN_S = 60.0
"""Seconds for which a rate counts that is not measured again. Then a path that lost by it is compared by nominal costs,
and so may be measured once more."""


@define
class _Window:
    """What moves to one peer: how many posts, since when, and what those that have ended since then had."""

    since: float
    moving: int = 0
    descriptors: int = 0
    nbytes: int = 0


class LaneRates:
    """Bytes per second while posts were on the wire: of each lane's writes, and of copies into mapped pages.

    A thread that looks late, or another peer's traffic, makes a post slower, and nothing makes it faster. So a higher
    rate counts at once, and a lower one little by little. There are two rates per lane, of few lanes. Each peer is
    measured by itself: a write to one that hangs says nothing of the others.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._windows: dict[tuple[Epoch, str, bool], _Window] = {}
        self._rates: dict[tuple[str, bool], tuple[float, float]] = {}

    def begins(self, to: Epoch, lane: Lane, mapped: bool, at: float) -> None:
        """A post to a peer is on the wire since ``at``; ``mapped``: a kernel copies into mapped pages."""
        window = self._windows.setdefault((to, lane.name, mapped), _Window(at))
        window.moving += 1

    def ends(self, to: Epoch, lane: Lane, mapped: bool, at: float, descriptors: int, nbytes: int) -> None:
        """It has ended; what failed has moved 0 bytes."""
        window = self._windows[to, lane.name, mapped]
        window.moving -= 1
        window.descriptors += descriptors
        window.nbytes += nbytes
        if not window.moving:
            del self._windows[to, lane.name, mapped]
        elif at - window.since < LONG_S:
            return
        if at > window.since and shows_rate(
            window.descriptors, window.nbytes, lane.caps.write_s, lane.caps.bytes_per_s
        ):
            new, before = window.nbytes / (at - window.since), self._known(lane.name, mapped)
            mixed = new if before is None or new > before else (1 - NEW) * before + NEW * new
            self._rates[lane.name, mapped] = mixed, at
        window.since, window.descriptors, window.nbytes = at, 0, 0

    def of(self, lane: Lane) -> MeasuredRates:
        """What is known of a lane, in coarse steps."""
        writes, copies = (self._known(lane.name, mapped) for mapped in (False, True))
        return MeasuredRates(*(None if rate is None else rounded(rate) for rate in (writes, copies)))

    def _known(self, name: str, mapped: bool) -> float | None:
        rate, at = self._rates.get((name, mapped), (None, 0.0))
        return rate if self._clock() - at < KNOWN_S else None
