"""One vLLM instance in a process of its own, driven by lines of JSON: run as ``python engine_process.py CONFIG``.

CONFIG is a JSON object: ``model``, ``tp``, ``block_size``, ``kv`` (vLLM's ``KVTransferConfig``, or null), ``args``
(other engine arguments). Each line of the input is ``{"id", "tokens", "n", "params", "leave"}``, ``{"abort": id}``,
``{"metrics": id}`` or ``{"unused": id}``; each line of the output ``{"id", "tokens", "reason", "params", "seconds"}``.
The client of a request goes away once it has ``leave`` tokens. Lines that begin otherwise are vLLM's own.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from math import inf
from typing import Any

MARK = "\x1eresult "


def say(what: dict[str, Any]) -> None:
    """One line of output."""
    os.write(OUT, (MARK + json.dumps(what) + "\n").encode())


async def serve(config: dict[str, Any]) -> None:
    """Until the input ends."""
    from vllm import SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    kv = None if config.get("kv") is None else KVTransferConfig(**config["kv"])
    args = AsyncEngineArgs(
        model=config["model"],
        skip_tokenizer_init=True,
        dtype=config.get("dtype", "float32"),
        enforce_eager=True,
        block_size=config.get("block_size", 32),
        enable_prefix_caching=config.get("prefix_caching", False),
        max_model_len=config.get("max_model_len", 1024),
        tensor_parallel_size=config.get("tp", 1),
        kv_transfer_config=kv,
        **config.get("args", {}),
    )
    engine = AsyncLLM.from_engine_args(args)
    say({"id": "ready"})

    async def answer(command: dict[str, Any]) -> None:
        began, first, final = time.monotonic(), None, None
        leave = command.get("leave") or inf
        extra = {"kv_transfer_params": command["params"]} if command.get("params") else None
        sampling = SamplingParams(
            temperature=0.0, max_tokens=command["n"], ignore_eos=True, extra_args=extra, detokenize=False
        )
        try:
            async for output in engine.generate({"prompt_token_ids": command["tokens"]}, sampling, command["id"]):
                first = first or time.monotonic() - began
                final = output
                if len(output.outputs[0].token_ids) >= leave:
                    leave = inf
                    tasks[command["id"]].cancel()
        except asyncio.CancelledError:
            had = [] if final is None else list(final.outputs[0].token_ids)
            say({"id": command["id"], "reason": "abort", "tokens": had})
            return
        except Exception as exc:
            say({"id": command["id"], "reason": "error", "tokens": [], "error": f"{type(exc).__name__}: {exc}"})
            return
        assert final is not None
        one = final.outputs[0]
        say({
            "id": command["id"], "tokens": list(one.token_ids), "reason": one.finish_reason,
            "params": final.kv_transfer_params, "first_s": first, "seconds": time.monotonic() - began,
            "cached": final.num_cached_tokens,
        })  # fmt: skip

    loop = asyncio.get_running_loop()
    tasks: dict[str, asyncio.Task[None]] = {}
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        if "abort" in command:
            if command["abort"] in tasks:
                tasks[command["abort"]].cancel()
        elif "metrics" in command:
            from prometheus_client import generate_latest

            say({"id": command["metrics"], "text": generate_latest().decode()})
        elif "unused" in command:
            say({"id": command["unused"], "unused": await engine.reset_prefix_cache()})
        else:
            tasks[command["id"]] = loop.create_task(answer(command))
    engine.shutdown()


if __name__ == "__main__":
    OUT = os.dup(1)
    os.dup2(2, 1)
    asyncio.run(serve(json.loads(sys.argv[1])))
