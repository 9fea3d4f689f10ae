"""Probes that instances serve again which lost a process and have another in its place, once faults have stopped."""

from __future__ import annotations

from attrs import evolve

from disagg_kv.core import Phase
from disagg_kv.ids import RoomId

from .cluster import Cluster
from .fault import FaultClass
from .request import Request

MEET_S = 3.0
"""Longer than it takes to notice silence: after it all processes have met."""


def last_requests(world: Cluster) -> list[Request]:
    """A small request from each prefill instance that is whole, to a decode that is, where memory came back."""
    scenario = world.scenario
    if FaultClass.REPLACED not in world.hits or scenario.conversations or scenario.drain_s is None:
        return []
    plain = evolve(
        scenario.requests[0], rows=2, edges=(2,), at=world.now + MEET_S, prefill_late=(0.0, 0.0),
        decode_late=(0.0, 0.0), pass_s=0.0, open_end=False, aux=False, steps=False, abort_decode=None,
        abort_prefill=None, withdraw=None, late=False, total_s=scenario.options.total_s, unmet="",
    )  # fmt: skip
    return [
        evolve(plain, request=RoomId(b"again %d" % source), attempt=1, source=source)
        for source in range(len(scenario.prefills))
        if source != scenario.refused and _whole(world, f"prefill {source}") and _whole(world, "decode")
    ]


def _whole(world: Cluster, group: str) -> bool:
    return all(node.alive for node in world.instance(group))


def check_served(world: Cluster, requests: list[Request]) -> None:
    """I4: all of them have succeeded on every rank."""
    for room in world.rooms:
        failed = [entry for entry in room.entries if room.plan in requests and entry.phase is not Phase.DONE]
        for entry in failed[:1]:
            world.violation("I4", f"{room.name(entry)}: began when all was calm, and failed: {entry.error}")
