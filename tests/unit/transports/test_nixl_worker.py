"""What the thread of NIXL's transport does with many peers, and with what goes wrong; beside a stub of the library."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from functools import partial

import pytest

from disagg_kv.errors import TransportError
from disagg_kv.ids import Peer
from disagg_kv.transports.base import PeerLost
from disagg_kv.transports.nixl_library import Agent
from disagg_kv.transports.nixl_worker import PROBE_S, Link, TransportEvent, Worker
from disagg_kv.transports.process import Watch
from tests.support.processes import wait

CALL_S = 60.0


class Stub(Agent):
    """An agent without a library."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.probed: list[str] = []

    def add(self, metadata: bytes, name: str) -> None:
        self.known.add(name)

    def remove(self, name: str) -> None:
        self.known.remove(name)

    def probe(self, name: str) -> None:
        self.probed.append(name)

    def progress(self) -> None:
        pass


class Bench:
    """A worker and its stub."""

    def __init__(self) -> None:
        self.agent = Stub()
        self.events: deque[TransportEvent] = deque()
        self.worker = Worker(lambda: self.agent, self.events, 0.003, CALL_S)

    def learn(self, peer: Peer, watch: Watch | None = None) -> Link:
        """Connect a peer."""
        return self.worker.call(partial(self.worker.learn, peer, watch, b""), "connecting", CALL_S)

    def alive(self) -> bool:
        """Whether the thread still answers."""
        return self.worker.call(lambda agent: agent is self.agent, "a question", CALL_S)


@pytest.fixture
def bench() -> Iterator[Bench]:
    one = Bench()
    yield one
    one.worker.close(0.0)


def peer_of(number: int) -> Peer:
    """One of many."""
    return Peer(number.to_bytes(16, "big"))


def descriptors() -> set[tuple[str, str]]:
    """Those of this process that watch others."""
    gc.collect()
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # of the listing itself
            continue
        if "eventpoll" in target or "pidfd" in target:
            found.add((number, target))
    return found


def test_many_peers_are_probed_in_turn_by_looks_that_send_one_message_each(bench: Bench) -> None:
    """However many are due, none has two turns while another waits for its first."""
    worker, agent, number = bench.worker, bench.agent, 600
    with worker._lock:
        for i in range(number):
            worker.learn(peer_of(i), None, b"", agent)
        now = time.monotonic()
        for _ in range(3 * number):
            before = len(agent.probed)
            now += PROBE_S / 330
            worker._look(now)
            assert len(agent.probed) <= before + 1
    counts = Counter(agent.probed)
    assert len(counts) == number
    assert set(counts.values()) == {3}


def test_a_peer_is_not_probed_more_often_than_the_pause_says(bench: Bench) -> None:
    """Nor at all once it is forgotten; one that is connected anew has one turn, not two."""
    worker, agent = bench.worker, bench.agent
    with worker._lock:
        worker.learn(peer_of(0), None, b"", agent)
        now = time.monotonic()
        for i in range(100):
            worker._look(now + i * PROBE_S / 1000)
        assert len(agent.probed) == 1
        worker._leave(peer_of(0))
        worker._look(now + PROBE_S / 2)
        assert not agent.known
        worker.learn(peer_of(0), None, b"", agent)
        for i in range(100):
            worker._look(now + PROBE_S + i * PROBE_S / 1000)
        assert len(agent.probed) == 2
        worker._leave(peer_of(0))
        for i in range(100):
            worker._look(now + 3 * PROBE_S + i * PROBE_S)
        assert len(agent.probed) <= 3, "one look may send before it forgets"


def test_ends_are_reported_and_peers_forgotten_however_many_are_due_for_a_message(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look does that for all peers."""
    worker, agent, number = bench.worker, bench.agent, 600
    with worker._lock:
        for i in range(number):
            worker.learn(peer_of(i), None, b"", agent)
        ended = [peer_of(i) for i in range(number - 25, number)]
        left = [peer_of(i) for i in range(number - 50, number - 25)]
        monkeypatch.setattr(worker._exits, "ended", lambda **_: ended)
        for peer in left:
            worker._leave(peer)
        worker._look(time.monotonic() + PROBE_S)
    assert [event.peer for event in bench.events if isinstance(event, PeerLost)] == ended
    assert not agent.known & {peer.hex() for peer in left}
    assert len(agent.known) == number - len(left)


def test_the_end_of_a_peer_that_is_forgotten_meanwhile_does_not_end_the_thread(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends are looked up by the thread that holds the lock, as forgetting is."""
    locked: list[bool] = []

    def ended(**_: bool) -> list[Peer]:
        locked.append(bench.worker._lock.locked())
        return [peer_of(7)]

    monkeypatch.setattr(bench.worker._exits, "ended", ended)
    wait(lambda: len(locked) >= 2, lambda: f"{len(locked)} looks of 2")
    assert bench.alive()
    assert all(locked)
    assert not bench.events


def test_an_error_of_the_look_at_processes_does_not_end_the_thread(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and other peers are served."""

    def broken(**_: bool) -> list[Peer]:
        raise OSError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(bench.worker._exits, "ended", broken)
        wait(lambda: bool(caplog.records), lambda: "nothing is logged")
        assert bench.alive()
    assert bench.learn(peer_of(1)).peer == peer_of(1)


def test_a_peer_that_cannot_be_watched_is_not_kept_by_the_library(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor by the thread; the next attempt finds nothing of it."""

    def full(*_: object) -> None:
        raise TransportError("injected: no descriptor is left", retryable=True)

    watch = Watch(os.pidfd_open(os.getpid()))
    with monkeypatch.context() as patch:
        patch.setattr(bench.worker._exits, "add", full)
        with pytest.raises(TransportError, match="no descriptor") as caught:
            bench.learn(peer_of(1), watch)
    assert caught.value.retryable
    assert not bench.agent.known
    bench.learn(peer_of(1), watch)
    assert bench.agent.known == {peer_of(1).hex()}
    assert peer_of(1) in bench.worker._exits


def test_no_descriptor_outlives_the_thread() -> None:
    """Those of the peers' processes and the one that watches them."""
    before = descriptors()
    bench = Bench()
    bench.learn(peer_of(1), Watch(os.pidfd_open(os.getpid())))
    assert len(descriptors() - before) == 2
    bench.worker.close(0.0)
    assert not descriptors() - before
