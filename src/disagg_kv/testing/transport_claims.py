"""The part of the transport suite about ``caps``: each claim that can be shown false, and calls that must not block."""

from __future__ import annotations

import time
from contextlib import suppress

import numpy as np
import pytest

from ..errors import DisaggKVError
from ..transports import SupportsAllocate
from .ends import Child, End
from .limits import at_most
from .pair import POISON, Log, Pair, batch, noise, same, wait, watch
from .transport_cases import NBYTES, TransportCases, VictimCases

PATIENCE_S = 10.0
"""The longest ``drain_s`` that the suite waits for."""

WATCHED_S = 0.5
"""How long memory is watched after ``drain_s``."""


class ClaimCases(TransportCases):
    """Claims that need no process of their own."""

    def test_own_memory_only_comes_with_memory_of_its_own(self, end: End) -> None:
        """With ``caps.own_memory_only``, peers can write to what ``allocate`` gives, so there must be one."""
        if end.transport.caps.own_memory_only:
            assert isinstance(end.transport, SupportsAllocate), "caps.own_memory_only, but there is no allocate"

    def test_memory_from_elsewhere_is_a_target(self, pair: Pair) -> None:
        """Without ``caps.own_memory_only``."""
        if pair.caps.own_memory_only or "cpu" not in pair.caps.devices:
            pytest.skip("own memory only, or not for CPU memory")
        region = pair.target.add_plain(np.full(NBYTES, POISON, np.uint8))
        pair.succeed(pair.source.submit(pair.connect(), batch(pair.local, region, [(3, 5, 1000)])))
        want = np.full(NBYTES, POISON, np.uint8)
        want[5:1005] = pair.data[3:1003]
        same(pair.target.read(region), want)

    def test_a_batch_of_max_batch_descriptors_is_taken(self, pair: Pair) -> None:
        """All that ``caps.max_batch`` allows."""
        if pair.caps.max_batch is None:
            pytest.skip("no limit")
        pair.put(*((i, i, 1) for i in range(min(pair.caps.max_batch, NBYTES))))
        pair.check()

    def test_another_process_is_out_of_reach_where_both_sides_must_be_in_one(self, end: End, child: Child) -> None:
        """With ``caps.in_process_only``: a transport that does reach it must not say otherwise."""
        if not end.transport.caps.in_process_only:
            pytest.skip("crosses processes")
        child.open()
        want = np.full(NBYTES, POISON, np.uint8)
        remote, local, log = child.add(want), end.add(noise(NBYTES)), Log(end.transport.caps)
        try:
            peer = end.connect(child.descriptor(), self.timeout_s)
            ticket = end.submit(peer, batch(local, remote, [(0, 0, NBYTES)]))
        except DisaggKVError:
            return
        wait(lambda: ticket in log.ended, lambda: log.add(end.events()), self.timeout_s, f"ticket {ticket} to end")
        assert log.ended[ticket].error is not None, "caps.in_process_only, but a write to another process succeeds"
        same(child.read(remote), want)
        child.close(self.timeout_s)

    def test_the_suite_can_reach_a_peer(self, end: End) -> None:
        """In this process, or in another one."""
        reached = self.one_process or not end.transport.caps.in_process_only
        assert reached, "caps.in_process_only, and one_process = False: nothing could be tested"

    def test_writes_progress_while_their_target_does_not_poll(self, pair: Pair) -> None:
        """Without ``caps.needs_target_polling``."""
        if pair.caps.needs_target_polling:
            pytest.skip("needs_target_polling")
        pair.put((0, 0, 10))
        pair.target.rest(True)
        ticket = pair.submit((1000, 1000, NBYTES - 1000))
        what = "a write to a target that does not poll, without caps.needs_target_polling,"
        pair.heard(lambda: ticket in pair.log.ended, what)
        pair.target.rest(False)
        pair.land(ticket, (1000, 1000, NBYTES - 1000))

    def test_submit_does_not_wait_for_a_target_that_does_not_poll(self, pair: Pair) -> None:
        """Nor does ``poll``; the write lands once the target polls again."""
        pair.put((0, 0, 10))
        pair.target.rest(True)
        with at_most(pair.timeout_s, "submit or poll, for a target that does not poll"):
            ticket = pair.submit((1000, 1000, NBYTES - 1000))
            for _ in range(20):
                pair.listen()
        pair.target.rest(False)
        pair.land(ticket, (1000, 1000, NBYTES - 1000))

    def test_a_closed_peer_is_reported(self, pair: Pair) -> None:
        """With ``caps.detects_peer_death`` and ``caps.in_process_only``: no process can die, a transport can close."""
        if not (pair.caps.detects_peer_death and pair.caps.in_process_only):
            pytest.skip("a killed process is asked for instead, or no loss is detected")
        pair.target.close(0.0)
        pair.until_lost()
        for _ in range(50):
            pair.listen()


