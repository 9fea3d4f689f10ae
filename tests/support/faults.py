"""Two prefill and two decode processes with rooms between them, of which any may be killed and replaced."""

from __future__ import annotations

import os
import random
import time
from functools import partial
from itertools import count
from typing import Literal

import attrs

from disagg_kv import Options
from tests.support.processes import Cluster, Footprint, Knobs, Node, wait

ROUNDS = int(os.environ.get("DISAGG_KV_ROUNDS", "1"))
"""Rounds of each fault."""

TOKENS = 512
REPORTED_S = 5.0 if "DISAGG_KV_ROUNDS" in os.environ else 120.0
"""A killed peer is known to be lost by then, also on a host that is busy with other tests."""

SETTLED_S = 120.0
"""After a fault nothing is owed any more by then: the silence, the drain bound, and what a busy host adds."""

KEPT = {"mooncake": 3}
"""Ended connections, at most, per peer that has ended, which a library keeps and offers no way to close."""

GROWTH = 48 << 20
"""Bytes by which a process may grow: what libraries keep of each peer, and pages touched for the first time."""

OPTIONS = Options(silence_s=15.0, heartbeat_s=0.2, retry_s=0.1, closed_s=1.0)
"""A frozen process is lost after ``silence_s``. A process that only waits for a core must not be."""


class Field:
    """The processes, and the rooms between them.

    Args:
        cluster: starts the processes.
        name: of the transport.
        path: the strategy.
        device: of the pools.
    """

    def __init__(self, cluster: Cluster, name: str, path: str = "staged", device: str = "cpu") -> None:
        drain_s = 5.0 if name in ("nixl", "mooncake") else None
        knobs = Knobs(
            path=path,
            transport=name,
            device=device,
            pages=2048,
            slot_bytes=8 << 10,
            slots=64,
            ring_bytes=4 << 20,
            options=OPTIONS,
            drain_s=drain_s,
        )
        self._cluster = cluster
        self._kept = KEPT.get(name, 0)
        self.prefill = cluster.start("prefill", "P", 2, knobs)
        self.decode = cluster.start("decode", "D", 2, knobs)
        self._numbers = count()
        self.draw = random.Random(name)
        self.reported: list[float] = []
        self.ends: dict[str, int] = {}
        self._before: dict[int, tuple[Footprint, int]] = {}

    @property
    def nodes(self) -> list[Node]:
        """All of them."""
        return [*self.prefill, *self.decode]

    def begin(self) -> bytes:
        """A whole request on its way."""
        room = self._ready()
        for node in self.prefill:
            node.ask("send", room, 0, TOKENS, True)
        return room

    def sending(self) -> bytes:
        """A whole request; prefill is told to hand over its rows, and is not waited for."""
        room = self._ready()
        for node in self.prefill:
            node.tell(lambda answer: None, "send", room, 0, TOKENS, True)
        return room

    def _ready(self) -> bytes:
        room = f"room {next(self._numbers)}".encode()
        for node in self.decode:
            node.ask("expect", room, "P", TOKENS)
        for node in self.prefill:
            node.ask("begin", room, TOKENS)
        return room

    def whole(self) -> bool:
        """A request without a fault; False: it failed, on all ranks of decode."""
        room = self.begin()
        phases = [node.until(room, lambda look: look.released).phase for node in self.nodes]
        decode = set(phases[len(self.prefill) :])
        assert len(decode) == 1, phases
        if decode == {"DONE"}:
            assert phases == ["DONE"] * len(phases)
            for node in self.decode:
                assert node.ask("wrong", {room: TOKENS}) == 0, "this room and nothing else is in the pool"
        for node in self.nodes:
            node.ask("free", room)
        return decode == {"DONE"}

    def usual(self) -> float:
        """Seconds that a whole request takes."""
        began = time.monotonic()
        wait(self.whole, lambda: "a request to succeed", SETTLED_S)
        return time.monotonic() - began

    def end(self, room: bytes, nodes: list[Node], within_s: float) -> None:
        """A room ends on each of them; what reports success is right, and what is released is taken apart."""
        for node in nodes:
            look = node.until(room, lambda look: look.phase in ("DONE", "FAILED"), within_s)
            self.ends[look.phase] = self.ends.get(look.phase, 0) + 1
            if look.phase == "DONE" and node in self.decode:
                assert node.ask("differing", room, TOKENS) == 0
        for node in nodes:
            node.until(room, lambda look: look.released, SETTLED_S)
            node.ask("free", room)

    def settle(self) -> None:
        """Nothing is owed, every process has what it had, and requests are whole again."""
        for node in self.nodes:
            wait(partial(_nothing, node, "open_rooms"), lambda: "rooms to be forgotten", SETTLED_S)
        for node in self.decode:
            wait(partial(_nothing, node, "quarantined"), lambda: "leases to come back", SETTLED_S)
        wait(self.whole, lambda: "a request to succeed", SETTLED_S)
        for node in self.nodes:
            before, rss = self._before.setdefault(node.pid, (node.ask("footprint"), node.ask("rss")))
            wait(partial(_clean, node, before), partial(_differing, node, before), SETTLED_S)
            assert node.ask("rss") <= rss + GROWTH

    def replace(self, victim: Node) -> Node:
        """A process has ended, and another takes its place; the libraries of the others may keep something of it."""
        for pid, (before, rss) in self._before.items():
            self._before[pid] = attrs.evolve(before, ended=before.ended + self._kept), rss
        return self._cluster.again(victim)


def _nothing(node: Node, of: Literal["open_rooms", "quarantined"]) -> bool:
    return node.ask(of) == 0


def _clean(node: Node, before: Footprint) -> bool:
    return node.ask("footprint").within(before)


def _differing(node: Node, before: Footprint) -> str:
    return f"{node.ask('footprint')} instead of {before}"


def killed(field: Field, side: str, usual_s: float) -> None:
    """One rank is killed while a request moves, and comes back under its address."""
    nodes = field.prefill if side == "prefill" else field.decode
    victim = field.draw.choice(nodes)
    room = field.sending()
    # Many transfers take a small part of what a request takes: as many kills fall into each order of magnitude.
    time.sleep(usual_s * 10 ** field.draw.uniform(-3.0, 0.0))
    others = [node for node in field.nodes if node is not victim]
    victim.kill()
    began = time.monotonic()
    for node in others:
        node.until(room, lambda look: look.phase in ("DONE", "FAILED"), REPORTED_S)
        field.reported.append(time.monotonic() - began)
    field.end(room, others, REPORTED_S)
    nodes[nodes.index(victim)] = field.replace(victim)
