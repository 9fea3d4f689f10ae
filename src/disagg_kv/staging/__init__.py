"""The staging ring."""

from .base import ALIGNMENT, Lease, StagingAllocator

__all__ = ["ALIGNMENT", "Lease", "StagingAllocator"]
