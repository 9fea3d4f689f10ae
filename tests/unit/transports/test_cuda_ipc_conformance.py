"""cuda_ipc passes the suite that every transport is judged by; on GPUs ``tests/gpu`` runs the same."""

from __future__ import annotations

from collections.abc import Callable

from disagg_kv.testing.ends import Memory
from disagg_kv.testing.transport import TransportSuite
from disagg_kv.transports import Transport
from tests.support.fake_cuda import FakeCudaMemory, fake_cuda_ipc


class TestCudaIpc(TransportSuite):
    """Over a driver that keeps GPU memory in shared memory."""

    one_process = False

    @classmethod
    def factory(cls) -> Callable[[], Transport]:
        return fake_cuda_ipc

    @classmethod
    def memory(cls) -> Memory:
        return FakeCudaMemory()
