"""Memory that never separates the tokens of a page: each page of a head is one opaque tile, a row of several tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from disagg_kv.endpoints import Expectation
from disagg_kv.errors import IncompatiblePeerError
from disagg_kv.geometry import I32, CacheSpec, Component, Shard
from disagg_kv.ids import LayerId, RoomId
from disagg_kv.memory import Layout, PagedPool
from disagg_kv.rendezvous import Source
from tests.support.rig import Bytes, Decodes, Memory, Rig, tp_shards

LAYERS, HEADS, DIM = 2, 4, 8
PAGES = 16


def tiles(block: int) -> CacheSpec:
    """A K half, then a V half, of float16."""
    tile = Component("tile", "float16", HEADS, block * 2 * DIM * 2, tokens_per_row=block, format="halves")
    return CacheSpec.uniform(LAYERS, [tile])


def memory(layout: Layout) -> Memory:
    """An engine's tensor: the pages of all layers in one storage."""

    def adopted(spec: CacheSpec, held: Shard, of: Memory) -> PagedPool:
        heads = len(held.units(LayerId(0), "tile")[0])
        elements = spec.component(LayerId(0), "tile").unit_bytes // 2
        page = (1, heads, elements) if layout == "NHD" else (heads, 1, elements)
        cache = torch.zeros(LAYERS, of.pages, *page, dtype=torch.float16)
        tensors = {LayerId(layer): {"tile": cache[layer]} for layer in range(LAYERS)}
        return PagedPool.from_tensors(spec, held, tensors, layout=layout)

    return Memory(page_size=1, pages=PAGES, pool=adopted)


def packed(tokens: Bytes, block: int, rest: Bytes) -> Bytes:
    """Tokens ``[tokens, heads, 2, bytes]`` as tiles ``[rows, heads, unit_bytes]``; ``rest`` fills the last."""
    rows = -(-len(tokens) // block)
    filled = np.concatenate([tokens, rest[: rows * block - len(tokens)]])
    return filled.reshape(rows, block, HEADS, 2, -1).transpose(0, 2, 3, 1, 4).reshape(rows, HEADS, -1)


def unpacked(cells: Bytes, count: int, block: int) -> Bytes:
    """The first ``count`` tokens of tiles."""
    halves = cells.reshape(len(cells), HEADS, 2, block, -1).transpose(0, 3, 1, 2, 4)
    return halves.reshape(len(cells) * block, HEADS, 2, -1)[:count]


def arrived(decodes: Decodes, pages: I32, layer: int) -> Bytes:
    """What lies in these pages of decode's only rank."""
    view: Bytes = decodes[0].pool.view(layer)[pages, 0]
    return view


@pytest.mark.parametrize("path", ["staged", "slice", "mapped"])
@pytest.mark.parametrize("layouts", [("HND", "HND"), ("NHD", "HND"), ("HND", "NHD")])
def test_tiles_cross_tensor_parallelism_whole(layouts: tuple[Layout, Layout], path: str) -> None:
    """TP 2 to 1; a prompt of 70 tokens ends in the third tile of 32, which was computed later than the first."""
    block, count = 32, 70
    spec = tiles(block)
    rig = Rig(spec)
    prefills = rig.prefill(tp_shards(spec, 2), memory=memory(layouts[0]), strategy=path, verify="full")
    decodes = rig.decode(tp_shards(spec, 1), memory=memory(layouts[1]), strategy=path, verify="full")
    tokens = rig.rng.integers(0, 255, (LAYERS, count, HEADS, 2, DIM * 2), np.uint8)
    rest = rig.rng.integers(0, 255, (block, HEADS, 2, DIM * 2), np.uint8)
    request = rig.request("room", prefills, decodes, -(-count // block))
    request.truth = {(layer, "tile"): packed(tokens[layer], block, rest) for layer in range(LAYERS)}
    request.open_decode().expect(3).open_prefill()
    request.send(1).send(3, start=1).finish().landed()
    for layer in range(LAYERS):
        found = unpacked(arrived(decodes, request.taken[0].pages, layer), count, block)
        assert np.array_equal(found, tokens[layer])
    assert request.receives[0].report.nbytes == LAYERS * 3 * block * HEADS * 2 * DIM * 2
    rig.quiet()


def test_rows_that_decode_holds_are_tiles() -> None:
    """``held`` counts rows, so that pages of one row stay as they are."""
    spec = tiles(16)
    rig = Rig(spec)
    prefills = rig.prefill(tp_shards(spec, 2), memory=memory("HND"), strategy="auto+incremental")
    decodes = rig.decode(tp_shards(spec, 1), memory=memory("HND"), strategy="auto+incremental")
    request = rig.request("room", prefills, decodes, 5).open_decode().expect(5, held=3).open_prefill()
    request.send(5).finish().landed()
    assert request.receives[0].report.nbytes == LAYERS * 2 * 16 * HEADS * 2 * DIM * 2
    rig.quiet()


def test_sides_with_other_tiles_refuse_each_other() -> None:
    """Blocks of 32 tokens against 64: never the wrong tokens, but an error that names the field."""
    rig = Rig(tiles(32))
    prefills = rig.prefill(tp_shards(rig.spec, 1), memory=memory("HND"))
    rig.spec = tiles(64)
    decodes = rig.decode(tp_shards(rig.spec, 1), memory=memory("HND"))
    handle = decodes[0].endpoint.open(RoomId(b"room"), Source("P"))
    handle.expect(Expectation(2, [decodes[0].take(2)]))
    rig.until(lambda: handle.released, "the refusal", 400)
    assert isinstance(handle.error, IncompatiblePeerError)
    assert handle.error.field == "spec.layers[0].tile.tokens_per_row"
    assert (handle.error.ours, handle.error.theirs) == ("64", "32")
    assert not prefills[0].endpoint.peers()
    decodes[0].check()
