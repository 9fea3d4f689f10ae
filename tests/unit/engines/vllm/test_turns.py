"""Rows go both ways: decode holds an answer's rows, and the prefill instance of the next turn loads those it lacks."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from attrs import define, evolve

from disagg_kv.channels import Hub
from disagg_kv.core import Options, Phase
from disagg_kv.engines.vllm import scheduler, worker
from disagg_kv.engines.vllm.params import Origin
from disagg_kv.engines.vllm.turns import Earlier, HeldTurns, hold_s
from disagg_kv.errors import RemoteProtocolError
from disagg_kv.rendezvous import Source
from tests.support.vllm_like import HYBRID, TWO_GROUPS, Engine, Model, prompt, run
from tests.support.vllm_requests import Status

SENT_ON = {"do_remote_decode": True, "do_remote_prefill": False}
ANSWER = 5
"""Tokens of an answer; the rows of all but the last are held."""

HOLD_S = 30.0
"""No test waits for so long."""

LIVE = Earlier(Origin("t", Source("D", ("inproc://D-p0",))), 9, b"tag", 4e9)

Made = Callable[..., Engine]


@pytest.fixture
def make() -> Iterator[Made]:
    """Instances on one network that do both, or what their ``produces`` and ``consumes`` say."""
    made: list[Engine] = []
    hub = Hub()

    def one(name: str, tp: int = 1, **other: Any) -> Engine:
        given = {"model": Model(), "blocks": 65, "max_tokens": ANSWER if name == "D" else 1, **other}
        made.append(Engine(hub, name, tp=tp, **given))
        return made[-1]

    yield one
    for engine in made:
        engine.close()


@define
class Chat:
    """A conversation with one decode instance.

    Args:
        decode: the instance.
        tokens: of the conversation.
        params: of the last answer, as the router passes them on.
        number: of the turn.
        seed: of its prompts.
        hold: seconds for which decode is asked to hold the rows; None: it is not asked.
    """

    decode: Engine
    tokens: list[int]
    params: dict[str, Any] | None = None
    number: int = 0
    seed: int = 0
    hold: object = HOLD_S

    @property
    def prompted(self) -> str:
        """The request of the turn at prefill."""
        return f"p{self.seed}.{self.number}"

    @property
    def answered(self) -> str:
        """The same at decode."""
        return f"d{self.seed}.{self.number}"

    def say(self, count: int) -> None:
        """The client's next words."""
        self.number += 1
        self.tokens += prompt(count, 10 * self.seed + self.number)

    def ask_prefill(self, prefill: Engine, cached: int = 0, **other: Any) -> None:
        """The first half of a turn; both ways if there is an earlier one."""
        params = json.loads(json.dumps({**SENT_ON, **(self.params or {}), **other}))
        prefill.submit(self.prompted, list(self.tokens), params, cached)

    def ask_decode(self, prefill: Engine, cached: int = 0) -> None:
        """The second half."""
        params = {**(prefill.params[self.prompted] or {}), **({} if self.hold is None else {"hold_s": self.hold})}
        self.decode.submit(self.answered, list(self.tokens), json.loads(json.dumps(params)), cached)

    def turn(self, prefill: Engine, cached: int = 0, decode_cached: int = 0) -> None:
        """A whole turn: its answer is a part of the conversation."""
        self.ask_prefill(prefill, cached)
        run(prefill, self.decode, until=lambda: self.prompted in prefill.params)
        self.ask_decode(prefill, decode_cached)
        run(prefill, self.decode, until=lambda: self.answered in self.decode.params)
        self.params = self.decode.params[self.answered]
        self.tokens += [1] * ANSWER


def begun(decode: Engine, prefill: Engine, seed: int = 0, hold: object = HOLD_S) -> Chat:
    """A conversation whose first turn of 14 tokens is over, and whose second prompt is there."""
    chat = Chat(decode, prompt(14, seed), seed=seed, hold=hold)
    chat.turn(prefill)
    chat.say(6)
    return chat


def loaded_bytes(engine: Engine) -> int:
    """Of all ranks since the last call."""
    return sum(sum(rank.counters.take().get("loaded_bytes", [])) for rank in engine.ranks)


