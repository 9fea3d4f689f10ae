"""Random schedules of requests, aborts and preemptions of two instances: each request is reported once per rank.

The engine of ``tests/support/vllm_like.py`` checks in every step that no rank reports a request twice, that the rows
of a request that is reported as loaded are right, and that vLLM has each request that is reported. It overwrites freed
blocks at once. So blocks that are freed too early give wrong rows, or free blocks that were written.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disagg_kv.channels import Hub
from disagg_kv.core import Options
from disagg_kv.endpoints import DecodeEndpoint, PrefillEndpoint
from tests.support.processes import wait
from tests.support.vllm_like import TWO_GROUPS, Engine, Model, prompt, run

ACTS = ("prefill", "decode", "abort p", "abort d", "preempt p", "preempt d", "step p", "step d", "wrong")
SETUPS = st.fixed_dictionaries(
    {
        "tps": st.sampled_from([(1, 1), (2, 1), (1, 2)]),
        "model": st.sampled_from([Model(), TWO_GROUPS]),
        "tiles": st.booleans(),
        "strategy": st.sampled_from(["auto", "auto+layer_pipelined"]),
        "budget": st.sampled_from([5, 8, 64]),
        "max_tokens": st.sampled_from([1, 3]),
        "holds": st.booleans(),
    }
)
SCHEDULES = st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 5), st.integers(1, 40)), max_size=40)


def play(setup: dict[str, Any], acts: list[tuple[str, int, int]]) -> None:
    """Prefill and decode take their requests in any order; a router knows each transfer's id before prefill runs."""
    hub, model = Hub(), setup["model"]
    tiles = setup["tiles"] and model is not TWO_GROUPS
    # Fewer blocks than all requests need could make both instances wait for each other.
    both: dict[str, Any] = {
        "blocks": 130, "model": model, "tiles": tiles, "strategy": setup["strategy"], "max_tokens": setup["max_tokens"],
        "options": Options(claim_s=0.3),
    }  # fmt: skip
    p = Engine(hub, "P", tp=setup["tps"][0], consumes=False, budget=setup["budget"], **both)
    d = Engine(hub, "D", tp=setup["tps"][1], produces=False, **both)
    try:
        sizes: dict[int, int] = {}
        for act, number, size in acts:
            step(p, d, act, number, sizes.setdefault(number, size), setup["holds"] and model is not TWO_GROUPS)
        for number in sizes:  # the other side of every transfer
            if f"p{number}" not in seen(p):
                p.prefill(f"p{number}", prompt(sizes[number], number), f"t{number}")
            if f"d{number}" not in seen(d):
                d.decode(f"d{number}", prompt(sizes[number], number), origin(p, number))
        run(p, d)
        p.check_quiet()
        d.check_quiet()
        check_reports(p, "sent")
        check_reports(d, "received")
        endpoints: list[PrefillEndpoint | DecodeEndpoint] = [*p.senders, *d.receivers]
        wait(lambda: not any(one.open_rooms for one in endpoints), lambda: "every room to end")
    finally:
        p.close()
        d.close()


def seen(engine: Engine) -> set[str]:
    """Every request that the engine had."""
    return set(engine.params) | set(engine.requests)


def origin(p: Engine, number: int) -> dict[str, Any]:
    """As the router writes it."""
    return {
        "do_remote_prefill": True, "transfer_id": f"t{number}", "instance": "P", "addresses": p.addresses
    }  # fmt: skip


def step(p: Engine, d: Engine, act: str, number: int, size: int, holds: bool) -> None:
    """One act, if it is possible now."""
    engine, name = (p, f"p{number}") if act == "prefill" or act.endswith("p") else (d, f"d{number}")
    request = engine.requests.get(name)
    if act == "prefill" and name not in seen(p):
        p.prefill(name, prompt(size, number), f"t{number}")
    elif act == "decode" and name not in seen(d):
        held = size // 8 * 4 if holds and number % 2 else 0
        d.decode(name, prompt(size, number), origin(p, number), cached=held)
    elif act == "wrong" and name not in seen(d):
        d.decode(name, prompt(size, number + 50), origin(p, number))
    elif act.startswith("abort"):
        engine.abort(name)
    elif act.startswith("preempt") and request in engine.running:
        engine.preempt(name)
    elif act.startswith("step"):
        engine.step()


def check_reports(engine: Engine, kind: str) -> None:
    """Every rank has reported what any has, and each request of this side has ended."""
    assert all(found == engine.tp and what == kind for (what, _), found in engine.reports.items())
    assert engine.idle


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(SETUPS, SCHEDULES)
def test_every_request_is_reported_once_and_no_page_is_freed_early(
    setup: dict[str, Any], acts: list[tuple[str, int, int]]
) -> None:
    play(setup, acts)
