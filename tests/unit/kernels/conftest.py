"""On a host without a GPU, Triton interprets its kernels, and they move the CPU's memory."""

from __future__ import annotations

import os

import torch

# Before anything imports the kernels: Triton asks where it decorates them, and tests import them only when they run.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
