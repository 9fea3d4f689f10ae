"""The fleet itself: time, ranks, requests and faults. Equal plans give equal runs, but for the processor time."""

from __future__ import annotations

import random
import resource
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from math import inf

from attrs import define

from disagg_kv import arguments
from disagg_kv.core import Phase
from disagg_kv.endpoints import DecodeEndpoint, Delivery, Expectation, PrefillEndpoint, Reception
from disagg_kv.endpoints.decode.rooms import DecodeSide
from disagg_kv.geometry import PageTable
from disagg_kv.ids import Epoch, Peer, RoomId
from disagg_kv.rendezvous import Source
from disagg_kv.trace import Observer, Silent

from .parts import KV, PAGE_ROWS, Host, Wires
from .plan import FleetFault, FleetPlan, FleetResult
from .rank import FleetRank, Meter
from .store import FleetStore

FleetHandle = Delivery | Reception

ROWS = 4 * PAGE_ROWS
"""Tokens of a request."""

COMPUTE_S = 0.05
"""What a prefill takes."""

START_S = 10.0
"""Within this all processes of a fleet start."""

RESTART_S = 2.0
"""What a restart takes."""

SETTLE_S = 5.0
"""A request that begins within this after a fault of one of its ranks may still suffer from it."""

OUTAGE_S, PARTITION_S = 60.0, 20.0
RACK = 10
"""One rank of this number is in the rack that is cut off."""

DRAIN_S = 400.0
"""Longer than any request may take."""

LONGEST_JOIN_S = 600.0
"""A fleet that has not joined by then is measured as it is."""


@define(eq=False)
class _Request:
    """One request, from its beginning to the release of its pages on both sides.

    ``excused``: one of its ranks was faulty when it failed, or had been while it ran or a moment before.
    """

    prefill: FleetRank
    decode: FleetRank
    began: float
    handles: tuple[object, object] | None = None
    released: int = 0
    error: str = ""
    excused: bool = False


@define
class _Counted:
    """What the counters said at a moment."""

    frames: int
    nbytes: int
    store: int
    lookups: int
    cpu_ns: int


