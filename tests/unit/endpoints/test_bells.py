"""Bells: decode's engine knows from words of shared memory that a room is done, before the endpoint's thread does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import attrs
import msgspec
import pytest

from disagg_kv.core import Codec, Options, Phase
from disagg_kv.core.wire.frames import Expect, WireBells
from disagg_kv.endpoints.decode.bells import BellBoard, BellWatch
from disagg_kv.endpoints.peers.mapping import BLOCK, BLOCK_BYTES, BLOCK_SLOTS
from disagg_kv.errors import AbortedError, PeerLostError, RemoteProtocolError, TransportError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Epoch, Peer
from disagg_kv.memory import new_buffer
from disagg_kv.transports import InprocTransport, ShmTransport, SupportsBells, combine
from disagg_kv.transports.bells import SLOT_WORDS, HostBells, Record, heard, words_of
from disagg_kv.transports.descriptor import pack
from disagg_kv.transports.memfd import BoardPlace
from tests.support.rig import Memory, Request, Rig, tp_shards

SPEC = CacheSpec.kv(2, 4, 8, "float16")
A, B = Epoch(b"a" * 16), Epoch(b"b" * 16)


def scene(
    prefill_tp: int = 1,
    *,
    rows: int = 9,
    strategy: str = "mapped",
    options: Options | None = None,
    memory: Memory | None = None,
) -> tuple[Rig, Request]:
    """A room whose ranks know each other, and of which nothing was sent yet."""
    rig = Rig(SPEC, options=options or Options(bells=512))
    of = memory or Memory()
    prefills = rig.prefill(tp_shards(SPEC, prefill_tp), memory=of, strategy=strategy)
    decodes = rig.decode(tp_shards(SPEC, 1), memory=of, strategy=strategy)
    request = rig.request("bell", prefills, decodes, rows)
    request.open_decode().expect(rows).open_prefill()
    rig.until(lambda: request.receives[0].phase is Phase.MOVING, "every rank to have opened it")
    rig.wait(0.3)
    return rig, request


def phase(request: Request) -> Phase:
    """What decode's engine sees; a call, because each look may find another phase."""
    return request.receives[0].phase


def turn_prefill(rig: Rig, request: Request, turns: int = 4) -> None:
    """Prefill's threads go on alone: no frame reaches decode's."""
    for _ in range(turns):
        for member in request.prefills:
            member.endpoint.driver.step()


def settle(rig: Rig, request: Request) -> None:
    """Everybody goes on, and everything ends well."""
    request.landed()
    assert [handle.error for handle in request.handles] == [None] * len(request.handles)
    rig.quiet()


@pytest.mark.parametrize("strategy", ["mapped", "direct"])
@pytest.mark.parametrize("transport", [InprocTransport, ShmTransport])
def test_the_engine_knows_before_the_endpoint_s_thread(transport: Callable[[], InprocTransport], strategy: str) -> None:
    """All rows are there when bells say so; the thread does its bookkeeping later, and releases the pages then."""
    rig, request = scene(strategy=strategy, memory=Memory(transport=transport))
    request.send(9)
    (handle,) = request.receives
    assert phase(request) is Phase.MOVING
    turn_prefill(rig, request)
    assert phase(request) is Phase.DONE
    assert not handle.released
    request.wanted(0, 9)
    rig.check()
    report = handle.report
    assert (report.bells, report.segments, report.nbytes, report.ended) == (True, 1, 9 * 2 * 2 * 4 * 8 * 2, rig.clock())
    assert request.decodes[0].endpoint.poll() == [handle]
    assert request.decodes[0].endpoint.poll() == []
    request.finish()
    settle(rig, request)
    assert [h.report.path for h in request.handles] == [strategy, strategy]


def test_poll_hears_bells_too() -> None:
    rig, request = scene()
    request.send(9)
    turn_prefill(rig, request)
    assert request.decodes[0].endpoint.poll() == request.receives
    assert request.decodes[0].endpoint.poll() == []
    request.finish()
    settle(rig, request)


