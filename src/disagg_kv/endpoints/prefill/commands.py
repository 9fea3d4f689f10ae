"""What the handles of a prefill endpoint post to its thread."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from ...core import RoomKey
from ...ids import LayerId
from ...memory import Event
from ..handle import HostEvent
from ..loop.admission import Admission
from ..loop.event_loop import EventLoop
from .armed import EngineLaunches
from .handle import Act, SubmittedChunk
from .rooms import PrefillSide


class PostedCommands:
    """Satisfies :class:`~disagg_kv.endpoints.prefill.handle.PrefillCommands`, which says what each of them does.

    Args:
        loop: runs them.
        side: does what they say, on the loop's thread.
        admission: whether calls are taken.
        launches: launch what the loop's thread has armed.
    """

    def __init__(self, loop: EventLoop, side: PrefillSide, admission: Admission, launches: EngineLaunches) -> None:
        self.admission = admission
        self._launches = launches
        self._loop = loop
        self._side = side

    def change(self, key: RoomKey, act: Act, ready: Event | None = None) -> None:
        """Change a room behind an event."""
        loop, side = self._loop, self._side
        loop.post(lambda: loop.when(ready, lambda: side.change(key, act), lambda exc: side.broken([key], exc)))

    def send(self, submitted: SubmittedChunk, ready: Event | None) -> None:
        """Rows behind an event."""
        self._loop.post(partial(self._side.send, submitted, ready))

    def final(
        self, submitted: Sequence[SubmittedChunk], layers: Collection[LayerId] | None, ready: Event | None
    ) -> None:
        """Layers of submitted rows behind an event."""
        self._loop.post(partial(self._side.final_at, submitted, layers, ready, self._loop.clock()), wake=False)

    def launch(self, submitted: Sequence[SubmittedChunk], events: Mapping[LayerId, Event | None]) -> bool:
        """Launch here what is armed."""
        return self._launches.launch([one.armed for one in submitted], events)

    def begun(self, submitted: Sequence[SubmittedChunk]) -> None:
        """The first layer."""
        self._loop.post(partial(self._side.begun, submitted, self._loop.clock()), wake=False)

    def wake(self) -> None:
        """Wake the loop."""
        self._loop.channel.wake()

    def closed(self, submitted: Sequence[SubmittedChunk], ready: Event | None) -> None:
        """The end of a forward pass."""
        self._loop.post(partial(self._side.closed_at, submitted, ready, self._loop.clock()))

    def withdraw(self, key: RoomKey, fired: HostEvent) -> None:
        """Stop reading a room's pages."""
        self._loop.post(partial(self._side.withdraw, key, fired))
