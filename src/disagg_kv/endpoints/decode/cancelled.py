"""Rooms that decode gave up before it had met all their prefill ranks: each rank that is there, or comes, is told.

Such a rank's engine may have opened the room already. It would wait for its own deadline, since nobody asks it for the
room any more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from math import inf

from attrs import Factory, define

from ...ids import Epoch, RoomId
from ...protocol import Options, RoomKey, Send
from ...protocol.flow import room_head
from ...protocol.frames import Abort, words
from ...protocol.retry import Repeater
from ..runtime.handshake import RemoteEndpoint


@define
class _Room:
    key: RoomKey
    instance: str
    reason: str
    until: float
    told: set[Epoch] = Factory(set)


class CancelledBeforeOpen:
    """What is said of declined rooms. Each is remembered for ``silence_s``: a rank that is dialled answers within that.

    Args:
        epoch: ours.
        options: repeat times, and how many rooms are remembered.
    """

    def __init__(self, epoch: Epoch, options: Options) -> None:
        self._epoch = epoch
        self._options = options
        self._rooms: OrderedDict[RoomId, _Room] = OrderedDict()
        self._repeat = Repeater(options)

    def __len__(self) -> int:
        return len(self._rooms)

    def add(
        self, key: RoomKey, instance: str, reason: str, remotes: Iterable[RemoteEndpoint], now: float
    ) -> list[Send]:
        """Decode gives a room of this prefill instance up: what its ranks are told that are there."""
        self.forget(key.room)
        room = self._rooms[key.room] = _Room(key, instance, words(reason), now + self._options.silence_s)
        if len(self._rooms) > self._options.tombstones:
            self.forget(next(iter(self._rooms)))
        return [send for remote in remotes for send in self._tell(room, remote, now)]

    def met(self, remote: RemoteEndpoint, now: float) -> list[Send]:
        """A prefill rank is there: what it is told."""
        return [send for room in self._rooms.values() for send in self._tell(room, remote, now)]

    def _tell(self, room: _Room, remote: RemoteEndpoint, now: float) -> list[Send]:
        if room.instance != remote.hello.instance or remote.epoch in room.told:
            return []
        room.told.add(remote.epoch)
        head = room_head(self._epoch, remote.epoch, room.key.room, room.key.generation)
        abort = Send(remote.epoch, Abort(**head, reason=room.reason))
        return [self._repeat.start((room.key.room, remote.epoch), abort, now)]

    def answered(self, key: RoomKey, epoch: Epoch) -> None:
        """A prefill rank knows that nothing comes of the room."""
        room = self._rooms.get(key.room)
        if room is not None and room.key == key:
            self._repeat.stop((key.room, epoch))

    def forget(self, room: RoomId) -> None:
        """Say no more of it: its next life begins, which speaks for itself."""
        known = self._rooms.pop(room, None)
        for epoch in () if known is None else known.told:
            self._repeat.stop((room, epoch))

    def tick(self, now: float) -> list[Send]:
        """What has to be said again."""
        for name in [name for name, room in self._rooms.items() if room.until <= now]:
            self.forget(name)
        return self._repeat.tick(now)

    def next_at(self) -> float | None:
        """When ``tick`` is due."""
        if not self._rooms:
            return None
        soonest = self._repeat.next_at()
        return min(inf if soonest is None else soonest, *(room.until for room in self._rooms.values()))
