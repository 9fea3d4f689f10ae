"""Launching the Triton kernels: own streams, pinned arguments, events; nothing here waits for a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
import triton.language as tl
from attrs import define, frozen

from ..errors import RegistrationError
from ..geometry import I64
from ..memory import Buffer, Event, MemoryPool
from .base import Move
from .checksum.triton import checksum
from .gather.triton import gather
from .scatter.triton import scatter
from .triton_tables import Call, Planes, Shape

ELEMENTS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
"""What is moved, by its bytes; what the bytes mean is nobody's business here."""

INTERPRETED = not isinstance(gather, triton.runtime.JITFunction)
"""True where Triton was told to interpret kernels (``TRITON_INTERPRET=1``): they then run on the CPU's memory."""


@frozen
class Tuning:
    """How a call is cut into programs. The defaults are what ``benchmarks/gpu_kernels.py`` found best on an H200.

    Args:
        tile_bytes: what one program moves, a power of two.
        warps: of one program, a power of two.
        neighbours_together: see :class:`.triton_tables.Planes`.
    """

    tile_bytes: int = 4096
    warps: int = 1
    neighbours_together: bool = False


TUNED = {"gather": Tuning(), "scatter": Tuning(neighbours_together=True), "checksum": Tuning(tile_bytes=8192)}
"""Writing short runs far apart costs more than reading them so; more rows share what a checksum's keys cost."""


class Launchable(Protocol):
    """A Triton kernel, compiled or interpreted."""

    def __getitem__(self, grid: tuple[int]) -> Launched:
        """The kernel with its number of programs."""
        ...


class Launched(Protocol):
    """A Triton kernel with its grid."""

    def __call__(self, *args: object, **options: object) -> Compiled:
        """Enqueue it on the current stream; gives what was compiled for such arguments."""
        ...


class Compiled(Protocol):
    """A kernel compiled for one set of constants, which skips Triton's own look at the arguments."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        """The kernel with its number of programs."""
        ...


OPS: dict[str, Launchable] = {"gather": gather, "scatter": scatter, "checksum": checksum}


@define(eq=False)
class _Slot:
    """One call's arguments, on both sides; free again when ``event`` has fired."""

    pinned: torch.Tensor
    words: I64
    device: torch.Tensor
    uploaded: torch.cuda.Event
    event: torch.cuda.Event


class _Lane:
    """One kernel on one GPU: its streams, its argument slots, its pools' tables. Any thread."""

    def __init__(self, device: str, neighbours_together: bool) -> None:
        self.stream = torch.cuda.Stream(device)
        # Arguments travel while the launch before still runs.
        self.uploads = torch.cuda.Stream(device)
        self.compiled: dict[tuple[int, int, int], Compiled] = {}
        self._device = device
        self._neighbours_together = neighbours_together
        self._lock = threading.Lock()
        self._slots: list[_Slot] = []
        self._planes: WeakKeyDictionary[MemoryPool, tuple[Planes, torch.Tensor]] = WeakKeyDictionary()

    def planes(self, pool: MemoryPool) -> tuple[Planes, torch.Tensor]:
        """The pool's table; uploaded at the pool's first call. The stream for uploads is the current one."""
        with self._lock:
            found = self._planes.get(pool)
            if found is None:
                planes = Planes(pool, self._neighbours_together)
                table = torch.from_numpy(planes.words).pin_memory().to(self._device, non_blocking=True)
                table.record_stream(self.stream)
                found = self._planes[pool] = planes, table
            return found

    def take(self, words: int) -> _Slot:
        """A slot that no launch reads, for at least that many words. The stream for uploads is the current one."""
        with self._lock:
            for i, slot in enumerate(self._slots):
                if slot.event.query():
                    del self._slots[i]
                    if len(slot.words) >= words:
                        return slot
                    break  # it is too small for what calls need by now: a larger one takes its place
        size = max(4096, 1 << (words - 1).bit_length())
        pinned = torch.empty(size, dtype=torch.int64, pin_memory=True)
        device = torch.empty(size, dtype=torch.int64, device=self._device)
        return _Slot(pinned, pinned.numpy(), device, torch.cuda.Event(), torch.cuda.Event())

    def give(self, slot: _Slot, event: torch.cuda.Event) -> None:
        """Return a slot that is read until ``event``."""
        slot.event = event
        with self._lock:
            self._slots.append(slot)


