"""A cache of SGLang and one of vLLM's CPU backend: no rows cross, and the error names what differs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from disagg_kv import DecodeEndpoint, Expectation, PageTable, Phase, PrefillEndpoint, Source, room_id, transport
from disagg_kv.channels import Hub, InprocChannel
from disagg_kv.engines.sglang import cache as sglang
from disagg_kv.engines.vllm import cache as vllm
from disagg_kv.ids import GroupId
from disagg_kv.rendezvous import StaticRendezvous
from tests.support.processes import wait
from tests.support.sglang_like import described

HEADS, DIM, BLOCK = 4, 8, 32


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
    shapes = [vllm.LayerShape(str(n), GroupId("kv"), HEADS, None, "vllm kv of a block none") for n in range(2)]
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
        reception.expect(Expectation(None, [PageTable(GroupId("kv"), [1], 0)]))
        wait(lambda: reception.phase is Phase.FAILED, lambda: str(reception.phase))
        assert "spec.layers[0]: ours is ['kv'], theirs is ['k', 'v']" in str(reception.error)
    finally:
        decode.close()
        prefill.close()
