"""The pages of one request on one decode rank: held, awaited, and returned at the end."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Protocol

import numpy as np

from .. import arguments
from ..core import Phase
from ..errors import (
    CapacityError,
    ConfigurationError,
    DisaggKVError,
    GeometryError,
    LocalProtocolError,
)
from ..geometry import I32, PageTable, Site
from ..memory import Event
from .base import Pages, Tokens, token_array
from .index import HashPrefixIndex, namespace_of

log = logging.getLogger("disagg_kv")


class _State(Enum):
    MATCHED = "matched"
    AWAITED = "awaited"
    THERE = "there"
    ENDED = "ended"


class Ending(Protocol):
    """The part of a room's handle that a lease reads."""

    @property
    def phase(self) -> Phase:
        """How the room ended."""
        ...

    @property
    def released(self) -> bool:
        """True: no transfer reads or writes its pages any more."""
        ...

    @property
    def error(self) -> DisaggKVError | None:
        """Why it failed."""
        ...


class PrefixCache:
    """An index and the pool's free pages, used as one. Not thread-safe.

    Args:
        index: the index of the pool's pages.
        pages: the pages that neither the index nor a lease has.
        site: the pool's site, with one group of pages of tokens. States are not part of a prefix: each room sends its
            own.

    Raises:
        ConfigurationError: an index for another model or page size; a pool with several groups.
            Also a pool with a sliding window: each room writes its rows again, into pages that others may hold.
    """

    def __init__(self, index: HashPrefixIndex, pages: Pages, site: Site) -> None:
        arguments.one(index, "index", HashPrefixIndex)
        arguments.methods(pages, "pages", "an allocator of pages", "take", "give")
        arguments.one(site, "site", Site)
        if len(site.token_groups) != 1:
            groups = [g.id for g in site.token_groups]
            raise ConfigurationError(f"a prefix cache needs exactly one group of token pages, not {groups}")
        if site.spec.slides():
            raise ConfigurationError(
                "a prefix cache is for layers that see all tokens: rows of a sliding window are written again by "
                "every room, into pages that others may hold"
            )
        self.group = site.token_groups[0]
        own = namespace_of(site.spec)
        if index.namespace != own:
            raise ConfigurationError(
                f"an index for another model: its namespace is {index.namespace.hex()}, the pool's {own.hex()}"
            )
        if index.page_rows != self.group.rows_per_page:
            raise ConfigurationError(
                f"the index has {index.page_rows} rows per page, the pool {self.group.rows_per_page}"
            )
        self.index = index
        self.pages = pages
        self._leaving: deque[tuple[Event, Callable[[], None]]] = deque()

    def lease(self, tokens: Tokens, adapter: bytes = b"") -> PrefixLease:
        """Begin a request: its longest known prefix stays in the pool until the lease has ended."""
        return PrefixLease(self, tokens, adapter)

    def take(self, count: int) -> I32:
        """Take free pages; the index evicts if too few are free.

        Raises:
            CapacityError: too few pages, even after evicting every unlocked one.
        """
        count = arguments.count(count, "pages asked")
        self._take_back()
        there = self.pages.free + self.index.evictable
        if count > there:
            raise CapacityError(f"group {self.group.id!r}: {count} pages requested, {there} are free or can be evicted")
        if count > self.pages.free:
            self.pages.give(self.index.evict(count - self.pages.free))
        return self.pages.take(count)

    def _take_back(self) -> None:
        """Pages whose event has happened are free; those whose event raises are never used again."""
        while self._leaving:
            ready, back = self._leaving[0]
            try:
                if not ready.query():
                    return
            except Exception as exc:
                log.warning("pages are not used again: the event after which they are free raised: %s", exc)
                self._leaving.popleft()
            else:
                self._leaving.popleft()
                back()

    def leave(self, ready: Event, back: Callable[[], None]) -> None:
        """Call ``back`` to return pages once ``ready`` has happened; checked whenever pages are taken."""
        arguments.methods(ready, "ready", "an event", "query")
        arguments.function(back, "back")
        self._leaving.append((ready, back))


