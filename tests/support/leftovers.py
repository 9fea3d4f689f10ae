"""What processes that have ended left behind, and what this one has open."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

from tests.support.processes import wait

OTHERS = ("sem.", "psm_", "vllm_dist_", "sgl_shm_mq_", "sglang_loads_")
"""Names of semaphores, and of the rings of engines."""


def abandoned() -> set[str]:
    """Names in /dev/shm that no living process maps; ``OTHERS`` are not this library's.

    Tests run side by side: what another one's processes share at the moment says nothing.
    """
    mapped: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped.update(re.findall(r"/dev/shm/(\S+)", maps.read_text()))
        except OSError:
            continue  # it has ended, or is not ours
    return {name for name in os.listdir("/dev/shm") if name not in mapped and not name.startswith(OTHERS)}


def held() -> tuple[int, int]:
    """Threads and file descriptors of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def given_back(before: tuple[int, int]) -> None:
    """Wait until this process holds no more than ``before``; the kernel shows a thread a while after it was joined."""
    wait(
        lambda: all(now <= then for now, then in zip(held(), before, strict=True)),
        lambda: f"{held()} threads and file descriptors instead of {before}",
    )
