"""Who gets ring bytes next."""

from __future__ import annotations

import pytest

from disagg_kv.errors import ConfigurationError, LocalProtocolError, OversizeError
from disagg_kv.ids import VirtualOffset
from disagg_kv.staging import GrantQueue, Lease, RingStagingAllocator

PLACE = 256
EIGHTH = 8 * PLACE
CAPACITY = 8 * EIGHTH

Queue = GrantQueue[str, str]


@pytest.fixture
def queue() -> Queue:
    return GrantQueue(RingStagingAllocator(CAPACITY))


def ready(queue: Queue, peer: str, *keys: str, nbytes: int = EIGHTH) -> list[Lease | None]:
    return [queue.request(peer, key, nbytes, lookahead=False) for key in keys]


def granted(queue: Queue) -> list[str]:
    """Keys granted now, in order."""
    keys = [key for key, _ in queue.grants()]
    queue.check_integrity()
    return keys


def fill(queue: Queue) -> list[str]:
    """Take the whole ring, half for each of two peers; the keys."""
    keys = [f"{peer}{index}" for index in range(4) for peer in ("full", "whole")]
    for key in keys:
        assert ready(queue, key[:-1], key) != [None]
    return keys


class TestOneRequest:
    def test_it_is_granted_at_once_where_nobody_waits(self, queue: Queue) -> None:
        assert ready(queue, "p", "a") == [Lease(VirtualOffset(0), EIGHTH, CAPACITY)]
        assert granted(queue) == []

    def test_a_repeated_request_returns_the_same_lease(self, queue: Queue) -> None:
        """It leaks nothing."""
        first, second = ready(queue, "p", "a", "a")
        assert first is second is not None
        assert queue.waiting == 0

    def test_a_repeated_request_waits_once(self, queue: Queue) -> None:
        keys = fill(queue)
        assert ready(queue, "p", "a", "a", "a") == [None] * 3
        assert queue.waiting == 1
        queue.release(keys[0])
        queue.release(keys[1])
        assert granted(queue) == ["a"]

    def test_more_than_an_eighth_of_the_ring_is_refused_with_both_sizes(self, queue: Queue) -> None:
        assert queue.lease_limit == EIGHTH
        with pytest.raises(OversizeError, match=f"{EIGHTH + 1} bytes requested, but there are only {EIGHTH}"):
            ready(queue, "p", "a", nbytes=EIGHTH + 1)

    def test_no_bytes_are_refused(self, queue: Queue) -> None:
        with pytest.raises(ConfigurationError, match="'a' of 'p': 0 bytes"):
            ready(queue, "p", "a", nbytes=0)

    def test_a_key_is_one_peers_and_keeps_its_size(self, queue: Queue) -> None:
        ready(queue, "p", "a")
        with pytest.raises(LocalProtocolError, match=f"{EIGHTH} bytes of 'q', but it is {EIGHTH} bytes of 'p'"):
            ready(queue, "q", "a")
        queue.suspend("q")
        ready(queue, "q", "b")
        with pytest.raises(LocalProtocolError, match=f"1 bytes of 'q', but it is {EIGHTH} bytes of 'q'"):
            ready(queue, "q", "b", nbytes=1)

    def test_release_gives_the_bytes_back_once(self, queue: Queue) -> None:
        keys = fill(queue)
        ready(queue, "p", "a", "b")
        queue.release(keys[0])
        queue.release(keys[0])
        assert granted(queue) == ["a"]

    def test_what_waits_is_cancelled_and_not_released(self, queue: Queue) -> None:
        keys = fill(queue)
        ready(queue, "p", "a", "b")
        with pytest.raises(LocalProtocolError, match="'a' has no lease to release"):
            queue.release("a")
        queue.cancel("a")
        queue.cancel("a")
        queue.cancel(keys[0])
        queue.release(keys[0])
        assert granted(queue) == ["b"]


