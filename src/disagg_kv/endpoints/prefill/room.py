"""What a prefill rank keeps per room."""

from __future__ import annotations

from attrs import define, field

from ...core import RoomKey, SendRoom, Transfer
from ...ids import Epoch
from ...memory import Flag
from ...planning import Groups
from ...trace import Observer, Span
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

    def arm_flag(self, transfer: Transfer, device: str, observer: Observer) -> Flag | None:
        """The flag of a transfer, for kernels of a device to raise behind its bytes; None: frames alone announce it.

        Decode may have described its page wrongly, and the page may be foreign code: only the flag is lost, which is
        counted.
        """
        where = self.machine.flows[transfer.to].flag(transfer.segment)
        flags, one = self.routes[transfer.to].flags, transfer.segment
        if where is None or flags is None:
            return None
        try:
            return flags.arm(*where, (one.start, one.stop, one.first, one.last, int(one.state)), device)
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
