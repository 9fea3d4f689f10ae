"""The transport ``wire`` of some pairs: within a host, as slow as a network card.

The folder ``wire`` beside this file names it to the library, where it is in ``PYTHONPATH``.
"""

from __future__ import annotations

import torch

from bench.emulated import emulate
from disagg_kv.transports import Transport, transport

BYTES_PER_S = 25e9
"""A network card of 200 Gbit/s."""

LATENCY_S = 5e-6


def wire() -> Transport:
    """What carries bytes within this host, behind an emulated wire; peers do not map pages through it."""
    return emulate(transport("cuda_ipc" if torch.cuda.is_available() else "shm"), BYTES_PER_S, LATENCY_S)
