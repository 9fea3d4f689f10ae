"""Sockets' files: other users can neither keep us from making them nor use them for a moment."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from disagg_kv.channels import Arrived, Channel, UnixChannel, ZmqChannel
from disagg_kv.channels.files import claimed
from disagg_kv.errors import ConfigurationError
from tests.support.channels import take
from tests.support.leftovers import held
from tests.support.processes import wait

MAKE: dict[str, Callable[[Path], Channel]] = {
    "unix": lambda path: UnixChannel(f"unix://{path}"),
    "ipc": lambda path: ZmqChannel(f"ipc://{path}"),
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: sockets' paths have 107 bytes at most."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture
def no_umask() -> Iterator[None]:
    """New files get every right that is asked for."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("no_umask")
@pytest.mark.parametrize("kind", MAKE)
def test_a_socket_is_never_open_to_others(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made so, and not changed to that afterwards; it works, and nothing is left of it."""
    with monkeypatch.context() as patched:
        for change in (os.chmod, Path.chmod):
            patched.setattr(os if change is os.chmod else Path, "chmod", lambda *args, **options: None)
        channel = MAKE[kind](folder / "inbox")
    assert stat.S_IMODE((folder / "inbox").stat().st_mode) == 0o600
    other = MAKE[kind](folder / "other")
    got: list[bytes] = []

    def heard() -> bool:
        other.poll()
        got.extend(one.frame for one in take(channel, 0.01) if isinstance(one, Arrived))
        return got == [b"hello"]

    assert other.send(channel.address, b"hello")
    wait(heard, lambda: f"heard {got}")
    other.close()
    channel.close()
    assert os.listdir(folder) == []


@pytest.mark.parametrize("kind", MAKE)
def test_a_folder_that_is_locked_hinders_nothing(kind: str, folder: Path) -> None:
    """Every user who can read a folder can lock it."""
    mine = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(mine, fcntl.LOCK_EX)
    MAKE[kind](folder / "inbox").close()
    os.close(mine)
    assert os.listdir(folder) == []


@pytest.mark.parametrize("kind", MAKE)
def test_a_lock_that_others_could_take_is_refused(kind: str, folder: Path) -> None:
    """With its name; so is one that leads elsewhere."""
    lock = folder / f".disagg_kv-{os.geteuid()}.lock"
    lock.touch(0o666)
    lock.chmod(0o666)
    with pytest.raises(ConfigurationError, match=lock.name):
        MAKE[kind](folder / "inbox")
    lock.unlink()
    lock.symlink_to(folder / "elsewhere")
    with pytest.raises(ConfigurationError):
        MAKE[kind](folder / "inbox")
    assert sorted(os.listdir(folder)) == [lock.name]


def test_a_lock_file_that_cannot_be_removed_is_unlocked(folder: Path) -> None:
    """The error is told, and the process keeps neither the lock nor its descriptor."""
    lock = folder / f".disagg_kv-{os.geteuid()}.lock"
    before, kept = held(), list[int]()

    def claim() -> None:
        with claimed("unix://inbox", folder / "inbox"):
            kept.append(os.open(lock, os.O_RDWR))
            lock.unlink()
            lock.mkdir()

    with pytest.raises(OSError, match=lock.name):
        claim()
    fcntl.flock(kept[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(kept[0])
    assert held() == before


@pytest.mark.parametrize("kind", MAKE)
def test_of_many_that_bind_one_address_one_succeeds(kind: str, folder: Path) -> None:
    """Whether a file is there or not; locks are taken away while others wait for them."""
    for _ in range(5):
        begin, made, refused = threading.Barrier(6), list[Channel](), list[ConfigurationError]()

        def bind(
            begin: threading.Barrier = begin,
            made: list[Channel] = made,
            refused: list[ConfigurationError] = refused,
        ) -> None:
            begin.wait()
            try:
                made.append(MAKE[kind](folder / "inbox"))
            except ConfigurationError as error:
                refused.append(error)

        threads = [threading.Thread(target=bind) for _ in range(begin.parties)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(made), len(refused)) == (1, 5)
        made[0].close()
        assert os.listdir(folder) == []
