"""Launching the Triton kernels: own streams, pinned arguments, events; nothing here waits for a GPU."""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
import triton.language as tl
from attrs import define, evolve, frozen

from ..errors import DisaggKVError, LocalProtocolError, MissingDependencyError, RegistrationError
from ..geometry import I64
from ..memory import Buffer, Event, MemoryPool, parts
from .base import Move
from .checksum.triton import checksum
from .cuda_queue import CudaQueue, Mark
from .gather.triton import gather
from .scatter.triton import scatter
from .triton_tables import ENTRY, Call, Planes, Shape, shapes

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

    def warmup(self, *args: object, grid: tuple[int], num_warps: int) -> Compiled:
        """Compile for such arguments, and launch nothing."""
        ...


class Launched(Protocol):
    """A Triton kernel with its grid."""

    def __call__(self, *args: object, **options: object) -> Compiled:
        """Enqueue it on the current stream; gives what was compiled for such arguments."""
        ...


class Compiled(Protocol):
    """A kernel compiled for one set of constants."""

    function: int
    packed_metadata: tuple[int, ...]

    def __getitem__(self, grid: tuple[int, int, int]) -> object:
        """Load it, if it is not loaded yet."""
        ...

    def run(self, *args: object) -> None:
        """Triton's own launcher without its look at the arguments, as ``CompiledKernel`` calls it."""
        ...


LAUNCHER = (
    "gridX", "gridY", "gridZ", "stream", "function",
    "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook",
)  # fmt: skip
"""What Triton's own launcher takes before a kernel's arguments. Nothing promises it; some versions name the first five
alone and take the others with the arguments."""

COMPILING = threading.Lock()
"""Held while Triton compiles: it is not said to allow several threads that."""


def check_launcher(compiled: Compiled) -> Compiled:
    """Raise unless the launcher takes what :meth:`Compiled.run` is given, by position; else the kernel as it is.

    Raises:
        MissingDependencyError: Triton is of a version with another launcher.
    """
    takes = tuple(inspect.signature(compiled.run).parameters.values())
    named = tuple(one.name for one in takes if one.kind is one.POSITIONAL_OR_KEYWORD)
    rest = [one.kind for one in takes[len(named) :]]
    if len(named) < 5 or named != LAUNCHER[: len(named)] or rest != [inspect.Parameter.VAR_POSITIONAL]:
        problem = f"Triton {triton.__version__} launches by ({', '.join(map(str, takes))})"
        raise MissingDependencyError("kernels 'triton'", problem, "pip install 'triton>=3.6,<3.10'")
    return compiled


OPS: dict[str, Launchable] = {"gather": gather, "scatter": scatter, "checksum": checksum}


STREAMS = 4
"""Launches take turns on so many streams: one that waits for its event delays only those that wait behind it."""

FULL = 4096
"""Programs that keep all of a GPU busy. Of such launches that wait for the same events each begins when the one before
it has ended: side by side all would end together, and the wire, which waits for the first, would be idle until then."""

PRIORITY = 0
"""The lowest that CUDA has, and the default of an engine's own streams: where an engine decodes on a stream of
``priority=-1``, its kernels go first whenever the GPU has to choose."""

SLOTS = 128
"""Slots of one allocation: to allocate pinned memory may wait for all of the GPU, so calls in flight must not do it."""

SLOT_WORDS = 4096
"""What nearly all calls fit."""

LARGE_WORDS = SLOTS * SLOT_WORDS // 4
"""Words of one allocation for larger calls, unless a single one needs more."""

MOST_PREPARED = SLOTS // 2
"""So many slots of a lane wait at most for their launch. Of the usual size others are left for calls that are launched
at once; of a larger size all may wait, and such a call then has more of them allocated."""


@define(eq=False)
class _Slot:
    """One call's arguments, on both sides; free again when ``event`` has fired."""

    pinned: torch.Tensor
    words: I64
    source: int
    device: torch.Tensor
    addr: int
    event: Mark | None = None


@define(eq=False)
class _Uploaded:
    """A pool's table; ``event``: not there before it, None: there."""

    planes: Planes
    table: torch.Tensor
    event: torch.cuda.Event | None


