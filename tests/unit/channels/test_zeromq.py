"""What only the ZeroMQ channel promises."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from disagg_kv.channels import MAX_FRAME, MAX_TOGETHER, Arrived, Closed, Opened, Rejected, ZmqChannel
from disagg_kv.errors import ConfigurationError
from tests.support.channels import child_inbox, read_line, take, unused_port, wait_for
from tests.support.leftovers import given_back, held


@pytest.fixture
def channel() -> Iterator[ZmqChannel]:
    with closing(ZmqChannel()) as channel:
        yield channel


@pytest.fixture(params=["tcp", "ipc"])
def bind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{tmp_path}/inbox"


class TestAnotherProcess:
    def test_frames_cross_to_another_process(self, channel: ZmqChannel, bind: str) -> None:
        with child_inbox(bind) as (child, address):
            assert channel.send(address, b"hello")
            assert read_line(child) == "hello"

    def test_the_death_of_a_process_is_reported(self, channel: ZmqChannel, bind: str) -> None:
        """Killed, not closed; and the process that takes over the address is found."""
        with child_inbox(bind) as (child, address):
            assert channel.send(address, b"hello")
            wait_for(channel, Opened(address))
            child.kill()
            wait_for(channel, Closed(address))
        with child_inbox(address) as (child, same):
            assert same == address
            wait_for(channel, Opened(address))
            assert channel.send(address, b"welcome back")
            assert read_line(child) == "welcome back"

    def test_frames_are_kept_until_an_address_opens_for_the_first_time(self, channel: ZmqChannel) -> None:
        address = f"tcp://127.0.0.1:{unused_port()}"
        assert channel.send(address, b"early")
        with closing(ZmqChannel(address)) as late:
            assert wait_for(late, Arrived(b"early")) == [Arrived(b"early")]


class TestTogether:
    def test_frames_for_one_address_arrive_each_in_order(self, channel: ZmqChannel) -> None:
        frames = [b"%d" % i for i in range(MAX_TOGETHER)]
        with closing(ZmqChannel()) as other:
            assert other.send_all(channel.address, frames)
            assert wait_for(channel, Arrived(frames[-1])) == [Arrived(frame) for frame in frames]

    @pytest.mark.parametrize("frames", [[], [b""] * (MAX_TOGETHER + 1), [b"x", b"x" * MAX_FRAME]])
    def test_what_the_other_side_would_refuse_is_refused_before_anything_is_sent(
        self, channel: ZmqChannel, frames: list[bytes]
    ) -> None:
        with closing(ZmqChannel()) as other:
            with pytest.raises(ConfigurationError):
                other.send_all(channel.address, frames)
            assert other.send(channel.address, b"next")
            assert wait_for(channel, Arrived(b"next")) == [Arrived(b"next")]


class TestStrangers:
    @pytest.fixture
    def stranger(self, channel: ZmqChannel) -> Iterator[zmq.Socket[bytes]]:
        with zmq.Context() as context, context.socket(zmq.PUSH) as push:
            push.setsockopt(zmq.LINGER, 0)
            push.connect(channel.address)
            yield push

    def test_what_is_no_control_frame_is_dropped_and_counted(
        self, channel: ZmqChannel, stranger: zmq.Socket[bytes]
    ) -> None:
        stranger.send(b"x" * (MAX_FRAME + 1))
        stranger.send_multipart([b"fine", b"x" * (MAX_FRAME - 3)])
        stranger.send_multipart([b"fine"] * (MAX_TOGETHER + 1))
        stranger.send_multipart([b"fine"] * 100_000)
        stranger.send(b"fine")
        came = wait_for(channel, Arrived(b"fine"))
        assert [e for e in came if not isinstance(e, Rejected)] == [Arrived(b"fine")]
        assert sum(e.messages for e in came if isinstance(e, Rejected)) == 4

    def test_a_huge_message_is_cut_off_and_others_are_still_heard(
        self, channel: ZmqChannel, stranger: zmq.Socket[bytes]
    ) -> None:
        stranger.send(b"x" * (2 * MAX_FRAME + 1))
        with closing(ZmqChannel()) as friend:
            assert friend.send(channel.address, b"fine")
            assert wait_for(channel, Arrived(b"fine")) == [Arrived(b"fine")]

    def test_a_listener_that_does_not_speak_the_protocol_makes_no_news(self, channel: ZmqChannel) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
            assert channel.send(address, b"hello")
            for _ in range(2):
                server.accept()[0].close()
                assert not take(channel, 60)


class TestAddresses:
    def test_any_free_port_becomes_the_real_one(self, channel: ZmqChannel) -> None:
        port = int(channel.address.removeprefix("tcp://127.0.0.1:"))
        assert 0 < port < 65536

    def test_localhost_and_ipv6_loopback_are_local(self) -> None:
        with closing(ZmqChannel("tcp://localhost:0")) as named, closing(ZmqChannel("tcp://[::1]:0")) as six:
            assert named.send(six.address, b"hello")
            wait_for(six, Arrived(b"hello"))

    @pytest.mark.parametrize(
        "bind", ["tcp://0.0.0.0:0", "tcp://10.0.0.1:0", "tcp://*:0", "tcp://[::]:0", "tcp://eth0:0"]
    )
    def test_frames_are_not_encrypted_so_they_do_not_leave_the_host(self, channel: ZmqChannel, bind: str) -> None:
        with pytest.raises(ConfigurationError, match="only loopback and ipc"):
            ZmqChannel(bind)
        assert not channel.send(bind, b"lost")

    @pytest.mark.parametrize(
        "bind",
        [
            "",
            "nowhere",
            "udp://127.0.0.1:0",
            "tcp://127.0.0.1:99999",
            "ipc://",
            "ipc://*",
            "ipc://@abstract",
            "tcp://[::1]",
        ],
    )
    def test_what_is_no_address_is_refused(self, bind: str) -> None:
        with pytest.raises(ConfigurationError, match="neither tcp"):
            ZmqChannel(bind)

    @pytest.mark.parametrize("bind", ["ipc:///nowhere/at/all", "ipc:///" + 200 * "x"])
    def test_an_address_that_cannot_be_bound_is_refused(self, bind: str) -> None:
        with pytest.raises(ConfigurationError, match="cannot be bound"):
            ZmqChannel(bind)

    def test_an_address_in_use_is_refused(self, bind: str) -> None:
        with closing(ZmqChannel(bind)) as first:
            with pytest.raises(ConfigurationError, match="in use"):
                ZmqChannel(first.address)
            with closing(ZmqChannel()) as other:
                assert other.send(first.address, b"still here")
                wait_for(first, Arrived(b"still here"))

    def test_options_out_of_range_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="high_water must be 1 to 2147483647, not 0"):
            ZmqChannel(high_water=0)


class TestNothingIsLeftBehind:
    def test_a_socket_file_is_its_owners_alone_and_goes_away(self, tmp_path: Path) -> None:
        path = tmp_path / "inbox"
        channel = ZmqChannel(f"ipc://{path}")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        channel.close()
        assert not path.exists()

    def test_the_socket_file_of_a_killed_process_is_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "inbox"
        with child_inbox(f"ipc://{path}") as (child, _):
            child.kill()
        assert path.exists()
        ZmqChannel(f"ipc://{path}").close()
        assert not path.exists()

    def test_a_file_that_is_no_socket_is_left_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "precious"
        path.write_text("data")
        with pytest.raises(ConfigurationError, match="no socket"):
            ZmqChannel(f"ipc://{path}")
        assert path.read_text() == "data"

    def test_close_ends_every_thread_and_file(self, bind: str) -> None:
        before = held()
        with closing(ZmqChannel(bind)) as left, closing(ZmqChannel()) as right:
            assert left.send(right.address, b"there")
            wait_for(right, Arrived(b"there"))
            assert right.send(left.address, b"and back")
            wait_for(left, Arrived(b"and back"))
            assert left.send(f"tcp://127.0.0.1:{unused_port()}", b"nobody")
        given_back(before)


def test_other_hosts_are_reached_only_where_that_was_asked_for() -> None:
    """The option's name says what it does; without it nothing is bound to, or sent to, another address."""
    with closing(ZmqChannel()) as careful:
        assert not careful.send("tcp://192.0.2.1:9", b"frame")
    with closing(ZmqChannel("tcp://0.0.0.0:0", advertise="host", unencrypted_network=True)) as open_to_all:
        assert open_to_all.address.startswith("tcp://host:")
        assert open_to_all.send("tcp://192.0.2.1:9", b"frame")
