"""A process has no descriptor left when a new peer arrives: rooms of other peers go on, and that peer comes later."""

from __future__ import annotations

import gc
import os
import resource
import select
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from disagg_kv.core import Options, Phase
from disagg_kv.endpoints import Incarnation
from disagg_kv.errors import DisaggKVError
from disagg_kv.geometry import CacheSpec
from disagg_kv.transports import Process, ShmTransport
from disagg_kv.transports.process import _started
from tests.support.rig import Memory, Request, Rig, tp_shards
from tests.support.scarce import no_descriptor

SPEC = CacheSpec.kv(2, 2, 64, "int8")
ROWS = 8
SILENCE_S = 2.0
ENOUGH, ALL = 12, 20
"""Descriptors that are enough for any connect; opens after which none follows."""

Shortage = Callable[[int], AbstractContextManager[None]]


@contextmanager
def free(count: int) -> Iterator[None]:
    """The host gives this process ``count`` more descriptors at most."""
    gc.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fds = [os.dup(0) for _ in range(count + 1)]
    for fd in fds:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fds[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def nth_fails(count: int) -> Iterator[None]:
    """The open of a descriptor after ``count`` others fails, and no other one."""
    left = count

    def wrapped(call: Callable[..., object]) -> Callable[..., object]:
        def opened(*args: object, **more: object) -> object:
            nonlocal left
            left -= 1
            if left == -1:
                no_descriptor()
            return call(*args, **more)

        return opened

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pidfd_open", wrapped(os.pidfd_open))
        patch.setattr(os, "open", wrapped(os.open))
        patch.setattr(select, "epoll", wrapped(select.epoll))
        patch.setattr(Path, "read_text", wrapped(Path.read_text))
        yield


def descriptors() -> int:
    """How many this process has."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def child() -> Iterator[Process]:
    """A process that lives as long as the test."""
    one = subprocess.Popen(["sleep", "1000"])
    yield Process(one.pid, _started(one.pid), Process.own().host)
    one.kill()
    one.wait()


@pytest.mark.parametrize("watched", [False, True], ids=["first", "later"])
@pytest.mark.parametrize(
    ("shortage", "count"), [*((free, n) for n in range(ENOUGH + 1)), *((nth_fails, n) for n in range(ALL + 1))]
)
def test_no_descriptor_left_while_a_peer_connects_harms_no_room_of_another_peer(
    shortage: Shortage, watched: bool, count: int, child: Process
) -> None:
    """The new peer is the first, or not, whose process is watched; its room succeeds, or fails by name."""
    rig = Rig(SPEC, options=Options(silence_s=SILENCE_S, closed_s=SILENCE_S))
    memory = Memory(transport=ShmTransport)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged")
    victims = rig.decode(tp_shards(SPEC, 1), "D", memory=memory, strategy="staged")
    if watched:
        others = rig.decode(tp_shards(SPEC, 1), "W", memory=memory, strategy="staged", life=Incarnation(process=child))
        rig.request("watched", prefills, others, ROWS).start().landed()
    victim = rig.request("victim", prefills, victims, ROWS).open_decode().expect(ROWS).open_prefill()
    rig.until(lambda: victim.sends[0].phase is Phase.READY, "the victim")
    news = rig.decode(tp_shards(SPEC, 1), "N", memory=memory, strategy="staged", life=Incarnation(process=child))
    new = rig.request("new", prefills, news, ROWS).open_decode().expect(ROWS).open_prefill()
    with shortage(count):
        for _ in range(20):
            rig.turn()
    assert not any(member.observer.counters["errors.unforeseen"] for member in rig.members)
    assert victim.sends[0].phase is Phase.READY
    victim.send(ROWS).finish().landed()
    new.send(ROWS).finish().released()
    if not new.all(Phase.DONE):
        assert count < (ENOUGH if shortage is free else ALL), new.errors()
        assert all(isinstance(handle.error, DisaggKVError) for handle in new.handles)
        new.forgive()
        rig.wait(2 * SILENCE_S)
        new = _again(rig, new)
    new.done()
    rig.check()
    before = descriptors()
    rig.close()
    assert descriptors() < before


def _again(rig: Rig, failed: Request) -> Request:
    """Another room of the same peers succeeds."""
    return rig.request("again", failed.prefills, failed.decodes, ROWS).start().landed()


def test_the_host_is_read_once_however_many_processes_are_watched(
    child: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What names the boot and the namespaces does not change; each peer costs a look at its own process alone."""
    child.watch()
    read = list[str]()
    text = Path.read_text

    def reads(path: Path) -> str:
        read.append(str(path))
        return text(path)

    monkeypatch.setattr(Path, "read_text", reads)
    for _ in range(3):
        child.watch()
    assert read == [f"/proc/{child.pid}/stat"] * 3
