"""What every :class:`~disagg_kv.rendezvous.Rendezvous` must do: a suite to inherit.

::

    class TestMine(RendezvousSuite):
        @pytest.fixture
        def rendezvous(self):
            return MyRendezvous()

Needs pytest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from ..errors import ConfigurationError, InstanceClosedError
from ..ids import Rank
from ..rendezvous import Rendezvous, Source, SupportsWithdraw

Another = Callable[[], Rendezvous]


class RendezvousSuite:
    """Promises of a rendezvous. Subclasses give the fixture ``rendezvous``, and ``another`` where there are others.

    What one object publishes is known to its own ``lookup`` at once, and to that of others within ``settle_s``.
    """

    settle_s = 10.0
    """How long another process's look-up may take to learn what was published, in seconds."""

    @pytest.fixture
    def rendezvous(self) -> Rendezvous:
        """A new one, which knows of no instance."""
        raise NotImplementedError

    @pytest.fixture
    def another(self) -> Another | None:
        """Makes an object of another process, which shares all addresses with ``rendezvous``; None: there is none."""
        return None

    def test_addresses_come_in_the_order_of_ranks(self, rendezvous: Rendezvous) -> None:
        """Whatever the order in which they were published."""
        for rank in (2, 0, 1):
            rendezvous.publish("prefill", Rank(rank), 3, f"address {rank}")
        assert rendezvous.lookup(Source("prefill")) == ("address 0", "address 1", "address 2")

    def test_nothing_is_known_until_all_ranks_are(self, rendezvous: Rendezvous) -> None:
        """A part of the ranks is no instance; the look-up does not wait for the others."""
        assert rendezvous.lookup(Source("prefill")) is None
        rendezvous.publish("prefill", Rank(1), 2, "one")
        assert rendezvous.lookup(Source("prefill")) is None
        rendezvous.publish("prefill", Rank(0), 2, "zero")
        assert rendezvous.lookup(Source("prefill")) == ("zero", "one")

    def test_a_restarted_rank_replaces_its_address(self, rendezvous: Rendezvous) -> None:
        """The last address counts."""
        rendezvous.publish("prefill", Rank(0), 1, "old")
        rendezvous.publish("prefill", Rank(0), 1, "new")
        assert rendezvous.lookup(Source("prefill")) == ("new",)

    def test_instances_differ_whatever_their_names(self, rendezvous: Rendezvous) -> None:
        """Also by names that look like keys, paths or numbers."""
        names = ["a", "a/0", 'a", 0', "ä b", "a/1/0", "%61", "..", "\n", "ranks", "A" * 256]
        for name in names:
            rendezvous.publish(name, Rank(0), 1, f"address of {name}")
        assert [rendezvous.lookup(Source(name)) for name in names] == [(f"address of {name}",) for name in names]

    @pytest.mark.parametrize(("rank", "world"), [(-1, 2), (2, 2), (0, 0)])
    def test_a_rank_outside_its_world_is_refused(self, rendezvous: Rendezvous, rank: int, world: int) -> None:
        """The error names both numbers."""
        with pytest.raises(ConfigurationError, match=f"rank {rank} is not one of {world}"):
            rendezvous.publish("prefill", Rank(rank), world, "address")

    def test_more_ranks_than_an_instance_may_have_are_refused(self, rendezvous: Rendezvous) -> None:
        """The error names the bound."""
        with pytest.raises(ConfigurationError, match="4097 ranks; at most 4096"):
            rendezvous.publish("prefill", Rank(0), 4097, "address")

    def test_an_instance_needs_a_name(self, rendezvous: Rendezvous) -> None:
        """An empty name is none."""
        with pytest.raises(ConfigurationError, match="no name"):
            rendezvous.publish("", Rank(0), 1, "address")

    def test_an_address_is_needed(self, rendezvous: Rendezvous) -> None:
        """And it is text."""
        for address in ("", b"address"):
            with pytest.raises(ConfigurationError, match="address"):
                rendezvous.publish("prefill", Rank(0), 1, address)  # type: ignore[arg-type]
        assert rendezvous.lookup(Source("prefill")) is None

    @pytest.mark.parametrize("world", [1, 2, 3, 5, 16, 40, 41])
    def test_ranks_that_disagree_about_their_number_are_refused(self, rendezvous: Rendezvous, world: int) -> None:
        """The error names both numbers, and nothing changes."""
        rendezvous.publish("prefill", Rank(0), 4, "zero")
        with pytest.raises(ConfigurationError, match=f"rank 0 publishes {world} ranks, others published 4"):
            rendezvous.publish("prefill", Rank(0), world, "other")
        for rank in range(4):
            rendezvous.publish("prefill", Rank(rank), 4, str(rank))
        assert rendezvous.lookup(Source("prefill")) == ("0", "1", "2", "3")

    def test_threads_may_publish_and_look_up_at_once(self, rendezvous: Rendezvous) -> None:
        """No rank is lost."""

        def rank(number: int) -> None:
            rendezvous.publish("prefill", Rank(number), 16, str(number))
            rendezvous.lookup(Source("prefill"))

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert rendezvous.lookup(Source("prefill")) == tuple(str(rank) for rank in range(16))

    def test_a_rank_that_was_withdrawn_is_not_there_until_it_returns(self, rendezvous: Rendezvous) -> None:
        """A second withdrawal changes nothing, and neither does that of a rank that was never published."""
        withdraw = supported(rendezvous)
        for rank in range(2):
            rendezvous.publish("prefill", Rank(rank), 2, f"address {rank}")
        withdraw.withdraw("prefill", Rank(1))
        withdraw.withdraw("prefill", Rank(1))
        withdraw.withdraw("decode", Rank(0))
        assert not known(rendezvous, "prefill")
        assert rendezvous.lookup(Source("decode")) is None
        rendezvous.publish("prefill", Rank(1), 2, "back")
        assert self.comes(rendezvous, "prefill") == ("address 0", "back")

    def test_another_process_finds_what_was_published(self, rendezvous: Rendezvous, another: Another | None) -> None:
        """Each rank in a process of its own; each finds all."""
        every = [rendezvous, *others(another, 2)]
        for rank, one in enumerate(every):
            one.publish("prefill", Rank(rank), 3, f"address {rank}")
        for one in every:
            assert self.comes(one, "prefill") == ("address 0", "address 1", "address 2")

    def test_a_restart_in_another_process_replaces_an_address(
        self, rendezvous: Rendezvous, another: Another | None
    ) -> None:
        """Also for processes that knew the old one."""
        first, successor, reader = rendezvous, *others(another, 2)
        first.publish("prefill", Rank(0), 1, "old")
        assert self.comes(reader, "prefill") == ("old",)
        successor.publish("prefill", Rank(0), 1, "new")
        for one in (reader, first):
            assert self.comes(one, "prefill", "new") == ("new",)

    def test_a_successor_is_not_withdrawn(self, rendezvous: Rendezvous, another: Another | None) -> None:
        """Another process has published the rank since, under the same address."""
        (successor,) = others(another, 1)
        withdraw = supported(rendezvous)
        rendezvous.publish("prefill", Rank(0), 1, "address")
        successor.publish("prefill", Rank(0), 1, "address")
        withdraw.withdraw("prefill", Rank(0))
        assert successor.lookup(Source("prefill")) == ("address",)
        assert self.comes(rendezvous, "prefill") == ("address",)

    def test_processes_that_disagree_about_their_number_are_refused(
        self, rendezvous: Rendezvous, another: Another | None
    ) -> None:
        """The first one counts."""
        (other,) = others(another, 1)
        rendezvous.publish("prefill", Rank(0), 4, "zero")
        with pytest.raises(ConfigurationError, match="rank 1 publishes 2 ranks, others published 4"):
            other.publish("prefill", Rank(1), 2, "one")

    def comes(self, rendezvous: Rendezvous, instance: str, last: str | None = None) -> tuple[str, ...] | None:
        """The addresses of an instance, as soon as they are known and end with ``last``, at most ``settle_s`` later."""
        until = time.monotonic() + self.settle_s
        while True:
            found = known(rendezvous, instance)
            if time.monotonic() > until or (found and last in (None, found[-1])):
                return found
            time.sleep(0.01)


def known(rendezvous: Rendezvous, instance: str) -> tuple[str, ...] | None:
    """The addresses of an instance; None: not all are known, or a rank has closed."""
    try:
        return rendezvous.lookup(Source(instance))
    except InstanceClosedError:
        return None


def supported(rendezvous: Rendezvous) -> SupportsWithdraw:
    """The same object, or the test is skipped."""
    if not isinstance(rendezvous, SupportsWithdraw):
        pytest.skip("addresses are not withdrawn")
    return rendezvous


def others(another: Another | None, number: int) -> list[Rendezvous]:
    """Objects of other processes, or the test is skipped."""
    if another is None:
        pytest.skip("no other process sees these addresses")
    return [another() for _ in range(number)]
