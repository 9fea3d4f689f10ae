"""What a prefix index promises, so that an engine may bring its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from attrs import define, field

from ..geometry import I32

Tokens = Sequence[int] | npt.NDArray[np.integer]
"""Token ids, 0 to 2^31-1."""


@define(eq=False)
class PrefixLock:
    """Pages that an index keeps for somebody. The index makes it and changes it; others read.

    Args:
        adapter: what the tokens were run with, besides the model; ``b""``: nothing.
        page_rows: rows (tokens) of a page.
        ids: the pages, from row 0 on.
    """

    adapter: bytes
    page_rows: int
    ids: list[int] = field(factory=list)

    @property
    def rows(self) -> int:
        """Leading rows that the pages hold."""
        return len(self.ids) * self.page_rows

    @property
    def pages(self) -> I32:
        """The pages ``[rows / page_rows]``, from row 0 on."""
        return np.array(self.ids, np.int32)


class PrefixIndex(Protocol):
    """Finds the pages of a token prefix. One engine thread calls; nothing blocks.

    Only whole pages are kept. A page that was inserted belongs to the index until ``evict`` hands it out.
    """

    @property
    def page_rows(self) -> int:
        """Rows (tokens) of a page."""
        ...

    @property
    def namespace(self) -> bytes:
        """What the pages are of: model, dtype, layout of the cache."""
        ...

    @property
    def evictable(self) -> int:
        """Pages that ``evict`` could hand out now."""
        ...

    def __len__(self) -> int:
        """Pages in the index."""
        ...

    def match(self, tokens: Tokens, adapter: bytes = b"") -> PrefixLock:
        """Lock the longest known prefix of ``tokens``: none of its pages is evicted before ``unlock``.

        The tokens themselves are compared, so that equal hashes of unequal prefixes do no harm.

        Raises:
            ConfigurationError: tokens that are none.
        """
        ...

    def shorten(self, lock: PrefixLock, rows: int) -> None:
        """Give up what a lock holds beyond ``rows``, rounded down to a page.

        Raises:
            LocalProtocolError: a lock of another index, or that is open no more.
            GeometryError: ``rows`` is negative, or more than the lock holds.
        """
        ...

    def insert(self, lock: PrefixLock, tokens: Tokens, pages: I32) -> I32:
        """Add the whole pages of ``tokens`` that follow what ``lock`` holds; the lock holds them too from now on.

        Args:
            lock: an open lock on a prefix of ``tokens``.
            tokens: all of them, from row 0 on.
            pages: where the rows after ``lock.rows`` lie, one page id per whole page.

        Returns:
            Pages that were not taken, because the index had those tokens already or their hash is another's: they
            stay the caller's.

        Raises:
            LocalProtocolError: a lock of another index or that is open no more, or a page that the index has already.
            GeometryError: ``tokens`` do not begin as the lock does, page ids out of range, twice, or too few or many.
        """
        ...

    def unlock(self, lock: PrefixLock) -> None:
        """Let go.

        Raises:
            LocalProtocolError: a lock of another index, or that is open no more.
        """
        ...

    def forget(self, lock: PrefixLock, rows: int) -> None:
        """What a lock holds beyond ``rows`` is wrong: match neither it nor what follows it, whoever holds it, again.

        Those pages stay where they are until they are evicted.

        Raises:
            LocalProtocolError: a lock of another index, or that is open no more.
            GeometryError: ``rows`` is negative, or more than the lock holds.
        """
        ...

    def evict(self, pages: int) -> I32:
        """Forget up to so many pages that nobody holds, and give them back: the least recently used leaves first."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError if the accounts contradict each other."""
        ...


class Pages(Protocol):
    """Where pages come from: an engine's allocator for one group."""

    @property
    def free(self) -> int:
        """How many pages can be taken now."""
        ...

    def take(self, count: int, /) -> I32:
        """``count`` free pages ``[count]``."""
        ...

    def give(self, pages: I32, /) -> None:
        """Take pages back."""
        ...
