"""Memory of another process: whose it is, what reaches it, and how long it stays open here."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from weakref import finalize

import msgspec
from attrs import frozen

from ..errors import RegistrationError, TransportError
from ..memory import Buffer
from .cuda_api import Gpu
from .cuda_driver import Driver
from .flags import HostFlags
from .process import Process

log = logging.getLogger("disagg_kv")


@frozen
class Owner:
    """Whose memory a descriptor is about.

    Args:
        process: the process.
        ipc: its IPC namespace.
        gpu: where its regions lie; None: it has none yet.
    """

    process: Process
    ipc: str
    gpu: Gpu | None = None


OWNER = msgspec.msgpack.Decoder(Owner)


@frozen
class Place:
    """Where a region lies: byte ``offset`` of the allocation that ``handle`` opens."""

    handle: bytes
    offset: int


PLACE = msgspec.msgpack.Decoder(Place)


def exported(cuda: Driver, buffer: Buffer) -> Place:
    """Where other processes find a buffer.

    Raises:
        RegistrationError: it is no memory of a GPU, or none that they can open.
    """
    device = index(buffer.device)
    try:
        base, nbytes = cuda.segment(device, buffer.addr)
        shareable = cuda.shareable(device, buffer.addr)
        if shareable and buffer.addr + buffer.nbytes <= base + nbytes:
            return Place(cuda.export(device, base), buffer.addr - base)
    except TransportError as error:
        raise RegistrationError(f"{said(buffer)}: no memory of a GPU, or none to share: {error}") from error
    if shareable:
        raise RegistrationError(f"{said(buffer)}: goes beyond its allocation of {nbytes} bytes at {base:#x}")
    raise RegistrationError(
        f"{said(buffer)}: of cuMemCreate (fabric handles too) or pooled, not for CUDA IPC; use cudaMalloc, no "
        "'expandable_segments:True', no 'backend:cudaMallocAsync' (PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF)"
    )


def said(buffer: Buffer) -> str:
    """A buffer, for messages."""
    return f"cuda_ipc: {buffer.nbytes} bytes at {buffer.addr:#x} on {buffer.device!r}"


class Opened:
    """A peer's allocation, open in the context of one device. It is closed when the last reference to this goes."""

    def __init__(self, cuda: Driver, device: int, handle: bytes, whose: str) -> None:
        self.addr = cuda.open(device, handle)
        # At the end of the process the driver closes it; a forked child must not.
        finalize(self, _undo, partial(cuda.close, device, self.addr), whose, os.getpid()).atexit = False


class CudaFlags(HostFlags):
    """A peer's flag page, in which streams of one device may store, too. It is taken from them with the last reference.

    No owner could take it earlier: a copy in flight may raise one after its peer was disconnected and the transport
    closed. So the thread that drops the last flag does it, perhaps the engine's. The driver allows any thread, and this
    takes no lock that the thread may hold. It may wait for the GPU once.
    """

    def __init__(self, cuda: Driver, device: str, page: Buffer, whose: str) -> None:
        super().__init__(page)
        self._number = number = index(device)
        self._there = cuda.share(number, page.addr, page.nbytes)
        # The page is unmapped after that, with the arguments of this call.
        finalize(self, _undo, partial(cuda.unshare, number, page.addr), whose, os.getpid(), page).atexit = False

    def base(self, device: str) -> int | None:
        """See :meth:`HostFlags.base`."""
        ours = device.startswith("cuda") and index(device) == self._number
        return self._there if ours else super().base(device)


def index(device: str) -> int:
    """The number of a device, here."""
    return int(device.partition(":")[2] or 0)


def _undo(undo: Callable[[], None], whose: str, pid: int, *kept: object) -> None:
    if os.getpid() != pid:
        return
    try:
        undo()
    except TransportError as error:
        # The context is broken, and every later write will raise that; this call has no ticket that could fail.
        log.warning("cuda_ipc: peer %s: %s", whose, error)


def unreachable(cuda: Driver, gpu: Gpu, device: int) -> str | None:
    """Why kernels of a device cannot have memory of a GPU mapped; None: no reason is known.

    A GPU that this process does not see may be reached nevertheless: opening its memory shows that.

    Raises:
        TransportError: the driver does not say.
    """
    gpus = cuda.gpus()
    if device >= len(gpus):
        return f"cuda_ipc: this process has no GPU {device}, only {len(gpus)}"
    own = gpus[device]
    if own.uuid == gpu.uuid:
        return None
    if own.partitioned or gpu.partitioned:
        what = f"cuda_ipc: nothing is mapped between the peer's {gpu} and this {own}"
        return f"{what}: MIG allows it only inside one GPU instance, and nothing here shows that they are of one"
    there = [number for number, one in enumerate(gpus) if one.uuid == gpu.uuid]
    if there and not cuda.reaches(device, there[0]):
        return f"cuda_ipc: the peer's {gpu} and this {own} have no peer access (cuDeviceCanAccessPeer)"
    return None
