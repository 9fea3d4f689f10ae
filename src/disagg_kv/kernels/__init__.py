"""Gather, scatter and checksum: for each a plain reference and fast versions."""

from .base import (
    Kernels,
    Move,
    Prepared,
    PreparedGather,
    Checksums,
    SupportsPreparing,
    SupportsStreams,
    SupportsWarmUp,
)
from .select import KERNELS, CpuKernels, ReferenceKernels, TritonKernels, available, kernels_for

__all__ = [
    "KERNELS",
    "CpuKernels",
    "Kernels",
    "Move",
    "Prepared",
    "PreparedGather",
    "ReferenceKernels",
    "Checksums",
    "SupportsPreparing",
    "SupportsStreams",
    "SupportsWarmUp",
    "TritonKernels",
    "available",
    "kernels_for",
]
