"""Writes that wait for an event before they are posted.

The event may be code of the engine. Whatever it raises fails the ticket that waits for it, and no other.
"""

from __future__ import annotations

from ..errors import TransportError
from ..ids import Ticket
from ..memory import Event


def happened(event: Event, name: str, ticket: Ticket) -> bool:
    """Whether an event has happened.

    Args:
        event: a write of ``ticket`` waits for it.
        name: of the transport or the peer, for messages.
        ticket: the ticket that fails with the event.

    Raises:
        TransportError: the event raised; its exception is the cause. Nothing was posted, so the ticket is quiet.
    """
    try:
        return bool(event.query())
    except Exception as error:
        raise TransportError(f"{name}: ticket {ticket}: its event: {error}") from error


def not_posted(name: str, ticket: Ticket) -> TransportError:
    """The error of a ticket that still waits when its transport closes. Nothing was posted, so the ticket is quiet."""
    return TransportError(f"{name}: ticket {ticket}: closed before it was written")
