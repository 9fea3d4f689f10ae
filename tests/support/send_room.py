"""A room on a prefill rank, and the frames that it is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from disagg_kv.core import Effect, FlowPlan, Options, Phase, RoomFrame, Send, SendRoom, Transfer, Wrote
from disagg_kv.core.room.tables import Sending
from disagg_kv.core.wire.frames import Abort, Complete, Grant, Head, Landed
from disagg_kv.errors import TransportError
from disagg_kv.geometry import CacheSpec, PageTable, shard
from disagg_kv.ids import Epoch, Generation, GroupId, LayerId, Rank, RoomId
from disagg_kv.planning import Limits, RankPlan, Segment

ME = Epoch(bytes([9] * 16))
D = [Epoch(bytes([r] * 16)) for r in range(3)]
SPEC = CacheSpec.kv(2, 2, 64, "int8")
RANK_PLAN = RankPlan.build(SPEC, [shard(SPEC, tp=2, rank=r) for r in range(2)], shard(SPEC))
ALL = GroupId("all")
TABLES = {ALL: PageTable(ALL, np.arange(4, dtype=np.int32))}
A, B = Segment(0, 4, 0, 2), Segment(4, 8, 0, 2)
E_ = TypeVar("E_")
RETRY = TransportError("busy", retryable=True)
FINAL = TransportError("no route")


def plan(*, exposed: bool = False, start: int = 0, stop: int | None = 8, slot_bytes: int = 4096) -> FlowPlan:
    return FlowPlan(Rank(0), RANK_PLAN, start, stop, exposed, Limits(slot_bytes, 8192, 4))


def head(rank: int = 0) -> Head:
    return Head(src=D[rank], dst=ME, room=b"r", generation=5)


def box(s: Segment) -> tuple[int, int, int, int, bool]:
    return (s.start, s.stop, s.first, s.last, s.state)


def grant(s: Segment = A, nbytes: int = 1024, rank: int = 0, ask: int = 0) -> Grant:
    return Grant(**head(rank), segment=box(s), ask=ask, lease=s.start, offset=s.start * 100, nbytes=nbytes)


def landed(*segments: Segment) -> Landed:
    return Landed(**head(), segments=tuple(map(box, segments or (A,))))


def abort(rank: int = 0) -> Abort:
    return Abort(**head(rank), reason="engine")


class Room:
    """A room; ``chunks`` of four rows are there before decode asks."""

    def __init__(self, *, chunks: int = 2, ready: bool = True, window: int = 16) -> None:
        self.turns = 0
        options = Options(window=window)
        self.machine = SendRoom(RoomId(b"r"), Generation(1), ME, options, 0.0)
        for i in range(chunks):
            self.add(4 * i + 4, ready=ready)

    def add(self, stop: int, *, ready: bool = True, first: int = 0, start: int | None = None) -> list[Effect]:
        tables = {ALL: PageTable(ALL, np.arange(4, dtype=np.int32), first)}
        self.turns += 1
        start = self.machine.rows.stop if start is None else start
        return self.machine.add(self.turns, start, stop, tables, ready=ready, now=0.0)

    def ready(self, turn: int, layers: set[LayerId] | None = None) -> list[Effect]:
        return self.machine.ready(turn, layers, 0.0)

    def expect(self, rank: int = 0, world: int = 1, given: FlowPlan | None = None) -> list[Effect]:
        return self.machine.expect(D[rank], Generation(5), given or plan(), world, 0.0)

    def say(self, *events: object, rank: int = 0) -> list[Effect]:
        out: list[Effect] = []
        for event in events:
            out += self.machine.handle(D[rank], event, 0.0)
            self.machine.check_integrity()
        return out

    def begin(self, s: Segment = A, rank: int = 0, lease: int | None = -1) -> bool:
        transfer = Transfer(D[rank], s, None, 0, s.start if lease == -1 else lease)
        return self.machine.flows[D[rank]].begin(transfer)

    def write(self, s: Segment = A) -> list[Effect]:
        """From grant to notice."""
        self.say(grant(s))
        assert self.begin(s)
        return self.say(Wrote(s))

    def complete(self, rank: int = 0) -> list[Effect]:
        return self.say(Complete(**head(rank)), rank=rank)


def state(room: Room, rank: int = 0) -> Sending:
    return room.machine.flows[D[rank]].state


def phase(room: Room) -> Phase:
    return room.machine.phase


def only(effects: Sequence[Effect], kind: type[E_]) -> list[E_]:
    return [e for e in effects if isinstance(e, kind)]


def frames(effects: Sequence[Effect], kind: type[E_]) -> list[E_]:
    return [e.frame for e in effects if isinstance(e, Send) and isinstance(e.frame, kind)]


def sent(effects: Sequence[Effect]) -> list[type[RoomFrame]]:
    return [type(e.frame) for e in effects if isinstance(e, Send) and isinstance(e.frame, RoomFrame)]


def transfers(effects: Sequence[Effect]) -> list[Segment]:
    return [t.segment for t in only(effects, Transfer)]


def finished() -> Room:
    """All is acknowledged, nothing agreed."""
    room = Room()
    room.expect()
    for s in (A, B):
        room.write(s)
        room.say(landed(s))
    room.machine.finish(8, b"aux", 0.0)
    return room
