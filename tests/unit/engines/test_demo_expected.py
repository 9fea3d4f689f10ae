"""What a rank of the demo expects in its pages: rows of its own model, and those that another rank has published."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from disagg_kv.engines.hf.demo import DemoConfig
from disagg_kv.engines.hf.demo.expected import ExpectedRows, Rows

CONFIG = DemoConfig(layers=2, kv_heads=4, head_dim=3, requests=1)


def rank(work: Path, role: str, number: int, heads: tuple[int, ...]) -> ExpectedRows:
    """Of one rank."""
    member: Any = SimpleNamespace(config=CONFIG, role=role, rank=number, work=work)
    return ExpectedRows(member, heads)


def cache_of(rows: Rows) -> DynamicCache:
    """A model's own cache with these rows ``[layers, 2, heads, rows, dim]``."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(torch.from_numpy(rows)):
        cache.update(keys.unsqueeze(0), values.unsqueeze(0), layer)
    return cache


def test_rows_come_from_the_model_that_made_them_and_cross_by_heads(tmp_path: Path) -> None:
    """Rows after those that came stay: prefill may have more of a prompt than decode's whole pages."""
    ours, theirs = np.random.default_rng(0).standard_normal((2, 2, 2, 4, 9, 3)).astype(np.float32)
    sides = [rank(tmp_path, "prefill", number, (2 * number, 2 * number + 1)) for number in range(2)]
    decode = rank(tmp_path, "decode", 0, (0, 1, 2, 3))
    for number, side in enumerate(sides):
        side.computed(0, 0, cache_of(ours[:, :, 2 * number : 2 * number + 2, :8]))
        side.publish(0)
    decode.received(0, 0, 8, "prefill", range(2))
    assert np.array_equal(decode.of[0], ours[:, :, :, :8])
    decode.computed(0, 5, cache_of(theirs))
    assert np.array_equal(decode.of[0], np.concatenate((ours[:, :, :, :5], theirs[:, :, :, 5:]), axis=3))
    decode.publish_all()
    sides[1].received(0, 4, 7, "decode", range(1))
    parts = ours[:, :, 2:, :5], theirs[:, :, 2:, 5:7], ours[:, :, 2:, 7:8]
    assert np.array_equal(sides[1].of[0], np.concatenate(parts, axis=3))
