"""What waits of the channels with descriptors promise in states that a test of the suite cannot bring about."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from math import inf
from pathlib import Path

import pytest

from disagg_kv.channels import Arrived, Closed, Denied, Opened, UnixChannel, ZmqChannel, zeromq
from disagg_kv.channels.unix import RECONNECT_S
from disagg_kv.channels.waiting import Timer
from tests.support.channels import wait_for
from tests.support.leftovers import given_back, held

LONG_S = 1000.0
Descriptors = UnixChannel | ZmqChannel


@pytest.fixture(params=["unix", "zeromq"])
def channel(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Descriptors]:
    with closing(UnixChannel(f"unix://{tmp_path}/inbox") if request.param == "unix" else ZmqChannel()) as channel:
        yield channel


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


@pytest.mark.parametrize("kind", ["unix", "zeromq"])
def test_who_is_about_to_wait_when_a_channel_closes_waits_for_no_other_file(kind: str, tmp_path: Path) -> None:
    """Its descriptors' numbers are not given to files that are opened now, and it returns at once."""
    before = held()
    channel = UnixChannel(f"unix://{tmp_path}/inbox") if kind == "unix" else ZmqChannel()
    waiter = channel._waiter
    assert waiter is not None
    channel.close()
    with ExitStack() as opened:
        for _ in range(20):
            for end in os.pipe():
                opened.callback(os.close, end)
        waiter.wait(LONG_S)
    del waiter
    given_back(before)


def test_news_of_a_connection_end_a_wait_of_another_thread(channel: Descriptors, threads: ThreadPoolExecutor) -> None:
    """Whatever brings them about is a call of the owner."""
    waiting = threads.submit(channel.wait, LONG_S)
    assert channel.send(channel.address, b"hello")
    waiting.result(60)
    wait_for(channel, Opened(channel.address), Arrived(b"hello"))
    channel.poll()
    waiting = threads.submit(channel.wait, LONG_S)
    assert not channel.send("nowhere", b"hello")
    waiting.result(60)
    assert [event.address for event in channel.poll() if isinstance(event, Denied)] == ["nowhere"]


def test_a_connection_that_is_due_ends_a_wait_which_began_before_that_was_known(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    """However often the owner polls in between."""
    with closing(UnixChannel(f"unix://{tmp_path}/inbox")) as channel:
        other = UnixChannel(f"unix://{tmp_path}/other")
        assert channel.send(other.address, b"hello")
        wait_for(channel, Opened(other.address))
        waiting = threads.submit(channel.wait, LONG_S)
        other.close()
        came, until = list(channel.poll()), time.monotonic() + RECONNECT_S[0] / 2
        while Closed(other.address) not in came or time.monotonic() < until:
            came += channel.poll()
        waiting.result(60)
        with closing(UnixChannel(other.address)):
            wait_for(channel, Opened(other.address))


def test_a_timer_is_readable_from_its_time_on(channel: Descriptors) -> None:
    """A later time, an earlier one and none replace it."""
    with closing(Timer()) as timer:
        channel._epoll.register(timer)
        now = time.monotonic()
        for at in (now + LONG_S, now + 2 * LONG_S, now + 0.01):
            timer.set(at)
        channel.poll()
        while not [event for event in channel._epoll.poll(LONG_S) if event[0] == timer.fileno()]:
            channel.poll()
        assert time.monotonic() >= now + 0.01
        timer.set(inf)
        assert not [event for event in channel._epoll.poll(0) if event[0] == timer.fileno()]
        channel._epoll.unregister(timer)


def test_what_a_poll_of_zeromq_leaves_for_the_next_one_ends_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ says no more of frames that have come already."""
    monkeypatch.setattr(zeromq, "BATCH", 1)
    with closing(ZmqChannel()) as channel:
        frames = [Arrived(b"%d" % i) for i in range(100)]
        for one in frames:
            assert channel.send(channel.address, one.frame)
        came: list[object] = []
        while frames[-1] not in came:
            channel.wait(LONG_S)
            one_by_one = [event for event in channel.poll() if isinstance(event, Arrived)]
            assert len(one_by_one) <= 1
            came += one_by_one
        assert came == frames


def test_a_poll_of_zeromq_that_is_interrupted_leaves_no_socket_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next wait returns at once, and the next poll reads all sockets."""
    with closing(ZmqChannel()) as channel, closing(ZmqChannel()) as other:
        assert other.send(channel.address, b"first")
        wait_for(channel, Arrived(b"first"))
        assert channel.send(other.address, b"hello")
        assert other.send(channel.address, b"second")
        wait_for(other, Arrived(b"hello"))
        channel.wait(LONG_S)
        with monkeypatch.context() as patched:
            patched.setattr(channel, "_frames", interrupted)
            with pytest.raises(KeyboardInterrupt):
                channel.poll()
        channel.wait(LONG_S)
        wait_for(channel, Arrived(b"second"), Opened(other.address))


def interrupted(came: list[object]) -> bool:
    """A signal's handler raises."""
    raise KeyboardInterrupt
