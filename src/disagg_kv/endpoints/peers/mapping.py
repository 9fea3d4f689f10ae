"""Pools of peers that a transport maps, so that kernels of this process copy into their pages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

import attrs
import msgspec
from attrs import frozen

from ...core import Hello
from ...errors import ConfigurationError, DisaggKVError, TransportError, text_of
from ...ids import RegionId, peer_name
from ...memory import Buffer, MappedPool
from ...strategies import AUTO, TransferPlanner, exposes_pages
from ...transports import Carrier, Flags, SupportsFlags, SupportsMapping, Transports, pack, unpack
from ...transports.flags import SLOT_WORDS, WORD
from .handshake import EndpointInfo, RemoteEndpoint

log = logging.getLogger("disagg_kv")

BLOCK = 32
"""Segments of one room for which one writer may raise flags, each in a slot; of more segments, frames alone tell."""

BLOCK_BYTES = BLOCK * SLOT_WORDS * WORD

BLOCKS = 512
"""Pairs of a room and a writer that have flags at a time; for more, frames alone tell."""


@frozen(eq=False)
class Mapping:
    """A peer's pool.

    Args:
        pool: as it is mapped here; None: it is not.
        refused: why not.
        flags: its flag page, as it is open here; None: it is not, and frames alone announce segments.
    """

    pool: MappedPool | None = None
    refused: str = ""
    flags: Flags | None = None


UNMAPPED = Mapping(refused="no path of this endpoint maps memory")


@frozen
class FlagPlace:
    """Where decode's flag page is: as a transport says it, for peers which that carries."""

    transport: str
    place: bytes


_FLAG_PLACE = msgspec.msgpack.Decoder(FlagPlace)


def open_decode(me: EndpointInfo, carrier: Carrier, hello: Hello) -> Mapping:
    """Make kernels ready for a decode rank, and open what paths use of it; on a thread that has just connected it."""
    remote = RemoteEndpoint.of(hello)
    if not all(map(exposes_pages, me.paths)):
        me.prepare(remote.spec, None)
    if not any(map(exposes_pages, me.paths)):
        return UNMAPPED
    maps = any(path.mover == "mapped" for path in me.paths)
    pool = map_pool(carrier, remote, me.device, partial(me.prepare, remote.spec)) if maps else UNMAPPED
    return attrs.evolve(pool, flags=open_flags(carrier, remote))


def open_flags(carrier: Carrier, remote: RemoteEndpoint) -> Flags | None:
    """The flag page of a connected peer; None: it is not open here. On any thread, as ``connect``."""
    transport, page = carrier.transport, remote.hello.flags
    if not page or not isinstance(transport, SupportsFlags):
        return None
    try:
        there = unpack(page, _FLAG_PLACE)
        if there.transport != carrier.name:
            raise TransportError(f"the peer's flags are of {there.transport!r}, and its transport is {carrier.name!r}")
        return transport.open_flags(carrier.peer, there.place)
    except Exception as exc:
        log.warning("peer %s: frames alone announce segments: %s", peer_name(remote.epoch), text_of(exc))
        return None


def new_flag_page(transports: Transports, usable: Iterable[TransferPlanner]) -> tuple[Buffer | None, bytes]:
    """Decode's flag page, if peers write straight to pages through a transport that has flags, and its place."""
    one = next((each for each in transports if isinstance(each, SupportsFlags)), None)
    if one is None or not any(path.mover == "mapped" for path in usable):
        return None, b""
    page, place = one.flag_page(BLOCKS * BLOCK_BYTES)
    return page, pack(FlagPlace(one.name, place))


def map_pool(carrier: Carrier, remote: RemoteEndpoint, device: str, prepare: Callable[[MappedPool], None]) -> Mapping:
    """Map the pool of a connected peer for kernels on ``device``. May block; on any thread, as ``connect``.

    ``prepare`` makes the kernels ready for it, so that no request waits for that.

    What prevents it is a refusal of the paths that need it, not an error: other paths reach the peer.
    """
    transport, peer = carrier.transport, carrier.peer
    if not isinstance(transport, SupportsMapping):
        return Mapping(refused=f"transport {transport.name!r} does not map memory of peers ({carrier.reason})")
    regions = [RegionId(region) for region in remote.hello.regions]
    if not regions:
        return Mapping(refused="decode's pages are not registered with its transport")
    try:
        refused = transport.unmappable(peer, regions, device)
        if refused is not None:
            return Mapping(refused=refused)
        mapped = MappedPool(remote.site, [transport.map(peer, region, device) for region in regions])
    except DisaggKVError as exc:
        return Mapping(refused=text_of(exc))
    except Exception as exc:
        return Mapping(refused=f"transport {transport.name!r} raised: {text_of(exc)}")
    try:
        prepare(mapped)
    except Exception as exc:
        return Mapping(refused=f"the kernels cannot copy into the mapped pool: {text_of(exc)}")
    return Mapping(mapped)


def check_mapping(wanted: str, usable: Iterable[TransferPlanner], transports: Transports) -> None:
    """Raise a :class:`ConfigurationError` if an explicit path needs a mapping that the transport does not have."""
    if wanted != AUTO and any(path.mover == "mapped" for path in usable) and not transports.maps:
        raise ConfigurationError(
            f"path {wanted!r} copies into mapped pages, but transport {transports.name!r} does not map peers' memory: "
            "take path 'staged', or a transport such as 'shm' or 'cuda_ipc'"
        )
