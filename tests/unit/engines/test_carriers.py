"""The option ``transport`` of both adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from disagg_kv import PagedPool
from disagg_kv.channels import Channel
from disagg_kv.engines import opening
from disagg_kv.engines.opening import open_endpoints
from disagg_kv.engines.options import EngineOptions
from disagg_kv.errors import ConfigurationError, MissingDependencyError, UnknownNameError
from disagg_kv.geometry import CacheSpec, Shard, shard
from disagg_kv.ids import Ticket
from disagg_kv.memory import MemoryPool
from disagg_kv.transports import InprocTransport, Transport, Transports, registry

SPEC = CacheSpec.kv(1, 1, 8, "int8")


class Wire(InprocTransport):
    """In place of a library."""

    name = "wire"


class Fabric(InprocTransport):
    """Other hosts reach it at an address of its host."""

    name = "fabric"

    def __init__(self, host: str = "127.0.0.1", drain_s: float = 5.0) -> None:
        super().__init__()
        self.given = host, drain_s


class Gpu(InprocTransport):
    """In place of one that moves no CPU memory."""

    name = "gpu"
    caps = attrs.evolve(InprocTransport.caps, devices=frozenset({"cuda"}))


def pool() -> tuple[MemoryPool, Sequence[Shard]]:
    """The cache of a single rank."""
    return PagedPool.allocate(SPEC, shard(SPEC), pages=2, page_size=2), (shard(SPEC),)


def opened(options: EngineOptions) -> list[str]:
    """The names of the transports of both endpoints of a rank."""
    return [one.name for one in transports(options)]


def transports(options: EngineOptions) -> list[Transports]:
    """Those of both endpoints of a rank."""
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
    )
    try:
        return [end.driver.loop.me.transports for end in (made.sender, made.receiver) if end is not None]
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


@pytest.mark.parametrize("name", ["auto", "shm+mooncake", "mooncake"])
def test_transports_have_the_options_that_an_engine_gives_and_the_address_where_it_listens(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address of the loopback is none for other hosts."""

    def given(options: EngineOptions) -> list[object]:
        return [one.given for several in transports(options) for one in several if isinstance(one, Fabric)]

    monkeypatch.setattr(registry, "_registered", {"mooncake": Fabric, "nixl": absent})
    monkeypatch.setattr(opening, "reached_at", lambda address: "10.0.0.7")
    options = EngineOptions(channel="zmq", transport=name, transport_options={"mooncake": {"drain_s": 120}})
    assert given(options) == [("10.0.0.7", 120)] * 2
    assert given(attrs.evolve(options, transport_options={"mooncake": {"host": "10.0.0.8"}})) == [("10.0.0.8", 5)] * 2
    assert given(attrs.evolve(options, transport_options={})) == [("10.0.0.7", 5)] * 2
    monkeypatch.undo()
    monkeypatch.setattr(registry, "_registered", {"mooncake": Fabric, "nixl": absent})
    assert given(options) == ([] if name == "auto" else [("127.0.0.1", 120)] * 2)


def absent() -> Transport:
    """In place of a library that is not installed."""
    raise MissingDependencyError("transport 'nixl'", "is not installed", "pip install it")


@pytest.mark.parametrize("name", ["auto", "nixl", "shm+nixl"])
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"pigeon": {}}, "unknown transport with options 'pigeon'"),
        ({"nixl": {"seeds": 1}}, "unknown option of transport 'nixl' 'seeds'"),
        ({"nixl": {1: 1}}, "transport_options of 'nixl': name"),
        ({"nixl": 1}, "transport_options of 'nixl'"),
        ({1: {}}, "transport_options: name"),
        ([], "transport_options"),
    ],
)
def test_options_of_transports_that_cannot_be_are_refused(
    name: str, given: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_registered", {"nixl": Wire})
    monkeypatch.setattr(opening, "reached_at", lambda address: "10.0.0.7")
    with pytest.raises(ConfigurationError, match=why):
        opened(EngineOptions(channel="zmq", transport=name, transport_options=given))


def test_what_was_opened_is_closed_where_an_endpoint_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transport and channel of the endpoint that was refused, and of the one before."""
    closed: list[str] = []

    class Closing(InprocTransport):
        def close(self, drain_s: float) -> Sequence[Ticket]:
            closed.append(self.name)
            return super().close(drain_s)

    made: list[Channel] = []

    def channel(*args: Any) -> Channel:
        made.append(real(*args))
        return made[-1]

    def refused(*args: object, **kwargs: object) -> object:
        raise ConfigurationError("no decode here")

    real = opening._channel
    monkeypatch.setattr(opening, "_channel", channel)
    monkeypatch.setattr(opening, "DecodeEndpoint", refused)
    monkeypatch.setattr(registry, "_registered", {"wire": Closing})
    with pytest.raises(ConfigurationError, match="no decode here"):
        opened(EngineOptions(transport="wire"))
    assert len(made) == 2
    assert len(closed) >= 2
    assert [Path(one.address.removeprefix("unix://")).exists() for one in made] == [False, False]
