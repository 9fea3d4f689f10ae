"""Planes that share bytes are refused by every way to make a pool; planes that only interleave are accepted."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import pytest
import torch

from disagg_kv.errors import GeometryError
from disagg_kv.geometry import CacheSpec, Component, Group, Plane, Site, check_planes, shard
from disagg_kv.ids import GroupId, LayerId
from disagg_kv.memory import Buffer, Layout, PagedPool
from tests.support.pools import KV, adopted, noise

SPEC = CacheSpec.kv(1, 2, 4, "float16")
L0 = LayerId(0)
PAGES, ROWS, UNITS, DIM = 6, 4, 2, 4


def _shape(layout: Layout) -> tuple[int, int, int, int]:
    return (PAGES, ROWS, UNITS, DIM) if layout == "NHD" else (PAGES, UNITS, ROWS, DIM)


def _pool(k: torch.Tensor, v: torch.Tensor, layout: Layout) -> PagedPool:
    return PagedPool.from_tensors(SPEC, shard(SPEC), {L0: {"k": k, "v": v}}, layout=layout)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_strided_views_that_interleave_are_accepted(layout: Layout, axis: int) -> None:
    """K and V beside each other per pool, per page, per row or head, and per unit: every cell has its own bytes."""
    shape = list(_shape(layout))
    both = torch.zeros(*shape[:axis], 2, *shape[axis:], dtype=torch.float16)
    k, v = both.select(axis, 0), both.select(axis, 1)
    pool = _pool(k, v, layout)
    pool.view(0)[...] = 1
    pool.view(1)[...] = 2
    assert (pool.view(0) == 1).all()
    assert (pool.view(1) == 2).all()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_views_that_share_a_row_are_refused(layout: Layout) -> None:
    """The second view begins one row, one page or nothing after the first, in the first one's bytes."""
    flat = torch.zeros(4 * PAGES * ROWS * UNITS * DIM, dtype=torch.float16)
    size = PAGES * ROWS * UNITS * DIM
    k = flat[:size].view(_shape(layout))
    for begin in (0, DIM, UNITS * DIM, ROWS * UNITS * DIM, size - DIM):
        with pytest.raises(GeometryError, match=r"'k'.* and .*'v'.* share bytes of buffer 0"):
            _pool(k, flat[begin : begin + size].view(_shape(layout)), layout)
    _pool(k, flat[size : 2 * size].view(_shape(layout)), layout)


@pytest.mark.parametrize("strides", [(64, 16, 8), (32, 16, 4), (32, 8, 8), (8, 8, 8)])
def test_a_plane_that_overlaps_itself_is_refused(strides: tuple[int, int, int]) -> None:
    """A page stride below a page's bytes, a row stride below a row's, a unit stride below a unit's."""
    data = noise(1 << 12, 1)
    page, row, unit = strides
    row = row if page != 64 else 12
    planes = [Plane(L0, "k", KV, 0, 0, page, row, unit), Plane(L0, "v", KV, 0, 2048, 64, 16, 8)]
    with pytest.raises(GeometryError, match="overlap"):
        adopted(SPEC, shard(SPEC), [Group(KV, ROWS, PAGES)], planes, [Buffer(data.ctypes.data, 4096)])


def test_a_tensor_that_overlaps_itself_is_refused() -> None:
    """A sliding view over one run: its pages begin every row."""
    flat = torch.zeros(1024, dtype=torch.float16)
    sliding = flat.as_strided(_shape("NHD"), (UNITS * DIM, UNITS * DIM, DIM, 1))
    with pytest.raises(GeometryError, match="overlap"):
        _pool(sliding, torch.zeros(_shape("NHD"), dtype=torch.float16), "NHD")


def _site(planes: Sequence[Plane], groups: Sequence[Group], spec: CacheSpec, nbytes: int) -> Site:
    return Site(spec, shard(spec), groups, planes, (nbytes,))


def test_groups_that_share_bytes_are_refused() -> None:
    """Tokens and states, each with its own page ids, in one run of memory."""
    state = Component("s", "float16", 2, 8, tokens_per_row=0, rows=4)
    spec = CacheSpec.uniform(1, (Component("k", "float16", 2, 8), state))
    groups = [Group(KV, 4, 8), Group(GroupId("state"), 4, 8)]
    k = Plane(L0, "k", KV, 0, 0, 64, 16, 8)
    for offset, apart in ((0, False), (256, False), (512, True)):
        data = noise(1 << 12, 1)
        planes = [k, Plane(L0, "s", GroupId("state"), 0, offset, 64, 16, 8)]
        made = (spec, shard(spec), groups, planes, [Buffer(data.ctypes.data, 4096, owner=data)])
        if apart:
            adopted(*made)
        else:
            with pytest.raises(GeometryError, match=r"group 'kv'.*group 'state'.*share bytes"):
                adopted(*made)


def test_groups_of_other_strides_that_only_interleave_are_accepted() -> None:
    """Pages of 128 bytes of which each group has its half, one of them with every second page only."""
    state = Component("s", "float16", 2, 8, tokens_per_row=0, rows=4)
    spec = CacheSpec.uniform(1, (Component("k", "float16", 2, 8), state))
    groups = [Group(KV, 4, 16), Group(GroupId("state"), 4, 8)]
    k = Plane(L0, "k", KV, 0, 0, 128, 16, 8)
    s = Plane(L0, "s", GroupId("state"), 0, 64, 256, 16, 8)
    check_planes(_site([k, s], groups, spec, 4096))
    with pytest.raises(GeometryError, match="share bytes"):
        check_planes(_site([k, attrs.evolve(s, offset=63)], groups, spec, 4096))


