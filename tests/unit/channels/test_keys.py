"""Channels with keys: who proves no allowed key gets nothing, and nobody speaks in another's name."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import zmq

from disagg_kv.channels import Arrived, Closed, Denied, Keys, News, Opened, Rejected, ZmqChannel, key_of, write_keys
from disagg_kv.errors import ConfigurationError
from tests.support.channels import take
from tests.support.leftovers import given_back, held


def friends() -> tuple[Keys, Keys]:
    """Two pairs that allow each other."""
    left, right = Keys.new(), Keys.new()
    return Keys(left.secret, frozenset({right.public})), Keys(right.secret, frozenset({left.public}))


def pump(*channels: ZmqChannel, until: Sequence[tuple[int, News]]) -> list[list[News]]:
    """Poll all, as their endpoints would, until each (index, event) came; the test's own timeout bounds it."""
    came: list[list[News]] = [[] for _ in channels]
    while not all(event in came[index] for index, event in until):
        for channel, of in zip(channels, came, strict=True):
            of.extend(take(channel, 0.01))
    return came


@pytest.fixture(params=["tcp", "ipc"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[ZmqChannel, ZmqChannel]]:
    """Two channels that allow each other."""
    binds = [f"ipc://{tmp_path}/{side}" if request.param == "ipc" else "tcp://127.0.0.1:0" for side in "lr"]
    with ExitStack() as stack:
        left, right = (
            stack.enter_context(closing(ZmqChannel(bind, keys=keys)))
            for bind, keys in zip(binds, friends(), strict=True)
        )
        yield left, right


@pytest.fixture
def stranger() -> Iterator[ZmqChannel]:
    with closing(ZmqChannel(keys=Keys.new())) as channel:
        yield channel


def refused(*channels: ZmqChannel) -> list[list[News]]:
    """Poll all until the last one has refused a connection; ZeroMQ tries again, so that it may be several by then."""
    came: list[list[News]] = [[] for _ in channels]
    while not any(isinstance(event, Rejected) and event.connections for event in came[-1]):
        for channel, of in zip(channels, came, strict=True):
            of.extend(take(channel, 0.01))
    return came


def ended(connection: socket.socket) -> bool:
    """Whether the other side has cut it; ZeroMQ's greeting may come first."""
    try:
        return not connection.recv(4096, socket.MSG_DONTWAIT)
    except ConnectionError:
        return True


ONE_SIDED = (
    "a ZeroMQ channel does not send there: the address has {}, and this channel {}; both sides need keys, or neither"
)


def plain(address: str) -> str:
    return address.removesuffix(f"#{key_of(address)}")


class TestFriends:
    def test_frames_come_with_the_key_that_their_sender_has_proved(self, pair: tuple[ZmqChannel, ZmqChannel]) -> None:
        left, right = pair
        assert left.send(right.address, b"hello")
        pump(left, right, until=[(0, Opened(right.address)), (1, Arrived(b"hello", key_of(left.address)))])
        assert right.send(left.address, b"answer")
        pump(left, right, until=[(0, Arrived(b"answer", key_of(right.address)))])

    def test_who_has_the_same_pair_is_allowed(self) -> None:
        keys = Keys.new()
        with closing(ZmqChannel(keys=keys)) as left, closing(ZmqChannel(keys=keys)) as right:
            assert left.send(right.address, b"sibling")
            pump(left, right, until=[(1, Arrived(b"sibling", keys.public))])

    def test_an_end_and_a_return_under_the_same_address_are_seen(self, pair: tuple[ZmqChannel, ZmqChannel]) -> None:
        left, right = pair
        assert left.send(right.address, b"hello")
        pump(left, right, until=[(0, Opened(right.address))])
        keys = right._keys
        right.close()
        pump(left, until=[(0, Closed(right.address))])
        with closing(ZmqChannel(plain(right.address), keys=keys)) as again:
            assert again.address == right.address
            pump(left, again, until=[(0, Opened(right.address))])

    def test_another_host_may_be_reached_with_keys(self) -> None:
        with closing(ZmqChannel("tcp://0.0.0.0:0", keys=Keys.new())) as channel:
            assert key_of(channel.address)


class TestStrangers:
    def test_a_key_that_is_not_allowed_is_refused_and_counted_and_told(
        self, pair: tuple[ZmqChannel, ZmqChannel]
    ) -> None:
        """The stranger knows whom it talks to and has a key, but not one that we know. Friends are unharmed."""
        left, right = pair
        with closing(ZmqChannel(keys=Keys.new([key_of(right.address)]))) as stranger:
            for _ in range(2):
                assert stranger.send(right.address, b"let me in")
                came = pump(stranger, right, until=[(0, Denied(right.address)), (1, Rejected(connections=1))])
                assert not any(isinstance(event, Arrived) for event in came[1])
        assert left.send(right.address, b"hello")
        pump(left, right, until=[(1, Arrived(b"hello", key_of(left.address)))])

    def test_nothing_is_sent_to_a_key_that_we_do_not_allow(
        self, pair: tuple[ZmqChannel, ZmqChannel], stranger: ZmqChannel
    ) -> None:
        left, _ = pair
        assert not left.send(stranger.address, b"secret")
        assert not left.send(plain(stranger.address), b"secret")
        no_key = Denied(plain(stranger.address), ONE_SIDED.format("no public key", "has keys"))
        assert take(left, 60) == [Denied(stranger.address), no_key]

    def test_nothing_is_sent_to_who_only_claims_an_allowed_key(
        self, pair: tuple[ZmqChannel, ZmqChannel], stranger: ZmqChannel
    ) -> None:
        """A rendezvous that lies about where a friend is leads nowhere."""
        left, right = pair
        lie = f"{plain(stranger.address)}#{key_of(right.address)}"
        assert left.send(lie, b"secret")
        lied_to, lied_about = refused(left, stranger)
        assert lied_to == []
        assert all(isinstance(event, Rejected) for event in lied_about)

    def test_who_listens_without_the_key_of_the_address_is_tried_once_for_each_frame(self) -> None:
        """ZeroMQ alone would try some twenty times a second, for as long as the connection is wanted."""
        ours, theirs = friends()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(10)
            address = f"tcp://127.0.0.1:{listener.getsockname()[1]}#{theirs.public}"
            with closing(ZmqChannel(keys=ours)) as channel:
                for _ in range(2):
                    assert channel.send(address, b"hello")
                    listener.accept()[0].close()
                    while address in channel._links:
                        take(channel, 0.01)
                listener.settimeout(0.5)
                with pytest.raises(TimeoutError):
                    listener.accept()

    def test_who_has_no_key_at_all_is_refused_and_counted(self) -> None:
        """Plain ZeroMQ, and what is no ZeroMQ."""
        with closing(ZmqChannel(keys=Keys.new())) as channel, zmq.Context() as context:
            with context.socket(zmq.PUSH) as push:
                push.setsockopt(zmq.LINGER, 0)
                push.connect(plain(channel.address))
                push.send(b"plain")
                pump(channel, until=[(0, Rejected(connections=1))])
            host, port = plain(channel.address).removeprefix("tcp://").split(":")
            with socket.create_connection((host, int(port))) as garbage:
                garbage.sendall(b"\xff" * 1000)
                assert pump(channel, until=[(0, Rejected(connections=1))]) == [[Rejected(connections=1)]]
            with socket.create_connection((host, int(port))) as web:
                web.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
                cut = False
                while not cut:
                    assert not take(channel, 0.01)
                    with suppress(BlockingIOError):
                        cut = ended(web)

    def test_a_channel_without_keys_cannot_talk_to_one_that_has_them(self) -> None:
        with closing(ZmqChannel(keys=Keys.new())) as closed, closing(ZmqChannel()) as open_to_all:
            assert not open_to_all.send(closed.address, b"hello")
            assert take(open_to_all, 60) == [Denied(closed.address, ONE_SIDED.format("a public key", "has no keys"))]
            assert open_to_all.send(plain(closed.address), b"hello")
            refused(open_to_all, closed)


def test_a_pair_is_replaced_without_an_interruption(tmp_path: Path) -> None:
    """The order of the page for operators: each process allows what was in the folder when it started."""
    for name in ("decode", "prefill"):
        write_keys(tmp_path, name)
    with ExitStack() as stack:

        def start(name: str) -> ZmqChannel:
            keys = Keys.load(tmp_path / f"{name}.key_secret", tmp_path)
            return stack.enter_context(closing(ZmqChannel(keys=keys)))

        def reaches(source: ZmqChannel, target: ZmqChannel, text: bytes) -> None:
            assert source.send(target.address, text)
            pump(source, target, until=[(1, Arrived(text, key_of(source.address)))])

        before, old = start("decode"), start("prefill")
        write_keys(tmp_path, "prefill-2")
        between, new = start("decode"), start("prefill-2")
        for source in (old, new):
            reaches(source, between, b"both")
        new.send(before.address, b"not yet")
        refused(new, before)
        (tmp_path / "prefill.key").unlink()
        after = start("decode")
        reaches(new, after, b"new")
        reaches(old, between, b"still")
        old.send(after.address, b"not any more")
        refused(old, after)


def test_keys_leave_no_thread_and_no_file_behind() -> None:
    """Refused connections included."""
    before = held()
    mine, theirs = friends()
    with closing(ZmqChannel(keys=mine)) as left, closing(ZmqChannel(keys=theirs)) as right:
        assert left.send(right.address, b"hello")
        pump(left, right, until=[(1, Arrived(b"hello", mine.public))])
        with closing(ZmqChannel(keys=Keys.new([theirs.public]))) as stranger:
            assert stranger.send(right.address, b"hello")
            pump(stranger, right, until=[(0, Denied(right.address))])
    given_back(before)


class TestKeys:
    def test_written_keys_are_loaded_again(self, tmp_path: Path) -> None:
        for name in ("prefill", "decode"):
            public, secret = write_keys(tmp_path, name)
            assert (public.name, secret.name) == (f"{name}.key", f"{name}.key_secret")
            assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        prefill = Keys.load(tmp_path / "prefill.key_secret", tmp_path)
        decode = Keys.load(tmp_path / "decode.key_secret", tmp_path)
        assert prefill.allowed == decode.allowed == {prefill.public, decode.public}
        assert prefill.secret not in repr(prefill)

    def test_the_folder_is_created(self, tmp_path: Path) -> None:
        public, secret = write_keys(tmp_path / "a" / "b", "prefill")
        assert {public.parent, secret.parent} == {tmp_path / "a" / "b"}
        (tmp_path / "file").touch()
        with pytest.raises(ConfigurationError, match="file"):
            write_keys(tmp_path / "file", "prefill")

    def test_no_key_is_written_over(self, tmp_path: Path) -> None:
        _, secret = write_keys(tmp_path, "prefill")
        before = secret.read_text()
        with pytest.raises(ConfigurationError, match="prefill"):
            write_keys(tmp_path, "prefill")
        assert secret.read_text() == before

    def test_a_secret_that_others_may_read_is_refused_with_the_remedy(self, tmp_path: Path) -> None:
        _, secret = write_keys(tmp_path, "prefill")
        secret.chmod(0o640)
        with pytest.raises(ConfigurationError, match=f"chmod 600 {secret}"):
            Keys.load(secret, tmp_path)

    def test_what_is_missing_is_named(self, tmp_path: Path) -> None:
        public, secret = write_keys(tmp_path, "prefill")
        public.chmod(0o600)
        with pytest.raises(ConfigurationError, match="only a public key"):
            Keys.load(public, tmp_path)
        with pytest.raises(ConfigurationError, match=r"nothing_here.*remedy: disagg-kv keys FOLDER NAME"):
            Keys.load(tmp_path / "nothing_here", tmp_path)
        public.unlink()
        with pytest.raises(ConfigurationError, match=r"no \*.key file; remedy: disagg-kv keys FOLDER NAME"):
            Keys.load(secret, tmp_path)

    @pytest.mark.parametrize("bad", ["", "short", 39 * "x", 41 * "x", 40 * '"', 40 * "\u00e9", 40 * "#"])
    def test_what_is_no_key_is_refused(self, bad: str) -> None:
        with pytest.raises(ConfigurationError, match="40 characters") as secret:
            Keys(bad)
        assert not bad or bad not in str(secret.value)
        if bad != 40 * "#":
            with pytest.raises(ConfigurationError, match="40 characters"):
                Keys.new([bad])

    def test_keys_and_an_unencrypted_network_exclude_each_other(self) -> None:
        with pytest.raises(ConfigurationError, match="unencrypted_network"):
            ZmqChannel(keys=Keys.new(), unencrypted_network=True)
