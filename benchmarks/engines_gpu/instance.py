"""One vLLM instance, which reads requests as lines of JSON and writes answers: ``python -m ... CONFIG``.

``CONFIG`` is ``{"model", "args", "kv"}``. A request is ``{"id", "seed", "length", "new", "params"}``: its prompt is
drawn from the seed, in each instance alike, and ``new`` tokens are asked for; or it has a ``prompt`` instead. An answer
has ``tokens``, ``params``, the number of tokens of the prompt that were ``cached``, and times of ``CLOCK_MONOTONIC``,
which all processes of a host share: ``t0`` (handed to vLLM), ``t1`` (first token) and ``t2`` (last token); or
``error``. The first line is the answer ``ready``. The file imports nothing of this repository: the library comes from
the instance's ``PYTHONPATH``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

VOCABULARY = range(3, 30_000)


def prompt(seed: int, length: int) -> list[int]:
    """Random tokens."""
    drawn: list[int] = np.random.default_rng(seed).integers(VOCABULARY.start, VOCABULARY.stop, length).tolist()
    return drawn


class Lines(ABC):
    """Reads requests, and writes answers to a file descriptor; what serves them is another class's."""

    def __init__(self, engine: Any, out: int) -> None:
        self._engine = engine
        self._out = out

    def say(self, answer: Mapping[str, Any]) -> None:
        """Write a line, whole, whatever the size of the pipe."""
        line = memoryview((json.dumps(answer) + "\n").encode())
        while line:
            line = line[os.write(self._out, line) :]

    @abstractmethod
    async def answer(self, asked: Mapping[str, Any]) -> None:
        """Serve a request."""

    async def serve(self) -> None:
        """Answer until the input ends."""
        loop = asyncio.get_running_loop()
        tasks = set()
        reader = asyncio.StreamReader(limit=1 << 24)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            task = loop.create_task(self.answer(json.loads(line)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        self._engine.shutdown()


class Server(Lines):
    """An engine of vLLM."""

    def __init__(self, config: Mapping[str, Any], out: int) -> None:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        kv = KVTransferConfig(**config["kv"])
        args = AsyncEngineArgs(
            model=config["model"], skip_tokenizer_init=True, kv_transfer_config=kv, **config["args"]
        )  # fmt: skip
        super().__init__(AsyncLLM.from_engine_args(args), out)

    async def answer(self, asked: Mapping[str, Any]) -> None:
        """Serve a request."""
        from vllm import SamplingParams

        tokens = asked.get("prompt") or prompt(asked["seed"], asked["length"])
        extra = {"kv_transfer_params": asked["params"]} if asked.get("params") else None
        sampling = SamplingParams(
            temperature=0.0, max_tokens=asked["new"], ignore_eos=True, extra_args=extra, detokenize=False
        )
        t0, t1, last = time.monotonic(), None, None
        try:
            async for output in self._engine.generate({"prompt_token_ids": tokens}, sampling, asked["id"]):
                t1 = t1 or time.monotonic()
                last = output
        except Exception as exc:  # reported, and the driver ends the run of this mode
            self.say({"id": asked["id"], "error": f"{type(exc).__name__}: {exc}"})
            return
        if last is None or t1 is None or last.outputs[0].finish_reason == "error":
            self.say({"id": asked["id"], "error": "vLLM ended the request with an error"})
            return
        self.say(
            {
                "id": asked["id"],
                "tokens": list(last.outputs[0].token_ids),
                "params": last.kv_transfer_params,
                "cached": last.num_cached_tokens,
                "t0": t0,
                "t1": t1,
                "t2": time.monotonic(),
            }
        )


async def main() -> None:
    """Start, and serve."""
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print does not mix with the answers
    began = time.monotonic()
    server = Server(json.loads(sys.argv[1]), out)
    server.say({"id": "ready", "start_s": time.monotonic() - began})
    await server.serve()


if __name__ == "__main__":
    asyncio.run(main())
