"""The order of elements in the cache of vLLM's CPU attention, found by its own kernel.

It depends on the instruction set for which vLLM picks a kernel (``_get_attn_isa`` of vLLM 0.32). The common description
knows one order, that of the kernels ``vec`` and ``vec16``. So vLLM's kernel stores known numbers in a small cache, and
these have to be where the description says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from ...errors import UnsupportedError

Store: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Stores K and V ``[tokens, heads, dim]`` in a cache ``[blocks, heads, block, 2 * dim]``, at slots ``[tokens]``."""

HEADS, BLOCKS = 3, 2


def check_order(store: Store, *, block: int, dim: int, dtype: torch.dtype, kernel: str) -> None:
    """Raise an :class:`UnsupportedError` unless K is ``[dim, block]`` in each block and head, and V ``[block, dim]``.

    Args:
        store: vLLM's kernel.
        block: tokens of a block.
        dim: elements of a head.
        dtype: of the cache.
        kernel: its name, for the error.
    """
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.rand(block, HEADS, dim, generator=draw).to(dtype) for _ in range(2))
    cache = torch.zeros(BLOCKS, HEADS, block, 2 * dim, dtype=dtype)
    store(k, v, cache, torch.arange(block) + block)
    right = torch.zeros_like(cache)
    halves = right.view(BLOCKS, HEADS, 2, block * dim)
    halves[1, :, 0] = k.permute(1, 2, 0).reshape(HEADS, -1)
    halves[1, :, 1] = v.permute(1, 0, 2).reshape(HEADS, -1)
    if not torch.equal(cache, right):
        raise UnsupportedError(
            f"description 'common': vLLM's CPU kernel {kernel!r} stores {dtype} in an order that is not known; "
            "known is K as [head_dim, tokens] in each block and head, then V as [tokens, head_dim]"
        )
