"""I5: memory that waits for evidence about a peer is listed under that peer's name at any time, and can be freed by it.

This module derives the expected list from the accounts of rooms, leases and slots, and from the writes in flight. It
uses other ways than the endpoint's.
"""

from __future__ import annotations

from collections.abc import Iterator

from disagg_kv.endpoints.decode.rooms import DecodeSide
from disagg_kv.endpoints.prefill.rooms import PrefillSide
from disagg_kv.errors import UnknownNameError
from disagg_kv.ids import Epoch, RoomId

from .cluster import Cluster
from .node import SimNode

Held = tuple[int, int, int, frozenset[RoomId]]
"""Bytes of leases, of pages and of slots, and the rooms that wait."""

Piece = tuple[Epoch, RoomId, int, int, int]
"""The same of one lease, page table or write."""


def check_holders(world: Cluster, node: SimNode) -> None:
    """``peers()`` names exactly the memory that waits for evidence about each peer."""
    view = node.view
    pieces = list(_decode(node, view) if isinstance(view, DecodeSide) else _prefill(view))
    if not pieces and not view.loop.sessions.holding:
        return
    found = {peer.epoch: peer for peer in node.endpoint.peers()}
    named: dict[Epoch, Held] = {
        e: (p.ring_bytes, p.page_bytes, p.slot_bytes, frozenset(p.rooms)) for e, p in found.items() if p.rooms
    }
    wanted = _sums(pieces)
    if named != wanted:
        world.violation("I5", f"{node.address}: {_text(wanted)} wait for evidence, peers() says {_text(named)}")
        return
    for epoch in wanted:
        _named(world, node, epoch)
    _reached(world, node, set(wanted))


def _named(world: Cluster, node: SimNode, epoch: Epoch) -> None:
    """An operator can name it, and it is counted as gone exactly where the peer table does so."""
    peer = next(p for p in node.endpoint.peers() if p.epoch == epoch)
    known = node.view.loop.peers.known(epoch)
    world.mark(f"holder:{peer.state}")
    if known is None or (peer.state in ("lost", "ended")) != known.lost:
        world.violation("I5", f"{node.address}: {epoch.hex()} holds memory, and is listed as {peer.state}")
    try:
        node.view.loop.sessions.find(epoch.hex())
    except UnknownNameError as exc:
        world.violation("I5", f"{node.address}: no operator can free what it keeps: {exc}")


def _reached(world: Cluster, node: SimNode, named: set[Epoch]) -> None:
    """Every process that still writes into a lease in quarantine is named."""
    if not isinstance(node.view, DecodeSide):
        return
    stuck = [one.lease for one in node.view.queue.leases.values() if one.quarantined]
    for op in world.dma.live:
        source = op.source.node
        landed = op.doomed is not None and op.doomed <= world.now
        if op.target is node.transport and op.lease in stuck and not landed and source.epoch not in named:
            world.violation("I5", f"{node.address}: {source.address} writes to a lease in quarantine, and is not named")


def _decode(node: SimNode, view: DecodeSide) -> Iterator[Piece]:
    for key, room in view.rooms.items():
        if room.machine.error is None:
            continue
        inside = room.machine
        pages = 0
        if inside.exposed and room.wanted is not None:
            pages = sum(map(node.memory.table_bytes, room.wanted.tables.values()))
        for writer in inside.writers.values():
            if writer.drained or writer.gone:
                continue
            if inside.exposed and writer.done is None:
                yield writer.epoch, key.room, 0, pages, 0
            for (of, segment), granted in view.queue.leases.items():
                if of == key and writer.rank in (part := inside.inbound[segment]).asked - part.arrived:
                    yield writer.epoch, key.room, granted.lease.nbytes, 0, 0


def _prefill(view: PrefillSide) -> Iterator[Piece]:
    transfers = view.transfers
    failed = {key for key, room in view.rooms.items() if room.machine.error is not None}
    for slot in transfers.staged.slots:
        for post in slot.pins:
            if post.room.key in failed or post.room.key not in view.rooms:
                yield post.transfer.to, post.room.key.room, 0, 0, transfers.staged.slots.slot_bytes
    copies = (post for one in (*transfers.mapped.running, *transfers.mapped.failed) for post in one.posts)
    direct = (post for post in transfers.posts.tickets.values() if post.slot is None)
    for post in {id(post): post for post in (*direct, *copies)}.values():
        if post.room.key in failed or post.room.key not in view.rooms:
            yield post.transfer.to, post.room.key.room, 0, post.transfer.nbytes, 0


def _sums(pieces: list[Piece]) -> dict[Epoch, Held]:
    sums: dict[Epoch, Held] = {}
    for epoch, room, ring, page, slot in pieces:
        before = sums.get(epoch, (0, 0, 0, frozenset[RoomId]()))
        sums[epoch] = (before[0] + ring, before[1] + page, before[2] + slot, before[3] | {room})
    return sums


def _text(held: dict[Epoch, Held]) -> str:
    return str({epoch.decode(): (*of[:3], sorted(room.hex() for room in of[3])) for epoch, of in held.items()})
