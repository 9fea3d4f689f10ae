"""A forked child of a process that has endpoints: every call is an error there, and nothing of the parent's changes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.needs import needs_mooncake, needs_nixl

ENDPOINTS = """
import gc, os, sys, tempfile, time
import numpy as np
from disagg_kv import (
    CacheSpec,
    DecodeEndpoint,
    Expectation,
    GroupId,
    PageTable,
    PagedPool,
    Phase,
    PrefillEndpoint,
    Source,
    shard,
    transport,
)
from disagg_kv.channels import UnixChannel, ZmqChannel
from disagg_kv.errors import LocalProtocolError
from disagg_kv.ids import RoomId
from disagg_kv.rendezvous import StaticRendezvous

kind, folder = sys.argv[1], tempfile.mkdtemp()
make = {"unix": lambda n: UnixChannel(f"unix://{folder}/{n}"), "ipc": lambda n: ZmqChannel(f"ipc://{folder}/{n}")}[kind]
spec, where = CacheSpec.kv(2, 4, 64, "bfloat16"), StaticRendezvous()
pools = [PagedPool.allocate(spec, shard(spec), pages=8, page_size=16) for _ in range(2)]
both = [dict(transport=transport("shm"), channel=make(n), rendezvous=where) for n in "pd"]
sender = PrefillEndpoint(pools[0], instance="P", **both[0])
receiver = DecodeEndpoint(pools[1], instance="D", **both[1])
pages = [PageTable(GroupId("kv"), [0, 1, 2])]

def begin(name):
    reception = receiver.open(RoomId(name), Source("P"))
    delivery = sender.open(RoomId(name))
    reception.expect(Expectation(40, pages))
    return reception, delivery

def end(reception, delivery):
    delivery.send_chunk(40, pages)
    delivery.finish(40)
    until = time.monotonic() + 60
    while not reception.released:
        assert time.monotonic() < until, reception.phase
        time.sleep(0.002)
    assert reception.phase is Phase.DONE, reception.error

def refused(call, *given, **options):
    try:
        call(*given, **options)
    except LocalProtocolError as error:
        assert f"belongs to process {parent}" in str(error) and f"child {os.getpid()}" in str(error), error
        return
    raise AssertionError(f"{call} did not raise in the child")

end(*begin(b"before"))
across = begin(b"across")
parent, child = os.getpid(), os.fork()
if not child:
    for endpoint in (sender, receiver):
        refused(endpoint.poll)
        refused(endpoint.fileno)
        refused(endpoint.close)
        refused(endpoint.confirm_terminated, b"0" * 16)
    refused(sender.open, RoomId(b"child"))
    refused(receiver.open, RoomId(b"child"), Source("P"))
    refused(across[1].send_chunk, 40, pages)
    refused(across[0].abort, "no more")
    for one in both:
        refused(one["channel"].poll)
        refused(one["channel"].send, one["channel"].address, b"frame")
        refused(one["channel"].close)
        refused(one["transport"].connect, b"", 1.0)
        refused(one["transport"].register, [])
        refused(one["transport"].close, 0.0)
        assert list(one["transport"].poll()) == []
    del sender, receiver, both, across, one, endpoint
    gc.collect()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert sorted(os.listdir(folder)) == ["d", "p"]
end(*across)
end(*begin(b"after"))
sender.close()
receiver.close()
assert os.listdir(folder) == []
print("fine")
"""

TRANSPORTS = """
import gc, os, sys
import numpy as np
from disagg_kv import transport
from disagg_kv.errors import LocalProtocolError
from disagg_kv.planning import Writes
from disagg_kv.testing.ends import End, HostMemory
from disagg_kv.testing.pair import Pair, batch

source, target = (End(lambda: transport(sys.argv[1]), HostMemory()) for _ in range(2))
pair = Pair(source, target, 1 << 16, 60.0)
pair.put((0, 0, 1000))
child = os.fork()
if not child:
    for end in (source, target):
        try:
            end.close(0.0)
        except LocalProtocolError:
            pass
        else:
            os._exit(1)
    del source, target, pair, end
    gc.collect()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
for number in range(20):
    pair.put((1000 * number, 1000 * number, 1000))
pair.check()
back = target.connect(source.descriptor(), 60.0)
source.close(5.0)
target.close(5.0)
print("fine")
"""


def run(code: str, *given: str) -> None:
    """In a fresh process, which forks while it has threads."""
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


@pytest.mark.parametrize("channel", ["unix", "ipc"])
def test_a_forked_child_can_use_no_endpoint_and_disturbs_none(channel: str) -> None:
    """Rooms before, across and after the fork are done; sockets' files stay until the parent closes."""
    run(ENDPOINTS, channel)


@pytest.mark.parametrize(
    "name",
    ["inproc", "shm", pytest.param("nixl", marks=needs_nixl), pytest.param("mooncake", marks=needs_mooncake)],
)
def test_a_forked_child_takes_no_transport_down_with_it(name: str) -> None:
    """Its copies are collected and it exits as any program does; the parent's writes go on."""
    run(TRANSPORTS, name)
