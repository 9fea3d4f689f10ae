"""An endpoint that was itself paused says so, and blames no peer."""

from __future__ import annotations

import logging

import pytest

from disagg_kv.core import Options
from disagg_kv.endpoints.loop.timing import Pauses
from disagg_kv.errors import AbortedError, DeadlineError, GeometryError, InstanceClosedError, PeerLostError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Rank
from disagg_kv.rendezvous import StaticRendezvous
from disagg_kv.testing import FakeClock
from tests.support.rig import Rig, tp_shards

SPEC = CacheSpec.kv(num_layers=2, kv_heads=4, head_dim=8, dtype="float16")
OPTIONS = Options(silence_s=8.0, heartbeat_s=1.0)
PAUSED = "this process did not run for 13."


@pytest.mark.parametrize("paused", ["prefill", "decode"])
def test_the_side_that_was_paused_says_it_and_the_other_names_the_silent_peer(
    paused: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its rooms were given up meanwhile; the error begins with the time for which it did not run."""
    rig = Rig(SPEC, options=OPTIONS)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 8).open_prefill().open_decode().expect(8)
    rig.wait(0.5)
    member = prefills[0] if paused == "prefill" else decodes[0]
    member.frozen = True
    rig.wait(13.0)
    member.frozen = False
    with caplog.at_level(logging.WARNING, "disagg_kv"):
        request.failed()
    own, other = request.handles if paused == "prefill" else reversed(request.handles)
    assert PAUSED in str(own.error)
    assert PAUSED not in str(other.error)
    assert isinstance(other.error, PeerLostError)
    assert f"endpoint {'P' if paused == 'prefill' else 'D'}/0: {PAUSED}" in caplog.text
    rig.quiet()


def test_an_idle_endpoint_that_nothing_is_due_for_was_not_paused(caplog: pytest.LogCaptureFixture) -> None:
    """It had nothing to do, and what comes later is about its peers."""
    pauses = Pauses(3.0, 30.0, set[bytes]().__contains__)
    lost = PeerLostError("silent")
    assert pauses.over(0.0, None, 100.0) == ""
    assert pauses.over(0.0, 99.0, 100.0) == ""
    assert pauses.explain(lost, 0.0, 100.0) is lost
    assert not caplog.text


def test_only_errors_that_a_pause_explains_name_it() -> None:
    """Of rooms that were open during the pause, and for ``silence_s`` after it."""
    pauses = Pauses(3.0, 30.0, {b"2"}.__contains__)
    assert pauses.over(10.0, 11.0, 20.0) == "this process did not run for 10.0 s"
    lost, late, wrong = PeerLostError("silent"), DeadlineError("late"), GeometryError("wrong")
    ours, theirs = AbortedError("stopped"), AbortedError("gave up", epoch=b"1")
    assert str(pauses.explain(lost, 9.0, 21.0)) == "this process did not run for 10.0 s: silent"
    assert str(pauses.explain(late, 9.0, 50.0)) == "this process did not run for 10.0 s: late"
    assert str(pauses.explain(theirs, 9.0, 21.0)) == "this process did not run for 10.0 s: gave up"
    assert pauses.explain(lost, 20.5, 21.0) is lost
    assert pauses.explain(lost, 9.0, 50.5) is lost
    assert (pauses.explain(wrong, 9.0, 21.0), pauses.explain(ours, 9.0, 21.0)) == (wrong, ours)
    unproved, proved = PeerLostError("silent", epoch=b"1"), PeerLostError("its process has ended", epoch=b"2")
    closed = InstanceClosedError("withdrawn", instance="P")
    assert str(pauses.explain(unproved, 9.0, 21.0)) == "this process did not run for 10.0 s: silent"
    assert (pauses.explain(proved, 9.0, 21.0), pauses.explain(closed, 9.0, 21.0)) == (proved, closed)
    assert pauses.explain(late, -100.0, 21.0) is late


class Slow(StaticRendezvous):
    """A store that takes long to publish."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def publish(self, instance: str, rank: Rank, world: int, address: str) -> None:
        """Publish, after 10 s."""
        self._clock.advance(10.0)
        super().publish(instance, rank, world, address)


def test_a_store_that_is_slow_at_the_start_is_no_pause(caplog: pytest.LogCaptureFixture) -> None:
    """The endpoint has no thread yet that could stand still."""
    rig = Rig(SPEC, options=OPTIONS)
    rig.rendezvous = Slow(rig.clock)
    (prefill,) = rig.prefill(tp_shards(SPEC, 2), only=[1])
    with caplog.at_level(logging.WARNING, "disagg_kv"):
        prefill.endpoint.driver.step(0.0)
    assert "did not run" not in caplog.text
