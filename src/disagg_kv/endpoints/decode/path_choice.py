"""What comes before prefill is asked for rows: a path is chosen, and pages that it exposes may be written.

A room takes one path for all prefill ranks that send rows of it here. ``Expect`` names it.

Both sides have to know a path. Where that leaves one, as a side asked for it by name, it is taken. Else the rule of
``auto`` holds, :data:`~disagg_kv.strategies.registry.AUTO_ORDER`: copies into mapped pages, if each of these ranks
announces that our pool is mapped there; else staging memory; else single writes into exposed pages. A rank announces it
with the answer to the first ``Expect`` that it gets, so the first room is staged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from attrs import frozen

from ...core import Awaited, Cancel, RoomKey, Verify
from ...core.room.machine import ours
from ...core.wire.frames import WireTable
from ...core.wire.page_runs import excess, tables_to_wire
from ...errors import ConfigurationError, DisaggKVError, OversizeError, QuarantineFullError
from ...geometry import read_as
from ...ids import Epoch, Rank
from ...memory import MemoryPool
from ...planning import InstancePlans, Limits, PairPlan, RankPlan, RowRange, Segment
from ...planning.cache import PlanCache
from ...staging import GrantQueue
from ...strategies import TransferPlanner, exposes_pages, in_auto_order, refusal
from ..loop.event_loop import EventLoop
from ..peers.handshake import EndpointInfo, RemoteEndpoint, page_rows
from .room import DecodeRoom

log = logging.getLogger("disagg_kv")

PEER_QUARANTINE = 0.25
ALL_QUARANTINE = 0.5
"""Parts of the ring that may wait for evidence before new rooms are refused: for one peer, and in all."""

UNSAID = "decode does not know yet whether its pool is mapped there"


@frozen(eq=False)
class PathChoice:
    """The path of a room.

    Args:
        path: what carries its rows.
        reason: one sentence that says why.
        unsegmented: no staging slot cuts its segments. Kernels of all ranks that send rows have to queue copies for
            that: others keep a thread for as long as a segment takes.
    """

    path: TransferPlanner
    reason: str
    unsegmented: bool


_Question = tuple[tuple[Epoch, ...], int, tuple[str, ...]]
"""The prefill ranks, a rotation, and why our pool is not mapped at each rank."""


class PathChooser:
    """Runs on the thread that advances. What it chose is kept, as few rooms differ.

    Args:
        me: this endpoint; its paths are those that its strategy allows.
    """

    def __init__(self, me: EndpointInfo) -> None:
        self._me = me
        self._chosen: PlanCache[_Question, PathChoice] = PlanCache()

    def choose(
        self,
        remotes: Sequence[RemoteEndpoint],
        said: tuple[str, ...],
        plans: InstancePlans,
        rotation: int,
        rows: RowRange,
        unexposed: str | None = None,
    ) -> PathChoice:
        """Choose the path of a room.

        Args:
            remotes: all prefill ranks, by rank.
            said: why our pool is not mapped at each of them; empty: it is.
            plans: between them and this rank.
            rotation: of the room.
            rows: those that are awaited.
            unexposed: why its pages cannot be exposed; None: they can.

        Raises:
            ConfigurationError: no path can; the message has the reason of each.
        """
        key = tuple(one.epoch for one in remotes), rotation, said
        found = self._chosen.get(key) if unexposed is None else None
        if found is not None:
            return found
        rank_plan = plans.rank_plan(rotation)
        writers = [
            (remote, plans.pair(rotation, Rank(rank), read_as(remote.site, self._me.site.spec), rows))
            for rank, remote in enumerate(remotes)
            if rank_plan.parts[rank]
        ]
        common = [p for p in self._me.paths if all((p.name, p.version) in one.hello.paths for one in remotes)]
        asked = len(common) == 1
        refusals: dict[str, str] = {}
        for path in common if asked else in_auto_order(common):
            why = unexposed if exposes_pages(path) else None
            for remote, pair in writers:
                unmapped = "" if asked else said[remote.hello.rank]
                why = why or self._refusal(path, remote, rank_plan, pair, unmapped)
            if why is None:
                refused = "; ".join(f"{name} cannot: {reason}" for name, reason in refusals.items())
                reason = f"both sides allow only {path.name}" if asked else f"auto takes {path.name}"
                reason = f"{reason}; {refused}" if refused else reason
                queue = path.mover == "mapped" and all(remote.hello.queues for remote, _ in writers)
                choice = PathChoice(path, reason, bool(writers) and queue)
                return choice if unexposed is not None else self._chosen.keep(key, choice)
            refusals[path.name] = why
        reasons = "; ".join(f"{name} cannot: {why}" for name, why in refusals.items())
        raise ConfigurationError(f"no path is left: {reasons or 'none that both sides know'}")

    def _refusal(
        self, path: TransferPlanner, remote: RemoteEndpoint, rank_plan: RankPlan, pair: PairPlan, unmapped: str
    ) -> str | None:
        """Why a path cannot carry what one prefill rank sends; None: it can."""
        rank = Rank(remote.hello.rank)
        if path.mover == "mapped" and unmapped:
            return f"prefill rank {rank}: {unmapped}"
        try:
            if not exposes_pages(path):
                limits = Limits(remote.hello.slot_bytes, self._me.lease_bytes, page_rows(self._me.site))
                rank_plan.segments(rank, 0, 1, limits)
            why = refusal(path, pair)
        except DisaggKVError as exc:
            why = str(exc)
        return None if why is None else f"prefill rank {rank}: {why}"


def quarantine_full(
    queue: GrantQueue[Epoch, tuple[RoomKey, Segment]], ring_bytes: int, remotes: Sequence[RemoteEndpoint]
) -> QuarantineFullError | None:
    """Why these prefill ranks may not be asked: too much waits for evidence about one of them; None: they may."""
    for remote in remotes:
        stuck = queue.quarantined_bytes(remote.epoch)
        if stuck > PEER_QUARANTINE * ring_bytes:
            full = f"{remote.name}: {stuck} of {ring_bytes} ring bytes wait for evidence"
            return QuarantineFullError(full, **remote.hello.who)
    return None


class PendingExpectations:
    """Rooms whose prefill ranks are known, and that await rows, until they may be asked.

    Runs on the thread that advances. Where pages are exposed, that is once the engine's event for them has happened.
    ``waiting`` are the rooms, each with the event for its machine.

    Args:
        loop: the endpoint's.
        pool: ours.
        chooser: of paths.
        verify: how much is compared.
    """

    def __init__(self, loop: EventLoop, pool: MemoryPool, chooser: PathChooser, verify: Verify) -> None:
        self._loop = loop
        self._pool = pool
        self._chooser = chooser
        self._verify: Verify = verify
        self.waiting: list[tuple[DecodeRoom, Awaited | Cancel]] = []
        self._noted_pages = False

    def add(self, room: DecodeRoom) -> None:
        """Rows are awaited; :meth:`ended` gives the room, at once where nothing has to come first."""
        try:
            event: Awaited | Cancel = self._awaited(room)
        except Exception as exc:
            # A path may be a user's code: its errors fail this room alone.
            event = Cancel(ours(exc, f"{room.name}: no way to send it"))
        self.waiting.append((room, event))

    def _awaited(self, room: DecodeRoom) -> Awaited:
        wanted = room.wanted
        assert wanted is not None
        choice, tables = self._choose(room)
        room.path = choice.path
        room.handle.report.path, room.handle.report.reason = choice.path.name, choice.reason
        rows, aux_bytes = (wanted.start, wanted.stop, wanted.most), 0 if wanted.aux is None else self._pool.aux_bytes
        return Awaited(*rows, choice.path.name, tables, self._verify, aux_bytes, wanted.least, choice.unsegmented)

    def _choose(self, room: DecodeRoom) -> tuple[PathChoice, tuple[WireTable, ...] | None]:
        """The path of a room, and its page tables where the path exposes them."""
        wanted, plans = room.wanted, room.plans
        assert wanted is not None
        assert plans is not None
        said = tuple(UNSAID if one.unmapped is None else one.unmapped for one in room.used)
        asked = room.remotes, said, plans, plans.rotation(room.key.room), RowRange(wanted.start, wanted.stop)
        choice = self._chooser.choose(*asked)
        if not exposes_pages(choice.path):
            return choice, None
        tables = tables_to_wire(wanted.tables.values())
        beyond = excess(tables, self._loop.options.request_pages)
        if beyond is None:
            return choice, tables
        self._loop.observer.count("rooms.too_many_pages")
        pages = self._note_pages(room, beyond)
        try:
            return self._chooser.choose(*asked, pages), None
        except DisaggKVError as exc:
            raise beyond from exc

    def ended(self) -> Iterator[tuple[DecodeRoom, Awaited | Cancel]]:
        """Gives each for which nothing more has to come first, and the event for its machine."""
        for pending in list(self.waiting):
            room, event = pending
            try:
                if isinstance(event, Awaited) and event.tables is not None and not room.writable():
                    continue
            except DisaggKVError as exc:
                event = Cancel(exc)
            self.waiting.remove(pending)
            yield room, event

    def _note_pages(self, room: DecodeRoom, beyond: OversizeError) -> str:
        """Note once in the log that a room has more pages than a request may expose, and return that in words."""
        pages = f"{beyond.asked} {beyond.what}, at most {beyond.capacity}"
        if not self._noted_pages:
            self._noted_pages = True
            log.warning("%s: %s, so they are not exposed; later rooms are only counted", room.name, pages)
        return pages
