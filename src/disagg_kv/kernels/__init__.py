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
from .select import KERNELS, CpuKernels, ReferenceKernels, available, kernels_for, triton_kernels

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
    "kernels_for",
    "triton_kernels",
]
