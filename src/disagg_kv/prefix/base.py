"""The Protocol of a prefix index, so that an engine can provide its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from attrs import define, field

from .. import arguments
from ..errors import ConfigurationError
from ..geometry import I32

Tokens = Sequence[int] | npt.NDArray[np.integer]
"""Token ids, 0 to 2^31-1."""


def token_array(given: Tokens) -> npt.NDArray[np.integer]:
    """Tokens as an array; an index checks their values.

    Raises:
        ConfigurationError: no flat list of integers.
    """
    try:
        tokens = np.asarray(None if isinstance(given, bytes | bytearray | memoryview) else given)
    except Exception as exc:
        raise arguments.wrong("tokens", given, "a flat list of integers is needed") from exc
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise ConfigurationError(f"tokens must be a flat list of integers, not {tokens.dtype} of {tokens.shape}")
    return tokens


@define(eq=False)
class PrefixLock:
    """A lock on pages of an index. The index creates and changes it; others only read it.

    Args:
        adapter: the adapter weights with which the rows were computed; ``b""``: none.
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

    The index holds whole pages only. An inserted page belongs to the index until ``evict`` returns it.
    """

    @property
    def page_rows(self) -> int:
        """Rows (tokens) of a page."""
        ...

    @property
    def namespace(self) -> bytes:
        """Identifies the caches whose pages may be mixed: model, dtype, layout."""
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
        """Release the part of a lock beyond ``rows``, rounded down to a page.

        Raises:
            LocalProtocolError: a lock of another index, or one that is no longer open.
            GeometryError: ``rows`` is negative, or more than the lock holds.
        """
        ...

    def insert(self, lock: PrefixLock, tokens: Tokens, pages: I32) -> I32:
        """Add the whole pages of ``tokens`` that follow the lock's pages; the lock then holds them too.

        Args:
            lock: an open lock on a prefix of ``tokens``.
            tokens: all tokens, from row 0 on.
            pages: one page id per whole page of rows after ``lock.rows``.

        Returns:
            Pages that the index did not take, because it has those tokens already or their hash collides. They stay the
                caller's.

        Raises:
            LocalProtocolError: a lock of another index, one that is no longer open, or a page that the index has
                already.
            GeometryError: ``tokens`` do not begin as the lock does; page ids are out of range or repeated; too few or
                too many pages.
        """
        ...

    def unlock(self, lock: PrefixLock) -> None:
        """Release the lock.

        Raises:
            LocalProtocolError: a lock of another index, or one that is no longer open.
        """
        ...

    def evict(self, pages: int) -> I32:
        """Remove and return up to ``count`` unlocked pages, least recently used first."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError if the accounts contradict each other."""
        ...


class Pages(Protocol):
    """Where pages come from: an engine's allocator for one group."""

    @property
    def free(self) -> int:
        """Number of pages that can be taken now."""
        ...

    def take(self, count: int, /) -> I32:
        """``count`` free pages ``[count]``."""
        ...

    def give(self, pages: I32, /) -> None:
        """Take pages back."""
        ...