class TestOrder:
    def test_peers_take_turns_and_each_peers_requests_keep_their_order(self, queue: Queue) -> None:
        """A peer with much to send does not delay one with little."""
        keys = fill(queue)
        ready(queue, "p", "p1", "p2", "p3")
        ready(queue, "q", "q1", "q2")
        for key in keys:
            queue.release(key)
        assert granted(queue) == ["p1", "q1", "p2", "q2", "p3"]

    def test_ready_data_goes_before_look_ahead(self, queue: Queue) -> None:
        keys = fill(queue)
        queue.request("p", "ahead", EIGHTH, lookahead=True)
        ready(queue, "q", "q1")
        for key in keys[:2]:
            queue.release(key)
        assert granted(queue) == ["q1", "ahead"]

    def test_look_ahead_gets_nothing_while_ready_data_waits_for_bytes(self, queue: Queue) -> None:
        """A small look-ahead does not take the gap that ready data is waiting to see grow."""
        keys = fill(queue)
        queue.request("p", "ahead", PLACE, lookahead=True)
        queue.release(keys[0])
        ready(queue, "r", "small", nbytes=PLACE)
        ready(queue, "q", "q1")
        assert granted(queue) == ["small"]
        queue.release(keys[1])
        assert granted(queue) == ["q1", "ahead"]

    def test_one_peers_look_ahead_does_not_wait_for_anothers(self, queue: Queue) -> None:
        keys = fill(queue)
        queue.release(keys[0])
        ready(queue, "r", "almost", nbytes=EIGHTH - PLACE)
        for _ in range(2):
            assert queue.request("p", "large", EIGHTH, lookahead=True) is None
            assert queue.request("q", "small", PLACE, lookahead=True) is None
        assert granted(queue) == ["small"]

    @pytest.mark.parametrize("again", [True, False])
    def test_look_ahead_that_became_ready_waits_with_the_ready(self, queue: Queue, again: bool) -> None:
        keys = fill(queue)
        queue.request("p", "ahead1", PLACE, lookahead=True)
        queue.request("p", "ahead2", PLACE, lookahead=True)
        if again:
            queue.request("p", "ahead2", PLACE, lookahead=False)
        else:
            queue.promote("ahead2")
        queue.promote("ahead2")
        queue.promote("unknown")
        queue.release(keys[0])
        assert granted(queue) == ["ahead2", "ahead1"]


class TestLimits:
    def test_look_ahead_holds_a_quarter_at_most(self, queue: Queue) -> None:
        """So ready data always moves."""
        for key in ("a", "b", "c"):
            queue.request("p", key, EIGHTH, lookahead=True)
        assert queue.waiting == 1
        assert ready(queue, "p", "now") == [None]
        assert granted(queue) == ["now"]
        queue.promote("a")
        assert granted(queue) == ["c"]
        queue.release("b")
        assert queue.request("p", "d", EIGHTH, lookahead=True) is not None
        queue.check_integrity()

    def test_one_peer_alone_may_have_the_whole_ring(self, queue: Queue) -> None:
        keys = [str(index) for index in range(8)]
        assert None not in ready(queue, "p", *keys)

    def test_one_peer_holds_half_while_several_are_connected(self, queue: Queue) -> None:
        """The other half stays for the others."""
        queue.connect("q")
        keys = [str(index) for index in range(5)]
        assert [lease is not None for lease in ready(queue, "p", *keys)] == [True] * 4 + [False]
        ready(queue, "q", "q1")
        assert granted(queue) == ["q1"]
        queue.release("q1")
        queue.forget("q")
        assert granted(queue) == ["4"]

    def test_a_suspended_peer_gets_nothing_and_keeps_its_place(self, queue: Queue) -> None:
        queue.suspend("p")
        assert ready(queue, "p", "p1", "p2") == [None, None]
        ready(queue, "q", "q1")
        assert granted(queue) == ["q1"]
        queue.resume("p")
        queue.resume("unknown")
        assert granted(queue) == ["p1", "p2"]

    def test_a_forgotten_peer_waits_no_more_and_its_leases_stay(self, queue: Queue) -> None:
        """Forgetting is no evidence."""
        keys = fill(queue)
        ready(queue, "full", "late")
        queue.request("full", "later", EIGHTH, lookahead=True)
        queue.forget("full")
        queue.forget("unknown")
        assert queue.waiting == 0
        ready(queue, "q", "q1")
        assert granted(queue) == []
        queue.release(keys[0])
        assert granted(queue) == ["q1"]


