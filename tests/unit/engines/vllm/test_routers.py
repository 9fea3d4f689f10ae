"""The connector serves behind routers of others as they are: their JSON, from prefill's answer to decode's request."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest

from disagg_kv.core import Options
from disagg_kv.engines import vllm
from disagg_kv.engines.options import EngineOptions
from tests.support import routers
from tests.support.pages import ROOT, marked
from tests.support.routers import WITHOUT_IDS, Body, Router
from tests.support.vllm_like import Engine, Pair, prompt, run

CLIENT: Mapping[str, Any] = {
    "model": "some/model",
    "max_tokens": 50,
    "max_completion_tokens": 50,
    "min_tokens": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
}


def test_the_configuration_of_the_page_is_one() -> None:
    given = json.loads(marked(ROOT / "docs" / "engines" / "routers.md", "servers"))
    assert EngineOptions.read("kv_connector_extra_config", given["kv_connector_extra_config"]).channel == "zmq"
    assert given["kv_connector_module_path"] == vllm.__name__
    assert given["kv_connector"] == "DisaggKVConnector"


def crossed(body: Body) -> Body:
    """As the other process gets it."""
    return dict(json.loads(json.dumps(body)))


def serve(router: Router, p: Engine, d: Engine, tokens: list[int]) -> list[Body]:
    """A client's request through a router; what prefill and decode were asked."""
    asked = []

    def prefill(body: Body) -> Body:
        asked.append(crossed(body))
        p.submit("cmpl-1", tokens, asked[-1].get("kv_transfer_params"))
        run(p, until=lambda: "cmpl-1" in p.params)
        return crossed({"id": "cmpl-1", "choices": [], "kv_transfer_params": p.params["cmpl-1"]})

    asked.append(crossed(router(dict(CLIENT), prefill)))
    d.submit("cmpl-1", tokens, crossed(asked[-1]).get("kv_transfer_params"))
    run(p, d)
    return asked


@pytest.mark.parametrize("tps", [(1, 1), (2, 1)])
@pytest.mark.parametrize("router", routers.PASSING_ON, ids=lambda one: one.__name__)
def test_rows_arrive_behind_a_router_that_passes_parameters_on(
    pair: Pair, router: Router, tps: tuple[int, int]
) -> None:
    """Whatever it adds: its ids for prefill are null, and decode ignores the fields that prefill did not name."""
    p, d = pair(tps)
    to_prefill, to_decode = serve(router, p, d, prompt(13))
    assert to_prefill["kv_transfer_params"] == WITHOUT_IDS
    assert (to_prefill["max_tokens"], to_prefill["stream"]) == (1, False)
    answered = p.params["cmpl-1"]
    assert answered is not None
    assert {**to_decode["kv_transfer_params"], **answered} == to_decode["kv_transfer_params"]
    assert {key: to_decode[key] for key in CLIENT} == CLIENT
    assert d.loaded == ["cmpl-1"]
    p.check_quiet()
    d.check_quiet()


@pytest.mark.parametrize("router", routers.PASSING_ON, ids=lambda one: one.__name__)
def test_decode_computes_what_prefill_does_not_send(pair: Pair, router: Router) -> None:
    """Prefill's answer has a null then, which some routers pass on and others drop."""
    p, d = pair(prefill={"produces": False})
    _, to_decode = serve(router, p, d, prompt(13))
    assert not to_decode.get("kv_transfer_params")
    assert (d.loaded, d.not_loaded) == ([], [])
    d.check_quiet()


def test_decode_computes_all_prompts_of_a_router_that_sends_no_parameters(pair: Pair) -> None:
    p, d = pair()
    serve(routers.production_stack_plain, p, d, prompt(13))
    assert p.params["cmpl-1"] is None
    assert (d.loaded, d.not_loaded) == ([], [])
    d.check_quiet()


def test_a_router_that_drops_prefills_parameters_is_named_in_decodes_log(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """VLLM's policy decides on the request. Prefill's blocks are free again after ``claim_s``."""
    caplog.set_level(logging.WARNING)
    p, d = pair(options=Options(claim_s=0.2))
    serve(routers.mooncake_proxy, p, d, prompt(13))
    assert d.not_loaded == ["cmpl-1"]
    assert (
        "request cmpl-1 cannot be loaded: kv_transfer_params: source: instance must have 1 to 256 characters, not 0: "
        "a router has to pass on what prefill has answered, unchanged"
    ) in caplog.text
    p.check_quiet()
    d.check_quiet()
