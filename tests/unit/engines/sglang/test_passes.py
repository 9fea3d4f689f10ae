"""Layers that a prefill server sends while it computes others, between small servers that behave as SGLang's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from disagg_kv.core import Phase
from disagg_kv.engines.sglang.passes import Passes
from disagg_kv.engines.sglang.rooms import Poll, SenderRoom
from disagg_kv.errors import DisaggKVError, LocalProtocolError
from disagg_kv.planning import Pace
from disagg_kv.strategies import LayerPipelined
from tests.support.processes import wait
from tests.support.rig_parts import FiredEvent
from tests.support.sglang_like import LAYERS, Prefill, Request, settled

from .conftest import Pair
from .test_rooms import ROW_BYTES, WAITS, prompt, serve

EACH: dict[str, Any] = {"schedule": LayerPipelined(fixed=1)}
"""A prefill server that sends every layer by itself."""


def groups(p: Prefill, room: SenderRoom) -> int:
    """Layer groups of the last chunk of a room."""
    assert p.passes
    return room.report.groups


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tps", [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize(("pages", "budget"), [((1, 1), 1 << 20), ((4, 1), 3), ((1, 4), 7)])
def test_rows_and_metadata_arrive_once(
    pair: Pair, tps: tuple[int, int], pages: tuple[int, int], budget: int, overlap: bool
) -> None:
    """In any chunks, which end within pages with a budget of 3 tokens; each layer is a group of its own."""
    sizes = [{"page": page, "pages": 160 // page} for page in pages]
    p, d = pair(tps, prefill={**sizes[0], **EACH, "budget": budget, "overlap": overlap}, decode=sizes[1], verify="full")
    free = len(p.free), len(d.free)
    for room, length in enumerate((1, 5, 30), 1):
        request = p.add(room, prompt(length))
        d.add(room, prompt(length))
        wait(lambda room=room: settled(p, d, room), lambda: f"{p.ended} {d.ended}")  # type: ignore[misc]
        assert (p.ended[room], d.ended[room]) == ("done", "done")
        assert [groups(p, one) for one in request.rooms] == [LAYERS] * tps[0]
        assert d.nbytes[room] == length * ROW_BYTES
    assert (len(p.free), len(d.free)) == free
    assert sorted(p.rows) == sorted(d.rows) == list(range(6))


@pytest.mark.parametrize("given", [{}, WAITS], ids=["staged", "mapped"])
def test_layers_are_sent_before_the_pass_ends(pair: Pair, given: dict[str, Any]) -> None:
    """The last layer is only computed once the first ones have been written to decode."""
    p, d = pair((2, 1), prefill=EACH, **given)
    assert serve(p, d, 1, prompt(30)) == ("done", "done")  # decode's pages are mapped from now on
    request = p.add(2, prompt(30))
    d.add(2, prompt(30))

    def sent() -> list[int]:
        d.step()
        return [room.report.nbytes for room in request.rooms]

    def until_sent(layer: int) -> None:
        if layer == LAYERS - 1:  # the attention of the last one begins, so all layers before it but one are announced
            wait(lambda: sent() == [30 * ROW_BYTES * (LAYERS - 1) // LAYERS // 2] * 2, lambda: str(sent()))

    p.before_layer = until_sent
    wait(lambda: settled(p, d, 2), lambda: f"{p.ended} {d.ended}")
    assert (p.ended[2], d.ended[2]) == ("done", "done")
    assert sent() == [30 * ROW_BYTES // 2] * 2


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page", [1, 4, 16])
def test_rows_that_decode_holds_are_no_part_of_the_pass(pair: Pair, page: int, overlap: bool) -> None:
    p, d = pair(
        (2, 1),
        prefill={**EACH, "budget": 9, "overlap": overlap},
        decode={"radix": True, "page": page, "pages": 200 // page},
    )
    first, second = prompt(40), [*prompt(40)[:33], *prompt(12, seed=1)]
    assert serve(p, d, 1, first) == ("done", "done")
    assert serve(p, d, 2, second) == ("done", "done")
    assert serve(p, d, 3, first) == ("done", "done")
    held = 33 // page * page
    assert d.nbytes == {1: 40 * ROW_BYTES, 2: (45 - held) * ROW_BYTES, 3: (40 - 40 // page * page) * ROW_BYTES}


def test_requests_of_one_pass(pair: Pair) -> None:
    """More than there are pages and metadata rows; a request that fails in a pass harms no other one of it."""
    p, d = pair((2, 1), prefill={**EACH, "budget": 5, "overlap": True})
    names = range(1, 15)
    for room in names:
        p.add(room, prompt(10 + room))
        d.add(room, prompt(10 + room, seed=int(room == 4)))
    wait(lambda: p.over(4) or d.over(4), lambda: f"{p.ended} {d.ended}")
    p.abort(4)
    wait(lambda: settled(p, d, *names), lambda: f"{p.ended} {d.ended}")
    assert {ended for name, ended in d.ended.items() if name != 4} == {"done"}
    assert "prefill's tag" in d.ended[4]


@pytest.mark.parametrize("given", [{}, WAITS], ids=["staged", "mapped"])
@pytest.mark.parametrize("seed", range(4))
def test_random_aborts(pair: Pair, seed: int, given: dict[str, Any]) -> None:
    """Rows that arrive are right, and no page is lost, whatever is aborted when."""
    draw = random.Random(seed)
    own = {**EACH, "budget": draw.choice([3, 8, 99]), "overlap": seed % 2 == 0}
    p, d = pair(draw.choice([(1, 1), (1, 2), (2, 1)]), prefill=own, **given)
    names = range(1, 31)
    for room in names:
        tokens = prompt(draw.randrange(1, 40), room)
        p.add(room, tokens)
        d.add(room, tokens)
        for _ in range(draw.randrange(6)):
            p.step()
            d.step()
            if draw.random() < 0.1:
                gone = draw.randrange(1, room + 1)
                for server in draw.sample((p, d), 2):
                    server.abort(gone)
    wait(lambda: settled(p, d, *names) and not d.held, lambda: f"{p.ended} {d.ended}")
    assert len(p.free) == len(d.free) == 39
    assert "done" in d.ended.values()


def test_a_pass_that_raises_fails_its_requests_by_name(pair: Pair) -> None:
    """Those of other passes are served, and nothing of the pass is kept."""
    p, d = pair(prefill=EACH, verify="full")

    def broken(layer: int) -> None:
        raise RuntimeError("out of memory")

    request = p.add(1, prompt(30))
    d.add(1, prompt(30))
    p.before_layer = broken
    with pytest.raises(RuntimeError, match="out of memory"):
        wait(lambda: settled(p, d, 1), lambda: f"{p.ended} {d.ended}")
    p.before_layer = lambda layer: None
    p.inflight.append(request)
    wait(lambda: settled(p, d, 1), lambda: f"{p.ended} {d.ended}")
    assert "forward pass has failed" in p.ended[1]
    assert "forward pass has failed" in d.ended[1]
    assert serve(p, d, 2, prompt(30)) == ("done", "done")
    assert len(p.free) == len(d.free) == 39


def test_a_layer_that_is_computed_in_two_parts_fails_the_requests(pair: Pair) -> None:
    """Its rows were announced as final. The pass goes on, and later ones are sent."""
    p, d = pair(prefill=EACH)
    (passes,) = p.passes
    p.add(1, prompt(30))
    d.add(1, prompt(30))

    def once_more(layer: int) -> None:
        if layer == LAYERS - 1:
            passes.layer_begins(0)
            passes.layer_begins(layer)

    p.before_layer = once_more
    wait(lambda: settled(p, d, 1), lambda: f"{p.ended} {d.ended}")
    assert "layer 0 is computed in several parts" in p.ended[1]
    p.before_layer = lambda layer: None
    assert serve(p, d, 2, prompt(30)) == ("done", "done")


def test_calls_that_use_the_rows_of_an_earlier_layer_again(pair: Pair) -> None:
    """They write none, so the layer was final before."""
    p, d = pair(prefill=EACH, verify="full")
    (passes,) = p.passes

    def again(layer: int) -> None:
        if layer == LAYERS - 1:
            for one in (0, 1, layer, 0):
                passes.layer_begins(one, writes=False)

    p.before_layer = again
    assert serve(p, d, 1, prompt(30)) == ("done", "done")


def test_an_error_that_is_not_ours_fails_requests_and_no_pass(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = pair(prefill=EACH)
    (passes,) = p.passes

    def broken(layer: int) -> None:
        raise KeyError(layer)

    monkeypatch.setattr(passes, "_next", broken)
    assert "unexpected KeyError: 0" in serve(p, d, 1, prompt(30))[0]
    assert "a forward pass cannot be sent" in caplog.text


def test_a_request_that_has_failed_on_one_rank_alone_harms_no_other_of_its_pass(pair: Pair) -> None:
    """All ranks cut the layers of a pass alike: how long it is does not depend on what a rank knows already."""
    pace = Pace(layer_token_s=1e-6, bytes_per_s=4e8, group_s=1e-4)
    p, d = pair((2, 1), prefill={"schedule": LayerPipelined(pace=pace), "pages": 2000}, decode={"pages": 2000})
    run = p._run
    failed: list[Request] = []

    def once(batch: Sequence[Request]) -> list[tuple[Request, int, bool]]:
        if len(batch) < 2 and not failed:
            return []
        for one in batch if not failed else ():
            if one.name == 1:
                failed.append(one)
                handle = one.rooms[1]._handle
                handle.abort("as decode has said so")

                def ended(handle: Any = handle) -> bool:
                    p.sides[1].endpoint.poll()
                    return handle.phase is Phase.FAILED

                wait(ended, lambda: "the failure of one rank")
        return run(batch)

    p._run = once  # type: ignore[method-assign]
    for room, length in ((1, 3000), (2, 30)):
        p.add(room, prompt(length))
        d.add(room, prompt(length))
    wait(lambda: settled(p, d, 1, 2), lambda: f"{p.ended} {d.ended}")
    assert failed
    assert (p.ended[2], d.ended[2]) == ("done", "done")
    assert "as decode has said so" in d.ended[1]


def test_several_calls_within_a_layer_are_one(pair: Pair) -> None:
    p, d = pair(prefill=EACH)
    (passes,) = p.passes
    p.before_layer = passes.layer_begins
    assert serve(p, d, 1, prompt(30)) == ("done", "done")


def test_a_pass_of_which_no_layer_is_seen_is_sent_when_it_ends(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = pair((2, 1), prefill={**EACH, "budget": 7})
    for passes in p.passes:
        monkeypatch.setattr(passes, "layer_begins", lambda layer: None)
    assert serve(p, d, 1, prompt(30)) == ("done", "done")


@pytest.mark.parametrize("seen", [LAYERS, 0])
def test_rows_wait_for_the_event_of_their_pass(pair: Pair, seen: int) -> None:
    """On a GPU a pass has not been computed when SGLang has launched it, whether or not its layers were seen."""
    p, d = pair(prefill={**EACH, "overlap": True}, verify="full")
    (passes,) = p.passes
    made: list[FiredEvent] = []

    def mark() -> FiredEvent:
        made.append(FiredEvent())
        return made[-1]

    request = p.add(1, prompt(8))
    d.add(1, prompt(8))
    (room,) = request.rooms
    wait(lambda: d.over(1) or bool(d.transfer), lambda: "decode's pages")
    wait(lambda: p.state(request) is Poll.WAITING_FOR_INPUT, lambda: "the room")
    p._finalize(request)
    p.waiting.remove(request)
    assert p.allocate(request, 8)
    with passes.computing([p.chunk(request, 0, 8)], mark):
        for layer in range(seen):
            passes.layer_begins(layer)
    for layer in range(LAYERS):
        p._write(request, layer, 0, 8)
    assert made
    assert room.report.nbytes == 0
    for event in made:
        event.fired = True
    p.results = [(request, 8, True)]
    request.results = 1
    wait(lambda: settled(p, d, 1), lambda: f"{p.ended} {d.ended}")
    assert (p.ended[1], d.ended[1]) == ("done", "done")


def test_a_retracted_request_is_computed_again(pair: Pair) -> None:
    """In other pages, after some of its rows were announced."""
    p, d = pair((2, 1), prefill={**EACH, "budget": 7, "page": 4}, verify="full")
    request = p.add(1, prompt(30))
    d.add(1, prompt(30))
    wait(lambda: d.over(1) or p.over(1) or request.computed >= 14, lambda: str(request))
    assert 14 <= request.computed < 30
    for room in request.rooms:
        room.init(8, request.row)
    pages, request.pages = request.pages, []
    assert p.allocate(request, 30)
    for array in p.caches[0]:
        for page in pages:
            array[page * 4 : page * 4 + 4] = 1
    request.computed = request.sent = 0
    wait(lambda: settled(p, d, 1), lambda: f"{p.ended} {d.ended}")
    assert (p.ended[1], d.ended[1]) == ("done", "done")


def test_rooms_that_send_nothing_are_left_out(pair: Pair) -> None:
    """One that is not begun, one that has failed; without any other there is no pass to announce."""
    p, d = pair(prefill=EACH)
    (side,), (passes,) = p.sides, p.passes

    early, failed = SenderRoom(side, 1, prompt(9)), SenderRoom(side, 2, prompt(9))
    failed.init(3, 0)
    failed.abort()
    with passes.computing([(early, 9, np.arange(3, dtype=np.int32)), (failed, 9, np.arange(3, dtype=np.int32))], None):
        passes.layer_begins(0)
        passes.layer_begins(1)
    assert early.report.groups == 0
    early.abort()
    assert serve(p, d, 3, prompt(9)) == ("done", "done")


def test_pages_that_cannot_be_fail_one_request(pair: Pair) -> None:
    p, d = pair(prefill=EACH)
    (side,), (passes,) = p.sides, p.passes
    wrong = SenderRoom(side, 9, prompt(8))
    wrong.init(2, 0)
    request = p.add(1, prompt(30))
    d.add(1, prompt(30))
    computing = passes.computing
    passes.computing = lambda chunks, mark: computing(  # type: ignore[method-assign]
        [(wrong, 8, np.array([999], np.int32)), *chunks], mark
    )
    wait(lambda: settled(p, d, 1), lambda: f"{p.ended} {d.ended}")
    assert (p.ended[1], d.ended[1]) == ("done", "done")
    assert groups(p, request.rooms[0]) == LAYERS
    assert wrong.poll() is Poll.FAILED
    with pytest.raises(DisaggKVError, match="sglang 9"):
        wrong.failure_exception()


def test_an_endpoint_that_refuses_a_pass_fails_its_requests() -> None:
    """And not SGLang's pass."""

    def refuse(rows: Any) -> None:
        raise LocalProtocolError("the endpoint is closed")

    told: list[str] = []
    room: Any = SimpleNamespace(
        id=b"1", upcoming=lambda stop, pages: (stop, []), refuse=lambda error: told.append(str(error))
    )
    endpoint: Any = SimpleNamespace(step=refuse)
    passes, ran = Passes(endpoint), []
    with passes.computing([(room, 8, np.zeros(2, np.int32))], None):
        passes.layer_begins(0)
        passes.layer_begins(1)
        ran.append(1)
    assert (told, ran) == (["the endpoint is closed"], [1])
