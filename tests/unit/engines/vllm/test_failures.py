"""What fails harms one request, is reported once per rank, and frees its blocks on both sides."""

from __future__ import annotations

import time
from typing import Any

import pytest

from disagg_kv.core import Options
from disagg_kv.endpoints import Delivery, room_id
from disagg_kv.endpoints.prefill.handle import DeliveryHandle
from disagg_kv.engines.vllm import worker
from disagg_kv.engines.vllm.work import StepWork
from disagg_kv.engines.vllm.worker import WorkerSide
from disagg_kv.errors import EndpointBrokenError, QuarantineFullError
from disagg_kv.ids import RoomId
from tests.support.processes import wait
from tests.support.rig_parts import FiredEvent
from tests.support.vllm_like import Engine, FullAttentionSpec, Model, Pair, prefilled, prompt, run
from tests.support.vllm_requests import Status

SHORT = Options(silence_s=0.3, total_s=0.5, heartbeat_s=0.05, closed_s=0.2, retry_s=0.02)
"""For requests that can only fail by time."""


def origin(p: Engine, transfer: str = "t", **other: Any) -> dict[str, Any]:
    """As a router gives it that knows the id of a transfer before prefill runs."""
    return {
        "do_remote_prefill": True, "transfer_id": transfer, "instance": "P", "addresses": p.addresses, **other
    }  # fmt: skip


def computed(d: Engine, name: str) -> bool:
    """Whether a decode instance has computed a prompt itself, since its rows did not come."""
    return name in d.not_loaded and name not in d.loaded and name in d.params


@pytest.mark.parametrize(
    ("wrong", "codes"),
    [
        ({"transfer_id": "unknown"}, {"deadline", "aborted"}),
        ({"instance": "Q"}, {"incompatible_peer"}),
        ({"addresses": ["inproc://none", "inproc://none-either"]}, {"peer_lost", "aborted"}),
    ],
    ids=["room", "instance", "addresses"],
)
def test_rows_that_nothing_sends_are_reported_as_failed(pair: Pair, wrong: dict[str, Any], codes: set[str]) -> None:
    """``aborted``: the other rank has failed first."""
    p, d = pair((2, 2), decode={"options": SHORT})
    d.decode("d", prompt(9), {**origin(p), **wrong})
    run(p, d)
    assert computed(d, "d")
    assert d.reports == {("received", "d"): 2}
    ((code, count),) = d.ranks[0].counters.take()["load_failed"].items()
    assert (code in codes, count) == (True, 1)
    d.check_quiet()


@pytest.mark.parametrize("tps", [(2, 1), (1, 2)])
def test_another_request_is_not_taken_for_this_one(pair: Pair, tps: tuple[int, int]) -> None:
    """The router has mixed up two responses: the tags of the prompts differ. Prefill waits for the other request."""
    p, d = pair(tps, options=Options(claim_s=0.5))
    d.decode("d", prompt(9, 1), prefilled(p, "p", prompt(9, 2)))
    run(p, d, until=lambda: d.idle)
    assert computed(d, "d")
    assert p.reports == {}
    run(p, d)
    assert p.reports == {("sent", "p"): tps[0]}
    assert p.ranks[0].counters.take() == {"sent_failed": {"aborted": 1}}
    p.check_quiet()
    d.check_quiet()


def test_a_transfer_is_used_once(pair: Pair) -> None:
    """Several requests of one prompt name one transfer, as vLLM's ``n`` makes them: the first gets the rows."""
    p, d = pair((2, 2))
    p.prefill("p", prompt(9), "t")
    p.prefill("again", prompt(9), "t")
    d.decode("d", prompt(9), origin(p))
    d.decode("e", prompt(9), origin(p))
    d.decode("aborted", prompt(9), origin(p))
    d.step()
    d.abort("aborted")
    run(p, d)
    d.decode("late", prompt(9), origin(p))
    run(p, d)
    assert d.loaded == ["d"]
    assert d.not_loaded == [], "the others compute the prompt"
    assert d.params.keys() == {"d", "e", "aborted", "late"}
    assert p.reports == {("sent", "p"): 2}
    p.check_quiet()
    d.check_quiet()


