"""Transfers that wait are found by room, segment and destination, in the order in which they came."""

from __future__ import annotations

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from disagg_kv.core import RoomKey, Transfer
from disagg_kv.endpoints.prefill.movers.direct import PageLines
from disagg_kv.endpoints.prefill.movers.staged import SlotLines
from disagg_kv.endpoints.prefill.room import PrefillRoom
from disagg_kv.ids import Epoch, Generation, RoomId
from disagg_kv.planning import Segment

ROOMS = [cast("PrefillRoom", RoomKey(RoomId(b"%d" % n), Generation(n))) for n in range(3)]
PEERS = [Epoch(bytes([n] * 16)) for n in range(3)]
SEGMENTS = [Segment(n, n + 1, 0, 1) for n in range(3)]
Name = tuple[PrefillRoom, Epoch, Segment]

names = st.tuples(st.sampled_from(ROOMS), st.sampled_from(PEERS), st.sampled_from(SEGMENTS))
steps = st.lists(st.tuples(st.sampled_from(["add", "remove", "forget"]), names, st.integers(0, 99)), max_size=60)


def straight(name: Name) -> bool:
    """Rooms of the first kind go straight to pages."""
    return name[0] is ROOMS[0]


@given(steps, st.sets(st.sampled_from(PEERS)))
def test_it_is_a_list_that_is_searched_without_a_search(given: list[tuple[str, Name, int]], full: set[Epoch]) -> None:
    """The oracle is a plain dict in the order of arrival."""
    pages, slots, model = PageLines(), SlotLines(), dict[Name, Transfer]()
    for what, name, lease in given:
        room, to, segment = name
        waiting = pages if straight(name) else slots
        if what == "add":
            transfer = Transfer(to, segment, None if straight(name) else lease, 1, lease)
            waiting.add(room, transfer)
            model[name] = transfer
        elif what == "remove" and name in model:
            waiting.remove(room, to, segment)
            del model[name]
        elif what == "forget":
            waiting.forget(room)
            model = {key: one for key, one in model.items() if key[0] != room}
        assert set(pages.of) | set(slots.of) == {room for room, _, _ in model}
        staged = [(key, one) for key, one in model.items() if not straight(key)]
        first = next(((key[0], one) for key, one in staged if key[1] not in full), None)
        assert slots.first(full.__contains__) == first
        for r in ROOMS:
            for s in SEGMENTS:
                assert slots.same(r, s) == [one for key, one in staged if key[0] == r and key[2] == s]
            for p in PEERS:
                line = [one for key, one in model.items() if straight(key) and key[:2] == (r, p)]
                assert [list(of) for room, to, of in pages.lines() if (room, to) == (r, p)] == [line] * bool(line)
