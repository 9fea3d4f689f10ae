"""The contribution of a cell to a checksum, and the place of a cell in the whole cache.

A *cell* is one unit of one row of one component of one layer; no split cuts it. Its bytes are little-endian words of
four, the last one padded with zeros. With all arithmetic modulo 2^64, it adds ::

    mix(place + sum of word[j] * key[j])

``key[j]`` is odd and the same for every cell. ``place`` differs for every (layer, component, row, unit) of the whole
cache. A checksum is the sum over cells. Tensor parallelism, pipeline stages, replicas, pages, memory layouts and
segments only group the cells, so the sums of the pieces add up to the sum of the whole.

``mix`` is one to one and a key is odd, so a change of one word is always detected. Cells that are exchanged, shifted or
left over from an earlier transfer change at least two inputs of ``mix``. These changes cancel once in 2^64 times. So
does other damage within one cell, or once in 2^(64-v) times if the differences of all its words are multiples of 2^v.
Checksums find faults; they do not stop a peer that deceives on purpose.

``mix`` and the keys are SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014). The
factors of rows and units are those of a low-discrepancy sequence in three dimensions, whose multiples lie far apart.
"""

from __future__ import annotations

import hashlib
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from ...errors import GeometryError
from ...geometry import Site
from ...ids import LayerId
from ...planning import StagedLayout

U64 = npt.NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
ROW, UNIT = 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7
WORD_BYTES = 4

_MASK = (1 << 64) - 1


def mix(values: U64) -> U64:
    """SplitMix64's finalizer, element by element: one to one, every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(SECOND)
    return values ^ (values >> np.uint64(31))


def keys(words: int) -> U64:
    """The keys of a cell's words: SplitMix64's first outputs from the seed 0, made odd."""
    return mix(np.arange(1, words + 1, dtype=np.uint64) * np.uint64(GOLDEN)) | np.uint64(1)


@cache
def plane_key(layer: LayerId, component: str) -> int:
    """The place of a component's first unit in row 0: a hash, so that no order and no number of layers matter."""
    return int.from_bytes(hashlib.blake2b(f"{layer} {component}".encode(), digest_size=8).digest(), "little")


def places(site: Site, layout: StagedLayout) -> U64:
    """The place of every entry's first cell, ``[entries]``.

    A cell ``rows`` rows and ``units`` units after it has the place plus ``rows * ROW + units * UNIT``.

    Raises:
        GeometryError: an entry's units do not lie in one of the runs that the shard holds.
    """
    columns = layout.plane.tolist(), layout.first_unit.tolist(), layout.units.tolist()
    found = np.array([_place(site, *which) for which in zip(*columns, strict=True)], np.uint64)
    return found + layout.row_start.astype(np.uint64) * np.uint64(ROW)


@lru_cache(1 << 14)
def _place(site: Site, number: int, first: int, units: int) -> int:
    """Of row 0; parts of many pages name the same few planes and units again and again."""
    plane = site.planes[number]
    unit = _whole(site.shard.units(plane.layer, plane.component), first, units)
    return (plane_key(plane.layer, plane.component) + unit * UNIT) & _MASK


def _whole(runs: tuple[range, ...], first: int, units: int) -> int:
    """The number in the whole cache of a unit that is the ``first``-th of its plane."""
    at = first
    for run in runs:
        if at < len(run):
            if at + units <= len(run):
                return run.start + at
            break
        at -= len(run)
    raise GeometryError(f"units {first} to {first + units - 1} of a plane are not in one of its runs {runs}")