def test_bells_of_all_writers_and_segments_are_needed() -> None:
    """Two ranks write each segment, and there are two of them."""
    rig, request = scene(2)
    request.send(4).send(9, 4)
    for member in request.prefills:
        assert phase(request) is Phase.MOVING
        for _ in range(3):
            member.endpoint.driver.step()
    assert phase(request) is Phase.DONE
    request.finish()
    settle(rig, request)


def test_an_abort_after_the_bells_changes_nothing() -> None:
    """The engine has seen the end: what its thread handles later comes too late."""
    rig, request = scene()
    request.send(9)
    turn_prefill(rig, request)
    (handle,) = request.receives
    assert phase(request) is Phase.DONE
    handle.abort("too late")
    request.finish()
    settle(rig, request)


def test_an_abort_that_the_thread_has_not_handled_comes_too_late() -> None:
    """The engine saw the end after it had given the room up, and sees no other one."""
    rig, request = scene()
    request.send(9)
    turn_prefill(rig, request)
    request.receives[0].abort("enough")
    assert phase(request) is Phase.DONE
    request.finish()
    settle(rig, request)


def test_bells_after_an_abort_change_nothing() -> None:
    rig, request = scene()
    (handle,) = request.receives
    handle.abort("enough")
    request.decodes[0].endpoint.driver.step()
    request.send(9)
    turn_prefill(rig, request)
    assert phase(request) is Phase.FAILED
    assert isinstance(handle.error, AbortedError)
    request.failed()


def test_prefill_may_end_once_its_bells_were_heard() -> None:
    """Also its process: all rows are in decode's pages."""
    rig, request = scene()
    request.send(9)
    turn_prefill(rig, request)
    (handle,) = request.receives
    assert phase(request) is Phase.DONE
    request.prefills[0].crash()
    rig.until(lambda: handle.released, "the end of the room")
    assert (phase(request), handle.error) == (Phase.DONE, None)
    request.wanted(0, 9)
    rig.check()


def test_a_broken_endpoint_keeps_what_its_engine_has_heard() -> None:
    """A room whose bells were heard stays done; one whose were not has failed."""
    for heard_it in (True, False):
        rig, request = scene()
        request.send(9)
        turn_prefill(rig, request)
        (handle,) = request.receives
        if heard_it:
            assert phase(request) is Phase.DONE
        handle.break_down(TransportError("the endpoint has failed"))
        assert phase(request) is (Phase.DONE if heard_it else Phase.FAILED)


@pytest.mark.parametrize("without", ["option", "verify", "no slot"])
def test_where_there_are_no_bells_frames_alone_tell(without: str) -> None:
    """Rows that are compared, too."""
    rig = Rig(SPEC, options=Options(bells=0 if without == "option" else 1))
    prefills = rig.prefill(tp_shards(SPEC, 2 if without == "no slot" else 1), strategy="mapped")
    decodes = rig.decode(
        tp_shards(SPEC, 1),
        strategy="mapped",
        verify="full" if without == "verify" else "off",
    )
    request = rig.request("r", prefills, decodes, 9)
    request.open_decode().expect(9).open_prefill()
    rig.wait(0.5)
    request.send(9)
    rig.wait(0.5)
    assert {handle.phase for handle in request.receives} == {Phase.MOVING}
    request.finish()
    request.landed()
    assert not any(handle.report.bells for handle in request.receives)
    rig.quiet()


