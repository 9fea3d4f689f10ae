"""What only the channel over Unix-domain sockets promises."""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from disagg_kv.channels import MAX_FRAME, MAX_TOGETHER, Arrived, Closed, Denied, News, Opened, Rejected, UnixChannel
from disagg_kv.channels.unix import RECONNECT_S
from disagg_kv.errors import ConfigurationError
from tests.support.channels import child_inbox, read_line, take, wait_for
from tests.support.leftovers import given_back, held

NOBODY = 65534


class Short:
    """A socket for which the kernel has no memory once."""

    def __init__(self, sock: socket.socket | None) -> None:
        self._sock = sock
        self._failures = [OSError(errno.ENOBUFS, "injected")]

    def send(self, data: bytes, flags: int) -> int:
        assert self._sock is not None
        if self._failures:
            raise self._failures.pop()
        return self._sock.send(data, flags)

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)


class Full:
    """The kernel, where a user waits for as many sockets as ``/proc/sys/fs/epoll/max_user_watches`` allows."""

    def __init__(self, epoll: select.epoll, refused: int) -> None:
        self._epoll = epoll
        self._refused = refused

    def register(self, sock: socket.socket, events: int) -> None:
        if self._refused:
            self._refused -= 1
            raise OSError(errno.ENOSPC, "injected")
        self._epoll.register(sock, events)

    def __getattr__(self, name: str) -> object:
        return getattr(self._epoll, name)


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[UnixChannel]:
    with closing(UnixChannel(f"unix://{tmp_path}/inbox")) as channel:
        yield channel


