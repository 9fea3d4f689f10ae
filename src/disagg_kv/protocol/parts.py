"""What a room on a decode rank knows of its writers, and of the segments between first word and landing."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from attrs import define, field

from ..ids import Epoch, Rank
from ..staging import Lease
from .base import Awaited
from .frames import AuxPart, Done


@define
class Writer:
    """One prefill rank, elected or not.

    Args:
        epoch, rank: who.
        done: what it said last.
        drained, gone, lost: how it ended.
        open: segments that it has asked for and not announced.
        arrived: segments of which it has said that its part is there.
        aux: what has come of aux data that it sends in parts, of ``aux_total`` bytes; 0: it sends none so.
    """

    epoch: Epoch
    rank: Rank
    done: Done | None = None
    drained: bool = False
    gone: bool = False
    lost: bool = False
    open: int = 0
    arrived: int = 0
    aux: bytearray = field(factory=bytearray)
    aux_total: int = 0

    def take(self, part: AuxPart, most: int) -> str | None:
        """Add a part of its aux data, if it is the next; what is wrong with it, where something is.

        Whoever is done has sent all of it: what comes later is a repetition.
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
        """True: it is done, and all that it announced has been heard; a notice may be lost, or come after ``Done``."""
        return self.done is not None and self.arrived == self.done.segments

    @property
    def problem(self) -> str | None:
        """What contradicts its last word, where something does."""
        if self.done is None:
            return None
        if len(self.aux) != self.aux_total:
            return f"rank {self.rank} is done after {len(self.aux)} of {self.aux_total} aux bytes"
        if self.arrived > self.done.segments:
            return f"rank {self.rank} is done after {self.done.segments} segments, and has announced {self.arrived}"
        return None

    @property
    def results(self) -> bytes | None:
        """All of its aux data, once it is done; None: it has none."""
        if self.aux_total:
            return bytes(self.aux)
        return None if self.done is None else self.done.aux

    @property
    def evidence(self) -> bool:
        """True: it writes nothing more for this room."""
        return self.drained or self.gone


def misplaced(writers: Iterable[Writer], awaited: Awaited) -> str | None:
    """What is wrong with the row at which those who are done end the room, where something is."""
    stops = sorted({w.done.stop for w in writers if w.done is not None})
    if len(stops) > 1:
        return f"prefill ranks end at different rows: {stops}"
    if awaited.stop is not None and stops[0] < awaited.stop:
        return f"prefill ends at row {stops[0]}, not at {awaited.stop}"
    if awaited.stop is None and not awaited.start <= stops[0] <= awaited.most:
        return f"prefill ends at row {stops[0]}; pages are there for {awaited.start}-{awaited.most}"
    return None


def waited_for(writers: Iterable[Writer]) -> str:
    """What writers have not said yet, in words."""
    undone = [int(w.rank) for w in writers if w.done is None]
    words = [f"ranks {undone} are not done"] if undone else []
    for w in writers:
        if w.done is not None and not w.complete:
            words.append(f"rank {w.rank} is done, but {w.arrived} of its {w.done.segments} notices have come")
    return "; ".join(words) or "all ranks are done"


@define
class InboundSegment:
    """A segment between the first word about it and its landing.

    Args:
        writers: the ranks that have bytes in it.
        offsets: where in the lease, and how many.
        nbytes: of the lease.
        asker: on whose behalf the ring is asked.
        lease: what the ring granted.
        asks: the number of each writer's last request.
        asked: writers that may write to the lease, now or once it is granted.
        arrived: writers whose bytes are there; staged: those of them whose bytes are in the lease.
        sums: what writers say that their bytes sum up to, where they are compared.
        prepared: True once whoever scatters was told where the parts of this lease will lie.
        scattering: True while the lease, or what it brought, is read.
    """

    writers: tuple[Rank, ...]
    offsets: dict[Rank, tuple[int, int]]
    nbytes: int
    asker: Epoch
    lease: Lease | None = None
    asks: dict[Rank, int] = field(factory=dict)
    asked: set[Rank] = field(factory=set)
    arrived: set[Rank] = field(factory=set)
    staged: set[Rank] = field(factory=set)
    sums: dict[Rank, bytes] = field(factory=dict)
    prepared: bool = False
    scattering: bool = False

    def places(self, of: Collection[Rank]) -> dict[Rank, int]:
        """Where in the ring the parts of some of the writers begin."""
        base = 0 if self.lease is None else self.lease.offset
        return {rank: base + self.offsets[rank][0] for rank in sorted(of)}

    def newly_known(self) -> bool:
        """True once per lease: as soon as all writers have asked for it, and so have said how they send."""
        new = self.lease is not None and not self.prepared and self.asked.issuperset(self.writers)
        self.prepared |= new
        return new

    def granted(self, rank: Rank, lease: int) -> bool:
        """True if a writer may have written under this lease."""
        return self.lease is not None and self.lease.start == lease and rank in self.asked

    def check_integrity(self) -> None:
        """Raise AssertionError if the accounts contradict each other."""
        assert self.arrived.issubset(self.writers)
        assert self.staged <= self.arrived <= self.asked | (self.arrived - self.staged)
        assert self.lease is not None or not self.staged
        assert self.asked <= self.asks.keys()
        assert self.lease is None or self.asked

    def stale(self, rank: Rank, ask: int) -> bool:
        """True for a request that was given back already: it came late or twice."""
        last = self.asks.get(rank, -1)
        return ask < last or (ask == last and rank not in self.asked)


def leased(parts: Iterable[InboundSegment], rank: Rank) -> int:
    """Bytes of leases that this writer may still write to, as far as its notices say."""
    return sum(part.nbytes for part in parts if part.lease is not None and rank in part.asked - part.arrived)