class LossCases(VictimCases):
    """Claims about peers that die or freeze."""

    def test_a_loss_is_reported_once_and_ends_tickets_without_raising(self, apart: Pair, victim: Child) -> None:
        """``submit`` to a lost peer that is still connected returns a ticket, which fails."""
        victim.kill()
        victim.wait()
        tickets = []
        for number in range(20):
            try:
                tickets.append(apart.submit((0, 0, 10)))
                apart.listen()
            except DisaggKVError as error:
                pytest.fail(f"submit {number} to a lost peer raises instead of ending its ticket: {error!r}")
            time.sleep(0.002)
        if not apart.caps.detects_peer_death:
            return
        ended = apart.log.ended
        apart.heard(lambda: apart.log.lost(apart.peer), "the loss, as caps.detects_peer_death says,")
        apart.heard(lambda: set(tickets) <= set(ended), "tickets of a lost peer to end")
        for _ in range(100):
            apart.listen()
        last = apart.submit((0, 0, 10))
        apart.heard(lambda: last in ended, "a ticket that was posted after the loss to end")
        assert ended[last].error is not None, "a write to a lost peer is reported as done"

    def test_nothing_waits_for_a_frozen_peer(self, apart: Pair, victim: Child) -> None:
        """``submit`` and ``poll`` return at once, ``connect`` after its ``timeout_s``; later all of it lands."""
        apart.put((0, 0, 100))
        descriptor = victim.descriptor()
        fresh = End(self.factory(), self.memory())
        victim.pause()
        try:
            with at_most(apart.timeout_s, "submit or poll for a frozen peer"):
                ticket = apart.submit((1000, 1000, 5000))
                for _ in range(20):
                    apart.listen()
            with (
                at_most(apart.timeout_s, "connect to a frozen peer, with timeout_s of 0.5,"),
                suppress(DisaggKVError),
            ):
                fresh.connect(descriptor, 0.5)
        finally:
            victim.resume()
        apart.land(ticket, (1000, 1000, 5000))
        fresh.close(0.0)

    def test_writes_of_a_killed_process_have_landed_after_drain_s(self, apart: Pair, victim: Child) -> None:
        """Counted from the end of the process; with a ``caps.drain_s`` for which the suite has the patience."""
        drain_s = apart.caps.drain_s
        if drain_s is None or drain_s > PATIENCE_S:
            pytest.skip(f"drain_s is {drain_s}")
        mine = apart.source.add(np.full(NBYTES, POISON, np.uint8))
        back = victim.connect(apart.source.descriptor(), self.timeout_s)
        zero = np.zeros(NBYTES, np.uint8)
        apart.source.fill(mine, zero)
        victim.write_on(back, batch(apart.remote, mine, [(0, 0, NBYTES)]))
        apart.heard(lambda: bool(apart.source.read(mine).any()), "the peer to write")
        victim.kill()
        victim.wait()
        time.sleep(drain_s)
        apart.source.fill(mine, zero)
        watch(apart.listen, WATCHED_S)
        late = int(np.count_nonzero(apart.source.read(mine)))
        assert not late, f"{late} bytes of a process landed more than drain_s = {drain_s:g} s after its end"
