"""Final records: bells end rooms whose end decode does not know, that have aux data, or recurrent states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from disagg_kv.core import Options, Phase
from disagg_kv.endpoints.decode.ballots import ALONE
from disagg_kv.endpoints.peers.mapping import BLOCK, BLOCK_BYTES
from disagg_kv.geometry import CacheSpec, Component
from disagg_kv.memory import new_buffer
from disagg_kv.transports import InprocTransport, ShmTransport
from disagg_kv.transports import bells as boards
from disagg_kv.transports.bells import AUX_BYTES, SLOT_WORDS, WORD, Final, HostBells, words_of
from tests.support.rig import Memory, Request, Rig, tp_shards

SPEC = CacheSpec.kv(2, 4, 8, "float16")
HYBRID = CacheSpec.uniform(2, (Component("k", "int8", 4, 8), Component("ssm", "int8", 4, 6, tokens_per_row=0, rows=3)))
ROWS = 9


def scene(
    *,
    writers: int = 1,
    stop: int | None = None,
    aux: int | None = None,
    spec: CacheSpec = SPEC,
    memory: Memory | None = None,
    options: Options | None = None,
    least: int = 0,
    full: bool = False,
) -> tuple[Rig, Request]:
    """A room whose ranks know each other, and of which nothing was sent yet. Aux row 1 of each writer has its own data.

    Args:
        writers: prefill ranks.
        stop: what decode knows of the end.
        aux: decode's aux row; None: it awaits none.
        spec: the cache.
        memory: of all ranks.
        options: of all ranks.
        least: rows that decode needs, where it does not know the end.
        full: decode's aux rows take nothing.
    """
    rig, of = Rig(spec, options=options or Options()), memory or Memory()
    prefills = rig.prefill(tp_shards(spec, writers), memory=of, strategy="mapped")
    decodes = rig.decode(tp_shards(spec, 1), memory=of, strategy="mapped")
    for number, member in enumerate(prefills):
        member.pool.write_aux(1, data_of(number, of.aux_bytes))
    if full:
        decodes[0].pool.write_aux = _full  # type: ignore[method-assign]
    request = rig.request("final", prefills, decodes, ROWS)
    request.open_decode().expect(stop, aux=aux, least=least).open_prefill()
    rig.until(lambda: phase(request) is Phase.MOVING, "every rank to have opened it")
    rig.wait(0.3)
    return rig, request


def _full(slot: int, data: bytes) -> None:
    raise OSError("no space left")


def data_of(rank: int, nbytes: int) -> bytes:
    """The aux data of a prefill rank."""
    return bytes((rank + 1 + i) % 251 for i in range(nbytes))


def phase(request: Request) -> Phase:
    """What decode's engine sees; a call, because each look may find another phase."""
    return request.receives[0].phase


def turn_prefill(request: Request, turns: int = 4) -> None:
    """Prefill's threads go on alone: no frame reaches decode's."""
    for _ in range(turns):
        for member in request.prefills:
            member.endpoint.driver.step()


def settle(rig: Rig, request: Request, *, bells: bool) -> None:
    """All ranks go on, and the room ends well."""
    request.landed()
    assert [handle.error for handle in request.handles] == [None] * len(request.handles)
    assert request.receives[0].report.bells == bells
    rig.quiet()


@pytest.mark.parametrize("transport", [InprocTransport, ShmTransport])
@pytest.mark.parametrize("aux", [None, 1, 8, AUX_BYTES, AUX_BYTES + 1])
@pytest.mark.parametrize("stop", [None, ROWS])
def test_the_engine_knows_before_the_endpoint_s_thread(
    transport: Callable[[], InprocTransport], aux: int | None, stop: int | None
) -> None:
    """With the aux data in their row. Longer ones come by frames."""
    memory = Memory(transport=transport, aux_bytes=aux or 8)
    rig, request = scene(stop=stop, aux=None if aux is None else 2, memory=memory)
    request.send(ROWS)
    turn_prefill(request)
    assert phase(request) is (Phase.DONE if (aux, stop) == (None, ROWS) else Phase.MOVING), "nothing says where it ends"
    request.finish(aux=None if aux is None else 1)
    turn_prefill(request)
    rung = aux is None or aux <= AUX_BYTES
    assert phase(request) is (Phase.DONE if rung else Phase.MOVING)
    if rung:
        request.wanted(0, ROWS)
        rig.check()
        report = request.receives[0].report
        assert (report.segments, report.nbytes) == (1, ROWS * 2 * 2 * 4 * 8 * 2)
    if aux is not None:
        found = request.decodes[0].pool.read_aux(2)
        assert found == (data_of(0, aux) if rung else bytes(aux))
    settle(rig, request, bells=rung)
    assert aux is None or request.decodes[0].pool.read_aux(2) == data_of(0, aux)
    rig.close()


