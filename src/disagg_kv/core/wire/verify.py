"""Which segments are compared end to end. Either side may ask; both come to the same answer."""

from __future__ import annotations

import hashlib
import struct
from typing import Literal, get_args

from ... import arguments
from ...errors import UnknownNameError
from ...ids import RoomId
from ...planning import Segment

Verify = Literal["off", "sampled", "full"]
"""How much a side wants compared: nothing, about one segment in :data:`SAMPLED`, or all."""

SAMPLED = 16

SUM_BYTES = 8
"""Bytes of a layer's checksum on the wire, little-endian; ``ChunkReady`` has one for every layer of its segment."""


def check_verify(verify: str) -> None:
    """Raise an :class:`UnknownNameError` for what is no :data:`Verify`."""
    if arguments.text(verify, "verify") not in get_args(Verify):
        raise UnknownNameError("verify", verify, get_args(Verify))


def unlike(room: RoomId, segment: Segment, sums: bytes | None, asked: Verify) -> str | None:
    """The error in the checksums that came with a segment, or in their absence; None: no error."""
    if sums is None:
        return "no checksums" if verified(room, segment, asked) else None
    if len(sums) != SUM_BYTES * len(segment.layers):
        return f"checksums of {len(sums)} bytes for {len(segment.layers)} layers"
    return None


def verified(room: RoomId, segment: Segment, *asked: Verify) -> bool:
    """True if a segment is compared, given what each side asks for; a stable hash draws the samples."""
    if "full" in asked:
        return True
    if "sampled" not in asked:
        return False
    where = struct.pack("<4Q?", segment.start, segment.stop, segment.first, segment.last, segment.state)
    return hashlib.blake2b(room + where, digest_size=1).digest()[0] % SAMPLED == 0
