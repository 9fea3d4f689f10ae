"""Processes are told apart by more than their id."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import attrs
import pytest

from disagg_kv.errors import PeerLostError, TransportError
from disagg_kv.transports import Process
from disagg_kv.transports.process import LOOK_S, _started


def test_a_running_process_has_not_ended() -> None:
    """This one."""
    assert Process.own().pid == os.getpid()
    assert not Process.own().watch().ended()


def test_the_end_of_a_process_is_seen_before_anybody_waits_for_it() -> None:
    """And a process that has ended is not watched again, reaped or not."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = Process(child.pid, _started(child.pid), Process.own().host)
    watch = process.watch()
    assert not watch.ended()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    time.sleep(LOOK_S)
    assert watch.ended()
    with pytest.raises(PeerLostError, match="nobody has waited"):
        process.watch()
    child.communicate()
    assert watch.ended()
    with pytest.raises(PeerLostError, match=f"process {child.pid} has ended"):
        process.watch()


def test_a_reused_process_id_is_another_process() -> None:
    """The start time tells."""
    with pytest.raises(PeerLostError, match="another has its id"):
        attrs.evolve(Process.own(), started=_started(os.getpid()) - 1).watch()


@pytest.mark.parametrize("pid", [0, -1, 1 << 40])
def test_an_impossible_process_id_is_no_process(pid: int) -> None:
    """Whatever a descriptor says."""
    with pytest.raises(TransportError, match=f"process {pid} cannot be watched"):
        attrs.evolve(Process.own(), pid=pid).watch()


def test_a_process_of_another_host_cannot_be_watched() -> None:
    """Its id would mean somebody else here."""
    with pytest.raises(TransportError, match="of host or namespace elsewhere"):
        attrs.evolve(Process.own(), host="elsewhere").watch()


def test_a_process_of_another_time_namespace_is_not_taken_for_one_that_has_ended() -> None:
    """Times since boot are shifted there, also those by which a process id is known to be of the same process."""
    own = Process.own()
    told = "import sys; from disagg_kv.transports.process import Process; print(Process.own().host)"
    asked = (
        "import sys; from disagg_kv.transports.process import Process\n"
        "try: Process(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]).watch()\n"
        "except Exception as exc: print(type(exc).__name__)\n"
        "print(Process.own().host)"
    )
    here = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout.strip()
    shifted = ["unshare", "--time", "--boottime", "100000", sys.executable, "-c", asked, str(own.pid), str(own.started)]
    try:
        there = subprocess.run([*shifted, here], capture_output=True, text=True, check=True).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError) as exc:
        pytest.skip(f"no time namespace can be made here: {exc}")
    assert here == own.host
    assert there[0] == "TransportError"
    assert there[1] != here
