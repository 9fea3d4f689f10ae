"""Memory of one simulated rank, with a shadow: who owns each page, and what it should hold."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from attrs import frozen

from ...geometry import Site
from ...memory import U8, Buffer, PagedPool
from .scenario import AUX_BYTES, Model, Split, site_of, spec_of

I32 = npt.NDArray[np.int32]
AUX_SLOTS = 8
FREE = 0
"""Owner of a page that nobody has."""

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
    """Bytes of a row of the whole cache."""
    return sum(c.units * c.unit_bytes for cs in spec_of(model).layers.values() for c in cs)


def truth(model: Model, room: bytes, life: int, epoch: bytes, rows: int) -> U8:
    """Every byte of a room, ``[rows, bytes of a row]``: a function of room, life, epoch, row, layer, head and byte.

    The columns of a row are its layers, in them the components, in those the units.
    """
    width = width_of(model)
    return content(b"%b %d %b" % (room, life, epoch), rows * width).reshape(rows, width)


@frozen(eq=False)
class Lens:
    """Where the cells of a room lie in a pool of one buffer, worked out by plain indexing.

    Args:
        columns: which columns of a room's row the rank holds ``[n]``.
        layers: the layer of each ``[n]``.
        places: the byte of each of them ``[pages, rows of a page, n]``.
        page_of: the page of each byte of the buffer, -1 between pages ``[nbytes]``.
        nbytes: of the buffer.
    """

    columns: I32
    layers: I32
    places: I32
    page_of: I32
    nbytes: int


@lru_cache(4096)
def lens_of(model: Model, split: Split, rank: int) -> Lens:
    """The lens of a rank's pool."""
    site = site_of(model, split, rank)
    columns: list[npt.NDArray[np.int64]] = []
    layers: list[npt.NDArray[np.int64]] = []
    places: list[npt.NDArray[np.int64]] = []
    begins: dict[tuple[int, str], int] = {}
    width = 0
    for layer, components in site.spec.layers.items():
        for c in components:
            begins[layer, c.name] = width
            width += c.units * c.unit_bytes
    pages, rows = np.arange(split.pages), np.arange(split.page_rows)
    for plane in site.planes:
        size = site.spec.component(plane.layer, plane.component).unit_bytes
        units = [u for run in site.shard.units(plane.layer, plane.component) for u in run]
        start = begins[plane.layer, plane.component]
        for local, unit in enumerate(units):
            columns.append(start + unit * size + np.arange(size))
            layers.append(np.full(size, plane.layer))
            at = plane.offset + local * plane.unit_stride + np.arange(size)
            places.append(at + pages[:, None, None] * plane.page_stride + rows[None, :, None] * plane.row_stride)
    where = np.concatenate(places, axis=2).astype(np.int32)
    page_of = np.full(site.buffers[0], -1, np.int32)
    page_of[where] = pages[:, None, None]
    return Lens(
        np.concatenate(columns).astype(np.int32),
        np.concatenate(layers).astype(np.int32),
        where,
        page_of,
        site.buffers[0],
    )


class RankMemory:
    """The pool of one life of a rank.

    ``owners`` says whose each page is (:data:`FREE`, :data:`CACHED`, or the number of a room), and ``want`` what every
    byte should hold once its owner's room has succeeded; pages of nobody keep the noise that they were given when they
    were freed.
    """

    def __init__(self, model: Model, split: Split, rank: int, name: bytes) -> None:
        self.lens = lens_of(model, split, rank)
        self.page_rows = split.page_rows
        self.cells: U8 = content(name, self.lens.nbytes).copy()
        self.want: U8 = self.cells.copy()
        self.owners = np.zeros(split.pages, np.int64)
        self.free = list(range(split.pages))
        self.aux = list(range(AUX_SLOTS))
        self._freed = 0
        self._name = name
        buffer = Buffer(self.cells.ctypes.data, self.cells.nbytes, owner=self.cells)
        site: Site = site_of(model, split, rank)
        self.pool = PagedPool(site, (buffer,), aux_slots=AUX_SLOTS, aux_bytes=AUX_BYTES)

    def take(self, owner: int, count: int) -> list[int] | None:
        """Pages for a room, those freed last first; None: there are not so many."""
        if count > len(self.free):
            return None
        taken = self.free[len(self.free) - count :]
        del self.free[len(self.free) - count :]
        self.owners[taken] = owner
        return taken

    def give(self, pages: list[int]) -> None:
        """Pages are nobody's again, and hold new noise at once: who still writes there, or reads, will be seen."""
        self._freed += 1
        self.owners[pages] = FREE
        places = self.lens.places[pages]
        noise = content(b"%b %d" % (self._name, self._freed), places.size).reshape(places.shape)
        self.cells[places] = self.want[places] = noise
        self.free += pages

    def put(
        self,
        cells: U8,
        pages: list[int],
        first: int,
        start: int,
        stop: int,
        room: U8,
        layer: int | None = None,
    ) -> None:
        """Lay the rows ``[start, stop)`` of a room, or one layer of them, into pages that begin at row ``first``."""
        rows = np.arange(start - first, stop - first)
        where = self.lens.places[np.asarray(pages)[rows // self.page_rows], rows % self.page_rows]
        columns = self.lens.columns
        if layer is not None:
            held = self.lens.layers == layer
            where, columns = where[:, held], columns[held]
        cells[where] = room[start:stop, columns]

    def wrong(self, pages: list[int]) -> int | None:
        """The first byte of these pages that is not as it should be; None: all are."""
        where = self.lens.places[pages]
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

    def owner_of(self, offset: int, nbytes: int) -> int:
        """Whose these bytes are; :data:`FREE` if they are nobody's, or not of one owner."""
        of = self.lens.page_of[offset : offset + nbytes]
        if len(of) == 0 or int(of.min()) < 0:
            return FREE
        owners = self.owners[of]
        first = int(owners[0])
        return first if bool((owners == first).all()) else FREE

    def check_pages(self) -> bool:
        """I3: free and owned pages are all there are."""
        return len(set(self.free)) == len(self.free) == int((self.owners == FREE).sum())
