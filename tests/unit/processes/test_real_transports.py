"""A peer that is killed at any moment of a transfer: nothing hangs, no byte is wrong, and nothing of it is left."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import attrs
import numpy as np
import pytest

from disagg_kv import Options
from disagg_kv.ids import Role
from disagg_kv.transports import transport
from tests.support.leftovers import abandoned
from tests.support.needs import needs_mooncake, needs_nixl
from tests.support.processes import Cluster, Knobs, Node, wait

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("DISAGG_KV_KILLS", "8"))
"""Peers killed per transport, half of them on either side."""

TOKENS = 1024
REPORTED_S = 5.0 if "DISAGG_KV_KILLS" in os.environ else 120.0
"""A killed peer is known to be lost by then: before silence tells, but for a host that is busy with other tests."""

LATE_S = 60.0
"""What a busy host may add to the time after which the transport says that the last write has landed."""

MOST_KEPT = 32
"""Ended rooms that wait for evidence before another is begun: half of those for which a survivor has pages."""

KEPT = {"mooncake": 3}
"""Ended connections, at most, per peer that has ended, which a library keeps and offers no way to close."""

OPTIONS = Options(heartbeat_s=0.2, retry_s=0.1)
TRANSPORTS = ["shm", pytest.param("nixl", marks=needs_nixl), pytest.param("mooncake", marks=needs_mooncake)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Endpoints that end with the test, and leave nothing in /dev/shm."""
    before = abandoned()
    made = Cluster(tmp_path)
    yield made
    made.stop()
    wait(lambda: abandoned() <= before, lambda: f"left in /dev/shm: {abandoned() - before}")


class Killing:
    """One process that lives on while its peers, a new one each time, are killed.

    Args:
        cluster: starts the processes.
        bind: where the channels of its peers are. All have the same: addresses that are not used any more are
            remembered, with their descriptors, for twenty times the silence.
        name: of the transport.
        role: of the process that lives on.
    """

    def __init__(self, cluster: Cluster, bind: str, name: str, role: Role) -> None:
        self._bind = bind
        self._cluster = cluster
        self._role: Role = role
        self._other: Role = "decode" if role == "prefill" else "prefill"
        # A room whose peer was killed keeps its pages, its leases and its slots until the last write has landed.
        self._knobs = Knobs(
            "auto", transport=name, pages=4096, slot_bytes=8 << 10, slots=64, ring_bytes=16 << 20, options=OPTIONS
        )
        (self.survivor,) = cluster.start(role, "survivor", knobs=self._knobs)
        self._numbers = count()
        self._draw = random.Random(f"{name} {role}")
        self._open: list[bytes] = []
        self.ends: dict[str, int] = {}
        self.reported: list[float] = []

    def begin(self) -> tuple[bytes, Node]:
        """A room on its way from or to a new peer, which has introduced itself."""
        wait(self._has_place, lambda: f"no place for another room beside {self._open}", 2 * LATE_S)
        number = next(self._numbers)
        room, name = f"room {number}".encode(), f"victim-{number}"
        path = self._draw.choice(["staged", "slice"])
        knobs = attrs.evolve(self._knobs, path=path, bind=self._bind, ring_bytes=1 << 20)
        (victim,) = self._cluster.start(self._other, name, knobs=knobs)
        source, target = (self.survivor, victim) if self._role == "prefill" else (victim, self.survivor)
        target.ask("expect", room, source.setup.instance, TOKENS)
        source.ask("begin", room, TOKENS)
        source.ask("send", room, 0, TOKENS, True)
        self._open.append(room)
        self.survivor.until(room, lambda look: look.phase != "CONNECTING")
        return room, victim

    def _has_place(self) -> bool:
        """A quick host kills more peers than a survivor can keep rooms of, where evidence takes its time."""
        self._free()
        pinned = self.survivor.ask("pinned_slots") if self._role == "prefill" else 0
        return len(self._open) < MOST_KEPT and pinned < self._knobs.slots // 4

    def whole(self) -> float:
        """A room whose peer lives; gives the seconds that it took."""
        room, victim = self.begin()
        began = time.monotonic()
        self.survivor.until(room, lambda look: look.released)
        took = time.monotonic() - began
        self._check(room)
        victim.stop()
        return took

    def kill(self, usual_s: float) -> None:
        """A room whose peer is killed while its bytes move, or just before or after."""
        room, victim = self.begin()
        time.sleep(self._draw.uniform(0.0, 1.2 * usual_s))
        victim.kill()
        began = time.monotonic()
        look = self.survivor.until(room, lambda look: look.phase in ("DONE", "FAILED"), REPORTED_S)
        self.reported.append(time.monotonic() - began)
        assert look.phase == "DONE" or look.error == "PeerLostError", look
        self.ends[look.phase] = self.ends.get(look.phase, 0) + 1
        self._check(room)

    def _check(self, room: bytes) -> None:
        """What reports success is right; what is released is taken apart."""
        if self.survivor.ask("look", room).phase == "DONE" and self._role == "decode":
            assert self.survivor.ask("differing", room, TOKENS) == 0
        self._free()

    def _free(self) -> bool:
        for room in tuple(self._open):
            if self.survivor.ask("look", room).released:
                self.survivor.ask("free", room)
                self._open.remove(room)
        return not self._open

    def settle(self) -> None:
        """Wait until every room is released and forgotten; then nobody has written to free pages."""
        drain_s = transport(self._knobs.transport).caps.drain_s or 0.0
        wait(self._free, lambda: f"not released: {self._open}", drain_s + LATE_S)
        wait(lambda: self.survivor.ask("open_rooms") == 0, lambda: "a room to be forgotten", LATE_S)
        if self._role == "decode":
            wait(lambda: self.survivor.ask("quarantined") == 0, lambda: "leases to come back", drain_s + LATE_S)
        assert self.survivor.ask("wrong", {}) == 0


@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_peer_killed_at_a_random_moment(cluster: Cluster, tmp_path: Path, name: str, role: Role) -> None:
    """Told within 5 s, no wrong byte where success is reported, everything that it took given back."""
    killing = Killing(cluster, f"ipc://{tmp_path}/victim", name, role)
    usual_s = min(killing.whole() for _ in range(2))
    before = killing.survivor.ask("footprint")
    before = attrs.evolve(before, ended=before.ended + KEPT.get(name, 0) * (KILLS // 2))
    for _ in range(KILLS // 2):
        killing.kill(usual_s)
    killing.settle()
    wait(
        lambda: killing.survivor.ask("footprint").within(before),
        lambda: f"{killing.survivor.ask('footprint')} instead of {before}",
        LATE_S,
    )
    middle, late = np.quantile(killing.reported, [0.5, 0.99])
    print(
        f"{name}, {role} lives: usually {usual_s:.3f} s; {killing.ends}; reported after {middle:.3f} s, "
        f"{late:.3f} s at the 99th percentile; {killing.survivor.ask('footprint')}"
    )
