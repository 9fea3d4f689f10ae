"""Where the demo waits for the library."""

from __future__ import annotations

import pytest

from disagg_kv.core import Phase
from disagg_kv.engines.hf.demo import wire
from disagg_kv.errors import AbortedError
from disagg_kv.geometry import CacheSpec
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
