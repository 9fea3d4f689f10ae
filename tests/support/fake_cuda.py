"""The part of a CUDA driver that ``cuda_ipc`` uses, over shared CPU memory: copies take their time and keep to streams.

What it cannot show (that the real driver does what is asked of it) is shown on GPUs, by the same suite.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections import deque
from collections.abc import Sequence
from itertools import count
from weakref import WeakSet

import numpy as np
from attrs import frozen

from disagg_kv.errors import TransportError
from disagg_kv.geometry import I64
from disagg_kv.memory import U8, Buffer, Flag
from disagg_kv.memory.flag import raise_flags
from disagg_kv.transports import Transport
from disagg_kv.transports.cuda_api import Gpu, Mark, Stream
from disagg_kv.transports.cuda_driver import Driver
from disagg_kv.transports.cuda_ipc import CudaIpcTransport


class Allocation:
    """Memory that another process can map."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create("fake-cuda")
        os.ftruncate(self.fd, nbytes)
        self.mapping = mmap.mmap(self.fd, nbytes)
        self.addr = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
        _allocations.add(self)

    def __del__(self) -> None:
        os.close(self.fd)


_allocations: WeakSet[Allocation] = WeakSet()


@frozen
class _Copies:
    mark: Mark
    target: I64
    source: I64
    nbytes: I64


class FakeCuda(Driver):
    """All calls of the driver that the transport makes.

    ``broken`` names calls that fail; ``piecewise`` makes all memory such that cannot be exported; ``fired`` are the
    events that have happened; ``stuck`` keeps copies from being made. ``seen`` are the GPUs; ``apart`` are pairs of
    them, by number, without peer access. ``opened_by`` are the devices for which memory was opened, ``shared`` is host
    memory in which streams may store: they find it where the host does.
    """

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.piecewise = False
        self.fired: set[int] = set()
        self.stuck = False
        self.seen = [Gpu(b"the-first-of-two"), Gpu(b"the-second-of-2x")]
        self.apart: set[tuple[int, int]] = set()
        self.opened: dict[int, mmap.mmap] = {}
        self.opened_by: list[int] = []
        self.shared: dict[int, int] = {}
        self.streams: dict[Stream, deque[int | _Copies]] = {}
        self._marks: dict[Mark, Stream] = {}
        self._numbers = count(1)

    def _check(self, name: str) -> None:
        if name in self.broken:
            raise TransportError(f"cuda: {name}: CUDA_ERROR_FAKE (1)")

    def gpus(self) -> Sequence[Gpu]:
        self._check("gpus")
        return self.seen

    def reaches(self, device: int, other: int) -> bool:
        return (device, other) not in self.apart

    def segment(self, device: int, addr: int) -> tuple[int, int]:
        self._check("segment")
        for one in _allocations:
            if one.addr <= addr < one.addr + one.nbytes:
                return one.addr, one.nbytes
        if addr in self.opened:
            return addr, len(self.opened[addr])
        raise TransportError(f"cuda: segment: CUDA_ERROR_INVALID_VALUE ({addr:#x})")

    def shareable(self, device: int, addr: int) -> bool:
        return not self.piecewise

    def export(self, device: int, addr: int) -> bytes:
        self._check("export")
        (found,) = (one for one in _allocations if one.addr == addr)
        return struct.pack("qqq40x", os.getpid(), found.fd, found.nbytes)

    def open(self, device: int, handle: bytes) -> int:
        self._check("open")
        pid, fd, nbytes = struct.unpack("qqq40x", handle)
        try:
            file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        except OSError as error:
            raise TransportError(f"cuda: open: {error}") from error
        mapping = mmap.mmap(file, nbytes)
        os.close(file)
        addr = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.opened[addr] = mapping
        self.opened_by.append(device)
        return addr

    def close(self, device: int, addr: int) -> None:
        self._check("close")
        del self.opened[addr]

    def share(self, device: int, addr: int, nbytes: int) -> int:
        self._check("share")
        assert addr not in self.shared, "the driver refuses memory that is registered already"
        self.shared[addr] = nbytes
        return addr

    def unshare(self, device: int, addr: int) -> None:
        self._check("unshare")
        ctypes.string_at(addr, self.shared.pop(addr))  # it is mapped still

    def stream(self, device: int) -> Stream:
        made = Stream(next(self._numbers))
        self.streams[made] = deque()
        return made

    def end(self, device: int, stream: Stream) -> None:
        assert not self.streams.pop(stream), "a stream was given up with work in it"

    def copy(
        self, device: int, stream: Stream, target: I64, source: I64, nbytes: I64, after: Sequence[int] = ()
    ) -> Mark:
        self._check("copy")
        self.streams[stream].extend(after)
        assert bool((nbytes > 0).all()), "the driver refuses batches with copies of nothing"
        mark = Mark(next(self._numbers))
        # As the hardware: in an order of its own.
        order = np.random.default_rng(len(nbytes)).permutation(len(nbytes))
        self.streams[stream].append(_Copies(mark, target[order], source[order], nbytes[order]))
        self._marks[mark] = stream
        return mark

    def passed(self, mark: Mark) -> bool:
        """One step of the stream per look."""
        self._check("passed")
        queue = self.streams[self._marks[mark]]
        first = queue[0] if queue else None
        if isinstance(first, _Copies):
            if not self.stuck:
                queue.popleft()
                for to, at, size in zip(*(c.tolist() for c in (first.target, first.source, first.nbytes)), strict=True):
                    ctypes.memmove(to, at, size)
        elif first in self.fired:
            queue.popleft()
        return not any(isinstance(one, _Copies) and one.mark == mark for one in queue)

    def forget(self, mark: Mark) -> None:
        del self._marks[mark]


class FakeCudaMemory:
    """See :class:`disagg_kv.testing.ends.Memory`."""

    def allocate(self, transport: Transport, nbytes: int) -> Buffer:
        one = Allocation(nbytes)
        return Buffer(one.addr, nbytes, "cuda:0", one)

    def write(self, buffer: Buffer, data: U8) -> None:
        ctypes.memmove(buffer.addr, data.ctypes.data, len(data))

    def read(self, buffer: Buffer) -> U8:
        return np.frombuffer(ctypes.string_at(buffer.addr, buffer.nbytes), np.uint8)

    def raise_flag(self, flag: Flag) -> None:
        raise_flags([flag])


def fake_cuda_ipc() -> CudaIpcTransport:
    """The transport over such a driver."""
    return CudaIpcTransport(driver=FakeCuda())
