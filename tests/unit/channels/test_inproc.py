"""What only the in-process channel promises."""

from __future__ import annotations

import threading

import pytest

from disagg_kv.channels import Arrived, Closed, Hub, InprocChannel, Opened
from disagg_kv.errors import ConfigurationError


def test_a_name_is_used_once_at_a_time() -> None:
    hub = Hub()
    first = InprocChannel(hub, "one")
    with pytest.raises(ConfigurationError, match="inproc://one"):
        InprocChannel(hub, "one")
    first.close()
    InprocChannel(hub, "one").close()


def test_a_hub_holds_at_least_one_frame() -> None:
    with pytest.raises(ConfigurationError, match="0 frames"):
        Hub(0)


def test_a_frame_is_there_when_send_returns() -> None:
    hub = Hub()
    left, right = InprocChannel(hub, "left"), InprocChannel(hub, "right")
    assert left.send(right.address, b"frame")
    assert right.poll() == (Arrived(b"frame"),)
    assert left.poll() == (Opened(right.address),)


def test_two_watchers_of_one_address_are_told_apart() -> None:
    hub = Hub()
    left, other = InprocChannel(hub, "left"), InprocChannel(hub, "other")
    assert not left.send("inproc://right", b"early")
    assert not other.send("inproc://right", b"early")
    left.forget("inproc://right")
    InprocChannel(hub, "right")
    assert left.poll() == ()
    assert other.poll() == (Closed("inproc://right"), Opened("inproc://right"))


def test_a_wake_in_the_middle_of_the_beginning_of_a_wait_ends_it() -> None:
    """Before the thread is among those that ``wake`` knows, it sees what ``wake`` did."""
    channel = InprocChannel(Hub(), "left")

    class Woken(list[object]):
        def append(self, one: object) -> None:
            channel.wake()
            super().append(one)

    channel._waiting = Woken()  # type: ignore[assignment]
    channel.wait(threading.TIMEOUT_MAX)
