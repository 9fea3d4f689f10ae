"""The option ``transport`` of both adapters."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest

from disagg_kv import PagedPool
from disagg_kv.engines.opening import open_endpoints
from disagg_kv.engines.options import EngineOptions
from disagg_kv.errors import UnknownNameError
from disagg_kv.geometry import CacheSpec, Shard, shard
from disagg_kv.memory import MemoryPool
from disagg_kv.transports import InprocTransport, registry

SPEC = CacheSpec.kv(1, 1, 8, "int8")


class Wire(InprocTransport):
    """In place of a library."""

    name = "wire"


class Gpu(InprocTransport):
    """In place of one that moves no CPU memory."""

    name = "gpu"
    caps = attrs.evolve(InprocTransport.caps, devices=frozenset({"cuda"}))


def pool() -> tuple[MemoryPool, Sequence[Shard]]:
    """The cache of a single rank."""
    return PagedPool.allocate(SPEC, shard(SPEC), pages=2, page_size=2), (shard(SPEC),)


def opened(options: EngineOptions) -> list[str]:
    """The transports of both endpoints of a rank."""
    made = open_endpoints(
        options,
        pool,
        instance="i",
        strategy="auto",
        tp=1,
        rank=0,
        group=None,
        produces=True,
        consumes=True,
        waits_for_peers=True,
    )
    try:
        return [end.driver.loop.me.transport.name for end in (made.sender, made.receiver) if end is not None]
    finally:
        made.close()


def test_an_engine_of_one_host_opens_no_network_unless_its_option_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an endpoint without a transport. Of several that are named, those for other memory are left out."""
    monkeypatch.setattr(registry, "_registered", {"nixl": Wire, "gpu": Gpu})
    assert opened(EngineOptions()) == ["shm", "shm"]
    assert opened(EngineOptions(channel="zmq")) == ["shm", "shm"]
    assert opened(EngineOptions(transport="shm+nixl")) == ["shm+wire"] * 2
    assert opened(EngineOptions(transport="gpu+shm")) == ["shm", "shm"]
    assert opened(EngineOptions(transport="nixl")) == ["wire", "wire"]
    with pytest.raises(UnknownNameError, match="unknown transport 'pigeon'"):
        opened(EngineOptions(transport="pigeon"))
