"""The ranks of an instance agree on the smallest of their numbers, through a torch.distributed store."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Protocol

from .. import arguments
from ..errors import ConfigurationError, LocalProtocolError, RemoteProtocolError, StoreUnreachableError
from ..ids import Rank
from .records import check_rank
from .store import Store

_MOST = 1 << 62
_FINISHED = 4096
"""Questions of which it is remembered that we are through with them."""


_KEYS = 256
"""Number of cached keys: a rank reads those of an open question repeatedly."""


@lru_cache(_KEYS)
def _key(prefix: str, instance: str, question: str, what: int | str) -> str:
    return f"{prefix}/{json.dumps([instance, question, what])}"


class SharedStore(Store, Protocol):
    """The part of ``torch.distributed.Store`` that :class:`StoreMinimum` uses."""

    def delete_key(self, key: str, /) -> bool:
        """Forget a key."""
        ...


class StoreMinimum:
    """Settles, per question, on the smallest number of all ranks. Not thread-safe; no call waits for a rank.

    Every rank calls ``say`` with its number. It then calls ``agreed`` until there is an answer, or ``drop``. The last
    rank to finish removes the question from the store. Questions of a process that has ended stay there. A call that
    raised ``StoreUnreachableError`` may be repeated, even if it took effect.

    Args:
        store: a store that every rank reaches.
        instance: name of the set of ranks.
        rank: our rank.
        world: number of ranks.
        prefix: prefix of all keys.

    Raises:
        ConfigurationError: a rank outside ``[0, world)``, or no name.
    """

    def __init__(
        self, store: SharedStore, instance: str, rank: Rank, world: int, prefix: str = "disagg_kv/minimum"
    ) -> None:
        rank, world = check_rank(instance, rank, world)
        arguments.methods(store, "store", "a store", "check", "get", "set", "compare_set", "delete_key")
        arguments.text(prefix, "prefix")
        self._store = store
        self._instance = instance
        self._rank = rank
        self._world = world
        self._prefix = prefix
        self._open: dict[str, int] = {}
        self._read: dict[str, list[bytes]] = {}
        self._last: set[str] = set()
        self._finished: dict[str, None] = {}

    def say(self, question: str, number: int) -> None:
        """Publish our number.

        Args:
            question: its name, equal on all ranks and never used again, for example a request's id with its attempt.
            number: 0 or more.

        Raises:
            ConfigurationError: a negative number.
            LocalProtocolError: our number is published already, and there is no answer yet.
            StoreUnreachableError: the store cannot be reached.
        """
        arguments.text(question, "question")
        number = arguments.count(number, f"{question!r}: number", least=-_MOST, most=1 << 80)
        if not 0 <= number <= _MOST:
            raise ConfigurationError(f"{question!r}: cannot agree on {number}")
        if question in self._open:
            raise LocalProtocolError(f"{question!r}: our number {self._open[question]} is published already")
        try:
            self._store.set(self._key(question, self._rank), json.dumps(number))
        except RuntimeError as exc:
            raise self._unreachable(question, exc) from exc
        self._open[question] = number

    def agreed(self, question: str) -> int | None:
        """The smallest number, the same on all ranks, once; None: a rank's number is still missing.

        Raises:
            LocalProtocolError: our number is not published, or we have the answer already.
            StoreUnreachableError: the store cannot be reached.
            RemoteProtocolError: the question's keys hold something else.
        """
        arguments.text(question, "question")
        if question not in self._open:
            raise LocalProtocolError(f"{question!r}: our number is not published, or the question is answered already")
        try:
            values = self._values(question)
            if values is None:
                return None
            self._forget(question)
        except RuntimeError as exc:
            raise self._unreachable(question, exc) from exc
        self._finish(question)
        return min(self._number(question, value) for value in values)

    def drop(self, question: str) -> None:
        """Give the question up, if a request ends before there is an answer; the store then keeps nothing of it.

        Every rank without an answer must call this, even if it published no number. Its number then counts as 0 for
        ranks that still ask. If the question is among the last 4,096 that this rank answered or dropped, nothing
        happens.

        Raises:
            StoreUnreachableError: the store cannot be reached.
        """
        arguments.text(question, "question")
        try:
            if question not in self._open:
                if question in self._finished:
                    return
                # What was said by a call that raised may have been read: it stays.
                self._store.compare_set(self._key(question, self._rank), "", json.dumps(0))
                self._open[question] = 0
            self._forget(question)
        except RuntimeError as exc:
            raise self._unreachable(question, exc) from exc
        self._finish(question)

    def _finish(self, question: str) -> None:
        del self._open[question]
        self._read.pop(question, None)
        self._finished[question] = None
        if len(self._finished) > _FINISHED:
            del self._finished[next(iter(self._finished))]

    def _values(self, question: str) -> list[bytes] | None:
        """The numbers of all ranks; read once, as the store may have lost a part of them by the next call."""
        if question not in self._read:
            keys = [self._key(question, rank) for rank in range(self._world)]
            if not self._store.check(keys):
                return None
            self._read[question] = [self._store.get(key) for key in keys]
        return self._read[question]

    def _forget(self, question: str) -> None:
        """Mark this rank as finished. Marks are per rank: a counter would count a rank twice that has to try twice."""
        said = [self._key(question, rank) for rank in range(self._world)]
        marks = [self._key(question, f"read {rank}") for rank in range(self._world)]
        if question not in self._last:
            self._store.set(marks[self._rank], "1")
            if not self._store.check([said[self._rank], *marks]):
                # Where ours counted although the call raised, the last one may have removed the question meanwhile. It
                # removes marks after numbers: with our number there, the mark will go too.
                if not self._store.check([said[self._rank]]):
                    self._store.delete_key(marks[self._rank])
                return
            self._last.add(question)
        for key in (*said, *marks):
            self._store.delete_key(key)
        self._last.discard(question)

    def _key(self, question: str, what: int | str) -> str:
        return _key(self._prefix, self._instance, question, what)

    def _number(self, question: str, value: bytes) -> int:
        try:
            number: object = json.loads(value)
        except ValueError:
            number = None
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= _MOST:
            raise RemoteProtocolError(f"{question!r}: the store holds {value[:64]!r}, which is no number of rows")
        return number

    def _unreachable(self, question: str, exc: Exception) -> StoreUnreachableError:
        return StoreUnreachableError(f"{question!r}: the store of instance {self._instance!r} cannot be reached: {exc}")