@pytest.mark.parametrize("what", ["wrong value", "wrong rows", "no record", "other layers", "same rows twice"])
def test_a_forged_word_does_no_more_than_a_forged_frame(what: str) -> None:
    """Words that say what cannot be are not heard; the room ends by its frames."""
    rig, request = scene()
    board = request.decodes[0].endpoint.inspect().rooms
    (room,) = board.values()
    ((slot, _, value),) = room.bells
    assert room.watch is not None
    (peer,) = request.prefills[0].endpoint.inspect().rooms.values()
    bells = next(iter(peer.routes.values())).bells
    assert isinstance(bells, HostBells)
    forged: dict[str, tuple[int, Record]] = {
        "wrong value": (value + BLOCK, (0, 9, 0, 2, 0)),
        "wrong rows": (value, (0, 1 << 63, 0, 2, 0)),
        "other layers": (value, (0, 9, 7, 1 << 40, 0)),
        "same rows twice": (value, (0, 5, 0, 2, 0)),
    }
    if what == "no record":
        words_of(bells.buffer)[slot * SLOT_WORDS] = value
    else:
        bells.ring(slot, *forged[what])
    if what == "same rows twice":
        bells.ring(slot + 1, value + 1, (4, 9, 0, 2, 0))
    assert phase(request) is Phase.MOVING
    rig.wait(0.5)
    assert phase(request) is Phase.MOVING
    request.send(9).finish().landed()
    assert not request.receives[0].report.bells
    rig.quiet()


@pytest.mark.parametrize("value", [0, -1])
def test_a_frame_that_names_a_value_that_rings_nothing_is_refused(value: int) -> None:
    """An unset word is 0: decode names no such value, and prefill takes none."""

    def decoded(first: int) -> object:
        frame = Expect(
            src=b"1" * 16, dst=b"2" * 16, room=b"room", generation=1, start=0, stop=9, path="mapped", tables=None,
            tag=b"", bells=(0, BLOCK, first),
        )  # fmt: skip
        return Codec().decode(Codec().encode(frame))

    assert isinstance(decoded(1), Expect)
    with pytest.raises(RemoteProtocolError):
        decoded(value)


class Broken:
    """A board that is foreign code and raises whatever it likes."""

    def arm(self, *_: object) -> None:
        raise KeyError("arm")

    def ring(self, *_: object) -> None:
        raise KeyError("ring")

    def ring_final(self, *_: object) -> None:
        raise KeyError("final")


def test_a_board_that_raises_costs_nothing_but_the_bell() -> None:
    """The rooms go on, and their pages are released."""
    rig, request = scene()
    (room,) = request.prefills[0].endpoint.inspect().rooms.values()
    (peer,) = room.routes
    room.routes[peer] = attrs.evolve(room.routes[peer], bells=Broken())
    request.send(9).finish().landed()
    assert not request.receives[0].report.bells
    assert request.prefills[0].observer.counters["bells.refused"] == 2
    rig.quiet()


def test_a_slot_outside_the_board_costs_nothing_but_the_bell() -> None:
    """Decode names it; the frame follows."""
    rig, request = scene()
    (room,) = request.prefills[0].endpoint.inspect().rooms.values()
    (flow,) = room.machine.flows.values()
    assert flow.plan is not None
    flow.plan = attrs.evolve(flow.plan, bells=(1 << 40, BLOCK, 1))
    request.send(9).finish().landed()
    assert not request.receives[0].report.bells
    assert request.prefills[0].observer.counters["bells.refused"] == 2
    rig.quiet()


def test_rooms_one_after_the_other_use_the_same_slots_with_new_values() -> None:
    """What is left of an earlier room rings for none of the later ones."""
    rig, first = scene(options=Options(bells=1))
    values: list[WireBells] = []
    request = first
    for name in ("b", "c", "d"):
        (room,) = request.decodes[0].endpoint.inspect().rooms.values()
        values += room.bells
        request.send(9)
        assert phase(request) is Phase.MOVING
        turn_prefill(rig, request)
        assert phase(request) is Phase.DONE
        request.finish()
        settle(rig, request)
        request.prefills[0].give(request.given[0][0])
        request.decodes[0].give(request.taken[0])
        request = rig.request(name, first.prefills, first.decodes, 9)
        request.open_decode().expect(9).open_prefill()
        rig.wait(0.3)
    assert values == [(0, BLOCK, 1), (0, BLOCK, 2 + BLOCK), (0, BLOCK, 3 + 2 * BLOCK)]


