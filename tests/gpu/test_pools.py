"""A pool over CUDA tensors is described without touching them."""

from __future__ import annotations

import pytest
import torch

from disagg_kv.errors import RegistrationError
from disagg_kv.geometry import CacheSpec, shard
from disagg_kv.ids import LayerId
from disagg_kv.memory import PagedPool, bytes_of

SPEC = CacheSpec.kv(2, 4, 16, "bfloat16")


def test_a_pool_adopts_cuda_tensors_in_place() -> None:
    """Buffers are the tensors' own storages, at their own addresses, on their own device."""
    tensors = {
        LayerId(i): {name: torch.zeros(8, 4, 4, 16, dtype=torch.bfloat16, device="cuda") for name in ("k", "v")}
        for i in range(2)
    }
    pool = PagedPool.from_tensors(SPEC, shard(SPEC), tensors)
    pool.site.check()
    assert {b.device for b in pool.buffers} == {"cuda:0"}
    places = {(p.layer, p.component): pool.buffers[p.buffer].addr + p.offset for p in pool.site.planes}
    assert places == {(i, n): t.data_ptr() for i, named in tensors.items() for n, t in named.items()}


def test_a_pool_allocates_on_the_gpu() -> None:
    """One zeroed buffer of device memory."""
    pool = PagedPool.allocate(SPEC, shard(SPEC), pages=4, page_size=16, device="cuda")
    (buffer,) = pool.buffers
    assert buffer.device == "cuda:0"
    assert buffer.nbytes == pool.site.buffers[0]


def test_cpu_code_refuses_device_memory() -> None:
    """Device addresses are never read by the CPU."""
    pool = PagedPool.allocate(SPEC, shard(SPEC), pages=4, page_size=16, device="cuda")
    with pytest.raises(RegistrationError, match="cuda:0"):
        bytes_of(pool.buffers[0])
