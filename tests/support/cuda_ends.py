"""Memory of GPUs for the transport suite, and transports over it that a child process can import by name."""

from __future__ import annotations

import multiprocessing

import torch

from disagg_kv.geometry import CacheSpec, Group, PageTable, Plane, shard
from disagg_kv.ids import LayerId
from disagg_kv.kernels import KERNELS, PageMove, Pages
from disagg_kv.kernels.cuda_queue import CudaQueue
from disagg_kv.memory import U8, Buffer, Flag
from disagg_kv.planning import PageCopy
from disagg_kv.testing.ends import HostMemory
from disagg_kv.transports import Transport, between_processes
from tests.support.pools import KV, adopted, staged_layout


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
        """See :meth:`Memory.write`. What a transport mapped is written by a kernel, as a copy of pages does it."""
        if isinstance(buffer.owner, torch.Tensor):
            _tensor(buffer).copy_(torch.from_numpy(data))
        elif buffer.device == "cpu":
            HostMemory().write(buffer, data)
            return
        else:
            given = torch.from_numpy(data.copy()).to(buffer.device)
            _run(Buffer(given.data_ptr(), buffer.nbytes, buffer.device, given), buffer)
        torch.cuda.synchronize(buffer.device)

    def read(self, buffer: Buffer) -> U8:
        """See :meth:`Memory.read`; what arrived is asked for on a stream that knows nothing of the transport's."""
        if buffer.device == "cpu":
            return HostMemory().read(buffer)
        if not isinstance(buffer.owner, torch.Tensor):
            taken = torch.zeros(buffer.nbytes, dtype=torch.uint8, device=buffer.device)
            torch.cuda.synchronize(buffer.device)
            _run(buffer, Buffer(taken.data_ptr(), buffer.nbytes, buffer.device, taken))
            return CudaMemory().read(Buffer(taken.data_ptr(), buffer.nbytes, buffer.device, taken))
        found: U8 = _tensor(buffer).cpu().numpy()
        return found

    def raise_flag(self, flag: Flag) -> None:
        """See :meth:`Memory.raise_flag`; by a stream."""
        queue = CudaQueue(torch.device(device()).index)
        with queue:
            stream = torch.cuda.Stream(device())
            queue.store(stream.cuda_stream, flag.addr, flag.value)
        stream.synchronize()


def _run(source: Buffer, target: Buffer) -> None:
    """Copy all bytes with the copy kernel, each buffer being a pool of one page and of one cell."""
    spec = CacheSpec.mla(1, source.nbytes, "uint8")
    plane, group = Plane(LayerId(0), "latent", KV, 0, 0, source.nbytes, source.nbytes, source.nbytes), Group(KV, 1, 1)
    pools = [adopted(spec, shard(spec), [group], [plane], [buffer]) for buffer in (source, target)]
    layout = staged_layout([(0, 0, 1, 0, 1, 0)], source.nbytes)
    pages = [Pages(pool, {KV: PageTable(KV, [0])}) for pool in pools]
    event = KERNELS["triton"]().copy([PageMove(PageCopy(layout, layout), *pages)], None)
    assert event is not None
    event.synchronize()


def _tensor(buffer: Buffer) -> torch.Tensor:
    """The buffer's bytes, which may be a part of its owner's."""
    assert isinstance(buffer.owner, torch.Tensor)
    start = buffer.addr - buffer.owner.data_ptr()
    return buffer.owner[start : start + buffer.nbytes]


def cuda_ipc() -> Transport:
    """Over the real driver."""
    (only,) = between_processes("cuda_ipc", device())
    return only


def nixl() -> Transport:
    """UCX between GPUs."""
    torch.cuda.set_device(device())
    torch.cuda.synchronize()
    (only,) = between_processes("nixl", device())
    return only


def mooncake() -> Transport:
    """NVLink between GPUs."""
    torch.cuda.set_device(device())
    torch.cuda.synchronize()
    (only,) = between_processes("mooncake", device())
    return only