def test_peers_say_why_there_are_no_bells() -> None:
    """Decode has no board; a board that cannot be opened; and none of it where there is one."""
    for bells, says in ((1, ""), (0, "decode has no board of bells")):
        _, request = scene(options=Options(bells=bells))
        (peer,) = request.prefills[0].endpoint.peers()
        assert peer.no_bells == says
        (peer,) = request.decodes[0].endpoint.peers()
        assert peer.no_bells == ""


# The board.


def test_blocks_stay_with_their_process_until_it_has_ended() -> None:
    board = BellBoard(new_buffer(2 * BLOCK_BYTES, "cpu"))
    one = board.issue([A])
    two = board.issue([A])
    assert board.issue([B]) == () == board.issue([A, B])
    board.take_back(one)
    assert board.issue([B]) == (), "it may still ring there"
    board.check_integrity(two)
    board.gone(A)
    (again,) = board.issue([B])
    assert (again[0], again[2]) == (one[0][0], 3 + 2 * BLOCK), "a value was used twice"
    assert board.issue([B]) == ()
    board.take_back(two)
    assert board.issue([B]) != (), "the process that had it is gone"


def test_blocks_of_a_process_whose_link_was_dropped_are_for_others() -> None:
    """Nothing shows the end of a process that has no link. Blocks that rooms use stay."""
    board = BellBoard(new_buffer(2 * BLOCK_BYTES, "cpu"))
    one, two = board.issue([A]), board.issue([A])
    board.take_back(one)
    board.parted(A)
    issued = board.issue([B])
    assert len(issued) == 1, "the slots are lost"
    again = issued[0]
    assert (again[0], again[2]) == (one[0][0], 3 + 2 * BLOCK)
    assert board.issue([B]) == ()
    board.take_back(two)
    assert board.issue([A]) != ()
    board.parted(B)
    board.check_integrity([*two, again])


def interrupted(request: Request, handler: Callable[[], None]) -> BellWatch:
    """What decode's engine sees of a room; a signal handler interrupts its next look in the middle of it."""
    (room,) = request.decodes[0].endpoint.inspect().rooms.values()
    watch = room.watch
    assert watch is not None
    admit, left = watch._admit, [handler]

    def admits(record: Record) -> Any:
        found = admit(record)
        while left:
            left.pop()()
        return found

    watch._admit = admits  # type: ignore[method-assign]
    return watch


def test_a_look_inside_a_look_is_harmless() -> None:
    """A signal handler may call ``poll``, and read phases."""
    rig, request = scene()
    endpoint, (handle,) = request.decodes[0].endpoint, request.receives
    endpoint.poll()
    request.send(4).send(9, 4)
    turn_prefill(rig, request)
    looked: list[object] = []
    interrupted(request, lambda: looked.extend([endpoint.poll(), handle.phase]))
    assert endpoint.poll() == [handle]
    assert looked == [[], Phase.MOVING]
    assert phase(request) is Phase.DONE
    assert (handle.report.segments, handle.report.bells) == (2, True)
    assert endpoint.poll() == []
    request.finish()
    settle(rig, request)


def test_a_look_that_an_exception_cuts_off_leaves_the_end_to_the_frames() -> None:
    """Such as that of an interrupt from the keyboard."""
    rig, request = scene()
    request.send(9)
    turn_prefill(rig, request)

    def interrupt() -> None:
        raise KeyboardInterrupt

    interrupted(request, interrupt)
    with pytest.raises(KeyboardInterrupt):
        phase(request)
    assert phase(request) is Phase.MOVING
    request.finish()
    settle(rig, request)
    assert not request.receives[0].report.bells


