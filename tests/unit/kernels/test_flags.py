"""Kernels ring flags behind the bytes, or leave them to their caller."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from disagg_kv.errors import ConfigurationError
from disagg_kv.geometry import CacheSpec, PageTable, shard
from disagg_kv.kernels import KERNELS, Kernels, PageMove, Pages
from disagg_kv.memory import Flag, PagedPool
from disagg_kv.planning import PageCopy
from tests.support.pools import KV, staged_layout

RINGING = [KERNELS["cpu"](), *([] if torch.cuda.is_available() else [KERNELS["triton"]()])]


class Words:
    """Words of this process, and flags of them."""

    def __init__(self, count: int = 3) -> None:
        self.words = np.zeros(count, np.uint64)
        at = self.words.ctypes.data
        self.flags = [Flag(at + 8 * i, (1 << 63) + i, self.words) for i in range(count)]

    @property
    def rung(self) -> list[bool]:
        """Which have their value."""
        return [int(word) == flag.value for word, flag in zip(self.words, self.flags, strict=True)]


def moves(pages: int = 2) -> tuple[PagedPool, PagedPool, list[PageMove]]:
    """A pool full of fives, an empty one, and one page's way between them."""
    spec = CacheSpec.kv(1, 2, 4, "float16")
    source, target = (PagedPool.allocate(spec, shard(spec), pages=pages, page_size=4) for _ in range(2))
    source.view(0)[...] = 5
    layout, tables = staged_layout([(0, 0, 2, 0, 4, 0)], 64), {KV: PageTable(KV, [1])}
    return source, target, [PageMove(PageCopy(layout, layout), Pages(source, tables), Pages(target, tables))]


@pytest.mark.parametrize("kernels", RINGING, ids=lambda kernels: kernels.name)
def test_flags_ring_behind_the_bytes(kernels: Kernels) -> None:
    """Not before the rows are final, and all of them."""
    _, target, given = moves()
    words = Words()

    class Final:
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            assert not words.words.any()
            assert not target.view(0).any()

    assert kernels.copy(given, Final(), words.flags) is None
    assert words.rung == [True] * 3
    assert target.view(0)[1].min() == 5


@pytest.mark.parametrize("kernels", RINGING, ids=lambda kernels: kernels.name)
def test_a_copy_that_fails_rings_nothing(kernels: Kernels) -> None:
    """Its caller may try it again."""
    _, _, given = moves()
    words = Words()

    class Fails:
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            raise OSError("the pass failed")

    with pytest.raises(OSError, match="the pass failed"):
        kernels.copy(given, Fails(), words.flags)
    assert not words.words.any()


def test_the_reference_leaves_flags_to_its_caller() -> None:
    """It is the specification of bytes."""
    _, target, given = moves()
    words = Words()
    KERNELS["reference"]().copy(given, None, words.flags)
    assert not words.words.any()
    assert target.view(0)[1].min() == 5


@pytest.mark.parametrize(("addr", "value"), [(0, 1), (8, 0), (8, 1 << 64), (-8, 1), (1 << 64, 1), ("8", 1)])
def test_what_is_no_word_or_no_value_is_refused(addr: int, value: int) -> None:
    with pytest.raises(ConfigurationError, match="flag: "):
        Flag(addr, value)