def test_buffers_that_share_memory_are_refused() -> None:
    """Two buffers over one array, each with a plane: the planes overlap although their buffers' numbers differ."""
    data = np.zeros(4096, np.uint8)
    planes = [Plane(L0, "k", KV, 0, 0, 64, 16, 8), Plane(L0, "v", KV, 1, 0, 64, 16, 8)]
    base = data.ctypes.data
    for begin in (0, 100, 2047):
        buffers = [Buffer(base, 2048, owner=data), Buffer(base + begin, 2048, owner=data)]
        with pytest.raises(GeometryError, match="buffers 0 and 1 share memory"):
            adopted(SPEC, shard(SPEC), [Group(KV, ROWS, PAGES)], planes, buffers)
    adopted(SPEC, shard(SPEC), [Group(KV, ROWS, PAGES)], planes, [Buffer(base, 2048), Buffer(base + 2048, 2048)])


def test_a_pool_of_a_million_interleaved_pages_is_looked_at_by_distances() -> None:
    """80 layers in each of a million pages: the number of pages does not matter."""
    spec = CacheSpec.kv(40, 2, 4, "float16")
    page = 40 * 2 * 64
    planes = [
        Plane(LayerId(layer), name, KV, 0, layer * 128 + 64 * (name == "v"), page, 16, 8)
        for layer in range(40)
        for name in ("k", "v")
    ]
    site = _site(planes, [Group(KV, 4, 1_000_000)], spec, page * 1_000_000)
    check_planes(site)
    with pytest.raises(GeometryError, match=r"layer 39, 'k'.*layer 39, 'v'"):
        check_planes(attrs.evolve(site, planes=[*planes[:-1], attrs.evolve(planes[-1], offset=planes[-1].offset - 1)]))


FULL, SLIDE = GroupId("full"), GroupId("slide")
TWO = CacheSpec.uniform(2, (Component("k", "float16", 2, 8),))


def _overlaid(one: torch.Tensor, other: torch.Tensor, spec: CacheSpec = TWO) -> PagedPool:
    tensors = {L0: {"k": one}, LayerId(1): {"k": other}}
    groups = {L0: FULL, LayerId(1): SLIDE}
    return PagedPool.from_tensors(spec, shard(spec), tensors, group=groups, overlaid=True)


def test_overlaid_groups_share_pages_of_the_same_id() -> None:
    """The same pages; a part of each page; pages beside each other; no common memory."""
    memory = torch.zeros(2, PAGES, 2 * ROWS, UNITS, DIM, dtype=torch.float16)
    for other in (memory[0, :, :ROWS], memory[0, :, 1 : ROWS + 1], memory[0, :, ROWS:], memory[1, :, :ROWS]):
        pool = _overlaid(memory[0, :, :ROWS], other)
        assert pool.site.overlaid
        assert [plane.group for plane in pool.site.planes] == [FULL, SLIDE]


def test_overlaid_groups_may_have_pages_of_other_sizes() -> None:
    """Page ``p`` of both lies in the same place; one has more rows, and more pages."""
    memory = torch.zeros(PAGES, 2 * ROWS, UNITS, DIM, dtype=torch.float16)
    assert _overlaid(memory, memory[:-1, :ROWS]).site.overlaid


def test_overlaid_groups_whose_other_pages_share_bytes_are_refused() -> None:
    """A page that begins in the page before, a page later, or pages of other strides."""
    memory = torch.zeros(2 * PAGES, ROWS, UNITS, DIM, dtype=torch.float16)
    one, flat = memory[:PAGES], memory.view(-1)
    shifted = flat[DIM:].as_strided(_shape("NHD"), one.stride())
    for other in (memory[1 : PAGES + 1], shifted, memory[::2]):
        with pytest.raises(GeometryError, match=r"layer 0.*full.*layer 1.*slide.*not page by page"):
            _overlaid(one, other)


def test_planes_of_one_group_share_no_bytes_although_groups_are_overlaid() -> None:
    memory = torch.zeros(_shape("NHD"), dtype=torch.float16)
    with pytest.raises(GeometryError, match="share bytes of buffer 0"):
        PagedPool.from_tensors(SPEC, shard(SPEC), {L0: {"k": memory, "v": memory}}, overlaid=True)


def test_groups_that_do_not_say_that_they_are_overlaid_share_no_bytes() -> None:
    memory = torch.zeros(_shape("NHD"), dtype=torch.float16)
    tensors = {L0: {"k": memory}, LayerId(1): {"k": memory}}
    with pytest.raises(GeometryError, match="share bytes of buffer 0"):
        PagedPool.from_tensors(TWO, shard(TWO), tensors, group={L0: FULL, LayerId(1): SLIDE})


def test_slots_of_states_may_lie_in_pages_of_tokens() -> None:
    """A slot is a page of the same space: it shares bytes with the page of its id, and with no other."""
    state = Component("s", "float16", 2, 8, tokens_per_row=0, rows=ROWS - 1)
    spec = CacheSpec({L0: [Component("k", "float16", 2, 8)], LayerId(1): [state]})
    memory = torch.zeros(2 * PAGES, *_shape("NHD")[1:], dtype=torch.float16)

    def pool(slots: torch.Tensor) -> PagedPool:
        tensors = {L0: {"k": memory[:PAGES]}, LayerId(1): {"s": slots[:, 1:]}}
        return PagedPool.from_tensors(
            spec, shard(spec), tensors, group=FULL, state_group={LayerId(1): SLIDE}, overlaid=True
        )

    assert pool(memory[:PAGES]).site.state_groups == {SLIDE}
    with pytest.raises(GeometryError, match=r"layer 0.*full.*layer 1.*slide.*not page by page"):
        pool(memory[1 : PAGES + 1])
