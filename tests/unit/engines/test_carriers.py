"""The option ``transport`` of both adapters."""

from __future__ import annotations

import pytest

from disagg_kv.engines.opening import _carrier
from disagg_kv.errors import ConfigurationError, MissingDependencyError
from disagg_kv.transports import InprocTransport, registry


class Wire(InprocTransport):
    """In place of a library."""

    name = "wire"


def absent() -> Wire:
    """No GPU."""
    raise MissingDependencyError("transport 'cuda_ipc'", "no GPU", "none")


def test_auto_takes_what_moves_the_memory_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of several are taken as they are."""
    monkeypatch.setattr(registry, "_registered", {"nixl": Wire, "mooncake": Wire, "cuda_ipc": absent})
    assert _carrier("auto", "cpu").name == "shm+wire"
    assert _carrier("shm+inproc", "cuda:0").name == "shm+inproc"
    assert _carrier("shm", "cpu").name == "shm"
    with pytest.raises(ConfigurationError, match=r"none starts for memory on 'cuda:0'.*nixl"):
        _carrier("auto", "cuda:0")
