"""Handing out the pages of one group."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from .. import arguments
from ..errors import CapacityError, ConfigurationError, LocalProtocolError
from ..geometry import I32


class PageAllocator:
    """A free list: pages go out in the order in which they came in. Not thread-safe.

    Args:
        pages: every page id, once, in the order in which to hand them out first.
    """

    def __init__(self, pages: Iterable[int]) -> None:
        self._free = deque(arguments.counts(pages, "pages", least=-arguments.MOST))
        self._there = set(self._free)
        self._all = frozenset(self._free)
        if len(self._all) != len(self._free) or min(self._free, default=0) < 0:
            raise ConfigurationError(f"pages must be distinct and not negative: {list(self._free)}")

    @property
    def free(self) -> int:
        """Number of pages that can be taken now."""
        return len(self._free)

    def take(self, count: int) -> I32:
        """``count`` free pages ``[count]``.

        Raises:
            CapacityError: more than are free now, or than there are at all.
        """
        count = arguments.count(count, "pages asked")
        if count > len(self._free):
            raise CapacityError(f"{count} pages requested, {len(self._free)} of {len(self._all)} are free")
        taken = [self._free.popleft() for _ in range(count)]
        self._there.difference_update(taken)
        return np.array(taken, np.int32)

    def give(self, pages: Iterable[int]) -> None:
        """Return pages.

        Raises:
            LocalProtocolError: a page that is free already or does not belong here; then none is returned.
        """
        back = list(arguments.counts(pages, "pages", least=-arguments.MOST))
        wrong = [page for page in back if page not in self._all or page in self._there]
        if wrong or len(set(back)) != len(back):
            raise LocalProtocolError(f"pages {wrong or back} are free already or not from this allocator")
        self._free += back
        self._there.update(back)

    def check_integrity(self) -> None:
        """Raise AssertionError if a page is free twice or a stranger is free."""
        assert len(self._free) == len(self._there)
        assert set(self._free) == self._there
        assert self._all.issuperset(self._free)
