"""Pages by the hash chain of their token prefix.

A page's key is the hash of its tokens and of the previous page's key, as in vLLM's prefix caching (docs.vllm.ai,
"Automatic Prefix Caching"). Keys only find candidates: a page matches if its tokens and the previous page are equal
too.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from hashlib import blake2b

import msgspec
import numpy as np

from .. import arguments
from ..core.wire.specs import spec_to_wire
from ..errors import ConfigurationError, GeometryError, LocalProtocolError
from ..geometry import I32, CacheSpec
from .base import PrefixLock, Tokens, token_array

Digest = Callable[[bytes], bytes]

_ROOT = -1
_PAGE_BITS = 32


def blake(data: bytes) -> bytes:
    """16 bytes that are equal in every process."""
    return blake2b(data, digest_size=16).digest()


def namespace_of(spec: CacheSpec) -> bytes:
    """A digest of all properties that make the bytes of two caches interchangeable: model, components, dtypes."""
    return blake(msgspec.msgpack.encode(spec_to_wire(arguments.one(spec, "spec", CacheSpec))))


class HashPrefixIndex:
    """Finds the pages of a token prefix. One engine thread calls; nothing blocks.

    The index holds whole pages only. An inserted page belongs to the index until ``evict`` returns it. A page id is
    also the number of its node, so that all accounts are lists over page ids.

    Args:
        page_rows: rows (tokens) of a page.
        pages: how many pages the pool has; ids are below this.
        namespace: see :func:`namespace_of`; two namespaces never share a page.
        digest: of a page's key and tokens.

    Attributes:
        page_rows: rows of a page.
        namespace: identifies the caches whose pages may be mixed: model, dtype, layout.

    Raises:
        ConfigurationError: ``page_rows`` or ``pages`` are not positive, or more than 2^31.
    """

    def __init__(self, page_rows: int, pages: int, namespace: bytes = b"", digest: Digest = blake) -> None:
        page_rows = arguments.count(page_rows, "page_rows", least=-arguments.MOST)
        pages = arguments.count(pages, "pages", least=-arguments.MOST)
        namespace = arguments.octets(namespace, "namespace", most=4096)
        arguments.function(digest, "digest")
        if page_rows < 1 or not 1 <= pages <= 1 << 31:
            raise ConfigurationError(f"an index of {pages} pages of {page_rows} rows")
        self.page_rows = page_rows
        self._pages = pages
        self.namespace = namespace
        self._digest = digest
        self._at: dict[bytes, int] = {}
        self._key: list[bytes] = []
        self._content: list[bytes | None] = []
        self._before: list[int] = []
        self._after: list[int] = []
        self._refs: list[int] = []
        self._used: list[int] = []
        self._locks: set[PrefixLock] = set()
        self._held = 0
        self._now = 0
        # (used, page) of leaves without a lock; entries that are no leaves any more, or were used since, are skipped.
        self._leaves: list[int] = []

    @property
    def evictable(self) -> int:
        """Pages that ``evict`` could hand out now: those without a lock. What follows them has none either."""
        return len(self) - self._held

    @property
    def pages(self) -> Collection[int]:
        """The pages that ``match`` can find."""
        return self._at.values()

    def __len__(self) -> int:
        """Pages in the index."""
        return len(self._at)

    def match(self, tokens: Tokens, adapter: bytes = b"") -> PrefixLock:
        """Lock the longest known prefix of ``tokens``: none of its pages is evicted before ``unlock``.

        The tokens themselves are compared, so that equal hashes of unequal prefixes do no harm.

        Raises:
            ConfigurationError: tokens that are none.
        """
        adapter = arguments.octets(adapter, "adapter", most=4096)
        contents = self._contents(tokens, adapter)
        lock = PrefixLock(adapter, self.page_rows)
        key, before = self.namespace, _ROOT
        for content in contents:
            key = self._digest(key + content)
            page = self._at.get(key)
            if page is None or self._before[page] != before or self._content[page] != content:
                break
            lock.ids.append(page)
            before = page
        self._locks.add(lock)
        self._hold(lock.ids)
        self._touch(lock.ids)
        return lock

    def shorten(self, lock: PrefixLock, rows: int) -> None:
        """Release the part of a lock beyond ``rows``, rounded down to a page.

        Raises:
            LocalProtocolError: a lock of another index, or one that is no longer open.
            GeometryError: ``rows`` is negative, or more than the lock holds.
        """
        self._check(lock)
        rows = arguments.count(rows, "rows", least=-arguments.MOST, error=GeometryError)
        if not 0 <= rows <= lock.rows:
            raise GeometryError(f"{rows} rows, but the lock has {lock.rows}")
        keep = rows // self.page_rows
        dropped, lock.ids = lock.ids[keep:], lock.ids[:keep]
        self._drop(dropped)

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
        self._check(lock)
        contents = self._contents(tokens, lock.adapter)
        given = list(arguments.counts(pages, "pages", least=-arguments.MOST, error=GeometryError))
        self._check_pages(given, lock, contents)
        before = lock.ids[-1] if lock.ids else _ROOT
        key = self._key[before] if lock.ids else self.namespace
        taken: list[int] = []
        spare: list[int] = []
        for n, (page, content) in enumerate(zip(given, contents[len(lock.ids) :], strict=True)):
            key = self._digest(key + content)
            found = self._at.get(key)
            if found is None:
                self._add(page, key, content, before)
                before = page
            elif self._before[found] == before and self._content[found] == content:
                spare.append(page)
                before = found
            else:
                spare += given[n:]
                break
            taken.append(before)
        lock.ids += taken
        self._hold(taken)
        self._touch(lock.ids)
        return np.array(spare, np.int32)

    def unlock(self, lock: PrefixLock) -> None:
        """Release the lock.

        Raises:
            LocalProtocolError: a lock of another index, or one that is no longer open.
        """
        self._check(lock)
        self._locks.discard(lock)
        self._touch(lock.ids)
        self._drop(lock.ids)

    def evict(self, pages: int) -> I32:
        """Remove and return up to that many unlocked pages, least recently used first."""
        pages = arguments.count(pages, "pages")
        out: list[int] = []
        while len(out) < pages and self._leaves:
            used, page = divmod(heapq.heappop(self._leaves), 1 << _PAGE_BITS)
            if self._content[page] is None or self._used[page] != used or not self._is_free_leaf(page):
                continue
            before = self._before[page]
            del self._at[self._key[page]]
            self._content[page] = None
            self._key[page] = b""
            if before != _ROOT:
                self._after[before] -= 1
                if self._is_free_leaf(before):
                    self._push(before)
            out.append(page)
        return np.array(out, np.int32)

    # Accounts.

    def _contents(self, tokens: Tokens, adapter: bytes) -> list[bytes]:
        """The whole pages of tokens as bytes. The first one's begin with the adapter and its length."""
        given = token_array(tokens)
        if given.size and not 0 <= int(given.min()) <= int(given.max()) < 1 << 31:
            raise ConfigurationError(f"token ids must be 0 to 2^31-1, not {int(given.min())} to {int(given.max())}")
        size = 4 * self.page_rows
        data = given.astype("<i4", copy=False).tobytes()
        contents = [data[at : at + size] for at in range(0, len(data) // size * size, size)]
        if contents:
            contents[0] = len(adapter).to_bytes(4, "little") + adapter + contents[0]
        return contents

    def _check(self, lock: PrefixLock) -> None:
        arguments.one(lock, "lock", PrefixLock)
        if lock not in self._locks:
            raise LocalProtocolError(f"a lock on {lock.rows} rows that this index does not have: ended, or another's")

    def _check_pages(self, given: list[int], lock: PrefixLock, contents: list[bytes]) -> None:
        """Nothing has changed yet."""
        known = len(lock.ids)
        if len(contents) < known or any(self._content[p] != c for p, c in zip(lock.ids, contents, strict=False)):
            raise GeometryError(f"the tokens do not begin with the {lock.rows} locked rows")
        if len(given) != len(contents) - known:
            raise GeometryError(f"{len(given)} pages for {len(contents) - known} whole pages after row {lock.rows}")
        if given and not 0 <= min(given) <= max(given) < self._pages:
            raise GeometryError(f"page ids {min(given)} to {max(given)}, but the index has {self._pages} pages")
        if len(set(given)) != len(given):
            raise GeometryError("a page id is repeated")
        present = [page for page in given if page < len(self._content) and self._content[page] is not None]
        if present:
            raise LocalProtocolError(f"pages {present[:8]} are in the index already")

    def _add(self, page: int, key: bytes, content: bytes, before: int) -> None:
        grow = page + 1 - len(self._content)
        if grow > 0:
            for column in (self._before, self._after, self._refs, self._used):
                column += [0] * grow
            self._content += [None] * grow
            self._key += [b""] * grow
        self._at[key] = page
        self._key[page], self._content[page], self._before[page] = key, content, before
        self._after[page] = self._refs[page] = 0
        if before != _ROOT:
            self._after[before] += 1

    def _hold(self, ids: list[int]) -> None:
        refs = self._refs
        for page in ids:
            self._held += refs[page] == 0
            refs[page] += 1

    def _drop(self, ids: list[int]) -> None:
        refs = self._refs
        for page in ids:
            refs[page] -= 1
            self._held -= refs[page] == 0
        if ids and self._is_free_leaf(ids[-1]):
            self._push(ids[-1])

    def _touch(self, ids: list[int]) -> None:
        """A page is used whenever one after it is, so that it is never older."""
        self._now += 1
        used, now = self._used, self._now
        for page in ids:
            used[page] = now

    def _is_free_leaf(self, page: int) -> bool:
        return self._refs[page] == 0 and self._after[page] == 0

    def _push(self, page: int) -> None:
        heapq.heappush(self._leaves, self._used[page] << _PAGE_BITS | page)
        if len(self._leaves) > 2 * len(self) + 64:
            self._leaves = [self._used[p] << _PAGE_BITS | p for p in self._at.values() if self._is_free_leaf(p)]
            heapq.heapify(self._leaves)

    def check_integrity(self) -> None:
        """Raise AssertionError if the accounts contradict each other."""
        live = {page for page, content in enumerate(self._content) if content is not None}
        assert set(self._at.values()) == live
        assert len(self) == len(live)
        refs = dict.fromkeys(live, 0)
        for lock in self._locks:
            before = _ROOT
            for page in lock.ids:
                assert self._before[page] == before
                refs[page] += 1
                before = page
        after = dict.fromkeys(live, 0)
        leaves = {entry % (1 << _PAGE_BITS) for entry in self._leaves if self._is_current(entry)}
        for page in live:
            before, content = self._before[page], self._content[page]
            assert content is not None
            key = self.namespace if before == _ROOT else self._key[before]
            assert self._key[page] == self._digest(key + content)
            assert self._at.get(self._key[page]) == page
            if before != _ROOT:
                after[before] += 1
                assert refs[page] <= refs[before]
                assert self._used[page] <= self._used[before]
        assert all(self._refs[page] == refs[page] and self._after[page] == after[page] for page in live)
        assert self._held == sum(count > 0 for count in refs.values())
        assert leaves == {page for page in live if not refs[page] and not after[page]}

    def _is_current(self, entry: int) -> bool:
        used, page = divmod(entry, 1 << _PAGE_BITS)
        return self._content[page] is not None and self._used[page] == used and self._is_free_leaf(page)
