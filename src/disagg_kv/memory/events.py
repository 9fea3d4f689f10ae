"""Events that combine other events, and waiting for one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .base import Event


class All:
    """Several events as one."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = tuple(events)

    def query(self) -> bool:
        """True once all have happened."""
        return all(event.query() for event in self.events)

    def synchronize(self) -> None:
        """Block until all have happened."""
        for event in self.events:
            event.synchronize()


def wait_for(event: Event | None) -> None:
    """Block until it has happened; None: it has."""
    if event is not None:
        event.synchronize()


def parts(event: Event | None) -> Iterator[Event]:
    """The events that this event combines; empty for None."""
    if isinstance(event, All):
        for one in event.events:
            yield from parts(one)
    elif event is not None:
        yield event
