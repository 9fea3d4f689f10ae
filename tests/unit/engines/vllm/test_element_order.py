"""The order of elements in vLLM's CPU cache is checked with its kernel; here a kernel of the test's own."""

from __future__ import annotations

import pytest
import torch

from disagg_kv.engines.vllm.element_order import check_order
from disagg_kv.errors import UnsupportedError

BLOCK, DIM = 32, 8


def store(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """As vLLM's kernel ``vec``."""
    for token, slot in enumerate(slots.tolist()):
        block, at = divmod(slot, BLOCK)
        for head in range(k.shape[1]):
            half = cache[block, head].view(2, BLOCK * DIM)
            half[0].view(DIM, BLOCK)[:, at] = k[token, head]
            half[1].view(BLOCK, DIM)[at] = v[token, head]


def pairs(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """K in pairs of elements, as instructions for matrix tiles want it."""
    store(k, v, cache, slots)
    for block in cache:
        for head in block:
            half = head.view(2, BLOCK * DIM)[0]
            half.copy_(half.view(DIM // 2, 2, BLOCK).transpose(1, 2).reshape(-1).clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_known_order_is_accepted_and_others_are_refused_by_name(dtype: torch.dtype) -> None:
    check_order(store, block=BLOCK, dim=DIM, dtype=dtype, kernel="vec")
    others = (pairs, lambda k, v, cache, slots: store(v, k, cache, slots), lambda *_: None)
    for number, other in enumerate(others):
        with pytest.raises(UnsupportedError, match=f"kernel 'other {number}' stores {dtype} in an order"):
            check_order(other, block=BLOCK, dim=DIM, dtype=dtype, kernel=f"other {number}")
