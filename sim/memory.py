"""Memory of one simulated rank, with a shadow: who owns each page, and what it should hold."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt
from attrs import frozen

from disagg_kv.geometry import PageTable, Plane, Site
from disagg_kv.ids import GroupId
from disagg_kv.memory import U8, Buffer, PagedPool

from .model import Model, spec_of
from .scenario import AUX_BYTES, FULL, SLIDE, Split, site_of

I32 = npt.NDArray[np.int32]
AUX_SLOTS = 8
KV, STATE = FULL, GroupId("state")
FREE = 0
"""Owner of a free page."""

CACHED = -1
"""Owner of a page that a prefix cache has: rooms read it, and nothing writes to it."""


@lru_cache(1)
def _noise() -> U8:
    return np.random.Generator(np.random.PCG64(20)).integers(0, 256, 1 << 18, np.uint8)


def content(what: bytes, nbytes: int) -> U8:
    """``nbytes`` pseudo-random bytes that belong to ``what``; read only."""
    noise = _noise()
    start = int.from_bytes(hashlib.blake2b(what, digest_size=4).digest(), "big") % (len(noise) - nbytes)
    return noise[start : start + nbytes]


@lru_cache(1024)
def width_of(model: Model) -> int:
    """Bytes of a row of tokens of the whole cache."""
    return sum(c.units * c.unit_bytes for cs in spec_of(model).layers.values() for c in cs if not c.rows)


def truth(model: Model, room: bytes, life: int, epoch: bytes, rows: int) -> U8:
    """Every byte of a room, ``[rows, bytes of a row]``: a function of room, life, epoch, row, layer, head and byte.

    The columns of a row are its layers, in them the components, in those the units.
    """
    width = width_of(model)
    return content(b"%b %d %b" % (room, life, epoch), rows * width).reshape(rows, width)


def states_truth(model: Model, room: bytes, life: int, epoch: bytes) -> U8:
    """Every byte of a room's states: layers, in them the components, in those the rows and units. None: length 0."""
    of = spec_of(model).layers.values()
    return content(
        b"states %b %d %b" % (room, life, epoch), sum(c.rows * c.units * c.unit_bytes for cs in of for c in cs)
    )


@frozen(eq=False)
class Lens:
    """Where the cells of a room lie in a pool of one buffer, worked out by plain indexing.

    Slots of states are pages too, of one row each: their numbers begin after those of the pages of tokens.

    Args:
        columns: which columns of a room's row the rank holds ``[n]``.
        layers: the layer of each ``[n]``.
        windows: how many of the last rows are needed of each; 0: all ``[n]``.
        places: the byte of each of them ``[pages, rows of a page, n]``.
        state_columns: which of the bytes of a room's states the rank holds ``[m]``.
        state_places: the byte of each of them ``[slots, m]``.
        page_of: the page of each byte of the buffer, -1 between pages ``[nbytes]``.
        nbytes: of the buffer.
    """

    columns: I32
    layers: I32
    windows: I32
    places: I32
    state_columns: I32
    state_places: I32
    page_of: I32
    nbytes: int

    def lacked(self, held: int, stop: int, known: bool) -> int:
        """How many bytes a room lacks that has ``held`` of ``stop`` rows; only a known end bounds the windows."""
        rows = np.full(len(self.columns), stop - held)
        if known:
            rows[self.windows > 0] = np.minimum(self.windows, stop)[self.windows > 0]
        return int(rows.sum()) + len(self.state_columns)


