"""Transports of GPU memory pass the suite that every transport is judged by; with two GPUs, between them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from disagg_kv.errors import RegistrationError, TransportError
from disagg_kv.memory import Buffer
from disagg_kv.planning import Writes
from disagg_kv.testing.ends import Child, End, Memory
from disagg_kv.testing.pair import POISON, Pair, batch, noise, same
from disagg_kv.testing.transport import TransportSuite
from disagg_kv.testing.transport_after import LARGE
from disagg_kv.transports import Transport
from tests.support import cuda_ends
from tests.support.cuda_ends import CudaMemory

NIXL = any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu13", "nixl_cu12"))
MOONCAKE = importlib.util.find_spec("mooncake") is not None


class TestCudaIpc(TransportSuite):
    """Over the real driver."""

    one_process = False
    timeout_s = 60.0

    @classmethod
    def factory(cls) -> Callable[[], Transport]:
        return cuda_ends.cuda_ipc

    @classmethod
    def memory(cls) -> Memory:
        return CudaMemory()


@pytest.mark.skipif(not NIXL, reason="NIXL is not installed")
class TestNixl(TransportSuite):
    """UCX's cuda_ipc. As on the CPU, UCX keeps a file of each side of a connection."""

    one_process = False
    kept_per_connect = 2
    timeout_s = 60.0

    @classmethod
    def factory(cls) -> Callable[[], Transport]:
        return cuda_ends.nixl

    @classmethod
    def memory(cls) -> Memory:
        return CudaMemory()


@pytest.mark.skipif(not MOONCAKE, reason="Mooncake is not installed")
class TestMooncake(TransportSuite):
    """Protocol nvlink_intra. What lies in one allocation is registered as one, so that each piece has its own here.

    The library looks at a peer's regions once, so what is said of regions that come later is that they are refused.
    """

    def _refuses_later_regions(self, pair: Pair) -> None:
        pair.target.add(np.zeros(100, np.uint8))
        with pytest.raises(TransportError, match="register everything first"):
            pair.connect()
        pair.put((0, 0, 100))
        pair.check()

    test_connecting_again_gives_the_same_peer_and_its_new_regions = _refuses_later_regions
    test_a_region_may_begin_and_end_anywhere_in_an_allocation = _refuses_later_regions
    test_one_large_write_lands_whole = _refuses_later_regions

    def test_a_region_may_begin_and_end_anywhere_in_an_allocation_where_it_is_registered_first(
        self, end: End, child: Child
    ) -> None:
        """Registered before the first connect."""
        child.open()
        whole, parts = np.full(20_000, POISON, np.uint8), [(8192, 4096), (5000, 1001), (1, 19_998)]
        regions = [
            (end.add_part(noise(20_000, seed), *part), child.add_part(whole, *part)) for seed, part in enumerate(parts)
        ]
        pair = Pair(end, child, 100, self.timeout_s)
        for seed, ((first, _), (mine, theirs)) in enumerate(zip(parts, regions, strict=True)):
            pair.succeed(end.submit(pair.peer, batch(mine, theirs, [(7, 10, 500)])))
            want = whole.copy()
            want[first + 10 : first + 510] = noise(20_000, seed)[first + 7 : first + 507]
            same(child.read_whole(theirs), want)
        child.close(self.timeout_s)

    def test_one_large_write_lands_whole_where_it_is_registered_first(self, end: End, child: Child) -> None:
        """Registered before the first connect."""
        child.open()
        pair = Pair(end, child, LARGE, self.timeout_s)
        pair.put((0, 0, LARGE))
        pair.check()
        child.close(self.timeout_s)

    def test_both_ends_write_to_each_other(self, pair: Pair) -> None:
        """With what is registered by then."""
        back = pair.target.connect(pair.source.descriptor(), self.timeout_s)
        ticket = pair.target.submit(back, batch(pair.remote, pair.local, [(0, 5, 1000)]))
        pair.until(lambda: ticket in pair.there.ended, "the target's own ticket to end")
        assert pair.there.ended[ticket].error is None

    def test_writes_of_one_batch_use_many_regions(self, pair: Pair) -> None:
        """On the source's side, whose regions the library does look up."""
        mine = [pair.source.add(noise(100, seed)) for seed in (1, 2)]
        local, offsets = np.array(mine, np.int32), np.array([0, 200], np.int64)
        remote = np.full(2, pair.remote, np.int32)
        pair.succeed(pair.source.submit(pair.peer, Writes(local, 0 * offsets, remote, offsets, 0 * offsets + 100)))
        pair.want[:100], pair.want[200:300] = noise(100, 1), noise(100, 2)
        pair.check()

    one_process = False
    timeout_s = 60.0

    @classmethod
    def factory(cls) -> Callable[[], Transport]:
        return cuda_ends.mooncake

    @classmethod
    def memory(cls) -> Memory:
        return CudaMemory(apart=True)


