"""What a demo of two hosts refuses, and how it ends when the other host's processes do not begin."""

from __future__ import annotations

import pytest

from disagg_kv.engines.hf.demo import DemoConfig, run_demo
from disagg_kv.errors import ConfigurationError, PeerLostError


def test_a_demo_of_two_hosts_needs_both_addresses() -> None:
    """Nobody elsewhere reaches 127.0.0.1."""
    with pytest.raises(ConfigurationError, match=r"decode_host '10\.213\.77\.2' cannot reach each other"):
        DemoConfig(decode_host="10.213.77.2")


def test_a_launch_command_that_there_is_not_is_named() -> None:
    """Before anything waits for it."""
    with pytest.raises(ConfigurationError, match="there is no command 'netns-of-nobody'"):
        run_demo(DemoConfig(decode_launch=("netns-of-nobody", "exec")))


def test_a_launch_command_that_fails_ends_the_demo_on_both_hosts() -> None:
    """Prefill's processes do not wait for decode's, which never begin."""
    with pytest.raises(PeerLostError, match=r"could not be run \(exit code 1\)"):
        run_demo(DemoConfig(decode_launch=("false",), timeout_s=100.0))
