"""Every channel passes the suite; ZeroMQ's channels stand its threads in a process of their own too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from disagg_kv.channels import Channel, Hub, InprocChannel, Keys, UnixChannel, ZmqChannel
from disagg_kv.testing.channel import ChannelSuite

HIGH_WATER = 100


class TestInproc(ChannelSuite):
    hub = Hub(HIGH_WATER)

    def open(self, folder: Path, name: str) -> Channel:
        return InprocChannel(self.hub, name)


class TestUnix(ChannelSuite):
    def open(self, folder: Path, name: str) -> Channel:
        return UnixChannel(f"unix://{folder}/{name}", high_water=HIGH_WATER)


class TestTcp(ChannelSuite):
    def open(self, folder: Path, name: str) -> Channel:
        return ZmqChannel(high_water=HIGH_WATER)


class TestIpc(ChannelSuite):
    def open(self, folder: Path, name: str) -> Channel:
        return ZmqChannel(f"ipc://{folder}/{name}", high_water=HIGH_WATER)


class TestKeys(ChannelSuite):
    keys = Keys.new()

    def open(self, folder: Path, name: str) -> Channel:
        return ZmqChannel(keys=self.keys, high_water=HIGH_WATER)


@pytest.mark.slow
def test_a_process_survives_a_wait_beside_all_other_calls() -> None:
    """Two threads in one ZeroMQ socket would end it by a signal."""
    promise = ChannelSuite.test_one_thread_waits_while_another_makes_all_other_calls.__name__
    suites = [f"{__file__}::{suite.__name__}::{promise}" for suite in (TestTcp, TestIpc, TestKeys)]
    ended = subprocess.run([sys.executable, "-m", "pytest", "-q", *suites], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