class Fleet:
    """Satisfies :class:`.parts.World`.

    Args:
        plan: what is simulated.
        observe: makes the observer of a rank's endpoint, by role and number; called again when the rank restarts.
    """

    def __init__(self, plan: FleetPlan, observe: Callable[[str, int], Observer] = lambda *_: Silent()) -> None:
        self.plan = plan
        self._observe = observe
        self.now = 0.0
        self.events = 0
        self._random = random.Random(plan.seed)
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._order = 0
        self._cut_until = -inf
        self.wires = Wires(self)
        self.store = FleetStore(self)
        self.meter = Meter()
        self._hosts: dict[Peer, Host] = {}
        self._ranks: dict[str, list[FleetRank]] = {"prefill": [], "decode": []}
        self._lives: Counter[str] = Counter()
        self._faulty: dict[str, float] = {}
        self._requests: dict[int, _Request] = {}
        self._number = 0
        self.ended: list[_Request] = []
        self.joined: set[str] = set()
        self._addresses: dict[Epoch, str] = {}
        self._sample_until = inf
        self.withheld = 0
        self.restarts = 0

    # What the parts ask.

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        """See :class:`.parts.World`."""
        self._order += 1
        heappush(self._heap, (self.now + seconds, self._order, act))

    def latency_s(self) -> float:
        """See :class:`.parts.World`."""
        return self._random.choice((0.0002, 0.0005, 0.001))

    def between(self, least: float, most: float) -> float:
        """See :class:`.parts.World`."""
        return self._random.uniform(least, most)

    def cut(self, one: Host, other: Host) -> bool:
        """See :class:`.parts.World`."""
        return self.now < self._cut_until and _in_rack(one.address) != _in_rack(other.address)

    # Ranks.

    def _start(self, role: str, number: int) -> None:
        name = f"{role}-{number}"
        if self.store.away:
            self.later(1.0, partial(self._start, role, number))  # its launcher tries again
            return
        self._lives[name] += 1
        life, on_change = self._lives[name], self._on_change
        rank = FleetRank(
            self, self.wires, self.store, self._hosts, role, number, life, self.meter, on_change,
            self._observe(role, number), self.plan.links,
        )  # fmt: skip
        self._addresses[rank.epoch] = rank.address
        ranks = self._ranks[role]
        if self._lives[name] == 1:
            ranks.append(rank)
        else:
            ranks[number] = rank
            self._faulty[rank.address] = self.now + SETTLE_S
        rank.touch()

    def _restart(self, role: str, number: int) -> None:
        rank = self._ranks[role][number]
        if not rank.alive:
            return
        self.restarts += 1
        rank.alive = False
        self.wires.end(rank.channel)
        self._faulty[rank.address] = inf
        for one in [r for r in self._requests.values() if rank in (r.prefill, r.decode)]:
            self._fail(one, "its process has ended")
            if one.handles is not None:
                self._requests.pop(id(one.handles[one.decode is rank]), None)
                self._side_over(one)
        self.later(RESTART_S, partial(self._start, role, number))

    # Requests.

    def begin(self, prefill: FleetRank, decode: FleetRank) -> None:
        """Begin one request."""
        self._number += 1
        if not (prefill.alive and decode.alive):
            self.ended.append(_Request(prefill, decode, self.now, released=2))
            self._fail(self.ended[-1], "its process has ended")
            return
        request = _Request(prefill, decode, self.now)
        name = RoomId(b"room %d" % self._number)
        pages = [1 + (self._number * 4 + n) % 4000 for n in range(4)]
        receiver, sender = decode.endpoint, prefill.endpoint
        assert isinstance(receiver, DecodeEndpoint)
        assert isinstance(sender, PrefillEndpoint)
        with self.meter.spending():
            reception = receiver.open(name, Source(prefill.instance))
            reception.expect(Expectation(ROWS, [PageTable(KV, pages)]))
        with self.meter.spending():
            delivery = sender.open(name)
        request.handles = (delivery, reception)
        self._requests[id(delivery)] = self._requests[id(reception)] = request

        def computed() -> None:
            if prefill.alive and id(delivery) in self._requests:
                with self.meter.spending():
                    delivery.send_chunk(ROWS, [PageTable(KV, pages)])
                    delivery.finish(ROWS)

        self.later(COMPUTE_S, computed)

    def _on_change(self, handle: FleetHandle) -> None:
        request = self._requests.get(id(handle))
        if request is None:
            return
        if handle.phase is Phase.FAILED:
            self._fail(request, str(handle.error))
        if handle.released:
            del self._requests[id(handle)]
            self._side_over(request)

    def _side_over(self, request: _Request) -> None:
        request.released += 1
        if request.released == 2:
            self.ended.append(request)
            if not request.error:
                self.joined |= {request.prefill.instance, request.decode.instance}

    def _fail(self, request: _Request, error: str) -> None:
        """Take the first error. A fault that comes later is no excuse for it."""
        if not request.error:
            request.error = error
            places = request.prefill.address, request.decode.address
            request.excused = any(self._faulty.get(place, -inf) > request.began for place in places)

    # Running.

    def run_until(self, done: Callable[[], bool], until: float) -> None:
        """Let time pass until ``done()``, which is asked every tenth of a second, or until a time."""
        look_at = self.now
        while self._heap and self._heap[0][0] <= until:
            at, _, act = heappop(self._heap)
            if at >= look_at:
                look_at = at + 0.1
                if done():
                    self.later(max(0.0, at - self.now), act)
                    return
            self.now = max(self.now, at)
            act()
            self.events += 1
        self.now = max(self.now, until)

    def join(self) -> float:
        """Start all ranks and let each serve a request; the seconds from the last start to the last of these."""
        plan = self.plan
        for role, count in (("prefill", plan.prefills), ("decode", plan.decodes)):
            for number in range(count):
                self.later(START_S * (number + 1) / count, partial(self._start, role, number))
        for n in range(max(plan.prefills, plan.decodes)):
            self.later(START_S + 0.001, partial(self._first, n))
        self._sample()
        self.run_until(lambda: len(self.joined) == plan.ranks, LONGEST_JOIN_S)
        return self.now - START_S

    def _first(self, n: int) -> None:
        prefills, decodes = self._ranks["prefill"], self._ranks["decode"]
        self.begin(prefills[n % len(prefills)], decodes[n % len(decodes)])

    def _traffic(self, number: int, until: float) -> None:
        if self.now < until:
            self.begin(self._random.choice(self._ranks["prefill"]), self._ranks["decode"][number])
            self.later(self._random.expovariate(self.plan.rate), partial(self._traffic, number, until))

    def _sample(self) -> None:
        """Count what is withheld from peers that are not faulty, once a second for as long as there is traffic."""
        for rank in self._ranks["decode"]:
            view = rank.endpoint.inspect()
            if rank.alive and self._sound(rank.address) and isinstance(view, DecodeSide):
                suspended = view.queue.suspended
                self.withheld += sum(self._sound(self._addresses[epoch]) for epoch in suspended)
        if self.now < self._sample_until:
            self.later(1.0, self._sample)

    def _sound(self, address: str) -> bool:
        return self._faulty.get(address, -inf) <= self.now

    def _plan_faults(self, seconds: float) -> None:
        plan, rng = self.plan, self._random
        ranks = [("prefill", n) for n in range(plan.prefills)] + [("decode", n) for n in range(plan.decodes)]
        if FleetFault.RESTARTS in plan.faults:
            for _ in range(max(1, round(len(ranks) * seconds / 60 / 100))):
                self.later(rng.random() * seconds, partial(self._restart, *rng.choice(ranks)))
        if FleetFault.STORE in plan.faults:
            self.later(0.3 * seconds, partial(self.store.take_away, min(OUTAGE_S, seconds)))
        if FleetFault.RACK in plan.faults:
            self.later(0.5 * seconds, partial(self._cut_rack, min(PARTITION_S, 0.3 * seconds)))

    def _cut_rack(self, seconds: float) -> None:
        self._cut_until = self.now + seconds
        for rank in (*self._ranks["prefill"], *self._ranks["decode"]):
            if _in_rack(rank.address):
                self._faulty[rank.address] = max(self._faulty.get(rank.address, -inf), self._cut_until + SETTLE_S)

    def counted(self) -> _Counted:
        """What the counters say now."""
        cpu_ns = self.meter.cpu_ns + self.store.watch_ns * self.plan.ranks
        return _Counted(self.wires.frames, self.wires.nbytes, self.store.requests, self.store.lookups, cpu_ns)

    def steady(self) -> tuple[_Counted, _Counted]:
        """The traffic; the counters before and after it."""
        seconds, before = self.plan.seconds, self.counted()
        self.ended.clear()
        until = self.now + seconds
        for number in range(self.plan.decodes):
            self.later(self._random.random() / self.plan.rate, partial(self._traffic, number, until))
        self._sample_until = until
        self._plan_faults(seconds)
        self.run_until(lambda: False, until)
        after = self.counted()
        self.run_until(lambda: not self._requests, until + DRAIN_S)
        return before, after

    @property
    def unfinished(self) -> int:
        """Handles of requests that never ended."""
        return len(self._requests)

    @property
    def ranks(self) -> list[FleetRank]:
        """Those that live."""
        return [rank for ranks in self._ranks.values() for rank in ranks if rank.alive]

    @property
    def peers(self) -> int:
        """Peers that all ranks know."""
        return sum(rank.peers for ranks in self._ranks.values() for rank in ranks)

    @property
    def links(self) -> tuple[int, int]:
        """Links that all ranks have, and those that they have dropped."""
        ranks = [rank for ranks in self._ranks.values() for rank in ranks]
        return sum(rank.links for rank in ranks), sum(rank.links_dropped for rank in ranks)


