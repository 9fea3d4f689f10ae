"""Pools, buffers and planes."""

from .base import Buffer, Event, MappedPool, Mark, MemoryPool, PagedMemory
from .bell import Bell
from .calling import undisturbed
from .converted import ConvertedPool
from .devices import spread
from .events import All, CudaEvent, parts
from .paged import Layout, PagedPool, new_buffer
from .raw import U8, bytes_of, plane_view, stored_bytes
from .soundness import check_memory

__all__ = [
    "U8",
    "All",
    "Bell",
    "Buffer",
    "ConvertedPool",
    "CudaEvent",
    "Event",
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
    "stored_bytes",
    "undisturbed",
]