@pytest.mark.parametrize("name", ["cuda_ipc", "nixl", "mooncake"])
def test_memory_that_no_other_process_can_open_is_refused_with_the_reason(name: str) -> None:
    """Expandable segments are mapped piecewise; what a transport would do with them is crawl, or fail later."""
    if (name == "nixl" and not NIXL) or (name == "mooncake" and not MOONCAKE):
        pytest.skip(f"{name} is not installed")
    code = (
        "import torch\n"
        "from disagg_kv.errors import RegistrationError\n"
        "from disagg_kv.memory import new_buffer\n"
        f"from tests.support.cuda_ends import {name} as make\n"
        "buffer = new_buffer(32 << 20, 'cuda:0')\n"
        "transport = make()\n"
        "try: transport.register([buffer])\n"
        "except RegistrationError as error: print('refused:', error)\n"
        "else: raise SystemExit('registered')\n"
        "transport.close(0.0)\n"
    )
    setting = "expandable_segments:True"
    done = subprocess.run(
        ["env", f"PYTORCH_CUDA_ALLOC_CONF={setting}", f"PYTORCH_ALLOC_CONF={setting}", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "refused:" in done.stdout


def test_copies_wait_in_their_stream_for_what_the_engine_computes() -> None:
    """A write posted behind an event of torch's carries what is computed before it, and nobody waits on the host."""
    child = Child(cuda_ends.cuda_ipc, CudaMemory(), 60.0)
    try:
        child.open()
        end = End(cuda_ends.cuda_ipc, CudaMemory())
        pair = Pair(end, child, 1 << 16, 60.0)
        buffer = end._buffers[pair.local]
        assert isinstance(buffer.owner, torch.Tensor)
        pair.put((0, 0, 8))
        torch.cuda._sleep(1_000_000_000)
        buffer.owner.fill_(7)
        computed = torch.cuda.Event()
        computed.record()
        ticket = end.transport.submit(pair.peer, batch(pair.local, pair.remote, [(0, 0, 1 << 16)]), after=computed)
        assert not computed.query()
        pair.succeed(ticket)
        pair.want[:] = 7
        pair.check()
        end.close(1.0)
    finally:
        child.stop()


def test_memory_of_two_gpus_is_refused_by_one_transport() -> None:
    """One rank has one GPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    made = cuda_ends.cuda_ipc()
    tensors = [torch.zeros(4096, dtype=torch.uint8, device=f"cuda:{i}") for i in range(2)]
    with pytest.raises(RegistrationError, match="'cuda:1': the transport's other regions lie on 'cuda:0'"):
        made.register([Buffer(t.data_ptr(), 4096, str(t.device), t) for t in tensors])
    made.close(0.0)


def test_addresses_of_the_cpu_are_refused() -> None:
    """Whatever the buffer says of them."""
    made = cuda_ends.cuda_ipc()
    tensor = torch.zeros(4096, dtype=torch.uint8)
    with pytest.raises(RegistrationError, match="no memory of a GPU"):
        made.register([Buffer(tensor.data_ptr(), 4096, "cuda:0", tensor)])
    made.close(0.0)
