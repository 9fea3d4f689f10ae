"""Tests that need a GPU: skipped, with the reason, on a host without one; an error where one was promised."""

from __future__ import annotations

import os

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
