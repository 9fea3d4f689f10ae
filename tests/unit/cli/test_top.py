"""``top`` has one line for a peer, whatever the width."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from disagg_kv.cli.top import shown

PEER = {
    "instance": "prefill-0123456789",
    "rank": 12,
    "state": "connected",
    "silent_s": 12.5,
    "ring_bytes": 1 << 30,
    "page_bytes": 0,
    "slot_bytes": 0,
    "transport": "cuda_ipc",
    "address": "tcp://10.20.30.40:54321#" + "k" * 40,
    "pid": 123456,
    "epoch": "ab" * 16,
    "host": "node-17.cluster.example.com",
}
MEMORY = {"ring_used_bytes": 0, "ring_bytes": 0, "slots_used": 0, "slots": 0, "quarantined_bytes": 0}
ENDPOINT: dict[str, Any] = {
    "ok": True,
    "side": "decode",
    "instance": "D",
    "rank": 0,
    "state": "open",
    "pid": 1,
    "rooms_by_phase": {},
    "rooms": [],
    "memory": MEMORY,
    "links": {"held": 2, "most": 100},
}


@pytest.mark.parametrize(
    ("width", "words", "without"),
    [(60, ["1.0 GiB"], "10.20"), (80, ["1.0 GiB", "cuda_ipc"], "10.20"), (240, ["cuda_ipc", "123456", "node-17"], "…")],
)
def test_a_peer_is_one_line_with_what_fits(width: int, words: list[str], without: str) -> None:
    """Numbers are whole; columns that do not fit are left out, the less important ones first."""
    peers = [PEER, {**PEER, "rank": 13, "silent_s": None, "transport": ""}]
    console = Console(width=width, record=True, file=None, quiet=False)
    with console.capture() as captured:
        for part in shown([{**ENDPOINT, "peers": peers}], 20, width):
            console.print(part)
    lines = captured.get().splitlines()
    lines = lines[lines.index(next(line for line in lines if line.startswith("peers of"))) :]
    assert len(lines) == 4
    assert max(map(len, lines)) <= width
    assert "prefill-0123456789/12 connected 12.5 s 1.0 GiB" in " ".join(lines[2].split())
    assert all(word in lines[2] for word in words)
    assert without not in lines[2]
