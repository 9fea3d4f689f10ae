"""Handles: what an engine holds of a room. Written by the thread that advances, read by the engine's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from .. import arguments
from ..channels.readiness import Readiness
from ..core import Phase
from ..errors import DisaggKVError, GeometryError
from ..geometry import PageTable, Site
from ..ids import GroupId, RoomId, room_name
from .latch import Latch
from .status import Report

H = TypeVar("H", bound="RoomHandle")


ENDED = Phase.DONE, Phase.FAILED
"""The phases after which a room may be released."""


def room_state(room: RoomId, phase: Phase, released: bool) -> str:
    """A room at one moment, for a ``repr``."""
    return f"{room_name(room)}: {phase.name}{', released' if released else ''}"


class RoomHandle:
    """Outcome and ownership of one room, live.

    Attributes:
        room: its id.
        state: ``phase`` and ``released`` of one moment.
        error: why it failed.
        report: what it cost so far.
    """

    def __init__(self, room: RoomId) -> None:
        self.room = room
        self._name = room_name(room)
        self.state = (Phase.CONNECTING, False)
        self._published: tuple[Phase, bool] | None = None
        self._shown: tuple[Phase, bool] | None = None  # what ``poll`` returned it with; None: not by the last call
        self.listed = False  # whether ``Changes`` has an entry for it
        self.error: DisaggKVError | None = None
        self.report = Report()

    def __repr__(self) -> str:
        return arguments.brief(self, lambda: room_state(self.room, self.phase, self.released))

    @property
    def phase(self) -> Phase:
        """How far it is."""
        return (self._shown or self.state)[0]

    @property
    def released(self) -> bool:
        """True: its pages are neither read nor written any more."""
        return (self._shown or self.state)[1]

    def break_down(self, error: DisaggKVError) -> bool:
        """Endpoint's thread, as it ends: a room that has not ended fails now, and is never released; False: it has."""
        phase, released = self.state
        self.show_live()  # ``poll`` returns nothing any more
        if phase in ENDED:
            return False
        self.error = error.about(room=self.room)
        self.state = (Phase.FAILED, released)
        return True

    def news(self, state: tuple[Phase, bool]) -> bool:
        """Engine's thread: whether ``poll`` has not reported this state."""
        return state != self._published

    def tell(self, state: tuple[Phase, bool]) -> None:
        """Engine's thread: ``poll`` reports this state, and the handle shows it until the next call."""
        self._published = self._shown = state

    def show_live(self) -> None:
        """Show the present state again: another ``poll`` begins, or none will."""
        self._shown = None

    def publish(self, state: tuple[Phase, bool], error: DisaggKVError | None, at: float) -> None:
        """Endpoint's thread: take over the machine's state."""
        if state[0] in ENDED and self.report.ended is None:
            self.report.ended = at
        # The error is there before the state that makes the engine look at it.
        self.error = self.error or error
        self.state = state


class ChangeQueue(Generic[H]):
    """Handles that changed, each once, in the order of their first change.

    Nothing is dropped: there is one entry for each handle with a change that was not reported to the engine, whatever
    the number of its changes. A handle that changes after it was taken gets a new entry.

    There is no lock: a signal handler may interrupt ``take`` and close the endpoint, whose thread must be able to add.
    That thread publishes a state, then reads ``listed`` of the handle. The engine's thread takes an entry, clears
    ``listed``, then reads the state. So the state is seen, or there is a new entry for it.

    The descriptor of :meth:`fileno` exists once the engine has asked for it. The endpoint's thread adds an entry, then
    sets it. The engine's thread clears it, then takes entries. So it is readable whenever there is an entry.
    """

    def __init__(self) -> None:
        self._changed: deque[H] = deque()
        self._reported: Sequence[H] = ()  # by the last ``take``: each shows the state of that moment
        self._readiness: Readiness | None = None

    def __bool__(self) -> bool:
        return bool(self._changed)

    def add(self, handle: H) -> None:
        """Endpoint's thread: after the handle has its new state."""
        if not handle.listed:
            handle.listed = True
            self._changed.append(handle)
            self.wake_engine()

    def fileno(self) -> int:
        """Engine's thread: a descriptor that is readable while there are entries."""
        if self._readiness is None:
            self._readiness = Readiness()
            if self:  # added before the endpoint's thread could see the descriptor
                self._readiness.set()
        return self._readiness.fileno()

    def wake_engine(self) -> None:
        """Any thread: make the descriptor readable, if there is one."""
        if self._readiness is not None:
            self._readiness.set()

    def break_down(self, handles: Iterable[H], error: DisaggKVError) -> None:
        """Endpoint's thread, as it ends: what has not ended has failed."""
        for handle in handles:
            if handle.break_down(error):
                self.add(handle)
        self.wake_engine()

    def show_live(self) -> None:
        """Engine's thread: what the last ``take`` returned shows its present state again."""
        for handle in self._reported:
            handle.show_live()

    def take(self) -> Sequence[H]:
        """Engine's thread: all of them.

        A state that was reported before is skipped. Such a state comes from a handle that changes after its entry is
        taken and before its state is read: the endpoint's thread adds a second entry for a state that the first one
        showed.

        Until the next call, a handle shows the state with which it was taken. Else an engine would see a release that
        follows at once, and see it again in the next call.
        """
        if self._readiness is not None:
            self._readiness.clear()
        self.show_live()
        taken: dict[H, None] = {}
        for _ in range(len(self._changed)):
            try:
                handle = self._changed.popleft()
            except IndexError:
                break  # a signal handler that polls has taken the rest
            handle.listed = False
            state = handle.state
            if handle.news(state):
                handle.tell(state)
                taken[handle] = None
        self._reported = tuple(taken)
        return list(taken)


