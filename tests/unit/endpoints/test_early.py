"""What waits before its room is open, and what waits for its page tables, do not take each other's place."""

from __future__ import annotations

from msgspec import structs

from disagg_kv.core import Options
from disagg_kv.core.wire.frames import Expect, TablePart, WireTable
from disagg_kv.endpoints.prefill.early import EarlyArrivals
from disagg_kv.ids import Epoch, RoomId

A, B = Epoch(bytes([1] * 16)), Epoch(bytes([2] * 16))


def expect(room: int, pages: int, peer: Epoch = A) -> Expect:
    """Of one table that is to come in parts."""
    tables = (WireTable("kv", 0, pages, 0, b""),)
    return Expect(src=peer, dst=bytes(16), room=bytes([room]), generation=room, start=0, stop=pages, paths=(),
                  tag=b"", tables=tables)  # fmt: skip


def part(room: int, generation: int, offset: int, data: bytes) -> TablePart:
    """Of a peer's page tables."""
    return TablePart(src=A, dst=bytes(16), room=bytes([room]), generation=generation, offset=offset, data=data)


def test_parts_belong_to_one_generation() -> None:
    """A part that comes late, of an earlier use of the room's id, is not taken for one of the later use."""
    early = EarlyArrivals(Options())
    assert early.add(expect(2, 2), 1.0, alone=True)
    assert early.put(part(2, 1, 0, b"old!")) is None
    assert early.lacks(RoomId(bytes([2])), A) == 0
    assert early.put(part(2, 2, 0, b"new.")) == (4, False)
    assert early.put(part(2, 2, 4, b"both")) == (8, False)
    (whole,) = early.take(RoomId(bytes([2])))
    assert [table.pages for table in whole.tables or ()] == [b"new.both"]


def test_what_came_for_another_expectation_is_dropped() -> None:
    """The same one again keeps what came; another one of the same peer and room does not."""
    early, room = EarlyArrivals(Options()), RoomId(bytes([1]))
    assert early.add(expect(1, 2), 1.0, alone=True)
    assert early.put(part(1, 1, 0, b"some")) == (4, False)
    assert early.add(expect(1, 2), 1.0, alone=True)
    assert early.lacks(room, A) == 4
    assert early.add(structs.replace(expect(1, 2), generation=9), 1.0, alone=True)
    assert early.lacks(room, A) == 0


def test_open_rooms_wait_for_their_tables_whatever_is_parked() -> None:
    early = EarlyArrivals(Options(parked=4, parked_pages=100))
    assert early.add(expect(1, 100), 1.0, alone=True)
    assert not early.add(expect(2, 1), 1.0, alone=True), "no place for another that is parked"
    assert early.add(expect(3, 5000), 1.0, alone=True, opened=True), "one of a peer may always come"
    assert not early.add(expect(4, 1), 1.0, alone=True, opened=True)
    assert early.add(expect(5, 5000, B), 1.0, alone=False, opened=True), "one of each"
    assert early.lacks(RoomId(bytes([3])), A) == 0
    for room, peer in ((3, A), (5, B)):
        assert early.pop(RoomId(bytes([room])), peer) is not None
    assert early.add(expect(4, 60), 1.0, alone=True, opened=True)
    assert early.add(expect(6, 40), 1.0, alone=True, opened=True)
    assert not early.add(expect(7, 1), 1.0, alone=True, opened=True)
    early.expire(2.0)
    assert (len(early), early.next_at()) == (0, None)
    assert early.add(expect(8, 100), 3.0, alone=True), "all places are free again"
    early.check_integrity()


def test_the_number_of_those_that_are_parked_is_bounded_apart() -> None:
    early = EarlyArrivals(Options(parked=1, parked_pages=100))
    for room in range(5):
        assert early.add(expect(room, 10), 1.0, alone=True, opened=True)
    assert early.add(expect(8, 10), 1.0, alone=True)
    assert not early.add(expect(9, 10), 1.0, alone=True)
