"""``disagg-kv top`` and the socket that it reads: real endpoints, other users, garbage, and readers that stall."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from disagg_kv import Expectation, Phase, Source
from disagg_kv.cli.main import run
from disagg_kv.endpoints import EndpointStatus, SupportsStatus, Usage
from disagg_kv.errors import ConfigurationError, LocalProtocolError, PeerLostError, RemoteProtocolError
from disagg_kv.ids import RoomId
from disagg_kv.observe import status_socket
from disagg_kv.observe.status import LONGEST, SUFFIX, check_folder, default_folder, read_status, sockets
from disagg_kv.observe.status_socket import CLIENTS, StatusSocket
from tests.support.observed import NBYTES, TABLE, TOKENS, endpoints, move, until

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that fit: how many rooms are in which phase depends on when it is asked."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "sockets"


class Large:
    """An endpoint whose document does not fit into a socket's buffer."""

    def __init__(self, nbytes: int = 8 << 20) -> None:
        self.address = "a" * nbytes
        self.asked = 0

    def status(self, rooms: int) -> EndpointStatus:
        self.asked += 1
        return EndpointStatus("decode", "D", 0, self.address, "open", Usage({Phase.MOVING: 1}), (), ())


def top(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    """The command's exit code, output and errors."""
    code = run(["top", *options])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def connected(path: Path) -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    one.connect(str(path))
    one.settimeout(30.0)
    return one


def test_top_shows_rooms_peers_and_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of both endpoints: one room has moved, a second waits; in JSON and as tables."""
    with (
        endpoints() as (sender, receiver),
        StatusSocket(sender, folder) as p,
        StatusSocket(receiver, str(folder)) as d,
    ):
        move(sender, receiver, "moved")
        room = RoomId(b"[bold]waits")
        waiting = receiver.open(room, Source("P"))
        until(lambda: waiting.phase is Phase.READY)
        code, out, err = top(capsys, str(folder), "--json")
        assert (code, err) == (0, "")
        found = {one["side"]: one for one in json.loads(out)["endpoints"]}
        prefill, decode = found["prefill"], found["decode"]
        assert (prefill["instance"], prefill["rank"], prefill["pid"]) == ("P", 0, os.getpid())
        assert (prefill["socket"], decode["socket"]) == (str(p.path), str(d.path))
        assert prefill["memory"]["slots"] == 8
        assert decode["memory"]["ring_bytes"] == 1 << 16
        assert decode["rooms_by_phase"]["ready"] == 1
        assert [one["room"] for one in decode["rooms"]] == ["[bold]waits"]
        (of_room,) = decode["rooms"]
        assert of_room["phase"] == "ready"
        assert 0 <= of_room["age_s"] < 60
        assert [(one["instance"], one["state"]) for one in decode["peers"]] == [("P", "connected")]
        assert (prefill["state"], decode["state"]) == ("open", "open")
        code, out, _ = top(capsys, str(folder), "--once")
        assert code == 0
        for word in ("prefill P/0", "decode D/0", "0 B of 64.0 KiB", "0 of 8", "[bold]waits", "1 ready", "connected"):
            assert word in out
        code, out, _ = top(capsys, str(d.path), "--once", "--rooms", "0")
        assert "decode D/0" in out
        assert "waits" not in out
    assert sockets(folder) == []


def test_a_room_that_moves_and_one_that_failed_are_shown(folder: Path) -> None:
    """Its bytes while it moves; with its error until the pages are released."""
    with endpoints() as (sender, receiver), StatusSocket(receiver, folder) as one:
        room = RoomId(b"room")
        reception, delivery = receiver.open(room, Source("P")), sender.open(room)
        reception.expect(Expectation(None, TABLE))
        delivery.send_chunk(TOKENS, TABLE)
        until(lambda: reception.report.nbytes == NBYTES)
        until(lambda: read_status(one.path)["rooms"][0]["bytes"] == NBYTES)
        (of_room,) = read_status(one.path)["rooms"]
        assert (of_room["path"], of_room["phase"], of_room["error"]) == ("staged", "moving", "")
        assert of_room["segments"] > 0


@pytest.mark.parametrize("order", ["endpoint first", "socket first"])
def test_an_endpoint_that_closes_meanwhile_is_shown_as_closed(folder: Path, order: str) -> None:
    with endpoints() as (_, receiver):
        one = StatusSocket(receiver, folder)
        if order == "endpoint first":
            receiver.close(0.0)
            until(lambda: read_status(one.path)["state"] == "closed")
        one.close()
        one.close()
        assert not one.path.exists()
        with pytest.raises(ConfigurationError, match="No such file"):
            read_status(one.path)


def test_readers_that_never_read_delay_no_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than are served at once: another reader gets its document, and each is dropped after its time."""
    with StatusSocket(Large(), folder) as one, ExitStack() as stalled:
        stuck = [stalled.enter_context(connected(one.path)) for _ in range(CLIENTS + 4)]
        assert len(read_status(one.path, 30.0)["address"]) == 8 << 20
        monkeypatch.setattr(status_socket, "CLIENT_S", 0.1)
        late = stalled.enter_context(connected(one.path))
        # Once it has been dropped, what it reads ends early: only what had been sent until then is there.
        until(lambda: late.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b"")
        threads = [thread for thread in threading.enumerate() if thread.name == "disagg_kv status"]
        until(lambda: gone(late))
        assert len(threads) == 1
        # Those beyond the limit were dropped for others.
        assert any(gone(connection) for connection in stuck)


def gone(connection: socket.socket) -> bool:
    """Whether the other end has closed: then nothing can be sent any more."""
    try:
        connection.send(b"x", socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return False


def test_an_endpoint_works_beside_readers_that_stall(folder: Path) -> None:
    """Its rooms move while the client does not read the answer."""
    with endpoints() as (sender, receiver), StatusSocket(receiver, folder) as one, ExitStack() as stalled:
        for number in range(3):
            stalled.enter_context(connected(one.path))
            move(sender, receiver, f"room {number}")
        assert read_status(one.path)["rooms_by_phase"]["moving"] == 0


def test_two_readers_cost_one_look(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read a moment ago is given out again."""
    monkeypatch.setattr(status_socket, "FRESH_S", 60.0)
    endpoint = Large(10)
    with StatusSocket(endpoint, folder) as one:
        results: list[dict[str, Any]] = []
        threads = [threading.Thread(target=lambda: results.append(read_status(one.path))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results[0] == results[1]
        assert endpoint.asked == 1


@pytest.mark.parametrize("garbage", [b"\0", b"GET / HTTP/1.1\r\n\r\n", b"x" * (1 << 16)], ids=["zero", "http", "long"])
def test_what_a_client_sends_is_not_read(folder: Path, garbage: bytes) -> None:
    """It gets its document all the same, and so does the next one."""
    with StatusSocket(Large(10), folder) as one:
        with connected(one.path) as client:
            client.setblocking(False)
            with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                client.send(garbage)
            client.setblocking(True)
            client.settimeout(30.0)
            text = b""
            while not text.endswith(b"\n"):
                text += client.recv(1 << 16)
            assert json.loads(text)["instance"] == "D"
        for _ in range(3):
            connected(one.path).close()
        assert read_status(one.path)["instance"] == "D"


class Unreadable:
    """An endpoint that raises when it is read, until it is mended."""

    error: Exception | None = LocalProtocolError("not now")

    def status(self, rooms: int) -> EndpointStatus:
        if self.error is not None:
            raise self.error
        return Large(10).status(rooms)


def test_sockets_are_in_the_order_of_their_numbers(folder: Path) -> None:
    """As a process made them."""
    folder.mkdir(mode=0o700)
    names = [f"77-{number}{SUFFIX}" for number in (8, 9, 10, 11)]
    for name in reversed(names):
        (folder / name).touch()
    assert [path.name for path in sockets(folder)] == names


def test_an_endpoint_that_cannot_be_read_hides_no_other(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is shown in its place; it is shown again as soon as it can be read."""
    monkeypatch.setattr(status_socket, "FRESH_S", 0.0)
    bad = Unreadable()
    with StatusSocket(bad, folder) as one, StatusSocket(Large(10), folder):
        code, out, _ = top(capsys, str(folder), "--json")
        assert code == 0
        assert [found["ok"] for found in json.loads(out)["endpoints"]] == [False, True]
        assert "not now" in top(capsys, str(folder), "--once")[1]
        bad.error = RuntimeError("also not")
        code, out, err = top(capsys, str(one.path), "--json")
        assert code == 1
        assert "also not" in err
        assert json.loads(out)["error"]["type"] == "RemoteProtocolError"
        bad.error = None
        assert read_status(one.path)["ok"]


def as_nobody(path: Path) -> subprocess.CompletedProcess[str]:
    """What another user gets: a process that has given up root's rights."""
    code = (
        "import os, sys\nfrom pathlib import Path\n"
        "from disagg_kv.observe.status import read_status\nfrom disagg_kv.errors import DisaggKVError\n"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "try:\n    print(read_status(Path(sys.argv[1])))\n"
        "except DisaggKVError as exc:\n    print(type(exc).__name__, exc)"
    )
    return subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)


@needs_root
def test_another_user_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    """The folder lets no other user in. Where it was opened to all, the kernel says who connects."""
    for parent in (tmp_path, *tmp_path.parents[:3]):
        parent.chmod(parent.stat().st_mode | 0o011)
    with StatusSocket(Large(10), folder) as one:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert one.path.stat().st_mode & 0o777 == 0o600
        assert f"ConfigurationError {one.path}: Permission denied" in as_nobody(one.path).stdout
        folder.chmod(0o777)
        one.path.chmod(0o666)
        said = f"ConfigurationError {one.path}: user {NOBODY} is not user {os.geteuid()}, to whom this endpoint belongs"
        assert said in as_nobody(one.path).stdout
        assert read_status(one.path)["ok"]


def test_a_folder_that_lets_others_in_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By both ends; so is a link, a file, and a place that cannot be."""
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(ConfigurationError, match="mode 0755 lets other users in; 0700 is needed"):
        StatusSocket(Large(10), folder)
    code, _, err = top(capsys, str(folder), "--once")
    assert code == 2
    assert "0700 is needed" in err
    (folder / "link").symlink_to(folder)
    with pytest.raises(ConfigurationError, match="it is no folder"):
        StatusSocket(Large(10), folder / "link")
    (folder / "file").write_text("")
    with pytest.raises(ConfigurationError, match="File exists"):
        StatusSocket(Large(10), folder / "file")
    with pytest.raises(ConfigurationError, match="Not a directory"):
        check_folder(folder / "file" / "x")


@needs_root
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    """As one that somebody made in /tmp before."""
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(ConfigurationError, match=f"it belongs to user {NOBODY}, not 0"):
        StatusSocket(Large(10), folder)


@pytest.mark.parametrize(
    "call",
    [
        lambda folder: StatusSocket(cast("SupportsStatus", object()), folder),
        lambda folder: StatusSocket(Large(10), cast("str", 5)),
        lambda folder: StatusSocket(Large(10), folder / ("x" * LONGEST)),
    ],
    ids=range(3),
)
def test_arguments_that_cannot_be_are_refused(folder: Path, call: Callable[[Path], object]) -> None:
    with pytest.raises(ConfigurationError):
        call(folder)


@contextmanager
def answering(path: Path, answer: bytes) -> Iterator[None]:
    """Another program listens there, and says this to one client."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def say() -> None:
            client, _ = listener.accept()
            with client:
                client.sendall(answer)

        thread = threading.Thread(target=say)
        thread.start()
        yield
        thread.join()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "is no JSON"),
        (b"\xff" * 100, "is no JSON"),
        (b"[" * 100000, "is no JSON"),
        (b"[]", "is no status"),
        (b"{}", "is no status"),
        (b'{"format": 1, "ok": true}', "format 1 of another version"),
        (b'{"format": 2, "ok": true}', "format 2 of another version"),
        (b'{"format": 1, "ok": true, "rooms": [], "peers": []}', "format 1 of another version, not 2"),
    ],
)
def test_an_answer_that_is_no_status_is_refused(folder: Path, answer: bytes, message: str) -> None:
    """Another program, or another version of this library."""
    path = folder / "other.status"
    with answering(path, answer), pytest.raises(RemoteProtocolError, match=message):
        read_status(path)


