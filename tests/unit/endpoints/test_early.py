"""What waits before its room is open takes a bounded number of places, and gives them back."""

from __future__ import annotations

from msgspec import structs

from disagg_kv.core import Options
from disagg_kv.core.wire.frames import Expect, WireTable
from disagg_kv.endpoints.prefill.early import EarlyArrivals
from disagg_kv.ids import Epoch, RoomId

A, B = Epoch(bytes([1] * 16)), Epoch(bytes([2] * 16))


def expect(room: int, pages: int, peer: Epoch = A) -> Expect:
    """Of one table."""
    tables = (WireTable("kv", 0, pages, 0, bytes(4 * pages)),)
    return Expect(src=peer, dst=bytes(16), room=bytes([room]), generation=room, start=0, stop=pages, path="slice",
                  tag=b"", tables=tables)  # fmt: skip


def test_one_that_comes_again_takes_the_place_of_the_earlier_one() -> None:
    early, room = EarlyArrivals(Options(parked=1, parked_pages=10)), RoomId(bytes([1]))
    assert early.add(expect(1, 10), 1.0, alone=True)
    again = structs.replace(expect(1, 10), generation=9)
    assert early.add(again, 2.0, alone=True)
    early.expire(1.5)
    assert early.take(room) == [again]
    assert not early.take(room)
    early.check_integrity()


def test_number_and_pages_are_bounded_and_are_free_again() -> None:
    early = EarlyArrivals(Options(parked=2, parked_pages=100))
    assert early.add(expect(1, 60), 1.0, alone=True)
    assert not early.add(expect(2, 41), 1.0, alone=True), "too many pages"
    assert early.add(expect(3, 40), 2.0, alone=True)
    assert not early.add(expect(4, 0), 2.0, alone=True), "too many of them"
    early.expire(1.0)
    assert (len(early), early.next_at()) == (1, 2.0)
    assert early.add(expect(2, 60), 3.0, alone=True)
    assert early.pop(RoomId(bytes([3])), A) == expect(3, 40)
    assert early.pop(RoomId(bytes([3])), A) is None
    early.expire(3.0)
    assert (len(early), early.next_at()) == (0, None)
    early.check_integrity()


def test_one_peer_takes_a_quarter_while_others_are_known() -> None:
    early = EarlyArrivals(Options(parked=8, parked_pages=80))
    assert early.add(expect(1, 60), 1.0, alone=False), "the first of a peer may be large"
    assert not early.add(expect(2, 1), 1.0, alone=False)
    assert early.add(expect(3, 10, B), 1.0, alone=False)
    assert early.add(expect(4, 10, B), 1.0, alone=False)
    assert not early.add(expect(5, 0, B), 1.0, alone=False)
    assert early.take(RoomId(bytes([1]))) == [expect(1, 60)]
    assert early.add(expect(2, 1), 1.0, alone=False)
    early.check_integrity()
