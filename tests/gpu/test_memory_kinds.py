"""One room between memory of a GPU and pinned memory of the host, over NIXL, in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from disagg_kv.geometry import CacheSpec, shard
from disagg_kv.kernels.tensors import plane_of
from disagg_kv.memory import PagedPool
from tests.support.needs import needs_nixl
from tests.support.processes import Cluster, Knobs
from tests.support.several import ROOM, cross


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Processes that all end with the test."""
    made = Cluster(tmp_path)
    yield made
    made.stop()


def test_a_pool_in_pinned_memory_of_the_host_is_read_by_a_gpu_as_it_is() -> None:
    """It is zeroed, and lies on the host."""
    spec = CacheSpec.kv(2, 2, 16, "bfloat16")
    pool = PagedPool.allocate(spec, shard(spec), pages=4, page_size=8, pinned=True)
    assert pool.buffers[0].device == "cpu"
    for plane in range(len(pool.site.planes)):
        cells = plane_of(pool, plane)
        assert cells.is_pinned()
        assert not cells.to("cuda", non_blocking=True).any()


@needs_nixl
@pytest.mark.parametrize("path", ["staged", "slice", "auto"])
@pytest.mark.parametrize(("source", "target"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_rows_cross_between_a_gpu_and_pinned_memory(cluster: Cluster, path: str, source: str, target: str) -> None:
    """Byte for byte into other pages, in either direction; each side stages in memory of its pool's kind."""
    knobs = Knobs(path, transport="nixl")
    ends = [attrs.evolve(knobs, device=device, pinned=device == "cpu") for device in (source, target)]
    (prefill,) = cluster.start("prefill", "P", 1, ends[0])
    (decode,) = cluster.start("decode", "D", 1, attrs.evolve(ends[1], page_size=32, layout="HND"))
    cross(prefill, decode, ROOM)
    look = prefill.ask("look", ROOM)
    assert (look.path, look.transport) == ("staged" if path == "auto" else path, "nixl"), look
