"""Which leading tokens a pool holds already, for engines that have no prefix cache of their own."""

from .base import Pages, PrefixIndex, PrefixLock
from .cache import Claim, PrefixCache
from .index import HashPrefixIndex, blake, namespace_of

__all__ = [
    "Claim",
    "HashPrefixIndex",
    "Pages",
    "PrefixCache",
    "PrefixIndex",
    "PrefixLock",
    "blake",
    "namespace_of",
]
