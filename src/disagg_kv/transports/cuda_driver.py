"""The CUDA driver by way of ctypes: libcuda alone, so that neither torch nor a runtime library has a say in it.

Names and meanings are those of the CUDA driver API (docs.nvidia.com/cuda/cuda-driver-api). Each device's primary
context is used, which is the one that torch and the CUDA runtime use, too.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache

import numpy as np

from ..errors import MissingDependencyError, TransportError
from ..geometry import I64
from .cuda_api import Gpu, Mark, Stream

_NOT_READY = 600
_IPC_CAPABLE = 13  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_STORES_WORDS = 122  # CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
_EVERY_CONTEXT, _MAPPED = 1, 2  # CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP

_Pointer = ctypes.c_uint64

_QUICK = frozenset(
    {
        "cuCtxPushCurrent_v2",
        "cuCtxPopCurrent_v2",
        "cuStreamWaitEvent",
        "cuEventRecord",
        "cuEventQuery",
    }
)
"""Calls that only queue or query keep the GIL: a released GIL has to be won back from an engine's busy thread."""

FEW = 64
"""Copies that are queued so quickly, too: a full queue waits for the GPU, which may wait for a thread with Python."""


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``."""

    _fields_ = (("reserved", ctypes.c_byte * 64),)


class _Uuid(ctypes.Structure):
    """``CUuuid``."""

    _fields_ = (("bytes", ctypes.c_byte * 16),)


class _Location(ctypes.Structure):
    """``CUmemLocation``."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


class _Context(AbstractContextManager[None]):
    """See :meth:`Driver.current`."""

    def __init__(self, driver: Driver, context: ctypes.c_void_p) -> None:
        self._driver = driver
        self._context = context

    def __enter__(self) -> None:
        self._driver.call("cuCtxPushCurrent_v2", self._context)

    def __exit__(self, *exc: object) -> None:
        self._driver.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@cache
def driver() -> Driver:
    """This process's driver.

    Raises:
        MissingDependencyError: there is none, or no GPU that it can use.
    """
    return Driver()


