"""A transformers cache on a GPU: its hook leaves the host free to run ahead."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from disagg_kv.engines.hf import PagedHFCache
from disagg_kv.geometry import CacheSpec, PageTable, shard
from disagg_kv.ids import GroupId, LayerId
from disagg_kv.memory import Event, Mark, PagedPool

LAYERS, HEADS, DIM = 3, 2, 16
FIRST, ROWS = 8, 40


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever would make the host wait for the GPU raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that it does not see all that waits
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_rows_go_to_pages_and_layers_are_announced_without_a_host_that_waits() -> None:
    """An event behind the rows of each layer for which it is asked, and no synchronisation."""
    spec = CacheSpec.kv(LAYERS, HEADS, DIM, "bfloat16")
    paged = PagedHFCache(PagedPool.allocate(spec, shard(spec), pages=4, page_size=16, device="cuda"))
    table = PageTable(GroupId("kv"), [3, 0, 2])
    cache = paged.recording(table)
    given = torch.randn(LAYERS, 2, 1, HEADS, ROWS, DIM, dtype=torch.bfloat16, device="cuda")
    for layer in range(LAYERS):
        cache.update(*given[layer][..., :FIRST, :], layer)
    seen: dict[LayerId, Event | None] = {}

    def ready(layer: LayerId, mark: Mark | None) -> None:
        assert mark is not None
        seen[layer] = mark()

    cache.layer_ready = ready
    with no_waiting():
        for layer in range(LAYERS):
            cache.update(*given[layer][..., FIRST:, :], layer)
    assert list(seen) == list(range(LAYERS))
    assert all(isinstance(event, torch.cuda.Event) and event.cuda_event for event in seen.values())
    for layer in range(LAYERS):
        for ours, theirs in zip(paged.read(layer, table, 0, ROWS), given[layer], strict=True):
            assert torch.equal(ours, theirs)