class TestAnotherProcess:
    def test_the_death_of_a_process_is_reported_and_its_successor_found(
        self, channel: UnixChannel, tmp_path: Path
    ) -> None:
        """Killed, not closed."""
        with child_inbox(f"unix://{tmp_path}/child") as (child, address):
            assert channel.send(address, b"hello")
            assert read_line(child) == "hello"
            child.kill()
            wait_for(channel, Closed(address))
            assert not channel.send(address, b"lost")
        with child_inbox(address) as (child, same):
            assert same == address
            wait_for(channel, Opened(address))
            assert channel.send(address, b"welcome back")
            assert read_line(child) == "welcome back"

    def test_last_words_come_before_the_end_of_who_said_them(self, channel: UnixChannel, tmp_path: Path) -> None:
        with closing(UnixChannel(f"unix://{tmp_path}/other")) as other:
            assert channel.send(other.address, b"hello")
            wait_for(channel, Opened(other.address))
            assert other.send_all(channel.address, [b"a", b"b"])
        assert list(take(channel, 1)) == [Arrived(b"a"), Arrived(b"b"), Closed(other.address)]

    def test_frames_are_kept_until_an_address_opens_for_the_first_time(
        self, channel: UnixChannel, tmp_path: Path
    ) -> None:
        address = f"unix://{tmp_path}/late"
        assert channel.send(address, b"early")
        with closing(UnixChannel(address)) as late:
            wait_for(channel, Opened(address))
            assert wait_for(late, Arrived(b"early")) == [Arrived(b"early")]

    def test_it_is_tried_ever_more_slowly(self, channel: UnixChannel, tmp_path: Path) -> None:
        """Who is not there costs no core."""
        assert channel.send(f"unix://{tmp_path}/nobody", b"early")
        wait_for(channel, Closed(f"unix://{tmp_path}/nobody"))
        began, polls = time.monotonic(), 0
        while time.monotonic() < began + 4 * RECONNECT_S[0]:
            assert not take(channel, 60)
            polls += 1
        assert polls <= 3

    def test_what_one_sender_says_is_heard_in_order_whatever_connections_it_uses(
        self, channel: UnixChannel, tmp_path: Path
    ) -> None:
        with closing(UnixChannel(f"unix://{tmp_path}/other")) as other:
            for word in (b"1", b"2", b"3"):
                assert other.send(channel.address, word)
                other.forget(channel.address)
            assert list(take(channel, 1)) == [Arrived(b"1"), Arrived(b"2"), Arrived(b"3")]

    def test_last_words_of_who_was_not_accepted_yet_come_before_its_end(
        self, channel: UnixChannel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It calls, speaks and ends between two looks of one poll."""
        with closing(UnixChannel(f"unix://{tmp_path}/other")) as other:
            assert channel.send(other.address, b"hello")
            wait_for(channel, Opened(other.address))
            receive = channel._receive

            def meanwhile(*args: object) -> bool:
                monkeypatch.setattr(channel, "_receive", receive)
                assert other.send(channel.address, b"last words")
                return True

            monkeypatch.setattr(channel, "_receive", meanwhile)
            other.wake()
            address = other.address
            assert not channel.poll()
            other.close()
        assert wait_for(channel, Closed(address)) == [Arrived(b"last words"), Closed(address)]

    def test_who_calls_and_ends_without_a_word_while_another_ends_is_no_matter(
        self, channel: UnixChannel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is accepted in the middle of a poll, and hung up there."""
        with closing(UnixChannel(f"unix://{tmp_path}/other")) as other:
            assert channel.send(other.address, b"hello")
            assert other.send(channel.address, b"first")
            wait_for(channel, Opened(other.address), Arrived(b"first"))
            receive = channel._receive

            def meanwhile(callers: Iterable[object], came: list[News]) -> bool:
                monkeypatch.setattr(channel, "_receive", receive)
                with socket.socket(socket.AF_UNIX) as caller:
                    caller.connect(channel.address.removeprefix("unix://"))
                return receive(callers, came)  # type: ignore[arg-type]

            monkeypatch.setattr(channel, "_receive", meanwhile)
            assert other.send(channel.address, b"last words")
        assert list(take(channel, 1)) == [Arrived(b"last words"), Closed(other.address)]

    def test_a_moment_without_memory_loses_nothing(
        self, channel: UnixChannel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The kernel says ENOBUFS, once."""
        with closing(UnixChannel(f"unix://{tmp_path}/other")) as other:
            assert channel.send(other.address, b"hello")
            wait_for(channel, Opened(other.address))
            link = channel._links[other.address]
            monkeypatch.setattr(link, "sock", Short(link.sock))
            assert channel.send(other.address, b"later")
            take(channel, 0.1)
            assert wait_for(other, Arrived(b"later"))[-1] == Arrived(b"later")


class TestStrangers:
    @pytest.fixture
    def stranger(self, channel: UnixChannel) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(channel.address.removeprefix("unix://"))
            yield sock

    @pytest.mark.parametrize(
        "garbage",
        [
            struct.pack("<I", 0),
            struct.pack("<I", MAX_TOGETHER + 1),
            struct.pack("<2I", 1, MAX_FRAME + 1),
            struct.pack("<3I", 2, MAX_FRAME, 1),
            b"GET / HTTP/1.1\r\n\r\n",
        ],
    )
    def test_what_is_no_message_cuts_the_connection_and_is_counted(
        self, channel: UnixChannel, stranger: socket.socket, garbage: bytes, tmp_path: Path
    ) -> None:
        """And others are still heard."""
        stranger.sendall(garbage)
        wait_for(channel, Rejected(messages=1))
        assert stranger.recv(1) == b""
        with closing(UnixChannel(f"unix://{tmp_path}/friend")) as friend:
            assert friend.send(channel.address, b"fine")
            assert wait_for(channel, Arrived(b"fine")) == [Arrived(b"fine")]

    def test_a_message_may_come_in_any_pieces(self, channel: UnixChannel, stranger: socket.socket) -> None:
        whole = struct.pack("<3I", 2, 2, 3) + b"abcde" + struct.pack("<2I", 1, 0)
        came: list[object] = []
        for byte in whole:
            stranger.sendall(bytes([byte]))
            came += take(channel, 0.001)
        assert came == [Arrived(b"ab"), Arrived(b"cde"), Arrived(b"")]

    def test_a_message_that_never_ends_is_dropped_with_its_connection(
        self, channel: UnixChannel, stranger: socket.socket
    ) -> None:
        stranger.sendall(struct.pack("<2I", 1, 100) + b"half")
        stranger.close()
        assert not take(channel, 0.01)
        assert not channel.poll()

    def test_who_speaks_where_nobody_answers_is_cut(self, channel: UnixChannel, tmp_path: Path) -> None:
        """Connections have one direction: what comes back on one is nothing that we asked for."""
        path = tmp_path / "talker"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(str(path))
            server.listen()
            assert channel.send(f"unix://{path}", b"hello")
            peer, _ = server.accept()
            with peer:
                peer.sendall(b"who are you?")
                wait_for(channel, Opened(f"unix://{path}"), Closed(f"unix://{path}"))

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
    def test_other_users_are_neither_heard_nor_talked_to(self) -> None:
        """Also where somebody has opened the file for everybody."""
        script = (
            "import os, socket, sys\n"
            f"os.setuid({NOBODY})\n"
            "with socket.socket(socket.AF_UNIX) as caller, socket.socket(socket.AF_UNIX) as server:\n"
            "    server.bind(sys.argv[2])\n"
            "    server.listen()\n"
            "    caller.connect(sys.argv[1])\n"
            "    print('there', flush=True)\n"
            "    sys.stdin.read()\n"
        )
        with tempfile.TemporaryDirectory() as folder, closing(UnixChannel(f"unix://{folder}/inbox")) as channel:
            os.chmod(folder, 0o777)
            os.chmod(f"{folder}/inbox", 0o666)
            command = [sys.executable, "-c", script, f"{folder}/inbox", f"{folder}/theirs"]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
                assert read_line(child) == "there"
                wait_for(channel, Rejected(connections=1))
                assert not channel.send(f"unix://{folder}/theirs", b"secret")
                assert list(channel.poll()) == [Denied(f"unix://{folder}/theirs")]
                assert child.stdin is not None
                child.stdin.close()

    def test_a_connection_for_which_the_kernel_has_no_place_is_refused(
        self, channel: UnixChannel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is closed and counted; the next one is heard."""
        monkeypatch.setattr(channel, "_epoll", Full(channel._epoll, 1))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as refused:
            refused.connect(str(tmp_path / "inbox"))
            wait_for(channel, Rejected(connections=1))
            assert refused.recv(1) == b""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.connect(str(tmp_path / "inbox"))
            caller.sendall(struct.pack("<2I", 1, 5) + b"hello")
            wait_for(channel, Arrived(b"hello"))

    def test_an_address_is_tried_again_where_the_kernel_has_no_place(
        self, channel: UnixChannel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is sent meanwhile waits, as before every first connection."""
        monkeypatch.setattr(channel, "_epoll", Full(channel._epoll, 1))
        with closing(UnixChannel(f"unix://{tmp_path}/other")) as other:
            assert channel.send(other.address, b"hello")
            wait_for(channel, Opened(other.address))
            wait_for(other, Arrived(b"hello"))

    def test_a_flood_of_empty_frames_keeps_nobody_else_waiting(
        self, channel: UnixChannel, stranger: socket.socket, tmp_path: Path
    ) -> None:
        """One poll takes a bounded number, of everybody some, and what is to leave leaves."""
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        stranger.setblocking(False)
        empty = struct.pack(f"<{1 + MAX_TOGETHER}I", MAX_TOGETHER, *[0] * MAX_TOGETHER)
        ended = threading.Event()

        def flood() -> None:
            while not ended.is_set():
                try:
                    stranger.send(empty * 4096)
                except BlockingIOError:
                    time.sleep(1e-4)

        with closing(UnixChannel(f"unix://{tmp_path}/friend")) as friend:
            thread = threading.Thread(target=flood)
            thread.start()
            try:
                came = take(channel, 1)
                assert friend.send(channel.address, b"help")
                assert channel.send(friend.address, b"coming")
                most = len(came)
                while Arrived(b"help") not in came:
                    came = take(channel, 1)
                    most = max(most, len(came))
                assert most < 200_000
                wait_for(friend, Arrived(b"coming"))
            finally:
                ended.set()
                thread.join()


class TestAddresses:
    @pytest.mark.parametrize("bind", ["", "/path", "unix:path", "unix://", "ipc:///path", "tcp://127.0.0.1:0"])
    def test_what_is_no_address_is_refused(self, bind: str) -> None:
        with pytest.raises(ConfigurationError, match="not unix:///path"):
            UnixChannel(bind)

    @pytest.mark.parametrize("bind", ["unix:///nowhere/at/all", "unix:///" + 200 * "x"])
    def test_an_address_that_cannot_be_bound_is_refused(self, bind: str) -> None:
        before = held()
        with pytest.raises(ConfigurationError, match="cannot be bound"):
            UnixChannel(bind)
        given_back(before)

    @pytest.mark.parametrize("path", ["/tmp/a\0b", "/tmp/\ud800"])
    def test_a_path_that_cannot_be_is_no_address(self, channel: UnixChannel, path: str) -> None:
        with pytest.raises(ConfigurationError, match=r"cannot be (bound|encoded)"):
            UnixChannel(f"unix://{path}")
        assert not channel.send(f"unix://{path}", b"lost")

    def test_any_time_can_be_waited(self, channel: UnixChannel) -> None:
        channel.wake()
        channel.wait(float("inf"))

    def test_of_many_who_want_an_address_one_has_it(self, tmp_path: Path) -> None:
        """And it can be reached there."""
        for number in range(20):
            address, start = f"unix://{tmp_path}/{number}", threading.Barrier(4)
            made: list[UnixChannel] = []

            def bind(address: str, made: list[UnixChannel], start: threading.Barrier) -> None:
                start.wait()
                with suppress(ConfigurationError):
                    made.append(UnixChannel(address))

            threads = [threading.Thread(target=bind, args=(address, made, start)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            (only,) = made
            with closing(only):
                assert only.send(address, b"to myself")
                wait_for(only, Arrived(b"to myself"))

    def test_who_has_stopped_accepting_is_still_there(self, tmp_path: Path) -> None:
        path = tmp_path / "full"
        with socket.socket(socket.AF_UNIX) as server, ExitStack() as callers:
            server.bind(str(path))
            server.listen(0)
            for _ in range(3):
                caller = callers.enter_context(socket.socket(socket.AF_UNIX))
                caller.setblocking(False)
                caller.connect_ex(str(path))
            with pytest.raises(ConfigurationError, match="in use"):
                UnixChannel(f"unix://{path}")

    def test_an_address_in_use_is_refused(self, channel: UnixChannel) -> None:
        with pytest.raises(ConfigurationError, match="in use"):
            UnixChannel(channel.address)

    def test_options_out_of_range_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="high_water must be at least 1, not 0"):
            UnixChannel(f"unix://{tmp_path}/x", high_water=0)


class TestNothingIsLeftBehind:
    def test_the_file_of_a_successor_is_not_ours(self, tmp_path: Path) -> None:
        """Somebody has removed ours."""
        path = tmp_path / "inbox"
        first = UnixChannel(f"unix://{path}")
        path.unlink()
        with closing(UnixChannel(f"unix://{path}")):
            first.close()
            assert path.exists()
        assert not path.exists()

    def test_a_socket_file_is_its_owners_alone_and_goes_away(self, tmp_path: Path) -> None:
        path = tmp_path / "inbox"
        channel = UnixChannel(f"unix://{path}")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        channel.close()
        assert not path.exists()

    def test_the_socket_file_of_a_killed_process_is_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "inbox"
        with child_inbox(f"unix://{path}") as (child, _):
            child.kill()
        assert path.exists()
        UnixChannel(f"unix://{path}").close()
        assert not path.exists()

    def test_a_file_that_is_no_socket_is_left_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "precious"
        path.write_text("data")
        with pytest.raises(ConfigurationError, match="no socket"):
            UnixChannel(f"unix://{path}")
        assert path.read_text() == "data"

    def test_close_gives_everything_back(self, tmp_path: Path) -> None:
        before = held()
        with (
            closing(UnixChannel(f"unix://{tmp_path}/left")) as left,
            closing(UnixChannel(f"unix://{tmp_path}/right")) as right,
        ):
            assert left.send(right.address, b"there")
            wait_for(right, Arrived(b"there"))
            assert right.send(left.address, b"and back")
            wait_for(left, Arrived(b"and back"))
            assert left.send(f"unix://{tmp_path}/nobody", b"nobody")
        given_back(before)

    def test_without_descriptors_an_end_is_told_and_words_are_heard(self, channel: UnixChannel, tmp_path: Path) -> None:
        """Somebody calls in the same moment, and nobody can be accepted."""
        with ExitStack() as stack:
            leaving, friend = (
                stack.enter_context(closing(UnixChannel(f"unix://{tmp_path}/{name}"))) for name in ("a", "b")
            )
            assert channel.send(leaving.address, b"hello")
            assert friend.send(channel.address, b"first")
            wait_for(channel, Opened(leaving.address), Arrived(b"first"))
            caller = stack.enter_context(socket.socket(socket.AF_UNIX))
            leaving.close()
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            with open(os.devnull) as file:
                resource.setrlimit(resource.RLIMIT_NOFILE, (file.fileno(), hard))
            try:
                caller.connect(channel.address.removeprefix("unix://"))
                assert friend.send(channel.address, b"words")
                assert wait_for(channel, Closed(leaving.address)) == [Arrived(b"words"), Closed(leaving.address)]
                assert not take(channel, 0.2)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def test_without_descriptors_nobody_is_lost(self, channel: UnixChannel, tmp_path: Path) -> None:
        """Who calls waits until there are some again, and so does who wants to call."""
        with ExitStack() as stack:
            other = stack.enter_context(closing(UnixChannel(f"unix://{tmp_path}/other")))
            assert other.send(channel.address, b"hello")
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            with open(os.devnull) as file:
                resource.setrlimit(resource.RLIMIT_NOFILE, (file.fileno(), hard))
            try:
                assert not take(channel, 0.01)
                assert channel.send(other.address, b"and back")
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert wait_for(channel, Opened(other.address), Arrived(b"hello"))
            wait_for(other, Arrived(b"and back"))