class Host:
    """One kernel on GPUs, with streams of its own on each; any thread may call it.

    Args:
        name: of :data:`OPS`.
        tuning: how the work is cut; None: as :data:`TUNED` says.
    """

    def __init__(self, name: str, tuning: Tuning | None = None) -> None:
        self._kernel = OPS[name]
        self._tuning = tuning or TUNED[name]
        self._lanes: dict[str, _Lane] = {}
        self._lock = threading.Lock()

    def _check_device(self, device: str) -> None:
        """Raise a :class:`RegistrationError` unless Triton runs where the memory lies."""
        if (device == "cpu") != INTERPRETED:
            raise RegistrationError(
                f"Triton is {'' if INTERPRETED else 'not '}interpreted here: no memory on {device!r}"
            )

    def _behind(self, lane: _Lane, slot: _Slot, after: Event | None) -> None:
        """Have the lane wait until the call's arguments are there and ``after`` has happened."""
        slot.uploaded.record(lane.uploads)
        lane.stream.wait_event(slot.uploaded)
        if isinstance(after, torch.cuda.Event):
            lane.stream.wait_event(after)
        elif after is not None and not after.query():
            after.synchronize()

    def _enqueue(self, lane: _Lane, programs: int, shape: Shape, tables: tuple[torch.Tensor, torch.Tensor]) -> None:
        if not programs:
            return
        constants = shape.aligned, shape.pieces, shape.columns
        args = (*tables, shape.tiles, ELEMENTS[shape.element_bytes], *constants)
        compiled = lane.compiled.get(constants)
        if compiled is None:
            with torch.cuda.stream(lane.stream):
                lane.compiled[constants] = self._kernel[(programs,)](*args, num_warps=self._tuning.warps)
        else:
            compiled[programs, 1, 1](*args, stream=lane.stream.cuda_stream)

    def _lane(self, device: str) -> _Lane:
        with self._lock:
            if device not in self._lanes:
                self._lanes[device] = _Lane(device, self._tuning.neighbours_together)
            return self._lanes[device]

    def _run(self, planes: Planes, words: I64, programs: int, shape: Shape) -> None:
        """Interpret the kernel."""
        if programs:
            self._kernel[(programs,)](
                torch.from_numpy(planes.words),
                torch.from_numpy(words),
                shape.tiles,
                ELEMENTS[shape.element_bytes],
                shape.aligned,
                shape.pieces,
                shape.columns,
            )


class Launcher(Host):
    """Gather or scatter on GPUs; see :class:`Host`."""

    def __call__(
        self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None = None
    ) -> torch.cuda.Event | None:
        """Enqueue one launch for all ``moves`` behind ``after`` and return the event of its end; None: done already.

        Does not wait, unless ``after`` is no CUDA event and has not happened. Memory is read and written until the
        event has happened.

        Raises:
            RegistrationError: pool and staging lie on different devices, or not where Triton runs.
            UnsupportedError: more pieces than one launch can count.
        """
        device = pool.buffers[0].device
        if staging.device != device:
            raise RegistrationError(f"the pool lies on {device!r}, the staging buffer on {staging.device!r}")
        self._check_device(device)
        if device == "cpu":
            self._interpret(pool, moves, staging, after)
            return None
        lane = self._lane(device)
        with torch.cuda.stream(lane.uploads):
            planes, table = lane.planes(pool)
            call = Call(planes, moves)
            if not call.entries:
                return None
            slot = lane.take(call.words)
            shape = call.write(slot.words, slot.device.data_ptr(), staging.addr, self._tuning.tile_bytes)
            slot.device[: call.words].copy_(slot.pinned[: call.words], non_blocking=True)
            self._behind(lane, slot, after)
            self._enqueue(lane, call.entries * shape.tiles, shape, (table, slot.device))
            event = torch.cuda.Event()
            event.record(lane.stream)
        lane.give(slot, event)
        return event

    def _interpret(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None) -> None:
        """The same on the CPU's memory, done when it returns."""
        planes = Planes(pool, self._tuning.neighbours_together)
        call = Call(planes, moves)
        if after is not None:
            after.synchronize()
        if call.entries:
            words = np.zeros(call.words, np.int64)
            shape = call.write(words, words.ctypes.data, staging.addr, self._tuning.tile_bytes)
            self._run(planes, words, call.entries * shape.tiles, shape)
