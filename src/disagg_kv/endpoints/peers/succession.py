"""Whether another life of our rank has taken our place, and which lives of other ranks must learn that theirs is taken.

A process that stood still may go on after its launcher has started another one in its place. Nothing ends it, so it
must learn that it does not count any more. A life believes that of the younger life alone: when that one has
introduced itself, and until it is lost. On one host, ``born`` of ``Hello`` shows which life is younger. Clocks of two
hosts are not compared. There a sibling that knows both names the later one. Or the younger one announces itself: it
found our address in the rendezvous when it took our place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import reduce

from ...core import Hello
from ...core.peers.peer_effects import is_older
from ...errors import SupersededError
from ...ids import Epoch, Rank
from ...rendezvous import Rendezvous, Source
from .directory import look_up

NAMED = 16
"""Addresses that siblings have named as those of younger lives of our rank; a rank is replaced seldom."""


class Succession:
    """The lives of the ranks of our instance: which one of each counts, and whether ours does.

    Args:
        own: our ``Hello``.
        before: where our rank was found in the rendezvous before we took its place; None: nowhere, or where we are.
    """

    def __init__(self, own: Hello, before: str | None) -> None:
        self._own = own
        self._before = before
        self._named: OrderedDict[str, None] = OrderedDict()
        self._elders: dict[Epoch, str] = {}
        self._younger: Hello | None = None

    @property
    def before(self) -> str | None:
        """Where the life is that we replace, if it is still there."""
        return self._before

    def counts(self, lives: Sequence[Hello]) -> list[Hello]:
        """Of the lives of another rank that are there, the youngest counts, as far as we can tell: it comes first."""
        youngest = reduce(lambda a, b: a if is_older(b, a) else b, lives)
        elders = [life for life in lives if life is not youngest]
        self._elders.pop(Epoch(youngest.src), None)
        self._elders.update({Epoch(life.src): youngest.address for life in elders})
        return [youngest, *elders]

    def of_our_rank(self, lives: Sequence[Hello]) -> SupersededError | None:
        """These other lives of our own rank are there; the error: since now one of them counts, and we do not."""
        counted, self._younger = self._younger is None, None
        for life in lives:
            self._elders.pop(Epoch(life.src), None)
            told = life.address in self._named and life.address != self._before
            if is_older(self._own, life) or (told and not is_older(life, self._own)):
                self._younger = life
            elif is_older(life, self._own) or life.address == self._before:
                self._elders[Epoch(life.src)] = self._own.address
        return self.error() if counted else None

    def named(self, address: str) -> None:
        """A sibling has named this address as that of a younger life of our rank."""
        self._named[address] = None
        self._named.move_to_end(address)
        if len(self._named) > NAMED:
            self._named.popitem(last=False)

    def lost(self, epoch: Epoch) -> None:
        """This life is not there any more."""
        self._elders.pop(epoch, None)

    def successor(self, epoch: Epoch) -> str | None:
        """Where the life is that counts for the rank of this one; None: this one counts, as far as we know."""
        return self._elders.get(epoch)

    @property
    def follower(self) -> str | None:
        """Where the life is that counts in our place; None: we count."""
        return None if self._younger is None else self._younger.address

    def error(self) -> SupersededError | None:
        """Why we take no work: another life of our rank counts; None: we count. From any thread."""
        younger = self._younger
        if younger is None:
            return None
        return SupersededError(self._own.instance, self._own.rank, younger.address, younger.src)


def check_counts(succession: Succession) -> None:
    """Raise a SupersededError if another life of our rank counts. From any thread."""
    error = succession.error()
    if error is not None:
        raise error


def found_before(rendezvous: Rendezvous, instance: str, rank: Rank, address: str) -> str | None:
    """Where our rank was before we publish that it is with us; None: nowhere, at the same address, or not known.

    It blocks, as publishing does. Where the store fails, publishing reports it. An entry that is no address leads to no
    life.
    """
    addresses = look_up(rendezvous, Source(instance)).addresses
    if addresses is None or rank >= len(addresses) or addresses[rank] == address:
        return None
    return addresses[rank]
