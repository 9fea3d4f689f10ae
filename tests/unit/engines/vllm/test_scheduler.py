"""The connector's side in vLLM's scheduler, alone: which work each event makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from disagg_kv.engines.model import prompt_tag
from disagg_kv.engines.vllm import scheduler
from disagg_kv.engines.vllm.params import Origin
from disagg_kv.engines.vllm.request import BlockGroup, rows, tag_of
from disagg_kv.engines.vllm.scheduler import SchedulerSide
from disagg_kv.engines.vllm.work import Declined, StepWork
from disagg_kv.ids import GroupId
from disagg_kv.rendezvous import Source
from tests.support.vllm_like import prompt
from tests.support.vllm_requests import BlockTables, Request, Status

A = BlockGroup(GroupId("group 0"), 0, 4, 1)
B = BlockGroup(GroupId("group 2"), 2, 4, 1)
TILES = BlockGroup(GroupId("group 0"), 0, 4, 4)
DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


def side(*groups: BlockGroup, produces: bool = True, consumes: bool = True) -> SchedulerSide:
    made = SchedulerSide("P", groups or (A,), produces=produces, consumes=consumes)
    made.meet(["inproc://0", "inproc://1"])
    return made


def build(one: SchedulerSide, request: Request, scheduled: int, *tables: list[int]) -> StepWork:
    """A step that schedules one request, which then has computed the tokens."""
    work = one.build({request.request_id: scheduled}, BlockTables({request.request_id}, {request.request_id: tables}))
    request.num_computed_tokens += scheduled
    return work


def sent(work: StepWork, name: str = "r") -> tuple[int, list[tuple[str, tuple[int, ...], int]], bool]:
    """Stop, pages and whether they are the last."""
    chunk = work.chunks[name]
    return chunk.stop, [(str(group), ids, first) for group, ids, first in chunk.pages], chunk.last


def prefill(one: SchedulerSide, count: int = 10, **params: Any) -> Request:
    request = Request("r", prompt(count), {**DECODE, **params})
    one.on_new_request(request)
    return request


def test_rows_of_tokens_become_chunks() -> None:
    one = side()
    request = prefill(one)
    assert sent(build(one, request, 3, [7])) == (3, [("group 0", (7,), 0)], False)
    assert sent(build(one, request, 3, [7, 8])) == (6, [("group 0", (7, 8), 0)], False)
    work = build(one, request, 4, [7, 8, 9])
    assert sent(work) == (10, [("group 0", (8, 9), 4)], True)
    assert work.chunks["r"].tag == prompt_tag(prompt(10))
    assert build(one, request, 1, [7, 8, 9]).chunks == {}


def test_rows_that_are_blocks_are_sent_whole_until_the_last() -> None:
    one = side(TILES)
    request = prefill(one)
    assert build(one, request, 3, [7]).chunks == {}
    assert sent(build(one, request, 3, [7, 8])) == (1, [("group 0", (7,), 0)], False)
    assert build(one, request, 1, [7, 8]).chunks == {}
    assert sent(build(one, request, 3, [7, 8, 9])) == (3, [("group 0", (8, 9), 1)], True)


@pytest.mark.parametrize(("tokens", "tiles", "whole"), [(0, 0, 0), (1, 0, 1), (4, 1, 1), (5, 1, 2), (8, 2, 2)])
def test_a_row_that_is_partly_filled_counts_at_the_end_only(tokens: int, tiles: int, whole: int) -> None:
    assert rows(tokens, TILES, whole=False) == tiles
    assert rows(tokens, TILES, whole=True) == whole
    assert rows(tokens, A, whole=False) == rows(tokens, A, whole=True) == tokens


def test_tokens_of_the_output_are_not_sent() -> None:
    """A step may compute the end of the prompt and what was generated before a preemption."""
    one = side()
    request = prefill(one, 6)
    assert sent(build(one, request, 9, [1, 2, 3])) == (6, [("group 0", (1, 2), 0)], True)


def test_a_prefix_hit_is_sent_too() -> None:
    one = side()
    request = prefill(one)
    request.num_computed_tokens = 8
    assert sent(build(one, request, 2, [3, 4, 5])) == (10, [("group 0", (3, 4, 5), 0)], True)


def test_groups_are_taken_by_their_index() -> None:
    one = side(A, B)
    request = prefill(one, 5)
    pages = sent(build(one, request, 5, [1, 2], [90, 91], [0, 4]))[1]
    assert pages == [("group 0", (1, 2), 0), ("group 2", (0, 4), 0)]


def test_requests_that_a_step_does_not_schedule_have_no_chunk() -> None:
    one = side()
    prefill(one)
    assert one.build({}, None) == StepWork(idle=True)
    assert one.build({"r": 3}, None) == StepWork()
    assert one.build({"r": 3}, BlockTables(set(), {})) == StepWork()


def test_a_preempted_request_begins_anew() -> None:
    one = side()
    request = prefill(one)
    build(one, request, 6, [1, 2])
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert one.build({"other": 1}, BlockTables({"other"}, {})).preempted == ["r"]
    assert one.build({"other": 1}, BlockTables({"other"}, {})).preempted == []
    assert sent(build(one, request, 10, [5, 6, 7])) == (10, [("group 0", (5, 6, 7), 0)], True)
    request.num_computed_tokens, request.num_preemptions = 0, 2
    work = build(one, request, 10, [1, 2, 3])
    assert work.preempted == ["r"]
    assert sent(work) == (10, [("group 0", (1, 2, 3), 0)], True)


def test_a_request_that_was_preempted_before_its_first_chunk_needs_no_withdrawal() -> None:
    one = side(TILES)
    request = prefill(one)
    build(one, request, 3, [1])
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert build(one, request, 10, [1, 2, 3]).preempted == []


def test_the_response_names_the_transfer() -> None:
    one = side()
    request = prefill(one)
    build(one, request, 10, [1, 2, 3])
    request.status, request.outputs = Status.FINISHED_LENGTH_CAPPED, 1
    keep, params = one.finished(request)
    assert keep
    assert params is not None
    assert params["first_token"] == 1
    origin = Origin.of(params)
    assert origin.source == Source("P", ("inproc://0", "inproc://1"))
    assert origin.transfer.startswith("r-")
    assert not one.pending
    one.on_results({"r"}, set())
    assert one.finished(request) == (False, None)


def test_every_transfer_of_a_request_id_has_its_own_id() -> None:
    one = side()
    first, second = (build(one, prefill(one), 10, [1, 2, 3]).chunks["r"].transfer for _ in range(2))
    assert first != second
    assert build(one, prefill(one, transfer_id="mine"), 10, [1, 2, 3]).chunks["r"].transfer == "mine"


@pytest.mark.parametrize("complete", [False, True])
def test_an_aborted_request_is_ended_on_the_ranks(complete: bool) -> None:
    one = side()
    request = prefill(one)
    build(one, request, 10 if complete else 6, [1, 2, 3])
    request.status = Status.FINISHED_ABORTED
    assert one.finished(request) == (True, None)
    assert one.pending
    assert one.build({}, None) == StepWork(aborted=["r"], idle=True)
    assert not one.pending


def test_a_request_that_ends_before_its_first_rows_is_answered() -> None:
    """Decode may know its transfer already."""
    one = side()
    request = prefill(one, transfer_id="t")
    assert one.finished(request) == (False, None)
    assert one.build({}, None) == StepWork(unsent=["t"], idle=True)
    assert one.finished(request) == (False, None)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_request_that_ends_after_a_preemption_has_a_room_to_end(steps: int) -> None:
    """Whether a step was built since the preemption or not."""
    one = side()
    request = prefill(one)
    build(one, request, 10, [1, 2, 3])
    request.num_computed_tokens, request.num_preemptions = 0, 1
    preempted = [name for _ in range(steps) for name in one.build({}, None).preempted]
    request.status = Status.FINISHED_ABORTED
    assert one.finished(request) == (True, None)
    work = one.build({}, None)
    assert preempted + work.preempted == ["r"]
    assert work.aborted == ["r"]
    assert work.unsent == []


def test_blocks_that_another_connector_loads_are_reported_once() -> None:
    """In a ``MultiConnector``: vLLM frees them with the first report, and a second one would end the engine."""
    one = side()
    request = prefill(one)
    build(one, request, 4, [1])
    request.num_computed_tokens, request.num_preemptions = 0, 1
    request.status = Status.WAITING_FOR_REMOTE_KVS
    assert one.build({}, None).preempted == ["r"]
    request.status = Status.FINISHED_ABORTED
    assert one.finished(request) == (False, None)
    assert one.build({}, None).dropped == ["r"]
    assert not one.pending


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}])
def test_other_requests_are_left_alone(params: dict[str, Any] | None) -> None:
    one = side()
    request = Request("r", prompt(4), params)
    one.on_new_request(request)
    assert one.matched_tokens(request, 0) == (0, False)
    one.on_allocated(request, ([1],), 0)
    assert build(one, request, 4, [1]) == StepWork()
    assert one.finished(request) == (False, None)
    assert not one.pending


def test_an_instance_has_only_its_own_role() -> None:
    one = side(produces=False)
    request = prefill(one)
    assert build(one, request, 10, [1, 2, 3]) == StepWork()
    one = side(consumes=False)
    request = remote()
    assert one.matched_tokens(request, 0) == (0, False)
    one.on_allocated(request, ([1, 2, 3],), 10)
    assert one.finished(request) == (False, None)
    assert not one.pending


def test_a_transfer_id_that_is_no_text_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    one = side()
    prefill(one, transfer_id=4)
    assert "transfer_id 4 is no text" in caplog.text
    assert one.build({"r": 4}, BlockTables({"r"}, {"r": ([1],)})) == StepWork()


# Decode.

ORIGIN = Origin("t", Source("P", ("inproc://0",)))


def remote(**wrong: Any) -> Request:
    return Request("d", prompt(10), {**ORIGIN.params(), **wrong})


@pytest.mark.parametrize(("computed", "expected"), [(0, (10, True)), (8, (2, True)), (10, (0, False))])
def test_what_decode_lacks_is_awaited(computed: int, expected: tuple[int, bool]) -> None:
    assert side().matched_tokens(remote(), computed) == expected


def test_a_prompt_is_hashed_once_however_long_it_waits_for_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM asks in each step what such a request lacks."""
    hashed: list[str] = []

    def counted(request: Request) -> bytes | None:
        hashed.append(request.request_id)
        return tag_of(request)

    monkeypatch.setattr(scheduler, "tag_of", counted)
    one, request = side(), remote()
    one.on_new_request(request)
    assert {one.matched_tokens(request, 0) for _ in range(50)} == {(10, True)}
    one.on_allocated(request, ([7, 8, 9],), 10)
    work = one.build({}, BlockTables({"d"}, {"d": ([7, 8, 9],)}))
    assert work.loads["d"].tag == prompt_tag(prompt(10))
    assert hashed == ["d"]


