"""Requests that wait in an engine's queue: ``claim_s`` does not end them, and no block is held for ever."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from disagg_kv.core import Options
from disagg_kv.endpoints import DecodeEndpoint, PrefillEndpoint
from disagg_kv.engines.vllm import scheduler, worker
from disagg_kv.engines.vllm.params import Origin
from disagg_kv.engines.vllm.work import StepWork
from disagg_kv.rendezvous import Source
from tests.support.vllm_like import TWO_GROUPS, Engine, Model, Pair, prefilled, prompt, run
from tests.unit.engines.vllm.test_failures import computed, origin

CLAIM_S = 0.6
SHORT = Options(claim_s=CLAIM_S)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request in a queue is announced within the ``claim_s`` of these tests, and prefill looks for so long, too."""
    monkeypatch.setattr(scheduler, "QUEUED_S", CLAIM_S / 10)
    monkeypatch.setattr(worker, "ANSWER_S", CLAIM_S)


def after(seconds: float) -> Callable[[], bool]:
    """True once so much time has passed."""
    until = time.monotonic() + seconds
    return lambda: time.monotonic() > until


def fill(engine: Engine) -> Callable[[], None]:
    """Other requests have all blocks of an engine, until the function is called."""
    taken = list(engine.free)
    engine.free.clear()
    return lambda: engine.free.extend(taken)


@pytest.mark.parametrize("model", [None, TWO_GROUPS], ids=["one group", "two groups"])
@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_request_that_decode_queues_for_longer_than_claim_s_is_loaded(
    pair: Pair, tps: tuple[int, int], model: Model | None
) -> None:
    p, d = pair(tps, model, options=SHORT)
    release = fill(d)
    d.decode("d", prompt(11), prefilled(p, "p", prompt(11)))
    run(p, d, until=after(5 * CLAIM_S))
    assert p.reports == {}, "prefill keeps the blocks"
    release()
    run(p, d)
    assert d.loaded == ["d"]
    assert p.reports == {("sent", "p"): tps[0]}
    p.check_quiet()
    d.check_quiet()


def test_requests_of_one_prompt_that_are_queued_together(pair: Pair) -> None:
    """VLLM makes several of one with ``n`` > 1; they name one transfer, which is announced once."""
    p, d = pair(options=SHORT)
    release = fill(d)
    params = prefilled(p, "p", prompt(9))
    d.decode("d", prompt(9), params)
    d.decode("e", prompt(9), params)
    run(p, d, until=after(4 * CLAIM_S))
    assert p.reports == {}
    release()
    run(p, d)
    assert d.loaded == ["d"]
    assert d.not_loaded == []
    p.check_quiet()


def test_a_queued_request_that_is_aborted_frees_the_blocks_of_prefill(pair: Pair) -> None:
    p, d = pair((2, 2), options=SHORT)
    fill(d)
    d.decode("d", prompt(9), prefilled(p, "p", prompt(9)))
    run(p, d, until=after(4 * CLAIM_S))
    assert p.reports == {}
    d.abort("d")
    run(p, d, until=lambda: p.idle)
    assert p.reports == {("sent", "p"): 2}
    p.check_quiet()


def test_a_decode_instance_that_ends_keeps_no_blocks_of_prefill(pair: Pair) -> None:
    """Its word that it queues a request ends with it."""
    p, d = pair((2, 1), options=Options(claim_s=CLAIM_S, silence_s=0.5, heartbeat_s=0.1, closed_s=0.2))
    fill(d)
    d.decode("d", prompt(9), prefilled(p, "p", prompt(9)))
    run(p, d, until=after(4 * CLAIM_S))
    assert p.reports == {}
    d.close()
    run(p)
    assert p.reports == {("sent", "p"): 2}
    p.check_quiet()