def _in_rack(address: str) -> bool:
    return int(address.rpartition("-")[2]) % RACK == 0


def run_fleet(plan: FleetPlan) -> FleetResult:
    """Simulate a fleet.

    Raises:
        ConfigurationError: no plan.
    """
    arguments.one(plan, "plan", FleetPlan)
    began, fleet, ranks = time.monotonic(), Fleet(plan), plan.ranks
    joined_s = fleet.join()
    joining = fleet.counted()
    before, after = fleet.steady()
    failed = [request for request in fleet.ended if request.error]
    inexcusable = [request for request in failed if not request.excused]
    names = [
        f"{one.prefill.instance} -> {one.decode.instance} at {one.began:.1f} s: {one.error}" for one in inexcusable
    ]
    per_rank_s = ranks * plan.seconds
    return FleetResult(
        plan=plan,
        joined_s=joined_s,
        requests=len(fleet.ended),
        failed=len(failed),
        excused=len(failed) - len(inexcusable),
        unfinished=fleet.unfinished,
        errors=tuple(names[:10]),
        restarts=fleet.restarts,
        frames_per_rank_s=(after.frames - before.frames) / per_rank_s,
        bytes_per_rank_s=(after.nbytes - before.nbytes) / per_rank_s,
        hello_bytes=fleet.wires.largest,
        store_requests_per_rank_min=60 * (after.store - before.store) / per_rank_s,
        lookups_per_rank_min=60 * (after.lookups - before.lookups) / per_rank_s,
        cpu_share=(after.cpu_ns - before.cpu_ns) / 1e9 / per_rank_s,
        joining_cpu_s=joining.cpu_ns / 1e9 / ranks,
        withheld=fleet.withheld,
        peers_per_rank=fleet.peers / ranks,
        links_per_rank=fleet.links[0] / ranks,
        links_dropped_per_rank=fleet.links[1] / ranks,
        events=fleet.events,
        wall_s=time.monotonic() - began,
        memory_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )
