"""The part of the transport suite about peers that die, freeze and come back: real processes, real signals."""

from __future__ import annotations

import numpy as np
import pytest

from ..errors import PeerLostError, TransportError
from .ends import Child, End
from .pair import POISON, Log, Pair, batch, noise, same, wait, watch
from .transport_after import fenced
from .transport_cases import NBYTES, VictimCases
from .transport_events import FEW, MANY, FiredEvent, submit_after

WATCHED_S = 0.5
"""How long memory is watched that a lost peer may not write to any more."""


BACKLOG_S = 0.05
"""How long a peer writes while this process does not poll: what is left of it may land late."""


class ProcessCases(VictimCases):
    """A peer in a process of its own, which the test may kill."""

    def test_a_peer_that_was_killed_before_connect_is_lost(self, end: End, victim: Child) -> None:
        """Connecting fails, or the loss is reported afterwards; its memory is gone and no call hangs."""
        victim.open()
        remote = victim.add(np.zeros(NBYTES, np.uint8))
        descriptor = victim.descriptor()
        victim.kill()
        victim.wait()
        try:
            peer = end.connect(descriptor, self.timeout_s)
        except (PeerLostError, TransportError):
            return
        log, local = Log(end.transport.caps), end.add(noise(NBYTES))
        end.submit(peer, batch(local, remote, [(0, 0, NBYTES)]))
        if end.transport.caps.detects_peer_death:
            wait(lambda: log.lost(peer), lambda: log.add(end.events()), self.timeout_s, "the loss to be reported")

    def test_a_peer_that_was_killed_is_reported(self, apart: Pair, victim: Child) -> None:
        """As ``PeerLost`` or by a ticket that fails, whether or not anything is in flight."""
        apart.put((0, 0, 100))
        apart.check()
        victim.kill()
        if not apart.caps.detects_peer_death:
            apart.submit((0, 0, NBYTES))
            apart.source.events()
            return
        apart.until_lost()

    def test_a_peer_that_is_killed_during_writes_ends_or_leaves_every_ticket(self, apart: Pair, victim: Child) -> None:
        """No ticket is lost: each has ended, or ``close`` names it as not quiet."""
        tickets = [apart.submit((0, 0, NBYTES)) for _ in range(20)]
        victim.kill()
        tickets += [apart.submit((0, 0, NBYTES)) for _ in range(20)]
        left = apart.source.close(1.0)
        apart.listen()
        quiet = {t for t, ended in apart.log.ended.items() if ended.quiesced} | apart.log.settled
        assert set(tickets) - set(left) <= quiet, "tickets without any event"

    def test_what_waits_for_its_event_ends_with_its_peer(self, apart: Pair, victim: Child) -> None:
        """Nothing of it was posted: it is quiet at once, and its event may never happen."""
        if not (apart.caps.waits_events and apart.caps.detects_peer_death):
            pytest.skip("waits for no events, or for no peer's end")
        tickets = [submit_after(apart, rows, FiredEvent()) for rows in (FEW, MANY)]
        victim.kill()
        apart.heard(lambda: set(tickets) <= set(apart.log.ended), "the ends")
        ended = [apart.log.ended[ticket] for ticket in tickets]
        lost = all(isinstance(one.error, PeerLostError) and one.quiesced for one in ended)
        assert lost, f"{ended}: wanted a PeerLostError, and quiet tickets"

    def test_a_killed_peer_writes_nothing_after_its_fence(self, apart: Pair, victim: Child) -> None:
        """What ``PeerLost(fenced=True)`` claims, also if tickets fail before it is reported."""
        mine = apart.source.add(np.full(NBYTES, POISON, np.uint8))
        back = victim.connect(apart.source.descriptor(), self.timeout_s)
        victim.write_on(back, batch(apart.remote, mine, [(0, 0, NBYTES)]))
        zero = np.zeros(NBYTES, np.uint8)
        apart.source.fill(mine, zero)
        apart.heard(lambda: bool(apart.source.read(mine).any()), "the peer to write")
        watch(lambda: None, BACKLOG_S)
        victim.kill()
        victim.wait()
        if not apart.caps.detects_peer_death:
            return
        apart.until_lost()
        fenced(apart, mine, WATCHED_S)

    def test_a_peer_that_froze_and_woke_has_every_byte(self, apart: Pair, victim: Child) -> None:
        """A stopped process is not a dead one: the ticket may wait, the data is right in the end."""
        apart.put((0, 0, 100))
        victim.pause()
        ticket = apart.submit((1000, 1000, 5000))
        for _ in range(50):
            apart.listen()
        victim.resume()
        apart.land(ticket, (1000, 1000, 5000))
        assert not apart.log.peer_events, "a frozen peer was called lost"

    def test_a_peer_that_comes_back_is_another_peer(self, apart: Pair, victim: Child) -> None:
        """The same transport restarted in a new process; writes reach the new one."""
        victim.kill()
        fresh = Child(self.factory(), self.memory(), self.timeout_s)
        fresh.open()
        again = fresh.add(np.full(NBYTES, POISON, np.uint8))
        peer = apart.source.connect(fresh.descriptor(), self.timeout_s)
        assert peer != apart.peer, "a peer that was started again has the name of the one before"
        log = Log(apart.caps)
        ticket = apart.source.submit(peer, batch(apart.local, again, [(0, 0, 1000)]))

        def work() -> None:
            log.add(apart.source.events())
            fresh.events()

        wait(lambda: ticket in log.ended, work, self.timeout_s, f"ticket {ticket} to end")
        assert log.ended[ticket].error is None, f"{log.ended[ticket]}"
        same(fresh.read(again)[:1000], apart.data[:1000])
        fresh.stop()