class PrefixLease:
    """One request's pages: ``begin``, ``expect`` with its result, ``settle`` until it returns True, then ``end``.

    Rows enter the index only after their room has succeeded. Rows of a failed room are awaited again, all of them, by
    the next attempt.
    """

    def __init__(self, cache: PrefixCache, tokens: Tokens, adapter: bytes) -> None:
        self._cache = arguments.one(cache, "cache", PrefixCache)
        self._tokens = token_array(tokens)
        self._lock = cache.index.match(self._tokens, arguments.octets(adapter, "adapter", most=4096))
        self._state = _State.MATCHED
        self._table: I32 = np.zeros(0, np.int32)
        self._mine: set[int] = set()

    @property
    def rows(self) -> int:
        """Leading rows that the pool certainly holds: those to declare, and later those that have arrived."""
        return self._lock.rows

    @property
    def table(self) -> PageTable:
        """All pages of the request, from row 0 on."""
        return PageTable(self._cache.group.id, self._table)

    def begin(self, held: int | None = None) -> PageTable:
        """Take pages for the rows that are not held.

        Args:
            held: the number on which the ranks of the instance agreed, if it is less than ``rows``.

        Returns:
            The table for :meth:`~disagg_kv.endpoints.api.Reception.expect`; it begins after ``rows``.

        Raises:
            LocalProtocolError: called twice.
            GeometryError: ``held`` is negative, or more than ``rows``.
            CapacityError: not enough pages; the lease has ended.
        """
        self._check(_State.MATCHED)
        if held is not None:
            held = arguments.count(held, "held", least=-arguments.MOST, error=GeometryError)
            self._cache.index.shorten(self._lock, held)
        try:
            taken = self._cache.take(-(-len(self._tokens) // self._cache.group.rows_per_page) - len(self._lock.ids))
        except CapacityError:
            self._leave()
            raise
        self._table = np.concatenate([self._lock.pages, taken])
        self._mine = set(taken.tolist())
        self._state = _State.AWAITED
        return PageTable(self._cache.group.id, taken, self._lock.rows)

    def settle(self, handle: Ending) -> bool:
        """Check the room; True once it has ended and no transfer touches its pages any more.

        After a success the rows are in the index, and the request keeps its pages until ``end``. Rows that another
        lease brought meanwhile are there twice: the lease keeps its own pages, and locks those of the index, too. So
        ``grow`` may lack pages that were free or evictable when the request was admitted. After a failure no row has
        entered the index, all pages are free, and the lease has ended.
        """
        self._check(_State.AWAITED)
        arguments.attributes(handle, "handle", "a room's handle", "phase", "released", "error")
        if arguments.flag(handle.released, "handle: released") is False:
            return False
        if handle.phase is Phase.DONE:
            self._state = _State.THERE
            self._insert(self._tokens)
        else:
            self._leave()
        return True

    def grow(self, rows: int) -> PageTable:
        """Take more pages, so that the request has ``rows`` rows; the whole table.

        Raises:
            LocalProtocolError: the transfer has not ended well.
            CapacityError: not enough pages; nothing has changed.
        """
        self._check(_State.THERE)
        rows = arguments.count(rows, "rows", error=GeometryError)
        more = -(-rows // self._cache.group.rows_per_page) - len(self._table)
        if more > 0:
            taken = self._cache.take(more)
            self._table = np.concatenate([self._table, taken])
            self._mine.update(taken.tolist())
        return self.table

    def end(self, tokens: Tokens | None = None, ready: Event | None = None) -> None:
        """End the request.

        Args:
            tokens: the tokens of all rows in the pages, generated ones included; their whole pages enter the index.
            ready: the event after which the rows are final and the engine no longer writes; None: already. No page is
                reused before it.

        Raises:
            LocalProtocolError: the room is still open, or the lease has ended.
            ConfigurationError: ``ready`` is no event, or raises; the lease has not ended.
            GeometryError: ``tokens`` do not begin as the request did, or are more than its pages hold.
        """
        arguments.event(ready, "ready")
        if self._state not in (_State.MATCHED, _State.THERE):
            self._check(_State.THERE)
        try:
            there = ready is None or bool(ready.query())
        except Exception as exc:
            raise ConfigurationError(f"ready: the event raised: {exc}") from exc
        if tokens is not None:
            self._check(_State.THERE)
            self._insert(token_array(tokens))
        if there:
            self._leave()
        elif ready is not None:
            self._state = _State.ENDED
            self._cache.leave(ready, self._leave)

    def _insert(self, tokens: Tokens) -> None:
        whole = len(tokens) // self._cache.group.rows_per_page
        if whole > len(self._table):
            raise GeometryError(f"{len(tokens)} tokens, but {len(self._table)} pages")
        given = self._table[len(self._lock.ids) : whole]
        spare = self._cache.index.insert(self._lock, tokens, given)
        self._mine -= set(given.tolist()).difference(spare.tolist())

    def _leave(self) -> None:
        self._cache.index.unlock(self._lock)
        self._cache.pages.give(np.array(sorted(self._mine), np.int32))
        self._mine.clear()
        self._state = _State.ENDED

    def _check(self, state: _State) -> None:
        if self._state is not state:
            raise LocalProtocolError(f"the lease is {self._state.value}, not {state.value}")
