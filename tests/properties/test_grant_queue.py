"""The grant queue under random calls: its limits, its order and that nobody starves."""

from __future__ import annotations

from itertools import cycle
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from disagg_kv.staging import GrantQueue, Lease, RingStagingAllocator

PLACE = 4
CAPACITY = 64 * PLACE
PEERS = ("p", "q", "r")


class GrantQueueMachine(RuleBasedStateMachine):
    """A model that knows of each key only its peer, its size, and where it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = RingStagingAllocator(CAPACITY, PLACE)
        self.queue: GrantQueue[str, int] = GrantQueue(self.ring)
        self.next_key = 0
        self.owner: dict[int, str] = {}
        self.size: dict[int, int] = {}
        self.ready: list[int] = []
        self.ahead: list[int] = []
        self.leases: dict[int, Lease] = {}
        self.lookahead: set[int] = set()
        self.quarantined: set[int] = set()
        self.suspended: set[str] = set()

    def grant(self, key: int, lease: Lease) -> None:
        peer = self.owner[key]
        line = self.ready if key in self.ready else self.ahead
        assert peer not in self.suspended
        assert key == next(k for k in line if self.owner[k] == peer), "out of its peer's order"
        assert lease.nbytes == self.size[key]
        if line is self.ahead:
            self.lookahead.add(key)
        line.remove(key)
        self.leases[key] = lease
        held = sum(self.size[k] for k in self.leases if self.owner[k] == peer)
        several = {self.owner[k] for k in [*self.leases, *self.ready, *self.ahead]} | self.suspended
        assert held <= CAPACITY // 2 or len(several | {peer}) == 1

    @rule(peer=st.sampled_from(PEERS), nbytes=st.integers(1, CAPACITY // 8), lookahead=st.booleans())
    def request(self, peer: str, nbytes: int, lookahead: bool) -> None:
        key, self.next_key = self.next_key, self.next_key + 1
        self.owner[key], self.size[key] = peer, nbytes
        (self.ahead if lookahead else self.ready).append(key)
        lease = self.queue.request(peer, key, nbytes, lookahead=lookahead)
        if lease is not None:
            self.grant(key, lease)

    @precondition(lambda self: self.next_key)
    @rule(data=st.data())
    def request_again(self, data: st.DataObject) -> None:
        known = sorted({*self.ready, *self.ahead, *self.leases})
        if known:
            key = data.draw(st.sampled_from(known))
            lookahead = key in self.ahead or key in self.lookahead
            lease = self.queue.request(self.owner[key], key, self.size[key], lookahead=lookahead)
            assert lease is self.leases.get(key)

    @precondition(lambda self: self.ahead or self.lookahead)
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted({*self.ahead, *self.lookahead})))
        self.queue.promote(key)
        self.lookahead.discard(key)
        if key in self.ahead:
            self.ahead.remove(key)
            self.ready.append(key)

    @precondition(lambda self: self.ready or self.ahead)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted({*self.ready, *self.ahead})))
        self.queue.cancel(key)
        (self.ready if key in self.ready else self.ahead).remove(key)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.leases))))

    def end(self, key: int) -> None:
        self.queue.release(key)
        del self.leases[key]
        self.lookahead.discard(key)
        self.quarantined.discard(key)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.leases)))
        self.queue.quarantine(key)
        self.quarantined.add(key)

    @rule(peer=st.sampled_from(PEERS))
    def suspend(self, peer: str) -> None:
        self.queue.suspend(peer)
        self.suspended.add(peer)

    @rule(peer=st.sampled_from(PEERS))
    def resume(self, peer: str) -> None:
        self.queue.resume(peer)
        self.suspended.discard(peer)

    @rule(peer=st.sampled_from(PEERS))
    def forget(self, peer: str) -> None:
        self.queue.forget(peer)
        self.suspended.discard(peer)
        self.ready = [key for key in self.ready if self.owner[key] != peer]
        self.ahead = [key for key in self.ahead if self.owner[key] != peer]

    @rule()
    def grants(self) -> None:
        for key, lease in self.queue.grants():
            self.grant(key, lease)
        assert self.queue.grants() == []

    @invariant()
    def accounts(self) -> None:
        self.queue.check_integrity()
        self.ring.check_integrity()
        assert (self.ring.live_bytes > 0) == (len(self.leases) > 0)
        assert self.queue.waiting == len(self.ready) + len(self.ahead)
        assert sum(self.size[key] for key in self.lookahead) <= CAPACITY // 4
        assert self.queue.quarantined_bytes() == sum(self.size[key] for key in self.quarantined)

    def teardown(self) -> None:
        """Once every lease ends and nobody is suspended, everything that waits is granted."""
        for peer in PEERS:
            self.resume(peer)
        while self.ready or self.ahead:
            for key in list(self.leases):
                self.end(key)
            before = len(self.ready) + len(self.ahead)
            self.grants()
            assert len(self.ready) + len(self.ahead) < before


TestGrantQueueMachine = GrantQueueMachine.TestCase


@given(
    peers=st.integers(1, 4),
    sizes=st.lists(st.integers(1, CAPACITY // 16), min_size=1, max_size=8),
    order=st.randoms(use_true_random=True),
)
def test_a_large_request_is_passed_a_bounded_number_of_times(peers: int, sizes: list[int], order: Random) -> None:
    """Whatever small requests keep coming, and in whatever order leases end."""
    queue: GrantQueue[str, int] = GrantQueue(RingStagingAllocator(CAPACITY, PLACE))
    queue.connect("large")
    turns = cycle(f"busy {index}" for index in range(peers))
    live: list[int] = []
    key = 0

    def busy() -> None:
        nonlocal key
        key += 1
        if queue.request(next(turns), key, sizes[key % len(sizes)], lookahead=False) is not None:
            live.append(key)

    while queue.waiting < 2 * peers:
        busy()
    large = -1
    assert queue.request("large", large, CAPACITY // 8, lookahead=False) is None
    passed = 0
    now: list[int] = []
    while large not in now:
        done = order.choice(live)
        live.remove(done)
        queue.release(done)
        busy()
        now = [granted for granted, _ in queue.grants()]
        passed += now.index(large) if large in now else len(now)
        assert passed <= 8 + peers
        live += now
        queue.check_integrity()
