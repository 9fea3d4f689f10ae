"""The tables say all that can happen, the machines do all that the tables say, and the page shows the tables."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import cast

import pytest

from disagg_kv.core import (
    Awaited,
    Cancel,
    Decided,
    Flow,
    Gone,
    Introduced,
    Leased,
    Lost,
    Met,
    Options,
    PeerTable,
    Quiet,
    ReceiveRoom,
    Receiving,
    Scattered,
    Tick,
    WriteFailed,
    Wrote,
)
from disagg_kv.core.base import Finished, Offered
from disagg_kv.core.cells import Table
from disagg_kv.core.peers.tables import KNOWN, Ended, Known, Replaced, Shut
from disagg_kv.core.room.flow import room_head
from disagg_kv.core.room.machine import Machine
from disagg_kv.core.room.rows import Readiness
from disagg_kv.core.room.tables import RECEIVING, SENDING, Sending
from disagg_kv.core.wire.frames import (
    Abort,
    ChunkReady,
    Complete,
    Disconnected,
    Done,
    Drained,
    DrainedAck,
    Expect,
    Expected,
    Grant,
    Heartbeat,
    Hello,
    Landed,
    Queued,
    Return,
    Returned,
    RoomFrame,
    StagingRequest,
)
from disagg_kv.errors import LocalProtocolError, RemoteProtocolError
from disagg_kv.ids import Epoch, Generation, RoomId
from tests.support.diagram import diagram

TO_DECODE = {Expected, StagingRequest, Return, ChunkReady, Done, Abort, Drained}
TO_PREFILL = {Expect, Queued, Grant, Returned, Landed, Complete, Abort, DrainedAck}
HERE = {Lost, Gone, Cancel, Tick}

IMPOSSIBLE: dict[Enum, tuple[set[type], str]] = {
    Receiving.OPENED: (
        {Leased, Scattered},
        "nothing was asked of the ring, the kernels or the writers",
    ),
    Receiving.MOVING: ({Awaited, Introduced}, "both are said once, and moving follows both"),
    Receiving.PLACED: (
        {Awaited, Introduced, Leased, Scattered},
        "no segment is left that waits for anything",
    ),
    Receiving.DRAINING: ({Introduced}, "a room that has failed meets its prefill ranks one by one"),
    Sending.MOVING: (
        {Quiet, Decided},
        "a write that is not quiet has failed the flow; success needs every flow complete",
    ),
    Sending.FINISHED: (
        {Finished, Wrote, WriteFailed, Quiet, Decided},
        "every segment has landed, and finish is said once",
    ),
    Sending.COMPLETE: ({Finished, Wrote, WriteFailed, Quiet}, "as when finished"),
    Sending.ABORTING: ({Decided}, "the room has failed"),
    Sending.DRAINING: ({Wrote, WriteFailed, Quiet, Decided}, "no write is left, and the room has failed"),
}
SIDES = [
    pytest.param(
        RECEIVING,
        Receiving,
        TO_DECODE | HERE | {Met, Awaited, Introduced, Leased, Scattered, Decided},
        id="decode",
    ),
    pytest.param(
        SENDING,
        Sending,
        TO_PREFILL | HERE | {Offered, Finished, Wrote, WriteFailed, Quiet, Decided},
        id="prefill",
    ),
]


def machine(table: Table) -> ReceiveRoom | Flow:
    epoch, room = Epoch(bytes(16)), RoomId(b"r")
    if table is RECEIVING:
        return ReceiveRoom(room, Generation(1), epoch, Options(), 0.0)
    return Flow(room_head(epoch, epoch, room, Generation(1)), None, Options(), lambda segment: Readiness.READY)


@pytest.mark.parametrize(("table", "states", "events"), SIDES)
def test_every_event_in_every_state_is_in_the_table_or_argued_impossible(
    table: Table, states: type[Enum], events: set[type]
) -> None:
    for state in states:
        named = {event for at, event in table if at is state}
        if state.name == "CLOSED":
            assert not named
        else:
            impossible = IMPOSSIBLE.get(state, (set(), ""))[0]
            assert named | impossible == events, state
            assert not named & impossible, state


@pytest.mark.parametrize(("table", "states", "events"), SIDES)
def test_frames_of_a_peer_are_foreseen_in_every_state(table: Table, states: type[Enum], events: set[type]) -> None:
    """A peer can send anything at any time: no frame may be our bug."""
    frames = TO_DECODE if table is RECEIVING else TO_PREFILL
    for state in states:
        assert state.name == "CLOSED" or frames <= {event for at, event in table if at is state}


@pytest.mark.parametrize("table", [RECEIVING, SENDING], ids=["decode", "prefill"])
def test_frames_that_only_our_own_side_sends_are_the_peer_s_error(table: Table) -> None:
    one = cast("Machine[Enum]", machine(table))
    head = room_head(Epoch(bytes(16)), Epoch(bytes(16)), RoomId(b"r"), Generation(1))
    frame = Complete(**head) if table is RECEIVING else Done(**head, stop=1, segments=0, aux=None)
    with pytest.raises(RemoteProtocolError, match="room r generation 1: the peer sent"):
        Machine.handle(one, frame, 0.0)


@pytest.mark.parametrize(("table", "states", "events"), SIDES)
def test_what_cannot_happen_is_our_own_error(table: Table, states: type[Enum], events: set[type]) -> None:
    one = cast("Machine[Enum]", machine(table))
    for state in states:
        one.state = state
        for event in IMPOSSIBLE.get(state, (set(), ""))[0]:
            with pytest.raises(LocalProtocolError, match=f"{event.__name__} in state {state.value}"):
                one.handle(object.__new__(event), 0.0)


@pytest.mark.parametrize(("table", "states", "events"), SIDES)
def test_every_action_is_a_method_and_every_method_an_action(
    table: Table, states: type[Enum], events: set[type]
) -> None:
    actions = {f"_on_{cell.action}" for cell in table.values() if cell.action != "ignore"}
    methods = {name for name in dir(type(machine(table))) if name.startswith("_on_")}
    assert actions == methods


@pytest.mark.parametrize("table", [RECEIVING, SENDING], ids=["decode", "prefill"])
def test_nothing_leads_back_from_failure_and_every_state_can_end(table: Table) -> None:
    order = [*Receiving] if table is RECEIVING else [*Sending]
    leads = {state: {to for (at, _), cell in table.items() if at is state for to in cell.leads_to} for state in order}
    for state in order:
        assert all(order.index(to) >= order.index(state) for to in leads[state])
        reached = {state}
        for _ in order:
            reached |= {to for at in reached for to in leads[at]}
        assert order[-1] in reached


@pytest.mark.parametrize(
    ("table", "start"), [(RECEIVING, Receiving.OPENED), (SENDING, Sending.MOVING), (KNOWN, Known.UP)]
)
def test_the_page_shows_exactly_the_diagram_of_the_table(table: Table, start: Enum) -> None:
    page = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
    assert f"```mermaid\n{diagram(table, start)}\n```\n" in page


def test_every_event_of_a_peer_has_an_action_in_every_state_and_every_action_is_a_method() -> None:
    events = {Hello, Heartbeat, RoomFrame, Disconnected, Lost, Ended, Shut, Replaced}
    assert KNOWN.keys() == {(state, event) for state in Known for event in events}
    assert {cell.method for cell in KNOWN.values()} == {name for name in dir(PeerTable) if name.startswith("_on_")}


def test_nothing_revives_a_peer_that_is_over() -> None:
    assert all(cell.leads_to == {Known.OVER} for (state, _), cell in KNOWN.items() if state is Known.OVER)
