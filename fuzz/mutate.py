"""Changes of values within a message: one whose bytes are changed at random seldom passes its decoder."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

EDGES = (0, 1, 2, 3, 7, 64, 255, 4096, (1 << 31) - 1, 1 << 31, 1 << 62, (1 << 62) + 1, -1)
"""Numbers where a bound may lie."""


def changed(data: bytes, most: int, seed: int) -> bytes:
    """A message of at most ``most`` bytes with one to three values changed; what is no message comes back as it is."""
    draw = Random(seed)
    try:
        whole = [msgspec.msgpack.decode(data)]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return data
    for _ in range(draw.choice((1, 1, 2, 3))):
        _change(whole, draw)
    made = b"".join(map(msgspec.msgpack.encode, whole))
    return made if len(made) <= most else data


def _change(whole: list[Any], draw: Random) -> None:
    """Go down to a value at random, and change it where it lies."""
    inside: list[Any] = whole
    while True:
        if not inside:
            return
        at = draw.randrange(len(inside))
        deeper = inside[at]
        if not isinstance(deeper, list) or not deeper or (inside is not whole and draw.random() < 0.15):
            break
        inside = deeper
    inside[at : at + 1] = _other(inside[at], draw)


def _other(value: Any, draw: Random) -> list[Any]:
    """What stands in place of a value: one like it mostly, and sometimes none, two, or one of another type."""
    kind = draw.random()
    if kind < 0.05:
        return draw.choice(([], [value, value], [None], [[]], [b""], [""], [0], [True]))
    match value:
        case bool():
            return [not value]
        case int():
            return [draw.choice((*EDGES, value + 1, value - 1, min(value * 2, 1 << 63), draw.randrange(1 << 20)))]
        case float():
            return [draw.choice((0.0, -value, value * 1e12, float("inf"), float("nan")))]
        case bytes():
            cut = draw.randrange(len(value) + 1)
            return [
                draw.choice(
                    (value[:cut], value + draw.randbytes(4), value[:cut] + draw.randbytes(1) + value[cut + 1 :])
                )
            ]
        case str():
            return [draw.choice(("", "x", value + "x", value[:-1], "prefill", "decode", "staged", "kv", "float16"))]
        case list():
            return [draw.choice((value[::-1], value + value[:1], value[1:]))]
        case _:
            return [draw.choice((*EDGES, "", b""))]