@pytest.mark.parametrize(
    ("group", "lacking", "stop", "pages", "held"),
    [
        (A, 10, 10, ((7, 8, 9), 0), {}),
        (A, 2, 10, ((9,), 8), {GroupId("group 0"): 8}),
        (TILES, 10, 3, ((7, 8, 9), 0), {}),
        (TILES, 6, 3, ((8, 9), 1), {GroupId("group 0"): 1}),
        (A, 3, 10, ((8, 9), 4), {GroupId("group 0"): 7}),
        (TILES, 5, 3, ((8, 9), 1), {GroupId("group 0"): 1}),
    ],
)
def test_a_load_names_its_pages(
    group: BlockGroup, lacking: int, stop: int, pages: tuple[tuple[int, ...], int], held: dict[GroupId, int]
) -> None:
    one = side(group)
    request = remote()
    one.on_allocated(request, ([7, 8, 9],), lacking)
    load = one.build({}, None).loads["d"]
    assert (load.origin, load.stop, load.tag) == (ORIGIN, stop, prompt_tag(prompt(10)))
    assert load.pages == ((group.id, *pages),)
    assert load.held == held


def test_the_call_after_the_load_does_nothing() -> None:
    one = side()
    request = remote()
    one.on_allocated(request, ([7, 8, 9],), 10)
    one.build({}, None)
    one.on_results(set(), {"d"})
    assert one.matched_tokens(request, 0) == (0, False)
    one.on_allocated(request, ([7, 8, 9],), 0)
    assert one.finished(request) == (False, None)
    assert not one.pending


