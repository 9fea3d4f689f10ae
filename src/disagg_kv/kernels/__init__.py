"""Gather and scatter: for each a plain reference and fast versions."""

from .base import Kernels, Move
from .select import KERNELS, CpuKernels, ReferenceKernels, TritonKernels, available, kernels_for

__all__ = ["KERNELS", "CpuKernels", "Kernels", "Move", "ReferenceKernels", "TritonKernels", "available", "kernels_for"]
