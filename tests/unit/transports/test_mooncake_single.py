"""Writes between GPUs through Mooncake: which thread makes which, with an engine that does as it is told.

The real one needs GPUs (``tests/gpu``); lanes, flights and threads are the real ones.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from typing import cast

import pytest
import torch

from disagg_kv.errors import TransportError
from disagg_kv.ids import Peer, Ticket
from disagg_kv.testing.pair import wait
from disagg_kv.transports import Ended, Extents, Process, Settled
from disagg_kv.transports.mooncake_flight import Address, Flight, One, Remote, Shared
from disagg_kv.transports.mooncake_lanes import Lanes
from disagg_kv.transports.mooncake_library import Engine
from disagg_kv.transports.mooncake_single import Singles

WAIT_S = 30.0


class Told:
    """An engine whose writes end when told to; ``begun`` by the caller, ``made`` by a worker."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.made: list[int] = []
        self.status_of: dict[int, int] = {}
        self.may_return = threading.Event()
        self.refuses = False

    def begin(self, session: str, source: int, target: int, nbytes: int) -> int:
        """A batch's number is its source's address."""
        if self.refuses:
            return 0
        self.begun.append(source)
        return source

    def status(self, batch: int) -> int:
        """1: done."""
        return self.status_of.get(batch, 0)

    def write_one(self, session: str, source: int, target: int, nbytes: int) -> int:
        """Blocks."""
        self.made.append(source)
        assert self.may_return.wait(WAIT_S)
        return 0


class World:
    """One transport's writes."""

    def __init__(self) -> None:
        self.engine = Told()
        self.lanes = Lanes(4, "test")
        self.shared = Shared(cast("Engine", self.engine), 30.0)
        self.now = 0.0
        self.singles = Singles(self.shared, self.lanes, lambda: self.now, True)

    def put(self, *numbers: int, peer: int = 1) -> None:
        """Writes to one peer."""
        address = Address("session", "host", 1, "nvlink_intra", Process.own())
        remote = Remote(Peer(bytes([peer]) * 16), address, 1, Extents((), "peer's"), None)
        for number in numbers:
            flight = Flight(Ticket(number), remote, deque([One(0, number, 0, 1)]), self.shared)
            assert self.singles.takes(flight)
            self.singles.put(flight)

    def ended(self) -> list[Ended | Settled]:
        """What has ended since."""
        self.singles.look()
        found = [event for _, event in self.shared.results]
        self.shared.results.clear()
        return found

    def until_made(self, *numbers: int) -> None:
        """A worker has these."""
        wait(lambda: self.engine.made == list(numbers), lambda: None, WAIT_S, "a worker")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr("disagg_kv.transports.mooncake_single.driver", lambda: _Driver())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    one = World()
    yield one
    one.engine.may_return.set()
    assert one.lanes.drain(WAIT_S)
    one.lanes.stop()


class _Driver:
    def current(self, device: int) -> nullcontext[None]:
        return nullcontext()


def test_the_caller_begins_one_and_a_worker_makes_the_next_beside_it(world: World) -> None:
    """The third waits for whichever is through first, here the caller's."""
    world.put(1, 2, 3)
    assert world.engine.begun == [1]
    world.until_made(2)
    assert world.ended() == []
    world.engine.status_of[1] = 1
    assert world.ended() == [Ended(Ticket(1))]
    assert world.engine.begun == [1, 3]
    assert world.singles.flying()
    world.engine.may_return.set()
    assert world.lanes.drain(WAIT_S)
    world.engine.status_of[3] = 1
    assert sorted(event.ticket for event in world.ended()) == [2, 3]
    assert not world.singles.flying()
    assert world.engine.made == [2]


def test_a_worker_that_is_through_makes_the_next(world: World) -> None:
    """Here the caller's own takes longer."""
    world.engine.may_return.set()
    world.put(1, 2, 3)
    wait(lambda: world.engine.made == [2, 3], world.singles.look, WAIT_S, "both")
    assert world.engine.begun == [1]
    world.engine.status_of[1] = 1
    assert world.lanes.drain(WAIT_S)
    assert sorted(event.ticket for event in world.ended()) == [1, 2, 3]
    assert not world.singles.flying()


def test_each_peer_has_a_worker_beside_the_callers_only_write(world: World) -> None:
    """The caller's stream is one for all peers: a second write on it would hide the end of the first."""
    world.put(1)
    world.put(2, 3, peer=2)
    world.until_made(2)
    assert world.engine.begun == [1]
    world.engine.status_of[1] = 1
    assert world.ended() == [Ended(Ticket(1))]
    assert world.engine.begun == [1, 3]


def test_a_write_that_cannot_be_begun_fails_and_the_next_is_a_workers(world: World) -> None:
    """After a failure the peer has to show that it is there, which may take seconds: not in the caller's thread."""
    world.engine.refuses = True
    world.put(1)
    assert world.lanes.drain(WAIT_S)
    (ended,) = world.ended()
    assert isinstance(ended, Ended)
    assert isinstance(ended.error, TransportError)
    assert not ended.quiesced
    address = Address("session", "host", 1, "nvlink_intra", Process.own())
    remote = Remote(Peer(bytes(16)), address, 1, Extents((), "peer's"), None, suspect=True)
    assert not world.singles.takes(Flight(Ticket(9), remote, deque([One(0, 9, 0, 1)]), world.shared))


def test_a_write_that_never_ends_is_given_up_and_settles_when_it_does(world: World) -> None:
    """E1: its bytes may still be read."""
    world.put(1)
    world.now = 31.0
    (ended,) = world.ended()
    assert isinstance(ended, Ended)
    assert not ended.quiesced
    assert world.singles.has(Ticket(1))
    world.engine.status_of[1] = 1
    assert world.ended() == [Settled(Ticket(1))]
    assert not world.singles.has(Ticket(1))
