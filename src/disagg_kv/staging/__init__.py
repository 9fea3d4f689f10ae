"""The staging ring."""

from .base import ALIGNMENT, Lease, StagingAllocator
from .queue import GrantQueue
from .ring import RingStagingAllocator

__all__ = ["ALIGNMENT", "GrantQueue", "Lease", "RingStagingAllocator", "StagingAllocator"]
