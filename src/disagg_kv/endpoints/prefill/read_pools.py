"""A prefill rank's pool as the caches of decode ranks, and kernels that are ready for them."""

from __future__ import annotations

import threading

from ...core import Verify
from ...geometry import CacheSpec
from ...kernels import Kernels, SupportsWarmUp
from ...memory import ConvertedPool, MappedPool, MemoryPool
from ...planning.cache import PlanCache

_COMPILING = threading.Lock()
"""Threads that connect peers at once need the same kernels: one compiles them, and the others find them."""


class ReadPools:
    """One pool for each spec that decode ranks have: kernels know pools by identity. Any thread.

    Args:
        pool: ours.
        kernels: that read it.
        verify: how many segments this side wants compared.
    """

    def __init__(self, pool: MemoryPool, kernels: Kernels, verify: Verify) -> None:
        self._pool = pool
        self._kernels = kernels
        self._verify: Verify = verify
        self._converted: PlanCache[CacheSpec, ConvertedPool] = PlanCache()
        self._lock = threading.Lock()

    def of(self, spec: CacheSpec) -> MemoryPool:
        """The pool as a cache of this spec."""
        if spec == self._pool.site.spec:
            return self._pool
        with self._lock:
            found = self._converted.get(spec)
            return self._converted.keep(spec, ConvertedPool(self._pool, spec)) if found is None else found

    def warm(self, spec: CacheSpec, mapped: MappedPool | None) -> None:
        """Compile what only this peer's requests need, so that none of them waits. Blocks; on any thread.

        For our own spec all is compiled since the start, unless the mapped pool is aligned worse than ours. Its table
        is brought to the GPU. For another spec, conversions are compiled: copies into the mapped pool, or else
        gathers; and checksums, where this side wants segments compared.
        """
        kernels, pool = self._kernels, self.of(spec)
        if not isinstance(kernels, SupportsWarmUp):
            return
        with _COMPILING:
            if mapped is not None:
                kernels.warm_copy(pool, mapped)
            elif pool is not self._pool:
                kernels.warm(pool)
            if pool is not self._pool and self._verify != "off":
                kernels.warm_checksum(pool)