class Driver:
    """The driver. Addresses are those of this process; devices are numbered as in ``Buffer.device``. Any thread.

    Every method raises a :class:`~disagg_kv.errors.TransportError` that names the call and the driver's own word.
    None but ``open``, ``close``, ``share`` and ``unshare`` may wait for a GPU.
    """

    def __init__(self) -> None:
        what, remedy = "transport 'cuda_ipc'", "run where nvidia-smi shows a GPU"
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
            self._quick = ctypes.PyDLL("libcuda.so.1")
        except OSError as error:
            raise MissingDependencyError(what, f"the CUDA driver cannot be loaded: {error}", remedy) from error
        try:
            self.call("cuInit", ctypes.c_uint(0))
        except TransportError as error:
            raise MissingDependencyError(what, str(error), remedy) from error
        self._contexts: dict[int, _Context] = {}
        self._devices: dict[Mark, int] = {}
        self._spare: defaultdict[int, deque[Mark]] = defaultdict(deque)
        self._gpus: Sequence[Gpu] = ()
        self._lock = threading.Lock()
        self._batches = hasattr(self._library, "cuMemcpyBatchAsync_v2")
        self._order = _Attributes(order=_STREAM_ORDER)

    def call(self, name: str, *args: object) -> None:
        """Call a function of the library.

        Raises:
            TransportError: it did not succeed.
        """
        self._run(self._quick if name in _QUICK else self._library, name, *args)

    def _run(self, library: ctypes.CDLL, name: str, *args: object) -> None:
        status: int = getattr(library, name)(*args)
        if status:
            raise TransportError(f"cuda: {name}: {self._word(status)} ({status})")

    def _word(self, status: int) -> str:
        word = ctypes.c_char_p()
        self._library.cuGetErrorName(status, ctypes.byref(word))
        return (word.value or b"unknown error").decode()

    def current(self, device: int) -> AbstractContextManager[None]:
        """A device's primary context is the calling thread's inside ``with``; afterwards what was."""
        known = self._contexts.get(device)
        if known is not None:
            return known
        with self._lock:
            if device not in self._contexts:
                context = ctypes.c_void_p()
                self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._ordinal(device))
                self._contexts[device] = _Context(self, context)
            return self._contexts[device]

    def gpus(self) -> Sequence[Gpu]:
        """The GPUs that this process sees, by their numbers here."""
        if not self._gpus:
            count = ctypes.c_int()
            self.call("cuDeviceGetCount", ctypes.byref(count))
            self._gpus = tuple([self._gpu(number) for number in range(count.value)])
        return self._gpus

    def _gpu(self, number: int) -> Gpu:
        # The older call gives the whole GPU's name for each of its instances.
        whole, own = _Uuid(), _Uuid()
        for name, found in (("cuDeviceGetUuid", whole), ("cuDeviceGetUuid_v2", own)):
            self.call(name, ctypes.byref(found), self._ordinal(number))
        return Gpu(bytes(own), bytes(own) != bytes(whole))

    def _ordinal(self, device: int) -> ctypes.c_int:
        ordinal = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(ordinal), ctypes.c_int(device))
        return ordinal

    def reaches(self, device: int, other: int) -> bool:
        """Whether kernels on one device can have the memory of another one mapped; both have numbers here."""
        found = ctypes.c_int()
        self.call("cuDeviceCanAccessPeer", ctypes.byref(found), self._ordinal(device), self._ordinal(other))
        return bool(found.value)

    def segment(self, device: int, addr: int) -> tuple[int, int]:
        """First byte and length of the allocation that holds the address ``addr`` of a device, as it sees it."""
        base, nbytes = _Pointer(), ctypes.c_size_t()
        with self.current(device):
            self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), _Pointer(addr))
        return base.value, nbytes.value

    def shareable(self, device: int, addr: int) -> bool:
        """Whether the memory at ``addr`` can be exported: what is mapped piecewise (VMM), or pooled, cannot."""
        found = ctypes.c_int()
        with self.current(device):
            self.call("cuPointerGetAttribute", ctypes.byref(found), ctypes.c_int(_IPC_CAPABLE), _Pointer(addr))
        return bool(found.value)

    def export(self, device: int, addr: int) -> bytes:
        """What another process needs to open the allocation that begins at ``addr``."""
        handle = _Handle()
        with self.current(device):
            self.call("cuIpcGetMemHandle", ctypes.byref(handle), _Pointer(addr))
        return bytes(handle)

    def open(self, device: int, handle: bytes) -> int:
        """Map another process's allocation for copies and kernels of ``device``; the address of its first byte.

        What is open already gets the same address again, and has to be closed once more.
        """
        if len(handle) != ctypes.sizeof(_Handle):
            raise TransportError(f"cuda: a handle of {len(handle)} bytes, not {ctypes.sizeof(_Handle)}")
        addr = _Pointer()
        with self.current(device):
            given = _Handle.from_buffer_copy(handle)
            self.call("cuIpcOpenMemHandle_v2", ctypes.byref(addr), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return addr.value

    def close(self, device: int, addr: int) -> None:
        """Undo one :meth:`open`; no copy may use the mapping any more."""
        with self.current(device):
            self.call("cuIpcCloseMemHandle", _Pointer(addr))

    def share(self, device: int, addr: int, nbytes: int) -> int:
        """Let streams of all devices store words in host memory; its address as those of ``device`` see it."""
        able, found = ctypes.c_int(), _Pointer()
        self.call("cuDeviceGetAttribute", ctypes.byref(able), ctypes.c_int(_STORES_WORDS), self._ordinal(device))
        if not able.value:
            raise TransportError(f"cuda: streams of GPU {device} store no words of 8 bytes (cuStreamWriteValue64)")
        flags, host = ctypes.c_uint(_EVERY_CONTEXT | _MAPPED), ctypes.c_void_p(addr)
        with self.current(device):
            self.call("cuMemHostRegister_v2", host, ctypes.c_size_t(nbytes), flags)
            try:
                self.call("cuMemHostGetDevicePointer_v2", ctypes.byref(found), host, ctypes.c_uint(0))
            except TransportError:
                self.call("cuMemHostUnregister", host)
                raise
        return found.value

    def unshare(self, device: int, addr: int) -> None:
        """Undo one :meth:`share`; no stream may store there any more."""
        with self.current(device):
            self.call("cuMemHostUnregister", ctypes.c_void_p(addr))

    def stream(self, device: int) -> Stream:
        """A new queue, which waits for no other one."""
        made = ctypes.c_void_p()
        with self.current(device):
            self.call("cuStreamCreate", ctypes.byref(made), ctypes.c_uint(_NON_BLOCKING))
        return Stream(made.value or 0)

    def end(self, device: int, stream: Stream) -> None:
        """Release an empty queue."""
        with self.current(device):
            self.call("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def copy(
        self, device: int, stream: Stream, target: I64, source: I64, nbytes: I64, after: Sequence[int] = ()
    ) -> Mark:
        """Queue copies of at least one byte each, in any order; gives the place behind them.

        They, and what is queued later, begin when all events (``CUevent``) of ``after`` have happened, as those were
        last recorded.
        """
        queue, library = ctypes.c_void_p(stream), self._quick if len(nbytes) <= FEW else self._library
        with self.current(device):
            for event in after:
                self.call("cuStreamWaitEvent", queue, ctypes.c_void_p(event), ctypes.c_uint(0))
            if self._batches and len(nbytes) > 1:
                columns = [np.ascontiguousarray(c, np.int64) for c in (target, source, nbytes)]
                self._run(
                    library,
                    "cuMemcpyBatchAsync_v2",
                    *(ctypes.c_void_p(c.ctypes.data) for c in columns),
                    ctypes.c_size_t(len(nbytes)),
                    ctypes.byref(self._order),
                    ctypes.byref(ctypes.c_size_t(0)),
                    ctypes.c_size_t(1),
                    queue,
                )
            else:
                for to, at, size in zip(target.tolist(), source.tolist(), nbytes.tolist(), strict=True):
                    self._run(library, "cuMemcpyDtoDAsync_v2", _Pointer(to), _Pointer(at), ctypes.c_size_t(size), queue)
            mark = self._mark(device)
            self.call("cuEventRecord", ctypes.c_void_p(mark), queue)
        return mark

    def _mark(self, device: int) -> Mark:
        """A free event; the device's context is current."""
        try:
            mark = self._spare[device].popleft()
        except IndexError:
            made = ctypes.c_void_p()
            self.call("cuEventCreate", ctypes.byref(made), ctypes.c_uint(_NO_TIMING))
            mark = Mark(made.value or 0)
        self._devices[mark] = device
        return mark

    def passed(self, mark: Mark) -> bool:
        """Whether all before a mark is done."""
        status: int = self._quick.cuEventQuery(ctypes.c_void_p(mark))
        if status not in (0, _NOT_READY):
            raise TransportError(f"cuda: cuEventQuery: {self._word(status)} ({status})")
        return status == 0

    def forget(self, mark: Mark) -> None:
        """A mark is of no use any more; kept for the next copy."""
        self._spare[self._devices.pop(mark)].append(mark)
