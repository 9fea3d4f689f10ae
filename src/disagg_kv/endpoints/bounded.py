"""Memory of the last few things."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def bound(remembered: OrderedDict[K, V], most: int) -> None:
    """Forget the oldest beyond ``most``."""
    while len(remembered) > most:
        remembered.popitem(last=False)
