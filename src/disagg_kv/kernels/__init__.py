"""Gather, scatter, copy and checksum: for each a plain reference and fast versions."""

from .base import (
    Checksums,
    Kernels,
    Move,
    PageMove,
    Pages,
    Prepared,
    PreparedGather,
    SupportsConversions,
    SupportsPreparing,
    SupportsStreams,
    SupportsWarmUp,
)
from .select import KERNELS, CpuKernels, ReferenceKernels, available, gpu_kernels, kernels_for

__all__ = [
    "KERNELS",
    "Checksums",
    "CpuKernels",
    "Kernels",
    "Move",
    "PageMove",
    "Pages",
    "Prepared",
    "PreparedGather",
    "ReferenceKernels",
    "SupportsConversions",
    "SupportsPreparing",
    "SupportsStreams",
    "SupportsWarmUp",
    "available",
    "gpu_kernels",
    "kernels_for",
]
