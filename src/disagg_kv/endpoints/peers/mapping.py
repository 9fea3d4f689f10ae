"""Pools of peers that the transport maps, so that kernels of this process copy into their pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import attrs
from attrs import frozen

from ...core import Hello
from ...errors import ConfigurationError, DisaggKVError, text_of
from ...ids import Peer, RegionId
from ...memory import Buffer, MappedPool
from ...strategies import AUTO, TransferPlanner, maps_pages
from ...transports import Bells, SupportsBells, SupportsMapping, Transport
from ...transports.bells import FINAL_SLOTS, SLOT_WORDS, WORD
from .handshake import EndpointInfo, RemoteEndpoint

BLOCK = 32
"""Segments that one writer may announce for one room, each in a slot; of more segments, frames alone tell."""

BLOCK_SLOTS = BLOCK + FINAL_SLOTS
"""Slots that one writer gets for one room: those of segments, then those of its final record."""

BLOCK_BYTES = BLOCK_SLOTS * SLOT_WORDS * WORD


@frozen(eq=False)
class Mapping:
    """A peer's pool.

    Args:
        pool: as it is mapped here; None: it is not.
        refused: why not.
        bells: its board of bells, as it is open here; None: it is not.
        silent: why not.
    """

    pool: MappedPool | None = None
    refused: str = ""
    bells: Bells | None = None
    silent: str = ""


UNMAPPED = Mapping(refused="no path of this endpoint maps memory", silent="no path of this endpoint exposes pages")


def open_decode(me: EndpointInfo, peer: Peer, hello: Hello) -> Mapping:
    """Make kernels ready for a decode rank, and open what paths use of it; on a thread that has just connected it."""
    remote = RemoteEndpoint.of(hello)
    if not all(path.exposes_pages for path in me.paths):
        me.prepare(remote.spec, None)
    if not any(path.exposes_pages for path in me.paths):
        return UNMAPPED
    maps = any(map(maps_pages, me.paths))
    return open_peer(me.transport, peer, remote, me.device, maps, partial(me.prepare, remote.spec))


def open_peer(
    transport: Transport,
    peer: Peer,
    remote: RemoteEndpoint,
    device: str,
    maps: bool,
    prepare: Callable[[MappedPool], None],
) -> Mapping:
    """What of a connected peer's memory this process opens: its pool, if a path ``maps`` it, and its board of bells."""
    pool = map_pool(transport, peer, remote, device, prepare) if maps else UNMAPPED
    bells, silent = open_bells(transport, peer, remote.hello.bells)
    return attrs.evolve(pool, bells=bells, silent=silent)


def open_bells(transport: Transport, peer: Peer, board: bytes) -> tuple[Bells | None, str]:
    """The board of a connected peer; None: frames alone announce segments, and why. On any thread, as ``connect``."""
    if not board:
        return None, "decode has no board of bells"
    if not isinstance(transport, SupportsBells):
        return None, f"transport {transport.name!r} has no bells"
    try:
        return transport.open_bells(peer, board), ""
    except DisaggKVError as exc:
        return None, text_of(exc)
    except Exception as exc:
        return None, f"transport {transport.name!r} raised: {text_of(exc)}"


def new_board(transport: Transport, blocks: int, usable: Iterable[TransferPlanner]) -> tuple[Buffer | None, bytes]:
    """Decode's board of bells, if peers write straight to pages through a transport that has bells, and its place."""
    if not blocks or not isinstance(transport, SupportsBells) or not any(p.exposes_pages for p in usable):
        return None, b""
    return transport.bell_board(blocks * BLOCK_BYTES)


def map_pool(
    transport: Transport, peer: Peer, remote: RemoteEndpoint, device: str, prepare: Callable[[MappedPool], None]
) -> Mapping:
    """Map the pool of a connected peer for kernels on ``device``. May block; on any thread, as ``connect``.

    ``prepare`` makes the kernels ready for it, so that no request waits for that.

    What prevents it is a refusal of the paths that need it, not an error: other paths reach the peer.
    """
    if not isinstance(transport, SupportsMapping):
        return Mapping(refused=f"transport {transport.name!r} does not map memory of peers")
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


def check_mapping(wanted: str, usable: Iterable[TransferPlanner], transport: Transport) -> None:
    """Raise a :class:`ConfigurationError` if an explicit path needs a mapping that the transport does not have."""
    if wanted != AUTO and any(map(maps_pages, usable)) and not isinstance(transport, SupportsMapping):
        raise ConfigurationError(
            f"path {wanted!r} copies into mapped pages, but transport {transport.name!r} does not map memory of peers: "
            "take path 'staged', or a transport such as 'shm' or 'cuda_ipc'"
        )
