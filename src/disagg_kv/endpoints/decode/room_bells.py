"""Which rooms of a decode rank have bells, from the board's slots to the handle of the engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial

from ...core import Phase
from ...core.wire.frames import WireBells
from ...ids import Epoch, RoomId
from ...memory import Buffer, MemoryPool
from .ballots import Ballots
from .bells import BellBoard, BellWatch
from .handle import ReceptionHandle
from .room import DecodeRoom


class RoomBells:
    """The bells of all rooms of a decode rank; on the endpoint's thread.

    A rank that has doubts looks for rank 0's decision still, and its engine comes to no conclusion.

    ``watched`` are the handles of rooms whose bells the engine's thread reads. It reads them while they change.

    Args:
        memory: of the board; None: there are no bells.
        ballots: how the ranks of this instance agree by words.
        host: of this process.
        pool: keeps the aux rows.
    """

    def __init__(self, memory: Buffer | None, ballots: Ballots, host: str, pool: MemoryPool) -> None:
        self.ballots = ballots
        self._board = None if memory is None else BellBoard(memory)
        self._host = host
        self._pool = pool
        self._deciding = False
        self.watched: dict[ReceptionHandle, DecodeRoom] = {}
        self._by_id: defaultdict[RoomId, dict[DecodeRoom, None]] = defaultdict(dict)

    def issue(self, room: DecodeRoom) -> tuple[WireBells, ...]:
        """Bells for the prefill ranks of a room; empty: a rank of either side is not near, or slots are missing."""
        near = all(remote.hello.host == self._host for remote in room.remotes)
        if self._board is not None and near and self.ballots.ready:
            room.bells = self._board.issue([remote.epoch for remote in room.remotes])
        return room.bells

    def follow(self, room: DecodeRoom) -> None:
        """An event of a room was handled: from now on the engine may look at its bells, or may not any more."""
        machine, wanted = room.machine, room.wanted
        listens = machine.listens
        if listens is None or wanted is None or self._board is None:
            if room.watch is not None:
                self._drop(room)
            return
        if room.watch is None:
            store = None if wanted.aux is None else partial(self._pool.write_aux, wanted.aux)
            room.watch = BellWatch(self._board, room.bells, *listens, store)
            room.handle.watch(room.watch)
            self.watched[room.handle] = room
            self._by_id[room.key.room][room] = None
        self._offer(room, room.watch)

    def _offer(self, room: DecodeRoom, watch: BellWatch) -> None:
        ballot = watch.ballot or self.ballots.of(room.key)
        may = not self._deciding and not room.machine.doubted
        if may and ballot is not None and self.ballots.stands(ballot, room.key):
            watch.offer(ballot)

    @contextmanager
    def deciding(self, name: RoomId | None, hold: Callable[[DecodeRoom], None]) -> Iterator[None]:
        """Ranks may agree on a room (None: on any): inside, no engine comes to a conclusion about it.

        ``hold`` handles what it has come to before.
        """
        self._deciding = True
        try:
            for room in self._named(name):
                hold(room)
            yield
        finally:
            self._deciding = False
            for room in self._named(name):
                self.follow(room)

    def _named(self, name: RoomId | None) -> list[DecodeRoom]:
        return list(self.watched.values() if name is None else self._by_id.get(name, ()))

    def _drop(self, room: DecodeRoom) -> None:
        room.watch = None
        room.handle.watch(None)
        del self.watched[room.handle], self._by_id[room.key.room][room]
        if not self._by_id[room.key.room]:
            del self._by_id[room.key.room]

    def ended(self, room: DecodeRoom) -> None:
        """A room is forgotten."""
        if self._board is not None:
            self._board.take_back(room.bells)
            room.bells = ()

    def gone(self, epoch: Epoch) -> None:
        """Evidence: a process stores nothing any more."""
        if self._board is not None:
            self._board.gone(epoch)

    def parted(self, epoch: Epoch) -> None:
        """The link to a process was dropped."""
        if self._board is not None:
            self._board.parted(epoch)

    def check_integrity(self, rooms: Collection[DecodeRoom]) -> None:
        """Raise AssertionError if the accounts contradict each other."""
        for room in rooms:
            assert room.handle.state[0] is not Phase.DONE or room.machine.error is None, "an outcome has changed"
        watched = [room for room in rooms if room.watch is not None]
        assert set(self.watched) == {room.handle for room in watched}
        assert {room for same in self._by_id.values() for room in same} == set(watched)
        if self._board is not None:
            self._board.check_integrity([bell for room in rooms for bell in room.bells])
