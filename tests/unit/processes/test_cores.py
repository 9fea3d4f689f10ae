"""Threads of endpoints in a process that is pinned to one core."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from disagg_kv.endpoints import threads_on
from disagg_kv.errors import ConfigurationError

CHILD = """
import os, sys, tempfile, threading, time
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
from disagg_kv.endpoints import threads_on
from disagg_kv.ids import RoomId
from disagg_kv.rendezvous import StaticRendezvous

kind, folder = sys.argv[1], tempfile.mkdtemp()
make = {"unix": lambda n: UnixChannel(f"unix://{folder}/{n}"), "zmq": lambda n: ZmqChannel()}[kind]
cores = os.sched_getaffinity(0)
os.sched_setaffinity(0, {min(cores)})
spec = CacheSpec.kv(2, 4, 64, "bfloat16")
pools = [PagedPool.allocate(spec, shard(spec), pages=8, page_size=16) for _ in range(2)]
before = set(os.listdir("/proc/self/task"))
seen = {}

class Slow(StaticRendezvous):
    "Asked by a helper thread of decode."

    def lookup(self, source):
        seen[threading.current_thread().name.split()[-1]] = os.sched_getaffinity(0)
        return super().lookup(source)

where = Slow()

def endpoint(cls, n):
    return cls(pools[n], transport=transport("shm"), channel=make(n), rendezvous=where, instance=cls.__name__)

def begin():
    return endpoint(PrefillEndpoint, 0), endpoint(DecodeEndpoint, 1)

if sys.argv[2] == "free":
    with threads_on(cores):
        sender, receiver = begin()
else:
    sender, receiver = begin()
pages = [PageTable(GroupId("kv"), [0, 1, 2])]
reception, delivery = receiver.open(RoomId(b"r"), Source("PrefillEndpoint")), sender.open(RoomId(b"r"))
reception.expect(Expectation(40, pages))
delivery.send_chunk(40, pages)
delivery.finish(40)
until = time.monotonic() + 60
while not (reception.released and delivery.released):
    assert time.monotonic() < until, reception.phase
    time.sleep(0.002)
assert reception.phase is Phase.DONE, reception.error
threads = set(os.listdir("/proc/self/task")) - before
where_they_run = [os.sched_getaffinity(int(thread)) for thread in threads]
assert os.sched_getaffinity(0) == {min(cores)}
assert len(threads) >= (6 if kind == "zmq" else 2), threads  # ZeroMQ has two for each channel
print(sorted({len(found) for found in where_they_run}), len(seen["look-ups"]))
for each in (sender, receiver):
    each.close()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("channel", ["zmq", "unix"])
@pytest.mark.parametrize("how", ["free", "pinned"])
def test_threads_of_an_endpoint_leave_the_core_that_the_process_is_pinned_to(channel: str, how: str) -> None:
    """All threads that endpoints and channels start, helpers too; without ``threads_on`` they share the one core."""
    child = subprocess.run([sys.executable, "-c", CHILD, channel, how], capture_output=True, text=True, timeout=120)
    cores = len(os.sched_getaffinity(0)) if how == "free" else 1
    assert (child.returncode, child.stdout, child.stderr) == (0, f"[{cores}] {cores}\n", "")


def test_the_calling_thread_has_its_cores_again_also_after_an_exception() -> None:
    """The block moves the calling thread for its own time only."""
    before = os.sched_getaffinity(0)

    def fails() -> None:
        with threads_on({min(before)}):
            assert os.sched_getaffinity(0) == {min(before)}
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("cores", [[], [100_000], [1 << 80]])
def test_cores_that_the_host_does_not_have_are_refused(cores: list[int]) -> None:
    """The engine learns it when it creates the endpoint, not from a slow one."""
    before = os.sched_getaffinity(0)
    with pytest.raises(ConfigurationError, match="cores"), threads_on(cores):
        raise AssertionError
    assert os.sched_getaffinity(0) == before
