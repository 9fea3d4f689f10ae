"""A kernel writes or reads through a mapping, and its process or the owner of the memory is killed.

``DISAGG_KV_ROUNDS`` is the number of rounds of each pair of instances, ``DISAGG_KV_PAIRS`` that of such pairs at once.
25 and 4 kill 200 processes for each path: 100 whose kernels run, and 100 owners of the memory.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.support.faults import ROUNDS, Field, killed
from tests.support.processes import Cluster

PAIRS = int(os.environ.get("DISAGG_KV_PAIRS", "1"))


def rounds(path: str, folder: Path) -> dict[str, int]:
    """Kill a process of each side in each round; the rooms of the others by their phases."""
    folder.mkdir()
    cluster = Cluster(folder)
    try:
        field = Field(cluster, "cuda_ipc", path, "cuda")
        usual_s = min(field.usual() for _ in range(3))
        for _ in range(ROUNDS):
            for side in ("prefill", "decode"):
                killed(field, side, usual_s)
                field.settle()
        return field.ends
    finally:
        cluster.stop()


@pytest.mark.parametrize("path", ["mapped"])
def test_survivors_of_kills_have_no_wrong_byte_and_a_sound_context(path: str, tmp_path: Path) -> None:
    """What reports success is right, survivors serve the next request, and nothing is written to free pages."""
    with ThreadPoolExecutor(PAIRS) as threads:
        ends = list(threads.map(partial(rounds, path), [tmp_path / str(number) for number in range(PAIRS)]))
    assert all(sum(found.values()) == 6 * ROUNDS for found in ends)
    print(f"{path}: killed {2 * ROUNDS * PAIRS} processes; rooms of the others: {ends}")
