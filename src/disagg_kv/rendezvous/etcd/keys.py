"""The keys and values of a deployment in etcd, and the transactions that write them.

Below the prefix of a deployment::

    PREFIX/ranks/INSTANCE/WORLD/RANK     {"address": ..., "id": ...}   a rank that lives
    PREFIX/closed/INSTANCE/WORLD/RANK    {}                            a rank that has closed

``INSTANCE`` is percent-encoded, so no name can leave its place. The number of ranks is part of the key: one transaction
both writes a rank and checks that no rank of another number is there, and ranks that join at once never collide.
"""

from __future__ import annotations

import base64
import json
from typing import Any, Self
from urllib.parse import quote, unquote

from attrs import frozen

from ...core import MAX_RANKS
from ..base import MAX_ADDRESS

MAX_VALUE = 16384
"""Largest value in bytes; longer ones are not parsed."""

MAX_NUMBER = 5
"""Digits of a rank or of a number of ranks."""

RANKS, CLOSED = "ranks", "closed"
Body = dict[str, Any]
"""The JSON object of a request."""


@frozen
class RankKey:
    """A rank of an instance of ``world`` ranks."""

    instance: str
    world: int
    rank: int

    def path(self, prefix: str, kind: str = RANKS) -> bytes:
        """The key of what is known of this rank: :data:`RANKS` or :data:`CLOSED`."""
        return f"{prefix}/{kind}/{quote(self.instance, safe='')}/{self.world}/{self.rank}".encode()

    @classmethod
    def parse(cls, prefix: str, path: bytes) -> tuple[str, Self] | None:
        """The kind of a key and its rank; None: this library wrote no such key."""
        try:
            kind, name, *numbers = path.decode().removeprefix(f"{prefix}/").split("/")
            world, rank = (int(one) for one in numbers if len(one) <= MAX_NUMBER)
        except ValueError:
            return None
        key = cls(unquote(name), world, rank)
        if kind not in (RANKS, CLOSED) or not 0 <= rank < world <= MAX_RANKS or key.path(prefix, kind) != path:
            return None
        return kind, key


@frozen
class Record:
    """What a rank has published.

    Args:
        address: where its channel is.
        id: of this publication; another process that publishes the same rank has another one.
    """

    address: str
    id: str

    def encode(self) -> bytes:
        """As a value of etcd."""
        return json.dumps({"address": self.address, "id": self.id}).encode()

    @classmethod
    def decode(cls, value: bytes) -> Self | None:
        """From a value of etcd; None: no rank wrote it."""
        if len(value) > MAX_VALUE:
            return None
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return None
        match parsed:
            case {"address": str(address), "id": str(id_)} if 0 < len(address) <= MAX_ADDRESS and id_:
                return cls(address, id_)
        return None


def encoded(data: bytes) -> str:
    """Bytes in a request."""
    return base64.b64encode(data).decode()


def after(path: bytes) -> bytes:
    """The end of the range of all keys that begin with ``path``; its last byte is below 255."""
    return path[:-1] + bytes([path[-1] + 1])


def everything(prefix: str) -> Body:
    """The range of a deployment."""
    path = f"{prefix}/".encode()
    return {"key": encoded(path), "range_end": encoded(after(path))}


def _absent(start: bytes, stop: bytes) -> Body:
    """True while a range has no key: etcd then compares with a key of creation revision 0."""
    found = {"key": encoded(start), "range_end": encoded(stop)}
    return {**found, "target": "CREATE", "result": "EQUAL", "create_revision": 0}


def no_other_world(prefix: str, key: RankKey) -> list[Body]:
    """True while no rank of the instance has another number of ranks: nothing lies before or after ``INSTANCE/WORLD/``.

    See etcd's API reference for comparisons over a range (``Compare.range_end``, etcd 3.3).
    """
    world = key.path(prefix).rpartition(b"/")[0] + b"/"
    instance = world[:-1].rpartition(b"/")[0] + b"/"
    return [_absent(instance, world), _absent(after(world), after(instance))]


def is_free(prefix: str, key: RankKey) -> list[Body]:
    """True while no process holds the rank."""
    path = key.path(prefix)
    return [_absent(path, path + b"\0")]


def holds(prefix: str, key: RankKey, value: bytes) -> list[Body]:
    """True while the rank's value is this one."""
    path = encoded(key.path(prefix))
    return [{"key": path, "target": "VALUE", "result": "EQUAL", "value": encoded(value)}]


def publish(prefix: str, key: RankKey, value: bytes, lease: int, only: list[Body]) -> Body:
    """Write a rank if ``only`` holds, else read what is there of its instance."""
    instance = key.path(prefix).rsplit(b"/", 2)[0] + b"/"
    return {
        "compare": only,
        "success": [
            {"request_put": {"key": encoded(key.path(prefix)), "value": encoded(value), "lease": lease}},
            {"request_delete_range": {"key": encoded(key.path(prefix, CLOSED))}},
        ],
        "failure": [{"request_range": {"key": encoded(instance), "range_end": encoded(after(instance))}}],
    }


def withdraw(prefix: str, key: RankKey, value: bytes, lease: int) -> Body:
    """Remove a rank and note that it has closed, unless another process has replaced its value."""
    return {
        "compare": holds(prefix, key, value),
        "success": [
            {"request_delete_range": {"key": encoded(key.path(prefix))}},
            {"request_put": {"key": encoded(key.path(prefix, CLOSED)), "value": encoded(b"{}"), "lease": lease}},
        ],
        "failure": [],
    }
