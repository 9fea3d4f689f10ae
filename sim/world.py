"""The world of one simulation: it steps processes, plans faults, and begins requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from heapq import heappop

from disagg_kv.core import Phase
from disagg_kv.errors import EndpointBrokenError, UnknownNameError
from disagg_kv.transports import PeerLost

from .at_once import AtOnce
from .check import Checks
from .cluster import Cluster
from .fault import FaultClass
from .forward_passes import ForwardPasses
from .junk import JunkCalls
from .node import SimNode
from .outages import Outages
from .prefixes import Prefixes
from .recovery_probe import check_served, last_requests
from .request import Request
from .reused_ids import ReusedIds
from .rooms import SimRoom
from .scenario import Scenario, Split
from .stray_frames import StrayFrames
from .targeted_faults import TargetedFaults
from .vote_faults import VoteFaults
from .workload import Room

TICK_S = 0.02
"""A process that acted is checked again after this; then its own due time sets the next check."""

STRAY = 0.5
"""Share of the steps that leave a room in a brief state after which a stray frame follows, where those happen."""

SOON_S = 0.06
"""Some of the processes that end do so within this, while the first rooms are open; others wait for a moment."""

HALF_DEAD = 0.3
"""Share of the processes that are replaced while they stand still: nothing else says that they are gone."""

LEARNS_S = 0.3
"""Within this an incarnation that goes on learns that another one has its place, unless a fault prevents that."""

SETTLE_S = 8.0
"""I4: after the faults stop and the deadline of the last room, everything comes to rest within this time."""

BACK = {"prefill back": "decode", "decode back": "prefill 0"}
"""Where rooms go both ways: the endpoints of the way back, and those with which they share their processes."""

STEPS = 5_000
"""More than any moment needs: then a process makes steps in vain."""

EVENTS = 50_000
"""More than any seed needs: a simulation that goes on beyond them does not come to rest."""


class World(Cluster):
    """Everything that is not the library. Equal scenarios give equal runs, event by event.

    Args:
        scenario: what is drawn.
        trace: takes a line per event, for people.
    """

    def __init__(self, scenario: Scenario, trace: Callable[[str], None] | None = None) -> None:
        super().__init__(scenario, trace)
        self.events = 0
        self.bound = scenario.faults_until + max(one.total_s for one in scenario.requests) + SETTLE_S
        self.segments: list[int] = []
        self._check = Checks(self)
        self._lives: Counter[str] = Counter()
        self._passes: dict[SimNode, ForwardPasses] = {}
        self._waiting = list(scenario.requests)
        self._stray_frames = StrayFrames(self)
        self._targeted_faults = TargetedFaults(self, self._stray_frames, self._lose)
        self._vote_faults = VoteFaults(self, self._lose, self._stop)
        self._outages = Outages(self)
        self._junk_calls = JunkCalls(self)
        self._reused = ReusedIds(self, self._begin_room)
        self._at_once = AtOnce(self)
        self._stray = FaultClass.OUT_OF_TURN in scenario.faults
        self._stale = FaultClass.STALE in scenario.faults
        for number, split in enumerate(scenario.prefills):
            self._launch(f"prefill {number}", split)
        self._launch("decode", scenario.decode)
        self._plan_faults()
        for request in scenario.requests:
            self.at(request.at, self._next_room)

    # Processes.

    def _launch(self, group: str, split: Split) -> None:
        """Start all ranks of an instance, in a life of its own, and what shares their processes."""
        self._lives[group] += 1
        life = self._lives[group]
        beside: Sequence[SimNode | None] = self.groups[BACK[group]] if group in BACK else [None] * split.world
        side, first = self._place(group)
        nodes = []
        for rank, process in enumerate(beside):
            nodes.append(
                SimNode(
                    self, self.network, self.dma, first + rank, side, f"{group} life {life}", split, rank, life,
                    beside=process,
                )
            )  # fmt: skip
            self._begin(nodes[-1])
        self.groups[group] = nodes
        for back, forth in BACK.items():
            if self.scenario.both_ways and forth == group:
                self._launch(back, split)

    def _place(self, group: str) -> tuple[str, int]:
        """The side of an instance, and the number of its first rank there."""
        side, _, number = group.partition(" ")
        worlds = [p.world for p in self.scenario.prefills] if side == "prefill" else [self.scenario.decode.world]
        return side, sum(worlds if number == "back" else worlds[: int(number or 0)])

    def _begin(self, node: SimNode) -> None:
        """A process is there."""
        self.places[node.address] = self.lives[node.epoch] = node
        if self.scenario.conversations and node.side == "decode":
            self._keep_prefixes(node)
        self.network.opened(node.channel)
        node.touch()

    def _keep_prefixes(self, node: SimNode) -> None:
        """A decode rank has a cache of its own, which forgets things at bad moments."""
        node.prefixes = prefixes = Prefixes(self, node)
        for _ in range(self.random.choice((0, 0, 6, 12))):
            self.later(self.random.random() * self.random.choice((0.1, 0.6)), prefixes.evict)

    def _plan_faults(self) -> None:
        faults, rng = self.scenario.faults, self.random
        until = min(self.scenario.faults_until, 0.4)
        crashes: list[FaultClass] = [f for f in (FaultClass.PREFILL_CRASH, FaultClass.DECODE_CRASH) if f in faults]
        if not crashes and (FaultClass.RESTART in faults or FaultClass.REPLACED in faults):
            crashes = [rng.choice((FaultClass.PREFILL_CRASH, FaultClass.DECODE_CRASH))]
        for crash in crashes:
            when = (
                rng.random() * rng.choice((SOON_S, until)) if rng.random() < 0.6 else 0.9 * self.scenario.faults_until
            )
            self.later(when, partial(self._crash, crash))
        acts = (
            (FaultClass.PAUSE, self._pause, 3),
            (FaultClass.CLOCK, self._jump, 3),
            (FaultClass.OUT_OF_TURN, self._out_of_turn, 12),
        )
        for fault, act, most in acts:
            if fault in faults:
                for _ in range(rng.randint(1, most)):
                    self.later(rng.random() * until, act)
        for fault in (FaultClass.RING,):
            if fault in faults:
                self.hits[fault] += 1

    def _crash(self, fault: FaultClass) -> None:
        """Some process of a side ends, if none has."""
        if self.healed or fault in self.hits:
            return
        side = "prefill" if fault is FaultClass.PREFILL_CRASH else "decode"
        group = self.random.choice([g for g in self.groups if g.startswith(side)])
        alive = [n for n in self.groups[group] if n.alive]
        if alive:
            self._lose(fault, self.random.choice(alive))

    def _lose(self, fault: FaultClass, node: SimNode) -> None:
        """A process ends; its launcher may start it anew, or the whole instance under the same addresses."""
        self.hit(fault)
        group = next(g for g, nodes in self.groups.items() if node in nodes)
        faults = self.scenario.faults
        if FaultClass.REPLACED in faults and not node.paused and self.random.random() < HALF_DEAD:
            self._stand_in(group, node)
            return
        self._end(node)
        again = [partial(self._restart, group)] if FaultClass.RESTART in faults else []
        if FaultClass.REPLACED in faults:
            again.append(partial(self._replace, group, node))
        if again:
            self.later(self.random.choice((0.002, 0.05, 0.5, 1.5)), self.random.choice(again))

    def _end(self, node: SimNode) -> None:
        self.note("ended", node.address, node.life, b"")
        node.alive = False
        node.died_at = self.now
        node.channel.close()
        self.dma.died(node.transport)
        self.network.closed(node.channel)
        if self.places.get(node.address) is node:
            del self.places[node.address]
        self.dead.append(node)
        self.network.linger(node.channel)
        for one in node.endpoints():
            if one.alive:
                self._end(one)
        for entry in [e for e in self.entries.values() if e.node is node]:
            self.entries.pop(id(entry.handle))
        delay = self.random.choice((0.001, 0.001, 0.3))
        for other in self.nodes:
            if self.scenario.detects_death and other.transport.knows(node.transport.me):
                self.later(delay, partial(self._report_death, other, node))
            if self.scenario.one_host:
                self.later(0.001, other.touch)
                self.later((self.scenario.drain_s or 0.0) + 0.002, other.touch)
        if self.healed or self.random.random() < 0.7:
            self.later(self.random.choice((0.001, 0.001, 0.1, 0.5)), partial(self._confirm, node))

    def _report_death(self, other: SimNode, dead: SimNode) -> None:
        """The transport notices; it claims a fence only if nothing of the dead can land any more."""
        fenced = not any(op.source is dead.transport or op.target is dead.transport for op in self.dma.live)
        fenced = fenced and self.random.random() < 0.5
        self.mark("release:fenced" if fenced else "noticed:by the transport")
        other.transport.tell(PeerLost(dead.transport.me, fenced=fenced))

    def _confirm(self, dead: SimNode) -> None:
        """The operator saw a process end."""
        self.mark("release:confirmed")
        dead.confirmed = True
        for node in self.nodes:
            with suppress(UnknownNameError):  # not all have met it; that it is found where memory waits is checked
                node.endpoint.confirm_terminated(dead.epoch.hex())
            self._await_evidence(node)

    def _await_evidence(self, node: SimNode) -> None:
        """An end that a process has learned of counts once the drain bound has passed by its own time."""
        drain_s = self.scenario.drain_s or 0.0
        self.known_at = max(self.known_at, self.now + drain_s + 0.01)
        self.later(drain_s + 0.002, node.touch)

    def _stop_for_good(self, node: SimNode) -> None:
        """End a process whose endpoint is broken, as its launcher would."""
        self.hit(FaultClass.BROKEN)
        self._end(node)

    def _restart(self, group: str) -> None:
        group = BACK.get(group, group)
        for node in self.groups[group]:
            if node.alive:
                self._end(node)
        self.hit(FaultClass.RESTART)
        split = self.scenario.decode if group == "decode" else self.scenario.prefills[int(group.split()[1])]
        self._launch(group, split)

    def _stand_in(self, group: str, node: SimNode) -> None:
        """A process stands still until another takes its place; it goes on for a while, and then ends."""
        seconds = self._stop(node, (0.3, 2.6, 4.5))
        self.later(self.random.choice((0.05, 0.2)), partial(self._replace, group, node))
        longer = self.random.choice((0.05, 1.0))
        options = self.scenario.options
        if seconds > options.missed * options.heartbeat_s:
            self.later(seconds, partial(self._goes_on, node))
        self.later(seconds + longer, partial(self._end, node))

    def _goes_on(self, node: SimNode) -> None:
        """A process that stood still goes on, and asks whether another has its place."""
        self.later(LEARNS_S, partial(self._check.superseded, node, self.hits.copy()))

    def _replace(self, group: str, lost: SimNode) -> None:
        """A process takes the place of one that ended, among ranks that may not have noticed yet."""
        nodes = self.groups[group]
        if nodes[lost.rank] is not lost:
            return
        self.hit(FaultClass.REPLACED)
        self._lives[group] += 1
        elsewhere = lost.alive or self.random.random() < 0.25
        node = SimNode(
            self, self.network, self.dma, lost.index, lost.side, lost.instance, lost.split, lost.rank,
            self._lives[group], elsewhere,
        )  # fmt: skip
        nodes[lost.rank] = node
        lost.followed = True
        if lost.split.world > 1:
            who, where = "another rank" if lost.rank else "rank 0", "elsewhere" if elsewhere else "there"
            self.mark(f"replaced:{who} {where}")
        self._begin(node)

    def _pause(self) -> None:
        """A process stands still: its frames wait, its writes and those to it land."""
        node = self.random.choice(self.nodes) if self.places else None
        if self.healed or node is None or node.paused:
            return
        self.hit(FaultClass.PAUSE)
        self._stop(node, (0.03, 0.3, 1.2, 2.6, 4.5))

    def _stop(self, node: SimNode, times: Sequence[float]) -> float:
        seconds = self.random.choice(times)
        self.stood_still += seconds
        for one in node.endpoints():
            one.stood_still += seconds
            one.paused = True
            one.frozen_at = self.now
        self.later(seconds, partial(self._resume, node))
        return seconds

    def _resume(self, node: SimNode) -> None:
        for one in node.endpoints():
            one.paused = False
            one.frozen_at = None
            one.touch()
            self._await_evidence(one)

    def _jump(self) -> None:
        if self.healed or not self.places:
            return
        self.hit(FaultClass.CLOCK)
        node = self.random.choice(self.nodes)
        seconds = self.random.choice((0.1, 1.0, 2.5))
        for one in node.endpoints():
            one.offset += seconds
            one.touch()

    def _out_of_turn(self) -> None:
        """A peer sends a stray frame: it changes nothing, or fails the room."""
        if self.healed or not self.places:
            return
        node = self.random.choice(self.nodes)
        if not node.paused and not node.failing:
            self._step(node)
        if not node.paused and not node.failing:
            self._stray_frames.send(node)

    # Requests.

    def _passes_of(self, node: SimNode) -> ForwardPasses:
        if node not in self._passes:
            self._passes[node] = ForwardPasses(self, node, self._at_once)
        return self._passes[node]

    def _next_room(self) -> None:
        """The next request whose id is not in use begins; the others wait."""
        for plan in self._waiting:
            if all(room.over for room in self.rooms if room.before(plan)):
                self._waiting.remove(plan)
                if plan.attempt > 1:
                    self.mark("room:another attempt")
                self._begin_room(plan)
                return
        if self._waiting:
            self.later(0.05, self._next_room)

    def _begin_room(self, plan: Request, first: SimRoom | None = None, again: Collection[str] = ()) -> None:
        """Engines begin a request; see :class:`Room`."""
        self.bound = max(self.bound, self.now + plan.total_s + SETTLE_S)
        number = len(self.rooms) + 1
        parts = self._check, self._reused, self._at_once, self._passes_of
        self.rooms.append(Room(self, *parts, number, plan, first, again))

    # Running.

    def run(self) -> None:
        """Until everything is at rest, a rule does not hold, or it takes too long."""
        try:
            self._run()
        except Exception as exc:
            self.violation("I7", f"a call of an engine failed: {exc!r}")

    def _run(self) -> None:
        heap, pop = self._heap, heappop
        self._step_all()
        while not self.violations:
            if self._nothing_to_do():
                if self.healed and not self.dma.live and self.now >= self.known_at and not self._go_on():
                    break
                self._heal()
            until = heap[0][0] if heap else self.bound
            if not self.healed and until >= self.scenario.faults_until:
                self.now = max(self.now, self.scenario.faults_until)
                self._heal()
                continue
            if until > self.bound or self.events > EVENTS:
                break
            self.now = until
            while heap and heap[0][0] <= until:
                self._happen(pop(heap)[2])
                self.events += 1
            if self.dirty:
                self._step_all()
        if not self.violations:
            self._finish()

    def _happen(self, event: Callable[[], object]) -> None:
        """A call of an engine that advances its endpoint may break it; the next call says so, and its process ends."""
        try:
            event()
        except EndpointBrokenError:
            broken = [node for node in self.places.values() if node.broken]
            if not broken:
                raise
            for node in broken:
                node.touch()

    def _go_on(self) -> bool:
        """Whether a few requests are to come after all that was drawn."""
        if self.last is not None:
            return False
        self.last = last_requests(self)
        self._waiting += self.last
        for request in self.last:
            self.at(request.at, self._next_room)
        return bool(self.last)

    def _nothing_to_do(self) -> bool:
        if self._waiting or self.entries or any(not room.over for room in self.rooms):
            return False
        for node in self.places.values():
            if node.paused or node.endpoint.open_rooms or node.view.loop.verdict.undecided:
                return False
        return True

    def _heal(self) -> None:
        """Faults stop: what hangs is fenced, links carry again, and the operator has seen who is gone."""
        if self.healed:
            return
        self.healed = True
        self.network.heal()
        self.dma.fence()
        self._outages.heal()
        self._step_all()
        for node in self.dead:
            self.later(self.random.choice((0.0, 3.0)), partial(self._confirm, node))

    def _step_all(self) -> None:
        steps = 0
        while self.dirty and not self.violations:
            node = self.lives[self.dirty.pop(0).epoch]
            node.touched = False
            if node.alive and not node.paused and self._at_once.awaits(node):
                self._step_before_frames(node)
            if node.alive and not node.paused:
                self._step(node)
                steps += 1
            if steps > STEPS:
                self.violation(
                    "I4", f"{node.address}: {steps} steps, in which no time passes and nothing comes to rest"
                )

    def _step_before_frames(self, node: SimNode) -> None:
        """Frames come after a step; the process takes them in, and its engine acts before the next one."""
        frames, node.channel.inbox = node.channel.inbox, []
        self._step(node)
        if node.paused:
            node.channel.inbox = [*frames, *node.channel.inbox]
        elif not node.failing:
            self._at_once.expected(node, frames)

    def _step(self, node: SimNode) -> None:
        """One process makes a step; then every rule is checked."""
        arrived = bool(node.channel.inbox)
        try:
            node.step()
            if arrived and node.busy:
                node.step()
        except EndpointBrokenError:
            self._check.broke(node)
            self._stop_for_good(node)
            return
        except Exception as exc:
            self.violation(
                "I7",
                f"{node.address}: an error that would have ended the endpoint's thread: {exc!r}",
            )
            return
        if node.must_break:
            self.violation("I7", f"{node.address}: goes on although the handling of an error has failed")
        self._happen(partial(self._poll, node))
        if node.broken:
            return
        self._check.node(node)
        if node.behind:
            node.touch()
        if self.dma.live:
            self.dma.check_all(node.transport)
        if self._stray and self.random.random() < STRAY and not node.failing and self._stray_frames.wanted(node):
            self._stray_frames.send(node)
        if self._stale and not node.failing:
            self._stray_frames.greet(node)
        # What strikes may be a call of another process's engine, whose endpoint has broken meanwhile.
        self._happen(partial(self._targeted_faults.strike, node))
        self._vote_faults.strike(node)
        if node.wake_at > self.now + TICK_S or node.wake_at <= self.now:
            self._wake(node, self.now + TICK_S)

    def _poll(self, node: SimNode) -> None:
        for handle in node.poll():
            entry = self.entries.get(id(handle))
            if entry is not None:
                entry.room.changed(entry)

    def _wake(self, node: SimNode, when: float) -> None:
        node.wake_at = when
        self.at(when, partial(self._look, node, when))

    def _look(self, node: SimNode, when: float) -> None:
        """Wake the process if something is due for it; else look again when that will be."""
        if not node.alive or node.wake_at != when:
            return
        due = node.due_at()
        if due <= self.now:
            node.wake_at = 0.0
            node.touch()
        else:
            self._wake(node, max(due, self.now + 0.001))

    def _finish(self) -> None:
        """I3 and I4, and that closed endpoints keep nothing."""
        left = self._check.still_open()
        if self._waiting:
            left.append(f"{len(self._waiting)} requests never began")
        if left and not self._check.evidence_missing():
            self.violation("I4", f"not at rest {self.now:.3f} s from the start: {'; '.join(left)}")
            return
        if not left:
            for node in self.nodes:
                for _ in range(EVENTS):
                    if not node.busy:  # else a command was posted without a wake-up, and the next step runs it
                        break
                    self._step(node)
            self._check.at_rest()
            check_served(self, self.last or [])
        for room in self.rooms:
            for entry in room.decode:
                if entry.phase is Phase.DONE:
                    self.segments.append(entry.segments)
        for node in self.nodes:
            node.endpoint.close(0.0)
            self._check.closed(node)
