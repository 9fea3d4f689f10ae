"""Engines of decode that wait for no peer before they free pages take ``staged``: none of their pages is exposed."""

from __future__ import annotations

from disagg_kv.core import Phase
from disagg_kv.geometry import CacheSpec
from tests.support.rig import Request, Rig, tp_shards

SPEC = CacheSpec.kv(2, 4, 8, "float16")


def unexposed() -> Request:
    """A request whose decode takes ``staged``, and prefill ``auto``."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 2))
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    return rig.request("room", prefills, decodes, 9).start(9)


def test_prefill_with_auto_stages_for_decode_with_staged() -> None:
    """Although the transport maps decode's pages, none is exposed."""
    request = unexposed().landed()
    assert not request.decodes[0].endpoint.inspect().exposes
    assert {handle.report.path for handle in request.handles} == {"staged"}
    request.rig.quiet()


def test_a_failed_room_of_an_engine_that_waits_for_no_peer_is_released_at_once() -> None:
    """Its pages depend on no peer, whatever that does."""
    request = unexposed()
    request.rig.until(lambda: request.receives[0].report.segments > 0, "the rows")
    again = request.rig.request("again", request.prefills, request.decodes, 9).open_decode().expect(9).open_prefill()
    again.send(4)
    request.rig.until(lambda: again.receives[0].report.segments > 0, "rows")
    for member in request.prefills:
        member.frozen = True
    again.receives[0].abort("enough")
    request.rig.wait(0.1, 0.01)
    assert (again.receives[0].phase, again.receives[0].released) == (Phase.FAILED, True)
