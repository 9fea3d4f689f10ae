"""Compare the tokens that come through the router with those of the decode instance alone; for a first start.

    python compare.py MODEL [--router http://localhost:8000] [--decode http://localhost:8200] [--lengths 100,1000]

Each prompt has random token ids. The decode instance then computes it by itself. Start the servers with ``--dtype
float32 --no-enable-prefix-caching``: in 16 bits, rounding may change a token, since decode computes the last token of
a transferred prompt by itself. Prints one JSON document. The exit code is 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def ask(url: str, model: str, prompt: list[int], count: int) -> tuple[list[int], float]:
    """The tokens of an answer, and the milliseconds until the first one."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "stream": True,
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    tokens: list[int] = []
    first, began = 0.0, time.monotonic()
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                first = first or time.monotonic() - began
                tokens += json.loads(line[6:])["choices"][0].get("token_ids") or ()
    return tokens, round(first * 1e3, 1)


def main() -> int:
    """Ask one prompt after the other, then all at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as the servers name it")
    parser.add_argument("--router", default="http://localhost:8000")
    parser.add_argument("--decode", default="http://localhost:8200")
    parser.add_argument("--lengths", default="100,1000,4000", help="tokens of the prompts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ids", type=int, default=10_000, help="token ids are below this; the model has as many")
    parser.add_argument("--count", type=int, default=32, help="tokens of an answer")
    given = parser.parse_args()
    lengths = [int(length) for length in given.lengths.split(",")] * given.rounds
    prompts = [[random.randrange(10, given.ids) for _ in range(length)] for length in lengths]
    rows: list[dict[str, Any]] = []
    alone: list[list[int]] = []
    for prompt in prompts:
        tokens, first = ask(given.router, given.model, prompt, given.count)
        wanted, own = ask(given.decode, given.model, prompt, given.count)
        alone.append(wanted)
        rows.append({"prompt": len(prompt), "equal": tokens == wanted, "first_ms": first, "first_alone_ms": own})
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: ask(given.router, given.model, prompt, given.count)[0], prompts))
    equal = sum(one == wanted for one, wanted in zip(together, alone, strict=True))
    print(json.dumps({"one_by_one": rows, "at_once": {"requests": len(prompts), "equal": equal}}, indent=1))
    return 0 if equal == len(prompts) and all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OSError as error:
        sys.exit(f"compare.py: {error}: has serve.sh said that it is ready?")
