"""The pool: one rank's paged cache in memory of its own or in place in an engine's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from .. import arguments
from ..errors import CapacityError, ConfigurationError, DisaggKVError, GeometryError
from ..geometry import CacheSpec, Component, Group, Plane, Shard, Site, item_bytes
from ..ids import KV, GroupId, LayerId
from .base import Buffer, pool_text
from .raw import U8, plane_view
from .soundness import check_memory

if TYPE_CHECKING:
    import torch

Layout = Literal["NHD", "HND"]
"""The order of the axes inside a page: rows, units, bytes or units, rows, bytes."""

STATE = GroupId("state")
"""The space of slots, if there are states."""

ALIGNMENT = 256
"""Bytes; in memory that the pool allocates, every layer begins at a multiple of this."""


class PagedPool:
    """One rank's pages, and optionally a few rows of aux data; implements :class:`~disagg_kv.memory.MemoryPool`.

    Args:
        site: where everything lies; ``site.buffers`` are the lengths of ``buffers``. Checked.
        buffers: the allocations, all on one device.
        aux_slots: how many aux rows there are.
        aux_bytes: bytes of one.

    Raises:
        GeometryError: planes or buffers overlap; planes leave their buffer, or are not those of the shard; buffers on
            several devices.
    """

    def __init__(self, site: Site, buffers: Sequence[Buffer], *, aux_slots: int = 0, aux_bytes: int = 0) -> None:
        arguments.one(site, "site", Site)
        buffers = arguments.several(buffers, "buffers", Buffer, GeometryError)
        aux_slots = arguments.count(aux_slots, "aux_slots", least=-arguments.MOST, error=GeometryError)
        aux_bytes = arguments.count(aux_bytes, "aux_bytes", least=-arguments.MOST, error=GeometryError)
        if aux_slots < 0 or aux_bytes < 0 or (aux_slots == 0) != (aux_bytes == 0):
            raise GeometryError(f"{aux_slots} aux slots of {aux_bytes} bytes")
        check_memory(site, buffers)
        self._site = site
        self._buffers = tuple(buffers)
        try:
            self._aux = np.zeros((aux_slots, aux_bytes), np.uint8)
        except (MemoryError, ValueError) as exc:
            raise CapacityError(f"no memory for {aux_slots} aux rows of {aux_bytes} bytes") from exc

    __repr__ = pool_text

    @classmethod
    def allocate(
        cls,
        spec: CacheSpec,
        shard: Shard,
        *,
        pages: int,
        page_size: int,
        state_slots: int = 0,
        layout: Layout = "NHD",
        fused: bool = False,
        group: str = KV,
        aux_slots: int = 0,
        aux_bytes: int = 0,
        allocator: Callable[[int], Buffer] | None = None,
        device: str = "cpu",
        pinned: bool = False,
    ) -> PagedPool:
        """A pool in memory that it allocates: one buffer, layer after layer.

        Args:
            spec: the whole cache.
            shard: the part that this rank holds.
            pages: number of pages.
            page_size: rows per page.
            state_slots: number of rooms that can have states, in the group ``"state"``; required if the shard has
                states.
            layout: the order of the axes inside a page.
            fused: True: the components of a layer share its pages, one after the other inside each page. False: each
                component of a layer has all its pages in one run.
            group: the name of the page-id space.
            aux_slots: number of aux rows.
            aux_bytes: bytes per aux row.
            allocator: returns a buffer of at least the given number of bytes, for example a transport's ``allocate``;
                None: zeroed memory on ``device``.
            device: the device, if there is no ``allocator``.
            pinned: of memory on ``"cpu"``: pages that never move, which a GPU reads and writes without a copy between.

        Raises:
            CapacityError: too little memory.
            ConfigurationError: no such device; or memory that cannot be pinned: that of an allocator, of a GPU, or of a
                host without one.
            GeometryError: no pages or rows, an unknown layout, or a buffer from the allocator that is too small.
        """
        _check_whole(spec, shard, layout)
        arguments.text(group, "group", most=256)
        page_size = arguments.count(page_size, "page_size", least=1, error=GeometryError)
        pages = arguments.count(pages, "pages", least=1, error=GeometryError)
        state_slots = arguments.count(state_slots, "state_slots", error=GeometryError)
        arguments.flag(fused, "fused")
        if arguments.flag(pinned, "pinned") and (allocator is not None or device != "cpu"):
            raise ConfigurationError("pinned is for memory on 'cpu' that the pool allocates")
        if allocator is not None:
            arguments.function(allocator, "allocator")
        arguments.text(device, "device", least=1, most=256)
        spaces = [Group(group, page_size, pages)]
        if any(c.rows for layer in shard.layers() for c, _ in _held(spec, shard, layer)):
            spaces.append(Group(STATE, spec.state_rows(), state_slots))
        planes: list[Plane] = []
        end = 0
        for layer, (states, space) in itertools.product(shard.layers(), enumerate(spaces)):
            held = [(c, units) for c, units in _held(spec, shard, layer) if bool(c.rows) == bool(states)]
            start = _aligned(end, ALIGNMENT)
            placed, end = (_fused if fused else _separate)(layer, held, space, layout, start)
            planes += placed
        used = {plane.group for plane in planes}
        buffer = new_buffer(end, device, pinned=pinned) if allocator is None else _allocated(allocator, end)
        if buffer.nbytes < end:
            raise GeometryError(f"the allocator gave {buffer.nbytes} bytes of {end}")
        site = Site(spec, shard, [space for space in spaces if space.id in used], planes, (buffer.nbytes,))
        return cls(site, (buffer,), aux_slots=aux_slots, aux_bytes=aux_bytes)

    @classmethod
    def from_tensors(
        cls,
        spec: CacheSpec,
        shard: Shard,
        tensors: Mapping[LayerId, Mapping[str, torch.Tensor]] | Mapping[int, Mapping[str, torch.Tensor]],
        *,
        layout: Layout = "NHD",
        group: str | Mapping[LayerId, str] | Mapping[int, str] = KV,
        null_page: int | None = None,
        state_group: str | Mapping[LayerId, str] | Mapping[int, str] = STATE,
        overlaid: bool = False,
        aux_slots: int = 0,
        aux_bytes: int = 0,
    ) -> PagedPool:
        """A pool over an engine's tensors, in place.

        Args:
            spec: the whole cache.
            shard: the part that this rank holds.
            tensors: per layer and component a tensor ``[pages, page_size, units, dim]`` (NHD) or ``[pages, units,
                page_size, dim]`` (HND), with any strides, ``dim`` contiguous. For a state, slots replace pages and its
                rows replace ``page_size``.
            layout: the order of the axes, NHD or HND.
            group: the name of the page-id space. A cache with several spaces has the name for each layer.
            null_page: a page of every space that has no data; see :class:`~disagg_kv.geometry.Group`.
            state_group: the same as ``group``, of states.
            overlaid: True: the groups share one space of page ids. The engine gives a page to one group at a time, so
                tensors of different groups may share the bytes of a page, and a room names it in one group only.
            aux_slots: number of aux rows.
            aux_bytes: bytes per aux row.

        Raises:
            GeometryError: a tensor with a shape, element type or strides that do not match the shard; tensors of one
                group with different page sizes; a layer without a group; tensors that share bytes, of one group or of
                pages with different ids.
        """
        _check_whole(spec, shard, layout)
        named, named_states = _named_by_layer(group), _named_by_layer(state_group)
        buffers: list[Buffer] = []
        numbers: dict[int, int] = {}
        planes: list[Plane] = []
        sizes: dict[GroupId, set[tuple[int, int]]] = {}
        for layer, name, tensor in _tensors(tensors):
            storage = tensor.untyped_storage()
            units = 2 if layout == "NHD" else 1
            rows = 3 - units
            _check_tensor(spec, shard, layer, name, tensor, units)
            if storage.data_ptr() not in numbers:
                numbers[storage.data_ptr()] = len(buffers)
                buffers.append(Buffer(storage.data_ptr(), storage.nbytes(), str(tensor.device), storage))
            size, step = tensor.element_size(), tensor.stride()
            offset = tensor.data_ptr() - storage.data_ptr()
            strides = (step[0] * size, step[rows] * size, step[units] * size)
            states = spec.component(layer, name).rows
            space = named_states(layer) if states else named(layer)
            planes.append(Plane(layer, name, space, numbers[storage.data_ptr()], offset, *strides))
            sizes.setdefault(space, set()).add((tensor.shape[0], spec.state_rows() if states else tensor.shape[rows]))
        if not sizes:
            raise GeometryError("no tensors are given")
        for space, of in sizes.items():
            if len(of) != 1:
                raise GeometryError(f"group {space!r}: tensors of (pages, page_size) {sorted(of)}, not of one size")
        groups = [Group(space, rows, pages, null_page) for space, of in sizes.items() for pages, rows in of]
        site = Site(spec, shard, groups, planes, tuple(b.nbytes for b in buffers), overlaid)
        return cls(site, buffers, aux_slots=aux_slots, aux_bytes=aux_bytes)

    @property
    def site(self) -> Site:
        """Spec, shard, groups, planes and buffer sizes."""
        return self._site

    @property
    def buffers(self) -> Sequence[Buffer]:
        """The allocations, in the order in which planes number them."""
        return self._buffers

    @property
    def aux_bytes(self) -> int:
        """Bytes of one aux row; 0 if the pool has none."""
        return int(self._aux.shape[1])

    def view(self, plane: int) -> U8:
        """Every cell of a plane, ``[pages, rows_per_page, units, unit_bytes]`` uint8, writable, no copy."""
        plane = arguments.count(plane, "plane", most=len(self._site.planes) - 1, error=GeometryError)
        return plane_view(self._site, self._buffers, plane)

    def read_aux(self, slot: int) -> bytes:
        """Copy out the aux row ``slot``, ``aux_bytes`` long; a GeometryError if there is none of that number."""
        return self._aux_row(slot).tobytes()

    def write_aux(self, slot: int, data: bytes) -> None:
        """Copy ``data`` into the aux row ``slot`` and clear the rest of the row; a GeometryError if it is longer."""
        row = self._aux_row(slot)
        data = arguments.octets(data, f"aux slot {slot}", most=arguments.MOST)
        if len(data) > len(row):
            raise GeometryError(f"aux slot {slot}: {len(data)} bytes for a row of {len(row)}")
        row[: len(data)] = np.frombuffer(data, np.uint8)
        row[len(data) :] = 0

    def _aux_row(self, slot: int) -> U8:
        slot = arguments.count(slot, "aux slot", least=-arguments.MOST, error=GeometryError)
        if not 0 <= slot < len(self._aux):
            raise GeometryError(f"aux slot {slot}: the pool has {len(self._aux)}")
        row: U8 = self._aux[slot]
        return row


def _aligned(offset: int, to: int) -> int:
    return -(-offset // to) * to


def _allocated(allocator: Callable[[int], Buffer], nbytes: int) -> Buffer:
    try:
        found: object = allocator(nbytes)
    except DisaggKVError:
        raise
    except Exception as exc:
        raise CapacityError(f"the allocator failed for {nbytes} bytes: {exc}") from exc
    return arguments.one(found, "allocator: result", Buffer)


def _tensors(given: object) -> Iterator[tuple[LayerId, str, torch.Tensor]]:
    """Layer, component name and tensor of each tensor of an engine."""
    import torch

    for number, named in arguments.mapping(given, "tensors").items():
        layer = LayerId(arguments.count(number, "tensors: layer", error=GeometryError))
        for name, tensor in arguments.mapping(named, f"tensors: layer {layer}").items():
            where = f"tensors: layer {layer}, {arguments.shown(name)}"
            yield layer, arguments.text(name, where), arguments.one(tensor, where, torch.Tensor, GeometryError)


def _named_by_layer(given: object) -> Callable[[LayerId], GroupId]:
    """The group of each layer: one name for all, or a name per layer."""
    if isinstance(given, str):
        name = GroupId(arguments.text(given, "group", most=256))
        return lambda layer: name
    names = {
        arguments.count(layer, "group: layer", error=GeometryError): arguments.text(one, "group: name", most=256)
        for layer, one in arguments.mapping(given, "group").items()
    }

    def named(layer: LayerId) -> GroupId:
        if layer not in names:
            raise GeometryError(f"group: layer {layer} has no name; those of {sorted(names)} are given")
        return GroupId(names[layer])

    return named


def _check_whole(spec: CacheSpec, shard: Shard, layout: str) -> None:
    arguments.one(spec, "spec", CacheSpec)
    arguments.one(shard, "shard", Shard)
    if arguments.text(layout, "layout") not in ("NHD", "HND"):
        raise GeometryError(f"layout {layout!r}; known: HND, NHD")


def _strides(layout: Layout, rows: int, units: int, unit_bytes: int) -> tuple[int, int]:
    """Row stride and unit stride of a packed page."""
    return (units * unit_bytes, unit_bytes) if layout == "NHD" else (unit_bytes, rows * unit_bytes)


def _held(spec: CacheSpec, shard: Shard, layer: LayerId) -> Iterator[tuple[Component, int]]:
    """The components of a layer that the shard holds, each with its number of units."""
    for component in spec.layers.get(layer, ()):
        units = sum(len(held) for held in shard.units(layer, component.name))
        if units:
            yield component, units


def _separate(
    layer: LayerId, held: Sequence[tuple[Component, int]], space: Group, layout: Layout, start: int
) -> tuple[list[Plane], int]:
    """A layer's planes, each with all its pages in one run, from byte ``start`` on; and the offset after them."""
    planes: list[Plane] = []
    for component, units in held:
        rows = component.rows or space.rows_per_page
        page = rows * units * component.unit_bytes
        strides = _strides(layout, rows, units, component.unit_bytes)
        start = _aligned(start, ALIGNMENT)
        planes.append(Plane(layer, component.name, space.id, 0, start, page, *strides))
        start += space.pages * page
    return planes, start


