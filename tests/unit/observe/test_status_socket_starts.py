"""Status sockets that start side by side in one folder: none removes another's, and each error is the library's."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest

from disagg_kv.endpoints import EndpointStatus, Usage
from disagg_kv.errors import ConfigurationError
from disagg_kv.observe import status_socket
from disagg_kv.observe.status import SUFFIX, read_status, sockets
from disagg_kv.observe.status_socket import StatusSocket

STARTERS, SECONDS = 4, 2.0
"""Processes that start side by side, and for how long."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "sockets"


class Small:
    """An endpoint."""

    def __init__(self, instance: str = "D") -> None:
        self.instance = instance

    def status(self, rooms: int) -> EndpointStatus:
        return EndpointStatus("decode", self.instance, 0, "", "open", Usage({}), (), ())


def start(folder: str) -> None:
    """Start and end sockets until it is time; each has its file as soon as it has started."""
    until, starts = time.monotonic() + SECONDS, 0
    while time.monotonic() < until:
        with StatusSocket(Small(), folder) as one:
            assert one.path.exists(), f"start {starts}: {one.path} is not there"
        starts += 1
    assert starts


def start_side_by_side(folder: str) -> None:
    """In processes that this one forks, which has no threads; its status is theirs."""
    ranks = [multiprocessing.get_context("fork").Process(target=start, args=(folder,)) for _ in range(STARTERS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(sum(bool(rank.exitcode) for rank in ranks))


def test_ranks_that_start_side_by_side_leave_each_other_alone(folder: Path) -> None:
    """Each has its file right after it has started, none raises, and nothing is left behind."""
    code = f"from {__name__} import start_side_by_side; import sys; start_side_by_side(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], stderr=subprocess.PIPE, text=True)
    assert not done.returncode, done.stderr
    assert list(folder.iterdir()) == []


def test_a_rank_that_has_bound_and_does_not_listen_yet_is_not_swept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank starts, and sweeps, in just that moment; so it is where the moment lasts for hours."""

    class Slow(socket.socket):
        """Its process is slow between ``bind`` and ``listen``."""

        def listen(self, *backlog: int) -> None:
            monkeypatch.undo()
            for path in folder.iterdir():
                os.utime(path, (0, 0))
            StatusSocket(Small(), folder).close()
            super().listen(*backlog)

    monkeypatch.setattr(socket, "socket", Slow)
    with StatusSocket(Small(), folder) as one:
        assert read_status(one.path)["ok"]
        assert list(folder.iterdir()) == [one.path]


def test_a_rank_that_was_killed_before_it_listened_leaves_nothing_for_long(folder: Path) -> None:
    """A later start removes its socket once it is old; until then it may be a rank that starts."""
    StatusSocket(Small(), folder).close()
    left = folder / f"1-0-00000000{status_socket.STARTING}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(left))
    StatusSocket(Small(), folder).close()
    assert left.exists()
    os.utime(left, (0, 0))
    with StatusSocket(Small(), folder) as one:
        assert list(folder.iterdir()) == [one.path]


def test_a_file_that_is_no_socket_is_left_alone(folder: Path) -> None:
    """Whatever its name is."""
    folder.mkdir(mode=0o700)
    files = {folder / f"notes{suffix}" for suffix in (SUFFIX, status_socket.STARTING)}
    for file in files:
        file.write_text("mine")
        os.utime(file, (0, 0))
    StatusSocket(Small(), folder).close()
    assert set(folder.iterdir()) == files


def test_processes_of_equal_number_have_sockets_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in two containers that share the folder: each endpoint is shown, and no name is ever used again."""
    monkeypatch.setattr(status_socket, "_numbers", count(5))
    with StatusSocket(Small("one"), folder) as one:
        monkeypatch.setattr(status_socket, "_numbers", count(5))
        with StatusSocket(Small("other"), folder) as other:
            assert {path.name.split("-")[1] for path in (one.path, other.path)} == {"5"}
            assert [read_status(path.path)["instance"] for path in (one, other)] == ["one", "other"]
        assert sockets(folder) == [one.path]


def test_a_folder_that_takes_no_socket_is_named(folder: Path) -> None:
    """By the library's own error, which has the system's as its cause; no descriptor stays open."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigurationError, match=r"folder '/proc/self/fd': no socket can be made there: ") as caught:
        StatusSocket(Small(), "/proc/self/fd")
    assert isinstance(caught.value.__cause__, OSError)
    assert len(os.listdir("/proc/self/fd")) == before
