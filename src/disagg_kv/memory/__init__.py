"""Pools, buffers and planes."""

from .base import Buffer, Event, MemoryPool

__all__ = ["Buffer", "Event", "MemoryPool"]
