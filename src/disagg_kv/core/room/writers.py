"""What a decode rank knows of the prefill ranks that send a room to it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from attrs import define, field

from ...ids import Epoch, Rank
from ..base import Awaited
from ..wire.frames import MAX_TABLE, AuxPart, Done
from .parts import Parts


@define
class Writer:
    """One prefill rank of the room, elected for some rows or not.

    Args:
        epoch, rank: its life, and its rank in its instance.
        opened: it has opened the room: it has sent a frame about it that does not say that the room is parked.
        lane: what carries its writes; None: neither its ``Expected`` nor its ``Done`` has come.
        done: its ``Done``.
        drained: it has sent ``Drained``.
        gone: its process has ended, and its last writes have landed.
        lost: it is lost, which is no evidence that it writes nothing more.
        open: segments that it has requested and not announced.
        arrived: segments that it has announced.
        aux: the aux data that has come in parts.
        aux_total: bytes of the aux data that comes in parts; 0: none does.
        tables: what is sent to it of the page tables, where they come in parts.
    """

    epoch: Epoch
    rank: Rank
    opened: bool = False
    lane: str | None = None
    done: Done | None = None
    drained: bool = False
    gone: bool = False
    lost: bool = False
    open: int = 0
    arrived: int = 0
    aux: bytearray = field(factory=bytearray)
    aux_total: int = 0
    tables: Parts = field(factory=partial(Parts, MAX_TABLE))

    def take(self, part: AuxPart, most: int) -> str | None:
        """Add a part of its aux data, if it is the next one; returns what is wrong with the part.

        A part that comes after ``Done`` is a repetition.
        """
        if self.done is not None:
            return None
        end = part.offset + len(part.data)
        if part.total > most:
            return f"aux data of {part.total} bytes for rows of {most}"
        if end > part.total or self.aux_total not in (0, part.total):
            return f"bytes {part.offset}-{end} of {part.total} of aux data, after {len(self.aux)} of {self.aux_total}"
        self.aux_total = part.total
        if part.offset == len(self.aux):
            self.aux += part.data
        return None

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
        if self.done is None:
            return None
        if len(self.aux) != self.aux_total:
            return f"is done after {len(self.aux)} of {self.aux_total} aux bytes"
        if self.arrived > self.done.segments:
            return f"is done after {self.done.segments} segments, and has announced {self.arrived}"
        return None

    @property
    def results(self) -> bytes | None:
        """All of its aux data, once it is done; None: it sends none."""
        if self.aux_total:
            return bytes(self.aux)
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
