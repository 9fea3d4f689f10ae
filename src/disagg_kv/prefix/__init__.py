"""Which leading tokens a pool holds already, for engines that have no prefix cache of their own."""

from .base import Pages, PrefixLock
from .cache import PrefixCache, PrefixLease
from .index import HashPrefixIndex, blake, namespace_of
from .pages import PageAllocator

__all__ = [
    "HashPrefixIndex",
    "PageAllocator",
    "Pages",
    "PrefixCache",
    "PrefixLease",
    "PrefixLock",
    "blake",
    "namespace_of",
]
