"""The prefix cache of a simulated decode rank: the real index and leases, over shadowed pages."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
from attrs import frozen

from disagg_kv.geometry import I32
from disagg_kv.memory import U8
from disagg_kv.prefix import HashPrefixIndex, PrefixCache, blake, namespace_of

from .conversations import MOST, Conversation
from .kind import Kind
from .memory import CACHED, RankMemory, content, width_of
from .model import Model
from .simulation import SimProcess, Simulation

ROWS = MOST + 56
"""More rows than a prompt and its answer have."""


@frozen(eq=False)
class Transcript:
    """The tokens of a conversation, and the bytes that belong to them.

    Args:
        tokens: ids ``[ROWS]``; two conversations have one in common exactly where all before it are common too.
        truth: ``[ROWS, bytes of a row]``: a function of the tokens so far, layer, head and byte.
    """

    tokens: npt.NDArray[np.int64]
    truth: U8


@lru_cache(64)
def transcript(model: Model, conversations: tuple[Conversation, ...], number: int, seed: int) -> Transcript:
    """All tokens that a conversation may reach."""
    width = width_of(model)
    tokens = ROWS * (number + 1) + np.arange(ROWS)
    truth = content(b"talk %d %d" % (number, seed), ROWS * width).reshape(ROWS, width)
    fork = conversations[number].fork
    if fork:
        before = transcript(model, conversations, conversations[number].parent, seed)
        tokens = np.concatenate([before.tokens[:fork], tokens[fork:]])
        truth = np.concatenate([before.truth[:fork], truth[fork:]])
    return Transcript(tokens, truth)


class SimPages:
    """The free pages of a rank; satisfies :class:`~disagg_kv.prefix.Pages`. ``owner`` takes them."""

    def __init__(self, memory: RankMemory) -> None:
        self._memory = memory
        self.owner = 0

    @property
    def free(self) -> int:
        """How many there are."""
        return len(self._memory.free)

    def take(self, count: int, /) -> I32:
        """Pages for ``owner``."""
        taken = self._memory.take(self.owner, count)
        assert taken is not None
        return np.array(taken, np.int32)

    def give(self, pages: I32, /) -> None:
        """Pages are free again, and hold noise at once."""
        if len(pages):
            self._memory.give(pages.tolist())


def _few(data: bytes) -> bytes:
    """A digest of two bits: unequal prefixes collide all the time."""
    return bytes([blake(data)[0] & 3])


class Prefixes:
    """What one life of a decode rank holds."""

    def __init__(self, world: Simulation, node: SimProcess) -> None:
        site = node.memory.pool.site
        digest = _few if world.scenario.collisions else blake
        split = node.split
        self._world = world
        self._node = node
        self.pages = SimPages(node.memory)
        self.index = HashPrefixIndex(split.page_rows, split.pages, namespace_of(site.spec), digest)
        self.cache = PrefixCache(self.index, self.pages, site)

    def known(self) -> list[int]:
        """The pages that the index has."""
        return sorted(self.index.pages)

    def settled(self) -> None:
        """Leases have changed: the index's pages are its own from now on, and its accounts agree with themselves."""
        self._node.memory.owners[self.known()] = CACHED
        self._node.memory.version += 1
        self.check()

    def check(self) -> None:
        """I3: the index agrees with itself, and every page is free, known, or some room's."""
        try:
            self.index.check_integrity()
        except AssertionError as exc:
            self._world.violation("I3", f"{self._node.address}: the prefix index: {exc!r}")
        memory = self._node.memory
        if not memory.check_pages() or set(self.known()) & set(memory.free):
            self._world.violation("I3", f"{self._node.address}: pages are free and in the index, or neither")

    def evict(self) -> None:
        """Forget one page, a few, or all that no room holds."""
        if not self._node.alive or not self.index.evictable:
            return
        held = len(self.index) > self.index.evictable
        most = self._world.random.choice((1, 1, 2, 5, len(self.index)))
        self.pages.give(self.index.evict(most))
        self._world.saw(Kind.EVICTED)
        if held:
            self._world.saw(Kind.EVICTED_DURING)
        self.check()
