"""The prefix index under random calls, against a plain dict from token prefixes to pages."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import define
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from disagg_kv.prefix import HashPrefixIndex, PrefixLock, blake

pytestmark = pytest.mark.slow

ROWS = 2
PAGES = 12
Prefix = tuple[bytes, tuple[int, ...]]
tokens_of = st.lists(st.integers(0, 1), max_size=9)
adapters = st.sampled_from([b"", b"a"])


@define(eq=False)
class Holder:
    """A lock, and the prefixes that it must keep."""

    lock: PrefixLock
    adapter: bytes
    kept: list[Prefix]


def prefixes(adapter: bytes, tokens: list[int]) -> list[Prefix]:
    """One per whole page."""
    return [(adapter, tuple(tokens[: ROWS * n])) for n in range(1, len(tokens) // ROWS + 1)]


class IndexMachine(RuleBasedStateMachine):
    """Every answer is what a dict says; nothing that is held is ever evicted."""

    holders = Bundle("holders")
    exact = True

    def __init__(self) -> None:
        super().__init__()
        self.index = self.make()
        self.pages: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.now = 0
        self.free = list(range(PAGES))
        self.open: list[Holder] = []

    def make(self) -> HashPrefixIndex:
        return HashPrefixIndex(ROWS, PAGES, b"model")

    def touch(self, kept: list[Prefix]) -> None:
        self.now += 1
        self.used.update(dict.fromkeys(kept, self.now))

    def held(self) -> set[Prefix]:
        return {prefix for holder in self.open for prefix in holder.kept}

    def leaves(self) -> list[Prefix]:
        """Unheld prefixes that no longer one begins with."""
        inner = {(adapter, tokens[:-ROWS]) for adapter, tokens in self.pages}
        return [prefix for prefix in self.pages if prefix not in inner and prefix not in self.held()]

    @rule(target=holders, tokens=tokens_of, adapter=adapters)
    def match(self, tokens: list[int], adapter: bytes) -> Holder:
        lock = self.index.match(tokens, adapter)
        known = []
        for prefix in prefixes(adapter, tokens):
            if prefix not in self.pages:
                break
            known.append(prefix)
        assert lock.ids == [self.pages[p] for p in known[: len(lock.ids)]]
        assert len(lock.ids) == len(known) or not self.exact
        holder = Holder(lock, adapter, known[: len(lock.ids)])
        self.open.append(holder)
        self.touch(holder.kept)
        return holder

    @rule(holder=holders, more=tokens_of)
    def insert(self, holder: Holder, more: list[int]) -> None:
        tokens = [*(holder.kept[-1][1] if holder.kept else ()), *more]
        new = prefixes(holder.adapter, tokens)[len(holder.kept) :]
        if len(new) > len(self.free):
            return
        given = self.free[: len(new)]
        spare = set(self.index.insert(holder.lock, tokens, np.array(given, np.int32)).tolist())
        for prefix, page in zip(new, given, strict=True):
            if page not in spare:
                assert prefix not in self.pages
                self.pages[prefix] = page
                self.free.remove(page)
            elif prefix not in self.pages:
                assert not self.exact, "a page was refused whose tokens are new"
                new = new[: new.index(prefix)]
                break
        holder.kept = holder.kept + new
        assert holder.lock.ids == [self.pages[p] for p in holder.kept]
        self.touch(holder.kept)

    @rule(holder=holders, keep=st.integers(0, 4))
    def shorten(self, holder: Holder, keep: int) -> None:
        rows = min(keep * ROWS + 1, holder.lock.rows)
        self.index.shorten(holder.lock, rows)
        holder.kept = holder.kept[: rows // ROWS]

    @rule(holder=consumes(holders))
    def unlock(self, holder: Holder) -> None:
        self.index.unlock(holder.lock)
        self.open.remove(holder)
        self.touch(holder.kept)

    @rule(count=st.integers(0, PAGES))
    def evict(self, count: int) -> None:
        for page in self.index.evict(count).tolist():
            leaves = self.leaves()
            gone = next(prefix for prefix, at in self.pages.items() if at == page)
            assert gone in leaves, "a page was evicted that is held, or that others build on"
            assert self.used[gone] == min(self.used[prefix] for prefix in leaves)
            del self.pages[gone]
            self.free.append(page)
            count -= 1
        assert count == 0 or not self.leaves()

    @invariant()
    def accounts(self) -> None:
        self.index.check_integrity()
        assert len(self.index) == len(self.pages)
        assert self.index.evictable == len(self.pages) - len(self.held())


class CollidingMachine(IndexMachine):
    """Three keys for all prefixes: fewer pages are found or taken, never a wrong one."""

    exact = False

    def make(self) -> HashPrefixIndex:
        return HashPrefixIndex(ROWS, PAGES, b"model", lambda data: bytes([sum(data) % 3]))


TestIndexMachine = IndexMachine.TestCase
TestCollidingMachine = CollidingMachine.TestCase


class Trusting(HashPrefixIndex):
    """Believes in keys."""

    def match(self, tokens: object, adapter: bytes = b"") -> PrefixLock:
        lock = super().match([], adapter)
        key = self.namespace
        for content in self._contents(tokens, adapter):  # type: ignore[arg-type]  # whatever the machine draws
            key = self._digest(key + content)
            if key not in self._at:
                break
            lock.ids.append(self._at[key])
        self._hold(lock.ids)
        return lock


class TrustingMachine(CollidingMachine):
    def make(self) -> HashPrefixIndex:
        return Trusting(ROWS, PAGES, b"model", lambda data: bytes([sum(data) % 3]))


class Careless(HashPrefixIndex):
    """Evicts without a look at who holds what."""

    def _is_free_leaf(self, page: int) -> bool:
        return self._after[page] == 0

    def check_integrity(self) -> None:
        """Says nothing."""


class CarelessMachine(IndexMachine):
    def make(self) -> HashPrefixIndex:
        return Careless(ROWS, PAGES, b"model", blake)


@pytest.mark.parametrize("machine", [TrustingMachine, CarelessMachine])
def test_the_machine_finds_indexes_that_trust_keys_or_evict_what_is_held(machine: type[IndexMachine]) -> None:
    # That it is found is enough: most of the time would go into making the example short.
    found = settings(database=None, print_blob=False, max_examples=400, phases=[Phase.generate])
    with pytest.raises((AssertionError, StopIteration, KeyError)):
        run_state_machine_as_test(machine, settings=found)
