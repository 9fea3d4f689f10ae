"""Several page spaces with a null page: a table names it for rows that slid out of the window, and it is never sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from attrs import evolve, field, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_kv.core import Phase
from disagg_kv.endpoints import Expectation
from disagg_kv.endpoints.decode.handle import ReceptionHandle
from disagg_kv.endpoints.prefill.handle import DeliveryHandle
from disagg_kv.errors import GeometryError
from disagg_kv.geometry import CacheSpec, Component, PageTable, Shard
from disagg_kv.ids import GroupId, LayerId, RoomId
from disagg_kv.memory import PagedPool
from disagg_kv.rendezvous import Source
from tests.support.rig import Decodes, E, Member, Memory, Prefills, Rig, Truth, tp_shards

FULL, SLIDE, STATE = GroupId("full"), GroupId("slide"), GroupId("state")
WINDOW, PAGES = 6, 24
KV = (Component("k", "int8", 4, 8), Component("v", "int8", 4, 8))
SPEC = CacheSpec(
    {
        LayerId(0): KV,
        LayerId(1): [evolve(c, window=WINDOW) for c in KV],
        LayerId(2): [Component("ssm", "int8", 4, 16, tokens_per_row=0, rows=2)],
        LayerId(3): KV,
    }
)
GROUPS = {LayerId(0): FULL, LayerId(1): SLIDE, LayerId(3): FULL}


def engine(sizes: Mapping[GroupId, int]) -> Memory:
    """An engine's tensors with pages of ``sizes`` rows; page 0 of every space has no data."""

    def adopted(spec: CacheSpec, held: Shard, of: Memory) -> PagedPool:
        tensors = {
            layer: {
                c.name: torch.zeros(PAGES, c.rows or sizes[GROUPS[layer]], units, c.unit_bytes, dtype=torch.int8)
                for c in components
                for units in [sum(map(len, held.units(layer, c.name)))]
            }
            for layer, components in spec.layers.items()
        }
        return PagedPool.from_tensors(spec, held, tensors, group=GROUPS, null_page=0)

    return Memory(pool=adopted)


