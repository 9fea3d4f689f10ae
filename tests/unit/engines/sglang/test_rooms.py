"""Requests between two small servers that call the plug-in in SGLang's order."""

from __future__ import annotations

import json
import random
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from disagg_kv.core import Options, Phase
from disagg_kv.engines.sglang import bootstrap, rooms
from disagg_kv.engines.sglang.options import SGLangOptions
from disagg_kv.engines.sglang.rooms import Poll, ReceiverRoom, SenderRoom
from disagg_kv.engines.sglang.side import Side
from disagg_kv.errors import ConfigurationError, EndpointBrokenError, RemoteProtocolError, UnsupportedError
from disagg_kv.rendezvous import Source
from tests.support.processes import wait
from tests.support.rig_parts import FiredEvent
from tests.support.sglang_like import BOOTSTRAP, DIM, LAYERS, Decode, Prefill, settled

from .conftest import Pair

ROW_BYTES = LAYERS * 2 * 4 * DIM * 2
WAITS: dict[str, Any] = {"strategy": SGLangOptions().names(exposes=True), "defers": True}
"""A server that keeps the pages of failed requests until nothing writes to them."""


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{length} {seed}")
    return [draw.randrange(3, 500) for _ in range(length)]


def serve(prefill: Prefill, decode: Decode, room: int, tokens: list[int], computed: int = 0) -> tuple[str, str]:
    """A request as a router sends it: to both servers at once."""
    prefill.add(room, tokens, computed)
    decode.add(room, tokens)
    wait(lambda: settled(prefill, decode, room), lambda: f"{prefill.ended} {decode.ended}")
    return prefill.ended[room], decode.ended[room]


