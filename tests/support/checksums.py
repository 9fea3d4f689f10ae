"""The checksum, cell by cell and byte by byte in Python's integers, from its description alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate

from disagg_kv.kernels import Move
from disagg_kv.memory import PagedPool
from tests.support.pools import Bytes, copies

TOP = 2**64


def splitmix(state: int) -> int:
    """The output of SplitMix64 for a state, which its generator advances by the golden ratio."""
    z = state % TOP
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % TOP
    z = (z ^ z >> 27) * 0x94D049BB133111EB % TOP
    return z ^ z >> 31


def cell_sum(data: bytes, layer: int, component: str, row: int, unit: int) -> int:
    """What one cell adds."""
    place = int.from_bytes(hashlib.blake2b(b"%d %s" % (layer, component.encode()), digest_size=8).digest(), "little")
    place += row * 0xD1B54A32D192ED03 + unit * 0x8CB92BA72F3D8DD7
    for at, byte in enumerate(data):
        key = splitmix((at // 4 + 1) * 0x9E3779B97F4A7C15) | 1
        place += (byte << 8 * (at % 4)) * key
    return splitmix(place)


def expected_sums(pool: PagedPool, memory: Bytes, moves: Sequence[Move]) -> list[list[int]]:
    """For each move the sum of every entry; the pool has one buffer and holds its units in one run from 0 on."""
    found: list[list[int]] = []
    cells = iter(copies(pool, moves))
    for move in moves:
        layout = move.layout
        found.append([])
        for i, number in enumerate(layout.plane.tolist()):
            plane = pool.site.planes[number]
            total = 0
            for row in range(int(layout.row_start[i]), int(layout.row_stop[i])):
                for unit in range(int(layout.first_unit[i]), int(layout.first_unit[i]) + int(layout.units[i])):
                    at, _, nbytes = next(cells)
                    total += cell_sum(memory[at : at + nbytes].tobytes(), plane.layer, plane.component, row, unit)
            found[-1].append(total % TOP)
    return found


def total(sums: Sequence[Sequence[int]]) -> int:
    """All of them, modulo 2^64."""
    return [0, *accumulate(int(one) for of in sums for one in of)][-1] % TOP
