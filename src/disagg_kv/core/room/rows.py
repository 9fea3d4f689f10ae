"""The rows of a room on a prefill rank: which are handed over, in which pages, and which layers of them are final."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from enum import Enum, auto
from itertools import takewhile

from attrs import define, field

from ...geometry import PageTable
from ...ids import GroupId, LayerId
from ...planning import Batch, Segment


class Readiness(Enum):
    """Whether a segment can be read."""

    WITHDRAWN = auto()
    """Its pages were taken away and are not there again."""
    AHEAD = auto()
    """Its pages are there, but not all of its rows and layers are computed."""
    READY = auto()


@define(eq=False)
class _Call:
    """Rows that the engine handed over by one call, and the layers of them that are final; ``whole``: all layers."""

    start: int
    stop: int
    whole: bool = False
    layers: set[LayerId] = field(factory=set)

    def final(self, segment: Segment, tokenless: Collection[LayerId]) -> bool:
        return all(layer in self.layers or layer in tokenless for layer in segment.layers)


@define(eq=False)
class Chunk:
    """Rows that are cut into segments together.

    Args:
        start, stop: which rows.
        tables: their pages; None after a withdrawal, until they are given again.
        calls: the calls that they came by.
        batch: the forward pass that computes them.
    """

    start: int
    stop: int
    tables: Mapping[GroupId, PageTable] | None
    calls: tuple[_Call, ...] = ()
    batch: Batch = field(factory=Batch)


class Rows:
    """What the engine has handed over so far, chunk by chunk.

    After a withdrawal the engine hands rows over again, by calls that need not end where the earlier ones did. So each
    call has a number, and a chunk is final when all calls are final that its rows came by.

    ``stop`` is one past the last row handed over.

    Args:
        tokenless: layers that keep only a state and nothing per token: no row waits for them.
    """

    def __init__(self, tokenless: Collection[LayerId] = ()) -> None:
        self._tokenless = frozenset(tokenless)
        self.chunks: list[Chunk] = []
        self.states: Chunk | None = None
        self._calls: dict[int, _Call] = {}
        self._order: list[_Call] = []
        # As the two lists above: looked up many times for each segment.
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._given = 0
        self.stop = 0

    def add(
        self,
        call_id: int,
        start: int,
        stop: int,
        tables: Mapping[GroupId, PageTable],
        *,
        ready: bool,
        batch: Batch | None = None,
    ) -> Chunk | None:
        """The rows ``[start, stop)`` come by a call of number ``call_id``; the new chunk, if there are new rows.

        Args:
            call_id: never used before.
            start: first row of this call.
            stop: one past its last.
            tables: pages of these rows and of those handed over since the last withdrawal.
            ready: True: all layers are final.
            batch: the forward pass that computes them.
        """
        self._calls[call_id] = one = _Call(start, stop, whole=ready)
        self._order.append(one)
        self._stops.append(stop)
        # Rows are handed over in order, so chunks get their pages again in order: each is visited once.
        while self._given < len(self.chunks):
            chunk = self.chunks[self._given]
            if chunk.stop > stop or any(t.first > chunk.start for t in tables.values()):
                break
            chunk.tables, chunk.calls = tables, self._calls_of(chunk.start, chunk.stop)
            self._given += 1
        if stop <= self.stop:
            return None
        chunk = Chunk(self.stop, stop, tables, self._calls_of(self.stop, stop), batch or Batch())
        self.chunks.append(chunk)
        self._starts.append(chunk.start)
        self._given, self.stop = len(self.chunks), stop
        return chunk

    def _calls_of(self, start: int, stop: int) -> tuple[_Call, ...]:
        """The calls since the last withdrawal that rows came by; each begins where the one before ended."""
        first = bisect_right(self._stops, start)
        return tuple(takewhile(lambda call: call.start < stop, self._order[first:]))

    def ready(self, call_id: int, layers: Collection[LayerId] | None) -> None:
        """These layers (None: all) of the rows of a call are final; nothing, if its pages were withdrawn since."""
        known = self._calls.get(call_id)
        if known is None:
            return
        if layers is None:
            known.whole = True
        else:
            known.layers.update(layers)

    def awaited(self, layers: Collection[int]) -> frozenset[LayerId]:
        """Those of some layers that rows wait for."""
        return frozenset(map(LayerId, layers)) - self._tokenless

    def give_states(self, slots: Mapping[GroupId, PageTable]) -> None:
        """The room's states are final, and lie in these slots: they are a chunk of their own, of no tokens."""
        self.states = Chunk(0, 0, slots)

    def withdraw(self) -> None:
        """Forget all pages, and which layers were final."""
        self._calls.clear()
        self._order.clear()
        self._stops.clear()
        self._given = 0
        for chunk in self._all():
            chunk.tables, chunk.calls = None, ()

    def _all(self) -> list[Chunk]:
        return self.chunks if self.states is None else [*self.chunks, self.states]

    def clear(self) -> None:
        """The room has ended."""
        self._calls.clear()
        self._order.clear()
        self._stops.clear()
        self._given = self.stop = 0
        self.chunks.clear()
        self._starts.clear()
        self.states = None

    def chunk(self, segment: Segment) -> Chunk:
        """The chunk that a segment lies in."""
        if segment.state:
            assert self.states is not None
            return self.states
        return self.chunks[bisect_right(self._starts, segment.start) - 1]

    def readiness(self, segment: Segment) -> Readiness:
        """Whether a segment can be read. States that are to come lie ahead as long as the room has its pages."""
        if segment.state and self.states is None:
            withdrawn = bool(self.chunks) and self.chunks[-1].tables is None
            return Readiness.WITHDRAWN if withdrawn else Readiness.AHEAD
        chunk = self.chunk(segment)
        if chunk.tables is None:
            return Readiness.WITHDRAWN
        for call in chunk.calls:
            if not (call.whole or call.final(segment, self._tokenless)):
                return Readiness.AHEAD
        return Readiness.READY

    def missing(self, layers: Collection[LayerId]) -> str:
        """The first rows that are not final, and in which of these layers; empty if there are none."""
        for chunk in self._all():
            if chunk.tables is None:
                return (
                    "states were withdrawn"
                    if chunk is self.states
                    else f"rows {chunk.start}-{chunk.stop} were withdrawn"
                )
            for call in chunk.calls:
                late = [] if call.whole else sorted(set(layers) - call.layers - self._tokenless)
                if late:
                    return f"rows {call.start}-{call.stop} never became final in layers {late}"
        return ""
