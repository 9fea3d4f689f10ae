"""Which leading tokens a pool holds already, for engines that have no prefix cache of their own."""

from .base import Pages, PrefixIndex, PrefixLock
from .cache import Claim, PrefixCache
from .index import HashPrefixIndex, blake, namespace_of
from .pages import PageAllocator
from .sums import CachedChecksums

__all__ = [
    "CachedChecksums",
    "Claim",
    "HashPrefixIndex",
    "PageAllocator",
    "Pages",
    "PrefixCache",
    "PrefixIndex",
    "PrefixLock",
    "blake",
    "namespace_of",
]
