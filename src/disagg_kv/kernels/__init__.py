"""Gather, scatter and checksum: for each a plain reference and fast versions."""

from .base import Kernels, Move, Sums
from .select import KERNELS, CpuKernels, ReferenceKernels, TritonKernels, available, kernels_for

__all__ = [
    "KERNELS",
    "CpuKernels",
    "Kernels",
    "Move",
    "ReferenceKernels",
    "Sums",
    "TritonKernels",
    "available",
    "kernels_for",
]
