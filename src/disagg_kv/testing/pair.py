"""Two connected ends, a model of what the target's memory must hold, and a log that knows which events may come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from ..errors import DisaggKVError, PeerLostError, TransportError
from ..ids import Peer, RegionId, Ticket
from ..memory import U8
from ..planning import Writes
from ..transports import Capabilities, PeerLost, Settled, WriteEnded
from .ends import Child, End, TransportEvent
from .limits import at_most

POISON = 0xA5
"""What fresh target memory is filled with."""

E = TypeVar("E", bound=DisaggKVError)

Row = tuple[int, int, int]
"""One write between the pair's first regions: offset here, offset there, bytes."""


def batch(local: RegionId, remote: RegionId, rows: Sequence[Row]) -> Writes:
    """Writes between two regions."""
    table = np.array(rows, np.int64).reshape(-1, 3)
    n = len(table)
    return Writes(
        np.full(n, local, np.int32),
        table[:, 0].copy(),
        np.full(n, remote, np.int32),
        table[:, 1].copy(),
        table[:, 2].copy(),
    )


def noise(nbytes: int, seed: int = 0) -> U8:
    """Random bytes that are never the poison, so that a missing byte is always seen."""
    drawn = np.random.default_rng(seed).integers(0, 255, nbytes, dtype=np.uint8)
    return np.where(drawn == POISON, np.uint8(255), drawn)


class Log:
    """The events of one transport, checked against the contract as it comes in."""

    def __init__(self, caps: Capabilities) -> None:
        self._caps = caps
        self.ended: dict[Ticket, WriteEnded] = {}
        self.settled: set[Ticket] = set()
        self.peer_events: list[PeerLost] = []

    def add(self, events: Sequence[TransportEvent]) -> None:
        """Check and keep."""
        for event in events:
            if isinstance(event, PeerLost):
                assert not self.reported(event.peer), f"{event}: the loss was reported before"
                self.peer_events.append(event)
            elif isinstance(event, Settled):
                ended = self.ended.get(event.ticket)
                assert ended is not None, f"{event} before the ticket ended"
                assert not ended.quiesced, f"{event} after {ended}"
                assert event.ticket not in self.settled, f"{event} twice"
                self.settled.add(event.ticket)
            else:
                assert event.ticket not in self.ended, f"{event} after {self.ended[event.ticket]}"
                assert event.quiesced or event.error is not None, f"{event} is a success that is not quiet"
                assert event.quiesced or self._caps.late_writes, f"{event} without caps.late_writes"
                assert event.error is None or isinstance(event.error, TransportError | PeerLostError), f"{event}"
                assert event.error is None or str(event.error), f"{event}: an error without a message"
                self.ended[event.ticket] = event

    def lost(self, peer: Peer) -> bool:
        """Whether the transport has reported, in any way that it may, that the peer is gone."""
        return self.reported(peer) or any(ended.error is not None for ended in self.ended.values())

    def reported(self, peer: Peer) -> bool:
        """Whether a :class:`PeerLost` has."""
        return any(event.peer == peer for event in self.peer_events)


