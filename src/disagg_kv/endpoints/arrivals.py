"""Rooms that are not open here, by peer: the other side has come first, or the room has ended.

Theory of operation. :class:`Arrivals` keeps what peers said about rooms that prefill's engine has not opened: an
``Expect`` waits until the room opens, and an ``Abort`` for those who come later. It answers each frame that no open
room takes: :data:`PREFILL` and :data:`DECODE` name the method for each pair of state and frame.

* ``OPEN``: prefill's engine has opened the room, and this peer's part of it has not begun.
* ``NEW``: nothing is known of it. ``PARKED``: the peer's ``Expect`` waits. Late frames of others are only counted.
* ``OVER``: it ended before both sides had met. Decode gave it up before prefill opened it, or it failed on prefill
  before every decode rank had asked for it. Who comes later is refused with the reason.
* A :class:`~disagg_kv.core.RoomOutcome`: so says the tombstone of the peer's number. The room stays ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping
from enum import Enum

from msgspec import structs

from ..core import RoomFrame, RoomKey, RoomOutcome, Send
from ..core.base import tags_differ
from ..core.room.flow import room_head
from ..core.timers import Timers
from ..core.wire.frames import (
    Abort,
    ChunkReady,
    Complete,
    Done,
    Drained,
    DrainedAck,
    Expect,
    Expected,
    Head,
    Landed,
    Return,
    StagingRequest,
    words,
)
from ..ids import Epoch, Generation, RoomId
from .loop.event_loop import EventLoop

SHARE = 4
"""While several peers are known, each parks in at most one of this number of places."""

PLACE = 16_384
"""Bytes of page tables for which an ``Expect`` takes one more place."""


class Absent(Enum):
    """A room that a peer names, and that has no end here yet."""

    OPEN = "open"
    NEW = "new"
    PARKED = "parked"
    OVER = "over"


A, ENDED = Absent, RoomOutcome
Table = Mapping[Absent | RoomOutcome, Mapping[type[RoomFrame], str]]
"""The method that answers; a frame that is not there is counted, unless the room has ended."""

PREFILL: Table = {
    A.OPEN: {Expect: "park", Abort: "drain"},
    A.NEW: {Expect: "park", Abort: "give_up"},
    A.PARKED: {Expect: "park", Abort: "give_up"},
    A.OVER: {Expect: "refuse", Abort: "give_up"},
    ENDED.DONE: {Expect: "refuse", Abort: "drain"},
    ENDED.FAILED: {Expect: "refuse", Abort: "drain"},
    ENDED.EVICTED: {Expect: "refuse", Abort: "drain"},
}

_ANSWERED: Mapping[type[RoomFrame], str] = {Abort: "abort", Drained: "acknowledge"}
DECODE: Table = {
    A.NEW: _ANSWERED,
    ENDED.DONE: {**_ANSWERED, StagingRequest: "land", ChunkReady: "land", Done: "acknowledge"},
    ENDED.FAILED: {**_ANSWERED, **dict.fromkeys((Expected, StagingRequest, Return, ChunkReady, Done), "abort")},
    ENDED.EVICTED: _ANSWERED,
}
ACKNOWLEDGEMENTS: Mapping[type[RoomFrame], type[RoomFrame]] = {Drained: DrainedAck, Done: Complete}


class Arrivals:
    """What is kept takes at most ``options.parked`` places: one, and one more for every :data:`PLACE` bytes of tables.

    Each ``Expect`` is kept for ``silence_s`` after it came last, each ``Abort`` for ``total_s``. An ``Abort`` gives its
    place to what comes later; of ``Expect`` frames one peer has at most a quarter while others are known, so that none
    keeps the others out.

    Args:
        loop: the endpoint's.
        send: sends a frame.
        opened: the rooms that prefill's engine has opened.
    """

    def __init__(self, loop: EventLoop, send: Callable[[Send], None], opened: Container[RoomId] = ()) -> None:
        self._loop = loop
        self._send = send
        self._opened = opened
        self._table = PREFILL if loop.me.role == "prefill" else DECODE
        self._kept: dict[RoomId, dict[Epoch, Expect | Abort]] = {}
        self._aborts: dict[tuple[RoomId, Epoch], None] = {}
        self._places: Counter[Epoch] = Counter()
        self._timers: Timers[tuple[RoomId, Epoch]] = Timers()

    def answer(self, frame: RoomFrame) -> None:
        """Answer a frame that no open room takes."""
        state = self.state(frame)
        if (action := self._table[state].get(type(frame))) is not None:
            getattr(self, f"_{action}")(frame)
        elif state not in (ENDED.DONE, ENDED.FAILED):
            self._loop.observer.count("frames.unknown_room")

    def state(self, frame: RoomFrame) -> Absent | RoomOutcome:
        """What is known of the room of a frame, for its sender."""
        room, epoch = RoomId(frame.room), Epoch(frame.src)
        parked = isinstance(self._kept.get(room, {}).get(epoch), Expect)
        ended = self._loop.tombstones.outcome(epoch, Generation(frame.generation))
        # A number that is too old to be known may be slow. What is parked has not ended; others must not begin.
        if ended is not None and not (parked and ended is RoomOutcome.EVICTED):
            return ended
        if isinstance(frame, Expect | Abort) and self.reason(room, frame.tag) is not None:
            return A.OVER
        if room in self._opened:
            return A.OPEN
        return A.PARKED if parked else A.NEW

    def reason(self, room: RoomId, tag: bytes) -> str | None:
        """Why a room ended before both sides had met, for those with a tag; None: it is not known to have."""
        aborts = (said for said in self._kept.get(room, {}).values() if isinstance(said, Abort))
        return next((abort.reason for abort in aborts if not tags_differ(tag, abort.tag)), None)

    def parked(self, room: RoomId) -> list[Expect]:
        """What peers await of a room, in the order in which it came."""
        return [said for said in self._kept.get(room, {}).values() if isinstance(said, Expect)]

    def over(self, abort: Abort) -> None:
        """A room has ended before both sides had met: those who await it learn that now, others when they come."""
        room = RoomId(abort.room)
        for expect in self.parked(room):
            if not tags_differ(expect.tag, abort.tag):
                self.refuse(expect, abort.reason)
        self._keep(abort)

    def refuse(self, frame: Expect, reason: object, tag: bytes = b"") -> None:
        """The sender's room ends; ``tag``: of the room that another has here."""
        # Remembered, or its answer would be taken for a word about the room that others have.
        self._end(frame)
        self._say(Abort(**self._head(frame), reason=words(reason), tag=tag))

    # Answers of prefill.

    def _park(self, frame: Expect) -> None:
        if (superseded := self._loop.ranks.superseded) is not None:
            self.refuse(frame, superseded)
        elif self._keep(frame):
            self._say(Expected(**self._head(frame), parked=True))
        else:
            self._loop.observer.count("frames.not_parked")

    def _refuse(self, frame: Expect) -> None:
        self.refuse(frame, self.reason(RoomId(frame.room), frame.tag) or "the room has ended")

    def _give_up(self, frame: Abort) -> None:
        self._drain(frame)
        self.over(structs.replace(frame, reason=words(f"decode gave up: {frame.reason}")))

    def _drain(self, frame: Abort) -> None:
        self._end(frame)
        self._say(Drained(**self._head(frame), reason=frame.reason))

    # Answers of decode.

    def _acknowledge(self, frame: RoomFrame) -> None:
        self._say(ACKNOWLEDGEMENTS[type(frame)](**self._head(frame)))

    def _abort(self, frame: RoomFrame) -> None:
        self._say(Abort(**self._head(frame), reason="the room has ended"))

    def _land(self, frame: StagingRequest | ChunkReady) -> None:
        self._say(Landed(**self._head(frame), segments=(frame.segment,)))

    def _head(self, frame: RoomFrame) -> Head:
        return room_head(self._loop.me.epoch, Epoch(frame.src), RoomId(frame.room), Generation(frame.generation))

    def _say(self, answer: RoomFrame) -> None:
        self._send(Send(Epoch(answer.dst), answer))

    # What is kept.

    def _end(self, frame: RoomFrame) -> None:
        room, epoch = RoomId(frame.room), Epoch(frame.src)
        if isinstance(self._kept.get(room, {}).get(epoch), Expect):
            self.forget(room, epoch)
        self._loop.remember([epoch], RoomKey(room, Generation(frame.generation)), RoomOutcome.FAILED)

    def _keep(self, frame: Expect | Abort) -> bool:
        """Keep it in place of what its sender said of the room before; False: there is no place for it."""
        loop, options, most = self._loop, self._loop.options, self._loop.options.parked
        key = room, peer = RoomId(frame.room), Epoch(frame.src)
        self.forget(room, peer)
        holder, places = _takes(frame)
        held, others = self._places[holder], any(session.epoch != holder for session in loop.all_there())
        share = max(1, most // SHARE) if others else most
        # The first of a peer may be large.
        if holder and held and held + places > share:
            return False
        while self._places.total() + places > most:
            if not self._aborts:
                return False
            self.forget(*next(iter(self._aborts)))
        self._kept.setdefault(room, {})[peer] = frame
        self._places[holder] += places
        if isinstance(frame, Abort):
            self._aborts[key] = None
        self._timers.schedule(key, loop.now + (options.silence_s if holder else options.total_s))
        return True

    def forget(self, room: RoomId, peer: Epoch) -> None:
        """Drop what a peer said of a room, if anything is kept."""
        kept = self._kept.get(room, {})
        if (frame := kept.pop(peer, None)) is None:
            return
        if not kept:
            del self._kept[room]
        self._aborts.pop((room, peer), None)
        self._timers.schedule((room, peer), None)
        holder, places = _takes(frame)
        self._places[holder] -= places
        if not self._places[holder]:
            del self._places[holder]

    def tick(self) -> None:
        """Forget what was kept for long enough."""
        for room, peer in self._timers.due(self._loop.now):
            self.forget(room, peer)

    def next_at(self) -> float | None:
        """When ``tick`` is due; None: nothing is kept."""
        return self._timers.next_at()

    def check_integrity(self) -> None:
        """Raise AssertionError if the places that are taken are not those of what is kept."""
        kept = {(room, peer): said for room, by in self._kept.items() for peer, said in by.items()}
        places: Counter[Epoch] = Counter()
        for holder, taken in map(_takes, kept.values()):
            places[holder] += taken
        assert self._places == places
        assert places.total() <= self._loop.options.parked
        assert set(self._aborts) == {key for key, said in kept.items() if isinstance(said, Abort)}


def _takes(frame: Expect | Abort) -> tuple[Epoch, int]:
    """The peer whose share it takes, empty for none, and how many places."""
    if isinstance(frame, Abort):
        return Epoch(b""), 1
    return Epoch(frame.src), 1 + sum(len(table.group) + len(table.pages) for table in frame.tables or ()) // PLACE