def page_ids(site: Site, group: GroupId, pages: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """The ids of a room's pages in one group.

    Groups that are overlaid share the ids: of two ids each group has one, and pages take turns in which.
    """
    pages = np.asarray(pages, np.int64)
    return 2 * pages + (pages + (group == SLIDE)) % 2 if site.overlaid else pages


class _Cells:
    """The cells of pages of one kind, gathered plane by plane."""

    def __init__(self, pages: int, site: Site) -> None:
        self._pages = np.arange(pages)
        self._site = site
        self.columns = [np.zeros(0, np.int64)]
        self.layers = [np.zeros(0, np.int64)]
        self.windows = [np.zeros(0, np.int64)]
        self.places: list[npt.NDArray[np.int64]] = []

    def add(self, plane: Plane, begin: int) -> None:
        """All cells of a plane; its columns begin at ``begin``, and those of the rows of a state follow each other."""
        site, pages = self._site, page_ids(self._site, plane.group, self._pages)
        c = site.spec.component(plane.layer, plane.component)
        units = [u for run in site.shard.units(plane.layer, plane.component) for u in run]
        rows, of_unit = np.arange(site.page_rows(plane)), np.arange(c.unit_bytes)
        of_page = plane.offset + pages[:, None, None] * plane.page_stride + rows[:, None] * plane.row_stride
        for local, unit in enumerate(units):
            where = of_page + (local * plane.unit_stride + of_unit)
            columns = begin + unit * c.unit_bytes + of_unit
            if c.rows:
                where = where.reshape(len(where), 1, -1)
                columns = (columns + rows[:, None] * (c.units * c.unit_bytes)).reshape(-1)
            self.columns.append(columns)
            self.layers.append(np.full(len(columns), plane.layer))
            self.windows.append(np.full(len(columns), c.window or 0))
            self.places.append(where)

    def all_places(self, rows: int) -> I32:
        """``[pages, rows of a page, columns]``."""
        empty = np.zeros((len(self._pages), rows, 0), np.int64)
        return np.concatenate([empty, *self.places], axis=2).astype(np.int32)


@lru_cache(4096)
def lens_of(model: Model, split: Split, rank: int) -> Lens:
    """The lens of a rank's pool."""
    site = site_of(model, split, rank)
    begins: dict[tuple[int, str], int] = {}
    widths = {False: 0, True: 0}
    for layer, components in site.spec.layers.items():
        for c in components:
            begins[layer, c.name] = widths[bool(c.rows)]
            widths[bool(c.rows)] += max(c.rows, 1) * c.units * c.unit_bytes
    tokens = _Cells(split.pages, site)
    states = _Cells(site.group(STATE).pages if site.state_groups else 0, site)
    for plane in site.planes:
        of = states if plane.group == STATE else tokens
        of.add(plane, begins[plane.layer, plane.component])
    where, slots = tokens.all_places(split.page_rows), states.all_places(1)[:, 0]
    page_of = np.full(site.buffers[0], -1, np.int32)
    page_of[where] = np.arange(split.pages)[:, None, None]
    page_of[slots] = split.pages + np.arange(len(slots))[:, None]
    one = partial(np.concatenate, dtype=np.int32, casting="same_kind")
    return Lens(
        one(tokens.columns),
        one(tokens.layers),
        one(tokens.windows),
        where,
        one(states.columns),
        slots,
        page_of,
        site.buffers[0],
    )


class RankMemory:
    """The pool of one life of a rank.

    ``owners`` holds the owner of each page (:data:`FREE`, :data:`CACHED`, or the number of a room). ``want`` holds each
    byte as it should be once its owner's room has succeeded. Free pages keep the noise that they got when they were
    freed.
    """

    def __init__(self, model: Model, split: Split, rank: int, name: bytes) -> None:
        self.lens = lens_of(model, split, rank)
        self.page_rows = split.page_rows
        self.cells: U8 = content(name, self.lens.nbytes).copy()
        self.want: U8 = self.cells.copy()
        slots = len(self.lens.state_places)
        self.owners = np.zeros(split.pages + slots, np.int64)
        self.free = list(range(split.pages))
        self.free_slots = list(range(split.pages, split.pages + slots))
        self._pages = split.pages
        self.aux = list(range(AUX_SLOTS))
        self._freed = 0
        self.version = 0
        """Grows whenever a byte or an owner may have changed; writers that use no method of this class increment it."""
        self._name = name
        self.place: int = self.cells.__array_interface__["data"][0]
        buffer = Buffer(self.place, self.cells.nbytes, owner=self.cells)
        site: Site = site_of(model, split, rank)
        self.pool = PagedPool(site, (buffer,), aux_slots=AUX_SLOTS, aux_bytes=AUX_BYTES)

    def take(self, owner: int, count: int) -> list[int] | None:
        """Pages for a room, those freed last first; None: there are too few."""
        if count > len(self.free):
            return None
        self.version += 1
        taken = self.free[len(self.free) - count :]
        del self.free[len(self.free) - count :]
        self.owners[taken] = owner
        return taken

    def take_slot(self, owner: int) -> list[int]:
        """A slot for the states of a room, none where the rank has no states: there are as many as rooms."""
        if not len(self.lens.state_places):
            return []
        self.version += 1
        slot = self.free_slots.pop()
        self.owners[slot] = owner
        return [slot]

    def give(self, pages: list[int]) -> None:
        """Pages are free again, and hold new noise at once: a late write or read will be seen."""
        self._freed += 1
        self.version += 1
        self.owners[pages] = FREE
        places = self._places(pages)
        noise = content(b"%b %d" % (self._name, self._freed), places.size).reshape(places.shape)
        self.cells[places] = self.want[places] = noise
        for page in pages:
            (self.free if page < self._pages else self.free_slots).append(page)

    def _places(self, pages: list[int]) -> I32:
        """Every byte of pages of one kind."""
        if pages and pages[0] >= self._pages:
            return self.lens.state_places[[page - self._pages for page in pages]]
        return self.lens.places[pages]

    def tables(self, pages: list[int], first: int = 0) -> list[PageTable]:
        """Page tables for the library, one per group: none where the rank has nothing but states."""
        site = self.pool.site
        return [PageTable(group.id, page_ids(site, group.id, pages), first) for group in site.token_groups]

    def table_bytes(self, table: PageTable) -> int:
        """Bytes of all cells of a table's pages."""
        if table.group == STATE:
            return int(self.lens.state_places[table.pages].size)
        slides = self.lens.windows > 0
        columns = (slides if table.group == SLIDE else ~slides) if self.pool.site.overlaid else slides | ~slides
        return len(table.pages) * self.page_rows * int(columns.sum())

    def slot_tables(self, slots: list[int]) -> list[PageTable]:
        """What the library calls the slots of states."""
        return [PageTable(STATE, np.array([slot - self._pages], np.int32)) for slot in slots]

    def put_states(self, cells: U8, slots: list[int], states: U8) -> None:
        """Lay the states of a room into its slot, if it has one."""
        self.version += 1
        for slot in slots:
            cells[self.lens.state_places[slot - self._pages]] = states[self.lens.state_columns]

    def await_rows(self, pages: list[int], first: int, stop: int, room: U8, known: bool) -> None:
        """Pages that begin at row ``first`` should get a room's rows; where its end is known, only those of windows."""
        if not pages:
            return
        rows = np.arange(first, stop)
        where = self.lens.places[np.asarray(pages)[(rows - first) // self.page_rows], rows % self.page_rows]
        windows = self.lens.windows if known else np.zeros_like(self.lens.windows)
        needed = (windows == 0) | (rows[:, None] >= stop - windows)
        self.want[where[needed]] = room[first:stop, self.lens.columns][needed]

    def put(
        self,
        into: Sequence[U8],
        pages: list[int],
        first: int,
        start: int,
        stop: int,
        room: U8,
        layer: int | None = None,
    ) -> None:
        """Lay the rows ``[start, stop)`` of a room, or one layer of them, into pages that begin at row ``first``.

        ``into`` is what the pages hold, what they should hold, or both.
        """
        self.version += 1
        rows = np.arange(start - first, stop - first)
        where = self.lens.places[np.asarray(pages)[rows // self.page_rows], rows % self.page_rows]
        columns = self.lens.columns
        if layer is not None:
            held = self.lens.layers == layer
            where, columns = where[:, held], columns[held]
        brought = room[start:stop, columns]
        for cells in into:
            cells[where] = brought

    def wrong(self, pages: list[int]) -> int | None:
        """The first byte of these pages that is not as it should be; None: all are."""
        where = self._places(pages)
        bad = self.cells[where] != self.want[where]
        return int(where[bad][0]) if bad.any() else None

    def differs(self, pages: list[int], stop: int, room: U8) -> int | None:
        """The first byte of the rows ``[0, stop)`` in these pages that is not the room's; None: all are."""
        rows = np.arange(stop)
        where = self.lens.places[np.asarray(pages)[rows // self.page_rows], rows % self.page_rows]
        bad = self.cells[where] != room[:stop, self.lens.columns]
        return int(where[bad][0]) if bad.any() else None

    def touched(self) -> int | None:
        """The first byte, outside pages that a room has, that is not as it should be; None: all are."""
        if np.array_equal(self.cells, self.want):
            return None
        wrong = np.flatnonzero(self.cells != self.want)
        page = self.lens.page_of[wrong]
        bad = wrong[(page < 0) | (self.owners[page] <= FREE)]
        return int(bad[0]) if len(bad) else None

    def pages_of(self, places: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
        """The pages of all these bytes (offset and length), and whose they are; :data:`FREE` if not of one owner."""
        page_of = self.lens.page_of
        pages = sorted(set(np.concatenate([page_of[at : at + nbytes] for at, nbytes in places]).tolist()))
        owners = {int(self.owners[page]) if page >= 0 else FREE for page in pages}
        return pages, owners.pop() if len(owners) == 1 else FREE

    def check_pages(self) -> bool:
        """I3: free and owned pages are all there are."""
        free = self.free + self.free_slots
        return len(set(free)) == len(free) == int((self.owners == FREE).sum())
