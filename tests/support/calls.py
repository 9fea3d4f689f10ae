"""How much an endpoint does, counted in calls: a measure that no other process on the machine can change."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType


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
