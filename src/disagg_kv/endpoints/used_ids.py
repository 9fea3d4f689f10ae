"""Which room ids an endpoint has used: none is used twice."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from ..errors import LocalProtocolError
from ..ids import RoomId, room_name
from .bounded import bound
from .handle import RoomHandle

H = TypeVar("H", bound=RoomHandle)


class UsedIds(Generic[H]):
    """The handles of rooms, by id, and the ids that were used last. The engine's thread alone changes them.

    A room that is not released keeps its id while its handle lives. Of other ids the last ``most`` are remembered. The
    protocol copes with an older id that is used again: the ranks of the instance agree on the new room, or it fails.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._used: OrderedDict[RoomId, None] = OrderedDict()
        self._handles: WeakValueDictionary[RoomId, H] = WeakValueDictionary()

    def check(self, room: RoomId) -> None:
        """Raise unless a room may be opened under this id.

        Raises:
            LocalProtocolError: the id was used before.
        """
        last = self._handles.get(room)
        if last is not None and not last.released:
            raise LocalProtocolError(f"{room_name(room)} is open already")
        if room in self._used:
            raise LocalProtocolError(
                f"{room_name(room)} was used already; a retry has its own id, see disagg_kv.endpoints.attempt_id"
            )

    def add(self, room: RoomId, handle: H) -> None:
        """A room is opened."""
        self._handles[room] = handle
        self._used[room] = None
        bound(self._used, self._most)

    def get(self, room: RoomId) -> H | None:
        """The handle of a room, while the engine has it."""
        return self._handles.get(room)

    def handles(self) -> list[H]:
        """From any thread: every handle that the engine still has."""
        return [handle for ref in self._handles.valuerefs() if (handle := ref()) is not None]