@pytest.mark.parametrize("over", [False, True], ids=["live", "over"])
@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2)])
def test_a_transfer_id_that_a_router_uses_for_two_prompts(pair: Pair, tps: tuple[int, int], over: bool) -> None:
    """The second prompt is computed by decode, whether the first transfer goes on or is over."""
    p, d = pair(tps, options=Options(claim_s=0.5))
    p.prefill("p", prompt(9, 1), "t")
    d.decode("d", prompt(9, 1), origin(p))
    if over:
        run(p, d)
    p.prefill("q", prompt(9, 2), "t")
    d.decode("e", prompt(9, 2), origin(p))
    run(p, d)
    assert d.loaded == ["d"]
    assert computed(d, "e")
    p.check_quiet()
    d.check_quiet()


def test_a_rejected_request_frees_the_blocks_of_prefill(pair: Pair) -> None:
    """VLLM announces it by a stand-in with one token, which it has aborted already."""
    p, d = pair(options=Options(claim_s=60.0))
    rejected = prefilled(p, "p", prompt(9))
    d.decode("d", [0], rejected)
    d.abort("d")
    run(p, d, within_s=20.0)
    assert p.ranks[0].counters.take() == {"sent_failed": {"aborted": 1}}
    p.check_quiet()


def test_a_request_for_both_that_is_aborted_while_it_is_loaded(pair: Pair) -> None:
    p, d = pair()
    d.submit("d", prompt(9), {**origin(p), "do_remote_decode": True})
    d.step()
    d.abort("d")
    run(p, d, within_s=20.0)
    assert d.reports["received", "d"] == 1
    d.check_quiet()


def test_a_response_that_no_router_gets_has_no_params(pair: Pair) -> None:
    p, _ = pair()
    p.prefill("p", prompt(9))
    p.step()
    p._end(p.requests["p"], Status.FINISHED_ERROR)
    run(p)
    assert p.params["p"] is None
    p.check_quiet()


def test_a_transfer_that_could_not_be_opened_stays_so(pair: Pair) -> None:
    """Chunks, preemption and abort of a request whose transfer id was used before are reported once."""
    p, d = pair((2, 1), prefill={"budget": 8})
    d.decode("d", prompt(7), prefilled(p, "p", prompt(7), transfer="t"))
    run(p, d)
    p.prefill("again", prompt(30), "t")
    p.step()
    p.step()
    p.preempt("again")
    p.step()
    p.step()
    p.abort("again")
    run(p, d)
    assert d.loaded == ["d"]
    assert p.reports == {("sent", "p"): 2, ("sent", "again"): 2}
    p.check_quiet()


@pytest.mark.parametrize("transfer", ["x" * 256, "\u4e00" * 256], ids=["ascii", "wide"])
def test_every_id_that_params_take_names_a_room(pair: Pair, transfer: str) -> None:
    """VLLM's own request ids may be long, too: a router's header is a part of them."""
    p, d = pair()
    d.decode("d", prompt(9), prefilled(p, "p", prompt(9), transfer=transfer))
    run(p, d)
    assert d.loaded == ["d"]


def test_a_decode_request_that_is_aborted_while_it_waits(pair: Pair) -> None:
    """It is reported all the same: only then does vLLM free its blocks. Prefill frees its own ones too."""
    p, d = pair((2, 1), prefill={"budget": 4})
    d.decode("d", prompt(9), origin(p))
    d.step()
    p.prefill("p", prompt(9), "t")
    p.step()
    d.abort("d")
    run(p, d)
    assert d.reports == {("received", "d"): 1}
    assert d.loaded == []
    assert p.reports == {("sent", "p"): 2}
    p.check_quiet()
    d.check_quiet()


def test_a_decode_request_that_is_aborted_before_it_was_scheduled(pair: Pair) -> None:
    """Prefill frees the blocks at once, not when the transfer's time is over."""
    p, d = pair((1, 2))
    d.decode("d", prompt(9), prefilled(p, "p", prompt(9)))
    d.abort("d")
    run(p, d)
    assert d.reports == {}
    p.check_quiet()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_prefill_request_that_is_aborted(pair: Pair, steps: int) -> None:
    """Before its first rows, between chunks, or after the last one: decode need not wait for the time limit."""
    p, d = pair((2, 1), prefill={"budget": 4, "max_tokens": 2})
    d.decode("d", prompt(12), origin(p))
    d.step()
    p.prefill("p", prompt(12), "t")
    for _ in range(steps):
        p.step()
    p.abort("p")
    run(p, d)
    assert p.params["p"] is None
    assert computed(d, "d") or (steps == 3 and d.loaded == ["d"])
    p.check_quiet()
    d.check_quiet()


