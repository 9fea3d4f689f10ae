"""A transformers cache whose rows live in the pages of a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from ...errors import GeometryError, UnsupportedError
from ...geometry import I32, PageTable, item_bytes
from ...memory import PagedPool
from ..versions import require
from .layers import layers_of

if TYPE_CHECKING:
    import torch
    from transformers.cache_utils import Cache, DynamicIndexedLayer, DynamicLayer, LinearAttentionLayer

    from .recording import RecordingCache

    Places = tuple[torch.Tensor, torch.Tensor]
    """Page and slot of rows, int64 ``[rows]`` each."""


class PagedHFCache:
    """Copies a model's cache between transformers and a pool, on the pool's device.

    The pool's shard defines the heads of this rank; the first row of every layer is checked against it. Layers are
    counted within the pool: those of a pipeline stage begin at 0.

    Args:
        pool: layers of a model as in :func:`~disagg_kv.engines.hf.spec_from_config`, in one group of tokens and, for a
            model with states, one of states.
        dtype: of the model's own cache; None: as the pool's. Where the pool's differs, rows are converted as they are
            written, by the rules of :mod:`disagg_kv.geometry.formats` without scales; ``load`` and ``read`` give this
            dtype. States have the pool's.

    Attributes:
        device: the pool's device.
        group: the page-id space.
        layer_ids: the layers of this rank's pipeline stage, in the order in which its model numbers them from 0.
        state_group: the group of state slots; None if the model has no states.

    Raises:
        UnsupportedError: a pool with other groups.
        MissingDependencyError: transformers is not installed.
    """

    def __init__(self, pool: PagedPool, *, dtype: str | None = None) -> None:
        require("transformers")
        if dtype is not None:
            item_bytes(dtype)
        self._dtype = dtype
        self.device = pool.buffers[0].device
        site = pool.site
        if len(site.token_groups) != 1 or len(site.state_groups) > 1:
            groups = [g.id for g in site.groups]
            raise UnsupportedError(
                f"a pool of groups {groups}; transformers needs one of tokens, at most one of states"
            )
        (self.group,) = site.token_groups
        self.state_group = next((site.group(g) for g in site.state_groups), None)
        self._layers = layers_of(pool)
        self.layer_ids = site.shard.layers()

    def pages_for(self, rows: int) -> int:
        """How many pages ``rows`` rows need."""
        return -(-rows // self.group.rows_per_page)

    def fresh(self) -> Cache:
        """A model's own cache, empty."""
        from transformers.cache_utils import Cache

        return Cache(layers=[layer.fresh() for layer in self._layers])

    def recording(self, table: PageTable) -> RecordingCache:
        """An empty cache for one room that also writes every appended row to the room's pages.

        Pass it to the model as ``past_key_values``. Appending raises the errors of :meth:`write`. States change with
        every token, so :meth:`write_states` writes them once. You may set its ``layer_ready``.
        """
        from .recording import RecordingCache

        return RecordingCache(self, table, [layer.fresh() for layer in self._layers])

    def write(self, layer: int, table: PageTable, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write one layer's keys and values ``[1, heads, rows, dim]`` into the rows from ``start`` on.

        Raises:
            GeometryError: another batch, other heads or dims than the shard has, or rows outside the table's pages;
                nothing is written then.
        """
        self.write_at(self.places(table, start, start + int(keys.shape[2])), layer, keys, values)

    def write_at(self, where: Places, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """:meth:`write` into places that were looked up before; on a GPU the host waits for nothing."""
        planes, rows = self._layers[layer].tokens, where[0].shape[0]
        for plane, given in zip(planes, (keys, values), strict=True):
            _, _, heads, dim = plane.cells.shape
            plane.check(given, (1, heads, rows, dim), self._dtype)
        for plane, given in zip(planes, (keys, values), strict=True):
            plane.cells[where] = plane.stored(given)[0].transpose(0, 1)

    def write_index_at(self, where: Places, layer: int, keys: torch.Tensor) -> None:
        """Write one layer's index keys ``[1, rows, dim]`` into places that were looked up before.

        Raises:
            GeometryError: as :meth:`write`, or a layer without an index.
        """
        plane = self._layers[layer].index
        if plane is None:
            raise GeometryError(f"layer {self.layer_ids[layer]} has no index")
        plane.check(keys, (1, where[0].shape[0], plane.cells.shape[3]), self._dtype)
        plane.cells[where] = plane.stored(keys)[0].unsqueeze(1)

    def indexed(self, layer: int) -> bool:
        """Whether a layer keeps an index beside keys and values."""
        return self._layers[layer].index is not None

    def read(self, layer: int, table: PageTable, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of one layer's keys and values ``[1, heads, rows, dim]`` of the rows ``[start, stop)``."""
        where = self.places(table, start, stop)
        keys, values = (
            self._own(plane.cells[where]).transpose(0, 1).unsqueeze(0) for plane in self._layers[layer].tokens
        )
        return keys, values

    def as_read(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's keys and values as :meth:`read` gives them after a :meth:`write`."""
        stored = (
            self._own(plane.stored(given))
            for plane, given in zip(self._layers[layer].tokens, (keys, values), strict=True)
        )
        return next(stored), next(stored)

    def index_as_read(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """The same for index keys."""
        plane = self._layers[layer].index
        return keys if plane is None else self._own(plane.stored(keys))

    def _own(self, cells: torch.Tensor) -> torch.Tensor:
        """Cells in the model's dtype."""
        import torch

        own: torch.dtype = cells.dtype if self._dtype is None else getattr(torch, self._dtype)
        return cells.to(own)

    def write_states(self, cache: Cache, slot: PageTable) -> None:
        """Write the states that a model's cache has now into a room's slot.

        Raises:
            GeometryError: a layer that has no states yet, or other sizes than the shard's; names the layer.
        """
        for number, layer in enumerate(self._layers):
            if layer.recurrent is None:
                continue
            own = cast("LinearAttentionLayer", cache.layers[number])
            conv, recurrent = own.conv_states[0], own.recurrent_states[0]
            if conv is None or recurrent is None:
                raise GeometryError(f"layer {layer.recurrent.layer}: the model has no states of it yet")
            layer.write_states(int(slot.pages[0]), conv, recurrent)

    def load(self, table: PageTable, stop: int, slot: PageTable | None = None) -> Cache:
        """A model's own cache of a room of ``stop`` tokens; rows appended later stay out of the pool.

        Args:
            table: its pages; for sliding windows only the last rows are read.
            stop: its length in tokens.
            slot: its states; required if the model has states.

        Raises:
            GeometryError: the model has states, and no slot was given.
        """
        cache = self.fresh()
        for number, layer in enumerate(self._layers):
            if layer.tokens:
                start = 0 if layer.window is None else max(0, stop - layer.window)
                own = cast("DynamicLayer", cache.layers[number])
                own.update(*self.read(number, table, start, stop))
                if layer.window is not None:
                    own.cumulative_length = stop
            if layer.index is not None:
                rows = self._own(layer.index.cells[self.places(table, 0, stop)])  # [rows, 1, dim]
                cast("DynamicIndexedLayer", cache.layers[number]).update_indexer(rows.squeeze(1).unsqueeze(0))
            if layer.recurrent is not None:
                if slot is None:
                    raise GeometryError(f"layer {layer.recurrent.layer} keeps states, but no slot was given")
                conv, recurrent = layer.read_states(int(slot.pages[0]))
                of = cast("LinearAttentionLayer", cache.layers[number])
                of.update_conv_state(conv)
                of.update_recurrent_state(recurrent)
        return cache

    def places(self, table: PageTable, start: int, stop: int) -> Places:
        """Page and slot of every row of ``[start, stop)``, on the pool's device.

        On a GPU they are copied there in the order of the current stream, and the host does not wait for that.

        Raises:
            GeometryError: rows outside the table's pages.
        """
        import torch

        table.check(self.group, start, stop)
        rows = np.arange(start, stop)
        pages: I32 = table.pages[(rows - table.first) // self.group.rows_per_page]
        where = torch.from_numpy(np.stack([pages, rows % self.group.rows_per_page]).astype(np.int64))
        if self.device != "cpu":
            # From memory that is not pinned the copy would first wait for all that the stream was asked to do.
            where = where.pin_memory().to(self.device, non_blocking=True)
        return where[0], where[1]
