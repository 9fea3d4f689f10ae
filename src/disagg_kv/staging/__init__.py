"""The staging ring."""

from .base import ALIGNMENT, Lease, StagingAllocator
from .queue import GrantedLease, GrantQueue
from .ring import RingStagingAllocator

__all__ = ["ALIGNMENT", "GrantQueue", "GrantedLease", "Lease", "RingStagingAllocator", "StagingAllocator"]
