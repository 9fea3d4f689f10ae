"""Launching the copy from pages into pages, which may be mapped memory of a peer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
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
            pools = {id(pages.pool): pages.pool for move in moves for pages in (move.source, move.target)}
            planes = {key: Planes(pool) for key, pool in pools.items()}
            patterns = CopyPatterns(self._op.tuning.tile_bytes, self._op.cells)
            call = CopyCall(moves, lambda pool: planes[id(pool)], patterns)
            self._interpret(call, after, self._programs or INTERPRETED_PROGRAMS)
            raise_flags(flags)
            return None
        context = self._context(device)
        written = self._written(context, moves, flags)
        return None if written is None else self._enqueue(written, after)

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

    def _written(self, context: LaunchContext, moves: Sequence[PageMove], flags: Sequence[Flag]) -> Written | None:
        stream = context.stream()
        with self._finding:
            call = CopyCall(moves, lambda pool: context.tables.of(pool, stream), self._patterns)
        return self._write(context, stream, call, context.slots.take, self._bound(context), flags)

    def _bound(self, context: LaunchContext) -> int:
        if self._programs is not None:
            return self._programs
        each = self._op.tuning.programs
        return max(1, int(each * context.multiprocessors)) if each else 1 << 30

    def warm(self, source: PagedMemory, target: PagedMemory, numbers: Sequence[int] | None = None) -> None:
        """Compile for whatever planes of one pool may copy into the other; see :meth:`.Host._compile_all`."""
        self._compile_all(source, target, numbers=numbers, other=bits_of(source, target))


def bits_of(source: PagedMemory, target: PagedMemory) -> int:
    """Addresses and strides of the target's planes that both pools have, or'ed."""
    ours = {(plane.layer, plane.component) for plane in source.site.planes}
    shared = [i for i, plane in enumerate(target.site.planes) if (plane.layer, plane.component) in ours]
    return int(np.bitwise_or.reduce(Planes(target).words[shared, :4], axis=None))
