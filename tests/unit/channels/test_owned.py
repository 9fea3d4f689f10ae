"""The guard notices two threads in one channel or transport, and nothing else."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from disagg_kv.channels import Arrived, Hub, InprocChannel, SupportsBatches, ZmqChannel
from disagg_kv.transports import InprocTransport
from tests.support.owned import owned


class Stopping(InprocChannel):
    """A channel whose poll goes on until the test lets it return."""

    def __init__(self) -> None:
        super().__init__(Hub(), "stopping")
        self.inside, self.returns = threading.Event(), threading.Event()

    def poll(self) -> tuple[Arrived, ...]:
        self.inside.set()
        assert self.returns.wait(60)
        return ()


def test_a_call_beside_another_thread_s_call_fails() -> None:
    """The one that came first goes on, and afterwards either thread may call."""
    channel = owned(Stopping())
    with ThreadPoolExecutor() as threads, closing(channel):
        polled = threads.submit(channel.poll)
        assert channel.inside.wait(60)
        with pytest.raises(AssertionError, match="two threads"):
            channel.send("inproc://nowhere", b"")
        channel.returns.set()
        assert polled.result(60) == ()
        assert not channel.send("inproc://nowhere", b"")


def test_waits_beside_other_calls_and_calls_in_turn_are_fine() -> None:
    """``wait`` and ``wake`` belong to all threads."""
    channel = owned(ZmqChannel())
    with ThreadPoolExecutor() as threads, closing(channel):
        waiting = threads.submit(channel.wait, 60)
        assert channel.send(channel.address, b"frame")
        waiting.result(60)
        threads.submit(channel.poll).result(60)
        threads.submit(channel.wake).result(60)


def test_what_is_guarded_keeps_its_kind() -> None:
    """Its optional Protocols are found as before."""
    assert isinstance(owned(InprocTransport()), InprocTransport)
    with closing(owned(ZmqChannel())) as channel:
        assert isinstance(channel, SupportsBatches)