def test_a_request_that_nothing_queues_frees_its_blocks_after_claim_s(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    p, _ = pair((2, 1), options=SHORT)
    began = time.monotonic()
    prefilled(p, "p", prompt(9))
    run(p)
    assert time.monotonic() - began >= CLAIM_S
    assert f"no decode instance asked for it within {CLAIM_S:g} s of its end (claim_s)" in caplog.text
    p.check_quiet()


def test_a_request_that_is_queued_for_longer_than_total_s_frees_the_blocks_of_prefill(pair: Pair) -> None:
    """Decode computes it once it has blocks."""
    p, d = pair((2, 1), options=Options(claim_s=CLAIM_S, total_s=6 * CLAIM_S))
    release = fill(d)
    d.decode("d", prompt(9), prefilled(p, "p", prompt(9)))
    run(p, d, until=lambda: p.idle)
    p.check_quiet()
    release()
    run(d)
    assert computed(d, "d")


@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2)])
def test_a_request_that_prefill_queues_for_longer_than_claim_s_is_loaded(pair: Pair, tps: tuple[int, int]) -> None:
    """Decode is asked at once, and has its blocks all the time."""
    p, d = pair(tps, options=SHORT)
    release = fill(p)
    p.prefill("p", prompt(9), "t")
    d.decode("d", prompt(9), origin(p))
    run(p, d, until=after(4 * CLAIM_S))
    assert d.reports == {}
    release()
    run(p, d)
    assert d.loaded == ["d"]
    p.check_quiet()
    d.check_quiet()


def test_a_request_that_is_aborted_in_the_queue_of_prefill(pair: Pair) -> None:
    """Also once decode knows that it is there."""
    p, d = pair((2, 1), options=SHORT)
    fill(p)
    p.prefill("p", prompt(9), "t")
    d.decode("d", prompt(9), origin(p))
    run(p, d, until=after(2 * CLAIM_S))
    p.abort("p")
    run(p, d, until=lambda: d.idle and "p" not in p.requests)
    assert computed(d, "d")


def test_instances_that_wait_for_each_other_go_on(pair: Pair) -> None:
    """The two have taken requests in other orders, as those of two routers, and lack blocks for all.

    Prefill holds the blocks of two requests that decode queues, and queues the one that decode waits for. One of the
    two is ended.
    """
    p, d = pair(options=SHORT, prefill={"blocks": 9}, decode={"blocks": 5})
    first, second, third = (prompt(13, seed) for seed in (1, 2, 3))
    p.prefill("p2", second, "second")
    p.prefill("p3", third, "third")
    p.prefill("p1", first, "first")
    d.decode("d1", first, origin(p, "first"))
    d.decode("d2", second, origin(p, "second"))
    d.decode("d3", third, origin(p, "third"))
    run(p, d)
    assert d.loaded == ["d1", "d3"]
    assert computed(d, "d2")
    p.check_quiet()
    d.check_quiet()


def test_ranks_of_decode_may_ask_one_after_the_other(pair: Pair) -> None:
    """The first says that the request is queued no more, before the second has asked for its rows."""
    p, d = pair((1, 2), options=SHORT)
    release = fill(d)
    d.decode("d", prompt(9), prefilled(p, "p", prompt(9)))
    run(p, d, until=after(4 * CLAIM_S))
    release()
    work = d.build(d.schedule())
    d.ranks[0].begin(work)
    run(p, until=after(CLAIM_S / 2))
    d.ranks[1].begin(work)
    run(p, d)
    assert d.loaded == ["d"]


@pytest.mark.parametrize("queued_s", [CLAIM_S / 3, 4 * CLAIM_S], ids=["before prefill looks", "after"])
def test_no_room_stays_open(pair: Pair, queued_s: float) -> None:
    """Not of a request that was queued and then loaded, nor of one that was aborted, nor of one that none asks for."""
    p, d = pair((2, 2), options=SHORT)
    release = fill(d)
    for name in ("d", "e"):
        d.decode(name, prompt(9), prefilled(p, f"p {name}", prompt(9), transfer=name))
    run(p, d, until=after(queued_s))
    assert [rooms(one) for one in d.receivers] == [2, 2]
    d.abort("e")
    release()
    run(p, d)
    prefilled(p, "p", prompt(9))
    run(p, d)
    run(p, d, until=lambda: not any(map(rooms, p.senders)) and not any(map(rooms, d.receivers)))


def rooms(endpoint: PrefillEndpoint | DecodeEndpoint) -> int:
    """How many are not released."""
    return sum(endpoint.usage().rooms.values())


def test_a_word_that_cannot_be_given_harms_nothing(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """The decode endpoint is closed. A rank of an instance that only prefills has none."""
    p, d = pair()
    queued = [Origin("t", Source("P", tuple(p.addresses)))]
    p.ranks[0].begin(StepWork(queued=queued, left=["t"]))
    d.close()
    d.ranks[0].begin(StepWork(queued=queued, left=["t"]))
    assert [text.split(": ")[0] for text in caplog.messages] == ["prefill does not learn that transfer t is queued"]
