"""The few calls of CUDA's driver that a launch needs, without torch.

Torch does the same with more code. That costs time on a thread that has slept, because its caches are cold: see
``benchmarks/gpu_host.py``. Names and meanings are the CUDA driver API's (docs.nvidia.com/cuda/cuda-driver-api).
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence

from ..errors import DisaggKVError

_INVALID = 1
_NOT_READY = 600
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING

_ARGUMENTS = {
    "cuMemcpyHtoDAsync_v2": (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p),
    "cuStreamWaitEvent": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint),
    "cuStreamWriteValue64_v2": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint),
    "cuEventRecord": (ctypes.c_void_p, ctypes.c_void_p),
    "cuEventQuery": (ctypes.c_void_p,),
    "cuEventSynchronize": (ctypes.c_void_p,),
    "cuLaunchKernel": (ctypes.c_void_p, *(ctypes.c_uint,) * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
}

_SLOW = frozenset({"cuEventSynchronize", "cuDevicePrimaryCtxRetain"})
"""These may take long, and let other threads run Python meanwhile."""


class Mark:
    """The end of the work that was enqueued before it; any thread may query it."""

    __slots__ = ("_queue", "cuda_event")

    def __init__(self, queue: CudaQueue, cuda_event: int) -> None:
        self._queue = queue
        self.cuda_event = cuda_event

    def query(self) -> bool:
        """Whether it has happened."""
        return self._queue.passed(self.cuda_event)

    def synchronize(self) -> None:
        """Block until it has happened."""
        self._queue.wait_for(self.cuda_event)

    def precede(self, stream: int) -> None:
        """Make later work of a stream (torch's ``cuda_stream``) begin after this event."""
        with self._queue:  # stream 0 is each context's own
            self._queue.wait(stream, self.cuda_event)

    def __del__(self) -> None:
        # A wait on a GPU refers to the earlier record, so recording again does not change it.
        self._queue.spare.append(self.cuda_event)


class CudaQueue:
    """One device's driver calls, in its primary context, which is torch's. Any thread.

    Args:
        device: its number.
    """

    def __init__(self, device: int) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        # What only queues or asks keeps the interpreter: given away, it has to be won back from a busy engine.
        self._quick = ctypes.PyDLL("libcuda.so.1")
        for name, types in _ARGUMENTS.items():
            for library in (self._library, self._quick):
                getattr(library, name).argtypes = types
        self.spare: deque[int] = deque()
        ordinal, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(ordinal), ctypes.c_int(device))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), ordinal)
        self._popped = ctypes.byref(ctypes.c_void_p())

    def _call(self, name: str, *args: object) -> None:
        status: int = getattr(self._library if name in _SLOW else self._quick, name)(*args)
        if status:
            raise DisaggKVError(f"cuda: {name}: {self._word(status)} ({status})")

    def _word(self, status: int) -> str:
        word = ctypes.c_char_p()
        self._library.cuGetErrorName(status, ctypes.byref(word))
        return (word.value or b"unknown error").decode()

    def __enter__(self) -> None:
        """Inside, the device's context is current on the calling thread; afterwards the previous one is."""
        self._call("cuCtxPushCurrent_v2", self._context)

    def __exit__(self, *exc: object) -> None:
        self._call("cuCtxPopCurrent_v2", self._popped)

    def upload(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Enqueue a copy of pinned memory to the device."""
        self._call("cuMemcpyHtoDAsync_v2", target, source, nbytes, stream)

    def wait(self, stream: int, event: int) -> None:
        """Make later work begin after an event (``CUevent``), as it was last recorded."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def store(self, stream: int, addr: int, value: int) -> None:
        """Enqueue a store of 8 bytes. With it, all that the stream did before is visible to other processes."""
        # By default (flags 0) a memory barrier of the whole system precedes the store.
        self._call("cuStreamWriteValue64_v2", stream, addr, value, 0)

    def record(self, stream: int) -> Mark:
        """An event at the end of the work enqueued so far."""
        try:
            mark = Mark(self, self.spare.popleft())
        except IndexError:
            made = ctypes.c_void_p()
            self._call("cuEventCreate", ctypes.byref(made), ctypes.c_uint(_NO_TIMING))
            mark = Mark(self, made.value or 0)
        self._call("cuEventRecord", mark.cuda_event, stream)
        return mark

    def parameters(self, function: int) -> list[tuple[int, int]] | None:
        """Offset and bytes of each parameter of a loaded kernel; None: this driver cannot say."""
        try:
            ask = self._quick.cuFuncGetParamInfo
        except AttributeError:
            return None
        found: list[tuple[int, int]] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        while True:
            status = ask(
                ctypes.c_void_p(function), ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)
            )
            if status:
                return found if status == _INVALID else None
            found.append((offset.value, size.value))

    def launch(
        self, function: int, programs: int, threads: int, shared: int, stream: int, values: Sequence[int]
    ) -> None:
        """Enqueue a kernel with parameters of at most 8 bytes each; keeps the interpreter.

        The driver copies the parameters during the call, each with as many bytes as the kernel takes.
        """
        # The first bytes of an integer of 8 bytes are the shorter integer: the hosts of these GPUs are little-endian.
        cells = (ctypes.c_int64 * len(values))(*values)
        first = ctypes.addressof(cells)
        where = (ctypes.c_void_p * len(values))(*range(first, first + 8 * len(values), 8))
        self._call("cuLaunchKernel", function, programs, 1, 1, threads, 1, 1, shared, stream, where, None)

    def passed(self, event: int) -> bool:
        """Whether all before an event is done."""
        status: int = self._quick.cuEventQuery(event)
        if status not in (0, _NOT_READY):
            raise DisaggKVError(f"cuda: cuEventQuery: {self._word(status)} ({status})")
        return status == 0

    def wait_for(self, event: int) -> None:
        """Block until all before an event is done."""
        self._call("cuEventSynchronize", event)
