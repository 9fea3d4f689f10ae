"""One SGLang instance, which reads requests as lines of JSON and writes answers: ``python -m ... CONFIG``.

``CONFIG`` is ``{"model", "args", "bootstrap_port"}``, and a request ``{"id", "seed", "length", "new", "room"}``; the
rest is that of ``instance.py``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from .instance import Lines, prompt


class Server(Lines):
    """An engine of SGLang."""

    def __init__(self, config: Mapping[str, Any], out: int) -> None:
        from sglang.srt.entrypoints.engine import Engine

        super().__init__(Engine(model_path=config["model"], skip_tokenizer_init=True, **config["args"]), out)
        self._port = config["bootstrap_port"] if "disaggregation_mode" in config["args"] else None

    async def answer(self, asked: Mapping[str, Any]) -> None:
        """Serve a request."""
        where = {} if self._port is None else {
            "bootstrap_host": "127.0.0.1", "bootstrap_port": self._port, "bootstrap_room": asked["room"]}  # fmt: skip
        sampling = {"temperature": 0, "max_new_tokens": asked["new"], "ignore_eos": True}
        t0, t1 = time.monotonic(), None
        tokens: list[int] = []
        try:
            chunks = await self._engine.async_generate(
                input_ids=prompt(asked["seed"], asked["length"]), sampling_params=sampling, stream=True, **where
            )
            async for chunk in chunks:
                t1 = t1 or time.monotonic()
                count = chunk["meta_info"]["completion_tokens"]
                tokens = [*tokens[: count - len(chunk["output_ids"])], *chunk["output_ids"]]
                reason = chunk["meta_info"].get("finish_reason") or {}
                if reason.get("type") == "abort":
                    raise RuntimeError(reason.get("message", "aborted"))
        except Exception as exc:  # reported, and the driver ends the run of this mode
            self.say({"id": asked["id"], "error": f"{type(exc).__name__}: {exc}"})
            return
        if t1 is None:
            self.say({"id": asked["id"], "error": "SGLang ended the request without a token"})
            return
        self.say({"id": asked["id"], "tokens": tokens, "t0": t0, "t1": t1, "t2": time.monotonic()})


def main() -> None:
    """Start, and serve."""
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print does not mix with the answers
    began = time.monotonic()
    server = Server(json.loads(sys.argv[1]), out)
    server.say({"id": "ready", "start_s": time.monotonic() - began})
    asyncio.run(server.serve())


if __name__ == "__main__":
    main()
