"""Rooms that decode cancelled before it had met all their prefill ranks: each rank is notified once it is there.

Such a rank's engine may have opened the room already. It would wait for its own deadline, since decode never sends an
``Expect`` for the room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from math import inf

from attrs import Factory, define

from ...ids import Epoch
from ...protocol import Options, RoomKey, Send
from ...protocol.flow import room_head
from ...protocol.frames import Abort, words
from ...protocol.repeater import Repeater
from ..runtime.handshake import RemoteEndpoint


@define
class _Room:
    key: RoomKey
    instance: str
    reason: str
    tag: bytes
    until: float
    notified: set[Epoch] = Factory(set)


class CancelledBeforeOpen:
    """Sends ``Abort`` for cancelled rooms, for ``silence_s`` each: a rank that is dialled answers within that.

    Args:
        epoch: of this endpoint.
        options: repeat times, and how many rooms are remembered.
    """

    def __init__(self, epoch: Epoch, options: Options) -> None:
        self._epoch = epoch
        self._options = options
        self._rooms: OrderedDict[RoomKey, _Room] = OrderedDict()
        self._repeat = Repeater(options)

    def __len__(self) -> int:
        return len(self._rooms)

    def add(
        self, key: RoomKey, instance: str, reason: str, tag: bytes, remotes: Iterable[RemoteEndpoint], now: float
    ) -> list[Send]:
        """Decode cancels a room of this prefill instance: frames for those of its ranks that are there."""
        room = self._rooms[key] = _Room(key, instance, words(reason), tag, now + self._options.silence_s)
        if len(self._rooms) > self._options.tombstones:
            self._forget(next(iter(self._rooms)))
        return [send for remote in remotes for send in self._notify(room, remote, now)]

    def met(self, remote: RemoteEndpoint, now: float) -> list[Send]:
        """A prefill rank is there: frames for it."""
        return [send for room in self._rooms.values() for send in self._notify(room, remote, now)]

    def _notify(self, room: _Room, remote: RemoteEndpoint, now: float) -> list[Send]:
        if room.instance != remote.hello.instance or remote.epoch in room.notified:
            return []
        room.notified.add(remote.epoch)
        head = room_head(self._epoch, remote.epoch, room.key.room, room.key.generation)
        abort = Send(remote.epoch, Abort(**head, reason=room.reason, tag=room.tag))
        return [self._repeat.start((room.key, remote.epoch), abort, now)]

    def answered(self, key: RoomKey, epoch: Epoch) -> None:
        """A prefill rank has acknowledged the end of the room."""
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
