"""Where the demo waits for the library."""

from __future__ import annotations

import pytest

from disagg_kv.core import Phase
from disagg_kv.engines.hf.demo import DemoConfig, wire
from disagg_kv.errors import AbortedError
from disagg_kv.geometry import CacheSpec
from disagg_kv.transports import InprocTransport, registry
from tests.support.rig import Rig, tp_shards

SPEC = CacheSpec.kv(2, 2, 8, "float16")


def test_nothing_is_computed_for_a_room_that_was_refused() -> None:
    """Who waits for what decode wants is told that it wants nothing, and why."""
    rig = Rig(SPEC)
    request = rig.request("room", rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1)), 8)
    request.open_decode().open_prefill()
    request.receives[0].abort("no pages")
    request.released()
    assert request.sends[0].phase is Phase.FAILED
    with pytest.raises(AbortedError, match="no pages"):
        wire.awaited(request.sends[0])


def test_what_is_awaited_is_computed() -> None:
    """The control."""
    rig = Rig(SPEC)
    request = rig.request("room", rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1)), 8)
    request.open_decode().expect(8).open_prefill()
    rig.until(lambda: request.sends[0].phase is Phase.READY, "decode's wish")
    wire.awaited(request.sends[0])
    request.send(8).finish().landed()


def test_the_demo_takes_a_network_only_where_a_side_is_at_an_address_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default; a transport that is named is taken as it is."""

    class Net(InprocTransport):
        name = "net"

    monkeypatch.setattr(registry, "_registered", {"nixl": Net})
    assert wire._carrier(DemoConfig(), "127.0.0.1", "cpu").name == "shm"
    assert wire._carrier(DemoConfig(), "10.0.0.1", "cpu").name == "shm+net"
    assert wire._carrier(DemoConfig(transport="nixl"), "127.0.0.1", "cpu").name == "net"