def _fused(
    layer: LayerId, held: Sequence[tuple[Component, int]], space: Group, layout: Layout, start: int
) -> tuple[list[Plane], int]:
    """A layer's planes, interleaved in each page and aligned to their elements; and the offset after them."""
    begins: list[int] = []
    page = 0
    for component, units in held:
        page = _aligned(page, item_bytes(component.dtype))
        begins.append(page)
        page += (component.rows or space.rows_per_page) * units * component.unit_bytes
    page = _aligned(page, max((item_bytes(component.dtype) for component, _ in held), default=1))
    planes = [
        Plane(
            layer,
            component.name,
            space.id,
            0,
            start + begin,
            page,
            *_strides(layout, component.rows or space.rows_per_page, units, component.unit_bytes),
        )
        for (component, units), begin in zip(held, begins, strict=True)
    ]
    return planes, start + space.pages * page


def new_buffer(nbytes: int, device: str, *, pinned: bool = False) -> Buffer:
    """Zeroed memory that the buffer owns, aligned for vector loads.

    Raises:
        CapacityError: too little memory.
        ConfigurationError: no such device, or no GPU for which memory could be pinned.
    """
    try:
        if device == "cpu" and not pinned:
            memory = np.zeros(nbytes + ALIGNMENT, np.uint8)
            return Buffer(_aligned(memory.ctypes.data, ALIGNMENT), nbytes, device, memory)
        import torch

        tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        return Buffer(tensor.data_ptr(), nbytes, str(tensor.device), tensor)
    except (MemoryError, ValueError) as exc:
        raise CapacityError(f"no {nbytes} bytes of memory for a pool") from exc
    except (RuntimeError, AssertionError, TypeError, OverflowError) as exc:
        kind = " (pinned)" if pinned else ""
        raise ConfigurationError(f"no pool of {nbytes} bytes on device {device!r}{kind}: {exc}") from exc


