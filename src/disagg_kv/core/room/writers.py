"""What a decode rank knows of the prefill ranks that send a room to it."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define

from ...ids import Epoch, Rank
from ..base import Awaited
from ..wire.frames import Done


@define
class Writer:
    """One prefill rank of the room, elected for some rows or not.

    Args:
        epoch, rank: its incarnation, and its rank in its instance.
        opened: it has opened the room: it has sent a frame about it that does not say that the room is parked.
        transport: what carries its writes; None: neither its ``Expected`` nor its ``Done`` has come.
        done: its ``Done``.
        drained: it has sent ``Drained``.
        gone: it has closed, or its process has ended, and its last writes have landed.
        lost: it is lost, which is no evidence that it writes nothing more.
        open: segments that it has requested and not announced.
        arrived: segments that it has announced.
    """

    epoch: Epoch
    rank: Rank
    opened: bool = False
    transport: str | None = None
    done: Done | None = None
    drained: bool = False
    gone: bool = False
    lost: bool = False
    open: int = 0
    arrived: int = 0

    @property
    def complete(self) -> bool:
        """Whether it is done and all its segments have arrived. A notice may be lost, or come after ``Done``."""
        return self.done is not None and self.arrived == self.done.segments

    @property
    def stop(self) -> int | None:
        """The row at which it ends the room; None: it has not said that."""
        return None if self.done is None else self.done.stop

    @property
    def problem(self) -> str | None:
        """What it did that contradicts its ``Done``; None: nothing does."""
        if self.done is not None and self.arrived > self.done.segments:
            return f"is done after {self.done.segments} segments, and has announced {self.arrived}"
        return None

    @property
    def aux(self) -> bytes | None:
        """Its aux data, once it is done; None: it sends none."""
        return None if self.done is None else self.done.aux

    @property
    def evidence(self) -> bool:
        """Whether it is proved that it writes nothing more for this room."""
        return self.drained or self.gone


def misplaced(ends: Iterable[int | None], awaited: Awaited) -> str | None:
    """What a writer did wrong that ends the room at a row, of those that writers have named; None: nothing."""
    stops = sorted({stop for stop in ends if stop is not None})
    if len(stops) > 1:
        return f"and others end at different rows: {stops}"
    if awaited.stop is not None and stops[0] < awaited.stop:
        return f"ends at row {stops[0]}, not at {awaited.stop}"
    if awaited.stop is None and not awaited.start <= stops[0] <= awaited.most:
        return f"ends at row {stops[0]}; pages are there for {awaited.start}-{awaited.most}"
    if awaited.stop is None and stops[0] < awaited.least:
        return f"ends at row {stops[0]}; decode needs {awaited.least} or more"
    return None


def chosen(results: Iterable[bytes | None]) -> bytes | None:
    """The aux data that count, of those of all writers by rank: the first; None: no writer gives any."""
    return next((aux for aux in results if aux is not None), None)


def unopened(writers: Iterable[Writer]) -> list[int]:
    """The ranks that are not known to have opened the room."""
    return [int(w.rank) for w in writers if not w.opened]


def waited_for(writers: Iterable[Writer]) -> str:
    """Which notices are missing, in words."""
    undone = [int(w.rank) for w in writers if w.done is None]
    words = [f"ranks {undone} are not done"] if undone else []
    for w in writers:
        if w.done is not None and not w.complete:
            words.append(f"rank {w.rank} is done, but {w.arrived} of its {w.done.segments} notices have come")
    return "; ".join(words) or "all ranks are done"
