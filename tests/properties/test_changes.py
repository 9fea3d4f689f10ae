"""What ``poll`` tells an engine: every change of every room, the last one for certain, and none twice."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from disagg_kv.core import Phase
from disagg_kv.endpoints.handle import ChangeQueue, RoomHandle
from disagg_kv.ids import RoomId

State = tuple[Phase, bool]
LIFE: tuple[State, ...] = (
    (Phase.CONNECTING, False), (Phase.MOVING, False), (Phase.DONE, False), (Phase.DONE, True),
)  # fmt: skip
"""What a room that ends well goes through, after its first state has been published."""


class Watched(RoomHandle):
    """A room that says when the engine's thread is about to look at it, and what that saw."""

    def __init__(self, name: bytes, before: Callable[[], None]) -> None:
        super().__init__(RoomId(name))
        self.before = before
        self.told: list[State] = []

    @property
    def state(self) -> State:
        """The engine's thread looks: the endpoint's thread may have done something just before, and just after."""
        self.before()
        state = self._live
        self.before()
        return state

    @state.setter
    def state(self, state: State) -> None:
        self._live = state

    def tell(self, state: State) -> None:
        """Keep what was told."""
        super().tell(state)
        self.told.append(state)


@given(
    rooms=st.integers(1, 4),
    order=st.lists(st.integers(0, 3), max_size=40),
    pauses=st.lists(st.integers(0, 3), max_size=80),
)
def test_every_change_is_told_and_none_twice(rooms: int, order: list[int], pauses: list[int]) -> None:
    """The endpoint's steps (a state is published, an entry is added) fall between any two steps of ``take``."""
    changes: ChangeQueue[RoomHandle] = ChangeQueue()
    steps: list[Callable[[], object]] = []
    waits = iter(pauses)

    def other_thread() -> None:
        for _ in range(next(waits, 0)):
            if steps:
                steps.pop(0)()

    handles = [Watched(b"%d" % number, other_thread) for number in range(rooms)]
    at = Counter[int]()
    for number in order:
        handle = handles[number % rooms]
        if at[number % rooms] == len(LIFE) - 1:
            continue
        at[number % rooms] += 1
        phase, released = LIFE[at[number % rooms]]
        steps += [partial(handle.publish, (phase, released), None, 1.0), partial(changes.add, handle)]
    while steps:
        steps.pop(0)()
        taken = changes.take()
        assert len(set(map(id, taken))) == len(taken)
    while changes.take() or changes:
        pass
    for number, handle in enumerate(handles):
        if at[number]:
            assert handle.told[-1] == LIFE[at[number]]
        assert len(set(handle.told)) == len(handle.told)
        assert sum(released for _, released in handle.told) <= 1


@given(
    order=st.lists(st.integers(0, 2), max_size=30),
    pauses=st.lists(st.integers(0, 4), max_size=60),
    looks=st.integers(1, 3),
)
def test_an_engine_that_looks_at_what_poll_returned_sees_each_state_once(
    order: list[int], pauses: list[int], looks: int
) -> None:
    """The endpoint goes on between ``poll`` and the engine's looks, of which all show the same."""
    changes: ChangeQueue[RoomHandle] = ChangeQueue()
    handles = [RoomHandle(RoomId(b"%d" % number)) for number in range(3)]
    steps: list[Callable[[], object]] = []
    at = Counter[int]()
    for number in order:
        if at[number] < len(LIFE) - 1:
            at[number] += 1
            steps += [
                partial(handles[number].publish, LIFE[at[number]], None, 1.0),
                partial(changes.add, handles[number]),
            ]
    waits = iter(pauses)

    def other_thread() -> None:
        for _ in range(next(waits, 1)):
            if steps:
                steps.pop(0)()

    seen: dict[RoomId, list[State]] = {handle.room: [] for handle in handles}
    while steps or changes:
        other_thread()
        for handle in changes.take():
            states = set()
            for _ in range(looks):
                other_thread()
                states.add((handle.phase, handle.released))
            assert len(states) == 1
            seen[handle.room] += states
    for number, handle in enumerate(handles):
        assert len(set(seen[handle.room])) == len(seen[handle.room])
        assert sum(released for _, released in seen[handle.room]) == (LIFE[at[number]][1])
        assert (handle.phase, handle.released) == LIFE[at[number]]


def test_thirty_thousand_rooms_that_end_before_the_engine_polls_are_all_told() -> None:
    """More rooms than any bound, with three changes each."""
    changes: ChangeQueue[RoomHandle] = ChangeQueue()
    handles = [RoomHandle(RoomId(b"%d" % number)) for number in range(30_000)]
    for state in LIFE[1:]:
        for handle in handles:
            handle.publish(state, None, 1.0)
            changes.add(handle)
    assert changes.take() == handles
    assert changes.take() == []


def test_an_engine_that_never_polls_costs_one_entry_for_each_room() -> None:
    """The number of changes does not matter."""
    changes: ChangeQueue[RoomHandle] = ChangeQueue()
    handles = [RoomHandle(RoomId(b"%d" % number)) for number in range(3)]
    for _ in range(1000):
        for handle in handles:
            changes.add(handle)
    assert len(changes._changed) == 3
    assert changes.take() == handles


def test_an_engine_that_polls_while_rooms_end_is_told_of_each_release_once() -> None:
    """Two threads: one ends 20,000 rooms, the other polls until it knows of all."""
    changes: ChangeQueue[RoomHandle] = ChangeQueue()
    handles = [RoomHandle(RoomId(b"%d" % number)) for number in range(20_000)]

    def end() -> None:
        for handle in handles:
            for state in LIFE[1:]:
                handle.publish(state, None, 1.0)
                changes.add(handle)

    thread = threading.Thread(target=end)
    thread.start()
    told = Counter[int]()
    while thread.is_alive() or changes:
        for handle in changes.take():
            told[id(handle)] += handle.released
    thread.join()
    assert all(told[id(handle)] == 1 for handle in handles)
