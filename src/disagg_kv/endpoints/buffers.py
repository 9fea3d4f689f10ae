"""Memory for staging."""

from __future__ import annotations

from ..memory import Buffer, new_buffer
from ..transports import SupportsAllocate, Transport


def new_staging(transport: Transport, nbytes: int, device: str) -> Buffer:
    """Staging memory: the transport's own where it has a say in that (A15), else plain memory on ``device``."""
    if isinstance(transport, SupportsAllocate):
        return transport.allocate(nbytes)
    return new_buffer(nbytes, device)


def exposable(transport: Transport, buffers: list[Buffer]) -> bool:
    """True where peers can write to these buffers once they are registered."""
    if not transport.caps.own_memory_only:
        return True
    return isinstance(transport, SupportsAllocate) and all(transport.allocated(b) for b in buffers)
