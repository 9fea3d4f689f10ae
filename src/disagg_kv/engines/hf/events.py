"""Events at the end of a model's queued work."""

from __future__ import annotations

from ...memory import Event, Mark


def marker(device: str) -> Mark | None:
    """A function that makes an event behind all work of the current stream, on whatever thread it is called.

    None: the work is done already.
    """
    if device == "cpu":
        return None
    import torch

    stream = torch.cuda.current_stream(device)

    def mark() -> Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    return mark


def computed(device: str) -> Event | None:
    """An event at the end of the device's work so far, on the current stream; None: it is done already.

    The host waits for nothing: on a GPU this records an event.
    """
    mark = marker(device)
    return None if mark is None else mark()
