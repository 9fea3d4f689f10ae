"""What a transition table consists of. The documentation's diagrams are drawn from the tables.

A cell names the method that acts and the states in which it may leave the machine. ``ignore`` changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from attrs import field, frozen

S = TypeVar("S", bound=Enum)


@frozen
class Cell:
    """What happens, by which method, and where it may lead."""

    action: str
    leads_to: frozenset[Enum]
    method: str = field(init=False)

    @method.default
    def _method(self) -> str:
        return f"_on_{self.action}"


Table = Mapping[tuple[Enum, type], Cell]


def table(rows: Mapping[S, Mapping[type, tuple[str, tuple[S, ...]]]]) -> Table:
    """Cells by state and event, from rows of actions and the states to which they lead; none: they stay."""
    return {
        (state, event): Cell(action, frozenset(leads_to) or frozenset({state}))
        for state, row in rows.items()
        for event, (action, leads_to) in row.items()
    }
