"""Memory of GPUs for the transport suite, and transports over it that a child process can import by name."""

from __future__ import annotations

import multiprocessing

import torch

from disagg_kv.memory import U8, Buffer
from disagg_kv.transports import Transport, between_processes


def device() -> str:
    """The first GPU in the process that tests, the last one in its children."""
    last = torch.cuda.device_count() - 1
    return f"cuda:{0 if multiprocessing.parent_process() is None else last}"


class CudaMemory:
    """See :class:`disagg_kv.testing.ends.Memory`.

    Args:
        apart: each piece in an allocation of its own; else small ones share one, as torch's allocator does it.
    """

    def __init__(self, apart: bool = False) -> None:
        self._apart = apart

    def allocate(self, transport: Transport, nbytes: int) -> Buffer:
        """See :meth:`Memory.allocate`."""
        size = max(nbytes, 12 << 20) if self._apart else nbytes
        tensor = torch.zeros(size, dtype=torch.uint8, device=device())
        torch.cuda.synchronize(device())
        return Buffer(tensor.data_ptr(), nbytes, device(), tensor)

    def write(self, buffer: Buffer, data: U8) -> None:
        """See :meth:`Memory.write`."""
        _tensor(buffer).copy_(torch.from_numpy(data))
        torch.cuda.synchronize(buffer.device)

    def read(self, buffer: Buffer) -> U8:
        """See :meth:`Memory.read`; what arrived is asked for on a stream that knows nothing of the transport's."""
        found: U8 = _tensor(buffer).cpu().numpy()
        return found


def _tensor(buffer: Buffer) -> torch.Tensor:
    """The buffer's bytes, which may be a part of its owner's."""
    assert isinstance(buffer.owner, torch.Tensor)
    start = buffer.addr - buffer.owner.data_ptr()
    return buffer.owner[start : start + buffer.nbytes]


def cuda_ipc() -> Transport:
    """Over the real driver."""
    return between_processes("cuda_ipc", device())


def nixl() -> Transport:
    """UCX's lanes between GPUs."""
    torch.cuda.set_device(device())
    torch.cuda.synchronize()
    return between_processes("nixl", device())


def mooncake() -> Transport:
    """NVLink between GPUs."""
    torch.cuda.set_device(device())
    torch.cuda.synchronize()
    return between_processes("mooncake", device())
