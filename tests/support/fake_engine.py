"""A program that speaks the lines of ``benchmarks/engines_gpu``'s instances, and computes nothing.

Tokens depend on the seed alone, as those of any right engine do. The variable ``FAKE_ENGINE`` names what an instance
does instead, as ``push-decode=wrong``: ``wrong`` tokens, an ``error`` for each request or ``once``, no answer
(``silent``), a late one of SGLang (``slow``), or ``end`` at once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

PUSH = {"remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size"}
NEEDED = {
    "DisaggKVConnector": {"instance", "addresses", "transfer_id"},
    "NixlConnector": PUSH | {"remote_block_ids"},
    "NixlPushConnector": PUSH,
}
"""What a decode instance reads of its parameters."""


LATER_S = 10.0
"""Decode's tokens are said to come so much later: after those of prefill in any order, and nothing waits for them."""


def params(connector: str, request: dict[str, Any]) -> dict[str, Any]:
    """What a prefill instance returns."""
    if connector == "DisaggKVConnector":
        transfer = request["params"].get("transfer_id", f"of prefill {request['id']}")
        found: dict[str, Any] = {"transfer_id": transfer, "instance": "one", "addresses": ["here"], "first_token": 7}
    else:
        found = {
            "remote_engine_id": "one", "remote_block_ids": [[1, 2]], "remote_request_id": request["id"],
            "remote_host": "127.0.0.1", "remote_port": 5600, "remote_num_tokens": request["length"],
            "tp_size": 1, "dcp_size": 1, "pp_size": 1, "transfer_mode": "either",
        }  # fmt: skip
    return {"do_remote_prefill": True, "do_remote_decode": False, **found}


def answer(config: dict[str, Any], request: dict[str, Any], fault: str) -> dict[str, Any]:
    """To one request."""
    connector, t0 = config["kv"]["kv_connector"], time.monotonic()
    decode = config["kv"]["kv_role"] == "kv_consumer"
    if decode and request["params"] is None:  # it computes the prompt itself
        return {"id": request["id"], "tokens": [7] * request["new"], "t0": t0, "t1": t0 + 0.1, "t2": t0 + 0.2}
    missing = NEEDED[connector] - set(request["params"]) if decode else set()
    if fault == "error" or missing or request["params"].get("do_remote_prefill", False) is not decode:
        return {"id": request["id"], "error": f"as asked for, or parameters are missing: {sorted(missing)}"}
    seed = request["seed"] + (fault == "wrong")
    tokens = np.random.default_rng(seed).integers(1000, size=request["new"]).tolist()
    first = time.monotonic() + (LATER_S if decode else 0)
    times = {"t0": t0, "t1": first, "t2": first + 1e-3}
    return {"id": request["id"], "tokens": tokens, "params": None if decode else params(connector, request), **times}


def answer_of_sglang(config: dict[str, Any], request: dict[str, Any], fault: str) -> dict[str, Any]:
    """To one request of a router that names a room."""
    args, t0 = config["args"], time.monotonic()
    mode = args.get("disaggregation_mode", "null")
    where = {"disaggregation_transfer_backend", "disaggregation_bootstrap_port"}
    if fault == "error" or (mode != "null" and not where <= args.keys()) or request["room"] < 1 << 40:
        return {"id": request["id"], "error": "as asked for, or arguments are missing, or the room may not be new"}
    tokens = np.random.default_rng(request["seed"] + (fault == "wrong")).integers(1000, size=request["new"]).tolist()
    first = time.monotonic() + LATER_S * ({"null": 1, "prefill": 0, "decode": 2}[mode] + (fault == "slow"))
    return {"id": request["id"], "tokens": tokens, "t0": t0, "t1": first, "t2": first + 1e-3}


def name_of(config: dict[str, Any]) -> str:
    """Of an instance, as in ``FAKE_ENGINE``; of SGLang's ``backend-mode``."""
    if "kv" in config:
        return str(config["kv"]["engine_id"])
    args = config["args"]
    return f"{args.get('disaggregation_transfer_backend')}-{args.get('disaggregation_mode')}"


def main() -> None:
    """Serve until the input ends."""
    config = json.loads(sys.argv[1])
    answered = answer if "kv" in config else answer_of_sglang
    faults = dict(one.split("=") for one in os.environ.get("FAKE_ENGINE", "").split(",") if one)
    fault = faults.get(name_of(config), "")
    if fault == "end":
        sys.exit("RuntimeError: no such GPU")
    print(json.dumps({"id": "ready", "start_s": 0.1}), flush=True)
    for line in sys.stdin:
        if fault == "once":
            print(json.dumps(answered(config, json.loads(line), "error")), flush=True)
            fault = ""
        elif fault != "silent":
            print(json.dumps(answered(config, json.loads(line), fault)), flush=True)


if __name__ == "__main__":
    main()
