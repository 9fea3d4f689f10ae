"""What the library tells about itself while it works: spans and counters.

An :class:`Observer` is called from the endpoint's thread, must return at once and must not raise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from attrs import field, frozen

from .ids import RoomId


@frozen
class Span:
    """One piece of work on one room: ``name`` is ``plan``, ``gather``, ``wire``, ``scatter`` ...

    Times are seconds of the endpoint's clock; ``nbytes`` and ``descriptors`` are 0 where they mean nothing.
    """

    name: str
    room: RoomId
    start: float
    stop: float
    nbytes: int = 0
    descriptors: int = 0
    labels: Mapping[str, str] = field(factory=dict)


class Observer(Protocol):
    """Where spans and counters go."""

    def span(self, span: Span) -> None:
        """A piece of work ended."""

    def count(self, name: str, amount: int = 1) -> None:
        """Something happened ``amount`` times."""


class Silent:
    """The default: nobody looks."""

    def span(self, span: Span) -> None:
        """Drop it."""

    def count(self, name: str, amount: int = 1) -> None:
        """Drop it."""


class Recorder:
    """Keeps everything; for demos, benchmarks and tests, not for a server (it grows without bound)."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.counters: Counter[str] = Counter()

    def span(self, span: Span) -> None:
        """Keep it."""
        self.spans.append(span)

    def count(self, name: str, amount: int = 1) -> None:
        """Add it up."""
        self.counters[name] += amount
