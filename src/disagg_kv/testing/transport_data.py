"""The part of the transport suite about batches: what lands, what is refused, what is reported."""

from __future__ import annotations

import numpy as np
import pytest

from ..errors import RegistrationError, TransportError
from ..ids import Peer
from ..planning import Writes
from .pair import POISON, Pair, batch, noise, refused, same
from .transport_cases import NBYTES, TransportCases

HUGE = (1 << 63) - 1


class DataCases(TransportCases):
    """Writes and their tickets."""

    @pytest.mark.parametrize("nbytes", [1, 2, 3, 7, 255, 256, 4095, 4097, 32768])
    def test_bytes_of_a_write_are_at_the_target_when_its_ticket_ends(self, pair: Pair, nbytes: int) -> None:
        """At any size and alignment, and nowhere else."""
        pair.put((5, 11, nbytes))
        pair.check()
        pair.put((0, NBYTES - nbytes, nbytes))
        pair.check()

    def test_a_whole_region_is_written(self, pair: Pair) -> None:
        """From its first to its last byte."""
        pair.put((0, 0, NBYTES))
        pair.check()

    def test_a_batch_of_30000_small_writes_lands_whole(self, pair: Pair) -> None:
        """As the per-token path posts them; the target keeps its poison in between."""
        order = np.random.default_rng(1).permutation(30000)
        pair.put(*((2 * int(i), 2 * int(k), 1) for i, k in enumerate(order)))
        pair.check()

    def test_writes_of_one_batch_use_many_regions(self, pair: Pair) -> None:
        """Regions distinguish sources and targets, not the order of addresses."""
        mine = [pair.source.add(noise(100, seed)) for seed in (1, 2)]
        theirs = [pair.target.add(np.full(100, POISON, np.uint8)) for _ in range(2)]
        peer = pair.connect()
        local, remote = np.array([mine[1], mine[0]], np.int32), np.array(theirs, np.int32)
        offsets = np.array([10, 20], np.int64)
        ticket = pair.source.submit(peer, Writes(local, offsets, remote, offsets + 1, np.array([30, 40], np.int64)))
        pair.succeed(ticket)
        for region, seed, at, nbytes in ((theirs[0], 2, 10, 30), (theirs[1], 1, 20, 40)):
            want = np.full(100, POISON, np.uint8)
            want[at + 1 : at + 1 + nbytes] = noise(100, seed)[at : at + nbytes]
            same(pair.target.read(region), want)

    def test_one_source_range_is_written_to_several_places(self, pair: Pair) -> None:
        """Sources may overlap."""
        pair.put((0, 0, 1000), (0, 1000, 1000), (500, 2000, 1000))
        pair.check()

    def test_targets_that_overlap_hold_a_byte_of_either_write(self, pair: Pair) -> None:
        """The order of the writes of one batch is not promised, but no third value appears."""
        pair.succeed(pair.submit((0, 0, 1000), (2000, 500, 1000)))
        found = pair.target.read(pair.remote)
        first, second = pair.want.copy(), pair.want.copy()
        first[:1000], second[500:1500] = pair.data[:1000], pair.data[2000:3000]
        assert bool(((found == first) | (found == second)).all()), "a byte of neither write"
        same(found[:500], first[:500])
        same(found[1000:], second[1000:])

    def test_later_batches_replace_earlier_ones_that_have_ended(self, pair: Pair) -> None:
        """The end of a ticket orders it before what is posted next."""
        for i in range(10):
            pair.put((i, 0, 4000))
        pair.check()

    def test_an_empty_batch_ends_well(self, pair: Pair) -> None:
        """It has nothing to wait for."""
        pair.put()
        pair.succeed(pair.submit())
        pair.check()

    def test_writes_of_no_bytes_write_nothing(self, pair: Pair) -> None:
        """Also at the end of a region, among others or alone."""
        pair.put((0, 0, 0), (NBYTES, NBYTES, 0), (1, 2, 3), (7, 7, 0))
        pair.succeed(pair.submit((0, 0, 0)))
        pair.check()

    def test_each_ticket_ends_exactly_once_and_is_never_used_twice(self, pair: Pair) -> None:
        """Also when several are posted before the first poll."""
        tickets = [pair.submit((i, i, 1)) for i in range(50)]
        assert len(set(tickets)) == 50, f"tickets are used twice: {tickets}"
        for ticket in tickets:
            pair.succeed(ticket)
        pair.succeed(pair.submit((0, 0, 1)))
        assert len(pair.log.ended) == 51, "tickets are used twice, or events are of unknown tickets"

    @pytest.mark.parametrize(
        "bad",
        [
            (NBYTES - 9, 0, 10), (0, NBYTES - 9, 10), (NBYTES + 1, 0, 0), (0, NBYTES + 1, 0), (-1, 0, 2), (0, -1, 2),
            (0, 0, -1), (10, 10, -1), (0, 0, NBYTES + 1), (HUGE, 0, 10), (0, HUGE, 10), (8, 8, HUGE), (0, -HUGE - 1, 1),
        ],
    )  # fmt: skip
    def test_a_range_outside_its_region_is_refused_before_anything_is_written(
        self, pair: Pair, bad: tuple[int, int, int]
    ) -> None:
        """Also when the writes before and after it are good."""
        with refused(
            RegistrationError, f"a batch with {bad}, which is (offset here, offset there, bytes) outside a region"
        ):
            pair.submit((0, 0, 100), bad, (200, 200, 100))
        pair.put((300, 300, 10))
        pair.check()

    def test_unknown_regions_are_refused_before_anything_is_written(self, pair: Pair) -> None:
        """Of either side."""
        for local, remote in ((pair.local + 1000, pair.remote), (pair.local, pair.remote + 1000), (-1, pair.remote)):
            ids = np.array([pair.local, local], np.int32), np.array([pair.remote, remote], np.int32)
            zero = np.zeros(2, np.int64)
            with refused(
                RegistrationError, f"a batch with the unknown region {local} of this side, or {remote} of the peer"
            ):
                pair.source.submit(pair.peer, Writes(ids[0], zero, ids[1], zero, zero + 8))
        pair.put((300, 300, 10))
        pair.check()

    def test_too_many_descriptors_are_refused(self, pair: Pair) -> None:
        """More than ``caps.max_batch``."""
        if pair.caps.max_batch is None:
            pytest.skip("no limit")
        with refused(TransportError, "a batch of one descriptor more than caps.max_batch"):
            pair.submit(*((0, 0, 1) for _ in range(pair.caps.max_batch + 1)))
        pair.check()

    def test_an_unknown_peer_is_refused(self, pair: Pair) -> None:
        """It is not looked for."""
        with refused(TransportError, "a batch for an unknown peer"):
            pair.source.submit(Peer(b"\0" * 16), batch(pair.local, pair.remote, [(0, 0, 1)]))
