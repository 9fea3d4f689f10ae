"""Kinds of conversions: entries of one kind go into one launch, of a kernel that is compiled for the kind."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

from ...geometry import PlaneConversion
from ...geometry.formats import FLOATS
from ...geometry.layout import Rule
from ...memory import PagedMemory
from ...planning import PageCopy, StagedLayout
from ..base import Move, PageMove
from ..triton_kernels import OPS, Op, Tuning
from ..triton_tables import Cells
from .triton import convert


@frozen(cache_hash=True)
class Kind:
    """A conversion, as the kernel is compiled for it.

    Args:
        source, target: dtypes.
        rule: how numbers are scaled.
        elements: of a cell.
    """

    source: str
    target: str
    rule: Rule
    elements: int

    @property
    def constants(self) -> tuple[int | float | str | bool, ...]:
        """The kernel's last arguments."""
        to = FLOATS[self.target]
        largest = int(np.array(to.largest, np.float32).view(np.int32))
        of_target = to.nbytes, to.mantissa, to.bias, largest, to.infinity, to.nan
        return self.source, FLOATS[self.source].nbytes, self.rule, self.elements, *of_target


TUNED = {
    "gather": Tuning(tile_bytes=8192, warps=4),
    "copy": Tuning(tile_bytes=32768, warps=16, programs=1),
    "checksum": Tuning(tile_bytes=8192, warps=4),
}
"""See :data:`..triton_kernels.OPS`."""


@cache
def op_of(name: str, kind: Kind | None) -> Op:
    """An operation on cells of one kind: ``"gather"``, ``"copy"``, ``"checksum"``, or of bytes as they are any."""
    if kind is None:
        return OPS[name]
    scales = kind.rule == "scales"
    written = 4 if scales else FLOATS[kind.target].nbytes
    cells = Cells(kind.elements, FLOATS[kind.source].nbytes, written, scales)
    return Op(convert, TUNED[name], (name, *kind.constants), cells)


class Kinds:
    """The kinds of a pool's planes; None: bytes are copied as they are."""

    def __init__(self, pool: PagedMemory) -> None:
        site = pool.site
        found: dict[Kind | None, int] = {}
        each = [
            found.setdefault(kind, len(found)) for kind in map(_kind, site.conversions or (None,) * len(site.planes))
        ]
        self._every = tuple(found)
        self._of = np.array(each, np.int64)

    def planes(self) -> list[tuple[Kind | None, list[int]]]:
        """The planes of each kind."""
        return [(kind, np.flatnonzero(self._of == number).tolist()) for number, kind in enumerate(self._every)]

    def split(self, moves: Sequence[Move]) -> list[tuple[Kind | None, list[Move], list[npt.NDArray[np.bool_]]]]:
        """The moves of each kind, and which entries of the given ones they have."""
        parts: list[tuple[Kind | None, list[Move], list[npt.NDArray[np.bool_]]]] = []
        for number, kind in enumerate(self._every):
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
        if pool.site.converts is None:
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


def _kind(how: PlaneConversion | None) -> Kind | None:
    if how is None:
        return None
    return Kind(how.source, how.target, how.rule, how.unit_bytes // FLOATS[how.source].nbytes)
