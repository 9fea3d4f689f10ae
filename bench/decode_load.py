"""Steps like those of a decode engine, which transfers disturb."""

from __future__ import annotations

import time

import torch

CUDA_STEP = (8, 8192, 16)
CPU_STEP = (8, 512, 16)
"""Sequences, width of a square matrix of weights, and how many of those a step reads."""


class DecodeLoad:
    """Multiplies few rows by large matrices, as decode steps do: reading the weights takes the time.

    Args:
        device: on which the steps run.
    """

    def __init__(self, device: str) -> None:
        self._cuda = device != "cpu"
        rows, width, count = CUDA_STEP if self._cuda else CPU_STEP
        dtype = torch.bfloat16 if self._cuda else torch.float32
        self._rows = torch.ones(rows, width, dtype=dtype, device=device)
        self._weights = [torch.ones(width, width, dtype=dtype, device=device) for _ in range(count)]
        self._products = torch.empty_like(self._rows)

    def step(self) -> float:
        """Run one step; its seconds, as the engine's thread sees them."""
        began = time.monotonic()
        for weights in self._weights:
            torch.mm(self._rows, weights, out=self._products)
        if self._cuda:
            torch.cuda.current_stream(self._rows.device).synchronize()
        return time.monotonic() - began