def _check_tensor(spec: CacheSpec, shard: Shard, layer: LayerId, name: str, tensor: torch.Tensor, axis: int) -> None:
    """Raise a :class:`GeometryError` unless the tensor can hold the shard's units, which lie along ``axis``."""
    where = f"layer {layer}, {name!r}"
    component = spec.component(layer, name)
    if component.rows and tensor.shape[3 - axis : 4 - axis] != (component.rows,):
        raise GeometryError(
            f"{where}: a tensor of shape {tuple(tensor.shape)}, but the state has {component.rows} rows"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype != component.dtype:
        raise GeometryError(f"{where}: a tensor of {dtype}, but the spec says {component.dtype}")
    units = sum(len(held) for held in shard.units(layer, name))
    dim = component.unit_bytes // item_bytes(component.dtype)
    shape = tuple(tensor.shape)
    if len(shape) != 4 or shape[axis] != units or shape[3] != dim:
        wanted = f"{units} units on axis {axis} of 4, and {dim} elements on axis 3"
        turned = len(shape) == 4 and shape[3 - axis] == units and shape[3] == dim
        hint = f"; the layout {'NHD' if axis == 1 else 'HND'} would fit" if turned else ""
        raise GeometryError(f"{where}: a tensor of shape {shape}; needed are {wanted}{hint}")
    if dim > 1 and tensor.stride(3) != 1:
        raise GeometryError(f"{where}: elements of a unit are {tensor.stride(3)} apart, not contiguous")
