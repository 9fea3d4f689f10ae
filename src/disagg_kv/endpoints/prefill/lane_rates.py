"""How fast each lane carries bytes, for the choice of paths: gathers, plans and small transfers do not count."""

from __future__ import annotations

from collections import defaultdict

from attrs import define

from ...planning import MeasuredRates
from ...planning.cost import rounded, shows_rate
from ...transports import Lane
from .throughput import LONG_S, NEW


@define
class _Window:
    """What moves over one lane: how many posts, since when, and what those that have ended since then had."""

    bytes_per_s: float | None = None
    moving: int = 0
    since: float = 0.0
    descriptors: int = 0
    nbytes: int = 0


class LaneRates:
    """Bytes per second while posts were on the wire: of each lane's writes, and of copies into mapped pages.

    A thread that looks late, or another peer's traffic, makes a post slower, and nothing makes it faster. So a higher
    rate counts at once, and a lower one little by little. There are two rates per lane, of few lanes.
    """

    def __init__(self) -> None:
        self._windows: defaultdict[tuple[str, bool], _Window] = defaultdict(_Window)

    def begins(self, lane: Lane, mapped: bool, at: float) -> None:
        """A post is on the wire since ``at``; ``mapped``: a kernel copies into mapped pages."""
        window = self._windows[lane.name, mapped]
        if window.moving == 0:
            window.since = max(window.since, at)
        window.moving += 1

    def ends(self, lane: Lane, mapped: bool, at: float, descriptors: int, nbytes: int) -> None:
        """It has ended; what failed has moved 0 bytes."""
        window = self._windows[lane.name, mapped]
        window.moving -= 1
        window.descriptors += descriptors
        window.nbytes += nbytes
        if window.moving and at - window.since < LONG_S:
            return
        if at > window.since and shows_rate(
            window.descriptors, window.nbytes, lane.caps.write_s, lane.caps.bytes_per_s
        ):
            new, before = window.nbytes / (at - window.since), window.bytes_per_s
            window.bytes_per_s = new if before is None or new > before else (1 - NEW) * before + NEW * new
        window.since, window.descriptors, window.nbytes = at, 0, 0

    def of(self, lane: Lane) -> MeasuredRates:
        """What is known of a lane, in coarse steps."""
        writes, copies = (self._known(lane.name, mapped) for mapped in (False, True))
        return MeasuredRates(writes, copies)

    def _known(self, name: str, mapped: bool) -> float | None:
        window = self._windows.get((name, mapped))
        return None if window is None or window.bytes_per_s is None else rounded(window.bytes_per_s)
