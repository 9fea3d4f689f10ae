"""The lanes of a side, as its descriptor shows them to peers."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from attrs import frozen

from ..errors import RemoteProtocolError
from .descriptor import Descriptor, decode, unpack

JOIN = "+"
"""Between the names of lanes."""

KIND = "lanes"
"""The transport that a combined descriptor names."""

UNNUMBERED = -1
"""The serial of a descriptor around that of one transport, whose serial only its lane can read."""

MOST_LANES = 8
"""More lanes than that are refused, of this side and of a peer."""


@frozen
class Offer:
    """One lane, as its owner describes it to peers.

    Args:
        name: of the lane.
        descriptor: its own; empty where peers cannot use it.
        numbers: pairs of a region's id here and the lane's; empty where all are equal.
        refused: why peers cannot use it.
    """

    name: str
    descriptor: bytes = b""
    numbers: tuple[tuple[int, int], ...] = ()
    refused: str = ""


_OFFERS = msgspec.msgpack.Decoder(tuple[Offer, ...])


def is_combined(descriptor: bytes) -> bool:
    """Whether it is one of several lanes."""
    try:
        decode(descriptor, KIND)
    except RemoteProtocolError:
        return False
    return True


def read(descriptor: bytes) -> tuple[Descriptor, dict[str, Offer]]:
    """A descriptor of several lanes, and what it offers by name.

    Raises:
        RemoteProtocolError: it is none, or has impossible lanes.
    """
    found = decode(descriptor, KIND)
    offers = unpack(found.blob, _OFFERS)
    named = {offer.name: offer for offer in offers}
    if len(named) != len(offers) or len(offers) > 2 * MOST_LANES:
        raise RemoteProtocolError(f"{len(offers)} transports in a descriptor, and {len(named)} names of transports")
    return found, named


def listed(lanes: Mapping[str, str]) -> str:
    """Lanes, each with what is to be said about it, for messages."""
    return ", ".join(f"{name} ({why})" if why else name for name, why in lanes.items()) or "no transport"
