"""Page tables on the wire: in the shorter of two forms, and what cannot be is refused before it is unfolded."""

from __future__ import annotations

import re

import numpy as np
import pytest

from disagg_kv.channels import MAX_FRAME
from disagg_kv.core.wire import page_runs as p
from disagg_kv.core.wire.frames import MAX_TABLE, Codec, Expect, Head, WireTable
from disagg_kv.errors import RemoteProtocolError
from disagg_kv.geometry import PageTable
from disagg_kv.ids import GroupId

MOST = 1 << 22
HEAD = Head(src=bytes(16), dst=bytes(16), room=bytes(64), generation=1)


def table(*pages: int) -> WireTable:
    (wire,) = p.tables_to_wire([PageTable(GroupId("all"), np.array(pages, np.int32), 4)])
    return wire


def runs(*pairs: tuple[int, int], count: int | None = None) -> WireTable:
    many = sum(abs(length) for _, length in pairs) if count is None else count
    return WireTable("all", 0, many, len(pairs), np.array(pairs, "<i4").tobytes())


@pytest.mark.parametrize(
    ("pages", "runs", "size"),
    [
        ((), 0, 0),
        ((5, 3, 8), 0, 12),
        ((5, 6), 0, 8),
        ((5, 6, 7), 1, 8),
        ((9, 9, 9, 9, 4, 5, 6), 2, 16),
        ((0, 0, 0, 1, 2, 3, 7, 8, 9, 10), 3, 24),
        (tuple(range(1 << 16)), 1, 8),
        ((2**31 - 1,) * 9, 1, 8),
    ],
)
def test_page_tables_come_back_as_they_went_in_the_shorter_form(pages: tuple[int, ...], runs: int, size: int) -> None:
    wire = table(*pages)
    assert (wire.runs, len(wire.pages), p.size_of(wire)) == (runs, size, size)
    assert p.tables_from_wire([wire], MOST) == {GroupId("all"): PageTable(GroupId("all"), np.array(pages), 4)}


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ((WireTable("all", 0, 1, 0, bytes(3)),), "'all': 3 bytes of 4"),
        ((WireTable("all", 0, 1, 0, bytes(4)), WireTable("some", 0, 1, 0, b"")), "'some': 0 bytes of 4"),
        ((WireTable("all", 0, 1, 0, bytes(4)),) * 2, "one is given twice"),
        ((WireTable("all", 0, 1, 0, b"\xff\xff\xff\xff"),), "page ids must be 0 to"),
        ((WireTable("all", 0, MOST + 1, 0, b""),), f"{MOST + 1} page ids of one request; at most {MOST}"),
        ((WireTable("all", 0, 2**31, 1, bytes(8)),), f"{2**31} page ids of one request"),
        ((runs((0, 1), (2, 1)),), "2 runs of 2 pages are no shorter than page ids"),
        ((runs((0, 9), (2, 0)),), "of which none may be empty"),
        ((runs((0, 9), count=10),), "runs of 9 pages, of which none may be empty, for 10"),
        ((runs((0, 2**31 - 1), (0, -(2**31)), count=MOST),), f"runs of {2**32 - 1} pages"),
        ((runs((2**31 - 2, 3)),), f"runs of pages {2**31 - 2} to {2**31}"),
        ((runs((-1, 3)),), "runs of pages -1 to 1"),
        ((runs((0, 9), (40, 9), (7, 9)),), "runs overlap"),
        ((runs((0, 90), (40, 9)),), "runs overlap"),
        ((WireTable("all", 0, 9, 1, b""),), "'all': 0 bytes of 8"),
        ((WireTable("all", 0, 9, 0, b""),), "'all': 0 bytes of 36"),
    ],
)
def test_a_page_table_that_cannot_be_is_the_peers_error(tables: tuple[WireTable, ...], why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        p.tables_from_wire(tables, MOST)


def test_a_page_may_come_again_as_the_null_page_does() -> None:
    (found,) = p.tables_from_wire([runs((0, -4), (0, 3), (9, 3))], MOST).values()
    assert found.pages.tolist() == [0, 0, 0, 0, 0, 1, 2, 9, 10, 11]


def test_a_run_may_not_lie_in_one_that_is_not_its_neighbour() -> None:
    """Sorted by their first pages, another one is between them."""
    with pytest.raises(RemoteProtocolError, match="runs overlap"):
        p.tables_from_wire([runs((0, 9), (1, -5), (7, 9))], MOST)


FULL = MAX_TABLE // p.ID


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ([range(0, 2 * FULL, 2)], None),
        ([range(0, 2 * FULL + 2, 2)], f"bytes of page tables in one frame: {4 * FULL + 4} bytes requested"),
        ([range(0, FULL, 2), range(1, FULL + 1, 2)], None),
        ([range(0, FULL, 2), range(1, FULL + 3, 2)], f"bytes of page tables in one frame: {4 * FULL + 4} bytes"),
        ([range(MOST)], None),
        ([range(MOST + 1)], rf"page ids of one request \(request_pages\): {MOST + 1} ids requested"),
    ],
)
def test_as_many_pages_as_one_frame_names_may_be_exposed(tables: list[range], why: str | None) -> None:
    """262,144 page ids in all tables together; more where they follow one another, up to ``request_pages``."""
    wire = p.tables_to_wire(PageTable(GroupId(f"g{i}"), np.array(one), 0) for i, one in enumerate(tables))
    beyond = p.excess(wire, MOST)
    if why is not None:
        assert beyond is not None
        assert re.search(why, str(beyond))
        return
    assert beyond is None
    expect = Expect(**HEAD, start=0, stop=None, path="mapped" * 8, tables=wire, tag=bytes(256))
    frame = Codec().encode(expect)
    assert len(frame) <= Codec.MAX_BYTES == MAX_FRAME
    assert Codec().decode(frame) == expect
