"""The memory layout of a rank's part of the cache: page spaces, planes and page tables. Strides only, no memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import NoneType
from typing import Literal, overload

import attrs
import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from .. import arguments
from ..errors import GeometryError
from ..ids import KV, GroupId, LayerId
from .formats import conversion
from .shard import Shard
from .spec import CacheSpec, Extent

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


def _group(group: str) -> GroupId:
    return GroupId(group)


def _layer(layer: int) -> LayerId:
    return LayerId(layer)


@frozen
class Group:
    """One page-id space.

    A group has either tokens or states. A page of a group of states is the slot of one room.

    Args:
        id: its name.
        rows_per_page: rows (tokens) of one page; for states: the largest number of rows of one state.
        pages: number of pages.
        null_page: a page without data. A table may name it, more than once, for rows that are not sent; None: there is
            none.
    """

    id: GroupId = field(converter=_group)
    rows_per_page: int
    pages: int
    null_page: int | None = None

    def __attrs_post_init__(self) -> None:
        where = f"group {arguments.shown(self.id)}"
        arguments.text(self.id, where)
        for name in ("rows_per_page", "pages"):
            number = arguments.count(getattr(self, name), f"{where}: {name}", error=GeometryError)
            object.__setattr__(self, name, number)
        if self.rows_per_page < 1 or self.pages < 1:
            raise GeometryError(f"{where}: {self.pages} pages of {self.rows_per_page} rows")
        if self.null_page is not None:
            null = arguments.count(self.null_page, f"{where}: null_page", error=GeometryError)
            object.__setattr__(self, "null_page", null)


@frozen
class Plane:
    """One component of one layer in one pool; all strides and the offset in bytes.

    The byte ``b`` of unit ``u`` (counted within the shard) of slot ``s`` of page ``p`` lies in buffer ``buffer`` at
    ``offset + p * page_stride + s * row_stride + u * unit_stride + b``.
    """

    layer: LayerId = field(converter=_layer)
    component: str
    group: GroupId = field(converter=_group)
    buffer: int
    offset: int
    page_stride: int
    row_stride: int
    unit_stride: int

    def __attrs_post_init__(self) -> None:
        arguments.text(self.component, "plane: component")
        arguments.text(self.group, "plane: group")
        for name in ("layer", "buffer", "offset", "page_stride", "row_stride", "unit_stride"):
            # Signs and sizes are checked with the site.
            least, value = -arguments.MOST, getattr(self, name)
            object.__setattr__(self, name, arguments.count(value, f"plane: {name}", least=least, error=GeometryError))


Rule = Literal["given", "computed", "scales", "read"]
"""How numbers are scaled: by factors that are known, by the row's own scale, which is computed and whose reciprocal is
the factor; the result may be that scale itself; or by a scale that is read from another plane."""


@frozen
class PlaneConversion:
    """How the bytes of a plane come from bytes in other numbers, which lie where the plane says.

    Args:
        source, target: dtypes, a pair of :data:`.formats.CONVERSIONS`. The target of ``"scales"`` is that of the
            numbers which they scale.
        unit_bytes: of a unit in memory.
        rule: how numbers are scaled.
        factors: of ``"given"``: what numbers are multiplied by, as float32: none, one, or one per unit of the plane.
        scales: of ``"read"``: the plane of the pool that has a float32 scale per row and unit.
    """

    source: str
    target: str
    unit_bytes: int
    rule: Rule
    factors: tuple[float, ...] = ()
    scales: Plane | None = None


LAST_PAGE = 2**31 - 1
"""The largest page id that there is."""

FEW = 32
"""Up to this number of pages, Python is faster than NumPy."""


def _pages(pages: object) -> I32:
    try:
        given = np.asarray(None if isinstance(pages, bytes | bytearray | memoryview) else pages)
    except Exception as exc:
        raise arguments.wrong("page ids", pages, "a flat list of integers is needed", GeometryError) from exc
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise GeometryError(f"page ids must be a flat list of integers, not {given.dtype} of shape {given.shape}")
    if given.size:
        ends: list[int] = given.tolist() if given.size <= FEW else [int(given.min()), int(given.max())]
        low, high = min(ends), max(ends)
        if low < 0 or high > LAST_PAGE:
            raise GeometryError(f"page ids must be 0 to 2^31-1, not {low} to {high}")
    return given.astype(np.int32, copy=False)


@frozen(init=False)
class PageTable:
    """The pages of one room in one group: ``pages[0]`` begins at the room's row ``first``.

    ``PageTable([3, 0, 2])`` are pages of the group ``"kv"``, which a pool has unless the engine names its groups;
    ``PageTable("window", [3, 0, 2])`` are pages of another one.

    Args:
        group: the page-id space, by name.
        pages: page ids ``[n]``, int32.
        first: a row of the room, at a page's start.
    """

    group: GroupId
    pages: I32 = field(eq=attrs.cmp_using(eq=np.array_equal))
    first: int
    _distinct_in: Group | None = field(default=None, init=False, eq=False, repr=False)

    @overload
    def __init__(self, pages: npt.ArrayLike, /, *, first: int = 0) -> None: ...

    @overload
    def __init__(self, group: str, pages: npt.ArrayLike, first: int = 0) -> None: ...

    def __init__(self, group: str | npt.ArrayLike, pages: npt.ArrayLike | None = None, first: int = 0) -> None:
        if pages is None and not isinstance(group, str):
            group, pages = KV, group
        if type(group) is not str or not group.isascii():
            group = arguments.text(group, "page table: group")
        first = arguments.count(first, "page table: first", least=-arguments.MOST, error=GeometryError)
        self.__attrs_init__(GroupId(group), _pages(pages), first)

    def check(self, group: Group, start: int, stop: int, needed: int | None = None) -> None:
        """Raise a :class:`GeometryError` unless the rows ``[start, stop)`` lie in distinct pages of ``group``.

        Rows before ``needed`` may lie in the null page; None: no row may.
        """
        rows = arguments.one(group, "group", Group).rows_per_page
        start = arguments.count(start, "start", error=GeometryError)
        stop = arguments.count(stop, "stop", error=GeometryError)
        needed = start if needed is None else max(start, arguments.count(needed, "needed", error=GeometryError))
        if self.first < 0 or self.first % rows:
            raise GeometryError(f"group {group.id!r}: a table begins at row {self.first}, not at a page of {rows} rows")
        if start < self.first:
            raise GeometryError(f"group {group.id!r}: rows from {start} on, but the table begins at {self.first}")
        end = self.first + len(self.pages) * rows
        if stop > end:
            raise GeometryError(f"group {group.id!r}: rows up to {stop}, but {len(self.pages)} pages end at {end}")
        if len(self.pages) and self._distinct_in is not group:
            self._check_pages(group)
            object.__setattr__(self, "_distinct_in", group)
        if group.null_page is not None:
            self._check_null(group, needed, stop)

    def _check_null(self, group: Group, start: int, stop: int) -> None:
        rows = group.rows_per_page
        first = (start - self.first) // rows
        null = np.flatnonzero(self.pages[first : -(-(stop - self.first) // rows)] == group.null_page)
        if start < stop and len(null):
            row = max(start, self.first + (first + int(null[0])) * rows)
            raise GeometryError(f"group {group.id!r}: row {row} is needed, but it lies in the null page")

    def _check_pages(self, group: Group) -> None:
        """Check all pages, once. A caller that moves a part of a long room reads only that part's rows."""
        pages = self.pages if group.null_page is None else self.pages[self.pages != group.null_page]
        if len(pages) <= FEW:
            few: list[int] = pages.tolist()
            top, twice = max(few, default=0), len(set(few)) < len(few)
        else:
            ascending = np.sort(pages)
            top, twice = int(ascending[-1]), bool((ascending[1:] == ascending[:-1]).any())
        if top >= group.pages:
            raise GeometryError(f"group {group.id!r}: page {top} of {group.pages}")
        if twice:
            raise GeometryError(f"group {group.id!r}: a page is in the table twice")


