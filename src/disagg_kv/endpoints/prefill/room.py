"""What a prefill rank keeps per room."""

from __future__ import annotations

from attrs import define, field

from ...core import Ring, RingFinal, RoomKey, SendRoom, Transfer
from ...ids import Epoch
from ...memory import Bell
from ...planning import Groups, Segment
from ...trace import Span
from ...transports.bells import AUX_BYTES, Record
from ..handle import HostEvent
from ..loop.event_loop import EventLoop
from .handle import DeliveryHandle, LayerGroups
from .ready_events import ReadyEvents
from .routes import Route


@define(eq=False)
class PrefillRoom:
    """A room, with the ways to its decode ranks and the events that its rows wait for."""

    key: RoomKey
    machine: SendRoom
    handle: DeliveryHandle
    opened: float
    tag: bytes
    routes: dict[Epoch, Route] = field(factory=dict)
    withdrawn: list[HostEvent] = field(factory=list)
    ready_events: ReadyEvents = field(factory=ReadyEvents)
    passes: dict[int, LayerGroups] = field(factory=dict)

    def account(self, now: float) -> None:
        """Say what the room has cost so far, and that pages that were taken away are not read any more."""
        machine, report = self.machine, self.handle.report
        report.segments = sum([f.outbound.segments_landed for f in machine.flows.values()])
        if self.withdrawn and machine.reads == 0:
            for fired in self.withdrawn:
                fired.set()
            self.withdrawn.clear()
        if machine.released and "total" not in report.seconds:
            report.spend("total", now - self.opened)

    def ring(self, effect: Ring | RingFinal) -> bool:
        """Ring a bell, whose frame follows; False: it cannot be rung, and only the bell is lost.

        Decode may have described its board wrongly, and a board may be foreign code: whatever it raises is the same.
        There is no bell for aux data that do not fit behind it.
        """
        bells = self.routes[effect.to].bells
        assert bells is not None
        try:
            if isinstance(effect, Ring):
                bells.ring(effect.slot, effect.value, _record(effect.segment))
            elif len(effect.aux or b"") <= AUX_BYTES:
                bells.ring_final(effect.slot, effect.value, (effect.stop, effect.aux))
        except Exception:
            return False
        return True

    def arm_bell(self, transfer: Transfer, device: str) -> Bell | None:
        """The bell of a transfer, for kernels of a device to ring behind its bytes; None: :meth:`ring` alone does."""
        effect = self.machine.flows[transfer.to].bell(transfer.segment)
        bells = self.routes[transfer.to].bells
        if effect is None or bells is None:
            return None
        try:
            return bells.arm(effect.slot, effect.value, _record(effect.segment), device)
        except Exception:
            return None  # it is counted when it is rung

    def grouped(self, loop: EventLoop, run: range, groups: Groups) -> None:
        """Report how the layers of a chunk are cut, and why."""
        report, now = self.handle.report, loop.now
        report.groups, report.schedule = groups.count, groups.reason
        labels = {"layers": f"{run.start}-{run.stop}", "groups": str(groups.count), "reason": groups.reason}
        loop.observer.count("groups", groups.count)
        loop.observer.span(Span("groups", self.key.room, now, now, labels=labels))


def _record(segment: Segment) -> Record:
    return segment.start, segment.stop, segment.first, segment.last, int(segment.state)