@frozen
class Room:
    """One room on all ranks, as engines with a null page see it."""

    rig: Rig
    prefills: Prefills
    decodes: Decodes
    stop: int
    truth: Truth
    sends: list[DeliveryHandle] = field(factory=list)
    receives: list[ReceptionHandle] = field(factory=list)

    @classmethod
    def of(cls, path: str, sizes: Sequence[Mapping[GroupId, int]], stop: int) -> Room:
        """TP 2 to 1, each side with its own pages."""
        rig = Rig(SPEC)
        prefills = rig.prefill(tp_shards(SPEC, 2), memory=engine(sizes[0]), strategy=path)
        decodes = rig.decode(tp_shards(SPEC, 1), memory=engine(sizes[1]), strategy=path)
        return cls(rig, prefills, decodes, stop, rig.truth(stop))

    def tables(self, member: Member[E], null: Sequence[bool]) -> dict[GroupId, PageTable]:
        """New pages of all groups; the pages of the sliding group that ``null`` names are the null page."""
        made = {STATE: PageTable(STATE, [3])}
        for group in member.pool.site.token_groups:
            taken = self.rig.rng.permutation(np.arange(1, PAGES))[: -(-self.stop // group.rows_per_page)]
            if group.id == SLIDE:
                taken[[i for i in range(len(taken)) if i < len(null) and null[i]]] = 0
            made[group.id] = PageTable(group.id, taken)
        return made

    def put(self, pool: PagedPool, tables: Mapping[GroupId, PageTable], *, window: bool) -> None:
        """Write the room into a pool by plain indexing, except into the null page."""
        for number, plane in enumerate(pool.site.planes):
            component = SPEC.component(plane.layer, plane.component)
            units = [u for run in pool.site.shard.units(plane.layer, plane.component) for u in run]
            cells, view = self.truth[plane.layer, plane.component][:, units], pool.view(number)
            if component.rows:
                view[tables[plane.group].pages[0]] = cells
                continue
            rows = np.arange(max(0, self.stop - WINDOW) if window and component.window else 0, self.stop)
            pages, slots = tables[plane.group].pages[rows // view.shape[1]], rows % view.shape[1]
            view[pages[pages > 0], slots[pages > 0]] = cells[rows[pages > 0]]

    def expect(self, null: Sequence[bool], stop: int | None) -> None:
        """Decode awaits the room."""
        for member in self.decodes:
            tables = self.tables(member, null)
            handle = member.endpoint.open(RoomId(b"room"), Source("P"))
            self.receives.append(handle)
            handle.expect(Expectation(stop, [tables[FULL], tables[SLIDE]], state=[tables[STATE]]))
            self.put(member.want, tables, window=stop is not None)

    def send(self, null: Sequence[bool], edges: Sequence[int]) -> None:
        """Prefill submits it in chunks that end at ``edges``."""
        for member in self.prefills:
            tables = self.tables(member, null)
            for pool in (member.pool, member.want):
                self.put(pool, tables, window=False)
            handle = member.endpoint.open(RoomId(b"room"))
            self.sends.append(handle)
            for edge in edges:
                handle.send_chunk(edge, [tables[FULL], tables[SLIDE]])
            handle.finish(self.stop, state=[tables[STATE]])

    def released(self) -> None:
        """Wait until no rank needs its pages any more."""
        self.rig.until(lambda: all(h.released for h in (*self.sends, *self.receives)), "the room")


def needs(null: Sequence[bool], size: int, first: int, stop: int) -> bool:
    """Whether a row ``[first, stop)`` lies in the null page."""
    return any(null[row // size] for row in range(first, stop) if row // size < len(null))


NULLS = st.lists(st.booleans(), max_size=12)
SIZES = st.fixed_dictionaries({FULL: st.sampled_from([2, 4]), SLIDE: st.sampled_from([2, 3, 8])})


@settings(max_examples=60)
@given(
    st.sampled_from(["staged", "slice", "mapped"]),
    st.tuples(SIZES, SIZES),
    st.integers(1, 23),
    st.tuples(NULLS, NULLS),
    st.integers(1, 22),
    st.booleans(),
)
def test_rows_that_are_needed_lie_in_pages_and_others_may_not(
    path: str,
    sizes: tuple[Mapping[GroupId, int], Mapping[GroupId, int]],
    stop: int,
    nulls: tuple[Sequence[bool], Sequence[bool]],
    edge: int,
    known: bool,
) -> None:
    """Any null pages on either side: the room succeeds byte for byte, or a named error comes before such a row."""
    room = Room.of(path, sizes, stop)
    first = max(0, stop - WINDOW) if known else 0
    room.send(nulls[0], sorted({min(edge, stop), stop}))
    end = stop if known else min(-(-stop // size) * size for size in sizes[1].values())
    if needs(nulls[1], sizes[1][SLIDE], first, end):
        with pytest.raises(GeometryError, match=r"group 'slide': row \d+ is needed, but it lies in the null page"):
            room.expect(nulls[1], stop if known else None)
        room.rig.check()
        return
    room.expect(nulls[1], stop if known else None)
    room.released()
    if needs(nulls[0], sizes[0][SLIDE], first, stop):
        assert {h.phase for h in (*room.sends, *room.receives)} == {Phase.FAILED}
        assert "group 'slide': row" in str(room.receives[0].error)
        assert "is needed, but it lies in the null page" in str(room.receives[0].error)
    else:
        assert {h.phase for h in (*room.sends, *room.receives)} == {Phase.DONE}, [h.error for h in room.sends]
        room.rig.check()
    room.rig.quiet()


@pytest.mark.parametrize("path", ["staged", "slice", "mapped", "auto"])
def test_a_room_of_two_page_spaces_crosses_without_the_pages_that_slid_out(path: str) -> None:
    """As vLLM's tables are after a long prompt: full attention has all pages, the window only its last."""
    room = Room.of(path, ({FULL: 4, SLIDE: 4}, {FULL: 8, SLIDE: 2}), 21)
    room.expect([True] * 7, 21)  # rows 0 to 13; the window begins at row 15
    room.send([True] * 3, [8, 21])  # rows 0 to 11
    room.released()
    assert [h.phase for h in (*room.sends, *room.receives)] == [Phase.DONE] * 3, room.sends[0].error
    room.rig.check()
    assert room.receives[0].report.nbytes == 4 * 2 * 8 * (2 * 21 + WINDOW) + 4 * 2 * 16
    room.rig.quiet()


def test_a_page_of_full_attention_or_of_a_state_is_never_null() -> None:
    """Both sides refuse it in the call, on every rank."""
    room = Room.of("auto", ({FULL: 4, SLIDE: 4},) * 2, 8)
    tables = room.tables(room.decodes[0], [])
    null, state = PageTable(FULL, [5, 0]), [tables[STATE]]
    receive = room.decodes[0].endpoint.open(RoomId(b"room"), Source("P"))
    send = room.prefills[0].endpoint.open(RoomId(b"room"))
    with pytest.raises(GeometryError, match="group 'full': row 4 is needed, but it lies in the null page"):
        receive.expect(Expectation(8, [null, tables[SLIDE]], state=state))
    with pytest.raises(GeometryError, match="group 'full': row 4 is needed, but it lies in the null page"):
        send.send_chunk(8, [null, tables[SLIDE]])
    with pytest.raises(GeometryError, match="group 'state': row 0 is needed, but it lies in the null page"):
        send.finish(0, state=[PageTable(STATE, [0])])
    with pytest.raises(GeometryError, match="group 'state': row 0 is needed, but it lies in the null page"):
        receive.expect(Expectation(8, [tables[FULL], tables[SLIDE]], state=[PageTable(STATE, [0])]))
    room.rig.check()
