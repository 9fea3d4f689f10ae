"""What every :class:`~disagg_kv.channels.Channel` must do beside threads: a suite to inherit.

::

    class TestMine(ChannelSuite):
        def open(self, folder, name):
            return MyChannel(f"my://{folder}/{name}")

Needs pytest.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from ..channels import MAX_FRAME, Arrived, Channel

LONG_S = 120.0
"""A time that no test needs whole, in seconds."""


class ChannelSuite:
    """Promises of a channel. Subclasses say how one is opened, with room for at most 1,000 frames to an address."""

    def open(self, folder: Path, name: str) -> Channel:
        """A new inbox. ``folder`` is the same for all of a test, and empty at first."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _pair(self, tmp_path: Path) -> Iterator[None]:
        with (
            closing(self.open(tmp_path, "left")) as self.left,
            closing(self.open(tmp_path, "right")) as self.right,
            ThreadPoolExecutor() as self.threads,
        ):
            yield

    def received(self, channel: Channel, number: int) -> list[bytes]:
        """Poll both channels until one has this number of frames; the other one's are dropped."""
        frames, until = list[bytes](), time.monotonic() + LONG_S
        while len(frames) < number:
            assert time.monotonic() < until, f"{len(frames)} frames of {number} have come"
            for one in (self.left, self.right):
                one.wait(0.001)
                frames += [event.frame for event in one.poll() if isinstance(event, Arrived) and one is channel]
        return frames

    @contextmanager
    def _waiting(self) -> Iterator[threading.Event]:
        """A thread waits again and again, and sets the event after each wait; threads take turns every microsecond."""
        ended, returned, interval = threading.Event(), threading.Event(), sys.getswitchinterval()

        def wait() -> None:
            while not ended.is_set():
                self.left.wait(LONG_S)
                returned.set()

        thread = self.threads.submit(wait)
        sys.setswitchinterval(1e-6)
        try:
            yield returned
        finally:
            sys.setswitchinterval(interval)
            ended.set()
            self.left.wake()
        thread.result(LONG_S / 2)

    def test_frames_that_are_taken_arrive_whole_and_in_order(self) -> None:
        """Of every size. A peer that does not poll costs a bounded queue: ``send`` returns False, and never waits."""
        frames = [b"", b"x", bytes(MAX_FRAME)]
        assert all(self.left.send(self.right.address, frame) for frame in frames)
        while self.left.send(self.right.address, frame := b"%d" % len(frames) + bytes(MAX_FRAME // 2)):
            frames.append(frame)
        assert self.received(self.right, len(frames)) == frames

    def test_wake_ends_a_wait_that_goes_on_or_the_next_one(self) -> None:
        """Also a wait on another thread, and although its owner polls meanwhile, again and again."""
        self.left.wake()
        self.left.poll()
        self.left.wait(LONG_S)
        for number in range(200):
            one = self.threads.submit(self.left.wait, LONG_S)
            while number % 2 and not one.running():
                time.sleep(0)
            self.left.wake()
            until = time.monotonic() + LONG_S / 2
            while not one.done():
                assert time.monotonic() < until, "a wait goes on although it was waked"
                assert not self.left.poll()
        waits = [self.threads.submit(self.left.wait, LONG_S) for _ in range(3)]
        until = time.monotonic() + LONG_S / 2
        while not all(one.done() for one in waits):
            assert time.monotonic() < until, "a wait goes on"
            self.left.wake()

    def test_close_ends_every_wait(self, tmp_path: Path) -> None:
        """However little earlier it began, and although another inbox is opened at once."""
        for number in range(50):
            channel = self.open(tmp_path, f"{number}")
            waits = [self.threads.submit(channel.wait, LONG_S) for _ in range(2)]
            channel.close()
            self.open(tmp_path, f"{number} again").close()
            for one in waits:
                one.result(LONG_S / 2)
            channel.wait(LONG_S)

    def test_a_frame_that_comes_just_after_a_poll_ends_a_wait(self) -> None:
        """Five hundred times; no wait lasts until its time is over."""
        assert self.right.send(self.left.address, b"")
        self.received(self.left, 1)
        with self._waiting() as returned:
            for number in range(500):
                sent = self.threads.submit(self.right.send, self.left.address, b"")
                came = any(Arrived in map(type, self.left.poll()) for _ in range(number % 20))
                returned.clear()
                if not came:
                    assert returned.wait(LONG_S / 2), "a frame is there, and the wait goes on"
                assert sent.result()
                self.received(self.left, 1 - came)

    def test_one_thread_waits_while_another_makes_all_other_calls(self) -> None:
        """Two seconds of frames, to itself and to a peer: each arrives once, in order."""
        ends, came, sent = (self.left, self.right), (list[bytes](), list[bytes]()), [0, 0]
        with self._waiting():
            until = time.monotonic() + 2
            while (left_s := until - time.monotonic()) > 0 or sum(sent) > sum(map(len, came)):
                assert left_s > -LONG_S, f"of {sent} frames, {[*map(len, came)]} have come"
                for end, (channel, frames) in enumerate(zip(ends, came, strict=True)):
                    sent[end] += left_s > 0 and self.left.send(channel.address, b"%d" % sent[end])
                    frames += [event.frame for event in channel.poll() if isinstance(event, Arrived)]
        assert [*came] == [[b"%d" % i for i in range(number)] for number in sent]
