"""Kinds of conversions: entries of one kind go into one launch, of a kernel that is compiled for the kind."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from attrs import evolve, field, frozen

from ..geometry import PlaneConversion
from ..geometry.formats import FLOATS
from ..geometry.layout import Rule
from ..memory import PagedMemory
from ..planning import PageCopy, StagedLayout
from .base import Move, PageMove, converts
from .triton_tables import WIDEST, CellBytes, Planes, Shape


@frozen(cache_hash=True)
class Kind:
    """A conversion, as a kernel is compiled for it.

    Args:
        source, target: dtypes.
        rule: how numbers are scaled.
        elements: of a cell.
    """

    source: str
    target: str
    rule: Rule
    elements: int
    constants: tuple[int | float | str | bool, ...] = field(init=False, eq=False)
    """The kernel's last arguments."""

    @constants.default
    def _constants(self) -> tuple[int | float | str | bool, ...]:
        to = FLOATS[self.target]
        largest = int(np.array(to.largest, np.float32).view(np.int32))
        of_target = to.nbytes, to.mantissa, to.bias, largest, to.infinity, to.nan
        return self.source, FLOATS[self.source].nbytes, self.rule, self.elements, *of_target

    @property
    def numbers(self) -> CellBytes:
        """What a call's shape depends on."""
        written = 4 if self.rule == "scales" else FLOATS[self.target].nbytes
        return CellBytes(self.elements, FLOATS[self.source].nbytes, written, self.rule == "scales")


def numbers_of(kind: Kind | None) -> CellBytes | None:
    """What calls of a kind depend on; None where bytes are copied as they are."""
    return None if kind is None else kind.numbers


class Kinds:
    """The kinds of a pool's planes; None: bytes are copied as they are."""

    def __init__(self, pool: PagedMemory) -> None:
        site = pool.site
        found: dict[Kind | None, int] = {}
        each = [
            found.setdefault(kind, len(found)) for kind in map(_kind, site.conversions or (None,) * len(site.planes))
        ]
        self.every = tuple(found)
        self._of = np.array(each, np.int64)

    def planes(self, kind: Kind | None) -> list[int]:
        """The planes of one kind."""
        return [number for number, of in enumerate(self._of.tolist()) if self.every[of] == kind]

    def split(self, moves: Sequence[Move]) -> list[tuple[Kind | None, list[Move], list[npt.NDArray[np.bool_]]]]:
        """The moves of each kind, and which entries of the given ones they have."""
        parts: list[tuple[Kind | None, list[Move], list[npt.NDArray[np.bool_]]]] = []
        for number, kind in enumerate(self.every):
            masks = [self._of[move.layout.plane] == number for move in moves]
            if any(mask.any() for mask in masks):
                of = [evolve(m, layout=_only(m.layout, mask, kind)) for m, mask in zip(moves, masks, strict=True)]
                parts.append((kind, of, masks))
        return parts


_known: WeakKeyDictionary[PagedMemory, Kinds] = WeakKeyDictionary()


def kinds_of(pool: PagedMemory) -> Kinds:
    """The kinds of a pool's planes, looked up once."""
    found = _known.get(pool)
    if found is None:
        found = _known[pool] = Kinds(pool)
    return found


def split_copies(moves: Sequence[PageMove]) -> list[tuple[Kind | None, list[PageMove]]]:
    """The moves of each kind, from any pools."""
    found: dict[Kind | None, list[PageMove]] = {}
    for move in moves:
        pool = move.source.pool
        if not converts(pool):
            found.setdefault(None, []).append(move)
            continue
        source, target = move.copy.source, move.copy.target
        for kind, (some,), (mask,) in kinds_of(pool).split([Move(source, move.source.tables, 0)]):
            copy = PageCopy(some.layout, _only(target, mask, kind))
            found.setdefault(kind, []).append(evolve(move, copy=copy))
    return list(found.items())


def _only(layout: StagedLayout, mask: npt.NDArray[np.bool_], kind: Kind | None) -> StagedLayout:
    """The entries of one kind."""
    some = StagedLayout(
        layout.plane[mask],
        layout.first_unit[mask],
        layout.units[mask],
        layout.row_start[mask],
        layout.row_stop[mask],
        layout.offset[mask],
        layout.nbytes,
    )
    return some if layout.alike is None else some.one_of((layout.alike, kind))


def shapes(
    planes: Planes,
    pool: PagedMemory,
    tile_bytes: int,
    kind: Kind | None = None,
    other: int | None = None,
    *,
    cells: bool = False,
) -> set[Shape]:
    """How calls for planes of one kind are cut, whichever planes, units, rows and pages they name.

    What they name on the other side matters only where that is aligned worse than the pool is.

    Args:
        planes: of the pool.
        pool: it.
        tile_bytes: what one program moves, a power of two.
        kind: of the planes.
        other: addresses and strides on the other side, or'ed; None: those of parts in staging.
        cells: True: a piece is one cell, as in checksums.
    """
    site, mine = pool.site, kinds_of(pool).planes(kind)
    if other is None:
        other = WIDEST
        for plane in site.planes:
            other |= site.spec.component(plane.layer, plane.component).unit_bytes
    base, page_stride, row_stride, unit_stride, rows_per_page, unit_bytes = planes.words[mine].T[:6]
    first = base | page_stride | np.where(rows_per_page > 1, row_stride, 0)
    worst = int(np.bitwise_or.reduce(first | row_stride | unit_stride))
    if kind is not None:
        numbers = kind.numbers
        least = numbers.aligned(worst, other, planes.scales_bits(mine))
        most = max(numbers.aligned(bits, 0, 0) for bits in first.tolist())
        return {numbers.shape(one, np.ones(1, np.int64), tile_bytes) for one in _powers(least, most)}
    least = _lowest(worst | other | int(np.bitwise_or.reduce(unit_bytes)) | 16)
    beside = unit_stride == unit_bytes
    bits = (first | np.where(beside, 0, unit_stride) | 16).tolist()
    named = [(site.planes[number].layer, site.planes[number].component) for number in mine]
    counts = [sum(map(len, site.shard.units(*one))) for one in named]
    most_units = np.where(beside & (not cells), counts, 1).tolist()
    return {
        Shape.of_runs(aligned, run, tile_bytes)
        for low, size, units in {*zip(map(_lowest, bits), unit_bytes.tolist(), most_units, strict=True)}
        for run in range(size, units * size + 1, size)
        for aligned in _powers(least, _lowest(low | run))
    }


def _lowest(bits: int) -> int:
    return bits & -bits


def _powers(least: int, most: int) -> list[int]:
    """Powers of two, both ends included."""
    return [1 << i for i in range(least.bit_length() - 1, most.bit_length())]


def _kind(how: PlaneConversion | None) -> Kind | None:
    if how is None:
        return None
    return Kind(how.source, how.target, how.rule, how.unit_bytes // FLOATS[how.source].nbytes)