def test_rows_that_decode_has_are_declined() -> None:
    one = side()
    request = remote()
    one.on_allocated(request, ([7, 8, 9],), 0)
    assert one.pending
    assert one.build({"d": 1}, None) == StepWork(declined=[Declined(ORIGIN, prompt_tag(prompt(10)))])
    assert one.finished(request) == (False, None)


@pytest.mark.parametrize("lacking", [0, 10])
def test_params_that_were_changed_are_refused(lacking: int) -> None:
    """The request waits for its refusal, if it waits at all."""
    one = side()
    request = remote(instance="")
    one.on_allocated(request, ([7, 8, 9],), lacking)
    work = one.build({}, None)
    assert work.loads == {}
    assert work.declined == []
    assert list(work.refused) == (["d"] if lacking else [])
    assert not lacking or "instance" in str(work.refused["d"])


def test_a_request_that_is_aborted_while_it_waits() -> None:
    one = side()
    request = remote()
    one.on_allocated(request, ([7, 8, 9],), 10)
    one.build({}, None)
    assert one.finished(request) == (False, None)
    assert one.build({}, None) == StepWork(aborted=["d"], idle=True)


def test_a_request_that_ends_before_it_has_blocks_is_declined() -> None:
    one = side()
    request = remote()
    assert one.finished(request) == (False, None)
    assert one.build({}, None) == StepWork(declined=[Declined(ORIGIN, b"")], idle=True)
    assert one.finished(request) == (False, None)
    assert not one.pending