def test_a_socket_that_does_not_answer_is_a_lost_peer(folder: Path) -> None:
    """Its process stands still."""
    folder.mkdir(mode=0o700)
    path = folder / "slow.status"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(PeerLostError, match="no endpoint answers"):
            read_status(path, 0.1)


CHILD = """
import sys, time
from disagg_kv.endpoints import EndpointStatus, Usage
from disagg_kv.observe.status_socket import StatusSocket
class Endpoint:
    def status(self, rooms):
        return EndpointStatus("decode", "killed", 0, "", "open", Usage({}), (), ())
one = StatusSocket(Endpoint(), sys.argv[1])
print(one.path, flush=True)
time.sleep(600)
"""


def test_the_socket_of_a_killed_process_is_left_out_and_removed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the next endpoint of this user."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child:
        path = Path(child.stdout.readline().strip())
        assert read_status(path)["instance"] == "killed"
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert path.exists()
    assert "no endpoint has a status socket here" in top(capsys, str(folder), "--once")[1]
    code, _, err = top(capsys, str(path), "--once")
    assert code == 1
    assert "no endpoint answers" in err
    with StatusSocket(Large(10), folder):
        assert not path.exists()
        assert len(sockets(folder)) == 1


def test_a_forked_child_cannot_close_it(folder: Path) -> None:
    """The socket is its parent's."""
    with StatusSocket(Large(10), folder) as one:
        pid = os.fork()
        if not pid:
            try:
                one.close()
            except LocalProtocolError:
                os._exit(17)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 17
        assert read_status(one.path)["ok"]


