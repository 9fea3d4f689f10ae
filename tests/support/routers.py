"""What routers of others send to vLLM's servers: the body for prefill, and that for decode, made from prefill's answer.

Each function does what its docstring's source does with the fields that the connector, or vLLM, reads. The bodies cross
as JSON, so a field that JSON cannot hold would be found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Body = dict[str, Any]
Prefill = Callable[[Body], Body]
"""Sends a body to the prefill server; returns the body of its answer."""

Router = Callable[[Body, Prefill], Body]
"""From a client's body: asks prefill, and returns the body for decode."""

WITHOUT_IDS: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""The ``kv_transfer_params`` that all of these routers send to prefill: ids that are not known yet are null."""


def _for_prefill(body: Body, *dropped: str) -> Body:
    """One token, not streamed."""
    asked = {key: value for key, value in body.items() if key not in ("stream_options", *dropped)}
    asked |= {key: 1 for key in ("max_completion_tokens",) if key in asked}
    return {**asked, "max_tokens": 1, "stream": False, "kv_transfer_params": dict(WITHOUT_IDS)}


def llm_d(body: Body, prefill: Prefill) -> Body:
    """The routing sidecar with ``-connector=nixlv2``; an answer without the field becomes a null.

    llm-d-inference-scheduler 520af478, ``pkg/sidecar/proxy/connector_nixlv2.go``; llm-d-routing-sidecar 5a1b9088,
    ``internal/proxy/connector_nixlv2.go``, does the same.
    """
    answer = prefill({**_for_prefill(body), "max_completion_tokens": 1})
    return {**body, "kv_transfer_params": answer.get("kv_transfer_params")}


def vllm_proxy(body: Body, prefill: Prefill) -> Body:
    """VLLM's proxy for its NIXL tests, which its documentation names: ``min_tokens`` stays away from prefill.

    vllm 030ea52e, ``tests/v1/kv_connector/nixl_integration/toy_proxy_server.py``.
    """
    found = prefill(_for_prefill(body, "min_tokens", "min_completion_tokens")).get("kv_transfer_params")
    return {**body, "kv_transfer_params": found} if found else body


def ray_serve(body: Body, prefill: Prefill) -> Body:
    """``build_pd_openai_app`` with a connector that Ray has no backend for: its default backend.

    ray 12052023, ``python/ray/llm/_internal/serve/engines/common/kv_transfer/base.py``: ``DefaultPDProtocolMixin``.
    """
    return {**body, "kv_transfer_params": prefill(_for_prefill(body)).get("kv_transfer_params")}


def ray_serve_tokenize_once(body: Body, prefill: Prefill) -> Body:
    """The same, where decode takes the token ids of prefill: they are put among the parameters.

    ray 096875ef, ``python/ray/llm/_internal/serve/serving_patterns/prefill_decode/pd_server.py``:
    ``_forward_prefill_token_ids``.
    """
    asked = ray_serve(body, prefill)
    if asked["kv_transfer_params"] is None:
        return asked
    return {**asked, "kv_transfer_params": {**asked["kv_transfer_params"], "prompt_token_ids": [1, 2, 3]}}


def production_stack(body: Body, prefill: Prefill) -> Body:
    """``--routing-logic disaggregated_prefill_orchestrated``: decode gets the host of the prefill server, too.

    production-stack a6c01db0, ``src/vllm_router/services/request_service/request.py``:
    ``route_orchestrated_disaggregated_request``.
    """
    found = prefill(_for_prefill(body)).get("kv_transfer_params")
    return {**body, "kv_transfer_params": {**found, "remote_host": "10.0.0.1"}} if found else body


def vllm_router(body: Body, prefill: Prefill) -> Body:
    """``--vllm-pd-disaggregation``: at most one of ``min_tokens`` for prefill; a null is passed on.

    vllm-project/router 9da0ea11, ``src/routers/http/vllm_pd_router.rs``.
    """
    asked = _for_prefill(body)
    answer = prefill({**asked, **({"min_tokens": 1} if asked.get("min_tokens", 0) > 1 else {})})
    if "kv_transfer_params" not in answer:
        return body
    return {**body, "kv_transfer_params": answer["kv_transfer_params"]}


def dynamo(body: Body, prefill: Prefill) -> Body:
    """With the entry of docs/engines/routers.md, which gives the connector the protocol of NIXL.

    dynamo 067528be, ``components/src/dynamo/vllm/kv_connector_protocols.py``: ``NixlConnectorProtocol``.
    """
    found = prefill({**_for_prefill(body), "min_tokens": 1}).get("kv_transfer_params")
    return {**body, "kv_transfer_params": found} if found else body


PASSING_ON: tuple[Router, ...] = (
    llm_d,
    vllm_proxy,
    ray_serve,
    ray_serve_tokenize_once,
    production_stack,
    vllm_router,
    dynamo,
)
"""Routers that pass prefill's parameters on."""


def production_stack_plain(body: Body, prefill: Prefill) -> Body:
    """``--routing-logic disaggregated_prefill`` sends no parameters at all: it is for caches that instances share.

    production-stack a6c01db0, the same file: ``route_disaggregated_prefill_request``.
    """
    asked = _for_prefill(body, "max_completion_tokens")
    del asked["kv_transfer_params"]
    prefill(asked)
    return body


def mooncake_proxy(body: Body, prefill: Prefill) -> Body:
    """VLLM's proxy for its Mooncake connector gives decode parameters of its own, and drops those of prefill.

    vllm 41c5903d, ``examples/disaggregated/mooncake_connector/mooncake_connector_proxy.py``. It asks both at once.
    """
    own = {"transfer_id": "xfer-1", "do_remote_decode": True, "do_remote_prefill": False}
    prefill({**_for_prefill(body), "kv_transfer_params": own})
    bootstrap = {"remote_bootstrap_addr": "http://10.0.0.1:8998", "remote_engine_id": "P"}
    return {
        **body,
        "kv_transfer_params": {**own, **bootstrap, "do_remote_decode": False, "do_remote_prefill": True},
    }
