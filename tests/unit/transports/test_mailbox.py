"""The queue of threads that look at their library while they wait."""

from __future__ import annotations

import sys
import threading
from itertools import count
from types import FrameType

import pytest

from disagg_kv.transports.mailbox import Mailbox


def test_items_come_in_their_order_and_none_is_none() -> None:
    """Those that were put before the reader looked, too."""
    box = Mailbox[int]()
    assert (box.empty(), box.get(0.0)) == (True, None)
    for item in range(3):
        box.put(item)
    assert not box.empty()
    assert [box.get(0.0) for _ in range(4)] == [0, 1, 2, None]


def test_a_wait_ends_although_its_time_passes_while_it_begins() -> None:
    """After an item was put and taken; ``queue.SimpleQueue`` stands still here, after some hundred rounds."""
    box = Mailbox[int]()
    for item in range(20_000):
        box.put(item)
        assert box.get(1e-9) == item
        assert box.get(1e-9) is None


@pytest.mark.parametrize("moment", range(6))
def test_a_finalizer_may_put_at_any_moment_of_a_get(moment: int) -> None:
    """On the reader's own thread, as where that is the one that collects the garbage."""
    box = Mailbox[str]()
    moments = count()

    def collect(frame: FrameType, event: str, arg: object) -> None:
        if frame.f_code is Mailbox.get.__code__ and next(moments) == moment:
            box.put("finalized")

    sys.setprofile(collect)
    try:
        found = [box.get(0.0), box.get(0.0)]
    finally:
        sys.setprofile(None)
    assert [*found, box.get(0.0)].count("finalized") == 1


def test_a_reader_that_waits_is_woken() -> None:
    """Each time: a single ``put`` that woke nobody would make this wait for an hour."""
    there, back = Mailbox[int](), Mailbox[int]()

    def next_of(box: Mailbox[int]) -> int:
        while (item := box.get(3600.0)) is None:
            pass
        return item

    def answer() -> None:
        while (item := next_of(there)) >= 0:
            back.put(item)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    for item in range(2000):
        there.put(item)
        assert next_of(back) == item
    there.put(-1)
    thread.join()


def test_no_item_of_several_threads_is_lost() -> None:
    """And those of each thread keep their order."""
    box = Mailbox[tuple[int, int]]()

    def fill(number: int) -> None:
        for i in range(2000):
            box.put((number, i))

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    found: list[tuple[int, int]] = []
    while len(found) < 8000:
        item = box.get(1e-5)
        if item is not None:
            found.append(item)
    assert all([i for n, i in found if n == number] == list(range(2000)) for number in range(4))
    for thread in threads:
        thread.join()
