"""Copies into mapped pages in a simulation: kernels of one process that write the pool of another, at their own time.

A copy is an :class:`~.dma.Op` of its own kind. It ends by an event instead of a ticket. The end of its target's process
does not stop it, as the mapping outlives its owner; the end of its own process does, within the drain bound. It rings
its flags when all of it has landed, before its own process learns of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from disagg_kv.geometry import places
from disagg_kv.ids import Ticket
from disagg_kv.kernels import PageMove, Pages
from disagg_kv.memory import Event, Flag, bytes_of, parts
from disagg_kv.planning import StagedLayout

from .dma import Dma, Mapped, Op, Range, SimTransport, torn
from .events import SimEvent
from .fault import FaultClass
from .flags import SimWord
from .kind import Kind
from .simulation import Simulation

I64 = npt.NDArray[np.int64]


class CopyEvent:
    """The end of a launch. A failed one raises until the world says that nothing moves any more, and once at least.

    No device forgets an error because its process stood still meanwhile.
    """

    def __init__(self) -> None:
        self.happened = False
        self._error: Exception | None = None
        self._raised = False

    @property
    def failed(self) -> bool:
        """Whether it has failed."""
        return self._error is not None

    def fail(self, error: Exception) -> None:
        """From now on it raises."""
        self._error = error

    def query(self) -> bool:
        """True once nothing of it moves any more."""
        if self._error is not None and not (self.happened and self._raised):
            self._raised = True
            raise self._error
        return self.happened

    def synchronize(self) -> None:
        """A simulation never waits."""
        assert self.happened, "a simulation never waits"


def copy(
    dma: Dma, source: SimTransport, moves: Sequence[PageMove], after: Event | None, flags: Sequence[Flag]
) -> Event | None:
    """Copy now or later, and not before ``after``; None: it is done already.

    Raises:
        RuntimeError: as a fault; nothing moves.
    """
    world = dma.world
    waits = [one for one in dict.fromkeys(parts(after)) if not one.query()]
    failed = world.faulty and world.chance(FaultClass.KERNEL)
    if failed:
        world.hit(FaultClass.KERNEL)
    at_once = not waits and (not world.scenario.slow_kernels or world.random.random() < 0.3)
    if failed and at_once:
        raise RuntimeError("sim: the kernel failed")
    event = CopyEvent()
    ops = [_place(dma, source, move, after if waits else None) for move in moves]
    launch = _Launch(world, dma, source, ops, flags, event, failed)
    if at_once:
        launch.at_once()
        return None
    world.mark("mapped:a copy takes its time")
    for one in waits:
        world.mark("mapped:a copy waits for its rows")
        assert isinstance(one, SimEvent)
        one.then(partial(launch.begin_after, waits))
    if not waits:
        launch.begin()
    return event


def _place(dma: Dma, source: SimTransport, move: PageMove, after: Event | None) -> Op:
    owner = move.target.pool.buffers[0].owner
    assert isinstance(owner, Mapped)
    memory = bytes_of(move.source.pool.buffers[0])
    ours, theirs = _cells(move.source, move.copy.source), _cells(move.target, move.copy.target)
    ranges: list[Range] = []
    for (at, n), (to, same) in zip(ours, theirs, strict=True):
        assert n == same
        ranges.append((memory, at, owner.memory, to, n))
    op = dma.place(source, owner.there, Ticket(dma.number()), ranges, after)
    op.copied = True
    return op


def _cells(pages: Pages, layout: StagedLayout) -> list[tuple[int, int]]:
    """The place and the length of every unit, in order; by plain indexing, without the kernels' arithmetic."""
    site, cells = pages.pool.site, list[tuple[int, int]]()
    for i, number in enumerate(layout.plane.tolist()):
        plane = site.planes[number]
        unit_bytes = site.spec.component(plane.layer, plane.component).unit_bytes
        page, slot = places(
            pages.tables[plane.group], site.page_rows(plane), int(layout.row_start[i]), int(layout.row_stop[i])
        )
        units = int(layout.first_unit[i]) + np.arange(int(layout.units[i]))
        rows = plane.offset + page * plane.page_stride + slot * plane.row_stride
        where: I64 = rows[:, None] + units * plane.unit_stride
        cells += [(at, unit_bytes) for at in where.reshape(-1).tolist()]
    return cells


class _Launch:
    """One launch, from when it waits until nothing of it moves."""

    def __init__(
        self,
        world: Simulation,
        dma: Dma,
        source: SimTransport,
        ops: Sequence[Op],
        flags: Sequence[Flag],
        event: CopyEvent,
        failed: bool,
    ) -> None:
        self._world = world
        self._dma = dma
        self._source = source
        self._ops = ops
        self._flags = flags
        self._event = event
        self._failed = failed
        self._begun = False
        self._void = False

    def at_once(self) -> None:
        """All of it, before the call returns."""
        for op in self._ops:
            self._dma.begin_copy(op)
            self._dma.land(op, op.ranges)
            self._dma.end(op)
        self._world.saw(Kind.MAPPED)
        self._raise()

    def _raise(self) -> None:
        """The kernel is over, and the device's stream raises the flags: from now on decode may free its pages."""
        for op in self._ops if self._flags else ():
            self._dma.end(op)
        for flag in self._flags:
            assert isinstance(flag.owner, SimWord)
            flag.owner.store()
            self._world.mark("flags:a device raises one")

    def begin_after(self, waits: Sequence[Event]) -> None:
        """One of the events has happened; begin with the last of them."""
        try:
            if not all(one.query() for one in waits):
                return
        except Exception:
            self._failed = self._void = True
        if not self._begun and self._source.alive:
            self.begin()

    def begin(self) -> None:
        """The device gets there."""
        self._begun = True
        world, rng = self._world, self._world.random
        slow = world.faulty and world.chance(FaultClass.SLOW)
        if slow:
            world.hit(FaultClass.SLOW)
        most = rng.choice((0.02, 0.2, 1.0)) if slow else 0.003
        end = 0.0
        for op in self._ops:
            if self._void:
                continue
            self._dma.begin_copy(op)
            pieces = torn(op.ranges, rng.choice((1, 2, 3)), rng.random())
            if self._failed:
                pieces = pieces[: rng.randrange(len(pieces) + 1)]
            for piece in pieces:
                at = rng.random() * most
                end = max(end, at)
                world.later(at, partial(self._dma.land, op, piece))
        if not self._failed:
            world.later(end, self._raise)
        world.later(end + 0.001, self._over)

    def _over(self) -> None:
        """The kernel has ended; or its event fails, and it ends later."""
        if not self._source.alive:
            return
        if self._failed and not self._event.failed:
            self._event.fail(RuntimeError("sim: the kernel failed"))
            self._world.mark("mapped:a copy fails before it is quiet")
            self._world.later(self._world.random.choice((0.001, 0.1, 0.6)), self._quiet)
            self._source.node.touch()
            return
        self._quiet()

    def _quiet(self) -> None:
        if not self._source.alive:
            return
        for op in self._ops:
            self._dma.end(op)
            if not op.target.alive:
                self._world.mark("mapped:a copy outlives its target")
        self._event.happened = True
        if not self._failed:
            self._world.saw(Kind.MAPPED)
        self._source.node.touch()