def places(table: PageTable, rows_per_page: int, start: int, stop: int) -> tuple[I64, I64]:
    """Page id and slot in its page of each row ``[start, stop)``, int64: they are multiplied by strides in bytes.

    NumPy keeps a product with a scalar in the array's own type: 32 bits end within a pool of a few GiB.
    """
    page, slot = np.divmod(np.arange(start - table.first, stop - table.first, dtype=np.int64), rows_per_page)
    return table.pages[page].astype(np.int64), slot


def _groups(groups: Iterable[Group]) -> tuple[Group, ...]:
    return arguments.several(groups, "groups", Group, GeometryError)


def _planes(planes: Iterable[Plane]) -> tuple[Plane, ...]:
    return arguments.several(planes, "planes", Plane, GeometryError)


def _conversions(conversions: Sequence[PlaneConversion | None]) -> tuple[PlaneConversion | None, ...]:
    if not isinstance(conversions, list | tuple) or any(
        type(c) not in (PlaneConversion, NoneType) for c in conversions
    ):
        raise arguments.wrong("conversions", conversions, "a list of PlaneConversion or None is needed", GeometryError)
    return tuple(conversions)


def _buffers(buffers: Iterable[int]) -> tuple[int, ...]:
    return arguments.counts(buffers, "buffers", least=1, error=GeometryError)


