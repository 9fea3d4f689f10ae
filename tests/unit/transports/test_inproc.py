"""What the in-process transport promises beyond the conformance suite."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from disagg_kv.errors import PeerLostError
from disagg_kv.planning import Writes
from disagg_kv.testing.ends import plain
from disagg_kv.transports import InprocTransport, PeerLost, WriteEnded


def test_a_closed_peer_is_lost_and_fenced_once() -> None:
    """Writes to it fail and are quiet."""
    source, target = InprocTransport(), InprocTransport()
    (local,), (remote,) = (
        source.register([plain(np.zeros(9, np.uint8))]),
        target.register([plain(np.zeros(9, np.uint8))]),
    )
    peer = source.connect(target.local_descriptor(), 0.0)
    target.close(0.0)
    ticket = source.submit(peer, Writes.one(local, 0, remote, 0, 9))
    ended, peer_events = source.poll()
    assert isinstance(ended, WriteEnded)
    assert (ended.ticket, type(ended.error), ended.quiesced) == (ticket, PeerLostError, True)
    assert peer_events == PeerLost(peer, fenced=True)
    assert list(source.poll()) == []


def test_a_peer_that_nobody_holds_any_more_is_lost() -> None:
    """It need not have been closed."""
    source, target = InprocTransport(), InprocTransport()
    descriptor = target.local_descriptor()
    peer = source.connect(descriptor, 0.0)
    del target
    assert list(source.poll()) == [PeerLost(peer, fenced=True)]
    with pytest.raises(PeerLostError):
        InprocTransport().connect(descriptor, 0.0)


def test_a_target_that_closes_while_others_write_is_written_whole_or_not_at_all() -> None:
    """After ``close`` has returned no byte lands any more, whatever other threads do."""
    memory, data = np.zeros(1 << 16, np.uint8), np.ones(1 << 16, np.uint8)
    target = InprocTransport()
    (remote,) = target.register([plain(memory)])
    descriptor = target.local_descriptor()
    started = threading.Barrier(3)

    def write() -> None:
        source = InprocTransport()
        (local,) = source.register([plain(data)])
        peer = source.connect(descriptor, 0.0)
        started.wait()
        while True:
            source.submit(peer, Writes.one(local, 0, remote, 0, 1 << 16))
            if any(isinstance(event, WriteEnded) and event.error is not None for event in source.poll()):
                return

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    started.wait()
    target.close(0.0)
    memory[:] = 0
    for writer in writers:
        writer.join()
    assert not memory.any()