class HostEvent:
    """An event that the endpoint sets.

    Args:
        lend: has the calling thread advance the endpoint until a function returns True, or until it cannot.
    """

    def __init__(self, lend: Callable[[Callable[[], bool]], object]) -> None:
        self._lend = lend
        self._latch = Latch()
        self._error: DisaggKVError | None = None

    def query(self) -> bool:
        """True once it has happened.

        Raises:
            EndpointBrokenError: it will not happen, since the endpoint has failed.
            AbortedError: it will not happen, since the endpoint has closed.
        """
        if self._error is not None:
            raise self._error
        return self._latch.is_set

    def synchronize(self) -> None:
        """Block until it has happened; raises as :meth:`query` does."""
        self._lend(lambda: self._latch.is_set)
        self._latch.wait()
        self.query()

    @property
    def over(self) -> bool:
        """Whether it has happened, or cannot happen any more."""
        return self._latch.is_set

    def fail(self, error: DisaggKVError) -> None:
        """It will not happen; harmless if it has."""
        if not self._latch.is_set:
            self._error = error
            self._latch.set()

    def set(self) -> None:
        """It has happened."""
        self._latch.set()


def page_tables(room: RoomId, name: str, given: Sequence[PageTable]) -> tuple[PageTable, ...]:
    """Page tables from a list of them.

    Raises:
        GeometryError: a single table, an array, a tensor, a list of page ids, or another type.
    """
    if type(given) in (list, tuple) and {PageTable}.issuperset(map(type, given)):
        return tuple(given)
    return arguments.several(given, f"{room_name(room)}: {name}", PageTable, GeometryError)


def check_tables(
    room: RoomId,
    site: Site,
    pages: Sequence[PageTable],
    starts: Mapping[GroupId, int],
    stop: int,
    unneeded: Collection[GroupId] = (),
) -> Mapping[GroupId, PageTable]:
    """Tables by group, checked to cover the rows from ``starts`` up to ``stop``; the engine may reuse its arrays.

    Args:
        room: its id.
        site: the pool's.
        pages: the tables.
        starts: first row per group.
        stop: one past the last row.
        unneeded: groups of which no row may be needed, so that they may lie in the null page.

    Raises:
        GeometryError: a group twice, unknown or missing, a table that does not cover the rows, or a page in two groups
            that are overlaid; names the room.
    """
    given = page_tables(room, "pages", pages)
    tables = {t.group: PageTable(t.group, t.pages.copy(), t.first) for t in given}
    try:
        if len(tables) != len(given):
            raise GeometryError(f"two page tables for one group: {[t.group for t in given]}")
        for table in tables.values():
            if table.group in site.state_groups:
                raise GeometryError(f"group {table.group!r} has slots of states, not pages of tokens")
            needed = stop if table.group in unneeded else None
            table.check(site.group(table.group), starts.get(table.group, 0), stop, needed)
        site.check_owners(tuple(tables.values()))
        missing = [g for g, start in starts.items() if g not in tables and stop > start]
        if missing:
            raise GeometryError(f"no page table for {missing}")
    except GeometryError as exc:
        raise GeometryError(f"{room_name(room)}: {exc}") from exc
    return tables


def check_states(room: RoomId, site: Site, slots: Sequence[PageTable]) -> Mapping[GroupId, PageTable]:
    """Slots by group, checked to be one of every group of states.

    Raises:
        GeometryError: a group twice, missing or not of states, or not one slot of it; names the room.
    """
    if type(slots) is tuple and not slots and not site.state_groups:
        return {}
    given = page_tables(room, "state", slots)
    tables = {t.group: PageTable(t.group, t.pages.copy(), t.first) for t in given}
    where = room_name(room)
    if len(tables) != len(given) or set(tables) != site.state_groups:
        groups = [t.group for t in given]
        raise GeometryError(f"{where}: slots of groups {groups}; of states there are {sorted(site.state_groups)}")
    for table in tables.values():
        if len(table.pages) != 1 or table.first:
            raise GeometryError(f"{where}, group {table.group!r}: one slot from row 0 on, not {len(table.pages)} pages")
        try:
            table.check(site.group(table.group), 0, 1)
        except GeometryError as exc:
            raise GeometryError(f"{where}: {exc}") from exc
    return tables


def joined(
    site: Site, before: Mapping[GroupId, PageTable], after: Mapping[GroupId, PageTable]
) -> Mapping[GroupId, PageTable]:
    """Tables that cover what ``before`` covers up to where ``after`` begins, and then what that covers."""
    tables: dict[GroupId, PageTable] = dict(after)
    for group, early in before.items():
        late = after[group]
        pages = (late.first - early.first) // site.group(group).rows_per_page
        if pages > 0:
            tables[group] = PageTable(group, np.concatenate([early.pages[:pages], late.pages]), early.first)
    return tables
