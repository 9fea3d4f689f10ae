"""Addresses that peers can reach, and those that a channel cannot send to."""

from __future__ import annotations

import socket
import time
from contextlib import closing
from pathlib import Path

import pytest

from disagg_kv import CacheSpec, DecodeEndpoint, PagedPool, PrefillEndpoint, Source, room_id, shard
from disagg_kv.channels import Channel, Denied, Keys, UnixChannel, ZmqChannel
from disagg_kv.channels.advertise import ANY, reached_at
from disagg_kv.errors import ConfigurationError
from disagg_kv.rendezvous import StaticRendezvous
from disagg_kv.transports import InprocTransport
from tests.support.channels import take

EVERYWHERE = "tcp://0.0.0.0:0"


def test_a_name_is_advertised_with_the_port_that_was_bound() -> None:
    """And with its own port where peers reach it by another one; keys stay at the end."""
    with closing(ZmqChannel(EVERYWHERE, advertise="node7", unencrypted_network=True)) as channel:
        assert channel.address.startswith("tcp://node7:")
        assert not channel.address.endswith(":0")
    keys = Keys.new()
    with closing(ZmqChannel(EVERYWHERE, advertise="[2001:db8::7]:4000", keys=keys)) as channel:
        assert channel.address == f"tcp://[2001:db8::7]:4000#{keys.public}"


def test_frames_reach_a_channel_at_the_address_that_it_advertises() -> None:
    """It listens at every address of the host."""
    with (
        closing(ZmqChannel(EVERYWHERE, advertise="127.0.0.1", unencrypted_network=True)) as bound,
        closing(ZmqChannel()) as other,
    ):
        assert other.send(bound.address, b"hello")
        until = time.monotonic() + 60
        while not take(bound, 1.0):
            assert time.monotonic() < until


def test_without_a_name_the_address_of_the_route_to_others_is_advertised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without such a route says what to give."""
    monkeypatch.setitem(ANY, "0.0.0.0", (socket.AF_INET, "127.0.0.1"))
    assert reached_at("bind", "tcp://0.0.0.0:5", None) == "tcp://127.0.0.1:5"
    assert reached_at("bind", "tcp://127.0.0.1:5", None) == "tcp://127.0.0.1:5"
    monkeypatch.setitem(ANY, "[::]", (socket.AF_INET6, "::1"))
    assert reached_at("bind", "tcp://[::]:5", None) == "tcp://[::1]:5"
    monkeypatch.setitem(ANY, "0.0.0.0", (socket.AF_INET, "255.255.255.255"))
    with pytest.raises(ConfigurationError, match=r"channel 'tcp://0.0.0.0:0': peers cannot reach 0.0.0.0.*advertise="):
        ZmqChannel(EVERYWHERE, unencrypted_network=True)


@pytest.mark.parametrize("name", ["0.0.0.0", "*", "[::]", "a b", "::1", "tcp://host", "host:port", "host:99999"])
def test_what_no_peer_can_reach_is_not_advertised(name: str) -> None:
    """Refused by name."""
    with pytest.raises(ConfigurationError, match=r"channel 'tcp://127.0.0.1:0': advertise '"):
        ZmqChannel(advertise=name, unencrypted_network=True)


def test_other_hosts_are_advertised_only_where_they_are_allowed(tmp_path: Path) -> None:
    """Not without keys; and a file has no host."""
    with pytest.raises(ConfigurationError, match=r"advertise '10\.0\.0\.5': without keys"):
        ZmqChannel(advertise="10.0.0.5")
    with pytest.raises(ConfigurationError, match="advertise 'node7' is for tcp addresses"):
        ZmqChannel(f"ipc://{tmp_path}/inbox", advertise="node7")
    with pytest.raises(ConfigurationError, match="advertise"):
        ZmqChannel(advertise=7)  # type: ignore[arg-type]


def test_a_channel_says_at_once_which_addresses_it_does_not_speak(tmp_path: Path) -> None:
    """Once for each address, however many frames were meant for it."""
    with closing(ZmqChannel()) as tcp, closing(UnixChannel(f"unix://{tmp_path}/a")) as unix:
        for channel, address, reason in (
            (tcp, "unix:///b", "a ZeroMQ channel does not send there: neither tcp://host:port nor ipc:///path"),
            (unix, "tcp://127.0.0.1:5", "a Unix-socket channel sends to unix:///path alone"),
            (unix, f"unix:///{'b' * 107}", "a path of 108 bytes; a socket's has at most 107, and no zero byte"),
            (unix, "unix:///\ud800", "no file has this name"),
        ):
            assert not channel.send(address, b"hello")
            assert not channel.send(address, b"hello")
            assert list(take(channel, 60)) == [Denied(address, reason)]
            assert not channel.poll()


def test_sides_with_channels_of_two_kinds_fail_at_once_and_say_why(tmp_path: Path) -> None:
    """Not after ``silence_s``."""
    spec, where = CacheSpec.kv(num_layers=1, kv_heads=1, head_dim=8, dtype="float16"), StaticRendezvous()

    def pool() -> PagedPool:
        return PagedPool.allocate(spec, shard(spec), pages=4, page_size=4)

    channels: list[Channel] = [UnixChannel(f"unix://{tmp_path}/prefill"), ZmqChannel()]
    prefill = PrefillEndpoint(
        pool(), transport=InprocTransport(), channel=channels[0], rendezvous=where, instance="P", slots=2,
        slot_bytes=4096,
    )  # fmt: skip
    decode = DecodeEndpoint(
        pool(), transport=InprocTransport(), channel=channels[1], rendezvous=where, instance="D", ring_bytes=1 << 16
    )
    with closing(prefill), closing(decode):
        room, until = decode.open(room_id("request"), Source("P")), time.monotonic() + 20
        while not room.released:
            decode.poll()
            assert time.monotonic() < until
            time.sleep(0.01)
    assert isinstance(room.error, ConfigurationError)
    assert f"unix://{tmp_path}/prefill: a ZeroMQ channel does not send there" in str(room.error)
