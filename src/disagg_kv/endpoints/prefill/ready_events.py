"""Events that are left to a GPU: rows count as final at once, and whoever copies them comes after the event."""

from __future__ import annotations

from collections.abc import Collection

from attrs import frozen

from ...ids import LayerId
from ...memory import All, Event
from ...planning import Segment

BLOCK = 1024
"""Rows whose gates are kept together."""


@frozen
class _Gate:
    start: int
    stop: int
    layers: frozenset[LayerId] | None
    event: Event

    def bars(self, segment: Segment) -> bool:
        """Whether any cell of the segment is final only at the event."""
        if segment.stop <= self.start or self.stop <= segment.start:
            return False
        return self.layers is None or not self.layers.isdisjoint(segment.layers)


class Gates:
    """Of one room. A segment is compared with the gates of its own rows, however many there are of others."""

    def __init__(self) -> None:
        self._gates: list[_Gate] = []
        self._near: dict[int, list[_Gate]] = {}
        self._most = 1

    def add(self, start: int, stop: int, layers: Collection[LayerId] | None, event: Event) -> None:
        """These layers (None: all) of the rows ``[start, stop)`` are final at ``event``.

        Past ones are forgotten when there are twice as many as were pending the last time, so that a call asks about
        one event or two on average, however many are pending.
        """
        if len(self._gates) >= self._most:
            pending = [gate for gate in self._gates if not gate.event.query()]
            self._most = max(1, 2 * len(pending))
            self._gates, self._near = [], {}
            for gate in pending:
                self._put(gate)
        self._put(_Gate(start, stop, None if layers is None else frozenset(layers), event))

    def _put(self, gate: _Gate) -> None:
        self._gates.append(gate)
        for block in _blocks(gate.start, gate.stop):
            self._near.setdefault(block, []).append(gate)

    def before(self, segment: Segment) -> Event | None:
        """What a copy of the segment has to come after; None: nothing."""
        if not self._near:
            return None
        near = (gate for block in _blocks(segment.start, segment.stop) for gate in self._near.get(block, ()))
        events = list({id(gate.event): gate.event for gate in near if gate.bars(segment)}.values())
        return events[0] if len(events) == 1 else All(events) if events else None


def _blocks(start: int, stop: int) -> range:
    return range(start // BLOCK, -(-stop // BLOCK))
