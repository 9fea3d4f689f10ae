"""Events that combine other events, and those for which a GPU can wait by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from .base import Event


@runtime_checkable
class CudaEvent(Event, Protocol):
    """An event that CUDA streams can wait for; ``torch.cuda.Event`` is one."""

    @property
    def cuda_event(self) -> int:
        """The driver's handle (``CUevent``); 0: it was never recorded, so there is nothing to wait for."""
        ...


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
