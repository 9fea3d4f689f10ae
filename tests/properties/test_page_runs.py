"""Any page table crosses the wire, in runs or page ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_kv.core import Codec
from disagg_kv.core.wire import page_runs as p
from disagg_kv.core.wire.frames import Expect, Head, WireTable
from disagg_kv.errors import RemoteProtocolError
from disagg_kv.geometry import PageTable
from disagg_kv.ids import GroupId

MOST = 1 << 12
HEAD = Head(src=bytes(16), dst=bytes(16), room=b"r", generation=1)

pieces = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 2**31 - 50), st.integers(1, 40)).map(lambda run: list(range(run[0], sum(run)))),
        st.tuples(st.integers(0, 2**31 - 1), st.integers(1, 40)).map(lambda again: [again[0]] * again[1]),
        st.lists(st.integers(0, 2**31 - 1), max_size=8),
        st.lists(st.integers(0, 5), max_size=20),
    ),
    max_size=8,
)
codec = Codec()


def table(name: str, made: list[list[int]]) -> PageTable:
    return PageTable(GroupId(name), np.array([page for one in made for page in one], np.int32), 0)


def expect(tables: tuple[WireTable, ...]) -> Expect:
    return Expect(**HEAD, start=0, stop=None, path="slice", tables=tables, tag=b"")


@given(st.lists(pieces, max_size=3))
def test_page_tables_come_back_as_they_went(made: list[list[list[int]]]) -> None:
    """Runs are never longer than page ids; the receiver knows each table's size before it reads its bytes."""
    want = [table(f"g{i}", one) for i, one in enumerate(made)]
    wire = p.tables_to_wire(want)
    assert all(p.size_of(w) == len(w.pages) <= 4 * len(t.pages) for w, t in zip(wire, want, strict=True))
    known = {t.group: t for t in want}
    if any(overlaps(w) for w in wire):
        with pytest.raises(RemoteProtocolError, match="runs overlap"):
            p.tables_from_wire(wire, MOST)
        return
    asked = codec.decode(codec.encode(expect(wire)))
    assert isinstance(asked, Expect)
    assert p.tables_from_wire(asked.tables or (), MOST) == known


def overlaps(wire: WireTable) -> bool:
    """Whether two runs share more than one page: no pool has such a table."""
    if not wire.runs:
        return False
    runs = [range(first, first + max(n, 1)) for first, n in np.frombuffer(wire.pages, "<i4").reshape(-1, 2).tolist()]
    return any(len(range(max(a.start, b.start), min(a.stop, b.stop))) > 1 for i, a in enumerate(runs) for b in runs[:i])


@given(
    st.integers(0, 2 * MOST),
    st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1)), min_size=1, max_size=6),
)
def test_runs_of_a_peer_are_a_table_or_its_error(count: int, pairs: list[tuple[int, int]]) -> None:
    """However the numbers are drawn, nothing larger than what was announced is made."""
    wire = WireTable("all", 0, count, len(pairs), np.array(pairs, "<i4").tobytes())
    try:
        (found,) = p.tables_from_wire([wire], MOST).values()
    except RemoteProtocolError:
        return
    assert len(found.pages) == count <= MOST
