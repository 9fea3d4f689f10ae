"""The CUDA driver by way of ctypes: libcuda alone, so that neither torch nor a runtime library has a say in it.

Names and meanings are those of the CUDA driver API (docs.nvidia.com/cuda/cuda-driver-api). Each device's primary
context is used, which is the one that torch and the CUDA runtime use, too.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np

from ..errors import MissingDependencyError, TransportError
from ..geometry import I64
from .cuda_api import Mark, Stream

_NOT_READY = 600
_IPC_CAPABLE = 13  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

_Pointer = ctypes.c_uint64


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``."""

    _fields_ = (("reserved", ctypes.c_byte * 64),)


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


@cache
def driver() -> Driver:
    """This process's driver.

    Raises:
        MissingDependencyError: there is none, or no GPU that it can use.
    """
    return Driver()


class Driver:
    """See :class:`~disagg_kv.transports.cuda_api.Cuda`."""

    def __init__(self) -> None:
        what, remedy = "transport 'cuda_ipc'", "run where nvidia-smi shows a GPU"
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise MissingDependencyError(what, f"the CUDA driver cannot be loaded: {error}", remedy) from error
        try:
            self._call("cuInit", ctypes.c_uint(0))
        except TransportError as error:
            raise MissingDependencyError(what, str(error), remedy) from error
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()
        self._batches = hasattr(self._library, "cuMemcpyBatchAsync_v2")
        self._order = _Attributes(order=_STREAM_ORDER)

    def _call(self, name: str, *args: object) -> None:
        status: int = getattr(self._library, name)(*args)
        if status:
            raise TransportError(f"cuda: {name}: {self._word(status)} ({status})")

    def _word(self, status: int) -> str:
        word = ctypes.c_char_p()
        self._library.cuGetErrorName(status, ctypes.byref(word))
        return (word.value or b"unknown error").decode()

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        """The device's context is the calling thread's inside; afterwards what was."""
        self._call("cuCtxPushCurrent_v2", self._context(device))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _context(self, device: int) -> ctypes.c_void_p:
        with self._lock:
            if device not in self._contexts:
                ordinal, context = ctypes.c_int(), ctypes.c_void_p()
                self._call("cuDeviceGet", ctypes.byref(ordinal), ctypes.c_int(device))
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
                self._contexts[device] = context
            return self._contexts[device]

    def segment(self, device: int, addr: int) -> tuple[int, int]:
        """See :meth:`Cuda.segment`."""
        base, nbytes = _Pointer(), ctypes.c_size_t()
        with self._on(device):
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), _Pointer(addr))
        return base.value, nbytes.value

    def shareable(self, device: int, addr: int) -> bool:
        """See :meth:`Cuda.shareable`."""
        found = ctypes.c_int()
        with self._on(device):
            self._call("cuPointerGetAttribute", ctypes.byref(found), ctypes.c_int(_IPC_CAPABLE), _Pointer(addr))
        return bool(found.value)

    def export(self, device: int, addr: int) -> bytes:
        """See :meth:`Cuda.export`."""
        handle = _Handle()
        with self._on(device):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), _Pointer(addr))
        return bytes(handle)

    def open(self, device: int, handle: bytes) -> int:
        """See :meth:`Cuda.open`."""
        if len(handle) != ctypes.sizeof(_Handle):
            raise TransportError(f"cuda: a handle of {len(handle)} bytes, not {ctypes.sizeof(_Handle)}")
        addr = _Pointer()
        with self._on(device):
            given = _Handle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(addr), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return addr.value

    def close(self, device: int, addr: int) -> None:
        """See :meth:`Cuda.close`."""
        with self._on(device):
            self._call("cuIpcCloseMemHandle", _Pointer(addr))

    def stream(self, device: int) -> Stream:
        """See :meth:`Cuda.stream`."""
        made = ctypes.c_void_p()
        with self._on(device):
            self._call("cuStreamCreate", ctypes.byref(made), ctypes.c_uint(_NON_BLOCKING))
        return Stream(made.value or 0)

    def end(self, device: int, stream: Stream) -> None:
        """See :meth:`Cuda.end`."""
        with self._on(device):
            self._call("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def wait(self, device: int, stream: Stream, event: int) -> None:
        """See :meth:`Cuda.wait`."""
        with self._on(device):
            self._call("cuStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), ctypes.c_uint(0))

    def copy(self, device: int, stream: Stream, target: I64, source: I64, nbytes: I64) -> Mark:
        """See :meth:`Cuda.copy`."""
        queue, mark = ctypes.c_void_p(stream), ctypes.c_void_p()
        with self._on(device):
            if self._batches and len(nbytes) > 1:
                columns = [np.ascontiguousarray(c, np.int64) for c in (target, source, nbytes)]
                self._call(
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
                    self._call("cuMemcpyDtoDAsync_v2", _Pointer(to), _Pointer(at), ctypes.c_size_t(size), queue)
            self._call("cuEventCreate", ctypes.byref(mark), ctypes.c_uint(_NO_TIMING))
            self._call("cuEventRecord", mark, queue)
        return Mark(mark.value or 0)

    def passed(self, mark: Mark) -> bool:
        """See :meth:`Cuda.passed`."""
        status: int = self._library.cuEventQuery(ctypes.c_void_p(mark))
        if status not in (0, _NOT_READY):
            raise TransportError(f"cuda: cuEventQuery: {self._word(status)} ({status})")
        return status == 0

    def forget(self, mark: Mark) -> None:
        """See :meth:`Cuda.forget`."""
        self._call("cuEventDestroy_v2", ctypes.c_void_p(mark))
