"""A pool that is read as a cache of another spec."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import field, frozen

from ..geometry import CacheSpec, Site, read_as
from .base import Buffer, MemoryPool, pool_text


@frozen(eq=False, repr=False)
class ConvertedPool:
    """A pool as another cache: kernels with ``conversions`` convert what they read of it, and never write to it.

    Its site has the other spec; the memory is the pool's. Compared by identity: one serves all requests to peers with
    this spec, as kernels cache data about its planes.

    Args:
        pool: the pool.
        spec: what it is read as; :func:`~disagg_kv.geometry.difference` finds none between the two.
    """

    pool: MemoryPool
    spec: CacheSpec
    site: Site = field(init=False)

    __repr__ = pool_text

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "site", read_as(self.pool.site, self.spec))

    @property
    def buffers(self) -> Sequence[Buffer]:
        """The pool's."""
        return self.pool.buffers

    @property
    def aux_bytes(self) -> int:
        """The pool's."""
        return self.pool.aux_bytes

    def read_aux(self, slot: int) -> bytes:
        """The pool's."""
        return self.pool.read_aux(slot)

    def write_aux(self, slot: int, data: bytes) -> None:
        """The pool's."""
        self.pool.write_aux(slot, data)
