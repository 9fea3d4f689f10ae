"""The accounts of the parts of a side, compared with each other; each part checks its own.

What is prepared belongs to rooms that may still succeed, and lies in their leases. A post is in hand exactly while
something may read its pages or its slot.
"""

from __future__ import annotations

from collections.abc import Container
from math import inf

from disagg_kv.endpoints.decode.rooms import DecodeSide
from disagg_kv.endpoints.prefill.movers.mapped import Copying, MappedMover
from disagg_kv.endpoints.prefill.movers.prepared import PreparedGathers
from disagg_kv.endpoints.prefill.movers.staged import StagedMover
from disagg_kv.endpoints.prefill.room import PrefillRoom
from disagg_kv.endpoints.prefill.rooms import PrefillSide


def check_side(side: PrefillSide | DecodeSide, since: float = -inf) -> None:
    """Raise AssertionError if the accounts contradict each other; of rooms that took an event ``since`` then.

    Call it on the thread that steps the endpoint.
    """
    side.check_integrity(since)
    if isinstance(side, DecodeSide):
        _check_scatters(side)
        return
    _check_staged(side.transfers.staged, side)
    _check_mapped(side.transfers.mapped, side)
    if side.transfers.staged.prepared is not None:
        hopeful = {room for room in side.rooms.values() if room.machine.error is None}
        check_gathers(side.transfers.staged.prepared, hopeful)


def _check_scatters(side: DecodeSide) -> None:
    """All scatters that are prepared, or will be, lie in a lease of a room."""
    waiting, ready = side.scatters.prepared.waiting, side.scatters.prepared.ready
    assert not waiting.keys() & ready.keys()
    assert all(side.rooms.get(room.key) is room for room, _ in waiting.values()), (
        "to be prepared for a room that is over"
    )
    places = [(at, effect.parts) for at, (_, effect) in waiting.items()]
    for at, parts in [*places, *((at, one.condition) for at, one in ready.items())]:
        room, lease = side.rooms.get(at[0]), side.queue.granted(at)
        assert room is not None, f"prepared for a room that is over: {at}"
        assert room.machine.error is None, f"prepared for a room that has failed: {at}"
        assert lease is not None, f"prepared without a lease: {at}"
        assert all(lease.offset <= base < lease.offset + lease.nbytes for base in parts.values()), at


def check_gathers(prepared: PreparedGathers, rooms: Container[PrefillRoom]) -> None:
    """All gathers that are prepared, or will be, are for these rooms, which may still succeed."""
    waiting, ready, planned = prepared.gathers.waiting, prepared.gathers.ready, prepared.planned
    assert all([*waiting.values(), *planned.values()]), "an empty entry"
    for key, transfers in waiting.items():
        assert not transfers.keys() & planned.get(key, {}).keys(), "planned, and to be planned"
    for key, found in ready.items():
        assert {t.to for t, _ in found.condition} <= planned.get(key, {}).keys(), "a gather without its plans"
    assert all(room in rooms for room, _ in (*waiting, *planned)), "prepared for a room that is over"


def _check_staged(mover: StagedMover, side: PrefillSide) -> None:
    """Slots are pinned by the posts that are gathered or written, and filled by the gathers that run."""
    posts = side.transfers.posts
    mover.slots.check_integrity()
    pinned = {pin for slot in mover.slots for pin in slot.pins}
    known = {post for of_room in posts.of_room.values() for post in of_room if post.slot is not None}
    live = {post for post in posts.tickets.values() if post.slot is not None}
    live |= {post for one in mover.gathering for post, _ in one.waiting}
    assert pinned == known == live, (pinned, known, live)
    filling = {one.slot for one in mover.gathering}
    assert filling == {slot for slot in mover.slots if slot.filling}, filling


def _check_mapped(mover: MappedMover, side: PrefillSide) -> None:
    """Exactly the posts of copies that may still run count as such."""
    copying = {post for one in (*mover.running, *mover.failed) for post in one.posts}
    known = {post for of_room in side.transfers.posts.of_room.values() for post in of_room}
    of_copies = {post for post in known if any(isinstance(o, Copying) for o in (*post.moving, *post.unquiet))}
    assert copying == of_copies, (copying, of_copies)