@pytest.mark.parametrize("build", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_preempted_prefill_request_that_is_aborted(pair: Pair, steps: int, build: bool) -> None:
    """It has no blocks any more, yet its room is open: it ends, and the report comes while vLLM has the request."""
    p, d = pair((2, 1), prefill={"budget": 4, "max_tokens": 2})
    p.prefill("p", prompt(12), "t")
    for _ in range(steps):
        p.step()
    p.preempt("p")
    if build:  # the step that preempts computes another request
        p.prefill("other", prompt(4, 1))
        p.waiting.reverse()
        p.step()
    p.abort("p")
    d.decode("d", prompt(12), origin(p))
    run(p, d, until=lambda: "p" not in p.requests and d.idle)
    assert not p.params["p"]
    assert computed(d, "d")
    assert p.reports["sent", "p"] == 2


def test_a_request_whose_params_were_changed_is_refused(pair: Pair) -> None:
    p, d = pair((1, 2))
    d.decode("d", prompt(9), origin(p, transfer_id=7))
    d.decode("e", prompt(9), prefilled(p, "p", prompt(9)))
    run(p, d)
    assert computed(d, "d")
    assert d.loaded == ["e"]
    assert d.reports == {("received", "d"): 2, ("received", "e"): 2}
    d.check_quiet()


def test_a_refused_request_that_is_aborted(pair: Pair) -> None:
    p, d = pair()
    d.decode("d", prompt(9), origin(p, transfer_id=7))
    d.schedule()
    d.abort("d")
    run(d)
    assert d.reports == {("received", "d"): 1}
    d.check_quiet()


def test_one_load_that_cannot_begin_harms_no_other_one(pair: Pair) -> None:
    """A bug of the engine: a block of one request appears twice in its table."""
    p, d = pair()
    d.decode("bad", prompt(9), prefilled(p, "p", prompt(9)))
    d.decode("good", prompt(9, 1), prefilled(p, "q", prompt(9, 1)))
    work = d.build(d.schedule())
    group, ids, first = work.loads["bad"].pages[0]
    object.__setattr__(work.loads["bad"], "pages", ((group, ids[:1] * len(ids), first),))
    d.ranks[0].begin(work)
    run(p, d)
    assert computed(d, "bad")
    assert d.loaded == ["good"]
    p.check_quiet()
    d.check_quiet()


def test_one_chunk_that_cannot_be_sent_harms_no_other_one(pair: Pair) -> None:
    """The same on prefill, in a forward pass over several requests."""
    p, d = pair()
    d.decode("d", prompt(9), origin(p, "bad"))
    d.decode("e", prompt(9), origin(p, "good"))
    p.prefill("bad", prompt(9), "bad")
    p.prefill("good", prompt(9, 0), "good")
    scheduled = p.schedule()
    work = p.build(scheduled)
    group, ids, first = work.chunks["bad"].pages[0]
    object.__setattr__(work.chunks["bad"], "pages", ((group, ids[:1] * len(ids), first),))
    p.execute([work], scheduled)
    run(p, d)
    assert computed(d, "d")
    assert d.loaded == ["e"]
    p.check_quiet()
    d.check_quiet()


def test_a_prefill_endpoint_that_is_closed_ends_its_requests(pair: Pair) -> None:
    """The rows of a pass can be announced, but not be closed; new requests are reported once they have ended."""
    p, _ = pair()
    p.prefill("p", prompt(9), "t")
    scheduled = p.schedule()
    work = p.build(scheduled)
    p.ranks[0].begin(work)
    p.senders[0].close()
    p.ranks[0].end()
    p.execute([StepWork()], scheduled)
    p.prefill("q", prompt(9), "u")
    run(p)
    assert p.reports == {("sent", "p"): 1, ("sent", "q"): 1}
    p.check_quiet()


def test_a_broken_endpoint_ends_its_rank(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer may still read or write its pages, so no request is reported, and no preemption goes on."""
    p, d = pair()
    d.decode("d", prompt(9), origin(p))
    d.step()
    p.prefill("p", prompt(30), "u")
    p.budget = 8
    p.step()
    for endpoint in (p.senders[0], d.receivers[0]):
        monkeypatch.setattr(endpoint.driver.loop.side, "integrity_failure", lambda error: _raise())
        endpoint.driver.loop.post(_raise)
    wait(lambda: p.senders[0].driver.broken is not None, lambda: "prefill to break")
    wait(lambda: d.receivers[0].driver.broken is not None, lambda: "decode to break")
    with pytest.raises(EndpointBrokenError):
        p.ranks[0].preempt(StepWork(preempted=["p"]))
    for engine in (p, d):
        with pytest.raises(EndpointBrokenError):
            engine.step()
    assert not p.reports
    assert not d.reports


class Fires:
    """An event of a device, which fires when the test sets it."""

    def __init__(self) -> None:
        self.fired = False

    def query(self) -> bool:
        """Whether the work before it is done."""
        return self.fired

    def synchronize(self) -> None:
        """Not used here."""
        raise NotImplementedError


def test_rows_are_sent_after_the_event_that_follows_their_computation(pair: Pair) -> None:
    """On a GPU the forward pass goes on when the engine's thread has left it: the rows come late."""
    p, d = pair((1, 2))
    event = Fires()
    p.ranks[0] = WorkerSide(p.senders[0], None, {}, lambda: event)
    p.prefill("p", prompt(9), "t")
    p.step()
    rows = {name: tensor.clone() for name, tensor in p.tensors[0].items()}
    for tensor in p.tensors[0].values():
        tensor.zero_()
    d.decode("d", prompt(9), origin(p))
    run(p, d, until=lambda: p.ranks[0]._outgoing["p"].delivery.held is not None)
    for _ in range(10):
        d.step()
    assert d.not_loaded == []
    for name, tensor in p.tensors[0].items():
        tensor.copy_(rows[name])
    event.fired = True
    run(p, d)
    assert d.loaded == ["d"]


def test_a_preemption_returns_once_nothing_reads_the_pages(pair: Pair) -> None:
    """VLLM gives them to another request in the same step, so the endpoint must have taken the withdrawal."""
    p, _ = pair(prefill={"budget": 4})
    p.prefill("p", prompt(9), "t")
    p.step()
    taken: list[str] = []

    def busy() -> None:
        time.sleep(0.05)  # a withdrawal that is not awaited would be taken after this
        taken.append("all before the withdrawal")

    p.senders[0].driver.loop.post(busy)
    p.ranks[0].preempt(StepWork(preempted=["p"]))
    assert taken


def test_a_preemption_does_not_wait_for_a_peer_for_ever(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network may read blocks until the peer says that it does not, and that peer may be silent."""
    p, d = pair(prefill={"budget": 4})
    d.decode("d", prompt(9), origin(p))
    p.prefill("p", prompt(9), "t")
    for engine in (d, p):
        engine.step()
    monkeypatch.setattr(worker, "PREEMPT_S", 0.1)
    monkeypatch.setattr(DeliveryHandle, "withdraw", lambda handle: FiredEvent())
    with pytest.raises(EndpointBrokenError, match="peers still read blocks of preempted requests"):
        p.ranks[0].preempt(StepWork(preempted=["p"]))
    monkeypatch.undo()


@pytest.mark.parametrize("broken", [False, True])
def test_a_request_that_one_rank_cannot_open_harms_no_other_of_its_pass(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """All ranks cut the layers of a pass alike, by the tokens of all its requests."""
    model = Model(groups=((FullAttentionSpec, tuple(range(8)), None),))
    p, d = pair((2, 1), model, blocks=1200, block=16, prefill={"strategy": "staged+layer_pipelined"})
    opens = p.senders[1].open

    def some(room: RoomId, **given: Any) -> Delivery:
        if broken and room == room_id("one"):
            raise QuarantineFullError("as asked for")
        return opens(room, **given)

    monkeypatch.setattr(p.senders[1], "open", some)
    d.decode("e", prompt(4000, 2), origin(p, "two"))
    d.step()
    p.prefill("p", prompt(100, 1), "one")
    p.prefill("q", prompt(4000, 2), "two")
    run(p, d, until=lambda: "e" in [*d.loaded, *d.not_loaded])
    assert d.loaded == ["e"]
    p.abort("p")


def test_a_device_that_gives_no_event_fails_the_requests_of_the_pass(pair: Pair) -> None:
    """Those whose prompt goes on in a later step, too."""
    p, d = pair((1, 2), prefill={"budget": 8})
    p.ranks[0] = WorkerSide(p.senders[0], None, {}, _raise)
    d.decode("d", prompt(4), origin(p, "one"))
    d.decode("e", prompt(9), origin(p, "two"))
    p.prefill("p", prompt(4), "one")
    p.prefill("q", prompt(9), "two")
    run(p, d)
    assert computed(d, "d")
    assert computed(d, "e")
    assert p.reports == {("sent", "p"): 1, ("sent", "q"): 1}
    p.check_quiet()


def _raise() -> Any:
    raise ValueError("a bug")
