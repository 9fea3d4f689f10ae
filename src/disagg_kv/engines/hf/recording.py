"""The cache that a model fills while its rows go to pages; imported only once transformers is known to be there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from ...geometry import PageTable
from ...ids import LayerId
from ...memory import Mark
from .events import marker

if TYPE_CHECKING:
    from transformers.cache_utils import DynamicIndexedLayer

    from .cache import PagedHFCache, Places


class RecordingCache(Cache):
    """A model's own cache that also writes every appended row to the pages of one room.

    Where the pages have another dtype than the model, the model gets the rows as they are read from the pages.

    If ``layer_ready`` is set, it is called with each layer whose rows of the forward pass are in the pages. Its second
    argument is a function that makes an event behind them (None on a CPU), as a step's ``layer_ready`` takes it. On a
    GPU the host waits for nothing, and no unused event is created. Once ``layer_ready`` returns False, it is not called
    again until it is set for the next pass. Layers with only a state are never passed to it.

    After a pass that raised, call ``reset`` and begin again. Do not call ``crop``. It removes the same number of rows
    from every layer, also from layers that the failed pass had not reached.
    """

    def __init__(
        self, paged: PagedHFCache, table: PageTable, layers: Sequence[CacheLayerMixin | LinearAttentionLayer]
    ) -> None:
        super().__init__(layers=list(layers))
        self._paged = paged
        self._table = table
        self.layer_ready: Callable[[LayerId, Mark | None], bool | None] | None = None
        self._found: tuple[int, int, Places] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one layer's new rows ``[1, heads, rows, dim]`` to the pages, then update the model's own cache."""
        start = self.get_seq_length(layer_idx)
        self._paged.write_at(self._places(start, int(key_states.shape[2])), layer_idx, key_states, value_states)
        if not self._paged.indexed(layer_idx) or self._index_rows(layer_idx) == start + key_states.shape[2]:
            self._final(layer_idx)
        key_states, value_states = self._paged.as_read(layer_idx, key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write one layer's new index keys ``[1, rows, dim]`` to the pages, then update the model's own cache."""
        start = self._index_rows(layer_idx)
        where = self._places(start, int(indexer_key_states.shape[1]))
        self._paged.write_index_at(where, layer_idx, indexer_key_states)
        if self.get_seq_length(layer_idx) == start + indexer_key_states.shape[1]:
            self._final(layer_idx)
        read = self._paged.index_as_read(layer_idx, indexer_key_states)
        keys: torch.Tensor = super().update_indexer(read, layer_idx)
        return keys

    def _index_rows(self, layer_idx: int) -> int:
        """Rows that have index keys. A layer with an index is final up to here, as a pass may end between the two."""
        own = cast("DynamicIndexedLayer", self.layers[layer_idx])
        return 0 if own.indexer_keys is None else int(own.indexer_keys.shape[1])

    def reset(self) -> None:
        """Drop all rows; the next rows may have any numbers and go to other pages."""
        self._found = None
        super().reset()  # type: ignore[no-untyped-call] # transformers gives it no types

    def _places(self, start: int, rows: int) -> Places:
        """Those of all layers of a pass are the same: looked up once."""
        if self._found is None or self._found[:2] != (start, rows):
            self._found = start, rows, self._paged.places(self._table, start, start + rows)
        return self._found[2]

    def _final(self, layer_idx: int) -> None:
        if self.layer_ready is None:
            return
        if self.layer_ready(self._paged.layer_ids[layer_idx], marker(self._paged.device)) is False:
            self.layer_ready = None