@pytest.mark.parametrize("tps", [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("pages", [(1, 1), (4, 4), (4, 1), (1, 4)])
@pytest.mark.parametrize("budget", [7, 1 << 20])
def test_rows_and_metadata_arrive(pair: Pair, tps: tuple[int, int], pages: tuple[int, int], budget: int) -> None:
    """Whatever the page sizes of both sides; a budget of 7 tokens makes chunks that end within pages."""
    sizes = [{"page": page, "pages": 160 // page} for page in pages]
    p, d = pair(tps, prefill={**sizes[0], "budget": budget}, decode=sizes[1], verify="full")
    free = len(p.free), len(d.free)
    for room, length in enumerate((1, 4, 5, 30), 1):
        assert serve(p, d, room, prompt(length)) == ("done", "done")
    assert (len(p.free), len(d.free)) == free
    assert sorted(p.rows) == sorted(d.rows) == list(range(6))


@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2)])
def test_replicated_heads_and_latents(pair: Pair, tps: tuple[int, int]) -> None:
    for given in ({"latent": True}, {"heads": 1}):
        p, d = pair(tps, **given)
        assert serve(p, d, 1, prompt(21)) == ("done", "done")


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2)])
def test_rows_in_decodes_radix_cache_are_not_sent(pair: Pair, tps: tuple[int, int], page: int) -> None:
    """Prefill's pages have 4 tokens, so it begins within decode's prefix; the bytes are those of the suffix."""
    p, d = pair(tps, decode={"radix": True, "page": page, "pages": 200 // page}, budget=9)
    first, second = prompt(40), [*prompt(40)[:33], *prompt(12, seed=1)]
    assert serve(p, d, 1, first) == ("done", "done")
    assert serve(p, d, 2, second, computed=20) == ("done", "done")
    held = 33 // page * page
    assert d.nbytes == {1: 40 * ROW_BYTES, 2: (45 - held) * ROW_BYTES}


def test_decode_holds_the_whole_prompt(pair: Pair) -> None:
    """Only the metadata row crosses."""
    p, d = pair(decode={"radix": True})
    assert serve(p, d, 1, prompt(24)) == ("done", "done")
    assert serve(p, d, 2, prompt(24)) == ("done", "done")
    assert d.nbytes[2] == 0


def test_requests_in_flight_together(pair: Pair) -> None:
    """More than there are pages and metadata rows."""
    p, d = pair((2, 1), budget=5)
    names = range(1, 15)
    for room in names:
        p.add(room, prompt(10 + room))
        d.add(room, prompt(10 + room))
    wait(lambda: settled(p, d, *names), lambda: f"{p.ended} {d.ended}")
    assert {*p.ended.values(), *d.ended.values()} == {"done"}


def test_a_room_that_is_used_twice_is_refused_by_name(pair: Pair) -> None:
    p, d = pair()
    assert serve(p, d, 7, prompt(9)) == ("done", "done")
    for ended in (p.ended, d.ended):
        ended.clear()
    of_prefill, of_decode = serve(p, d, 7, prompt(9))
    assert "sglang 7" in of_prefill
    assert "was used already" in of_prefill
    assert "was used already" in of_decode


@pytest.mark.parametrize(
    ("prefill", "message"),
    [({"model": b"another"}, "model"), ({"heads": 8}, "units"), ({"latent": True}, "latent")],
)
def test_another_model_is_refused_by_name(pair: Pair, prefill: dict[str, object], message: str) -> None:
    p, d = pair(prefill=prefill)
    p.add(1, prompt(9))
    d.add(1, prompt(9))

    def over() -> bool:
        p.step()
        d.step()
        return 1 in d.ended

    wait(over, lambda: str(d.ended))
    assert message in d.ended[1]
    p.abort(1)
    wait(lambda: p.over(1), lambda: str(p.ended))


def test_the_failure_of_a_rank_is_that_of_all(pair: Pair) -> None:
    """``FAILED`` is the lowest state, so the other rank has to stop before its pages are freed."""
    p, d = pair((2, 2), budget=4)
    p.add(1, prompt(30))
    request = d.add(1, prompt(30))
    wait(lambda: settled(p, d, 1) or bool(d.transfer), lambda: "the transfer")
    request.rooms[1].abort()
    wait(lambda: settled(p, d, 1), lambda: f"{p.ended} {d.ended}")
    assert "SGLang has ended the request" in d.ended[1]
    assert len(p.free) == len(d.free) == 39


def test_what_another_engine_sends_to_a_server_that_does_not_wait_is_staged(pair: Pair) -> None:
    """Also if prefill could write into pages: decode exposes none, as SGLang frees them without waiting."""
    ours, other = {"strategy": SGLangOptions().names(exposes=False)}, {"strategy": "auto+incremental"}
    p, d = pair((2, 1), decode=ours, prefill=other, verify="full")
    assert paths_of(p, d, 3) == ["staged"] * 3


def paths_of(p: Prefill, d: Decode, count: int) -> list[str]:
    """The paths of some requests, one after another."""
    found = []
    for number in range(1, count + 1):
        p.add(number, prompt(30, number))
        (receiver,) = d.add(number, prompt(30, number)).rooms
        wait(lambda number=number: settled(p, d, number), lambda: f"{p.ended} {d.ended}")  # type: ignore[misc]
        assert (p.ended[number], d.ended[number]) == ("done", "done")
        assert receiver._handle is not None
        found.append(receiver._handle.report.path)
    return found


@pytest.mark.parametrize("pages", [(4, 4), (4, 1), (1, 4)])
def test_prefill_copies_into_the_pages_of_a_server_that_waits(pair: Pair, pages: tuple[int, int]) -> None:
    """Once each prefill rank has said that it has mapped decode's pool; before that it is staged."""
    sizes = [{"page": page, "pages": 160 // page} for page in pages]
    p, d = pair((2, 1), prefill=sizes[0], decode=sizes[1], verify="full", **WAITS)
    found = paths_of(p, d, 6)
    assert found[-1] == "mapped"
    assert set(found) <= {"staged", "mapped"}


def test_pages_of_a_failed_request_are_kept_until_nothing_writes_to_them(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is reported at once, on all ranks; the scheduler never waits."""
    p, d = pair((1, 2), **WAITS)
    p.add(1, prompt(30))
    request = d.add(1, prompt(30))
    wait(lambda: settled(p, d, 1) or bool(d.transfer), lambda: "the transfer")
    pages, late = list(request.pages), [Late(), Late()]
    for room, one in zip(request.rooms, late, strict=True):
        monkeypatch.setattr(room, "_handle", one)
    for one in late:
        one.phase = Phase.DONE
    d.step()
    assert 1 not in d.ended, "a room is no failure because its pages are not released yet"
    d.abort(1)
    late[0].phase = Phase.FAILED
    d.step()
    assert "SGLang has ended the request" in d.ended[1]
    assert [len(side.kept) for side in d.sides] == [1, 1]
    for one in late:
        d.step()
        assert not set(pages) & set(d.free)
        one.released = True
    d.step()
    assert set(pages) <= set(d.free)
    assert [len(side.kept) for side in d.sides] == [0, 0]


def test_a_failed_room_keeps_its_pages_until_nothing_writes_to_them() -> None:
    """SGLang sees the failure at once, and asks for the pages in each step."""
    endpoint: Any = SimpleNamespace(closed=False, poll=list)
    side, late = Side(endpoint, 4, defers=True), Late()
    room = ReceiverRoom(side, BOOTSTRAP, 1)
    room._handle, late.phase = late, Phase.FAILED  # type: ignore[assignment]
    assert room.poll() is Poll.FAILED
    room.ensure_abort_notified(force_arm=True)
    assert room.abort_notified
    assert not side.free(1)
    late.released = True
    assert side.free(1)


class Late:
    """Of a room that a peer may still write to."""

    def __init__(self) -> None:
        self.released, self.phase, self.error = False, Phase.MOVING, None

    def abort(self, reason: str) -> None:
        """Without an answer yet."""


def test_a_rank_that_only_waits_for_another_one_keeps_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own pages are free: SGLang keeps them as long as the other rank's, so that all ranks admit the same."""
    p, d = pair((1, 2), **WAITS)
    p.add(1, prompt(30))
    request = d.add(1, prompt(30))
    wait(lambda: settled(p, d, 1) or bool(d.transfer), lambda: "the transfer")
    late, over = Late(), Late()
    late.phase, over.released = Phase.FAILED, True
    monkeypatch.setattr(request.rooms[0], "_handle", late)
    monkeypatch.setattr(request.rooms[1], "_handle", over)
    d.step()
    assert [room.abort_notified for room in request.rooms] == [True, False]
    assert len(d.held) == 1
    late.released = True
    d.step()
    assert not d.held


def test_a_request_comes_from_the_data_parallel_rank_that_has_it(pair: Pair) -> None:
    """Each is an instance of its own; a rank that there is not is refused by name."""
    p, d = pair()
    (side,) = d.sides
    side.directory._places[BOOTSTRAP] = bootstrap._Place((Source("sglang other", ("inproc://other-0",)), p.source))
    p.add(1, prompt(20))
    request = d.add(1, prompt(20))
    d.pending.clear()
    request.rooms[0].init(1)
    wait(lambda: settled(p, d, 1), lambda: f"{p.ended} {d.ended}")
    assert (p.ended[1], d.ended[1]) == ("done", "done")
    for rank in (2, -1):
        room = ReceiverRoom(side, BOOTSTRAP, 5)
        room.init(rank)
        assert room.poll() is Poll.FAILED
        with pytest.raises(RemoteProtocolError, match=f"has 2 data-parallel ranks, not rank {rank}"):
            room.failure_exception()


def test_two_prompts_of_one_length_in_one_room_are_told_apart(pair: Pair) -> None:
    """Decode's request fails by name; the prompt that prefill has in that room waits for its own decode request."""
    p, d = pair()
    p.add(1, prompt(30, 1))
    d.add(1, prompt(30, 2))
    wait(lambda: d.over(1), lambda: str(d.ended))
    assert "prefill's tag" in d.ended[1]
    p.abort(1)
    wait(lambda: p.over(1), lambda: str(p.ended))
    assert serve(p, d, 2, prompt(30)) == ("done", "done")


@pytest.mark.parametrize("given", [{}, WAITS], ids=["staged", "waits"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("steps", range(8))
def test_aborts_at_any_time_free_all_pages(pair: Pair, side: str, steps: int, given: dict[str, Any]) -> None:
    p, d = pair((2, 1), budget=4, **given)
    p.add(1, prompt(30))
    d.add(1, prompt(30))
    for _ in range(steps):
        p.step()
        d.step()
    (p if side == "prefill" else d).abort(1)
    if not steps:
        (d if side == "prefill" else p).abort(1)  # the sides have not met
    wait(lambda: settled(p, d, 1), lambda: f"{p.ended} {d.ended}")
    assert serve(p, d, 2, prompt(20)) == ("done", "done")
    wait(lambda: settled(p, d) and not d.held, lambda: str(d.held))
    assert len(p.free) == len(d.free) == 39
    assert len(p.rows) == len(d.rows) == 6


@pytest.mark.parametrize("given", [{}, WAITS], ids=["staged", "waits"])
@pytest.mark.parametrize("seed", range(4))
def test_random_aborts(pair: Pair, seed: int, given: dict[str, Any]) -> None:
    """Rows that arrive are right, and no page is lost, whatever is aborted when."""
    draw = random.Random(seed)
    p, d = pair(draw.choice([(1, 1), (1, 2), (2, 1)]), budget=draw.choice([3, 8, 99]), **given)
    names = range(1, 31)
    alive: list[int] = []
    for room in names:
        tokens = prompt(draw.randrange(1, 40), room)
        p.add(room, tokens)
        d.add(room, tokens)
        alive.append(room)
        for _ in range(draw.randrange(6)):
            p.step()
            d.step()
            if draw.random() < 0.1:
                gone = draw.choice(alive)
                for server in draw.sample((p, d), 2):  # a client that goes away does so on both
                    server.abort(gone)
    wait(lambda: settled(p, d, *names) and not d.held, lambda: f"{p.ended} {d.ended}")
    assert len(p.free) == len(d.free) == 39
    assert "done" in d.ended.values()


def test_prefill_that_is_gone_is_asked_for_once_more(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted prefill server has another name, at the same bootstrap server. The same answer is believed."""
    asked: list[str] = []
    p, d = pair(options=Options(closed_s=0.2))
    side = d.sides[0]
    assert serve(p, d, 1, prompt(9)) == ("done", "done")
    for one in p.sides:
        one.close()
    wait(lambda: side._doubts(p.source), lambda: str(side.endpoint.peers()))
    assert side.directory.get(BOOTSTRAP) == (p.source,), "SGLang's scheduler relies on what it has seen in this step"

    def ask(address: str, method: str) -> bytes:
        asked.append(address)
        return answer(p.source)

    monkeypatch.setattr(bootstrap, "_ask", ask)
    d.add(2, prompt(9))
    wait(lambda: d.over(2), lambda: str(d.ended))
    assert asked == [BOOTSTRAP]
    assert not side.directory.get(BOOTSTRAP)
    wait(lambda: side.ensure(BOOTSTRAP), lambda: "the answer")
    assert side.directory.get(BOOTSTRAP) == (p.source,)


def answer(source: Source) -> bytes:
    """Of a bootstrap server."""
    return json.dumps({"instance": source.instance, "addresses": list(source.addresses)}).encode()


@pytest.mark.parametrize("pages", [(1, 1), (4, 4), (1, 16)])
def test_a_shorter_prompt_on_prefill_is_refused(pair: Pair, pages: tuple[int, int]) -> None:
    """By one token, within a page too: decode would read rows that were never written. A longer one has no pages.

    Where the tokens of both sides are not compared, as with images.
    """
    sizes = [{"page": page, "pages": 160 // page} for page in pages]
    p, d = pair(prefill=sizes[0], decode=sizes[1])
    p.compares = False
    p.add(1, prompt(29))
    d.add(1, prompt(30))
    wait(lambda: settled(p, d, 1), lambda: f"{p.ended} {d.ended}")
    assert "ends at row 29; decode needs 30 or more" in d.ended[1]
    p.add(2, prompt(60))
    d.add(2, prompt(30))
    wait(lambda: settled(p, d, 2), lambda: f"{p.ended} {d.ended}")
    assert "rows 0-60 outside 0-3" in d.ended[2]
    assert serve(p, d, 3, prompt(30)) == ("done", "done")


def test_a_prompt_of_unknown_length_is_refused(pair: Pair) -> None:
    p, d = pair()
    p.add(1, prompt(9))
    room = ReceiverRoom(d.sides[0], BOOTSTRAP, 1)
    room.init(0)
    room.send_metadata(np.array([4, 5, 6], np.int32), 0)
    wait(lambda: room.poll() is Poll.FAILED, lambda: str(room.poll()))
    with pytest.raises(UnsupportedError, match="has not told which prompt"):
        room.failure_exception()
    wait(lambda: p.over(1), lambda: str(p.ended))


def test_rows_wait_for_decodes_forward_pass(pair: Pair) -> None:
    """A pass in flight may still write to the pages of a request that has ended, which the next one gets."""
    p, d = pair()
    passes: list[FiredEvent] = []

    def busy() -> FiredEvent:
        passes.append(FiredEvent())
        return passes[-1]

    d.busy = busy
    p.add(1, prompt(9))
    d.add(1, prompt(9))
    wait(lambda: settled(p, d, 1) or bool(p.inflight), lambda: "the chunk")
    before = [array.copy() for array in d.caches[0]]
    for _ in range(50):
        assert not settled(p, d, 1)
    assert all(np.array_equal(*both) for both in zip(before, d.caches[0], strict=True))
    passes[0].fired = True
    wait(lambda: settled(p, d, 1), lambda: f"{p.ended} {d.ended}")
    assert (p.ended[1], d.ended[1]) == ("done", "done")
    assert len(passes) == 1


def test_another_instance_at_an_address_is_asked_for(pair: Pair) -> None:
    """Prefill was started again at its address before a request of the earlier one has succeeded."""
    p, d = pair()
    side = d.sides[0]
    earlier = Source("sglang earlier", p.source.addresses)
    side.directory._places[BOOTSTRAP] = bootstrap._Place((earlier,))
    d.add(1, prompt(9))
    wait(lambda: d.over(1), lambda: str(d.ended))
    assert "sglang earlier" in d.ended[1]
    assert not side.directory.get(BOOTSTRAP)
    d.knows(p)
    assert serve(p, d, 2, prompt(9)) == ("done", "done")


def test_an_abort_before_the_instance_is_known_ends_the_room_on_prefill(pair: Pair) -> None:
    """SGLang aborts the receiver, and calls ``init`` in the same step when the bootstrap server has answered."""
    p, d = pair()
    p.add(1, prompt(9))
    room = ReceiverRoom(d.sides[0], BOOTSTRAP, 1)
    room.abort()
    room.init(0)
    wait(lambda: p.over(1), lambda: str(p.ended))
    assert "SGLang has ended the request" in p.ended[1]
    assert room.poll() is Poll.FAILED
    assert serve(p, d, 2, prompt(20)) == ("done", "done")


def test_a_broken_endpoint_ends_its_server(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still read or write pages, so no request is reported: SGLang ends with the error."""
    p, d = pair()
    p.add(1, prompt(9))
    d.add(1, prompt(9))

    def broken() -> None:
        raise EndpointBrokenError("it cannot go on")

    for server in (p, d):
        monkeypatch.setattr(server.sides[0].endpoint, "poll", broken)
        with pytest.raises(EndpointBrokenError):
            wait(partial(server.over, 1), lambda: "an error")


def test_a_room_that_sglang_forgets_early_is_ended(pair: Pair) -> None:
    p, d = pair()
    sender = SenderRoom(p.sides[0], 1)
    sender.clear()
    wait(lambda: sender.poll() is Poll.FAILED, lambda: str(sender.poll()))
    ReceiverRoom(d.sides[0], BOOTSTRAP, 1).clear()


def test_copies_that_do_not_end_are_logged(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rows of a chunk are final at an event that comes late; the pages are not free before."""
    monkeypatch.setattr(rooms, "SLOW_S", 0.01)
    p, _ = pair()
    sender = SenderRoom(p.sides[0], 1)
    handle = sender._handle
    assert handle is not None

    class Slow(Late):
        def abort(self, reason: str) -> None:
            """Released a moment later."""
            threading.Timer(0.1, lambda: setattr(self, "released", True)).start()

    late = Slow()
    monkeypatch.setattr(sender, "_handle", late)
    sender.abort()
    assert late.released
    assert "room 1: copies of its pages have not ended" in caplog.text
    handle.abort("the test is over")


def test_rows_wait_for_sglangs_event(pair: Pair) -> None:
    """SGLang gives one where an earlier pass may still write; else the plug-in marks the stream."""
    p, d = pair()
    marks: list[FiredEvent] = []

    def mark() -> FiredEvent:
        marks.append(FiredEvent())
        return marks[-1]

    p.sides[0].mark = mark
    request = p.add(1, prompt(9))
    early = FiredEvent()
    request.rooms[0]._early_send_wait_event = early
    d.add(1, prompt(9))
    wait(lambda: settled(p, d, 1) or bool(p.inflight), lambda: "the chunk")
    for _ in range(50):
        assert not settled(p, d, 1)
    assert not marks
    early.fired = True
    wait(lambda: settled(p, d, 1), lambda: f"{p.ended} {d.ended}")
    p.add(2, prompt(9))
    d.add(2, prompt(9))
    wait(lambda: settled(p, d, 2) or bool(marks), lambda: "the mark")
    marks[0].fired = True
    wait(lambda: settled(p, d, 2), lambda: f"{p.ended} {d.ended}")
    assert len(marks) == 1


def test_a_request_that_prefill_would_compute_again_is_refused(pair: Pair) -> None:
    _, d = pair()
    room = ReceiverRoom(d.sides[0], BOOTSTRAP, 1)
    room.refuse(UnsupportedError("not supported"))
    assert room.poll() is Poll.FAILED
    with pytest.raises(UnsupportedError):
        room.failure_exception()


def test_no_bootstrap_server_is_named(pair: Pair) -> None:
    _, d = pair()
    address = "127.0.0.1:1"
    room = ReceiverRoom(d.sides[0], address, 5)
    assert room.poll() is Poll.BOOTSTRAPPING
    directory = d.sides[0].directory
    wait(lambda: directory.ensure(address) or directory.problem(address) is not None, lambda: address)
    room.abort()
    assert room.poll() is Poll.FAILED
    with pytest.raises(Exception, match=f"bootstrap server {address} does not answer"):
        room.failure_exception()
    assert room.report.nbytes == 0
    room.init(0)
    unknown = ReceiverRoom(d.sides[0], address, 6)
    unknown.init(0)
    with pytest.raises(Exception, match=f"no prefill instance at bootstrap server {address}"):
        unknown.failure_exception()


def test_a_request_that_cannot_be_sent_fails_alone(pair: Pair) -> None:
    """Pages out of range are a bug of an engine; the scheduler must not see an exception."""
    p, d = pair()
    p.add(1, prompt(9))
    request = d.add(1, prompt(9))
    wait(lambda: settled(p, d, 1) or bool(p.inflight) or bool(p.waiting) or bool(d.transfer), lambda: "the transfer")
    other = ReceiverRoom(d.sides[0], "127.0.0.1:8998", 2)
    other.asked(prompt(8), None)
    other.init(0)
    other.send_metadata(np.array([4, 4], np.int32), 99)
    wait(lambda: other.poll() is Poll.FAILED, lambda: str(other.poll()))
    with pytest.raises(ConfigurationError, match="2"):
        other.failure_exception()
    assert request.rooms[0].report.nbytes >= 0
    wait(lambda: settled(p, d, 1), lambda: f"{p.ended} {d.ended}")
    assert d.ended[1] == "done"


def test_a_retracted_request_is_sent_again_from_other_pages(pair: Pair) -> None:
    p, d = pair(budget=8)
    request = p.add(1, prompt(30))
    d.add(1, prompt(30))
    wait(lambda: settled(p, d, 1) or request.sent > 0, lambda: "the first chunk")
    p.waiting.remove(request)
    row, request.row = request.row, -1
    assert request.rooms[0].poll() in (Poll.TRANSFERRING, Poll.WAITING_FOR_INPUT)
    request.rooms[0].init(8, row)
    p.give_back(request)
    request.row, request.computed, request.sent = row, 0, 0
    p.waiting.append(request)
    wait(lambda: settled(p, d, 1), lambda: f"{p.ended} {d.ended}")
    assert (p.ended[1], d.ended[1]) == ("done", "done")


def test_a_closed_endpoint_fails_its_rooms(pair: Pair) -> None:
    p, d = pair()
    p.add(1, prompt(9))
    d.add(1, prompt(9))
    p.sides[0].close()
    p.step()
    assert "failed" in p.ended[1]
    sender = SenderRoom(p.sides[0], 2)
    assert sender.poll() is Poll.FAILED
    sender.send(None, None)  # type: ignore[arg-type]
    d.sides[0].close()
    wait(lambda: d.over(1), lambda: str(d.ended))


def test_the_endpoint_advances_once_however_many_requests_sglang_polls(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of them ends first, and whichever SGLang polls first."""
    p, _ = pair()
    side = p.sides[0]
    rooms = [SenderRoom(side, number) for number in range(1, 6)]
    advanced: list[None] = []
    monkeypatch.setattr(side.endpoint, "poll", lambda: advanced.append(None))
    for _ in range(3):
        for room in rooms:
            room.poll()
    assert len(advanced) in (2, 3)
    for room in rooms[1:3]:
        room.abort()
    advanced.clear()
    for _ in range(4):
        for room in (rooms[4], rooms[0], rooms[3]):
            room.poll()
    assert 3 <= len(advanced) <= 5
    advanced.clear()
    for _ in range(4):
        rooms[0].poll()
    assert len(advanced) == 4


def test_room_0_is_refused_by_name(pair: Pair) -> None:
    """SGLang would wait for its metadata row for ever."""
    p, d = pair()
    of_prefill, of_decode = serve(p, d, 0, prompt(9))
    assert "bootstrap_room 0" in of_prefill
    assert "bootstrap_room 0" in of_decode
