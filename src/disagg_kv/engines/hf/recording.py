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
    """A model's own cache, of which every appended row also goes to the pages of one room.

    ``layer_ready``, where it is set, is called with each layer whose rows of the forward pass are in the pages, and
    with what makes an event behind them (None on a CPU): just what a step's ``layer_ready`` takes. On a GPU the host
    waits for nothing, and makes no event that nobody wants. Once it has answered False it is not called any more, until
    it is set again for the next pass. Layers that keep a state alone are not among them. After a
    pass that raised, ``reset`` and begin anew. Do not ``crop``: it removes as many rows from what the pass had not
    reached, perhaps one half of a layer with an index, as from what it had.
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
        """Write one layer's new rows ``[1, heads, rows, dim]`` to the pages, then do what the model expects."""
        start = self.get_seq_length(layer_idx)
        self._paged.write_at(self._places(start, int(key_states.shape[2])), layer_idx, key_states, value_states)
        if not self._paged.indexed(layer_idx) or self._index_rows(layer_idx) == start + key_states.shape[2]:
            self._final(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write one layer's new index keys ``[1, rows, dim]`` to the pages, then do what the model expects."""
        start = self._index_rows(layer_idx)
        where = self._places(start, int(indexer_key_states.shape[1]))
        self._paged.write_index_at(where, layer_idx, indexer_key_states)
        if self.get_seq_length(layer_idx) == start + indexer_key_states.shape[1]:
            self._final(layer_idx)
        keys: torch.Tensor = super().update_indexer(indexer_key_states, layer_idx)
        return keys

    def _index_rows(self, layer_idx: int) -> int:
        """Rows whose index keys are there: by these a layer with an index is final, as a pass may end half way."""
        own = cast("DynamicIndexedLayer", self.layers[layer_idx])
        return 0 if own.indexer_keys is None else int(own.indexer_keys.shape[1])

    def reset(self) -> None:
        """Forget all rows; those to come may go to other pages, whatever their numbers."""
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