@frozen(cache_hash=True)
class Site:
    """All that planning needs of one rank's pool, without its memory; it crosses the wire.

    Args:
        spec: the whole cache.
        shard: the part that this rank owns.
        groups: its page-id spaces.
        planes: exactly one per (layer, component) of the shard.
        buffers: bytes of each buffer that planes refer to.
        overlaid: the groups share one space of page ids: a page belongs to one group at a time, so planes of different
            groups may share bytes, page by page. It does not cross the wire: a peer needs only the page tables.
        conversions: of a pool that is read as another cache (:func:`.conversion.read_as`): for each plane how its
            bytes come from those in memory, None: they are the same; else empty. It does not cross the wire.
    """

    spec: CacheSpec
    shard: Shard
    groups: tuple[Group, ...] = field(converter=_groups)
    planes: tuple[Plane, ...] = field(converter=_planes)
    buffers: tuple[int, ...] = field(converter=_buffers)
    overlaid: bool = False
    conversions: tuple[PlaneConversion | None, ...] = field(default=(), converter=_conversions)

    def __attrs_post_init__(self) -> None:
        arguments.one(self.spec, "site: spec", CacheSpec)
        arguments.one(self.shard, "site: shard", Shard)
        arguments.flag(self.overlaid, "site: overlaid")

    def group(self, group: str) -> Group:
        """The group of that name."""
        arguments.one(group, "group", str, GeometryError)
        for one in self.groups:
            if one.id == group:
                return one
        raise GeometryError(f"no group {group!r}; there are {[g.id for g in self.groups]}")

    @cached_property
    def state_groups(self) -> frozenset[GroupId]:
        """The groups whose pages are slots of states."""
        return frozenset(p.group for p in self.planes if self.spec.component(p.layer, p.component).rows)

    @cached_property
    def token_groups(self) -> tuple[Group, ...]:
        """The groups whose pages are rows of tokens, in order."""
        return tuple(g for g in self.groups if g.id not in self.state_groups)

    @cached_property
    def sliding_groups(self) -> frozenset[GroupId]:
        """The groups of tokens of which decode needs a window alone."""
        whole = {p.group for p in self.planes if self.spec.component(p.layer, p.component).window is None}
        return frozenset(g.id for g in self.token_groups if g.id not in whole)

    def first_rows(self, start: int, stop: int | None) -> Mapping[GroupId, int]:
        """Per group of tokens the first row that is needed of a room; see :meth:`Extent.bounds`."""
        start = arguments.count(start, "start", error=GeometryError)
        stop = None if stop is None else arguments.count(stop, "stop", error=GeometryError)
        return {group: min(one.bounds(start, stop)[0] for one in extents) for group, extents in self._extents.items()}

    @cached_property
    def _extents(self) -> Mapping[GroupId, tuple[Extent, ...]]:
        """Per group of tokens the extents of its planes, each once: a model has many layers, but few kinds of them."""
        found: dict[GroupId, dict[Extent, None]] = {}
        for plane in self.planes:
            if plane.group not in self.state_groups:
                extent = self.spec.component(plane.layer, plane.component).extent
                found.setdefault(plane.group, {})[extent] = None
        return {group: tuple(extents) for group, extents in found.items()}

    @cached_property
    def converts(self) -> str | None:
        """The conversions of a pool that is read as another cache, by name; None: there are none."""
        pairs = {(how.source, how.target) for how in self.conversions if how is not None}
        return ", ".join(conversion(*pair) for pair in sorted(pairs)) or None

    @cached_property
    def stored_bytes(self) -> tuple[int, ...]:
        """Bytes of a unit of each plane in memory, where it may wait for its conversion."""
        units = (self.spec.component(plane.layer, plane.component).unit_bytes for plane in self.planes)
        hows = self.conversions or (None,) * len(self.planes)
        return tuple(unit if how is None else how.unit_bytes for unit, how in zip(units, hows, strict=True))

    def page_rows(self, plane: Plane) -> int:
        """Rows per page of a plane. A state has its own number of rows."""
        arguments.one(plane, "plane", Plane)
        return self.spec.component(plane.layer, plane.component).rows or self.group(plane.group).rows_per_page

    @cached_property
    def page_bytes(self) -> Mapping[GroupId, int]:
        """Bytes of one page of each group, in all planes."""
        nbytes = dict.fromkeys((g.id for g in self.groups), 0)
        for plane in self.planes:
            units = sum(map(len, self.shard.units(plane.layer, plane.component)))
            unit_bytes = self.spec.component(plane.layer, plane.component).unit_bytes
            nbytes[plane.group] += self.page_rows(plane) * units * unit_bytes
        return nbytes

    def check_owners(self, tables: Sequence[PageTable]) -> None:
        """Raise a :class:`GeometryError` if a room's tables name one page in two groups that are overlaid.

        Null pages have no data, so every group may name them.
        """
        tables = arguments.several(tables, "tables", PageTable, GeometryError)
        if not self.overlaid:
            return
        given = [(table.group, table.pages[table.pages != self.group(table.group).null_page]) for table in tables]
        pages = np.concatenate([np.zeros(0, np.int32), *(named for _, named in given)])
        owners = np.repeat(np.arange(len(given)), [len(named) for _, named in given])
        order = np.argsort(pages, kind="stable")
        for at in np.flatnonzero(np.diff(pages[order]) == 0).tolist():
            first, second = (given[owners[order[one]]][0] for one in (at, at + 1))
            if first != second:
                raise GeometryError(
                    f"page {pages[order[at]]} is in group {first!r} and in group {second!r}, which are overlaid: "
                    "a page belongs to one of them"
                )

    def check(self) -> None:
        """Raise a :class:`GeometryError` unless planes match the shard and every byte of them lies in its buffer."""
        self.shard.check(self.spec)
        held = {(layer, h.component) for h in self.shard for layer in h.layers}
        named = [(p.layer, p.component) for p in self.planes]
        if len(set(named)) != len(named) or set(named) != held:
            raise GeometryError(f"planes {sorted(set(named) ^ held) or 'given twice'} do not match the shard")
        for plane in self.planes:
            self._check_plane(plane)
            if plane.group in self.state_groups and not self.spec.component(plane.layer, plane.component).rows:
                raise GeometryError(f"group {plane.group!r} has pages of tokens ({plane.component!r}) and of states")

    def _check_plane(self, plane: Plane) -> None:
        component = self.spec.component(plane.layer, plane.component)
        group = self.group(plane.group)
        rows = self.page_rows(plane)
        units = sum(len(r) for r in self.shard.units(plane.layer, plane.component))
        where = f"layer {plane.layer}, {plane.component!r}"
        strides = (plane.page_stride, plane.row_stride, plane.unit_stride)
        if min(strides) < 1 or plane.offset < 0:
            raise GeometryError(f"{where}: strides must be positive and the offset not negative: {plane}")
        if rows > group.rows_per_page:
            raise GeometryError(f"{where}: a state of {rows} rows in slots of {group.rows_per_page}")
        _disjoint(
            where,
            [
                (plane.unit_stride, units, component.unit_bytes),
                (plane.row_stride, rows, component.unit_bytes),
                (plane.page_stride, group.pages, component.unit_bytes),
            ],
        )
        if not 0 <= plane.buffer < len(self.buffers):
            raise GeometryError(f"{where}: buffer {plane.buffer} of {len(self.buffers)}")
        last = (group.pages - 1) * plane.page_stride + (rows - 1) * plane.row_stride
        end = plane.offset + last + (units - 1) * plane.unit_stride + component.unit_bytes
        if end > self.buffers[plane.buffer]:
            raise GeometryError(f"{where}: ends at byte {end} of a buffer of {self.buffers[plane.buffer]}")


def _disjoint(where: str, axes: Sequence[tuple[int, int, int]]) -> None:
    """Raise unless cells addressed by nested strides cannot overlap: each stride covers the extent of the smaller."""
    extent = axes[0][2]
    for stride, count, _ in sorted(axes):
        if count == 1:
            continue
        if stride < extent:
            raise GeometryError(f"{where}: a stride of {stride} bytes makes cells of {extent} bytes overlap")
        extent += stride * (count - 1)
