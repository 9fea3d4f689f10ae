"""Junk, and which of it is not junk for a kind of argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from math import inf, nan

import numpy as np
import torch


class Hostile:
    """Every question about it raises."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(f"hostile: {name}")

    def __repr__(self) -> str:
        raise RuntimeError("hostile: repr")

    def __index__(self) -> int:
        raise RuntimeError("hostile: index")

    def __float__(self) -> float:
        raise RuntimeError("hostile: float")

    def __iter__(self) -> object:
        raise RuntimeError("hostile: iter")

    def __len__(self) -> int:
        raise RuntimeError("hostile: len")

    def __contains__(self, item: object) -> bool:
        raise RuntimeError("hostile: contains")


class Index:
    """Supports ``__index__`` and nothing else."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


class Asked:
    """An event whose answer is given beforehand: an error is raised."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def query(self) -> object:
        """The answer."""
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def synchronize(self) -> None:
        """It has happened."""


JUNK: Mapping[str, object] = {
    "None": None, "True": True, "np.True_": np.True_, "0": 0, "-1": -1, "3": 3, "2**31": 2**31, "2**70": 2**70,
    "10**5000": 10**5000, "np.int64(8)": np.int64(8), "np.int64(-8)": np.int64(-8), "np.uint8(8)": np.uint8(8),
    "torch 8": torch.tensor(8), "torch true": torch.tensor(True), "torch 8.0": torch.tensor(8.0), "index 8": Index(8),
    "2.5": 2.5, "8.0": 8.0, "np.float32(8)": np.float32(8), "1e-9": 1e-9, "1e300": 1e300, "-0.5": -0.5, "nan": nan,
    "inf": inf, "-inf": -inf, "1j": 1j, "1/2": Fraction(1, 2), "text": "req-1", "no text": "", "surrogate": "\ud800",
    "long text": "x" * 5000, "bytes": b"req-1", "no bytes": b"", "65 bytes": b"x" * 65, "300 bytes": b"x" * 300,
    "bytearray": bytearray(b"ba"), "memoryview": memoryview(b"mv"), "16 bytes": b"0123456789abcdef",
    "[]": [], "()": (), "{}": {}, "set": set(), "[1, 2]": [1, 2], "['a']": ["a"], "[None]": [None], "[[]]": [[]],
    "ragged": [[1], [2, 3]], "{1: 2}": {1: 2}, "{'kv': 'x'}": {"kv": "x"}, "{'kv': -1}": {"kv": -1},
    "np ids": np.array([1, 2], np.int32), "np floats": np.array([0.5]), "np 0-d": np.array(3),
    "np objects": np.array([None, "x"], object), "torch ids": torch.tensor([1, 2]), "torch 2-d": torch.zeros(2, 2),
    "range": range(3), "generator": (i for i in range(2)), "object": object(), "class": int, "function": len,
    "lambda": lambda: None, "hostile": Hostile(), "a list of hostile": [Hostile()], "error": ValueError("junk"),
    "event that raises": Asked(RuntimeError("junk event")), "event that says an array": Asked(np.array([1, 2])),
    "event that says hostile": Asked(Hostile()), "event that says None": Asked(None),
}  # fmt: skip
"""By what they are called in reports."""

COUNTS = {"0", "3", "np.int64(8)", "np.uint8(8)", "torch 8", "index 8", "np 0-d"}
BIG = {"2**31"}
TIMES = {"3", "2.5", "8.0", "np.float32(8)", "1e-9", "1/2", "np.int64(8)", "np.uint8(8)", "torch 8", "torch 8.0"}
TIMES |= {"np 0-d"}
BYTES = {"bytes", "bytearray", "memoryview", "16 bytes", "no bytes", "65 bytes"}
EVENTS = {name for name in JUNK if name.startswith("event")}
NOTHING = {"[]", "()", "set", "generator"}

LEGAL: Mapping[str, frozenset[str]] = {
    kind: frozenset(names)
    for kind, names in {
        "count": COUNTS | BIG,
        "count or none": COUNTS | BIG | {"None"},
        "seconds": TIMES | BIG,
        "seconds or none": TIMES | BIG | {"None"},
        "drain": TIMES | BIG | {"0"},
        "number or none": TIMES | BIG | {"None", "1e300", "2**70"},
        "room": BYTES - {"no bytes", "65 bytes"},
        "octets": BYTES,
        "long octets": BYTES | {"300 bytes"},
        "integer": COUNTS | BIG | {"-1", "np.int64(-8)"},
        "array": {name for name in JUNK if name.startswith("np ")},
        "epoch": {"16 bytes"},
        "text": {"text", "no text", "long text"},
        "text by layer": {"text", "no text", "long text", "{}"},
        "name": {"text"},
        "name or none": {"text", "None"},
        "name or long": {"text", "long text"},
        "any text": {"text", "no text", "long text", "surrogate"},
        "tables": NOTHING,
        "mapping": {"{}"},
        "mapping or none": {"{}", "None"},
        "event": EVENTS | {"None"},
        "event needed": EVENTS,
        "event or mark": EVENTS | {"None", "function", "lambda", "class"},
        "function": {"function", "lambda", "class"},
        "flag": {"True"},
        "ids": NOTHING | {"[1, 2]", "np ids", "torch ids", "range"},
        "tokens": {"[]", "()", "[1, 2]", "np ids", "torch ids", "range"},
        "thing": set(),
        "thing or none": {"None"},
        "things": NOTHING,
        "texts": NOTHING | {"['a']"},
        "things or none": NOTHING | {"None"},
        "tokens or none": {"[]", "()", "[1, 2]", "np ids", "torch ids", "range", "None", "set", "generator"},
        "function or none": {"function", "lambda", "class", "None"},
        "anything": set(JUNK),
    }.items()
}
"""Per kind of argument what may be accepted. The call may refuse it none the less, for its value."""

Make = Callable[[], object]
