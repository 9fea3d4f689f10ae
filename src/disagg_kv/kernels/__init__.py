"""Gather, scatter and checksum: for each a plain reference and fast versions."""

from .base import Kernels, Move, Sums, SupportsStreams, SupportsWarmUp
from .select import KERNELS, CpuKernels, ReferenceKernels, TritonKernels, available, kernels_for

__all__ = [
    "KERNELS",
    "CpuKernels",
    "Kernels",
    "Move",
    "ReferenceKernels",
    "Sums",
    "SupportsStreams",
    "SupportsWarmUp",
    "TritonKernels",
    "available",
    "kernels_for",
]
