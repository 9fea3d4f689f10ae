"""Launching the copy from pages into pages, which may be mapped memory of a peer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from ..errors import RegistrationError
from ..memory import Event, Flag, PagedMemory
from ..memory.flag import raise_flags
from .base import PageMove
from .cuda_queue import Mark
from .triton_copies import CopyCall, CopyPatterns
from .triton_kernels import OPS, Op
from .triton_launch import Host, LaunchContext, Written
from .triton_slots import ArgumentSlot
from .triton_tables import Planes

INTERPRETED_PROGRAMS = 7
"""Most programs where Triton interprets: there are no multiprocessors, and programs run one after another."""


class CopyLauncher(Host):
    """Copies on GPUs; see :class:`.triton_launch.Host`.

    Args:
        op: the operation.
        programs: most programs of a launch; None: as the operation's tuning says.
    """

    def __init__(self, op: Op = OPS["copy"], programs: int | None = None) -> None:
        super().__init__(op)
        self._programs = programs
        self._patterns = CopyPatterns(op.tuning.tile_bytes, op.cells)
        self._finding = threading.Lock()

    def __call__(
        self, moves: Sequence[PageMove], after: Event | None = None, flags: Sequence[Flag] = ()
    ) -> Mark | None:
        """Enqueue one launch for all ``moves`` behind ``after`` and return the event of its end; None: done already.

        The stream raises the flags behind it.

        Does not wait, unless ``after`` is no CUDA event and has not happened. An error means that nothing is read or
        written any more.

        Raises:
            RegistrationError: the pools lie on different devices, or not where Triton runs.
            UnsupportedError: more pieces than one launch can count.
        """
        device = self._device_of(moves)
        if device is None:
            return None
        if device == "cpu":
            self._interpreter.copy(moves, self._programs or INTERPRETED_PROGRAMS, after)
            raise_flags(flags)
            return None
        context = self._context(device)
        call = self._write(context, moves, context.slots.take, flags)
        return None if call is None else self._enqueue(call, after)

    def _enqueue(self, call: Written, after: Event | None) -> Mark:
        try:
            mark = self._launch(call, after)
        except BaseException:
            # Where the end of a launch was not noted, it may run. In a broken context nothing does.
            with suppress(Exception):
                call.stream.synchronize()
            raise
        call.context.slots.give(call.slot, mark)
        return mark

    def _device_of(self, moves: Sequence[PageMove]) -> str | None:
        devices = {pages.pool.buffers[0].device for move in moves for pages in (move.source, move.target)}
        if len(devices) > 1:
            raise RegistrationError(f"one copy of pools on {sorted(devices)}: they have to lie on one device")
        for device in devices:
            self._check_device(device)
            return device
        return None

    def _write(
        self,
        context: LaunchContext,
        moves: Sequence[PageMove],
        take: Callable[[int], ArgumentSlot | None],
        flags: Sequence[Flag],
    ) -> Written | None:
        """A call's table in a slot; None: there is nothing to do, or no slot."""
        stream = context.stream()
        with self._finding:
            call = CopyCall(moves, lambda pool: context.tables.of(pool, stream), self._patterns)
        if not call.entries:
            return None
        slot = take(call.words)
        if slot is None:
            return None
        call.write(slot.words, slot.addr)
        total, bound = call.entries * call.shape.tiles, self._bound(context)
        programs = min(total, bound)
        full = programs == bound
        return Written(context, stream, slot, call.words, call.entries, call.shape, programs, full, flags)

    def _bound(self, context: LaunchContext) -> int:
        if self._programs is not None:
            return self._programs
        each = self._op.tuning.programs
        return each * context.multiprocessors if each else 1 << 30

    def warm(self, source: PagedMemory, target: PagedMemory, numbers: Sequence[int] | None = None) -> None:
        """Compile for whatever planes of one pool may copy into the other; see :meth:`.Host._compile_all`."""
        self._compile_all(source, target, numbers=numbers, other=bits_of(source, target))


def bits_of(source: PagedMemory, target: PagedMemory) -> int:
    """Addresses and strides of the target's planes that both pools have, or'ed."""
    ours = {(plane.layer, plane.component) for plane in source.site.planes}
    shared = [i for i, plane in enumerate(target.site.planes) if (plane.layer, plane.component) in ours]
    return int(np.bitwise_or.reduce(Planes(target).words[shared, :4], axis=None))
