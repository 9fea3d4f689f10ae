"""Kinds of conversions: entries of one kind go into one launch, of a kernel that is compiled for the kind."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from attrs import evolve, field, frozen

from ..geometry import I64, PlaneConversion
from ..geometry.formats import FLOATS
from ..geometry.layout import Rule
from ..memory import PagedMemory
from ..planning import StagedLayout
from .base import Move
from .triton_tables import Call, CellBytes, Shape


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
        return CellBytes(self.elements, FLOATS[self.source].nbytes, written)


def filled(call: Call, into: I64, at: int, staging: int, tile_bytes: int, kind: Kind | None) -> Shape:
    """Write a call's table; see :meth:`.triton_tables.Call.write`."""
    if kind is None:
        return call.write(into, at, staging, tile_bytes)
    return call.write_converted(into, at, staging, kind.numbers, tile_bytes)


class Kinds:
    """The kinds of a pool's planes; None: bytes are copied as they are."""

    def __init__(self, pool: PagedMemory) -> None:
        found: dict[Kind | None, int] = {}
        self._of = np.array(
            [found.setdefault(kind, len(found)) for kind in map(_kind, pool.site.conversions)], np.int64
        )
        self.every = tuple(found)

    def split(self, moves: Sequence[Move]) -> list[tuple[Kind | None, list[Move], list[npt.NDArray[np.bool_]]]]:
        """The moves of each kind, and which entries of the given ones they have."""
        parts: list[tuple[Kind | None, list[Move], list[npt.NDArray[np.bool_]]]] = []
        for number, kind in enumerate(self.every):
            masks = [self._of[move.layout.plane] == number for move in moves]
            if any(mask.any() for mask in masks):
                of = [_only(move, mask, number) for move, mask in zip(moves, masks, strict=True)]
                parts.append((kind, of, masks))
        return parts


_known: WeakKeyDictionary[PagedMemory, Kinds] = WeakKeyDictionary()


def kinds_of(pool: PagedMemory) -> Kinds:
    """The kinds of a pool's planes, looked up once."""
    found = _known.get(pool)
    if found is None:
        found = _known[pool] = Kinds(pool)
    return found


def _only(move: Move, mask: npt.NDArray[np.bool_], number: int) -> Move:
    layout = move.layout
    some = StagedLayout(
        layout.plane[mask],
        layout.first_unit[mask],
        layout.units[mask],
        layout.row_start[mask],
        layout.row_stop[mask],
        layout.offset[mask],
        layout.nbytes,
    )
    if layout.alike is not None:
        some.one_of((layout.alike, number))
    return evolve(move, layout=some)


def _kind(how: PlaneConversion | None) -> Kind | None:
    if how is None:
        return None
    return Kind(how.source, how.target, how.rule, how.unit_bytes // FLOATS[how.source].nbytes)
