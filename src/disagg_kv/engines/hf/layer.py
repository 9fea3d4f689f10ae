"""The cache layer that writes to pages; imported only once transformers is known to be there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ...errors import UnsupportedError
from ...geometry import PageTable

if TYPE_CHECKING:
    from .cache import PagedHFCache


class RecordingLayer(DynamicLayer):
    """A model's own layer cache, of which every appended row also goes to the room's pages."""

    def __init__(self, paged: PagedHFCache, table: PageTable, layer: int) -> None:
        super().__init__()
        self._paged = paged
        self._table = table
        self._layer = layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new rows ``[1, heads, rows, dim]`` to the pages, then do what the model expects."""
        self._paged.write(self._layer, self._table, self.get_seq_length(), key_states, value_states)
        return super().update(key_states, value_states, *args, **kwargs)


def recording(paged: PagedHFCache, table: PageTable) -> Cache:
    """A cache of :class:`RecordingLayer`, one per layer."""
    if table.first:
        raise UnsupportedError(f"a recording cache begins at row 0, the table at row {table.first}")
    return Cache(layers=[RecordingLayer(paged, table, layer) for layer in range(paged.layers)])