class Pair:
    """A source in this process and a target here or in a child, connected, with ``nbytes`` of memory each.

    Args:
        source: the end that writes.
        target: the end that is written to.
        nbytes: bytes of the first region of either side.
        timeout_s: how long anything may take.
    """

    def __init__(self, source: End, target: End | Child, nbytes: int, timeout_s: float) -> None:
        self.source = source
        self.target = target
        self.timeout_s = timeout_s
        self.log = Log(source.transport.caps)
        self.there = Log(source.transport.caps)
        self.others: list[End] = []
        self.data = noise(nbytes)
        self.want = np.full(nbytes, POISON, np.uint8)
        self.local = source.add(self.data)
        self.remote = target.add(self.want)
        self.peer = self.connect()

    @property
    def caps(self) -> Capabilities:
        """Of the transport under test."""
        return self.source.transport.caps

    def connect(self) -> Peer:
        """Connect, again, with the target's newest descriptor."""
        return self.source.connect(self.target.descriptor(), self.timeout_s)

    def submit(self, *rows: Row) -> Ticket:
        """Post writes between the first regions."""
        with at_most(self.timeout_s, "submit"):
            return self.source.submit(self.peer, batch(self.local, self.remote, rows))

    def put(self, *rows: Row) -> None:
        """Post writes that must succeed, in as many batches as the transport needs, and note what must be there."""
        most = self.caps.max_batch or max(len(rows), 1)
        tickets = [self.submit(*rows[i : i + most]) for i in range(0, len(rows), most)]
        for ticket in tickets:
            self.succeed(ticket)
        self.note(*rows)

    def land(self, ticket: Ticket, *rows: Row) -> None:
        """Poll until a ticket for these writes ends; it must end well, and nothing else may be there."""
        self.succeed(ticket)
        self.note(*rows)
        self.check()

    def note(self, *rows: Row) -> None:
        """These writes must be there."""
        for here, there, nbytes in rows:
            self.want[there : there + nbytes] = self.data[here : here + nbytes]

    def listen(self) -> None:
        """Poll the source once."""
        self.log.add(self.source.events())

    def heard(self, done: Callable[[], bool], what: str) -> None:
        """Poll the source alone until ``done()``."""
        wait(done, self.listen, self.timeout_s, what)

    def until_lost(self) -> None:
        """Write to the target until its loss is reported."""

        def work() -> None:
            self.submit((0, 0, len(self.data)))
            self.listen()

        wait(lambda: self.log.lost(self.peer), work, self.timeout_s, "the loss to be reported")

    def work(self) -> None:
        """Poll both ends, and those in ``others``, once."""
        for other in self.others:
            other.events()
        self.listen()
        self.there.add(self.target.events())

    def until(self, done: Callable[[], bool], what: str) -> None:
        """Poll both ends until ``done()``; after the timeout, an AssertionError has both ends' stacks."""
        what = f"{what} over {self.source.transport.name!r}"
        try:
            wait(done, self.work, self.timeout_s, what)
        except AssertionError as error:
            ends = f"\nsource:\n{_stacks(self.source)}\ntarget:\n{_stacks(self.target)}"
            raise AssertionError(f"{error}{ends}") from None

    def end(self, ticket: Ticket) -> WriteEnded:
        """Poll until the ticket ends."""
        self.until(lambda: ticket in self.log.ended, f"ticket {ticket} to end")
        return self.log.ended[ticket]

    def succeed(self, ticket: Ticket) -> None:
        """Poll until the ticket ends; it must end well."""
        ended = self.end(ticket)
        assert ended.error is None, f"{ended}"

    def check(self) -> None:
        """The target's first region holds what was written and, everywhere else, its poison."""
        same(self.target.read(self.remote), self.want)


def _stacks(end: End | Child) -> str:
    """The stacks of an end's threads; an end that stands still cannot report them."""
    try:
        return end.stacks()
    except (AssertionError, EOFError, OSError) as error:
        return f"cannot be asked: {error!r}"


def wait(done: Callable[[], bool], work: Callable[[], None], timeout_s: float, what: str) -> None:
    """Do ``work`` until ``done()``; an AssertionError after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        work()
        time.sleep(0.0002)


def watch(work: Callable[[], None], seconds: float) -> None:
    """Do ``work`` for a while: for what must not happen."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        work()
        time.sleep(0.002)


def same(found: U8, want: U8) -> None:
    """Two memories are equal; otherwise an AssertionError gives the first difference and the number of wrong bytes."""
    assert found.shape == want.shape, f"{found.shape} bytes instead of {want.shape}"
    wrong = np.flatnonzero(found != want)
    assert not len(wrong), (
        f"{len(wrong)} of {len(want)} bytes are wrong; byte {wrong[0]} is {found[wrong[0]]}, not {want[wrong[0]]}"
    )


@contextmanager
def refused(error: type[E], what: str) -> Iterator[list[E]]:
    """The block raises ``error``, which the list then has; else an AssertionError says that ``what`` is not refused."""
    raised: list[E] = []
    try:
        yield raised
    except error as one:
        raised.append(one)
        return
    except Exception as other:
        raise AssertionError(f"{what}: refused with {other!r}, not with a {error.__name__}") from other
    raise AssertionError(f"{what}: not refused; wanted a {error.__name__}")
