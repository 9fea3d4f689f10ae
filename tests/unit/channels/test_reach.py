"""Which channels endpoints of other hosts may reach."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from disagg_kv.channels import Channel, Hub, InprocChannel, Keys, UnixChannel, ZmqChannel
from disagg_kv.channels.reach import leaves_host, reached_at


@pytest.mark.parametrize(
    ("address", "leaves", "host"),
    [
        ("tcp://10.0.0.1:5", True, "10.0.0.1"),
        ("tcp://[2001:db8::1]:5", True, "2001:db8::1"),
        ("tcp://node-7:5", True, "node-7"),
        ("tcp://0.0.0.0:5", True, "0.0.0.0"),
        ("carrier://anything", True, ""),
        ("tcp://127.0.0.2:5", False, ""),
        ("tcp://[::1]:5", False, ""),
        ("tcp://localhost:5", False, ""),
        ("ipc:///run/x", False, ""),
    ],
)
def test_an_address_of_the_loopback_or_of_no_network_stays_on_the_host(address: str, leaves: bool, host: str) -> None:
    """What is not known may leave it. A key in the address changes nothing."""
    assert leaves_host(address) is leaves
    assert reached_at(address) == host
    keyed = f"{address}#{Keys.new().public}"
    assert (leaves_host(keyed), reached_at(keyed)) == (leaves, host)


def test_every_channel_of_the_library_stays_on_the_host_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    channels: list[Channel] = [
        ZmqChannel(),
        ZmqChannel(keys=Keys.new()),
        ZmqChannel(f"ipc://{tmp_path}/z"),
        UnixChannel(f"unix://{tmp_path}/u"),
        InprocChannel(Hub(), "i"),
    ]
    for channel in channels:
        with closing(channel):
            assert not leaves_host(channel.address)
