"""A real TCPStore whose server stands still or is killed: rooms of ranks that have met go on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from disagg_kv.geometry import CacheSpec
from disagg_kv.rendezvous import StoreRendezvous
from tests.support.rig import Rig, tp_shards

SPEC = CacheSpec.kv(2, 4, 8, "float16")

SERVER = """
import sys
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that serves a store, and its port."""
    command = [sys.executable, "-W", "ignore", "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stands still", "is killed"])
def test_rooms_go_on_without_the_store(server: tuple[subprocess.Popen[str], int], how: signal.Signals) -> None:
    """Rooms in flight and new ones, on several ranks of both sides, end well; so do those that come after."""
    process, port = server
    rig = Rig(SPEC, threaded=True)
    client = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    rig.rendezvous = StoreRendezvous(client)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 2)), rig.decode(tp_shards(SPEC, 2))
    rig.request("first", prefills, decodes, 8).start().landed()
    flying = rig.request("flying", prefills, decodes, 8).open_decode().expect().open_prefill()
    process.send_signal(how)
    until = time.monotonic() + 2.5
    number = 0
    while time.monotonic() < until:
        request = rig.request(f"new {number}", prefills, decodes, 8).start().landed()
        for decode, table in zip(decodes, request.taken, strict=True):
            decode.give(table)
        for prefill, tables in zip(prefills, request.given.values(), strict=True):
            prefill.give(tables[0])
        number += 1
    flying.send(8).finish().landed()
    assert number
    for member in rig.members:
        member.close()
    # A client's destructor waits for its server.
    process.send_signal(signal.SIGCONT)
    process.kill()
