"""Launching the Triton kernels: own streams, pinned arguments, events; nothing here waits for a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import torch
from attrs import define, evolve

from ..errors import DisaggKVError, LocalProtocolError, RegistrationError
from ..geometry import I64
from ..memory import Buffer, Event, Flag, MemoryPool, PagedMemory, parts, wait_for
from .base import Move
from .cuda_queue import CudaQueue, Mark
from .triton_copies import CopyCall
from .triton_entry import Entry, entry_of
from .triton_kernels import COMPILING, ELEMENTS, INTERPRETED, Op, check_launcher
from .triton_pool_tables import PoolTables
from .triton_shapes import shapes
from .triton_slots import ArgumentSlot, ArgumentSlots
from .triton_tables import ENTRY, Call, Planes, Shape

STREAMS = 4
"""Number of streams. Launches use them in turn: one that waits for its event delays only those behind it."""

FULL = 4096
"""Programs that keep all of a GPU busy. Of such launches that wait for the same events each begins when the one before
it has ended: side by side all would end together, and the wire, which waits for the first, would be idle until then."""

PRIORITY = 0
"""The lowest that CUDA has, and the default of an engine's own streams: where an engine decodes on a stream of
``priority=-1``, its kernels go first whenever the GPU has to choose."""


class LaunchContext:
    """One operation on one GPU: its streams, its argument slots, its pools' tables. Any thread.

    ``reading`` is for what the host waits for: nothing is enqueued there behind an event.
    """

    def __init__(self, device: str, neighbours_together: bool) -> None:
        self.device = device
        self.entries: dict[tuple[int, int, int], Entry] = {}
        self.before: tuple[tuple[int, ...], Mark | None] = (), None
        """What the last launch that was :data:`FULL` waited for, and its end."""
        self.multiprocessors: int = torch.cuda.get_device_properties(device).multi_processor_count
        self.streams = [torch.cuda.Stream(device, priority=PRIORITY) for _ in range(STREAMS)]
        self.reading = torch.cuda.Stream(device)
        self.queue = CudaQueue(self.reading.device_index)
        self.slots = ArgumentSlots(device, self.streams[0])
        self.tables = PoolTables(device, self.streams, neighbours_together)
        self._turn = 0
        self._lock = threading.Lock()

    def stream(self) -> torch.cuda.Stream:
        """The one whose turn it is."""
        with self._lock:
            self._turn = (self._turn + 1) % STREAMS
            return self.streams[self._turn]


@define(eq=False)
class Written:
    """A call whose table is written; ``stream`` is where the table is brought to the GPU, and then read.

    Args:
        context, stream: where the launch is enqueued.
        slot: the call's own table, of ``words`` words, those that go up, of which ``entries`` come first.
        shape, programs: how the launch is cut.
        fills: whether it keeps busy all that such launches may take of the GPU.
        flags: raised behind it.
        uploaded: whether the words are on their way.
    """

    context: LaunchContext
    stream: torch.cuda.Stream
    slot: ArgumentSlot
    words: int
    entries: int
    shape: Shape
    programs: int
    fills: bool
    flags: Sequence[Flag] = ()
    uploaded: bool = False

    def shift(self, base: int) -> None:
        """Move its parts by ``base`` bytes in staging; not allowed once it is on its way to the GPU."""
        assert not self.uploaded
        assert base % 16 == 0, "accesses are no wider than was promised for what is written"
        self.slot.words[: self.entries * ENTRY].reshape(self.entries, ENTRY)[:, 6] += base

    def upload(self) -> None:
        """Bring the words to the GPU; inside ``with context.queue``."""
        if not self.uploaded:
            self.context.queue.upload(self.stream.cuda_stream, self.slot.addr, self.slot.source, self.words * 8)
            self.uploaded = True


class Host:
    """One operation on GPUs, with streams of its own on each; any thread may call it.

    Args:
        op: the operation.
    """

    def __init__(self, op: Op) -> None:
        self._op = op
        self._contexts: dict[str, LaunchContext] = {}
        self._lock = threading.Lock()

    def _check_device(self, device: str) -> None:
        """Raise a :class:`RegistrationError` unless Triton runs where the memory lies."""
        if (device == "cpu") != INTERPRETED:
            raise RegistrationError(
                f"Triton is {'' if INTERPRETED else 'not '}interpreted here: no memory on {device!r}"
            )

    def _interpret(self, call: Call | CopyCall, after: Event | None, most: int | None = None) -> I64:
        """Run a call on the CPU's memory, with at most ``most`` programs, once ``after`` has happened; its table."""
        wait_for(after)
        words = np.zeros(call.words, np.int64)
        shape = call.write(words, words.ctypes.data) if call.entries else None
        if shape is not None and shape.tiles:
            total = call.entries * shape.tiles
            arguments = torch.from_numpy(words), shape.tiles, total, *self._constants(shape)
            # NumPy warns of what a conversion rounds to infinity, or of NaN.
            with np.errstate(over="ignore", invalid="ignore"):
                self._op.kernel[(min(total, most or total),)](*arguments)
        return words

    def _write(
        self,
        context: LaunchContext,
        stream: torch.cuda.Stream,
        call: Call | CopyCall,
        take: Callable[[int], ArgumentSlot | None],
        most: int | None = None,
        flags: Sequence[Flag] = (),
    ) -> Written | None:
        """A call's table in a slot; None: there is nothing to do, or no slot.

        ``most``: programs of the launch; None: one for each tile.
        """
        slot = take(call.words) if call.entries else None
        if slot is None:
            return None
        try:
            shape = call.write(slot.words, slot.addr)
        except Exception:
            context.slots.give(slot, slot.event)
            raise
        total = call.entries * shape.tiles
        programs, fills = (total, total >= FULL) if most is None else (min(total, most), total >= most)
        return Written(context, stream, slot, call.words, call.entries, shape, programs, fills, flags)

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
            # In a broken context nothing shows the end of reads of the slot: it is never used again.
            with suppress(DisaggKVError), call.context.queue:
                mark = call.context.queue.record(call.stream.cuda_stream)
                call.context.slots.give(call.slot, mark)
            return
        call.context.slots.give(call.slot, mark)

    def _enqueued(self, call: Written, after: Event | None) -> Mark:
        context, shape, tiles = call.context, call.shape, call.shape.tiles
        queue, on = context.queue, call.stream.cuda_stream
        entry = context.entries.get(shape.constants)
        if entry is None and call.programs:
            entry = self._compiled(context, shape)
        with queue:
            call.upload()
            awaited = behind(queue, on, after)
            full = call.fills and len(awaited) > 0
            waited, before = context.before
            if full and waited == awaited:
                behind(queue, on, before)
            if entry is not None and call.programs:
                values = call.slot.addr, tiles, call.entries * tiles
                entry(queue, on, call.programs, values, self._constants(shape))
            mark = _end(queue, on, call.flags)
            if full:
                context.before = awaited, mark
            return mark

    def _constants(self, shape: Shape) -> tuple[object, ...]:
        return ELEMENTS[shape.element_bytes], *shape.constants, *self._op.constants

    def _context(self, device: str) -> LaunchContext:
        with self._lock:
            if device not in self._contexts:
                self._contexts[device] = LaunchContext(device, self._op.tuning.neighbours_together)
            return self._contexts[device]

    def _compiled(self, context: LaunchContext, shape: Shape) -> Entry:
        """What launches calls of a shape: compiled now, on memory that is not touched."""
        op = self._op
        # Torch chooses a device, and so a context, of its own.
        with torch.cuda.device(context.device), COMPILING:
            arguments = torch.empty(1, dtype=torch.int64, device="cuda"), 1, 1, *self._constants(shape)
            compiled = op.kernel.warmup(*arguments, grid=(1,), num_warps=op.tuning.warps)
            # What is not loaded yet would be at the first call, which may wait for the GPU.
            compiled[1, 1, 1]
        with context.queue:
            entry = context.entries[shape.constants] = entry_of(check_launcher(compiled), context.queue)
        return entry

    def _compile_all(
        self,
        pool: PagedMemory,
        *targets: PagedMemory,
        numbers: Sequence[int] | None = None,
        other: int | None = None,
        single: bool = False,
    ) -> None:
        """Compile for all :func:`.triton_shapes.shapes` of calls for a pool.

        Also allocates what calls need, and uploads the tables of the pool and of ``targets``: a call must not wait for
        the GPU's allocator.
        """
        device = pool.buffers[0].device
        if device == "cpu":
            return
        context, op = self._context(device), self._op
        with torch.cuda.device(device):
            stream = context.stream()
            for target in targets:
                context.tables.of(target, stream)
            planes = context.tables.of(pool, stream)
            for shape in shapes(planes, pool, op.tuning.tile_bytes, op.cells, other, numbers=numbers, single=single):
                if shape.constants not in context.entries:
                    self._compiled(context, shape)
            if targets:
                stream.synchronize()


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
        context = self._context_of(pool, staging)
        if context is None:
            self._interpret_moved(pool, moves, staging, 0, after)
            return None
        call = self._written(context, pool, moves, staging, context.slots.take)
        return None if call is None else self._enqueue(call, after)

    def warm(self, pool: MemoryPool, numbers: Sequence[int] | None = None) -> None:
        """Compile for whatever peers may take of planes of this pool; see :meth:`Host._compile_all`."""
        self._compile_all(pool, numbers=numbers)

    def prepare(
        self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, *, moved: bool = False
    ) -> PreparedLaunch | None:
        """The same call up to its launch; see :class:`.base.SupportsPreparing`. ``moved``: its parts will be."""
        context = self._context_of(pool, staging)
        if context is None:
            return PreparedLaunch(partial(self._interpret_moved, pool, moves, staging), lambda: None)
        call = self._written(context, pool, moves, staging, context.slots.spare) if context.slots.may_prepare else None
        if call is None:
            return None
        if not moved:
            try:
                with context.queue:
                    call.upload()
            except BaseException:
                self._give_back(call)
                raise
        context.slots.prepared(1)
        return PreparedLaunch(partial(self._enqueue_kept, pool, call), partial(self._give_up, call))

    def _context_of(self, pool: MemoryPool, staging: Buffer) -> LaunchContext | None:
        """Where such calls go; None: Triton interprets them."""
        device = pool.buffers[0].device
        if staging.device != device:
            raise RegistrationError(f"the pool lies on {device!r}, the staging buffer on {staging.device!r}")
        self._check_device(device)
        return None if device == "cpu" else self._context(device)

    def _written(
        self,
        context: LaunchContext,
        pool: MemoryPool,
        moves: Sequence[Move],
        staging: Buffer,
        take: Callable[[int], ArgumentSlot | None],
    ) -> Written | None:
        stream = context.stream()
        return self._write(context, stream, self._call(context.tables.of(pool, stream), moves, staging), take)

    def _call(self, planes: Planes, moves: Sequence[Move], staging: Buffer) -> Call:
        return Call(planes, moves, self._op.tuning.tile_bytes, self._op.cells, staging.addr)

    def _enqueue(self, call: Written, after: Event | None) -> Mark:
        mark = self._launch(call, after)
        call.context.slots.give(call.slot, mark)
        return mark

    def _enqueue_kept(self, pool: MemoryPool, call: Written, base: int, after: Event | None) -> Mark:
        call.context.slots.prepared(-1)
        if not call.uploaded:
            call.shift(base)
            # What waits for its event on the stream that it was written for came later.
            call.stream = call.context.stream()
            call.context.tables.of(pool, call.stream)
        return self._enqueue(call, after)

    def _give_up(self, call: Written) -> None:
        call.context.slots.prepared(-1)
        self._give_back(call)

    def _interpret_moved(
        self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, base: int, after: Event | None
    ) -> None:
        moves = [evolve(move, base=move.base + base) for move in moves]
        self._interpret(self._call(Planes(pool, self._op.tuning.neighbours_together), moves, staging), after)


class PreparedLaunch:
    """A prepared launch; see :class:`.base.Prepared` and :class:`.base.PreparedGather`.

    Args:
        enqueue: launches, with parts moved by a number of bytes, behind an event.
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


def _end(queue: CudaQueue, stream: int, flags: Sequence[Flag]) -> Mark:
    """Ring flags behind all that a stream has, then record the event of the end.

    One that the driver refuses is lost alone: the copy is launched, and its frame follows. In a broken context the
    record fails, too.
    """
    for flag in flags:
        with suppress(DisaggKVError):
            queue.store(stream, flag.addr, flag.value)
    return queue.record(stream)


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
    """Whether the stream of a launch can wait for an event, so that no thread has to."""
    return not INTERPRETED and all(hasattr(one, "cuda_event") for one in parts(event))
