"""Groups that lie in the same bytes and share one space of page ids, as an engine with a hybrid cache has them."""

from __future__ import annotations

import itertools
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

GROUPS = {LayerId(n): GroupId("full" if n in (1, 3) else "slide" if n in (0, 4) else "near") for n in range(6)}
WINDOWS = {"full": None, "slide": 6, "near": 3}
PAGES = 64
SPEC = CacheSpec(
    {
        layer: [evolve(c, window=WINDOWS[group]) for c in (Component("k", "int8", 4, 8), Component("v", "int8", 4, 8))]
        for layer, group in GROUPS.items()
    }
)


def overlaid(size: int, *, interleaved: bool) -> Memory:
    """An engine's tensors in pages of ``size`` rows: the n-th layer of every group lies in the same bytes.

    ``interleaved``: the layers of a group lie side by side in each page, else one after the other.
    """

    def adopted(spec: CacheSpec, held: Shard, of: Memory) -> PagedPool:
        units = sum(map(len, held.units(LayerId(0), "k")))
        shape = (PAGES, 2, 2) if interleaved else (2, 2, PAGES)
        memory = torch.zeros(*shape, size, units, 8, dtype=torch.int8)
        tensors = {}
        for name in WINDOWS:
            for place, layer in enumerate(layer for layer, group in GROUPS.items() if group == name):
                parts = {part: (place, number) for number, part in enumerate(("k", "v"))}
                tensors[layer] = {c: memory[:, i, j] if interleaved else memory[i, j] for c, (i, j) in parts.items()}
        return PagedPool.from_tensors(spec, held, tensors, group=GROUPS, null_page=0, overlaid=True)

    return Memory(pool=adopted)


@frozen
class Room:
    """One room on all ranks. A rank takes distinct pages for all groups; pages behind a window are the null page."""

    rig: Rig
    prefills: Prefills
    decodes: Decodes
    stop: int
    truth: Truth
    sends: list[DeliveryHandle] = field(factory=list)
    receives: list[ReceptionHandle] = field(factory=list)

    @classmethod
    def of(cls, path: str, sizes: tuple[int, int], stop: int, *, interleaved: bool = False, tp: int = 2) -> Room:
        """TP ``tp`` to 1, each side with its own size of pages."""
        rig = Rig(SPEC)
        there, here = (overlaid(size, interleaved=interleaved) for size in sizes)
        prefills = rig.prefill(tp_shards(SPEC, tp), memory=there, strategy=path)
        decodes = rig.decode(tp_shards(SPEC, 1), memory=here, strategy=path)
        return cls(rig, prefills, decodes, stop, rig.truth(stop))

    def tables(self, member: Member[E]) -> dict[GroupId, PageTable]:
        """New pages."""
        size = member.pool.site.groups[0].rows_per_page
        pages = -(-self.stop // size)
        free = iter(self.rig.rng.permutation(np.arange(1, PAGES)).tolist())
        made = {}
        for group in map(GroupId, WINDOWS):
            behind = max(0, self.stop - (WINDOWS[group] or self.stop)) // size
            made[group] = PageTable(group, [0] * behind + list(itertools.islice(free, pages - behind)))
        return made

    def put(self, pool: PagedPool, tables: Mapping[GroupId, PageTable], *, window: bool) -> None:
        """Write the room by plain indexing, except into the null page; ``window``: only the rows that decode needs."""
        for number, plane in enumerate(pool.site.planes):
            component = SPEC.component(plane.layer, plane.component)
            units = [u for run in pool.site.shard.units(plane.layer, plane.component) for u in run]
            cells, view = self.truth[plane.layer, plane.component][:, units], pool.view(number)
            rows = np.arange(max(0, self.stop - component.window) if window and component.window else 0, self.stop)
            pages, slots = tables[plane.group].pages[rows // view.shape[1]], rows % view.shape[1]
            view[pages[pages > 0], slots[pages > 0]] = cells[rows[pages > 0]]

    def run(self, edges: Sequence[int]) -> None:
        """Decode awaits the room, and prefill submits it in chunks that end at ``edges``."""
        for member in self.decodes:
            tables = self.tables(member)
            self.receives.append(member.endpoint.open(RoomId(b"room"), Source("P")))
            self.receives[-1].expect(Expectation(self.stop, list(tables.values())))
            self.put(member.want, tables, window=True)
        for sender in self.prefills:
            tables = self.tables(sender)
            for pool in (sender.pool, sender.want):
                self.put(pool, tables, window=False)
            self.sends.append(sender.endpoint.open(RoomId(b"room")))
            for edge in edges:
                self.sends[-1].send_chunk(edge, list(tables.values()))
            self.sends[-1].finish(self.stop)
        handles = [*self.sends, *self.receives]
        self.rig.until(lambda: all(h.released for h in handles), "the room")
        assert {h.phase for h in handles} == {Phase.DONE}, [h.error for h in handles]


@settings(max_examples=60)
@given(
    st.sampled_from(["auto", "staged", "direct", "slice", "mapped"]),
    st.tuples(*[st.sampled_from([2, 3, 4])] * 2),
    st.integers(1, 23),
    st.integers(1, 22),
    st.booleans(),
)
def test_a_room_crosses_byte_for_byte(
    path: str, sizes: tuple[int, int], stop: int, edge: int, interleaved: bool
) -> None:
    """Into pages of three groups in the same bytes, of which every other byte stays as it is."""
    if path == "direct":
        sizes = (sizes[0], sizes[0])
    room = Room.of(path, sizes, stop, interleaved=interleaved, tp=1 if path == "direct" else 2)
    room.run(sorted({min(edge, stop), stop}))
    room.rig.check()
    room.rig.quiet()


def shared(tables: dict[GroupId, PageTable], one: GroupId, other: GroupId) -> str:
    """Give the last page of one group to another; the message that says so."""
    page = tables[one].pages[-1]
    tables[other] = PageTable(other, [*tables[other].pages[:-1], page])
    return f"room room: page {page} is in group '{one}' and in group '{other}', which are overlaid"


@pytest.mark.parametrize("pair", list(itertools.combinations(map(GroupId, WINDOWS), 2)))
def test_a_page_in_two_groups_is_refused_by_name(pair: tuple[GroupId, GroupId]) -> None:
    """By both sides, in the call, before a byte is written. The null page may be in all of them."""
    room = Room.of("auto", (4, 4), 20)
    for member in room.prefills:
        tables = room.tables(member)
        with pytest.raises(GeometryError, match=shared(tables, *pair)):
            member.endpoint.open(RoomId(b"room")).send_chunk(20, list(tables.values()))
    for receiver in room.decodes:
        tables = room.tables(receiver)
        with pytest.raises(GeometryError, match=shared(tables, *pair)):
            receiver.endpoint.open(RoomId(b"room"), Source("P")).expect(Expectation(20, list(tables.values())))
    room.rig.check()
