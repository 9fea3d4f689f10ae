"""What processes that have ended left behind."""

from __future__ import annotations

import os
import re
from pathlib import Path


def abandoned() -> set[str]:
    """Names in /dev/shm that no living process maps; semaphores are others' own.

    Tests run side by side: what another one's processes share at the moment says nothing.
    """
    mapped: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped.update(re.findall(r"/dev/shm/(\S+)", maps.read_text()))
        except OSError:
            continue  # it has ended, or is not ours
    return {name for name in os.listdir("/dev/shm") if name not in mapped and not name.startswith("sem.")}
