"""Any page table crosses the wire: in runs or page ids, whole or in parts that get lost, repeated and shuffled."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_kv.core import Codec, Options
from disagg_kv.core.room.parts import Parts
from disagg_kv.core.wire import page_runs as p
from disagg_kv.core.wire.frames import Expect, Head, TablePart, WireTable
from disagg_kv.endpoints.prefill.early import EarlyArrivals
from disagg_kv.errors import RemoteProtocolError
from disagg_kv.geometry import PageTable
from disagg_kv.ids import Epoch, GroupId, RoomId

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
    return Expect(**HEAD, start=0, stop=None, paths=(), tables=tables, tag=b"")


@given(st.lists(pieces, max_size=3), st.integers(8, 64), st.randoms(use_true_random=False))
def test_page_tables_come_back_as_they_went(made: list[list[list[int]]], part: int, rng: Random) -> None:
    """Runs are never longer than page ids; both sides know each table's size before its bytes."""
    want = [table(f"g{i}", one) for i, one in enumerate(made)]
    wire = p.tables_to_wire(want)
    assert all(p.size_of(w) == len(w.pages) <= 4 * len(t.pages) for w, t in zip(wire, want, strict=True))
    known = {t.group: t for t in want}
    if any(overlaps(w) for w in wire):
        with pytest.raises(RemoteProtocolError, match="runs overlap"):
            p.tables_from_wire(wire, MOST)
        return
    assert p.tables_from_wire(wire, MOST) == known
    assert p.tables_from_wire(through_parts(wire, part, rng), MOST) == known


def overlaps(wire: WireTable) -> bool:
    """Whether two runs share more than one page: no pool has such a table."""
    if not wire.runs:
        return False
    runs = [range(first, first + max(n, 1)) for first, n in np.frombuffer(wire.pages, "<i4").reshape(-1, 2).tolist()]
    return any(len(range(max(a.start, b.start), min(a.stop, b.stop))) > 1 for i, a in enumerate(runs) for b in runs[:i])


def through_parts(wire: tuple[WireTable, ...], part: int, rng: Random) -> tuple[WireTable, ...]:
    """What is there when all parts have come, though some were lost, repeated or late."""
    early, parts = EarlyArrivals(Options()), Parts(part)
    parts.put(data := b"".join(w.pages for w in wire))
    bare = wire if len(data) <= part else p.without_pages(wire)
    room, peer = RoomId(b"r"), Epoch(bytes(16))
    flight: list[tuple[int, bytes]] = []
    for _ in range(10_000):
        asked = codec.decode(codec.encode(expect(bare)))
        assert isinstance(asked, Expect)
        assert early.add(asked, 1.0, alone=True)
        at = early.lacks(room, peer)
        if at is None:
            (whole,) = early.take(room)
            return whole.tables or ()
        parts.restart(at)
        flight += parts.due()
        rng.shuffle(flight)
        while flight:
            offset, bytes_ = flight.pop()
            if rng.random() < 0.2:
                continue
            frame = codec.decode(codec.encode(TablePart(**HEAD, offset=offset, data=bytes_)))
            assert isinstance(frame, TablePart)
            put = early.put(frame)
            assert put is not None
            parts.taken(put[0])
            flight += parts.due()
    raise AssertionError("the tables never became whole")


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