def test_longer_aux_data_have_no_final_record() -> None:
    rig, request = scene(stop=ROWS, aux=2, memory=Memory(aux_bytes=AUX_BYTES + 1))
    request.send(ROWS).finish(aux=1)
    turn_prefill(request)
    assert phase(request) is Phase.MOVING
    settle(rig, request, bells=False)
    assert request.decodes[0].pool.read_aux(2) == data_of(0, AUX_BYTES + 1)
    assert request.prefills[0].observer.counters["bells.refused"] == 0


def test_aux_data_may_have_no_bytes() -> None:
    """Which is not the same as none."""
    rig, request = scene(aux=2)
    request.decodes[0].pool.write_aux(2, b"\xff" * 8)
    request.prefills[0].pool.read_aux = lambda slot: b""  # type: ignore[method-assign]
    request.send(ROWS).finish(aux=1)
    turn_prefill(request)
    assert phase(request) is Phase.DONE
    assert request.decodes[0].pool.read_aux(2) == bytes(8)
    settle(rig, request, bells=True)


def test_states_ring_as_rows_do() -> None:
    """And all of both are needed."""
    rig, request = scene(stop=ROWS, spec=HYBRID)
    request.send(ROWS)
    turn_prefill(request)
    assert phase(request) is Phase.MOVING, "its states have not landed"
    request.finish()
    turn_prefill(request)
    assert phase(request) is Phase.DONE
    request.wanted(0, ROWS)
    rig.check()
    assert request.receives[0].report.segments == 2
    settle(rig, request, bells=True)


def test_all_writers_have_to_say_how_the_room_ends() -> None:
    """The aux data of the first of them count, whichever comes first."""
    rig, request = scene(writers=8, aux=2)
    request.send(ROWS)
    turn_prefill(request)
    for member, handle in reversed(list(zip(request.prefills, request.sends, strict=True))):
        assert phase(request) is Phase.MOVING
        handle.finish(ROWS, aux=1)
        member.endpoint.driver.step()
    assert phase(request) is Phase.DONE
    assert request.decodes[0].pool.read_aux(2) == data_of(0, 8)
    settle(rig, request, bells=True)


@pytest.mark.parametrize("aux", [2, None])
def test_prefill_s_last_word_is_answered_after_the_bells(aux: int | None) -> None:
    """Prefill's room goes on to its end, though decode's has none left; also where decode wanted no aux data."""
    rig, request = scene(stop=ROWS, aux=aux)
    request.send(ROWS)
    if aux is not None:
        request.finish(aux=1)
    turn_prefill(request)
    assert phase(request) is Phase.DONE
    rig.until(lambda: request.receives[0].released, "decode's end")
    if aux is None:
        request.finish(aux=1)
    settle(rig, request, bells=True)


def test_what_cannot_be_stored_is_left_to_the_frames() -> None:
    """The engine does not see the room done without its aux data; the room fails with the pool's error."""
    rig, request = scene(stop=ROWS, aux=2, full=True)
    request.send(ROWS).finish(aux=1)
    turn_prefill(request)
    assert phase(request) is Phase.MOVING
    request.failed()
    assert "aux data could not be stored: no space left" in str(request.receives[0].error)
    rig.quiet()


def test_aux_data_are_not_stored_once_the_endpoint_s_thread_was_first() -> None:
    """An event that has failed the room: its row is not written any more."""
    _, request = scene(stop=ROWS, aux=2)
    (room,) = request.decodes[0].endpoint.inspect().rooms.values()
    watch = room.watch
    assert watch is not None
    request.send(ROWS).finish(aux=1)
    turn_prefill(request)
    claims = watch._claims
    assert watch.hold()
    watch._claims = claims  # the engine's thread was at the beginning of its look
    assert not watch.complete()
    assert request.decodes[0].pool.read_aux(2) == bytes(8)
    watch.offer(ALONE)
    assert watch.complete()
    assert request.decodes[0].pool.read_aux(2) == data_of(0, 8)


def test_the_endpoint_s_thread_does_not_store_what_the_engine_has_stored() -> None:
    """The engine may have taken the row's data, and written others there."""
    rig, request = scene(stop=ROWS, aux=2)
    request.send(ROWS).finish(aux=1)
    turn_prefill(request)
    assert phase(request) is Phase.DONE
    request.decodes[0].pool.write_aux(2, b"its own")
    settle(rig, request, bells=True)
    assert request.decodes[0].pool.read_aux(2) == b"its own\0"


