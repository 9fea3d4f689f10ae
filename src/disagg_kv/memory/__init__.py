"""Pools, buffers and planes."""

from .base import Buffer, Event, MemoryPool
from .paged import Layout, PagedPool, new_buffer
from .raw import U8, bytes_of, plane_view

__all__ = ["U8", "Buffer", "Event", "Layout", "MemoryPool", "PagedPool", "bytes_of", "new_buffer", "plane_view"]
