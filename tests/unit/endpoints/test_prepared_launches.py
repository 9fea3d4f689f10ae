"""What holds of prepared gathers and of prepared scatters alike."""

from __future__ import annotations

import pytest

from disagg_kv.errors import DisaggKVError
from disagg_kv.kernels import CpuKernels
from tests.support.prepared import ROW_BYTES, ROWS, SEGMENT, SEGMENTS, SPEC, granted
from tests.support.rig import Memory, Request, Rig, tp_shards
from tests.support.rig_parts import FiredEvent, PreparingKernels

pytestmark = pytest.mark.parametrize("op", ["gathers", "scatters"])


def scene(op: str, kernels: PreparingKernels) -> tuple[Rig, Request, FiredEvent]:
    """One rank to one rank, of which the one that does the operation has these kernels; all leases are granted."""
    rig, memory, event = Rig(SPEC), Memory(page_size=8), FiredEvent()
    ours, theirs = (kernels, CpuKernels()) if op == "gathers" else (CpuKernels(), kernels)
    nbytes, shards = SEGMENT * ROW_BYTES, tp_shards(SPEC, 1)
    rig.prefill(shards, memory=memory, strategy="staged", slot_bytes=nbytes, slots=64, kernels=ours)
    rig.decode(shards, memory=memory, strategy="staged", ring_bytes=1 << 17, kernels=theirs)
    return rig, granted(rig, event), event


def counted(rig: Rig, op: str, what: str) -> int:
    """By the rank that does the operation."""
    ranks = rig.prefills if op == "gathers" else rig.decodes
    return ranks[0].observer.counters[f"{op}.{what}"]


def test_a_preparation_that_fails_is_counted_and_fails_nothing(op: str) -> None:
    """Whatever is wrong is met again when the bytes are there."""
    kernels = PreparingKernels()
    kernels.fail_to_prepare = RuntimeError("not now")
    rig, request, event = scene(op, kernels)
    event.fired = True
    request.landed()
    assert sum(kernels.gathers if op == "gathers" else kernels.scatters) == SEGMENTS
    assert counted(rig, op, "not_prepared") == SEGMENTS
    rig.quiet()


def test_a_prepared_launch_that_fails_fails_its_room_and_frees_its_memory(op: str) -> None:
    """One room's error is no other room's."""
    kernels = PreparingKernels()
    rig, request, event = scene(op, kernels)
    kernels.fail = RuntimeError("no launch")
    event.fired = True
    request.failed()
    assert "no launch" in request.errors()
    assert not kernels.held
    kernels.fail = None
    request.forgive()
    rig.request("other", rig.prefills, rig.decodes, ROWS).start().landed()
    rig.quiet()


def test_what_was_prepared_is_dropped_when_the_room_fails(op: str) -> None:
    """A drop that fails is counted."""
    kernels = PreparingKernels()
    rig, request, _ = scene(op, kernels)
    kernels.fail_to_drop = DisaggKVError("no")
    (request.sends if op == "gathers" else request.receives)[0].abort("changed its mind")
    rig.turn()
    assert not kernels.held
    assert counted(rig, op, "not_dropped") == SEGMENTS
    request.failed()
    assert not kernels.launched
    rig.quiet()
