"""The part of the transport suite about what must not happen later: after a ticket, a region or a transport ended."""

from __future__ import annotations

import time

import numpy as np
import pytest

from ..errors import RemoteProtocolError
from ..ids import RegionId
from ..transports import WriteEnded
from .ends import End
from .pair import POISON, Pair, batch, noise, refused, same, wait, watch
from .transport_cases import NBYTES, TransportCases

WATCHED_S = 0.2
"""How long memory is watched that nothing may write to."""

LARGE = (4 << 20) + 3
"""Bytes of one write that no transport may cut short."""


def fenced(pair: Pair, region: RegionId, watched_s: float) -> None:
    """Poll the source for a while; if the target's fence is reported in it, nothing lands in the region any more."""
    until = time.monotonic() + watched_s
    while not any(event.fenced for event in pair.log.peer_events):
        if time.monotonic() > until:
            return
        pair.listen()
    zero = np.zeros(NBYTES, np.uint8)
    pair.source.fill(region, zero)
    watch(pair.listen, watched_s)
    same(pair.source.read(region), zero)


class AfterwardsCases(TransportCases):
    """What has ended stays ended."""

    def test_nothing_is_read_or_written_after_a_ticket_has_ended(self, pair: Pair) -> None:
        """Either side uses its memory for something else at once."""
        pair.succeed(pair.submit((0, 0, NBYTES)))
        pair.source.fill(pair.local, noise(NBYTES, 3))
        watch(pair.work, WATCHED_S)
        same(pair.target.read(pair.remote), pair.data)
        other = noise(NBYTES, 4)
        pair.target.fill(pair.remote, other)
        watch(pair.work, WATCHED_S)
        same(pair.target.read(pair.remote), other)

    def test_nothing_is_written_by_tickets_that_close_calls_quiet(self, pair: Pair) -> None:
        """Those that ``close`` does not return."""
        for _ in range(10):
            pair.submit((0, 0, NBYTES))
        if pair.source.close(0.0):
            pytest.skip("some tickets are not quiet, and close says so")
        pair.target.fill(pair.remote, pair.want)
        watch(pair.work, WATCHED_S)
        pair.check()

    def test_a_closed_peer_writes_nothing_after_its_fence(self, pair: Pair) -> None:
        """What ``PeerLost(fenced=True)`` claims, where a peer is reported that lives on."""
        mine = pair.source.add(np.full(NBYTES, POISON, np.uint8))
        back = pair.target.connect(pair.source.descriptor(), self.timeout_s)
        for _ in range(10):
            pair.target.submit(back, batch(pair.remote, mine, [(0, 0, NBYTES)]))
        pair.target.close(0.0)
        fenced(pair, mine, WATCHED_S)

    def test_a_region_may_begin_and_end_anywhere_in_an_allocation(self, pair: Pair) -> None:
        """Offsets count from the region, not from the allocation; bytes around it stay as they are."""
        whole = np.full(20_000, POISON, np.uint8)
        parts = [(8192, 4096), (5000, 1001), (1, 19_998)]
        for seed, (first, nbytes) in enumerate(parts):
            data = noise(20_000, seed)
            mine, theirs = pair.source.add_part(data, first, nbytes), pair.target.add_part(whole, first, nbytes)
            peer = pair.connect()
            pair.succeed(pair.source.submit(peer, batch(mine, theirs, [(7, 10, 500)])))
            want = whole.copy()
            want[first + 10 : first + 510] = data[first + 7 : first + 507]
            same(pair.target.read_whole(theirs), want)

    def test_one_large_write_lands_whole(self, pair: Pair) -> None:
        """Megabytes in one descriptor, with an odd byte at the end."""
        data = noise(LARGE, 5)
        mine, theirs = pair.source.add(data), pair.target.add(np.full(LARGE, POISON, np.uint8))
        pair.succeed(pair.source.submit(pair.connect(), batch(mine, theirs, [(0, 0, LARGE)])))
        same(pair.target.read(theirs), data)

    def test_a_transport_reports_its_own_tickets_only(self, pair: Pair) -> None:
        """Two of them in one process share no events."""
        other = End(self.factory(), self.memory())
        region = other.add(pair.data)
        peer = other.connect(pair.target.descriptor(), self.timeout_s)
        ticket = pair.submit((0, 0, 100))
        for _ in range(50):
            foreign = [event for event in other.events() if isinstance(event, WriteEnded)]
            assert not foreign, f"{foreign} of another transport's ticket"
            time.sleep(0.001)
        pair.succeed(ticket)
        ticket = other.submit(peer, batch(region, pair.remote, [(0, 0, 100)]))
        ended: list[WriteEnded] = []

        def work() -> None:
            foreign = [event for event in pair.source.events() if isinstance(event, WriteEnded)]
            assert not foreign, f"{foreign} of another transport's ticket"
            ended.extend(event for event in other.events() if isinstance(event, WriteEnded))
            pair.there.add(pair.target.events())

        wait(lambda: bool(ended), work, pair.timeout_s, "the ticket of the second transport to end")
        assert [(event.ticket, event.error) for event in ended] == [(ticket, None)], f"{ended} for ticket {ticket}"
        other.close(self.timeout_s)

    def test_a_descriptor_of_another_version_is_refused(self, pair: Pair) -> None:
        """By ``connect`` and by ``peer_of``; see :meth:`of_another_version`."""
        later = self.of_another_version(pair.target.descriptor())
        if later is None:
            pytest.skip("a descriptor that disagg_kv.transports.encode did not make; override of_another_version")
        with refused(RemoteProtocolError, "connect with a descriptor of another version"):
            pair.source.connect(later, self.timeout_s)
        with refused(RemoteProtocolError, "peer_of of a descriptor of another version"):
            pair.source.transport.peer_of(later)
        pair.put((0, 0, 100))
        pair.check()
