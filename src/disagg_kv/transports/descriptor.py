"""The value that one transport gives another before the first write: versioned MessagePack, compressed.

A module that defines a type makes its decoder on import. MessagePack's library inspects a type when its first decoder
is made. A second thread that makes one meanwhile uses a half-built result, and crashes.
"""

from __future__ import annotations

import zlib
from typing import TypeVar

import msgspec
from attrs import frozen

from ..errors import RemoteProtocolError
from ..ids import Peer, RegionId

T = TypeVar("T")

VERSION = 1
"""Version of the encoding, also of what transports put into a ``blob``; a descriptor of another one is refused."""

_MAGIC = b"disagg_kv.transport"


@frozen
class Region:
    """One region, as its owner describes it to peers.

    Args:
        id: the owner's name for it.
        nbytes: its length.
        device: the kind and index of memory, as in ``Buffer``.
        base: the owner's address, for transports that write by address; else 0.
        blob: what else the transport needs in order to reach it; empty where peers cannot write to it.
    """

    id: RegionId
    nbytes: int
    device: str = "cpu"
    base: int = 0
    blob: bytes = b""


@frozen
class Descriptor:
    """One incarnation of a transport and the regions it had registered when this was made.

    Args:
        transport: its name; both sides must run the same transport.
        incarnation: drawn at random by each transport object, so a restarted peer is another peer.
        serial: grows with each change of the regions; of two descriptors the later one counts.
        regions: every live region.
        blob: what else the transport needs in order to connect.
    """

    transport: str
    incarnation: Peer
    serial: int = 0
    regions: tuple[Region, ...] = ()
    blob: bytes = b""


MAX_BYTES = 8 << 20
"""Bytes of a descriptor before compression: regions of a pool are much alike, and few bytes may unfold to many."""

MOST_REGIONS, MOST_BYTES = 4096, 1 << 45
"""What a peer's regions may be, in number and together: a transport maps or opens them when it connects."""

_DECODER = msgspec.msgpack.Decoder(Descriptor)
_ENCODER = msgspec.msgpack.Encoder()


def encode(descriptor: Descriptor) -> bytes:
    """The bytes that travel to peers."""
    return _MAGIC + bytes([VERSION]) + zlib.compress(pack(descriptor))


def later_version(data: bytes) -> bytes | None:
    """A descriptor of :func:`encode` with the number of the next version; None: it is none. For tests."""
    if not data.startswith(_MAGIC):
        return None
    return _MAGIC + bytes([VERSION + 1]) + data[len(_MAGIC) + 1 :]


def pack(value: object) -> bytes:
    """A value as MessagePack; for what a transport puts into a ``blob``."""
    return _ENCODER.encode(value)


def unpack(data: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """A value from MessagePack; for what a transport puts into a ``blob``.

    Args:
        data: what :func:`pack` gave.
        decoder: of the value's type, made when a module is imported: threads may share it then.

    Raises:
        RemoteProtocolError: it is no such value.
    """
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        kind = getattr(decoder.type, "__name__", str(decoder.type))
        raise RemoteProtocolError(f"{len(data)} bytes cannot be read as a {kind}: {error}") from error


def _unfolded(data: bytes) -> bytes:
    unfolding = zlib.decompressobj()
    try:
        unfolded = unfolding.decompress(data, MAX_BYTES)
    except zlib.error as error:
        raise RemoteProtocolError(f"transport descriptor of {len(data)} bytes cannot be unfolded: {error}") from error
    if not unfolding.eof or unfolding.unused_data:
        raise RemoteProtocolError(f"transport descriptor of {len(data)} bytes that is cut short, or has a tail")
    return unfolded


def decode(data: bytes, transport: str) -> Descriptor:
    """The descriptor in ``data``, checked.

    Raises:
        RemoteProtocolError: garbage, another version, or a descriptor of another transport than ``transport``.
    """
    if not data.startswith(_MAGIC) or len(data) == len(_MAGIC):
        raise RemoteProtocolError(f"not a transport descriptor: {len(data)} bytes that begin with {data[:8]!r}")
    version = data[len(_MAGIC)]
    if version != VERSION:
        raise RemoteProtocolError(f"transport descriptor of version {version}, this side speaks version {VERSION}")
    found = unpack(_unfolded(data[len(_MAGIC) + 1 :]), _DECODER)
    if found.transport != transport:
        raise RemoteProtocolError(f"descriptor of transport {found.transport!r} given to transport {transport!r}")
    if len(found.incarnation) != 16:
        raise RemoteProtocolError(f"transport descriptor with an incarnation of {len(found.incarnation)} bytes, not 16")
    nbytes = sum(region.nbytes for region in found.regions)
    if len(found.regions) > MOST_REGIONS or nbytes > MOST_BYTES:
        raise RemoteProtocolError(
            f"transport descriptor of {len(found.regions)} regions with {nbytes} bytes; "
            f"at most {MOST_REGIONS} with {MOST_BYTES} are taken"
        )
    for region in found.regions:
        if not 0 <= region.id < 1 << 31 or not 0 < region.nbytes < 1 << 62 or not 0 <= region.base < 1 << 63:
            raise RemoteProtocolError(f"transport descriptor with an impossible region: {region}")
    if len({region.id for region in found.regions}) != len(found.regions):
        raise RemoteProtocolError("transport descriptor that names a region twice")
    return found