def test_a_request_with_changed_params_that_ends_early_harms_nothing() -> None:
    one = side()
    assert one.finished(remote(transfer_id=None)) == (False, None)
    assert not one.pending


def test_a_tag_names_what_the_rows_depend_on() -> None:
    """Two images of one size have the same tokens."""

    def image(name: str | None, identifier: str = "i", offset: int = 1) -> SimpleNamespace:
        at = SimpleNamespace(offset=offset)
        return SimpleNamespace(modality="image", mm_hash=name, identifier=identifier, mm_position=at)

    def tag(**other: Any) -> bytes | None:
        return tag_of(Request("r", prompt(9), None, **other))

    adapter = SimpleNamespace(lora_name="a")
    tags = [
        tag(), tag(lora_request=adapter), tag(mm_features=[image("a")]), tag(mm_features=[image("b")]),
        tag(mm_features=[image("a", offset=2)]), tag(mm_features=[image(None)]), tag(mm_features=[image(None, "j")]),
    ]  # fmt: skip
    assert len(set(tags)) == len(tags)
    assert tag(mm_features=[image("a", "adapter i")]) == tags[2]
    assert tag(prompt_embeds=object()) is None
    assert tag_of(Request("r", None, None)) is None


def test_a_prompt_with_embeddings_is_computed_by_decode() -> None:
    one = side()
    named, unnamed = (Request(name, None, {**DECODE, "transfer_id": of}) for name, of in (("r", "t"), ("s", None)))
    one.on_new_request(named)
    one.on_new_request(unnamed)
    assert one.build({}, None) == StepWork(unsent=["t"], idle=True)
    request = remote()
    request.prompt_embeds = object()
    assert one.matched_tokens(request, 0) == (0, False)
    one.on_allocated(request, ([1, 2, 3],), 0)
    assert one.build({}, None) == StepWork(declined=[Declined(ORIGIN, b"")], idle=True)


def test_transfers_that_were_loaded_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_LOADED", 2)
    one = side()
    for number in range(3):
        first = remote(transfer_id=f"t{number}")
        one.on_allocated(first, ([1, 2, 3],), first.num_prompt_tokens)
    again = [remote(transfer_id=f"t{number}") for number in range(3)]
    for request in again:
        request.request_id = "e"
    assert [one.matched_tokens(request, 0)[1] for request in again] == [True, False, False]
    one.build({}, None)
    one.finished(again[1])
    assert not one.pending, "the transfer is not declined"


class Clock:
    """Time that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


def test_requests_are_announced_once_they_have_been_queued_for_long() -> None:
    """Decode's once for each transfer, and prefill's only if decode can know the transfer."""
    clock = Clock()
    one = SchedulerSide("P", (A,), produces=True, consumes=True, clock=clock)
    for name in ("d", "sibling"):
        one.on_new_request(Request(name, prompt(10), ORIGIN.params()))
    one.on_new_request(Request("p", prompt(10), {**DECODE, "transfer_id": "given"}))
    one.on_new_request(Request("q", prompt(10), dict(DECODE)))
    assert one.build({}, None) == StepWork(idle=True)
    clock.now += scheduler.QUEUED_S
    tag = prompt_tag(prompt(10))
    assert one.build({}, None) == StepWork(queued=[ORIGIN], early={"p": ("given", tag)}, idle=True)
    clock.now += scheduler.QUEUED_S
    assert one.build({}, None) == StepWork(idle=True)


def test_a_queued_request_that_gets_its_blocks_or_ends_is_taken_back() -> None:
    clock = Clock()
    one = SchedulerSide("P", (A,), produces=True, consumes=True, clock=clock)
    requests = [
        Request("d", prompt(10), ORIGIN.params()),
        Request("e", prompt(10, 1), {**ORIGIN.params(), "transfer_id": "u"}),
    ]
    for request in requests:
        one.on_new_request(request)
    clock.now += scheduler.QUEUED_S
    assert len(one.build({}, None).queued) == 2
    one.on_allocated(requests[0], ([1, 2, 3],), 10)
    one.finished(requests[1])
    work = one.build({}, None)
    assert work.left == [ORIGIN.transfer, "u"]
    assert one.build({}, None) == StepWork(idle=True)


def test_a_request_that_waits_only_shortly_is_not_announced() -> None:
    clock = Clock()
    one = SchedulerSide("P", (A,), produces=True, consumes=True, clock=clock)
    request = Request("d", prompt(10), ORIGIN.params())
    one.on_new_request(request)
    one.on_allocated(request, ([1, 2, 3],), 10)
    clock.now += 10 * scheduler.QUEUED_S
    work = one.build({}, None)
    assert (list(work.loads), work.queued, work.left) == (["d"], [], [])
