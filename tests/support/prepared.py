"""A room that is granted before its rows are final, so that gathers and scatters are prepared."""

from __future__ import annotations

from disagg_kv.geometry import CacheSpec
from tests.support.rig import Request, Rig
from tests.support.rig_parts import FiredEvent

SPEC = CacheSpec.kv(4, 4, 8, "float16")
ROW_BYTES = 4 * 2 * 4 * 16
ROWS, SEGMENT = 32, 8
SEGMENTS = ROWS // SEGMENT


def granted(rig: Rig, event: FiredEvent, name: str = "room") -> Request:
    """A room that has its leases, and whose rows are not final before ``event``."""
    request = rig.request(name, rig.prefills, rig.decodes, ROWS).open_decode().expect(ROWS).open_prefill()
    request.send(ROWS, ready=event).finish()
    rig.wait(1.0)
    return request
