"""What an index of prefixes and its callers share: tokens, locks, and where pages come from."""

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
