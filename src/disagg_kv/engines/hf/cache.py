"""A transformers cache whose rows live in the pages of a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...errors import GeometryError, UnsupportedError
from ...geometry import I32, Group, PageTable, item_bytes
from ...ids import LayerId
from ...memory import PagedPool
from .optional import require_transformers

if TYPE_CHECKING:
    import torch
    from transformers.cache_utils import DynamicCache


class PagedHFCache:
    """Writes what a model's layers cache into a pool, and makes a model's cache from a pool. CPU memory only.

    Which heads a rank holds is the pool's shard; the first row of every layer is checked against it.

    Args:
        pool: all layers of the model, two components each, in one group: see
            :func:`~disagg_kv.engines.hf.spec_from_config`.

    Raises:
        UnsupportedError: a pool of another shape.
        MissingDependencyError: transformers is not installed.
    """

    def __init__(self, pool: PagedPool) -> None:
        require_transformers()
        site = pool.site
        if len(site.groups) != 1 or site.shard.layers() != tuple(range(len(site.spec.layers))):
            raise UnsupportedError(
                f"a pool of {len(site.groups)} groups and layers {site.shard.layers()} of {len(site.spec.layers)}; "
                "transformers needs one group and all layers"
            )
        self._group = site.groups[0]
        self._names: list[tuple[str, str]] = []
        self._planes: list[tuple[torch.Tensor, torch.Tensor]] = []
        numbers = {(p.layer, p.component): i for i, p in enumerate(site.planes)}
        for layer in site.shard.layers():
            names = tuple(c.name for c in site.spec.layers[layer] if (layer, c.name) in numbers)
            if len(names) != 2:
                raise UnsupportedError(f"layer {layer} holds {names}; transformers keeps keys and values")
            self._names.append((names[0], names[1]))
            keys, values = (_plane(pool, numbers[layer, name], layer, name) for name in names)
            self._planes.append((keys, values))

    @property
    def group(self) -> Group:
        """The page-id space."""
        return self._group

    def pages_for(self, rows: int) -> int:
        """How many pages ``rows`` rows need."""
        return -(-rows // self._group.rows_per_page)

    def recording(self, table: PageTable) -> DynamicCache:
        """An empty cache for one room: every row that a model appends is written to the room's pages too.

        Give it to the model as ``past_key_values``. Appending raises what :meth:`write` raises.
        """
        from .recording import RecordingCache

        return RecordingCache(self, table)

    def write(self, layer: int, table: PageTable, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write one layer's keys and values ``[1, heads, rows, dim]`` into the rows from ``start`` on.

        Raises:
            GeometryError: another batch, other heads or dims than the shard has, or rows outside the table's pages;
                nothing is written then.
        """
        stop = start + int(keys.shape[2])
        where = self._where(table, start, stop)
        for name, plane, given in zip(self._names[layer], self._planes[layer], (keys, values), strict=True):
            _, _, heads, dim = plane.shape
            if tuple(given.shape) != (1, heads, stop - start, dim) or given.dtype != plane.dtype:
                raise GeometryError(
                    f"layer {layer}, {name!r}: the model caches {given.dtype} {tuple(given.shape)}, "
                    f"this rank's shard has {plane.dtype} {(1, heads, stop - start, dim)}"
                )
        for plane, given in zip(self._planes[layer], (keys, values), strict=True):
            plane[where] = given[0].transpose(0, 1)

    def read(self, layer: int, table: PageTable, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of one layer's keys and values ``[1, heads, rows, dim]`` of the rows ``[start, stop)``."""
        where = self._where(table, start, stop)
        keys, values = (plane[where].transpose(0, 1).unsqueeze(0) for plane in self._planes[layer])
        return keys, values

    def load(self, table: PageTable, stop: int) -> DynamicCache:
        """A model's own cache with the rows ``[0, stop)`` of a room's pages; what is appended stays out of the pool."""
        from transformers.cache_utils import DynamicCache

        return DynamicCache([self.read(layer, table, 0, stop) for layer in range(len(self._planes))])

    def _where(self, table: PageTable, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and slot of every row, int64 ``[rows]``."""
        import torch

        table.check(self._group, start, stop)
        rows = np.arange(start, stop)
        pages: I32 = table.pages[(rows - table.first) // self._group.rows_per_page]
        return torch.from_numpy(pages.astype(np.int64)), torch.from_numpy(rows % self._group.rows_per_page)


def _plane(pool: PagedPool, number: int, layer: LayerId, name: str) -> torch.Tensor:
    """A plane's memory as ``[pages, rows, units, elements]``."""
    import torch

    component = pool.site.spec.component(layer, name)
    dtype: torch.dtype = getattr(torch, component.dtype)
    cells = torch.from_numpy(pool.view(number))
    strides = cells.stride()
    size = item_bytes(component.dtype)
    if any(stride % size for stride in strides[:3]):
        raise GeometryError(f"layer {layer}, {name!r}: strides {strides[:3]} do not align {component.dtype}")
    return cells.view(dtype)
