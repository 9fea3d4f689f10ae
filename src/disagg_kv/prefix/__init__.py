"""Which leading tokens a pool holds already, for engines that have no prefix cache of their own."""

from .base import Pages, PrefixIndex, PrefixLock
from .cache import Claim, PrefixCache
from .index import HashPrefixIndex, blake, namespace_of
from .pages import PageAllocator

__all__ = [
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
