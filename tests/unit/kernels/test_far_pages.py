"""Pools of many GiB, of which a few pages exist: no address is ever counted in 32 bits."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
import pytest
import torch

from disagg_kv.geometry import CacheSpec, Component, Group, PageTable, Plane, Share, shard
from disagg_kv.ids import GroupId, LayerId, RegionId
from disagg_kv.kernels import KERNELS, CpuKernels, Kernels, Move, PageMove, Pages, ReferenceKernels
from disagg_kv.memory import Buffer, bytes_of
from disagg_kv.planning import PageCopy, PairPlan, Segment, direct_writes, slice_writes
from disagg_kv.transports import Extents
from tests.support.pools import Bytes, adopted, noise, staged_layout

K = GroupId("k")
UNIT, ROWS = 4, 16
"""Bytes of a unit, which is one piece for the kernels, and rows of a page."""

PAGE = UNIT * ROWS
NBYTES = 9 << 30
"""More than 2^31 pieces."""

PAGES = [NBYTES // PAGE - 1, 1, 3 + (1 << 31) // PAGE, 5 + (1 << 32) // PAGE, 7 + (1 << 33) // PAGE]
"""One of them lies on either side of every place at which a number of 32 bits ends."""

SPEC = CacheSpec.uniform(1, [Component("k", "uint8", 1, UNIT)])


class Sparse:
    """A pool in a file of holes: only what is written takes memory."""

    def __init__(self) -> None:
        self.file = os.memfd_create("sparse")
        os.ftruncate(self.file, NBYTES)
        self.mapping = mmap.mmap(self.file, NBYTES)
        buffer = Buffer(ctypes.addressof(ctypes.c_char.from_buffer(self.mapping)), NBYTES, owner=self.mapping)
        self.memory = bytes_of(buffer)
        plane = Plane(LayerId(0), "k", K, 0, 0, PAGE, UNIT, UNIT)
        self.pool = adopted(SPEC, shard(SPEC), [Group(K, ROWS, NBYTES // PAGE)], [plane], [buffer])

    def __del__(self) -> None:
        os.close(self.file)

    def page(self, number: int) -> Bytes:
        """A page's bytes."""
        return self.memory[number * PAGE : (number + 1) * PAGE]

    def touched(self) -> int:
        """Blocks of the file that exist."""
        return os.fstat(self.file).st_blocks


def moves() -> list[Move]:
    """All rows of all those pages."""
    rows = len(PAGES) * ROWS
    return [Move(staged_layout([(0, 0, 1, 0, rows, 0)], rows * UNIT), {K: PageTable(K, PAGES)}, 0)]


@pytest.mark.parametrize("kernels", [CpuKernels(), ReferenceKernels()], ids=lambda kernels: str(kernels.name))
def test_far_pages_are_moved_and_nothing_else_is_touched(kernels: Kernels) -> None:
    """Gather, scatter and checksum beyond 2^31 pieces and 2^32 bytes."""
    source, target = Sparse(), Sparse()
    content = noise(len(PAGES) * PAGE, 3)
    for i, number in enumerate(PAGES):
        source.page(number)[:] = content[i * PAGE : (i + 1) * PAGE]
    staged = np.zeros(len(content), np.uint8)
    staging = Buffer(staged.ctypes.data, staged.nbytes, owner=staged)
    kernels.gather(source.pool, moves(), staging, None)
    assert staged.tobytes() == content.tobytes()
    kernels.scatter(target.pool, moves(), staging)
    assert b"".join(target.page(number).tobytes() for number in PAGES) == content.tobytes()
    assert target.touched() == source.touched(), "other pages were written or read"
    sums = [kernels.checksum(one.pool, moves(), None).read()[0] for one in (source, target)]
    assert sums[0].tolist() == sums[1].tolist() != [0]


@pytest.mark.parametrize("name", KERNELS)
def test_far_pages_are_copied_into_far_pages_and_nothing_else_is_touched(name: str) -> None:
    """Both sides beyond 2^31 pieces and 2^32 bytes, each with an order of its own."""
    if name == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("Triton runs natively here: see tests/gpu")
    source, target, kernels = Sparse(), Sparse(), KERNELS[name]()
    content = noise(len(PAGES) * PAGE, 4)
    for i, number in enumerate(PAGES):
        source.page(number)[:] = content[i * PAGE : (i + 1) * PAGE]
    (move,) = moves()
    there = PAGES[::-1]
    pages = [Pages(one.pool, {K: PageTable(K, ids)}) for one, ids in ((source, PAGES), (target, there))]
    assert kernels.copy([PageMove(PageCopy(move.layout, move.layout), pages[0], pages[1])], None) is None
    assert b"".join(target.page(number).tobytes() for number in there) == content.tobytes()
    assert target.touched() == source.touched(), "other pages were written or read"


def test_descriptors_of_far_pages_name_their_bytes() -> None:
    """Both direct paths, and the addresses that a transport makes of them."""
    site = Sparse().pool.site
    parts = [Share("k", (LayerId(0),), range(1))]
    tables = {K: PageTable(K, PAGES)}
    segment = Segment(0, len(PAGES) * ROWS, 0, 1)
    for make, each in ((slice_writes, UNIT), (direct_writes, PAGE)):
        writes = make(PairPlan(site, site, parts), segment, tables, tables)
        want = sorted(number * PAGE + at for number in PAGES for at in range(0, PAGE, each))
        assert sorted(writes.local_off.tolist()) == sorted(writes.remote_off.tolist()) == want
        base = 1 << 40
        where = Extents([(RegionId(0), base, NBYTES)], "local")
        assert sorted(where.addresses(writes.local, writes.local_off, writes.nbytes) - base) == want
