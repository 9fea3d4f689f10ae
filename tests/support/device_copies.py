"""Kernels whose copies into mapped pages are queued, and done when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import define, field

from disagg_kv.core import Options
from disagg_kv.endpoints.prefill.handle import ForwardPass
from disagg_kv.geometry import CacheSpec
from disagg_kv.kernels import CpuKernels, PageMove
from disagg_kv.memory import Event, Flag
from disagg_kv.strategies import LayerPipelined
from tests.support.rig import Decodes, PrefillOptions, Prefills, Request, Rig, tp_shards
from tests.support.rig_parts import FiredEvent

SPEC = CacheSpec.kv(2, 4, 8, "float16")


class Copy:
    """A launched copy; also the event of its end."""

    def __init__(self, moves: Sequence[PageMove], after: Event | None, flags: Sequence[Flag] = ()) -> None:
        self.moves = moves
        self.after = after
        self.flags = flags
        self.happened = False
        self.error: Exception | None = None

    def run(self) -> None:
        """The device gets there."""
        assert self.after is None or self.after.query(), "the rows are not final"
        CpuKernels().copy(self.moves, None, self.flags)
        self.happened, self.error = True, None

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.happened

    def synchronize(self) -> None:
        raise AssertionError("a thread waited")


class Failing(FiredEvent):
    """An engine's event that may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None

    def query(self) -> bool:
        """Raise, or True once fired."""
        if self.error is not None:
            raise self.error
        return super().query()


class DeviceKernels(CpuKernels):
    """Copies that are queued, and done when the test says so; ``at`` is called at both ends of a launch."""

    def __init__(self) -> None:
        self.queued: list[Copy] = []
        self.refuses: list[Exception] = []
        self.at: Callable[[str], None] = lambda where: None

    def orders(self, event: Event) -> bool:
        return True

    def copy(  # type: ignore[override]
        self, moves: Sequence[PageMove], after: Event | None, flags: Sequence[Flag] = ()
    ) -> Event | None:
        self.at("begin")
        if self.refuses:
            raise self.refuses.pop()
        copy = Copy(moves, after, flags)
        self.queued.append(copy)
        self.at("end")
        return copy

    def finish(self) -> None:
        """The device gets to all that is launched."""
        for copy in self.queued:
            if not copy.happened:
                copy.run()


class Unordered(DeviceKernels):
    """As kernels that wait for events by blocking."""

    def orders(self, event: Event) -> bool:
        return False


def scene(*, prefill_tp: int = 1, decode_tp: int = 1) -> tuple[Rig, DeviceKernels, Request]:
    """Ranks, of which those of prefill have such kernels, and a request that decode awaits and prefill has open."""
    rig, kernels = Rig(SPEC), DeviceKernels()
    prefills = rig.prefill(tp_shards(SPEC, prefill_tp), strategy="mapped", kernels=kernels)
    decodes = rig.decode(tp_shards(SPEC, decode_tp), strategy="mapped")
    return rig, kernels, rig.request("room", prefills, decodes, 9).open_decode().expect(9).open_prefill()


def launched(rig: Rig, kernels: DeviceKernels, count: int = 1) -> Copy:
    """The last copy that was launched."""
    rig.until(lambda: len(kernels.queued) == count, f"{count} copies")
    return kernels.queued[-1]


@define(eq=False)
class Pass:
    """A forward pass of prefill's engine over one room, whose calls advance the endpoint."""

    rig: Rig
    kernels: DeviceKernels
    request: Request
    step: ForwardPass = field(init=False)

    def announce(self, stop: int = 9) -> Pass:
        """The pass begins."""
        (table,) = self.request.pages(0, stop)
        self.step = self.request.prefills[0].endpoint.step({self.request.room: (stop, [table])})
        self.rig.turn()
        self.rig.turn()
        return self

    def another(self, name: str) -> Pass:
        """The same for a room after it, once pages of earlier ones are free again."""
        for table in self.request.given.pop(0, []):
            self.request.prefills[0].give(table)
        self.request.decodes[0].give(self.request.taken[0])
        return Pass(self.rig, self.kernels, awaited(self.rig, self.request.prefills, self.request.decodes, name))


def driven(
    schedule: LayerPipelined | None = None,
    decode_tp: int = 1,
    kernels: DeviceKernels | None = None,
    options: Options | None = None,
) -> Pass:
    """A room that decode awaits and prefill has open, with nothing announced yet."""
    rig, kernels = Rig(SPEC, options=options, driven=True), kernels or DeviceKernels()
    more: PrefillOptions = {"strategy": "mapped", "kernels": kernels}
    if schedule is not None:
        more["schedule"] = schedule
    prefills = rig.prefill(tp_shards(SPEC, 1), **more)
    decodes = rig.decode(tp_shards(SPEC, decode_tp), strategy="mapped")
    return Pass(rig, kernels, awaited(rig, prefills, decodes, "room"))


def awaited(rig: Rig, prefills: Prefills, decodes: Decodes, name: str) -> Request:
    """A room of nine rows that decode awaits and prefill has open."""
    request = rig.request(name, prefills, decodes, 9).open_decode().expect(9).open_prefill()
    rig.until(lambda: request.sends[0].held is not None, "the expectation")
    return request