class _LaunchContext:
    """One kernel on one GPU: its streams, its argument slots, its pools' tables. Any thread.

    ``reading`` is for what the host waits for: nothing is enqueued there behind an event.
    """

    def __init__(self, device: str, neighbours_together: bool) -> None:
        self.compiled: dict[tuple[int, int, int], Compiled] = {}
        self.before: tuple[tuple[int, ...], Mark | None] = (), None
        """What the last launch that was :data:`FULL` waited for, and its end."""
        self._streams = [torch.cuda.Stream(device, priority=PRIORITY) for _ in range(STREAMS)]
        self.reading = torch.cuda.Stream(device)
        self.queue = CudaQueue(self.reading.device_index)
        self._turn = 0
        self._prepared = 0
        self._device = device
        self._neighbours_together = neighbours_together
        self._lock = threading.Lock()
        self._slots: dict[int, deque[_Slot]] = {SLOT_WORDS: deque(self._cut(SLOT_WORDS, SLOTS))}
        self._planes: WeakKeyDictionary[MemoryPool, _Uploaded] = WeakKeyDictionary()

    def stream(self) -> torch.cuda.Stream:
        """The one whose turn it is."""
        with self._lock:
            self._turn = (self._turn + 1) % STREAMS
            return self._streams[self._turn]

    def planes(self, pool: MemoryPool, stream: torch.cuda.Stream) -> tuple[Planes, torch.Tensor]:
        """The pool's table, which is there for what is enqueued on ``stream`` next; uploaded at the first call."""
        with self._lock:
            found = self._planes.get(pool)
            if found is None:
                planes = Planes(pool, self._neighbours_together)
                with torch.cuda.stream(stream):
                    table = torch.from_numpy(planes.words).pin_memory().to(self._device, non_blocking=True)
                    uploaded = torch.cuda.Event()
                    uploaded.record(stream)
                for other in self._streams:
                    table.record_stream(other)
                found = self._planes[pool] = _Uploaded(planes, table, uploaded)
        event = found.event
        if event is not None:
            if event.query():
                found.event = None
            else:
                stream.wait_event(event)
        return found.planes, found.table

    def take(self, words: int) -> _Slot:
        """A slot that no launch reads, for at least that many words."""
        size = _size(words)
        with self._lock:
            slots = self._slots.setdefault(size, deque())
            slot = _free(slots)
        if slot is None:
            # Of larger ones a few at once, or none would be left for what is prepared.
            slot, *others = self._cut(size, SLOTS if size == SLOT_WORDS else max(1, LARGE_WORDS // size))
            slots.extend(others)
        return slot

    def spare(self, words: int) -> _Slot | None:
        """The same, but None where there is none: nothing is allocated."""
        with self._lock:
            return _free(self._slots.get(_size(words), deque()))

    @property
    def may_prepare(self) -> bool:
        """Whether one more slot may wait for its launch."""
        return self._prepared < MOST_PREPARED

    def prepared(self, more: int) -> None:
        """So many more slots wait for their launch."""
        with self._lock:
            self._prepared += more

    def give(self, slot: _Slot, event: Mark | None) -> None:
        """Return a slot that is read until ``event``. Takes no lock: a finalizer may call it, whoever holds one."""
        slot.event = event
        self._slots[len(slot.words)].append(slot)

    @torch.inference_mode(False)
    def _cut(self, words: int, count: int) -> list[_Slot]:
        """New slots, of one allocation on either side; whoever makes an endpoint may be in inference mode."""
        pinned = torch.empty((count, words), dtype=torch.int64, pin_memory=True)
        # Of a stream on which nothing of the engine's is queued that may still use the memory.
        with torch.cuda.stream(self._streams[0]):
            device = torch.empty((count, words), dtype=torch.int64, device=self._device)
        return [
            _Slot(host, host.numpy(), host.data_ptr(), there, there.data_ptr())
            for host, there in zip(pinned.unbind(), device.unbind(), strict=True)
        ]


def _size(words: int) -> int:
    """Words of the slots for so many."""
    return max(SLOT_WORDS, 1 << (words - 1).bit_length())


def _free(slots: deque[_Slot]) -> _Slot | None:
    """Take one out that no launch reads."""
    for _ in range(len(slots)):
        slot = slots.popleft()
        if slot.event is None or slot.event.query():
            return slot
        slots.append(slot)
    return None


@define(eq=False)
class Written:
    """A call whose table is written; ``stream`` is where the table is brought to the GPU, and then read.

    Args:
        lane, stream, table: on what, and the pool's table.
        slot: the call's own table, of ``words`` words, those that go up, of which ``entries`` come first.
        programs, shape: how the launch is cut.
        uploaded: whether the words are on their way.
    """

    lane: _LaunchContext
    stream: torch.cuda.Stream
    table: torch.Tensor
    slot: _Slot
    words: int
    entries: int
    programs: int
    shape: Shape
    uploaded: bool = False

    def shift(self, base: int) -> None:
        """Its parts lie so many bytes further on in staging; not once it is on its way to the GPU."""
        assert not self.uploaded
        assert base % 16 == 0, "accesses are no wider than was promised for what is written"
        self.slot.words[: self.entries * ENTRY].reshape(self.entries, ENTRY)[:, 6] += base

    def upload(self) -> None:
        """Bring the words to the GPU; inside ``with lane.queue``."""
        if not self.uploaded:
            self.lane.queue.upload(self.stream.cuda_stream, self.slot.addr, self.slot.source, self.words * 8)
            self.uploaded = True


class Host:
    """One kernel on GPUs, with streams of its own on each; any thread may call it.

    Args:
        name: of :data:`OPS`.
        tuning: how the work is cut; None: as :data:`TUNED` says.
    """

    def __init__(self, name: str, tuning: Tuning | None = None) -> None:
        self._kernel = OPS[name]
        self._tuning = tuning or TUNED[name]
        self._lanes: dict[str, _LaunchContext] = {}
        self._lock = threading.Lock()

    def _check_device(self, device: str) -> None:
        """Raise a :class:`RegistrationError` unless Triton runs where the memory lies."""
        if (device == "cpu") != INTERPRETED:
            raise RegistrationError(
                f"Triton is {'' if INTERPRETED else 'not '}interpreted here: no memory on {device!r}"
            )

    def _launch(self, call: Written, after: Event | None) -> Mark:
        """Bring a call's words to the GPU and launch behind ``after``; what ends when the kernel has ended.

        Where that raises, the slot is given back.
        """
        try:
            return self._enqueued(call, after)
        except BaseException:
            self._give_back(call)
            raise

    def _give_back(self, call: Written) -> None:
        """The slot is free again once its words are on the GPU: until then they are read here and written there."""
        mark = call.slot.event
        if call.uploaded:
            # Where the context is broken nothing tells when the slot is read no more: nobody gets it again.
            with suppress(DisaggKVError), call.lane.queue:
                mark = call.lane.queue.record(call.stream.cuda_stream)
                call.lane.give(call.slot, mark)
            return
        call.lane.give(call.slot, mark)

    def _enqueued(self, call: Written, after: Event | None) -> Mark:
        lane, slot, programs, shape = call.lane, call.slot, call.programs, call.shape
        queue, on = lane.queue, call.stream.cuda_stream
        constants = shape.aligned, shape.pieces, shape.columns
        compiled = lane.compiled.get(constants)
        args = shape.tiles, ELEMENTS[shape.element_bytes], *constants
        with queue:
            call.upload()
            awaited = behind(queue, on, after)
            full = programs >= FULL and len(awaited) > 0
            waited, before = lane.before
            if full and waited == awaited:
                behind(queue, on, before)
            if compiled is not None and programs:
                grid = programs, 1, 1, on, compiled.function, compiled.packed_metadata
                compiled.run(*grid, None, None, None, call.table.data_ptr(), slot.addr, *args)
            if compiled is not None or not programs:
                mark = queue.record(on)
                if full:
                    lane.before = awaited, mark
                return mark
        # Torch chooses a device, and so a context, of its own.
        with COMPILING, torch.cuda.stream(call.stream):
            launched = self._kernel[(programs,)](call.table, slot.device, *args, num_warps=self._tuning.warps)
        lane.compiled[constants] = check_launcher(launched)
        with queue:
            return queue.record(on)

    def _lane(self, device: str) -> _LaunchContext:
        with self._lock:
            if device not in self._lanes:
                self._lanes[device] = _LaunchContext(device, self._tuning.neighbours_together)
            return self._lanes[device]

    def warm(self, pool: MemoryPool) -> None:
        """Compile for every number of units that a peer may take of this pool, on memory that is not touched.

        Also allocates what calls need, and uploads the pool's table: a call must not wait for the GPU's allocator.
        What the kernels are compiled for depends on widths and alignments alone, so few of these calls compile.
        """
        device = pool.buffers[0].device
        if device == "cpu":
            return
        lane = self._lane(device)
        with torch.cuda.device(device):
            planes, _ = lane.planes(pool, lane.stream())
            for shape in shapes(planes, pool, self._tuning.tile_bytes):
                constants = shape.aligned, shape.pieces, shape.columns
                if constants not in lane.compiled:
                    nothing = torch.empty(1, dtype=torch.int64, device=device)
                    args = (nothing, nothing, 1, ELEMENTS[shape.element_bytes], *constants)
                    with COMPILING:
                        compiled = self._kernel.warmup(*args, grid=(1,), num_warps=self._tuning.warps)
                        # What is not loaded yet would be at the first call, which may wait for the GPU.
                        compiled[1, 1, 1]
                    lane.compiled[constants] = check_launcher(compiled)

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
    ) -> Mark | None:
        """Enqueue one launch for all ``moves`` behind ``after`` and return the event of its end; None: done already.

        Does not wait, unless ``after`` is no CUDA event and has not happened. Memory is read and written until the
        event has happened.

        Raises:
            RegistrationError: pool and staging lie on different devices, or not where Triton runs.
            UnsupportedError: more pieces than one launch can count.
        """
        lane = self._lane_of(pool, staging)
        if lane is None:
            self._interpret(pool, moves, staging, after)
            return None
        call = self._write(lane, pool, moves, staging, lane.take)
        return None if call is None else self._enqueue(call, after)

    def prepare(
        self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, *, moved: bool = False
    ) -> PreparedLaunch | None:
        """The same call up to its launch; see :class:`.base.SupportsPreparing`. ``moved``: its parts will be."""
        lane = self._lane_of(pool, staging)
        if lane is None:
            return PreparedLaunch(partial(self._interpret_moved, pool, moves, staging), lambda: None)
        call = self._write(lane, pool, moves, staging, lane.spare) if lane.may_prepare else None
        if call is None:
            return None
        if not moved:
            try:
                with lane.queue:
                    call.upload()
            except BaseException:
                self._give_back(call)
                raise
        lane.prepared(1)
        return PreparedLaunch(partial(self._enqueue_kept, pool, call), partial(self._give_up, call))

    def _lane_of(self, pool: MemoryPool, staging: Buffer) -> _LaunchContext | None:
        """Where such calls go; None: Triton interprets them."""
        device = pool.buffers[0].device
        if staging.device != device:
            raise RegistrationError(f"the pool lies on {device!r}, the staging buffer on {staging.device!r}")
        self._check_device(device)
        return None if device == "cpu" else self._lane(device)

    def _write(
        self,
        lane: _LaunchContext,
        pool: MemoryPool,
        moves: Sequence[Move],
        staging: Buffer,
        take: Callable[[int], _Slot | None],
    ) -> Written | None:
        """A call's table in a slot; None: there is nothing to do, or no slot."""
        stream = lane.stream()
        planes, table = lane.planes(pool, stream)
        call = Call(planes, moves)
        slot = take(call.words) if call.entries else None
        if slot is None:
            return None
        try:
            shape = call.write(slot.words, slot.addr, staging.addr, self._tuning.tile_bytes)
        except Exception:
            lane.give(slot, slot.event)
            raise
        return Written(lane, stream, table, slot, call.words, call.entries, call.entries * shape.tiles, shape)

    def _enqueue(self, call: Written, after: Event | None) -> Mark:
        mark = self._launch(call, after)
        call.lane.give(call.slot, mark)
        return mark

    def _enqueue_kept(self, pool: MemoryPool, call: Written, base: int, after: Event | None) -> Mark:
        call.lane.prepared(-1)
        if not call.uploaded:
            call.shift(base)
            # What waits for its event on the stream that it was written for came later.
            call.stream = call.lane.stream()
            call.lane.planes(pool, call.stream)
        return self._enqueue(call, after)

    def _give_up(self, call: Written) -> None:
        call.lane.prepared(-1)
        self._give_back(call)

    def _interpret_moved(
        self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, base: int, after: Event | None
    ) -> None:
        self._interpret(pool, [evolve(move, base=move.base + base) for move in moves], staging, after)

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


class PreparedLaunch:
    """A prepared launch; see :class:`.base.Prepared` and :class:`.base.PreparedGather`.

    Args:
        enqueue: launches, with parts so many bytes further on, behind an event.
        give_up: gives back what it holds.
    """

    def __init__(self, enqueue: Callable[[int, Event | None], Mark | None], give_up: Callable[[], None]) -> None:
        self._enqueue = enqueue
        self._give_up = give_up
        self._over = False

    def launch(self, base: int = 0, after: Event | None = None) -> Mark | None:
        """See :meth:`.base.PreparedGather.launch`; ``base`` only where that was said when it was prepared."""
        if self._over:
            raise LocalProtocolError("what was prepared has been launched or dropped before")
        self._over = True
        return self._enqueue(base, after)

    def drop(self) -> None:
        """See :meth:`.base.Prepared.drop`."""
        if not self._over:
            self._over = True
            self._give_up()


def behind(queue: CudaQueue, stream: int, after: Event | None) -> tuple[int, ...]:
    """What is enqueued next comes after ``after``; waits only for events that a stream cannot wait for.

    Gives the others' ``CUevent``.
    """
    awaited: list[int] = []
    for one in parts(after):
        handle: int | None = getattr(one, "cuda_event", None)
        if handle:
            queue.wait(stream, handle)
            awaited.append(handle)
        elif handle is None and not one.query():
            one.synchronize()
    return tuple(awaited)


def waits_for(event: Event) -> bool:
    """Whether a launch puts itself behind an event without anybody waiting."""
    return not INTERPRETED and all(hasattr(one, "cuda_event") for one in parts(event))
