"""Addresses in a torch.distributed store."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from .. import arguments
from ..core import MAX_RANKS
from ..errors import InstanceClosedError, RemoteProtocolError, StoreUnreachableError
from ..ids import Rank
from .base import Source
from .records import check_rank, check_world

_MAX_VALUE = 4096
"""Largest value in bytes; longer ones are not parsed."""


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that :class:`StoreRendezvous` uses."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""
        ...

    def get(self, key: str, /) -> bytes:
        """The value; waits for a key that is not there."""
        ...

    def set(self, key: str, value: str, /) -> None:
        """Write the value."""
        ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write ``desired`` if the value equals ``expected`` (empty: no value); returns the value afterwards."""
        ...


class StoreRendezvous:
    """Ranks of several processes find each other through a torch ``TCPStore``; satisfies :class:`Rendezvous`.

    Values are JSON text. They are checked when read, because every process that reaches a store can write to it. The
    first rank defines the instance's world size. A rank's value is its address and an id of this publication, so a
    process withdraws only its own. A withdrawn rank leaves ``null``.

    Args:
        store: a store that every process reaches; its own timeout bounds each call.
        prefix: prefix of all keys, so that one store can serve several purposes.
    """

    def __init__(self, store: Store, prefix: str = "disagg_kv") -> None:
        arguments.methods(store, "store", "a store", "check", "get", "set", "compare_set")
        self._store = store
        self._prefix = arguments.text(prefix, "prefix")
        # One client connection: a second thread's question must not slip in before the first one's answer.
        self._lock = threading.Lock()
        self._published: dict[tuple[str, Rank], str] = {}

    def publish(self, instance: str, rank: Rank, world: int, address: str) -> None:
        """Publish the address of rank ``rank`` of ``world`` of ``instance``; replaces an earlier one.

        Raises:
            ConfigurationError: a rank outside ``[0, world)``, or a different world size than other ranks published.
            StoreUnreachableError: the store cannot be reached.
            RemoteProtocolError: the instance's key holds something else.
        """
        rank, world = check_rank(instance, rank, world)
        address = arguments.text(address, "address", least=1)
        with self._reached(instance):
            # If there was no value, ours is set. The answer is the current value.
            said = self._store.compare_set(_key(self._prefix, instance), "", json.dumps(world))
        check_world(instance, rank, world, _world(instance, said))
        value = json.dumps([address, uuid.uuid4().hex])
        with self._reached(instance):
            self._store.set(_key(self._prefix, instance, rank), value)
            self._published[instance, rank] = value

    def withdraw(self, instance: str, rank: Rank) -> None:
        """Withdraw the last address that this object published for the rank, unless another process replaced it.

        Raises:
            StoreUnreachableError: the store cannot be reached.
        """
        rank = Rank(arguments.count(rank, "rank"))
        value = self._published.pop((arguments.text(instance, "instance"), rank), None)
        if value is not None:
            with self._reached(instance):
                self._store.compare_set(_key(self._prefix, instance, rank), value, "null")

    def lookup(self, source: Source) -> tuple[str, ...] | None:
        """The addresses of all ranks, in order; None: not all are known yet. Never waits for a rank.

        Raises:
            InstanceClosedError: a rank has closed and is not back.
            StoreUnreachableError: the store cannot be reached.
            RemoteProtocolError: the instance's keys hold something else.
        """
        instance = arguments.one(source, "source", Source).instance
        said = self._get(instance, [_key(self._prefix, instance)])
        if said is None:
            return None
        ranks = range(_world(instance, said[0]))
        addresses = self._get(instance, [_key(self._prefix, instance, rank) for rank in ranks])
        if addresses is None:
            return None
        return tuple(_address(instance, rank, address) for rank, address in enumerate(addresses))

    def _get(self, instance: str, keys: list[str]) -> list[bytes] | None:
        """The values, or None if one is missing: ``get`` alone would wait for it."""
        with self._reached(instance):
            return [self._store.get(key) for key in keys] if self._store.check(keys) else None

    @contextmanager
    def _reached(self, instance: str) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except RuntimeError as exc:
                away = f"instance {instance!r}: the rendezvous store cannot be reached: {exc}"
                raise StoreUnreachableError(away) from exc


def _key(prefix: str, instance: str, rank: int | None = None) -> str:
    """A key that is unique to (instance, rank), whatever characters the name has."""
    return f"{prefix}/{json.dumps([instance] if rank is None else [instance, rank])}"


def _parse(instance: str, value: bytes) -> object:
    if len(value) > _MAX_VALUE:
        raise RemoteProtocolError(f"instance {instance!r}: the store holds {len(value)} bytes, which no rank wrote")
    try:
        parsed: object = json.loads(value)
    except (ValueError, RecursionError) as exc:
        raise RemoteProtocolError(f"instance {instance!r}: the store holds {value[:64]!r}, which is no JSON") from exc
    return parsed


def _world(instance: str, value: bytes) -> int:
    world = _parse(instance, value)
    if not isinstance(world, int) or isinstance(world, bool) or not 0 < world <= MAX_RANKS:
        raise RemoteProtocolError(f"instance {instance!r}: the store holds {value[:64]!r} as its number of ranks")
    return world


def _address(instance: str, rank: int, value: bytes) -> str:
    match _parse(instance, value):
        case [str(address), str()]:
            return address
        case None:
            closed = f"instance {instance!r}: rank {rank} has closed, and has not come back"
            raise InstanceClosedError(closed, instance=instance, rank=rank)
    raise RemoteProtocolError(f"instance {instance!r}: the store holds {value[:64]!r} as a rank's address")
