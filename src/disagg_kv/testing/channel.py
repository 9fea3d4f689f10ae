"""What every :class:`~disagg_kv.channels.Channel` must do: a suite to inherit.

::

    class TestMine(ChannelSuite):
        def open(self, folder, name, address=None):
            return MyChannel(address or f"my://{folder}/{name}")

Needs pytest.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from ..channels import MAX_FRAME, Arrived, Channel, Closed, News, Opened
from ..errors import ConfigurationError

LONG_S = 120.0
"""A time that no test needs whole, in seconds."""


class ChannelSuite:
    """Promises of a channel. Subclasses say how one is opened, with room for at most 1,000 frames to an address.

    Where channels prove keys, all of a test have one pair, and ``key`` is its public key.
    """

    key = ""

    def open(self, folder: Path, name: str, address: str | None = None) -> Channel:
        """A new inbox.

        Args:
            folder: empty at first, and the same for all of a test.
            name: of the inbox in its test.
            address: that of a closed inbox, whose place it takes.
        """
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _inboxes(self, tmp_path: Path) -> Iterator[None]:
        self._folder, self._came = tmp_path, dict[Channel, list[News]]()
        with ThreadPoolExecutor() as self._threads:
            yield
            for channel in self._came:
                channel.close()

    def _open(self, name: str, address: str | None = None) -> Channel:
        self._came[channel := self.open(self._folder, name, address)] = []
        return channel

    def _pair(self) -> tuple[Channel, Channel]:
        """Two, the first one connected to the second."""
        left, right = self._open("left"), self._open("right")
        assert left.send(right.address, b"first")
        self._until(left, Opened(right.address))
        self._until(right, *self._arrived(b"first"))
        return left, right

    def _arrived(self, *frames: bytes) -> list[News]:
        return [Arrived(frame, self.key) for frame in frames]

    def _until(self, channel: Channel, *wanted: News) -> list[News]:
        """Poll all until one has got this; all that it has got since the last call."""
        until = time.monotonic() + LONG_S
        while not all(event in self._came[channel] for event in wanted):
            assert time.monotonic() < until, f"{channel.address} has not got {wanted}"
            for one, came in self._came.items():
                one.wait(0.001)
                came.extend(one.poll())
        came, self._came[channel] = self._came[channel], []
        return came

    @contextmanager
    def _waiting(self, channel: Channel) -> Iterator[threading.Event]:
        """A thread waits again and again, and sets the event after each wait; threads take turns every microsecond."""
        ended, returned, interval = threading.Event(), threading.Event(), sys.getswitchinterval()

        def wait() -> None:
            while not ended.is_set():
                channel.wait(LONG_S)
                returned.set()

        thread = self._threads.submit(wait)
        sys.setswitchinterval(1e-6)
        try:
            yield returned
        finally:
            sys.setswitchinterval(interval)
            ended.set()
            channel.wake()
        thread.result(LONG_S / 2)

    @pytest.mark.parametrize("size", [0, 1, MAX_FRAME])
    def test_a_frame_of_every_allowed_size_arrives_whole_and_an_answer_comes_back(self, size: int) -> None:
        """A larger one is refused with both sizes."""
        left, right = self._pair()
        with pytest.raises(ConfigurationError, match=f"{MAX_FRAME + 1} bytes .* at most {MAX_FRAME}"):
            left.send(right.address, b"x" * (MAX_FRAME + 1))
        assert left.send(right.address, b"x" * size)
        assert self._until(right, *self._arrived(b"x" * size)) == self._arrived(b"x" * size)
        assert right.send(left.address, b"answer")
        self._until(left, *self._arrived(b"answer"))

    def test_frames_that_are_taken_arrive_in_order_and_none_is_lost(self) -> None:
        """A peer that does not poll costs a bounded queue: ``send`` then returns False, and never waits."""
        (left, right), frames = self._pair(), list[bytes]()
        while left.send(right.address, frame := b"%d" % len(frames) + bytes(MAX_FRAME // 2)):
            frames.append(frame)
        assert self._until(right, *self._arrived(frames[-1])) == self._arrived(*frames)

    @pytest.mark.parametrize("address", ["", "nowhere", "tcp://", "tcp://127.0.0.1:99999", "ipc:///" + 200 * "x"])
    def test_a_malformed_address_drops_the_frame(self, address: str) -> None:
        """It raises nothing."""
        assert not self._open("left").send(address, b"lost")

    def test_the_end_of_an_inbox_is_reported_and_its_return_too(self) -> None:
        """A frame that was sent in between does not reach the new inbox."""
        left, right = self._pair()
        right.close()
        self._until(left, Closed(right.address))
        assert not left.send(right.address, b"meanwhile")
        again = self._open("right", right.address)
        self._until(left, Opened(right.address))
        assert left.send(right.address, b"back")
        assert self._until(again, *self._arrived(b"back")) == self._arrived(b"back")

    def test_an_address_where_no_inbox_is_is_reported_once(self) -> None:
        """And its opening, when it comes."""
        _, right = self._pair()
        right.close()
        fresh = self._open("fresh")
        fresh.send(right.address, b"hello")
        assert self._until(fresh, Closed(right.address)) == [Closed(right.address)]
        self._open("right", right.address)
        assert self._until(fresh, Opened(right.address)) == [Opened(right.address)]

    def test_a_forgotten_address_makes_no_news_and_can_be_used_again(self) -> None:
        """To forget it twice is fine."""
        (left, right), other = self._pair(), self._open("other")
        assert left.send(other.address, b"first")
        self._until(left, Opened(other.address))
        left.forget(right.address)
        left.forget(right.address)
        assert left.send(right.address, b"second")
        assert self._until(left, Opened(right.address)) == [Opened(right.address)]
        self._until(right, *self._arrived(b"second"))
        left.forget(right.address)
        right.close()
        other.close()
        assert self._until(left, Closed(other.address)) == [Closed(other.address)]

    def test_after_close_nothing_moves_and_nothing_breaks(self) -> None:
        """An unread frame is gone, and waits return at once."""
        left, right = self._pair()
        right.send(left.address, b"unread")
        left.close()
        left.close()
        left.wake()
        left.forget(right.address)
        left.wait(LONG_S)
        assert not left.send(right.address, b"late")
        assert not left.poll()

    def test_wake_ends_every_wait_until_the_next_poll(self) -> None:
        """Also waits that begin later, on any thread, and after several wakes."""
        channel = self._open("left")
        waits = [self._threads.submit(channel.wait, LONG_S) for _ in range(3)]
        for _ in range(2):
            channel.wake()
            channel.wait(LONG_S)
        for one in waits:
            one.result(LONG_S / 2)
        assert not channel.poll()

    def test_a_wait_is_as_long_as_it_should_be(self) -> None:
        """Of twenty waits for 20 us, one is shorter than a millisecond; a wait for no time returns."""
        channel, took = self._open("left"), list[float]()
        for _ in range(20):
            channel.poll()
            began = time.perf_counter()
            channel.wait(20e-6)
            took.append(time.perf_counter() - began)
        assert max(took) >= 20e-6
        assert min(took) < 1e-3
        channel.wait(0)
        channel.wait(-1)

    def test_close_ends_every_wait(self) -> None:
        """However little earlier it began, and although another inbox is opened at once."""
        for number in range(50):
            channel = self._open(f"{number}")
            waits = [self._threads.submit(channel.wait, LONG_S) for _ in range(2)]
            channel.close()
            self._open(f"{number} again").close()
            for one in waits:
                one.result(LONG_S / 2)

    def test_a_frame_that_comes_just_after_a_poll_ends_a_wait(self) -> None:
        """Five hundred times; no wait lasts until its time is over."""
        (left, right), draw = self._pair(), random.Random(0)
        with self._waiting(left) as returned:
            for number in range(500):
                sent = self._threads.submit(right.send, left.address, b"%d" % number)
                for _ in range(draw.randrange(20)):
                    self._came[left].extend(left.poll())
                returned.clear()
                if self._arrived(b"%d" % number)[0] not in self._came[left]:
                    assert returned.wait(LONG_S / 2), "a frame is there, and the wait goes on"
                assert sent.result()
                self._until(left, *self._arrived(b"%d" % number))

    def test_one_thread_waits_while_another_makes_all_other_calls(self) -> None:
        """Two seconds of frames, to itself and to a peer: each arrives once, in order."""
        ends, sent = self._pair(), [0, 0]
        with self._waiting(ends[0]):
            until = time.monotonic() + 2
            while time.monotonic() < until:
                for number, end in enumerate(ends):
                    sent[number] += ends[0].send(end.address, b"%d" % sent[number])
                    self._came[end].extend(end.poll())
        for end, number in zip(ends, sent, strict=True):
            frames = self._arrived(*(b"%d" % i for i in range(number)))
            assert [one for one in self._until(end, frames[-1]) if isinstance(one, Arrived)] == frames
