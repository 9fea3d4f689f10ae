"""A peer whose ``Hello`` has one thing changed, wherever it is nested; all else that it says and does is right."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from disagg_kv.channels import Channel
from disagg_kv.core import Codec, Hello
from tests.support.rig_parts import Over

MAGIC = b"disagg_kv.transport"
NUMBERS = (-1, 0, 2**15, 2**16, 2**62, 2**63 - 1, 2**64 - 1)
FLOATS = (0.0, -1.0, 1e308, float("inf"), float("nan"))
TEXTS = ("", "x", "\0", "é" * 99, "x" * 300, "cpu:99", "unix:///dev/null", "prefill")
OTHERS: tuple[object, ...] = (None, 7, -2.5, "x", b"x", [], {})


Change = Callable[[Any], object]


def variants(value: object) -> Iterator[tuple[str, Change]]:
    """Where a value differs in one thing (type, number, text, length, order, encoding), and what makes it differ.

    The changes are for values of the same structure.
    """
    for other in OTHERS:
        if type(other) is not type(value):
            yield f" {other!r}", partial(_replace, other)
    if isinstance(value, bool):
        yield " not", lambda v: not v
    elif isinstance(value, int):
        yield from ((f" {number}", partial(_replace, number)) for number in NUMBERS if number != value)
        yield " and one", lambda v: (v + 1) % 2**63
        yield " twice and more", lambda v: (2 * v + 2**20) % 2**63
    elif isinstance(value, float):
        yield from ((f" {number}", partial(_replace, number)) for number in FLOATS)
    elif isinstance(value, str):
        yield from ((f" {text[:20]!r}", partial(_replace, text)) for text in TEXTS if text != value)
    elif isinstance(value, bytes):
        yield from _of_bytes(value)
    elif isinstance(value, list):
        yield from _of_list(value)
    elif isinstance(value, dict):
        for key in value:
            yield f".{key} left out", partial(_without, key)
            yield from ((f".{key}{where}", partial(_with, key, change)) for where, change in variants(value[key]))


def _replace(other: object, value: object) -> object:
    return other


def _without(key: object, value: dict[object, object]) -> object:
    return {name: one for name, one in value.items() if name != key}


def _with(key: object, change: Change, value: dict[object, object]) -> object:
    return {**value, key: change(value[key])}


def _at(at: int, change: Change, value: list[object]) -> object:
    return [*value[:at], change(value[at]), *value[at + 1 :]]


def _inside(change: Change, value: bytes) -> object:
    found = _unfolded(value)
    assert found is not None
    inside, fold = found
    return fold(change(inside))


def _of_list(value: list[object]) -> Iterator[tuple[str, Change]]:
    if value:
        yield " without the last", lambda v: v[:-1]
        yield " the last twice", lambda v: [*v, v[-1]]
        yield " a thousand times", lambda v: v * 1000
        yield " reversed", lambda v: v[::-1]
    for at, one in enumerate(value):
        yield from ((f"[{at}]{where}", partial(_at, at, change)) for where, change in variants(one))


def _of_bytes(value: bytes) -> Iterator[tuple[str, Change]]:
    if value:
        yield " empty", lambda v: b""
        yield " its first byte", lambda v: v[:1]
        yield " its first half", lambda v: v[: len(v) // 2]
        yield " without the last byte", lambda v: v[:-1]
    yield " with a tail", lambda v: v + b"\0"
    yield " other bytes", lambda v: bytes(byte ^ 0x55 for byte in v)
    yield " long", lambda v: v + bytes(600_000)
    found = _unfolded(value)
    if found is not None:
        yield from ((f"/{where}", partial(_inside, change)) for where, change in variants(found[0]))


def _unfolded(value: bytes) -> tuple[object, Callable[[object], bytes]] | None:
    """What is encoded in bytes, and how it is encoded again; None: nothing is."""
    if value.startswith(MAGIC):
        head = value[: len(MAGIC) + 1]
        inside = msgspec.msgpack.decode(zlib.decompress(value[len(head) :]))
        return inside, lambda new: head + zlib.compress(msgspec.msgpack.encode(new))
    try:
        inside = msgspec.msgpack.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    whole = bool(inside) and isinstance(inside, list) and msgspec.msgpack.encode(inside) == value
    return (inside, msgspec.msgpack.encode) if whole or isinstance(inside, dict | int) else None


class Lying(Over):
    """Says ``change`` of the fields in place of each ``Hello``, in their order on the wire; 0 is the kind of frame."""

    def __init__(self, inner: Channel, change: Callable[[list[object]], bytes]) -> None:
        super().__init__(inner)
        self._change = change
        self.said = 0

    def send(self, address: str, frame: bytes) -> bool:
        """Change it and pass it on."""
        decoded = Codec().decode(frame)
        if isinstance(decoded, Hello):
            self.said += 1
            frame = self._change(msgspec.msgpack.decode(frame))
        return self._inner.send(address, frame)


FIELDS: Sequence[str] = ("kind", *Hello.__struct_fields__)
