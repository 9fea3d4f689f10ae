"""Rooms that decode cancelled before it had met all their prefill ranks: each rank is notified once it is there.

A rank is there, too, if it cannot work with this endpoint: one of the two has refused the other, or a transport does
not connect them.

Such a rank's engine may have opened the room already. It would wait for its own deadline, since decode never sends an
``Expect`` for the room.

A rank that is notified of a room is notified of all earlier rooms of the same source. So what is left to do for a rank
is at the end of the source's rooms, and no room costs more because many were cancelled before it.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise, takewhile
from math import inf

from attrs import Factory, define

from ...core import RoomKey, Send
from ...core.repeater import Repeater
from ...core.room.flow import room_head
from ...core.wire.frames import Abort, words
from ...ids import Epoch
from ...rendezvous import Source
from ..loop.event_loop import EventLoop
from ..peers.handshake import RemoteEndpoint


@define
class _Room:
    key: RoomKey
    source: Source
    reason: str
    tag: bytes
    until: float
    notified: set[Epoch] = Factory(set)
    answered: set[Epoch] = Factory(set)


class CancelledBeforeOpen:
    """Sends ``Abort`` for cancelled rooms, for ``silence_s`` each: a rank that is dialled answers within that.

    At most ``tombstones`` rooms are remembered.

    Args:
        loop: knows which ranks are there, and the time.
    """

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._options = options = loop.options
        self._rooms: OrderedDict[RoomKey, _Room] = OrderedDict()
        self._of: dict[Source, dict[RoomKey, _Room]] = {}
        self._repeat = Repeater(options)

    def __len__(self) -> int:
        return len(self._rooms)

    def add(self, key: RoomKey, source: Source, reason: str, tag: bytes) -> list[Send]:
        """Decode cancels a room of this prefill instance: frames for those of its ranks that are there."""
        loop, peers, now = self._loop, self._loop.peers, self._loop.now
        room = self._rooms[key] = _Room(key, source, words(reason), tag, now + self._options.silence_s)
        self._of.setdefault(source, {})[key] = room
        if len(self._rooms) > self._options.tombstones:
            self._forget(next(iter(self._rooms)))
        there = [remote.epoch for remote in loop.remotes.values() if remote.hello.instance == source.instance]
        useless = [peers.useless_at(address, now) for address in loop.directory.known(source) or ()]
        there += [epoch for epoch in useless if epoch is not None]
        return [send for epoch in there for send in self._notify(source, epoch)]

    def met(self, remote: RemoteEndpoint) -> list[Send]:
        """A prefill rank is there: frames for it."""
        sources = [source for source in self._of if source.instance == remote.hello.instance]
        return [send for source in sources for send in self._notify(source, remote.epoch)]

    def unreachable(self, address: str) -> list[Send]:
        """No rank at an address can work with us: frames for the one that is there, if any is."""
        epoch = self._loop.peers.useless_at(address, self._loop.now)
        if epoch is None:
            return []
        known = self._loop.directory.known
        sources = [source for source in self._of if address in (known(source) or ())]
        return [send for source in sources for send in self._notify(source, epoch)]

    def _notify(self, source: Source, epoch: Epoch) -> list[Send]:
        """Frames about the rooms of a source of which a rank has not been notified: the last ones, in their order."""
        rooms = list(takewhile(lambda room: epoch not in room.notified, reversed(self._of[source].values())))
        return [self._abort(room, epoch) for room in reversed(rooms)]

    def _abort(self, room: _Room, epoch: Epoch) -> Send:
        room.notified.add(epoch)
        head = room_head(self._loop.me.epoch, epoch, room.key.room, room.key.generation)
        abort = Send(epoch, Abort(**head, reason=room.reason, tag=room.tag))
        return self._repeat.start((room.key, epoch), abort, self._loop.now)

    def answered(self, key: RoomKey, epoch: Epoch) -> None:
        """A prefill rank has acknowledged the end of the room."""
        if (room := self._rooms.get(key)) is not None:
            room.answered.add(epoch)
        self._repeat.stop((key, epoch))

    def _forget(self, key: RoomKey) -> None:
        room = self._rooms.pop(key)
        for epoch in room.notified:
            self._repeat.stop((key, epoch))
        rooms = self._of[room.source]
        del rooms[key]
        if not rooms:
            del self._of[room.source]

    def tick(self, now: float) -> list[Send]:
        """Frames that are due again."""
        while self._rooms and (oldest := next(iter(self._rooms.values()))).until <= now:
            self._forget(oldest.key)
        return self._repeat.tick(now)

    def next_at(self) -> float | None:
        """When ``tick`` is due."""
        if not self._rooms:
            return None
        soonest = self._repeat.next_at()
        return min(inf if soonest is None else soonest, next(iter(self._rooms.values())).until)

    def check_integrity(self) -> None:
        """Raise AssertionError if a frame is repeated for a room that is forgotten, or to a rank that has answered.

        Likewise if a rank was notified of a room, but not of an earlier one of the same source.
        """
        repeated = set(self._repeat.keys())
        awaited = {(key, epoch) for key, room in self._rooms.items() for epoch in room.notified - room.answered}
        assert repeated <= awaited, f"{len(repeated - awaited)} answered frames are repeated"
        for rooms in map(list, map(dict.values, self._of.values())):
            assert all(b.notified <= a.notified for a, b in pairwise(rooms)), "a rank knows only the later room"
        assert sum(map(len, self._of.values())) == len(self._rooms), "a room has no place among those of its source"
