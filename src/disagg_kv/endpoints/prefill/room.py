"""What a prefill rank keeps per room, and the events after which its rows are final."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection
from operator import attrgetter

from attrs import define, field, frozen

from ...core import RoomKey, SendRoom, Transfer
from ...ids import Epoch, LayerId
from ...memory import All, Event, Flag
from ...planning import Groups, Segment
from ...trace import Observer, Span
from ..handle import HostEvent
from ..loop.event_loop import EventLoop
from ..peers.session import PeerSession
from .handle import DeliveryHandle, LayerGroups
from .routes import Route

_START = attrgetter("start")


@frozen
class _ReadyEvent:
    start: int
    stop: int
    layers: frozenset[LayerId] | None
    event: Event

    def bars(self, segment: Segment) -> bool:
        """Whether any cell of the segment is final only at the event."""
        if segment.stop <= self.start or self.stop <= segment.start:
            return False
        return self.layers is None or not self.layers.isdisjoint(segment.layers)


class ReadyEvents:
    """Events that are left to a GPU: rows count as final at once, and a copy of them runs after the event.

    Of one room, in the order of their rows.

    A segment is compared with the gates near its own rows, however many there are of others: with those that begin
    before its end, and not further before its start than the longest gate is long.
    """

    def __init__(self) -> None:
        self._gates: list[_ReadyEvent] = []
        self._longest = 0
        self._most = 1

    def add(self, start: int, stop: int, layers: Collection[LayerId] | None, event: Event) -> None:
        """These layers (None: all) of the rows ``[start, stop)`` are final at ``event``.

        Past ones are forgotten when there are twice as many as were pending the last time, so that a call asks about
        one event or two on average, however many are pending.
        """
        if len(self._gates) >= self._most:
            self._gates = [gate for gate in self._gates if not gate.event.query()]
            self._longest = max((gate.stop - gate.start for gate in self._gates), default=0)
            self._most = max(1, 2 * len(self._gates))
        insort(self._gates, _ReadyEvent(start, stop, None if layers is None else frozenset(layers), event), key=_START)
        self._longest = max(self._longest, stop - start)

    def before(self, segment: Segment) -> Event | None:
        """What a copy of the segment has to come after; None: nothing."""
        if not self._gates:
            return None
        first = bisect_right(self._gates, segment.start - self._longest, key=_START)
        last = bisect_left(self._gates, segment.stop, key=_START)
        near = self._gates[first:last]
        events = list({id(gate.event): gate.event for gate in near if gate.bars(segment)}.values())
        return events[0] if len(events) == 1 else All(events) if events else None


@define(eq=False)
class PrefillRoom:
    """A room, with the ways to its decode ranks and the events that its rows wait for.

    ``soon_s``: after an event of the room, the shortest time in which something may be due for it.
    ``used``: peers that it uses until it is over.
    """

    key: RoomKey
    machine: SendRoom
    handle: DeliveryHandle
    opened: float
    soon_s: float
    tag: bytes
    routes: dict[Epoch, Route] = field(factory=dict)
    withdrawn: list[HostEvent] = field(factory=list)
    ready_events: ReadyEvents = field(factory=ReadyEvents)
    passes: dict[int, LayerGroups] = field(factory=dict)
    used: list[PeerSession] = field(factory=list)

    def routed(self, to: Epoch, route: Route) -> None:
        """Its bytes get to a decode rank by this route."""
        self.routes[to] = route
        report = self.handle.report
        report.path, report.reason = route.path.name, "decode has chosen it"
        report.transport, report.transport_reason = route.carrier.name, route.carrier.reason

    def arm_flag(self, transfer: Transfer, device: str, observer: Observer) -> Flag | None:
        """The flag of a transfer, for kernels of a device to raise behind its bytes; None: frames alone announce it.

        Decode may have described its page wrongly, and the page may be foreign code: only the flag is lost, which is
        counted.
        """
        route, one = self.routes[transfer.to], transfer.segment
        if route.flags is None or route.verifies(self.key.room, one):
            return None
        where = self.machine.flows[transfer.to].flag(one)
        if where is None:
            return None
        try:
            return route.flags.arm(*where, (one.start, one.stop, one.first, one.last, int(one.state)), device)
        except Exception:
            observer.count("flags.refused")
            return None

    def grouped(self, loop: EventLoop, run: range, groups: Groups) -> None:
        """Report how the layers of a chunk are cut, and why."""
        report, now = self.handle.report, loop.now
        report.groups, report.schedule = groups.count, groups.reason
        labels = {"layers": f"{run.start}-{run.stop}", "groups": str(groups.count), "reason": groups.reason}
        loop.observer.count("groups", groups.count)
        loop.observer.span(Span("groups", self.key.room, now, now, labels=labels))
