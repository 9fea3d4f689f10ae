"""An idle peer whose process ends without a word is noticed, and nothing of it stays."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

from disagg_kv import (
    CacheSpec,
    DecodeEndpoint,
    Expectation,
    GroupId,
    Options,
    PagedPool,
    PageTable,
    Phase,
    Source,
    shard,
)
from disagg_kv.channels import UnixChannel
from disagg_kv.ids import RoomId
from disagg_kv.rendezvous import RequestRendezvous
from disagg_kv.transports import ShmTransport
from tests.support.processes import wait

PEER = """
import sys
from disagg_kv import CacheSpec, GroupId, PageTable, PagedPool, PrefillEndpoint, shard
from disagg_kv.channels import UnixChannel
from disagg_kv.ids import RoomId
from disagg_kv.rendezvous import RequestRendezvous
from disagg_kv.transports import ShmTransport
spec = CacheSpec.kv(1, 1, 16, "float16")
end = PrefillEndpoint(
    PagedPool.allocate(spec, shard(spec), pages=1, page_size=16), transport=ShmTransport(),
    channel=UnixChannel(sys.argv[1]), rendezvous=RequestRendezvous(), instance="P", slot_bytes=4096, slots=2,
)
room = end.open(RoomId(sys.argv[2].encode()))
room.send_chunk(16, [PageTable(GroupId("kv"), [0])])
room.finish(16)
print("ready", flush=True)
sys.stdin.read()
"""


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_an_idle_peer_that_is_killed_is_forgotten_within_its_silence(tmp_path: Path) -> None:
    """Its link, its entry and its descriptors; a second one leaves as little as the first."""
    spec, address = CacheSpec.kv(1, 1, 16, "float16"), f"unix://{tmp_path}/p"
    end = DecodeEndpoint(
        PagedPool.allocate(spec, shard(spec), pages=1, page_size=16), transport=ShmTransport(),
        channel=UnixChannel(f"unix://{tmp_path}/d"), rendezvous=RequestRendezvous(), instance="D", strategy="staged",
        ring_bytes=1 << 18, options=Options(silence_s=1.0, heartbeat_s=0.2, closed_s=0.5, total_s=200.0, claim_s=100.0),
    )  # fmt: skip
    loop, left = end.driver.loop, list[int]()
    for name in ("one", "two"):
        child = subprocess.Popen(
            [sys.executable, "-c", PEER, address, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        room = end.open(RoomId(name.encode()), Source("P", (address,)))
        room.expect(Expectation(16, [PageTable(GroupId("kv"), [0])]))
        wait(lambda: room.released, lambda: str(room.error))  # noqa: B023
        assert room.phase is Phase.DONE
        (peer,) = end.peers()
        child.kill()
        child.communicate()
        wait(lambda: not end.peers() and loop.peers.known(peer.epoch) is None, lambda: str(end.peers()))  # noqa: B023
        wait(lambda: not loop.connections.linked(), lambda: "its link")
        left.append(descriptors())
    wait(lambda: descriptors() <= left[0], lambda: f"descriptors: {left}")
    end.close(0.0)
