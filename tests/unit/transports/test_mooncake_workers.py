"""Blocking calls in threads: in order for one destination, side by side for several."""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from typing import cast

import pytest
import torch

from disagg_kv.errors import TransportError
from disagg_kv.ids import Peer, Ticket
from disagg_kv.transports import Extents, Process, Settled, WriteEnded
from disagg_kv.transports.mooncake_flight import Address, Flight, One, Remote, Shared
from disagg_kv.transports.mooncake_library import Engine
from disagg_kv.transports.mooncake_workers import WorkerPool


def test_jobs_for_one_destination_run_in_order_and_never_side_by_side() -> None:
    """With any number of threads; a job is called until it has no more to do."""
    workers, busy = WorkerPool(4, "test"), threading.Lock()
    ran: list[int] = []

    def job(number: int) -> bool:
        assert busy.acquire(blocking=False)
        ran.append(number)
        busy.release()
        return ran.count(number) < 3

    for number in range(50):
        workers.put("one", partial(job, number))
    assert workers.drain(120.0)
    assert ran == [number for number in range(50) for _ in range(3)]
    workers.stop()


def test_a_slow_destination_delays_no_other() -> None:
    """As long as there are more threads than slow ones."""
    workers, free, done = WorkerPool(2, "test"), threading.Event(), threading.Event()
    workers.put("slow", lambda: not free.wait(120.0))
    for number in range(10):
        workers.put(number, lambda: False)

    def last() -> bool:
        done.set()
        return False

    workers.put(9, last)
    assert done.wait(120.0)
    assert not workers.drain(0.0)
    free.set()
    assert workers.drain(120.0)
    workers.stop()


def test_destinations_take_turns() -> None:
    """With one thread, a long job does not keep it."""
    workers, go = WorkerPool(1, "test"), threading.Event()
    turns: list[str] = []
    workers.put("gate", lambda: not go.wait(120.0))

    def job(name: str) -> bool:
        turns.append(name)
        return turns.count(name) < 3

    for name in "ab":
        workers.put(name, partial(job, name))
    go.set()
    assert workers.drain(120.0)
    assert turns == list("ababab")
    workers.stop()


def test_without_more_threads_those_that_are_there_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have no more of them: then destinations share the first."""
    workers, done = WorkerPool(4, "test"), list[str]()

    def job(name: str) -> bool:
        done.append(name)
        return False

    monkeypatch.setattr(threading.Thread, "start", _no_thread)
    for name in ("a", "b", "c"):
        workers.put(name, partial(job, name))
    assert workers.drain(5.0)
    assert done == ["a", "b", "c"]
    workers.stop()


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_what_has_not_begun_when_it_stops_never_does() -> None:
    """The present step is finished; the threads end."""
    workers, entered, go = WorkerPool(1, "stopped"), threading.Event(), threading.Event()
    ran: list[str] = []

    def job(name: str) -> bool:
        entered.set()
        assert go.wait(120.0)
        ran.append(name)
        return True

    workers.put("one", partial(job, "first"))
    workers.put("two", partial(job, "second"))
    assert entered.wait(120.0)
    (thread,) = [t for t in threading.enumerate() if t.name == "stopped-0"]
    workers.stop()
    go.set()
    thread.join(120.0)
    assert (ran, thread.is_alive()) == (["first"], False)


class Library:
    """An engine whose writes succeed, or raise what no library should."""

    def __init__(self, raises: Exception | None = None) -> None:
        self._raises = raises

    def write_one(self, session: str, source: int, target: int, nbytes: int) -> int:
        """0: written."""
        if self._raises is not None:
            raise self._raises
        return 0


@pytest.mark.parametrize("where", ["before the call", "in it"])
def test_a_flight_that_meets_an_error_ends_and_the_next_one_flies(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quiet only if the library was not asked; the thread lives on."""
    broken, asked = [RuntimeError("a broken context")], where == "in it"

    def set_device(device: int) -> None:
        if broken and not asked:
            raise broken.pop()

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    workers = WorkerPool(1, "test")
    address = Address("session", "host", 1, "nvlink_intra", Process.own())
    remote = Remote(Peer(bytes(16)), address, 1, Extents((), "peer's"), None)
    results = deque[tuple[Flight, WriteEnded | Settled]]()
    for number in (1, 2):
        library = Library(broken.pop()) if asked and broken else Library()
        shared = Shared(cast("Engine", library), 30.0, results)
        workers.put("peer", Flight(Ticket(number), remote, deque([One(0, 1, 1, 1)]), shared).step)
    assert workers.drain(5.0)
    workers.stop()
    first, second = (event for _, event in results)
    assert isinstance(first, WriteEnded)
    assert isinstance(first.error, TransportError)
    assert first.quiesced is not asked
    assert second == WriteEnded(Ticket(2))
