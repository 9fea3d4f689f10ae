"""Pages that decode's forward pass may still write are written by arriving rows only behind its event."""

from __future__ import annotations

import pytest

from disagg_kv.core import Phase
from disagg_kv.endpoints import Expectation
from disagg_kv.errors import ConfigurationError, DisaggKVError
from disagg_kv.geometry import CacheSpec
from disagg_kv.memory import bytes_of
from tests.support.rig import Decodes, Request, Rig, tp_shards
from tests.support.rig_parts import FiredEvent

SPEC = CacheSpec.kv(2, 4, 8, "float16")


def pools(decodes: Decodes) -> list[bytes]:
    """All bytes of the decode ranks' pages."""
    return [bytes_of(buffer).tobytes() for member in decodes for buffer in member.pool.buffers]


def barred(path: str, rig: Rig, flag: FiredEvent, name: str = "room") -> Request:
    """A room whose rows are sent, and whose pages wait for the event."""
    if not rig.prefills:
        rig.prefill(tp_shards(SPEC, 2), strategy=path, slot_bytes=512)
        rig.decode(tp_shards(SPEC, 2), strategy=path)
    request = rig.request(name, rig.prefills, rig.decodes, 24).open_decode().expect(24, ready=flag)
    before = pools(rig.decodes)
    request.open_prefill().send(24).finish()
    for _ in range(60):
        rig.turn(0.001)
        assert pools(rig.decodes) == before, "a row was written into pages too early"
    assert not request.all(Phase.DONE)
    return request


@pytest.mark.parametrize("path", ["staged", "direct", "slice"])
def test_rows_reach_the_pages_behind_the_event(path: str) -> None:
    rig, flag = Rig(SPEC), FiredEvent()
    request = barred(path, rig, flag)
    flag.fired = True
    request.landed()
    rig.quiet()


def test_other_rooms_do_not_wait_for_it() -> None:
    rig, flag = Rig(SPEC), FiredEvent()
    request = barred("staged", rig, flag)
    rig.request("other", rig.prefills, rig.decodes, 24).start().landed()
    assert request.receives[0].phase is Phase.MOVING
    flag.fired = True
    request.landed()
    rig.quiet()


@pytest.mark.parametrize("path", ["staged", "direct"])
def test_a_room_that_fails_meanwhile_is_released(path: str) -> None:
    """Nothing will be written, so its pages do not wait for the event."""
    rig, flag = Rig(SPEC), FiredEvent()
    request = barred(path, rig, flag)
    request.receives[0].abort("changed my mind")
    request.failed()
    rig.quiet()


@pytest.mark.parametrize("path", ["staged", "direct"])
def test_an_event_that_raises_fails_its_room_alone(path: str) -> None:
    class Broken(FiredEvent):
        def query(self) -> bool:
            """The device has failed."""
            if self.fired:
                raise RuntimeError("no such device")
            return False

    rig, broken = Rig(SPEC), Broken()
    request = barred(path, rig, broken)
    broken.fired = True
    request.failed()
    assert "no such device" in request.errors()
    rig.request("next", rig.prefills, rig.decodes, 24).start().landed()
    rig.quiet()


def test_an_object_that_is_no_event_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="ready") as found:
        Expectation(8, [], ready=3)  # type: ignore[arg-type]
    assert isinstance(found.value, DisaggKVError)