class TestQuarantine:
    def test_it_is_counted_per_peer_and_in_all_until_released(self, queue: Queue) -> None:
        ready(queue, "p", "p1", "p2")
        ready(queue, "q", "q1", nbytes=PLACE)
        for key in ("p1", "p1", "q1"):
            queue.quarantine(key)
        assert [queue.quarantined_bytes(peer) for peer in ("p", "q", None)] == [EIGHTH, PLACE, EIGHTH + PLACE]
        queue.release("p1")
        assert queue.quarantined_bytes() == PLACE

    def test_what_has_no_lease_cannot_be_quarantined(self, queue: Queue) -> None:
        queue.suspend("p")
        ready(queue, "p", "waits")
        for key in ("waits", "unknown"):
            with pytest.raises(LocalProtocolError, match=f"'{key}' has no lease"):
                queue.quarantine(key)

    def test_a_frozen_peer_does_not_stop_the_others(self, queue: Queue) -> None:
        """A request of 20 rings passes in segments while half the ring waits for evidence."""
        for key in ("f1", "f2", "f3", "f4"):
            ready(queue, "frozen", key)
            queue.quarantine(key)
        queue.suspend("frozen")
        moving: list[str] = []
        for segment in map(str, range(160)):
            if ready(queue, "alive", segment) == [None]:
                queue.release(moving.pop(0))
                assert granted(queue) == [segment]
            moving.append(segment)


class TestNobodyStarves:
    def crumbs(self, queue: Queue) -> list[str]:
        """The ring full of small leases of two peers, every second one the other's."""
        keys = [f"{'ab'[index % 2]}{index}" for index in range(CAPACITY // PLACE)]
        for key in keys:
            assert ready(queue, key[0], key, nbytes=PLACE) != [None]
        return keys

    def test_a_large_request_is_passed_a_few_times_and_then_waited_for(self, queue: Queue) -> None:
        """Small requests, always there, do not starve a large one."""
        held = self.crumbs(queue)
        ready(queue, "large", "large")
        passed = 0
        for index in range(len(held) * 4):
            ready(queue, "ab"[index % 2], f"{'ab'[index % 2]}-{index}", nbytes=PLACE)
            queue.release(held.pop(0))
            now = granted(queue)
            held += now
            if "large" in now:
                break
            passed += len(now)
        else:
            pytest.fail("the large request was never granted")
        assert 8 <= passed <= 10

    @pytest.mark.parametrize("why", ["quarantined", "suspended", "look-ahead"])
    def test_nobody_waits_for_a_gap_that_may_never_come(self, queue: Queue, why: str) -> None:
        """Leases that stay for long leave no gap for the large request; the others go on."""
        for index in range(CAPACITY // PLACE // 4):
            stuck = f"stuck{index}"
            queue.request("stuck", stuck, PLACE, lookahead=why == "look-ahead")
            for more in range(3):
                ready(queue, "ab"[index % 2], f"{stuck} {more}", nbytes=PLACE)
            if why == "quarantined":
                queue.quarantine(stuck)
        if why == "suspended":
            queue.suspend("stuck")
        ready(queue, "large", "large")
        moving = "stuck0 0"
        for key in map(str, range(30)):
            ready(queue, "a", key, nbytes=PLACE)
            queue.release(moving)
            assert granted(queue) == [key]
            moving = key
        assert queue.waiting == 1
