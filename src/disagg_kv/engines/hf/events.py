"""When what a model was asked to compute is done."""

from __future__ import annotations

from ...memory import Event, Mark


def marker(device: str) -> Mark | None:
    """What makes an event behind all that was asked of the stream that is current now, wherever it is called.

    None: what was asked is done already.
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
    """When what was asked of a device so far, on the current stream, is done; None: it is done already.

    The host waits for nothing: on a GPU this records an event.
    """
    if device == "cpu":
        return None
    import torch

    with torch.cuda.device(device):
        event = torch.cuda.Event()
        event.record()
    return event
