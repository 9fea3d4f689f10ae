"""The part of the transport suite about ``connect`` on other threads than everything else."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from queue import Queue

import numpy as np
import pytest

from ..errors import DisaggKVError
from ..ids import Peer
from .ends import End
from .pair import POISON, Pair, batch, same
from .transport_cases import NBYTES, TransportCases

TARGETS = 4
"""Peers that are connected at once."""

ROUNDS = 200
"""Writes of the first thread meanwhile."""


class _Meeting(threading.Thread):
    """Connects one end to another, and again whenever the first thread has disconnected it, until that has stopped."""

    def __init__(self, pair: Pair, target: End) -> None:
        super().__init__(daemon=True)
        self.target = target
        self.region = target.add(np.full(NBYTES, POISON, np.uint8))
        self.error: BaseException | None = None
        self.known: Queue[Peer] = Queue()
        self.again: Queue[bool] = Queue()
        self._descriptor = target.descriptor()
        self._pair = pair
        self.start()

    def run(self) -> None:
        """All of it."""
        try:
            while self.again.get():
                self.known.put(self._pair.source.connect(self._descriptor, self._pair.timeout_s))
        except BaseException as error:
            self.error = error


class ThreadCases(TransportCases):
    """What the endpoint does: it connects on helper threads, and works with the peers that it has meanwhile."""

    @pytest.fixture
    def _restless(self) -> Iterator[None]:
        """Threads take turns as often as they can."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        yield
        sys.setswitchinterval(before)

    @pytest.mark.usefixtures("_restless")
    def test_peers_are_connected_by_other_threads_while_work_goes_on(self, pair: Pair) -> None:
        """Several at once; polls, writes and disconnects of the first thread neither fail nor wait for the end."""
        if not self.one_process:
            pytest.skip("needs several targets in one process")
        pair.others.extend(End(self.factory(), self.memory()) for _ in range(TARGETS))
        threads = [_Meeting(pair, target) for target in pair.others]
        for thread in threads:
            thread.again.put(True)
        for number in range(ROUNDS):
            pair.put((10 * number, 10 * number, 10))
            for thread in threads:
                if not thread.known.empty():
                    pair.source.transport.disconnect(thread.known.get())
                    thread.again.put(True)
        for thread in threads:
            thread.again.put(False)
            thread.join(self.timeout_s)
            assert (thread.is_alive(), thread.error) == (False, None), f"connect hangs, or raised {thread.error!r}"
        pair.check()
        peers = [list(thread.known.queue)[-1] for thread in threads]
        assert len({pair.peer, *peers}) == TARGETS + 1, "two peers have one name"
        for peer, thread in zip(peers, threads, strict=True):
            pair.succeed(pair.source.submit(peer, batch(pair.local, thread.region, [(0, 7, 100)])))
            same(thread.target.read(thread.region)[7:107], pair.data[:100])
        for other in pair.others:
            other.close(0.0)

    @pytest.mark.usefixtures("_restless")
    def test_newer_descriptors_of_a_peer_do_not_hinder_writes_to_it(self, pair: Pair) -> None:
        """A write in flight reaches its target, even if another thread connects with a newer descriptor meanwhile."""
        descriptors = [pair.target.descriptor()]
        for _ in range(5):
            pair.target.add(np.full(100, POISON, np.uint8))
            descriptors.append(pair.target.descriptor())
        errors: list[DisaggKVError] = []

        def meet() -> None:
            try:
                for descriptor in descriptors:
                    assert pair.source.connect(descriptor, self.timeout_s) == pair.peer
            except DisaggKVError as error:
                errors.append(error)

        thread = threading.Thread(target=meet, daemon=True)
        thread.start()
        while thread.is_alive():
            pair.put((0, 0, NBYTES), (5, 5, 10))
        thread.join()
        assert all("register everything first" in str(error) for error in errors), errors
        pair.put((0, 0, NBYTES))
        pair.check()