def check_quiet(*engines: Engine) -> None:
    """No answer is held, and no block is lost."""
    run(*engines)
    for one in engines:
        one.check_quiet()
        assert one.side.held == HeldTurns()


@pytest.mark.parametrize("tiles", [False, True], ids=["rows of a token", "rows of a block"])
@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_four_turns_load_what_each_prefill_instance_lacks(make: Made, tps: tuple[int, int], tiles: bool) -> None:
    """Two of them take turns; each has the whole blocks that it computed or loaded."""
    prefills = [make(name, tps[0], tiles=tiles) for name in ("A", "B")]
    d = make("D", tps[1], tiles=tiles)
    chat = Chat(d, prompt(14))
    has, had = [0, 0], 0
    row_bytes = 3 * 4 * 8 * 2  # layers, heads, elements, bytes of one
    for number in range(4):
        p = prefills[number % 2]
        cached, held = has[number % 2] // 4 * 4, len(chat.tokens) - 1 if number else 0
        chat.say(7) if number else None
        chat.turn(p, cached, had // 4 * 4)
        assert p.loaded == [f"p0.{n}" for n in range(1, number + 1) if n % 2 == number % 2]
        lacked = (-(-held // 4) * 4 if tiles else held) - cached if number else 0
        assert loaded_bytes(p) == lacked * row_bytes
        has[number % 2], had = len(chat.tokens) - ANSWER, len(chat.tokens) - 1
    assert len(d.loaded) == 4
    assert d.side.held.names
    d.side.held.few = lambda: True
    run(*prefills, d)
    for one in (*prefills, d):
        one.check_quiet()


def test_an_answer_is_held_only_if_the_router_asks_for_it(make: Made) -> None:
    """An instance that does both serves one-way routers as ever."""
    p, d = make("P"), make("D")
    chat = begun(d, p, hold=None)
    assert chat.params is None
    check_quiet(p, d)


@pytest.mark.parametrize("hold", [0, -1, True, "long", math.nan, math.inf, 10**400, [3]], ids=lambda one: str(one)[:9])
def test_a_time_that_is_none_holds_nothing(make: Made, hold: object, caplog: pytest.LogCaptureFixture) -> None:
    p, d = make("P"), make("D")
    assert begun(d, p, hold=hold).params is None
    assert "hold_s" in caplog.text
    check_quiet(p, d)


@pytest.mark.parametrize(
    ("hold", "options"), [(0.3, None), (60.0, Options(total_s=0.3, silence_s=0.2, heartbeat_s=0.05))], ids=str
)
def test_blocks_are_free_after_the_time_or_total_s(make: Made, hold: float, options: Options | None) -> None:
    """No prefill instance asks for the rows. That is not counted as a failure."""
    p, d = make("P", 2), make("D", 2, options=options)
    chat = Chat(d, prompt(14), hold=hold)
    began = time.monotonic()
    chat.turn(p)
    assert d.side.held.names
    assert chat.params is not None
    assert chat.params["earlier"]["until"] <= time.time() + 0.3
    check_quiet(p, d)
    assert time.monotonic() - began >= 0.3
    assert d.reports["sent", chat.answered] == 2
    assert "sent_failed" not in d.ranks[0].counters.take()


def test_a_reference_whose_time_is_over_is_not_asked_for(make: Made, caplog: pytest.LogCaptureFixture) -> None:
    """The clocks of both hosts agree, so prefill does not even ask."""
    p, d = make("P"), make("D")
    chat = begun(d, p, hold=0.1)
    run(p, d)
    chat.turn(p)
    assert (p.loaded, p.not_loaded) == ([], [])
    assert "decode has given them up" in caplog.text
    check_quiet(p, d)


def test_a_reference_whose_time_ends_in_the_queue_is_not_asked_for(make: Made) -> None:
    p, d = make("P"), make("D")
    chat = begun(d, p, hold=0.3)
    taken, p.free = list(p.free), []
    chat.ask_prefill(p)
    run(p, d, until=lambda: d.idle)
    p.free += taken
    run(p, d, until=lambda: chat.prompted in p.params)
    assert (p.loaded, p.not_loaded) == ([], [])


@pytest.mark.parametrize("why", ["another prompt", "shorter", "another adapter"])
def test_the_rows_of_another_prompt_are_not_asked_for(make: Made, why: str, caplog: pytest.LogCaptureFixture) -> None:
    """Prefill computes the prompt, and decode need not hold them any longer."""
    p, d = make("P", 2), make("D")
    chat = begun(d, p)
    if why == "shorter":
        del chat.tokens[16:]
    elif why == "another prompt":
        chat.tokens[3] += 1
    assert chat.params is not None
    if why == "another adapter":
        chat.params["earlier"]["tag"] = "00" * 16
    chat.turn(p)
    assert (p.loaded, p.not_loaded) == ([], [])
    assert "they are not of the tokens with which this prompt begins" in caplog.text
    run(p, d, until=lambda: len(d.side.held.names) == 1)
    assert d.reports["sent", "d0.0"] == 1


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails by time fails soon."""
    monkeypatch.setattr(scheduler, "RETURN_S", 0.3)


def changed(chat: Chat, **other: Any) -> None:
    """Change the reference."""
    assert chat.params is not None
    chat.params["earlier"] |= other


@pytest.mark.parametrize(
    ("other", "codes"),
    [
        ({"transfer_id": "unknown"}, {"deadline"}),
        ({"addresses": ["inproc://nowhere"]}, {"peer_lost"}),
        ({"instance": "another"}, {"incompatible_peer"}),
        ({"instance": "D/decode", "addresses": ["inproc://D-d0"]}, {"incompatible_peer"}),
    ],
    ids=["transfer", "address", "instance", "an endpoint that only receives"],
)
def test_rows_that_nobody_has_fail_by_name(make: Made, soon: None, other: dict[str, Any], codes: set[str]) -> None:
    """VLLM's policy decides on the request: here it computes the prompt."""
    p, d = make("P", 2), make("D")
    chat = begun(d, p)
    changed(chat, **other)
    began = time.monotonic()
    chat.turn(p)
    assert time.monotonic() - began < 10.0
    assert (p.loaded, p.not_loaded) == ([], [chat.prompted])
    ((code, _),) = p.ranks[0].counters.take()["load_failed"].items()
    assert code in codes | {"aborted"}
    assert chat.answered in d.loaded


def test_rows_of_a_shorter_answer_than_the_reference_says_fail_by_name(make: Made) -> None:
    """The tag is right: a router has changed the reference of another turn of the conversation."""
    p, d = make("P"), make("D")
    chat = begun(d, p)
    old = chat.params
    assert old is not None
    chat.turn(p)
    chat.say(5)
    changed(chat, transfer_id=old["earlier"]["transfer_id"])
    q = make("Q")
    chat.turn(q)
    assert q.not_loaded == [chat.prompted]
    assert chat.answered in d.loaded


@pytest.mark.parametrize("same", [True, False], ids=["the same instance", "another"])
def test_a_reference_is_used_once(make: Made, same: bool) -> None:
    """The client has edited its last message: two prompts go on from one answer."""
    p, d = make("P"), make("D")
    other = p if same else make("Q")
    chat = begun(d, p)
    again = evolve(chat, tokens=[*chat.tokens[:19], 4, 5, 6], seed=7, number=1)
    chat.turn(p)
    assert p.loaded == [chat.prompted]
    again.turn(other)
    assert other.not_loaded == ([] if same else [again.prompted])
    assert again.answered in d.loaded
    assert p.loaded == [chat.prompted]


def test_rows_that_prefill_has_are_not_loaded(make: Made) -> None:
    """Its own prefix cache has all of them, and decode's blocks are free at once."""
    p, d = make("P", 2), make("D", 2)
    chat = begun(d, p)
    chat.ask_prefill(p, cached=20)
    run(p, d, until=lambda: ("sent", "d0.0") in d.reports and chat.prompted in p.params)
    assert (p.loaded, p.not_loaded) == ([], [])


def test_the_oldest_answer_is_given_up_where_blocks_are_short(make: Made, caplog: pytest.LogCaptureFixture) -> None:
    """The next prompt of its conversation is computed; the younger one's rows are loaded."""
    p, d = make("P"), make("D", 2)
    old, young = begun(d, p), begun(d, p, seed=1)
    d.side.held.few = lambda: ("sent", "d0.0") not in d.reports
    run(p, d, until=lambda: d.reports["sent", "d0.0"] == 2)
    assert d.reports["sent", "d1.0"] == 0
    old.turn(p)
    young.turn(p)
    assert (p.loaded, p.not_loaded) == ([young.prompted], [old.prompted])
    assert "decode needs the blocks of its answer" in caplog.text


def test_a_request_in_the_queue_of_decode_ends_what_is_held(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for blocks, or for its turn."""
    monkeypatch.setattr(scheduler, "QUEUED_S", 0.05)
    p, d = make("P"), make("D", blocks=13)
    begun(d, p)
    begun(d, p, seed=1)
    chat = Chat(d, prompt(30, 5), seed=5, hold=None)
    chat.turn(p)
    assert d.loaded == ["d0.0", "d1.0", "d5.0"]
    assert ("sent", "d0.0") in d.reports
    check_quiet(p, d)


@pytest.mark.parametrize("kind", ["local", "its load has failed", "preempted"])
def test_a_request_that_finds_no_blocks_ends_what_is_held(make: Made, soon: None, kind: str) -> None:
    """Of whatever kind it is; an answer is held for longer than the test may take."""
    p, d = make("P"), make("D", blocks=13)
    begun(d, p)
    begun(d, p, seed=1)
    origin = {"instance": "P", "addresses": ["inproc://nowhere"], "transfer_id": "t"}
    params = {"do_remote_prefill": True, "do_remote_decode": False, **origin} if kind == "its load has failed" else None
    if kind == "preempted":
        d.submit("r", prompt(6, 5))
        d.step()
        d.preempt("r")
    began = time.monotonic()
    d.submit("q", prompt(30, 6), params)
    run(p, d, until=lambda: "q" in d.params)
    assert time.monotonic() - began < HOLD_S / 2
    assert ("sent", "d0.0") in d.reports


def test_a_reset_gives_up_all_answers(make: Made) -> None:
    """Before vLLM pauses, or takes other weights."""
    p, d = make("P"), make("D", 2)
    assert d.side.reset()
    begun(d, p)
    begun(d, p, seed=1)
    assert not d.side.reset()
    assert d.side.pending
    run(p, d, until=d.side.reset)
    check_quiet(p, d)


def test_of_two_prompts_of_one_request_the_first_loads_the_rows(make: Made, caplog: pytest.LogCaptureFixture) -> None:
    """The other one neither loads them nor ends them."""
    p, d = make("P"), make("D")
    chat = begun(d, p)
    chat.ask_prefill(p)
    for name, tokens in (("another prompt", prompt(20, 9)), ("the same prompt", list(chat.tokens))):
        p.submit(name, tokens, json.loads(json.dumps({**SENT_ON, **(chat.params or {})})))
    run(p, d, until=lambda: {chat.prompted, "another prompt", "the same prompt"} <= p.params.keys())
    assert (p.loaded, p.not_loaded) == ([chat.prompted], [])
    assert caplog.text.count("another request has them") == 2


def test_rows_that_are_rounded_do_not_go_back(make: Made) -> None:
    """They would be in prefill's prefix cache, for all prompts."""
    p, d = make("P"), make("D")
    d.side._lossy = True
    assert begun(d, p).params is None
    check_quiet(p, d)


def test_rows_that_prefill_reads_are_given_up_only_on_the_second_call(make: Made) -> None:
    """Its request would fail although it is about to have them."""
    p, d = make("P"), make("D")
    begun(d, p)
    d.step()
    rank = d.ranks[0]
    (going,) = rank._outgoing.values()

    class Read:
        phase, aborted = Phase.MOVING, 0

        def abort(self, reason: str) -> None:
            self.aborted += 1

    whole, read = going.delivery, Read()
    going.delivery = read  # type: ignore[assignment]
    rank._abort("d0.0")
    assert read.aborted == 0
    rank._abort("d0.0")
    assert read.aborted == 1
    going.delivery = whole
    rank._abort("d0.0")
    check_quiet(p, d)


@pytest.mark.parametrize("end", [Status.FINISHED_ABORTED, Status.FINISHED_ERROR])
@pytest.mark.parametrize("early", [False, True], ids=["", "announced"])
@pytest.mark.parametrize("tps", [(1, 1), (2, 1)])
def test_a_prompt_that_ends_while_it_is_loaded_is_reported_once(
    make: Made, monkeypatch: pytest.MonkeyPatch, tps: tuple[int, int], early: bool, end: Status
) -> None:
    """VLLM frees its blocks with the load; decode, which may know of the transfer, does not wait."""
    monkeypatch.setattr(scheduler, "QUEUED_S", 0.0 if early else 60.0)
    p, d = make("P", tps[0]), make("D", tps[1])
    chat = begun(d, p)
    changed(chat, transfer_id="nothing opens it")
    chat.ask_prefill(p, transfer_id="t")
    p.step()
    p.step()
    assert p.requests[chat.prompted].status is Status.WAITING_FOR_REMOTE_KVS
    assert bool(p.ranks[0]._outgoing) == early
    d.submit("waits", list(chat.tokens), {**SENT_ON, **origin(p), "do_remote_decode": False})
    d.step()
    p._end(p.requests[chat.prompted], end)
    run(p, d, until=lambda: p.idle and "waits" in d.params)
    assert p.reports["received", chat.prompted] == tps[0]
    assert p.reports["sent", chat.prompted] == 0
    assert d.not_loaded == ["waits"]
    p.check_quiet()


@pytest.mark.parametrize("call", ["open", "expect"])
def test_a_load_that_cannot_begin_harms_no_prompt_that_is_announced(
    make: Made, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Decode waits for the prompt already; prefill computes it."""
    monkeypatch.setattr(scheduler, "QUEUED_S", 0.0)
    p, d = make("P"), make("D")
    chat = begun(d, p)
    taken, p.free = list(p.free), []
    chat.ask_prefill(p, transfer_id="t")
    p.step()
    assert p.ranks[0]._outgoing
    p.free += taken
    with monkeypatch.context() as wrong:
        if call == "open":
            wrong.setattr(p.receivers[0], "open", _raise)
        else:
            wrong.setattr(worker, "Expectation", _raise)
        p.step()
    run(p, d, until=lambda: chat.prompted in p.params)
    assert (p.loaded, p.not_loaded) == ([], [chat.prompted])
    chat.ask_decode(p)
    run(p, d, until=lambda: chat.answered in d.loaded)


def _raise(*args: object, **kwargs: object) -> None:
    raise ValueError("a bug")


def origin(p: Engine) -> dict[str, Any]:
    """Of transfer ``t``."""
    return {"do_remote_prefill": True, "transfer_id": "t", "instance": "P", "addresses": p.addresses}


def test_a_prompt_that_ends_in_the_queue_lets_decode_free_its_blocks(make: Made) -> None:
    p, d = make("P"), make("D")
    chat = begun(d, p)
    chat.ask_prefill(p)
    p.abort(chat.prompted)
    check_quiet(p, d)
    assert (p.loaded, p.not_loaded) == ([], [])


def test_an_answer_that_no_client_gets_is_not_held(make: Made) -> None:
    p, d = make("P"), make("D", budget=4)
    chat = Chat(d, prompt(14))
    chat.ask_prefill(p)
    run(p, d, until=lambda: chat.prompted in p.params)
    chat.ask_decode(p)
    run(p, d, until=lambda: chat.answered in d.loaded)
    d.step()
    d.abort(chat.answered)
    assert d.params[chat.answered] is None
    check_quiet(p, d)


def test_an_answer_whose_blocks_vllm_has_taken_back_is_not_held(make: Made) -> None:
    """Its last token came in the step that preempted it."""
    d = make("D")
    request = d.submit("d", prompt(9), {"hold_s": HOLD_S})
    d.step()
    d.preempt("d")
    request.outputs = ANSWER
    d._end(request, Status.FINISHED_LENGTH_CAPPED)
    assert d.params["d"] is None
    check_quiet(d)


@pytest.mark.parametrize("model", [TWO_GROUPS, HYBRID], ids=["sliding window", "states"])
def test_windows_and_states_do_not_go_back(make: Made, model: Model, caplog: pytest.LogCaptureFixture) -> None:
    p, d = make("P", model=model), make("D", model=model)
    chat = begun(d, p)
    assert chat.params is None
    chat.params = LIVE.params()
    chat.turn(p)
    assert (p.loaded, p.not_loaded) == ([], [])
    assert "sliding windows and states do not go back" in caplog.text


def test_a_prefill_instance_of_one_way_ignores_a_reference(make: Made, caplog: pytest.LogCaptureFixture) -> None:
    p, d = make("P", consumes=False), make("D")
    chat = begun(d, p, hold=0.5)
    chat.turn(p)
    assert (p.loaded, p.not_loaded) == ([], [])
    assert "its kv_role is not kv_both" in caplog.text
    check_quiet(p, d)


def test_a_decode_instance_of_one_way_holds_nothing(make: Made) -> None:
    p, d = make("P"), make("D", produces=False)
    assert begun(d, p).params is None
    check_quiet(p, d)


def test_two_instances_that_load_the_same_rows_from_each_other(make: Made) -> None:
    """Both have them, and neither waits for the other."""
    one, two = make("P"), make("D")
    there, back = begun(two, one), Chat(one, prompt(14), seed=3)
    one.max_tokens = ANSWER
    back.turn(two)
    back.say(6)
    one.max_tokens = 1
    there.ask_prefill(one)
    back.ask_prefill(two)
    run(one, two, until=lambda: there.prompted in one.params and back.prompted in two.params)
    assert there.prompted in one.loaded
    assert back.prompted in two.loaded


def test_an_instance_that_loads_from_itself(make: Made) -> None:
    """A router that knows one server only."""
    d = make("D", 2)
    request = d.submit("d", prompt(9), {"hold_s": HOLD_S})
    run(d, until=lambda: "d" in d.params)
    params = d.params["d"]
    assert params is not None
    d.submit("next", [*request.tokens, 2, 3], params)
    run(d, until=lambda: d.loaded == ["next"])


def test_a_reference_comes_back_through_json() -> None:
    params = json.loads(json.dumps(LIVE.params()))
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    assert Earlier.of(params["earlier"]) == LIVE


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": 0}, {"tokens": True}, {"tokens": "9"}, {"tokens": None}, {"tag": "no digits"}, {"tag": 3},
        {"tag": None}, {"until": None}, {"until": math.nan}, {"until": 10**400}, {"until": "soon"},
        {"transfer_id": 7}, {"instance": ""},
        {"addresses": "inproc://a"},
    ],
    ids=str,
)  # fmt: skip
def test_a_reference_that_was_changed_on_the_way_is_refused(
    make: Made, wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Prefill computes the prompt."""
    params = LIVE.params()
    params["earlier"] |= wrong
    with pytest.raises(RemoteProtocolError, match="kv_transfer_params"):
        Earlier.of(params["earlier"])
    p = make("P")
    caplog.set_level(logging.WARNING)
    p.submit("p", prompt(9), params)
    run(p, until=lambda: "p" in p.params)
    assert "request p computes its prompt: kv_transfer_params" in caplog.text
    assert p.params["p"] is not None, "it is sent on all the same"


@pytest.mark.parametrize("given", ["earlier", 3, [1], ["transfer_id"]], ids=str)
def test_a_reference_that_is_none_is_refused(given: object) -> None:
    with pytest.raises(RemoteProtocolError, match="no mapping"):
        Earlier.of(given)


def test_a_time_is_a_positive_number() -> None:
    assert (hold_s(None), hold_s({}), hold_s({"hold_s": None}), hold_s({"hold_s": 2})) == (0.0, 0.0, 0.0, 2.0)


def test_answers_are_given_up_one_after_the_other_and_a_stuck_one_delays_no_others_for_long() -> None:
    held = HeldTurns()
    assert held.give_up(1.0, waiting=True) is None
    held.names |= {"one": None, "two": None, "three": None}
    assert held.give_up(1.0, waiting=False) is None
    assert held.give_up(1.0, waiting=True) == "one"
    assert held.give_up(1.1, waiting=True) is None
    held.ended("other")
    assert held.give_up(1.2, waiting=True) is None
    held.ended("one")
    held.few = lambda: True
    assert held.give_up(1.3, waiting=False) == "two"
    assert held.give_up(1.4, waiting=False) is None
    assert held.give_up(2.4, waiting=False) == "three"
    assert held.give_up(3.5, waiting=False) == "two", "the first again: its peer has finished or is frozen"
    assert held.give_up_all(4.0) == ["two", "three"]


def test_the_time_of_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 100.0)
    assert not evolve(LIVE, until=100.5).over
    assert evolve(LIVE, until=99.5).over
