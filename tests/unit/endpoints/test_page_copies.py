"""What holds of copies into mapped pages until the kernel has ended."""

from __future__ import annotations

import gc
import weakref

import pytest

from disagg_kv.core import Phase
from tests.support.device_copies import launched, scene


@pytest.mark.parametrize("who", ["decode", "prefill"])
def test_after_an_abort_pages_of_both_sides_wait_for_the_kernel_alone(who: str) -> None:
    """It reads the ones and writes the others; an abort is acknowledged once it has ended."""
    rig, kernels, request = scene()
    request.send(9)
    copy = launched(rig, kernels)
    (request.receives if who == "decode" else request.sends)[0].abort("enough")
    rig.wait(2.0)
    assert [h.phase for h in request.handles] == [Phase.FAILED] * 2
    assert not any(h.released for h in request.handles)
    copy.run()
    request.forgive()
    rig.until(lambda: all(h.released for h in request.handles), "the end of the kernel")
    rig.check()
    rig.quiet()


def test_a_withdrawal_waits_until_pages_are_read() -> None:
    """Those of this writer; those of others need not be there for that."""
    rig, kernels, request = scene(prefill_tp=2)
    request.send(9)
    rig.until(lambda: sum(len(copy.moves) for copy in kernels.queued) == 2, "the copies")
    gone = [handle.withdraw() for handle in request.sends]
    rig.wait(1.0)
    assert not any(one.query() for one in gone)
    for copy in kernels.queued:
        copy.run()
    rig.until(lambda: all(one.query() for one in gone), "the end of the reads")
    request.send(9).finish().landed()
    rig.quiet()


@pytest.mark.parametrize("state", ["runs", "failed", "ended"])
def test_what_a_copy_uses_stays_mapped_when_its_endpoint_is_gone(state: str) -> None:
    """Until the copy is known to have ended: the device may still read and write there."""
    rig, kernels, request = scene()
    request.send(9).finish()
    copy = launched(rig, kernels)
    mapped = weakref.ref(copy.moves[0].target.pool)
    if state == "failed":
        copy.error = OSError("the driver is confused")
        rig.turn()
    elif state == "ended":
        copy.run()
        request.landed()
    rig.close()
    del rig, kernels, request, copy
    gc.collect()
    assert (mapped() is None) == (state == "ended")


@pytest.mark.parametrize("proved", [True, False])
def test_an_event_that_raises_fails_the_room_and_frees_nothing(proved: bool) -> None:
    """The copy may still run. If its event happens later, that is the evidence; else pages are kept."""
    rig, kernels, request = scene()
    request.send(9)
    copy = launched(rig, kernels)
    copy.error = OSError("the device is lost")
    rig.until(lambda: all(h.phase is Phase.FAILED for h in request.handles), "the failure")
    assert "the device is lost" in str(request.sends[0].error)
    rig.wait(5.0)
    assert not any(h.released for h in request.handles)
    assert len(kernels.queued) == 1, "a copy that is not quiet is launched again"
    if proved:
        copy.run()
        request.forgive()
        rig.until(lambda: all(h.released for h in request.handles), "the evidence")
        rig.quiet()


def test_a_copy_that_cannot_be_launched_fails_its_room_alone() -> None:
    """Nothing of it moves, so pages come back at once."""
    rig, kernels, request = scene()
    kernels.refuses = [OSError("no launch")]
    request.send(9).failed()
    assert "no launch" in str(request.sends[0].error)
    other = rig.request("other", request.prefills, request.decodes, 9).start(9)
    launched(rig, kernels).run()
    other.landed()
    rig.quiet()
