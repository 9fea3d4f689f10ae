"""A peer's pool that is mapped here."""

from __future__ import annotations

import attrs
import pytest

from disagg_kv.errors import ConfigurationError, GeometryError
from disagg_kv.geometry import CacheSpec, shard
from disagg_kv.memory import Buffer, MappedPool, PagedPool

SPEC = CacheSpec.kv(2, 2, 4, "bfloat16")


def _pool() -> PagedPool:
    return PagedPool.allocate(SPEC, shard(SPEC), pages=4, page_size=4)


def test_equal_mappings_are_different_pools() -> None:
    """Kernels cache data by the object."""
    pool = _pool()
    one, other = (MappedPool(pool.site, pool.buffers) for _ in range(2))
    assert one != other
    assert {one: 1}[one] == 1


def test_buffers_that_the_planes_do_not_fit_are_refused() -> None:
    """Kernels check no bounds: a mapping that is too short would be written beyond its end."""
    pool = _pool()
    (buffer,) = pool.buffers
    short = attrs.evolve(buffer, nbytes=buffer.nbytes - 1)
    for buffers in ([short], [], [buffer, buffer]):
        with pytest.raises(GeometryError, match=str(buffer.nbytes)):
            MappedPool(pool.site, buffers)
    wrong = attrs.evolve(pool.site, planes=[attrs.evolve(p, offset=p.offset + 4096) for p in pool.site.planes])
    with pytest.raises(GeometryError, match="ends at byte"):
        MappedPool(wrong, pool.buffers)


def test_buffers_for_two_devices_are_refused() -> None:
    """One launch writes to all of them."""
    pool = _pool()
    site = attrs.evolve(pool.site, buffers=(*pool.site.buffers, 8))
    with pytest.raises(GeometryError, match=r"cpu.*cuda:0"):
        MappedPool(site, [*pool.buffers, Buffer(4096, 8, "cuda:0")])


def test_what_is_no_buffer_is_refused() -> None:
    """By name."""
    pool = _pool()
    with pytest.raises(ConfigurationError, match="buffers"):
        MappedPool(pool.site, [pool])  # type: ignore[list-item]
