"""Kernels whose copies between mapped pages are queued, and done when a test says so."""

from __future__ import annotations

from collections.abc import Sequence

from disagg_kv.core import Options
from disagg_kv.geometry import CacheSpec
from disagg_kv.kernels import CpuKernels, PageMove
from disagg_kv.memory import Bell, Event
from tests.support.rig import Request, Rig, tp_shards
from tests.support.rig_parts import Flag

SPEC = CacheSpec.kv(2, 4, 8, "float16")


class Copy:
    """A launched copy; also the event of its end."""

    def __init__(self, moves: Sequence[PageMove], after: Event | None, bells: Sequence[Bell] = ()) -> None:
        self.moves = moves
        self.after = after
        self.bells = bells
        self.happened = False
        self.error: Exception | None = None

    def run(self) -> None:
        """The device gets there."""
        assert self.after is None or self.after.query(), "the rows are not final"
        CpuKernels().copy(self.moves, None, self.bells)
        self.happened, self.error = True, None

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.happened

    def synchronize(self) -> None:
        raise AssertionError("a thread waited")


class Failing(Flag):
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
    """Copies that are queued, and done when the test says so."""

    def __init__(self) -> None:
        self.queued: list[Copy] = []
        self.refuses: list[Exception] = []

    def orders(self, event: Event) -> bool:
        return True

    def copy(  # type: ignore[override]
        self, moves: Sequence[PageMove], after: Event | None, bells: Sequence[Bell] = ()
    ) -> Event | None:
        if self.refuses:
            raise self.refuses.pop()
        self.queued.append(Copy(moves, after, bells))
        return self.queued[-1]


def scene(
    path: str, *, prefill_tp: int = 1, decode_tp: int = 1, options: Options | None = None
) -> tuple[Rig, DeviceKernels, Request]:
    """Ranks, of which those that copy have such kernels, and a request that decode awaits and prefill has open."""
    rig, kernels = Rig(SPEC, options=options), DeviceKernels()
    ours, theirs = (kernels, CpuKernels()) if path == "mapped" else (CpuKernels(), kernels)
    prefills = rig.prefill(tp_shards(SPEC, prefill_tp), strategy=path, kernels=ours)
    decodes = rig.decode(tp_shards(SPEC, decode_tp), strategy=path, kernels=theirs)
    return rig, kernels, rig.request("room", prefills, decodes, 9).open_decode().expect(9).open_prefill()


def launched(rig: Rig, kernels: DeviceKernels, count: int = 1) -> Copy:
    """The last copy that was launched."""
    rig.until(lambda: len(kernels.queued) == count, f"{count} copies")
    return kernels.queued[-1]
