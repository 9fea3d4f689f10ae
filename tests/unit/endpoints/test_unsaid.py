"""Decode has all rows, and ends in any way before prefill's engine has said that it is done: both have succeeded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from attrs import evolve

from disagg_kv.core import Alone, Elected, Options, Phase
from disagg_kv.endpoints import Incarnation
from disagg_kv.transports import Process
from tests.support.device_copies import SPEC, DeviceKernels
from tests.support.rig import Request, Rig, tp_shards

ROWS = 12
PATHS = ("staged", "slice", "mapped", "flags")
RANKS = ((1, 1), (2, 1), (1, 2))
SOON = Options(silence_s=4.0, closed_s=0.5)


def close(rig: Rig, request: Request) -> None:
    """In a process that lives on."""
    for decode in request.decodes:
        decode.close()


def crash(rig: Rig, request: Request) -> None:
    """The process is killed."""
    for decode in request.decodes:
        decode.crash()


def replace(rig: Rig, request: Request) -> None:
    """Another process takes its address."""
    crash(rig, request)
    rig.decodes = []
    rig.decode(tp_shards(SPEC, len(request.decodes)))


def forget(rig: Rig, request: Request) -> None:
    """It meets another prefill instance, and its table of peers has no place for both."""
    tables = [decode.endpoint._loop.peers for decode in request.decodes]
    before = [set(table.epochs()) for table in tables]
    others = rig.prefill(tp_shards(SPEC, len(request.prefills)), "other", strategy=request.receives[0].report.path)
    rig.request("other", others, request.decodes, ROWS, of="other").start(ROWS).released()
    for table, known in zip(tables, before, strict=True):
        assert len(known - set(table.epochs())) == len(request.prefills)
    rig.prefills = [*request.prefills]


def placed(path: str, ranks: tuple[int, int], verdict: type[Alone] | type[Elected]) -> tuple[Rig, Request]:
    """A room of which decode has all rows, and has told its engine so; prefill has looked for nothing since then."""
    rig, kernels = Rig(SPEC, options=SOON), DeviceKernels()
    named = "mapped" if path == "flags" else path
    few = evolve(SOON, peers=ranks[0] + ranks[1] - 1)
    prefills = rig.prefill(
        tp_shards(SPEC, ranks[0]), strategy=named, verdict=verdict, slot_bytes=512,
        kernels=kernels if path == "flags" else None,
    )  # fmt: skip
    decodes = rig.decode(tp_shards(SPEC, ranks[1]), strategy=named, verdict=verdict, options=few)
    request = rig.request("room", prefills, decodes, ROWS).open_decode().expect(ROWS).open_prefill()
    rig.until(lambda: {h.phase for h in request.handles} == {Phase.READY, Phase.MOVING}, "the room")
    rig.wait(0.3)
    request.send(4).send(ROWS, 4)
    if path == "flags":
        rig.until(lambda: sum(len(copy.moves) for copy in kernels.queued) == 2 * ranks[0] * ranks[1], "the launches")
        kernels.finish()
        rig.prefills = []
    rig.until(lambda: all(handle.phase is Phase.DONE and handle.released for handle in request.receives), "the rows")
    rig.prefills = [*prefills]
    return rig, request


def ends_early(
    path: str,
    end: Callable[[Rig, Request], None],
    ranks: tuple[int, int] = (1, 1),
    verdict: type[Alone] | type[Elected] = Elected,
) -> None:
    """Decode ends some steps after it has all rows; prefill's engine finishes the room a second later."""
    for between in range(4):
        rig, request = placed(path, ranks, verdict)
        for _ in range(between):
            rig.turn()
        end(rig, request)
        rig.wait(1.0)
        assert {handle.phase for handle in request.sends} == {Phase.MOVING}, request.errors()
        request.finish()
        rig.wait(1.0)
        assert request.all(Phase.DONE), request.errors()
        request.done()
        for prefill in rig.prefills:
            assert (prefill.endpoint.open_rooms, prefill.endpoint.usage().slots_used) == (0, 0)


@pytest.mark.parametrize("verdict", [Elected, Alone])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("end", [close, crash, replace, forget])
@pytest.mark.parametrize("path", PATHS)
def test_prefill_succeeds_although_decode_ends_before_the_room_is_finished(
    path: str,
    end: Callable[[Rig, Request], None],
    ranks: tuple[int, int],
    verdict: type[Alone] | type[Elected],
) -> None:
    ends_early(path, end, ranks, verdict)


def test_prefill_succeeds_although_one_decode_rank_ends_before_another_one_has_its_rows() -> None:
    """With ``Alone``; with ``Elected`` the first one has to wait for the other."""
    rig = Rig(SPEC, options=SOON)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="staged", verdict=Alone)
    first, second = rig.decode(tp_shards(SPEC, 2), strategy="staged", verdict=Alone)
    request = rig.request("room", prefills, [first, second], ROWS).open_decode().expect(ROWS).open_prefill()
    rig.until(lambda: {h.phase for h in request.handles} == {Phase.READY, Phase.MOVING}, "the room")
    second.frozen = True
    request.send(ROWS)
    rig.until(lambda: request.receives[0].phase is Phase.DONE, "the rows of the first rank")
    first.close()
    rig.wait(1.0)
    second.frozen = False
    rig.until(lambda: request.receives[1].phase is Phase.DONE, "the rows of the second rank")
    request.finish().landed()


@pytest.mark.parametrize("end", [close, crash, replace])
def test_a_room_that_prefill_gives_up_after_decode_has_it_and_has_ended_is_forgotten(
    end: Callable[[Rig, Request], None],
) -> None:
    """Decode says nothing more, and has nothing to drain."""
    rig, request = placed("staged", (1, 1), Alone)
    (prefill,) = request.prefills
    end(rig, request)
    rig.wait(4 * SOON.silence_s)
    request.sends[0].abort("the engine needs it no more")
    rig.until(lambda: request.sends[0].released, "the release")
    rig.wait(2 * SOON.silence_s)
    assert prefill.endpoint.open_rooms == 0


class Exit:
    """How a process ends, for those who watch it."""

    over = False

    def ended(self, *, at_once: bool = False) -> bool:
        """Whether it has."""
        return self.over


@pytest.mark.parametrize("stays", ["prefill", "decode"])
def test_what_a_process_has_said_before_its_observed_end_counts(stays: str) -> None:
    """Although its end is noticed first, by a call of the engine that stays."""
    rig, seen = Rig(SPEC, options=SOON), Exit()
    lives = Incarnation(watch=lambda process: seen), Incarnation(process=evolve(Process.own(), pid=2))
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="slice", life=lives[stays == "decode"])
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="slice", life=lives[stays == "prefill"])
    request = rig.request("room", prefills, decodes, ROWS).open_decode().expect(ROWS).open_prefill()
    rig.until(lambda: request.sends[0].phase is Phase.READY, "the room")
    rig.wait(0.3)
    request.send(ROWS)
    (prefill,), (decode,), (send,), (receive,) = prefills, decodes, request.sends, request.receives
    if stays == "prefill":
        rig.turn()
        prefill.frozen = True
        rig.until(lambda: receive.phase is Phase.DONE, "the rows")
    else:
        decode.frozen = True
        rig.wait(0.3)
    prefill.frozen, decode.frozen = stays == "decode", stays == "prefill"
    seen.over = True
    if stays == "prefill":
        request.finish()
    else:
        rig.request("next", prefills, decodes, ROWS).open_decode()
    rig.turn()
    handle = send if stays == "prefill" else receive
    assert (handle.phase, handle.error, handle.released) == (Phase.DONE, None, True)
