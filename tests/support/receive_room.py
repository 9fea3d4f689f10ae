"""A room on a decode rank, with two writers, and the frames that it is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from disagg_kv.core import (
    Awaited,
    Effect,
    Introduced,
    Leased,
    Options,
    Phase,
    ReceiveRoom,
    Receiving,
    RoomFrame,
    Scattered,
    Send,
)
from disagg_kv.core.wire.frames import (
    Abort,
    ChunkReady,
    Done,
    Drained,
    Expected,
    Head,
    Return,
    StagingRequest,
    WireTable,
)
from disagg_kv.errors import DisaggKVError
from disagg_kv.geometry import CacheSpec, shard
from disagg_kv.ids import Epoch, Generation, RoomId, VirtualOffset
from disagg_kv.planning import RankPlan, Segment
from disagg_kv.staging import Lease

ME = Epoch(bytes([9] * 16))
P = [Epoch(bytes([r] * 16)) for r in range(3)]
SPEC = CacheSpec.kv(2, 2, 64, "int8")
RANK_PLAN = RankPlan.build(SPEC, [shard(SPEC, tp=2, rank=r) for r in range(2)], shard(SPEC))
TABLES = (WireTable("all", 0, 2, 0, bytes(8)),)
A, B = Segment(0, 4, 0, 2), Segment(4, 8, 0, 2)
LEASE = Lease(VirtualOffset(70000), 2048, 65536)
OTHER_LEASE = Lease(VirtualOffset(75008), 2048, 65536)
E_ = TypeVar("E_")


def head(rank: int) -> Head:
    return Head(src=P[rank], dst=ME, room=b"r", generation=1)


def request(rank: int, s: Segment = A, *, ready: bool = True, ask: int = 0) -> StagingRequest:
    return StagingRequest(**head(rank), segment=s, ask=ask, ready=ready)


def back(rank: int, ask: int = 0, s: Segment = A) -> Return:
    return Return(**head(rank), segment=s, ask=ask)


def chunk(rank: int, s: Segment = A, lease: Lease | None = LEASE) -> ChunkReady:
    start = None if lease is None else lease.start
    return ChunkReady(**head(rank), segment=s, lease=start)


def done(rank: int, segments: int = 0, *, stop: int = 8, aux: bytes | None = None) -> Done:
    return Done(**head(rank), stop=stop, segments=segments, aux=aux)


def expected(rank: int, *, parked: bool = False) -> Expected:
    return Expected(**head(rank), parked=parked)


def abort(rank: int, tag: bytes = b"") -> Abort:
    return Abort(**head(rank), reason="engine", tag=tag)


def drained(rank: int) -> Drained:
    return Drained(**head(rank), reason="engine")


class Room:
    """A room and what came out of it last."""

    def __init__(
        self,
        *,
        stop: int | None = 8,
        exposed: bool = False,
        begun: bool = True,
        window: int = 16,
        aux_bytes: int = 0,
        least: int = 0,
    ) -> None:
        self.machine = ReceiveRoom(RoomId(b"r"), Generation(1), ME, Options(window=window), 0.0, b"tag")
        tables = TABLES if exposed else None
        self.awaited = Awaited(0, stop, 12, "direct" if exposed else "staged", tables, aux_bytes=aux_bytes, least=least)
        self.introduced = Introduced((P[0], P[1]), RANK_PLAN)
        if begun:
            self.say(self.awaited, self.introduced)

    def say(self, *events: object, now: float = 0.0) -> list[Effect]:
        out: list[Effect] = []
        for event in events:
            out += self.machine.handle(event, now)
            self.machine.check_integrity()
        return out

    def lease(self, s: Segment = A, lease: Lease = LEASE) -> list[Effect]:
        """Both writers ask, the ring grants."""
        return self.say(request(0, s), request(1, s), Leased(s, lease))

    def land(self, s: Segment = A, lease: Lease = LEASE) -> None:
        self.lease(s, lease)
        self.say(chunk(0, s, lease), chunk(1, s, lease), Scattered(s))

    def landed(self) -> None:
        self.land(A)
        self.land(B)
        self.say(done(0, 2, aux=b"zero"), done(1, 2, aux=b"one"))
        assert self.machine.state is Receiving.PLACED


def state_of(room: Room) -> Receiving:
    return room.machine.state


def phase_of(room: Room) -> Phase:
    return room.machine.phase


def released(room: Room) -> bool:
    return room.machine.released


def only(effects: Sequence[Effect], kind: type[E_]) -> list[E_]:
    return [e for e in effects if isinstance(e, kind)]


def sent(effects: Sequence[Effect]) -> list[tuple[int, type[RoomFrame]]]:
    return [(P.index(e.to), type(e.frame)) for e in effects if isinstance(e, Send) and isinstance(e.frame, RoomFrame)]


def failed(room: Room, kind: type[DisaggKVError], *words: str) -> None:
    assert phase_of(room) is Phase.FAILED
    assert type(room.machine.error) is kind
    for word in words:
        assert word in str(room.machine.error)
