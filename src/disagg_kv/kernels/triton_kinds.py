"""Kinds of conversions: entries of one kind go into one launch, of a kernel that is compiled for the kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from attrs import evolve, field, frozen

from ..geometry import I64, PlaneConversion
from ..geometry.formats import FLOATS
from ..geometry.layout import Rule
from ..memory import PagedMemory
from ..planning import PageCopy, StagedLayout
from .base import Move, PageMove, converts
from .triton_tables import Call, CellBytes, Planes, Shape, warm_moves


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


def filled(call: Call, into: I64, at: int, staging: int, tile_bytes: int, kind: Kind | None) -> Shape:
    """Write a call's table; see :meth:`.triton_tables.Call.write`."""
    if kind is None:
        return call.write(into, at, staging, tile_bytes)
    return call.write_converted(into, at, staging, kind.numbers, tile_bytes)


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


def shapes(planes: Planes, pool: PagedMemory, tile_bytes: int, kind: Kind | None = None) -> Iterator[Shape]:
    """How requests for one to all units of a pool's planes of one kind are cut, as their rows allow.

    Args:
        planes: of the pool.
        pool: it.
        tile_bytes: what one program moves, a power of two.
        kind: of the planes.
    """
    for call in _calls(planes, pool, kind):
        yield filled(call, np.zeros(call.words, np.int64), 0, 0, tile_bytes, kind)


def shapes_of_sums(planes: Planes, pool: PagedMemory, tile_bytes: int, kind: Kind | None = None) -> Iterator[Shape]:
    """The same for checksums."""
    for call in _calls(planes, pool, kind):
        into, places = np.zeros(call.words + call.entries, np.int64), np.zeros(call.entries, np.int64)
        yield call.write_sums(into, 0, places, tile_bytes, numbers_of(kind))


def _calls(planes: Planes, pool: PagedMemory, kind: Kind | None) -> Iterator[Call]:
    for move in warm_moves(pool):
        for found, some, _ in kinds_of(pool).split([move]):
            if found == kind:
                yield Call(planes, some)


def _kind(how: PlaneConversion | None) -> Kind | None:
    if how is None:
        return None
    return Kind(how.source, how.target, how.rule, how.unit_bytes // FLOATS[how.source].nbytes)
