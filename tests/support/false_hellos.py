"""A peer whose ``Hello`` has one thing changed, wherever it is nested; all else that it says and does is right."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence

import msgspec

from disagg_kv.channels import Channel
from disagg_kv.core import Codec, Hello
from tests.support.rig_parts import Over

MAGIC = b"disagg_kv.transport"
NUMBERS = (-1, 0, 2**15, 2**16, 2**62, 2**63 - 1, 2**64 - 1)
FLOATS = (0.0, -1.0, 1e308, float("inf"), float("nan"))
TEXTS = ("", "x", "\0", "é" * 99, "x" * 300, "cpu:99", "unix:///dev/null", "prefill")
OTHERS: tuple[object, ...] = (None, 7, -2.5, "x", b"x", [], {})


def variants(value: object) -> Iterator[tuple[str, object]]:
    """Each value that differs in one thing, and where: another type, number, text, length, order or encoding."""
    for other in OTHERS:
        if type(other) is not type(value):
            yield f" {other!r}", other
    if isinstance(value, bool):
        yield " not", not value
    elif isinstance(value, int):
        for number in dict.fromkeys((*NUMBERS, value + 1, 2 * value + 2**20)):
            if number != value and -(2**63) <= number < 2**64:
                yield f" {number}", number
    elif isinstance(value, float):
        yield from ((f" {number}", number) for number in FLOATS)
    elif isinstance(value, str):
        yield from ((f" {text[:20]!r}", text) for text in TEXTS if text != value)
    elif isinstance(value, bytes):
        yield from _of_bytes(value)
    elif isinstance(value, list):
        yield from _of_list(value)
    elif isinstance(value, dict):
        for key in value:
            yield f".{key} left out", {name: one for name, one in value.items() if name != key}
            yield from ((f".{key}{where}", {**value, key: new}) for where, new in variants(value[key]))


def _of_list(value: list[object]) -> Iterator[tuple[str, object]]:
    if value:
        yield " without the last", value[:-1]
        yield " the last twice", [*value, value[-1]]
        yield " a thousand times", value * 1000
        yield " reversed", value[::-1]
    for at, one in enumerate(value):
        yield from ((f"[{at}]{where}", [*value[:at], new, *value[at + 1 :]]) for where, new in variants(one))


def _of_bytes(value: bytes) -> Iterator[tuple[str, object]]:
    for cut in sorted({0, 1, len(value) // 2, len(value) - 1} - {len(value)}):
        yield f" cut at {cut}", value[: max(cut, 0)]
    yield " with a tail", value + b"\0"
    yield " other bytes", bytes(byte ^ 0x55 for byte in value)
    yield " long", value + bytes(600_000)
    found = _unfolded(value)
    if found is not None:
        inside, fold = found
        yield from ((f"/{where}", fold(new)) for where, new in variants(inside))


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
    return (inside, msgspec.msgpack.encode) if isinstance(inside, dict | int) else None


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