def test_the_default_folder_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of the session where there is one."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_folder() == tmp_path / "disagg_kv"
    code, _, err = top(capsys, "--once")
    assert code == 2
    assert "there is no socket or folder" in err
    with StatusSocket(Large(10)) as one:
        assert one.path.parent == tmp_path / "disagg_kv"
        assert one.path.name.endswith(SUFFIX)
        assert "decode D/0" in top(capsys, "--once")[1]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    assert default_folder().name == f"disagg_kv-{os.geteuid()}"


def test_top_is_live_until_it_is_interrupted(folder: Path) -> None:
    """In a terminal: the table is drawn again and again."""
    master, slave = os.openpty()
    with StatusSocket(Large(10), folder):
        # A shell that starts the suite in the background has it ignore interrupts, and children inherit that.
        code = (
            "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "from disagg_kv.cli.main import main; sys.argv = sys.argv[1:]; main()"
        )
        command = [sys.executable, "-c", code, "disagg-kv", "top", str(folder), "--every", "0.1"]
        with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave) as child:
            os.close(slave)
            seen = b""
            while seen.count(b"decode") < 3:
                seen += os.read(master, 1 << 16)
            child.send_signal(signal.SIGINT)
            seen += _rest(master)
            assert child.wait() == 130
    assert b"interrupted" in seen
    os.close(master)


def _rest(terminal: int) -> bytes:
    """What is still written; Linux ends a terminal without a writer with an error."""
    rest = b""
    with suppress(OSError):
        while chunk := os.read(terminal, 1 << 16):
            rest += chunk
    return rest
