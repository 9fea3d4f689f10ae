"""The hash-chain index: bad input, collisions, order of eviction."""

from __future__ import annotations

import numpy as np
import pytest

from disagg_kv.errors import ConfigurationError, GeometryError, LocalProtocolError
from disagg_kv.geometry import I32, CacheSpec
from disagg_kv.prefix import HashPrefixIndex, PrefixLock, namespace_of


def pages(*ids: int) -> I32:
    """Page ids."""
    return np.array(ids, np.int32)


def filled(index: HashPrefixIndex, tokens: list[int], ids: I32, adapter: bytes = b"") -> PrefixLock:
    """A lock on tokens that are in the index now."""
    lock = index.match(tokens, adapter)
    index.insert(lock, tokens, ids[len(lock.ids) :])
    return lock


def test_only_whole_pages_of_equal_tokens_match() -> None:
    """What follows the last whole page is not kept, and one other token ends the match."""
    index = HashPrefixIndex(4, 8)
    index.unlock(filled(index, list(range(10)), pages(5, 3)))
    assert index.match(list(range(10))).ids == [5, 3]
    assert index.match(list(range(7))).ids == [5]
    assert index.match([0, 1, 2, 3, 4, 5, 6, 99]).ids == [5]
    assert index.match([1, 2, 3, 4]).rows == 0
    assert index.match([]).pages.dtype == np.int32


def test_adapters_and_namespaces_share_nothing() -> None:
    """Equal tokens run with another adapter are another prefix."""
    index = HashPrefixIndex(4, 8, b"model")
    filled(index, [1, 2, 3, 4], pages(0), b"lora")
    assert index.match([1, 2, 3, 4]).rows == 0
    assert index.match([1, 2, 3, 4], b"lora").rows == 4
    spec = CacheSpec.kv(2, 2, 8, "float16", model=b"one")
    other = CacheSpec.kv(2, 2, 8, "float16", model=b"two")
    assert namespace_of(spec) != namespace_of(other)


def test_an_adapter_is_told_from_tokens_that_spell_it() -> None:
    """Even when every key is equal: the adapter's length is compared too."""
    index = HashPrefixIndex(1, 8, digest=lambda _: b"same")
    spelled = int.from_bytes(b"lora", "little")
    filled(index, [spelled], pages(0))
    assert index.match([spelled], b"lora").rows == 0


def test_a_collision_by_construction_is_harmless() -> None:
    """Tokens are compared: another prefix with the same key neither matches nor takes its place."""
    index = HashPrefixIndex(2, 8, digest=lambda _: b"same")
    first = filled(index, [1, 2], pages(0))
    other = index.match([3, 4, 5, 6])
    assert other.rows == 0
    assert index.insert(other, [3, 4, 5, 6], pages(1, 2)).tolist() == [1, 2]
    assert (first.ids, other.ids, len(index)) == ([0], [], 1)
    index.check_integrity()


def test_what_is_there_already_stays_and_the_second_copy_is_given_back() -> None:
    """Two requests with one prompt: the later one's pages remain its own, and what follows is kept."""
    index = HashPrefixIndex(2, 8)
    a, b = index.match([1, 2, 3, 4]), index.match([1, 2, 3, 4, 5, 6])
    assert not len(index.insert(a, [1, 2, 3, 4], pages(0, 1)))
    assert index.insert(b, [1, 2, 3, 4, 5, 6], pages(2, 3, 4)).tolist() == [2, 3]
    assert b.ids == [0, 1, 4]
    index.check_integrity()


def test_the_least_recently_used_leaf_goes_first_and_nothing_that_is_held() -> None:
    """Eviction takes ends of chains, oldest first; a match counts as a use."""
    index = HashPrefixIndex(1, 8)
    for tokens, ids in (([1, 2], pages(0, 1)), ([1, 3], pages(0, 2)), ([4], pages(3))):
        index.unlock(filled(index, tokens, ids))
    index.unlock(index.match([1, 2]))
    held = index.match([4])
    assert index.evictable == 3
    assert index.evict(1).tolist() == [2]
    assert index.evict(9).tolist() == [1, 0]
    assert index.evict(9).tolist() == []
    index.unlock(held)
    assert index.evict(9).tolist() == [3]
    assert len(index) == 0


def test_what_agreement_takes_away_can_be_evicted() -> None:
    """A lock that is shortened keeps the rest."""
    index = HashPrefixIndex(2, 8)
    lock = filled(index, [1, 2, 3, 4], pages(0, 1))
    index.shorten(lock, 3)
    assert (lock.rows, index.evict(9).tolist()) == (2, [1])


def test_a_long_life_does_not_grow_the_list_of_leaves() -> None:
    """Stale entries go."""
    index = HashPrefixIndex(1, 4)
    index.unlock(filled(index, [1], pages(0)))
    for _ in range(1000):
        index.unlock(index.match([1]))
    assert len(index._leaves) < 100
    index.check_integrity()


@pytest.mark.parametrize(
    ("tokens", "given", "error", "words"),
    [
        ([1, 2, 3, 4, 5, 6], [5], GeometryError, "1 pages for 2 whole pages after row 2"),
        ([1, 2, 3, 4], [5, 6], GeometryError, "2 pages for 1 whole pages"),
        ([1, 9, 3, 4], [5], GeometryError, "do not begin with the 2 locked rows"),
        ([1], [], GeometryError, "do not begin with the 2 locked rows"),
        ([1, 2, 3, 4], [8], GeometryError, "page ids 8 to 8, but the index has 8 pages"),
        ([1, 2, 3, 4], [-1], GeometryError, "page ids -1 to -1, but the index has 8 pages"),
        ([1, 2, 3, 4, 5, 6], [5, 5], GeometryError, "repeated"),
        ([1, 2, 3, 4], [0], LocalProtocolError, r"pages \[0\] are in the index already"),
        ([1, 2, -3, 4], [5], ConfigurationError, "-3"),
        ([1, 2, 1 << 31, 4], [5], ConfigurationError, "token ids must be"),
        ([1.5], [5], ConfigurationError, "flat list of integers"),
    ],
)
def test_a_bad_insert_changes_nothing(tokens: list[int], given: list[int], error: type[Exception], words: str) -> None:
    """Bad input: a clear error, and the index is as it was."""
    index = HashPrefixIndex(2, 8)
    lock = filled(index, [1, 2], pages(0))
    with pytest.raises(error, match=words):
        index.insert(lock, tokens, pages(*given))
    assert (lock.ids, len(index)) == ([0], 1)
    index.check_integrity()


def test_locks_that_are_over_or_of_another_index_are_refused() -> None:
    """Bad input: a lock is used with its index, until it is unlocked."""
    index, other = HashPrefixIndex(2, 8), HashPrefixIndex(2, 8)
    lock = index.match([1, 2])
    with pytest.raises(LocalProtocolError, match="another's"):
        other.insert(lock, [1, 2], pages(0))
    with pytest.raises(GeometryError, match="1 rows, but the lock has 0"):
        index.shorten(lock, 1)
    with pytest.raises(GeometryError, match="-1 rows"):
        index.shorten(lock, -1)
    index.unlock(lock)
    with pytest.raises(LocalProtocolError):
        index.unlock(lock)
    for rows, count in ((0, 8), (1, 0)):
        with pytest.raises(ConfigurationError):
            HashPrefixIndex(rows, count)
