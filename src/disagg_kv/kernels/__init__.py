"""Gather and scatter: for each a plain reference and fast versions."""

from .base import Kernels, Move

__all__ = ["Kernels", "Move"]