FORGED: dict[str, Final] = {
    "beyond its pages": (1 << 40, b"x"),
    "too early": (ROWS - 1, b"x"),
    "no aux data": (ROWS, None),
    "too much": (ROWS, bytes(9)),
}


@pytest.mark.parametrize("what", [*FORGED, "too many bytes", "other aux data"])
def test_a_forged_final_record_does_no_more_than_a_forged_frame(what: str) -> None:
    """What cannot be is not heard; the room ends by its frames."""
    rig, request = scene(aux=2, least=ROWS)
    (room,) = request.decodes[0].endpoint.inspect().rooms.values()
    ((slot, count, value),) = room.bells
    (peer,) = request.prefills[0].endpoint.inspect().rooms.values()
    bells = next(iter(peer.routes.values())).bells
    assert isinstance(bells, HostBells)
    request.send(ROWS)
    turn_prefill(request)
    bells.ring_final(slot + count, value + count, FORGED.get(what, (ROWS, b"x")))
    words = words_of(bells.buffer)
    at = (slot + count) * SLOT_WORDS
    if what == "too many bytes":
        words[at + 2] = AUX_BYTES + 1
    elif what == "other aux data":
        words[at + SLOT_WORDS] += 1
    assert phase(request) is Phase.MOVING
    request.finish(aux=1)
    settle(rig, request, bells=False)
    assert request.decodes[0].pool.read_aux(2) == data_of(0, 8)


def test_a_final_record_proves_nothing_of_rows() -> None:
    """It may come before the segments of its writer."""
    rig, request = scene(writers=2)
    (room,) = request.decodes[0].endpoint.inspect().rooms.values()
    slot, count, value = room.bells[1]
    peer = next(iter(request.prefills[1].endpoint.inspect().rooms.values()))
    bells = next(iter(peer.routes.values())).bells
    assert isinstance(bells, HostBells)
    request.send(ROWS).finish()
    for _ in range(4):
        request.prefills[0].endpoint.driver.step()
    assert phase(request) is Phase.MOVING
    bells.ring_final(slot + count, value + count, (ROWS, None))
    assert phase(request) is Phase.MOVING
    turn_prefill(request)
    assert phase(request) is Phase.DONE
    settle(rig, request, bells=True)


def test_writers_that_end_a_room_at_different_rows_are_refused_by_their_frames() -> None:
    """One record is forged; what its frame says is not contradicted by anything."""
    rig, request = scene(writers=2)
    (room,) = request.decodes[0].endpoint.inspect().rooms.values()
    slot, count, value = room.bells[1]
    peer = next(iter(request.prefills[1].endpoint.inspect().rooms.values()))
    bells = next(iter(peer.routes.values())).bells
    assert isinstance(bells, HostBells)
    bells.ring_final(slot + count, value + count, (ROWS - 1, None))
    request.send(ROWS).finish()
    turn_prefill(request)
    assert phase(request) is Phase.MOVING
    settle(rig, request, bells=False)


def test_a_late_store_among_aux_data_is_no_record() -> None:
    """Nor is a record that lacks its value, or has another one."""
    board = new_buffer(BLOCK_BYTES, "cpu")
    bells, words = HostBells(board), words_of(board)
    for number, word in enumerate((1, 2, 3, 6, SLOT_WORDS, SLOT_WORDS + 4), 1):
        bells.ring_final(BLOCK, number, (ROWS, bytes(range(33, 73))))
        assert boards.heard_final(words, BLOCK, number) == (ROWS, bytes(range(33, 73)))
        before, words[BLOCK * SLOT_WORDS + word] = words[BLOCK * SLOT_WORDS + word], 7
        assert boards.heard_final(words, BLOCK, number) is None, word
        words[BLOCK * SLOT_WORDS + word] = before
        assert boards.heard_final(words, BLOCK, number) is not None
    assert boards.heard_final(words, BLOCK, 5) is None


class Changing:
    """Words of which the first one changes as soon as aux data are copied."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def __getitem__(self, at: int) -> int:
        return int(self._words[at])

    def cast(self, code: str) -> memoryview:
        self._words[BLOCK * SLOT_WORDS] += 1
        return self._words.cast("B")


def test_a_value_that_changes_during_a_look_is_no_record() -> None:
    board = new_buffer(BLOCK_BYTES, "cpu")
    HostBells(board).ring_final(BLOCK, 5, (ROWS, b"aux"))
    changing: Any = Changing(words_of(board))
    assert boards.heard_final(changing, BLOCK, 5) is None
    assert board.nbytes == BLOCK_BYTES >= (BLOCK + 1) * SLOT_WORDS * WORD + AUX_BYTES
