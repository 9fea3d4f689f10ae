"""A cache of SGLang and one of vLLM's CPU backend: no rows cross, and the error names what differs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from disagg_kv import DecodeEndpoint, Expectation, PageTable, Phase, PrefillEndpoint, Source, room_id, transport
from disagg_kv.channels import Hub, InprocChannel
from disagg_kv.engines.sglang import cache as sglang
from disagg_kv.engines.vllm import cache as vllm
from disagg_kv.geometry import CacheSpec, Component, Group, Plane, Site, shard
from disagg_kv.ids import GroupId, LayerId
from disagg_kv.memory import Buffer, PagedPool
from disagg_kv.rendezvous import StaticRendezvous
from tests.support.processes import wait
from tests.support.sglang_like import described

HEADS, DIM, BLOCK = 4, 8, 32
KV = GroupId("kv")


@pytest.mark.parametrize("tiles", [True, False])
def test_vllm_refuses_rows_of_sglang_by_name(tiles: bool) -> None:
    """``tiles``: the CPU backend, whose blocks are never cut; else K and V of a token and head are one piece."""
    hub, where = Hub(), StaticRendezvous()
    arrays = [np.zeros((256, HEADS, DIM), np.float32) for _ in range(4)]
    rows = [np.zeros((4, 16), np.int32)]
    ours, _ = sglang.pool_of(
        described(arrays, HEADS * DIM * 4), described(rows), page=1, heads=HEADS, latent=False, dtype="float32", tp=1,
        rank=0, model=b"m", device="cpu",
    )  # fmt: skip
    shapes = [vllm.LayerShape(str(n), KV, HEADS, None, "vllm kv of a block none") for n in range(2)]
    tensors = {str(n): torch.zeros(8, HEADS, BLOCK, 2 * DIM) for n in range(2)}
    theirs, _ = vllm.pool_of(
        shapes, tensors, blocks=8, block=BLOCK, row=BLOCK if tiles else 1, tp=1, rank=0, model=b"m"
    )  # fmt: skip
    prefill = PrefillEndpoint(
        ours, transport=transport("inproc"), channel=InprocChannel(hub, "p"), rendezvous=where, instance="P"
    )
    decode = DecodeEndpoint(
        theirs, transport=transport("inproc"), channel=InprocChannel(hub, "d"), rendezvous=where, instance="D"
    )
    try:
        prefill.open(room_id("room"))
        reception = decode.open(room_id("room"), Source("P"))
        reception.expect(Expectation(None, [PageTable(KV, [1], 0)]))
        wait(lambda: reception.phase is Phase.FAILED, lambda: str(reception.phase))
        assert "spec.layers[0]: ours is ['kv'], theirs is ['k', 'v']" in str(reception.error)
    finally:
        decode.close()
        prefill.close()


LAYERS, TOKENS = 2, 70


def spec_of_elements() -> CacheSpec:
    """K of each head is a component whose units are elements; a unit of V is a head, as ever."""
    k = [Component(f"k of head {head}", "float32", DIM, 4) for head in range(HEADS)]
    return CacheSpec({LayerId(n): [*k, Component("v", "float32", HEADS, DIM * 4)] for n in range(LAYERS)}, b"m")


def pool(spec: CacheSpec, arrays: list[npt.NDArray[np.float32]], group: Group, planes: list[Plane]) -> PagedPool:
    buffers = [Buffer(one.ctypes.data, one.nbytes) for one in arrays]
    return PagedPool(Site(spec, shard(spec), [group], planes, [one.nbytes for one in arrays]), buffers)


def as_sglang(spec: CacheSpec, arrays: list[npt.NDArray[np.float32]]) -> PagedPool:
    """Arrays of K, then of V, ``[tokens, heads, DIM]``; pages of one token."""
    row, planes = HEADS * DIM * 4, []
    for n in range(LAYERS):
        for head in range(HEADS):
            planes.append(Plane(LayerId(n), f"k of head {head}", KV, n, head * DIM * 4, row, row, 4))
        planes.append(Plane(LayerId(n), "v", KV, LAYERS + n, 0, row, row, DIM * 4))
    return pool(spec, arrays, Group(KV, 1, len(arrays[0])), planes)


def as_vllm(spec: CacheSpec, arrays: list[npt.NDArray[np.float32]]) -> PagedPool:
    """Arrays ``[blocks, heads, 2, BLOCK * DIM]``: K as ``[DIM, BLOCK]``, V as ``[BLOCK, DIM]``."""
    half = BLOCK * DIM * 4
    page, planes = HEADS * 2 * half, []
    for n in range(LAYERS):
        for head in range(HEADS):
            planes.append(Plane(LayerId(n), f"k of head {head}", KV, n, head * 2 * half, page, 4, BLOCK * 4))
        planes.append(Plane(LayerId(n), "v", KV, n, half, page, DIM * 4, 2 * half))
    return pool(spec, arrays, Group(KV, BLOCK, len(arrays[0])), planes)


@pytest.mark.parametrize("prefill", ["sglang", "vllm"])
def test_planes_of_elements_describe_both_layouts(prefill: str) -> None:
    """What the adapters would have to say: the rows of one engine's layout arrive in the other's."""
    spec, draw = spec_of_elements(), np.random.default_rng(3)
    slots, blocks = draw.permutation(200)[:TOKENS], draw.permutation(8)[: -(-TOKENS // BLOCK)]
    rows = draw.random((LAYERS, 2, TOKENS, HEADS, DIM), np.float32)
    flat = [np.zeros((200, HEADS, DIM), np.float32) for _ in range(2 * LAYERS)]
    tiled = [np.zeros((8, HEADS, 2, BLOCK * DIM), np.float32) for _ in range(LAYERS)]
    wanted = [one.copy() for one in flat], [one.copy() for one in tiled]
    for n in range(LAYERS):
        wanted[0][n][slots], wanted[0][LAYERS + n][slots] = rows[n]
        for at, head in itertools.product(range(TOKENS), range(HEADS)):
            block = wanted[1][n][blocks[at // BLOCK], head]
            block[0].reshape(DIM, BLOCK)[:, at % BLOCK] = rows[n, 0, at, head]
            block[1].reshape(BLOCK, DIM)[at % BLOCK] = rows[n, 1, at, head]
    forth = prefill == "sglang"
    for mine, right in zip((flat, tiled)[not forth], wanted[not forth], strict=True):
        mine[:] = right
    pools, pages = (as_sglang(spec, flat), as_vllm(spec, tiled)), (slots, blocks)
    hub, where = Hub(), StaticRendezvous()
    common: dict[str, Any] = {"rendezvous": where}
    p = PrefillEndpoint(
        pools[not forth], transport=transport("inproc"), channel=InprocChannel(hub, "p"), instance="P", **common
    )
    d = DecodeEndpoint(
        pools[forth], transport=transport("inproc"), channel=InprocChannel(hub, "d"), instance="D", **common
    )
    try:
        delivery, reception = p.open(room_id("room")), d.open(room_id("room"), Source("P"))
        reception.expect(Expectation(TOKENS, [PageTable(KV, pages[forth])]))
        delivery.send_chunk(TOKENS, [PageTable(KV, pages[not forth])])
        delivery.finish(TOKENS)
        wait(lambda: reception.phase in (Phase.DONE, Phase.FAILED), lambda: str(reception.phase))
        assert reception.error is None
    finally:
        d.close()
        p.close()
    for mine, right in zip((flat, tiled)[forth], wanted[forth], strict=True):
        assert np.array_equal(mine, right)
