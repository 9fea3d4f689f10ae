"""A kernel of decode reads the pages of prefill through a mapping of GPU memory, between processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import Cluster, Knobs

ROOM, TOKENS = b"room", 500


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Endpoints that end with the test."""
    made = Cluster(tmp_path)
    yield made
    made.stop()


@pytest.mark.parametrize("strategy", ["mapped_pull", "mapped_pull+layer_pipelined"])
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)], ids=str)
def test_pulled_bytes_are_those_of_prefill(cluster: Cluster, ranks: tuple[int, int], strategy: str) -> None:
    """Two chunks, from pages of 16 to pages of 32 in another order: each byte is right, and no other has changed."""
    knobs = Knobs(path=strategy, transport="cuda_ipc", device="cuda")
    prefill = cluster.start("prefill", "P", ranks[0], knobs)
    decode_knobs = Knobs(path="mapped_pull", transport="cuda_ipc", device="cuda", page_size=32, layout="HND")
    decode = cluster.start("decode", "D", ranks[1], decode_knobs)
    for node in decode:
        node.ask("expect", ROOM, "P", TOKENS)
        assert node.ask("wrong", {ROOM: TOKENS}) > 0, "the check of the bytes cannot fail"
    for node in prefill:
        node.ask("begin", ROOM, TOKENS)
        node.ask("send", ROOM, 0, TOKENS // 2, False)
        node.ask("send", ROOM, TOKENS // 2, TOKENS, True)
    for node in (*prefill, *decode):
        look = node.until(ROOM, lambda look: look.released)
        assert look.phase == "DONE", look
    for node in decode:
        assert node.ask("wrong", {ROOM: TOKENS}) == 0
    assert {node.ask("look", ROOM).path for node in prefill} == {"mapped_pull"}
