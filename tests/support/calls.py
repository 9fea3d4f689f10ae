"""How much an endpoint does, counted in calls or lines: a measure that no other process on the host can change."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls(act: Callable[[], object]) -> Counter[str]:
    """Every Python function that ran in ``act``, by qualified name, and how often."""
    seen: Counter[str] = Counter()

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            seen[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return seen


def lines(act: Callable[[], object]) -> int:
    """Lines of the library's Python that ran in ``act``: each round of a loop counts, also within one call."""
    count = 0

    def note(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if "disagg_kv" not in frame.f_code.co_filename:
            return None
        count += 1
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        act()
    finally:
        sys.settrace(before)
    return count