def test_a_record_does_not_change_under_its_reader() -> None:
    """A late use of a slot by an earlier room changes nothing of what a later one has stored there."""
    board = new_buffer(BLOCK_BYTES, "cpu")
    bells, words = HostBells(board), words_of(board)
    bells.ring(3, 7, (0, 4, 0, 2, 0))
    assert heard(words, 3, 7) == (0, 4, 0, 2, 0)
    bells.ring(3, 6, (0, 1, 0, 1, 0))
    bells.ring(3, 7, (0, 1, 0, 1, 0))
    assert heard(words, 3, 7) == (0, 4, 0, 2, 0)
    assert heard(words, 3, 6) is None
    for slot in (-1, BLOCK_SLOTS):
        with pytest.raises(TransportError, match=f"slot {slot} of a board of {BLOCK_SLOTS} bells"):
            bells.ring(slot, 8, (0, 1, 0, 1, 0))


def test_one_thread_of_two_takes_a_claim() -> None:
    """In every order of both threads' steps the engine's conclusion and the endpoint's event exclude each other."""
    for order in set(itertools.permutations("ehx")):
        _, request = scene()
        request.send(9)
        turn_prefill(_, request)
        (room,) = request.decodes[0].endpoint.inspect().rooms.values()
        watch = room.watch
        assert isinstance(watch, BellWatch)
        concluded = held = False
        for step in order:
            if step == "e":
                concluded = watch.complete()
            elif step == "h":
                held = watch.hold()
        assert concluded != held


def test_bells_of_several_transports_ring_over_the_lane_of_the_board() -> None:
    """And over no other one."""
    here, there = (combine([ShmTransport(), InprocTransport()]) for _ in range(2))
    other = combine([InprocTransport(), ShmTransport()])
    assert isinstance(here, SupportsBells)
    peer = here.connect(there.local_descriptor(), 5.0)
    for owner in (there, other):
        assert isinstance(owner, SupportsBells)
        board, place = owner.bell_board(BLOCK_BYTES)
        if owner is there:
            here.open_bells(peer, place).ring(0, 1, (0, 1, 0, 1, 0))
            assert heard(words_of(board), 0, 1) == (0, 1, 0, 1, 0)
        else:
            with pytest.raises(TransportError, match="ring over lane"):
                here.open_bells(peer, place)
    with pytest.raises(TransportError, match="no peer"):
        here.open_bells(Peer(bytes(16)), place)
    for one in (here, there, other):
        one.close(0.0)


def test_a_board_of_a_closed_peer_is_refused() -> None:
    here, there = InprocTransport(), InprocTransport()
    peer = here.connect(there.local_descriptor(), 1.0)
    board, place = there.bell_board(BLOCK_BYTES)
    bells = here.open_bells(peer, place)
    bells.ring(0, 1, (0, 1, 0, 1, 0))
    assert heard(words_of(board), 0, 1) == (0, 1, 0, 1, 0)
    with pytest.raises(TransportError, match="no peer"):
        there.open_bells(peer, place)
    there.close(0.0)
    with pytest.raises(PeerLostError, match="is closed"):
        here.open_bells(peer, place)
    here.close(0.0)


def test_a_board_whose_words_are_not_aligned_is_refused() -> None:
    """A GPU's stream stores whole words alone; its launch, not the bell alone, would fail."""
    here, there = ShmTransport(), ShmTransport()
    peer = here.connect(there.local_descriptor(), 5.0)
    _, place = there.bell_board(BLOCK_BYTES)
    found = msgspec.msgpack.decode(place, type=BoardPlace)
    shifted = attrs.evolve(found, place=attrs.evolve(found.place, offset=4), nbytes=found.nbytes - 8)
    with pytest.raises(TransportError, match="a board at byte 4"):
        here.open_bells(peer, pack(shifted))
    for one in (here, there):
        one.close(1.0)
