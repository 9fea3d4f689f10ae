"""Rooms that decode cancelled before it had met all their prefill ranks: each rank is notified once it is there.

A rank is there, too, if it cannot work with this endpoint: one of the two has refused the other, or a transport does
not connect them.

Such a rank's engine may have opened the room already. It would wait for its own deadline, since decode never sends an
``Expect`` for the room.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf

from attrs import Factory, define

from ...ids import Epoch
from ...protocol import RoomKey, Send
from ...protocol.flow import room_head
from ...protocol.frames import Abort, words
from ...protocol.repeater import Repeater
from ...rendezvous import Source
from ..runtime.event_loop import EventLoop
from ..runtime.handshake import RemoteEndpoint


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
        self._repeat = Repeater(options)

    def __len__(self) -> int:
        return len(self._rooms)

    def add(self, key: RoomKey, source: Source, reason: str, tag: bytes) -> list[Send]:
        """Decode cancels a room of this prefill instance: frames for those of its ranks that are there."""
        loop, peers, now = self._loop, self._loop.peers, self._loop.now
        room = self._rooms[key] = _Room(key, source, words(reason), tag, now + self._options.silence_s)
        if len(self._rooms) > self._options.tombstones:
            self._forget(next(iter(self._rooms)))
        there = [remote.epoch for remote in loop.remotes.values() if remote.hello.instance == source.instance]
        useless = [peers.useless_at(address, now) for address in loop.directory.known(source) or ()]
        there += [epoch for epoch in useless if epoch is not None]
        return [send for epoch in there for send in self._notify(room, epoch)]

    def met(self, remote: RemoteEndpoint) -> list[Send]:
        """A prefill rank is there: frames for it."""
        rooms = [room for room in self._rooms.values() if room.source.instance == remote.hello.instance]
        return [send for room in rooms for send in self._notify(room, remote.epoch)]

    def unreachable(self, address: str) -> list[Send]:
        """No rank at an address can work with us: frames for the one that is there, if any is."""
        epoch = self._loop.peers.useless_at(address, self._loop.now)
        if epoch is None:
            return []
        known = self._loop.directory.known
        rooms = [room for room in self._rooms.values() if address in (known(room.source) or ())]
        return [send for room in rooms for send in self._notify(room, epoch)]

    def _notify(self, room: _Room, epoch: Epoch) -> list[Send]:
        if epoch in room.notified:
            return []
        room.notified.add(epoch)
        head = room_head(self._loop.me.epoch, epoch, room.key.room, room.key.generation)
        abort = Send(epoch, Abort(**head, reason=room.reason, tag=room.tag))
        return [self._repeat.start((room.key, epoch), abort, self._loop.now)]

    def answered(self, key: RoomKey, epoch: Epoch) -> None:
        """A prefill rank has acknowledged the end of the room."""
        if (room := self._rooms.get(key)) is not None:
            room.answered.add(epoch)
        self._repeat.stop((key, epoch))

    def _forget(self, key: RoomKey) -> None:
        for epoch in self._rooms.pop(key).notified:
            self._repeat.stop((key, epoch))

    def tick(self, now: float) -> list[Send]:
        """Frames that are due again."""
        for key in [key for key, room in self._rooms.items() if room.until <= now]:
            self._forget(key)
        return self._repeat.tick(now)

    def next_at(self) -> float | None:
        """When ``tick`` is due."""
        if not self._rooms:
            return None
        soonest = self._repeat.next_at()
        return min(inf if soonest is None else soonest, *(room.until for room in self._rooms.values()))

    def check_integrity(self) -> None:
        """Raise AssertionError if a frame is repeated for a room that is forgotten, or to a rank that has answered."""
        repeated = set(self._repeat.keys())
        awaited = {(key, epoch) for key, room in self._rooms.items() for epoch in room.notified - room.answered}
        assert repeated <= awaited, f"{len(repeated - awaited)} answered frames are repeated"
