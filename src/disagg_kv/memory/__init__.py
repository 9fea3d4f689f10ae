"""Pools, buffers and planes."""

from .base import Buffer, Event, MappedPool, Mark, MemoryPool, PagedMemory
from .calling import undisturbed
from .converted import ConvertedPool
from .devices import spread
from .events import All, CudaEvent, parts, wait_for
from .flag import Flag
from .paged import Layout, PagedPool, new_buffer
from .raw import U8, bytes_of, plane_view
from .soundness import check_memory

__all__ = [
    "U8",
    "All",
    "Buffer",
    "ConvertedPool",
    "CudaEvent",
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
    "spread",
    "undisturbed",
    "wait_for",
]
