"""The part of the transport suite about what stays: open files and threads, and files of its own."""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from .ends import Child, End
from .limits import held
from .pair import Pair, batch, noise
from .transport_cases import NBYTES, TransportCases

SETTLED_S = 20.0
"""How long a library may take to close what it does not need any more."""

WARM, ROUNDS = 3, 8
"""Rounds before counting, in which libraries make what they keep; and rounds that must not need more."""


def shared(pid: int) -> set[Path]:
    """Files in /dev/shm that a process has mapped or open, and that have a name; semaphores are not counted."""
    proc = Path(f"/proc/{pid}")
    named = set(re.findall(r"(/dev/shm/.+)", (proc / "maps").read_text()))
    for link in (proc / "fd").iterdir():
        with suppress(FileNotFoundError):
            named.add(os.readlink(link))
    return {Path(name) for name in named if re.match(r"/dev/shm/(?!sem\.).*(?<! \(deleted\))$", name)}


class LeakCases(TransportCases):
    """A process serves for months; its peers come and go."""

    def _stays(self, once: Callable[[], None], what: str, allowed: int = 0) -> None:
        """Repeat something: the process holds no more afterwards, or ``allowed`` more for each round."""
        for _ in range(WARM):
            once()
        gc.collect()
        before = held()
        for _ in range(ROUNDS):
            once()
        deadline = time.monotonic() + SETTLED_S
        most = before + ROUNDS * allowed + ROUNDS // 2
        while (now := self._settled()) > most:
            assert time.monotonic() < deadline, (
                f"{what}: after {ROUNDS} rounds, this process has {now} open files and threads instead of {before}"
            )
            time.sleep(0.05)

    @staticmethod
    def _settled() -> int:
        gc.collect()
        return held()

    def test_connecting_and_disconnecting_leaves_nothing_open(self, pair: Pair) -> None:
        """The same peer, again and again; ``kept_per_connect`` says what a library keeps."""

        def once() -> None:
            pair.source.transport.disconnect(pair.peer)
            assert pair.connect() == pair.peer, "a peer that is connected again has another name"
            pair.put((0, 0, 100))

        self._stays(once, "connect, write, disconnect", self.kept_per_connect)
        pair.check()

    def test_closed_transports_leave_nothing_open(self) -> None:
        """Both sides of a connection, made and closed."""

        def once() -> None:
            ends = [End(self.factory(), self.memory()) for _ in range(2)]
            regions = [end.add(noise(NBYTES)) for end in ends]
            if self.one_process:
                peer = ends[0].connect(ends[1].descriptor(), self.timeout_s)
                ends[0].submit(peer, batch(regions[0], regions[1], [(0, 0, 100)]))
            for end in ends:
                end.close(self.timeout_s)

        self._stays(once, "make two transports, connect, write, close")

    def test_closed_transports_leave_no_files_behind(
        self, end: End, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not in the folder for temporary files, nor in /dev/shm, once both sides are closed."""
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        sides = [Child(self.factory(), self.memory(), self.timeout_s) for _ in range(2)]
        names: set[Path] = set()
        try:
            regions = []
            for side in sides:
                side.open()
                regions.append(side.add(noise(NBYTES)))
            if not end.transport.caps.in_process_only:
                peer = sides[0].connect(sides[1].descriptor(), self.timeout_s)
                sides[0].submit(peer, batch(regions[0], regions[1], [(0, 0, 100)]))
            names.update(*(shared(side.pid) for side in sides))
            for side in sides:
                side.close(self.timeout_s)
        finally:
            for side in sides:
                side.stop()
        deadline = time.monotonic() + SETTLED_S
        while left := [str(name) for name in (*tmp_path.rglob("*"), *names) if name.exists()]:
            assert time.monotonic() < deadline, f"left behind by closed transports: {sorted(left)}"
            time.sleep(0.05)
