"""Tests that need a GPU: skipped, with the reason, on a host without one; an error where one was promised."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this directory, and skip it where there is no GPU."""
    if not torch.cuda.is_available() and os.environ.get("DISAGG_KV_NEEDS_GPU"):
        pytest.exit("no CUDA device is visible to torch, and the GPU suite was asked for", returncode=1)
    for item in items:
        if "gpu" in item.path.parent.parts:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device is visible to torch"))


@pytest.fixture(autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    """What a test has freed is there for the processes of other tests: those above 4 GiB fill most of a GPU."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()
