"""Engines of decode that wait for no peer before they free pages: none of their pages is exposed."""

from __future__ import annotations

import pytest

from disagg_kv.core import Phase
from disagg_kv.errors import ConfigurationError
from disagg_kv.geometry import CacheSpec
from tests.support.rig import Request, Rig, tp_shards

SPEC = CacheSpec.kv(2, 4, 8, "float16")


def unexposed() -> Request:
    """A request whose decode engine waits for no peer, and takes ``auto``, as prefill's does."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 2))
    decodes = rig.decode(tp_shards(SPEC, 1), waits_for_peers=False)
    return rig.request("room", prefills, decodes, 9).start(9)


def test_auto_exposes_no_pages_of_an_engine_that_waits_for_no_peer() -> None:
    """Although the transport maps them: rows are staged."""
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


@pytest.mark.parametrize("path", ["mapped", "direct", "slice"])
def test_a_path_for_which_the_engine_would_have_to_wait_is_refused_at_the_start(path: str) -> None:
    """By name, with the argument that says so."""
    rig = Rig(SPEC)
    why = "has peers write into pages, and the engine does not wait for them"
    with pytest.raises(ConfigurationError, match=rf"path '{path}' {why} \(waits_for_peers\): take path 'staged'"):
        rig.decode(tp_shards(SPEC, 1), path, strategy=path, waits_for_peers=False)
    rig.decode(tp_shards(SPEC, 1), "staged", strategy="staged", waits_for_peers=False)
