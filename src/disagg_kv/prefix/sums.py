"""Checksums of an index's pages, computed when the pages entered it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from .. import arguments
from ..endpoints import CachedPages, PageChecksums, page_sums
from ..endpoints.kept_pages import kept_layers
from ..errors import ConfigurationError
from ..geometry import I32, PageTable, Site
from ..kernels import Kernels, kernels_for
from ..memory import Event, MemoryPool


class CachedChecksums:
    """Remembers eight bytes per page and layer. Not thread-safe.

    Args:
        pool: the rank's cache; one group of pages of tokens.
        kernels: for its device; None: the fastest.

    Raises:
        ConfigurationError: a pool of several groups.
    """

    def __init__(self, pool: MemoryPool, kernels: Kernels | None = None) -> None:
        arguments.attributes(pool, "pool", "a pool", "site", "buffers")
        arguments.one(pool.site, "pool: site", Site)
        if kernels is not None:
            arguments.methods(kernels, "kernels", "a set of kernels", "checksum")
        if len(pool.site.token_groups) != 1:
            raise ConfigurationError(
                f"checksums need exactly one group of token pages, not {[g.id for g in pool.site.token_groups]}"
            )
        (self._group,) = pool.site.token_groups
        self.pool = pool
        self._kernels = kernels_for(pool.buffers[0].device) if kernels is None else kernels
        self._sums = np.zeros((self._group.pages, len(kept_layers(pool.site, self._group.id))), np.uint64)
        self._pending: deque[tuple[I32, PageChecksums]] = deque()

    def note(self, table: PageTable, which: Sequence[int], ready: Event | None = None) -> None:
        """Sum pages whose rows are final, now or at ``ready``; nothing waits on a GPU.

        Args:
            table: a request's pages, from row 0 on.
            which: positions in ``table`` of the pages to sum, counted from 0.
            ready: the event at which the rows are final; None: they are.
        """
        arguments.one(table, "table", PageTable)
        which = arguments.counts(which, "which")
        arguments.event(ready, "ready")
        self._collect(wait=False)
        if len(which):
            sums = page_sums(self._kernels, self.pool, table, which, ready)
            self._pending.append((table.pages[list(which)], sums))
            self._collect(wait=False)

    def kept(self, pages: I32) -> CachedPages:
        """Pages of a prefix, from row 0 on, for :meth:`~disagg_kv.endpoints.Reception.expect`.

        Every page must have been given to ``note``. Waits for sums that are still being computed.
        """
        table = PageTable(self._group.id, pages)
        table.check(self._group, 0, len(table.pages) * self._group.rows_per_page)
        self._collect(wait=True)
        return CachedPages(table, self._sums[table.pages])

    def _collect(self, *, wait: bool) -> None:
        """Store finished sums in the order of ``note``: a page may have been noted twice."""
        while self._pending:
            pages, sums = self._pending[0]
            if sums.event is not None:
                if wait:
                    sums.event.synchronize()
                elif not sums.event.query():
                    return
            self._pending.popleft()
            self._sums[pages] = sums.read()
