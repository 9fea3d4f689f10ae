"""A batch becomes calls: few descriptors, none too large, all of one GPU."""

from __future__ import annotations

import numpy as np
import pytest

from disagg_kv.errors import RegistrationError
from disagg_kv.ids import RegionId
from disagg_kv.planning import Writes
from disagg_kv.testing.pair import batch
from disagg_kv.transports import Extents
from disagg_kv.transports.mooncake_flight import MOST, PIECE, Call, One, cut

BIG = 1 << 40
LOCAL = Extents([(RegionId(i), BIG * (i + 1), BIG) for i in range(3)], "local")
REMOTE = Extents([(RegionId(i), BIG * (i + 10), BIG) for i in range(3)], "remote")


def calls(writes: Writes, devices: list[tuple[int, str]] | None = None) -> list[Call]:
    made = list(cut(writes, LOCAL, REMOTE, devices or []))
    assert not any(isinstance(call, One) for call in made), "for single ranges only"
    return [call for call in made if isinstance(call, Call)]


def rows(call: Call) -> list[tuple[int, int, int]]:
    return list(zip(call.source.tolist(), call.target.tolist(), call.nbytes.tolist(), strict=True))


def test_neighbours_become_one_descriptor_and_nothing_is_left_out() -> None:
    """In any order."""
    (call,) = calls(batch(RegionId(0), RegionId(1), [(8, 108, 8), (0, 100, 8), (50, 50, 0), (99, 0, 1)]))
    assert rows(call) == [(BIG, 11 * BIG + 100, 16), (BIG + 99, 11 * BIG, 1)]
    assert call.device is None


def test_a_single_range_is_a_call_of_plain_numbers() -> None:
    """Not what lies outside its region, and not what one call cannot take."""
    one = cut(batch(RegionId(1), RegionId(2), [(5, 7, 100)]), LOCAL, REMOTE, [(0, "cpu"), (1, "cuda:1")])
    assert list(one) == [One(1, 2 * BIG + 5, 12 * BIG + 7, 100)]
    for wrong in ((BIG - 5, 0, 10), (0, BIG - 5, 10), (-1, 0, 10)):
        with pytest.raises(RegistrationError, match="not inside"):
            cut(batch(RegionId(0), RegionId(0), [wrong]), LOCAL, REMOTE, [])
    assert len(calls(batch(RegionId(0), RegionId(0), [(0, 0, PIECE + 1)]))) == 2


def test_nothing_takes_no_call() -> None:
    """An empty batch, and one of no bytes."""
    assert calls(batch(RegionId(0), RegionId(0), [])) == []
    assert calls(batch(RegionId(0), RegionId(0), [(0, 0, 0), (5, 5, 0)])) == []


def test_a_call_has_no_more_descriptors_than_the_library_takes() -> None:
    """All of them, in order."""
    made = calls(batch(RegionId(0), RegionId(0), [(2 * i, 2 * i, 1) for i in range(2500)]))
    assert [len(call.nbytes) for call in made] == [MOST, MOST, 500]
    assert [s - BIG for call in made for s in call.source.tolist()] == [2 * i for i in range(2500)]


def test_no_call_has_more_bytes_than_a_piece() -> None:
    """A large write is written in several calls, without a gap."""
    made = calls(batch(RegionId(0), RegionId(0), [(0, 7, 2 * PIECE + 5), (4 * PIECE, 4 * PIECE, 10)]))
    assert [rows(call) for call in made] == [
        [(BIG, 10 * BIG + 7, PIECE)],
        [(BIG + PIECE, 10 * BIG + 7 + PIECE, PIECE)],
        [(BIG + 2 * PIECE, 10 * BIG + 7 + 2 * PIECE, 5), (BIG + 4 * PIECE, 10 * BIG + 4 * PIECE, 10)],
    ]


def test_each_call_has_the_sources_of_one_gpu() -> None:
    """Whose index the thread must select; CPU memory has none."""
    ids = np.array([2, 0, 1, 0, 2], np.int32)
    at = np.arange(0, 500, 100, dtype=np.int64)
    writes = Writes(ids, at, np.zeros(5, np.int32), at, np.full(5, 10, np.int64))
    made = calls(writes, [(0, "cpu"), (1, "cuda:1"), (2, "cuda")])
    assert [(call.device, len(call.nbytes)) for call in made] == [(None, 2), (1, 1), (0, 2)]
