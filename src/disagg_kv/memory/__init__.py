"""Pools, buffers and planes."""

from .base import Buffer, Event, MappedPool, Mark, MemoryPool, PagedMemory
from .calling import undisturbed
from .converted import ConvertedPool
from .events import All, parts, wait_for
from .flag import Flag
from .paged import Layout, PagedPool, new_buffer
from .raw import U8, bytes_of, plane_view
from .soundness import check_memory

__all__ = [
    "U8",
    "All",
    "Buffer",
    "ConvertedPool",
    "Event",
    "Flag",
    "Layout",
    "MappedPool",
    "Mark",
    "MemoryPool",
    "PagedMemory",
    "PagedPool",
    "bytes_of",
    "check_memory",
    "new_buffer",
    "parts",
    "plane_view",
    "undisturbed",
    "wait_for",
]
