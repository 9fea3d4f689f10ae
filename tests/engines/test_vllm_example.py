"""``examples/vllm``: two servers and a router answer OpenAI's completions over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from .instances import ENVIRONMENT, ROOT

pytestmark = pytest.mark.timeout(900)

SERVE = ROOT / "examples" / "vllm" / "serve.sh"
SERVER = f"{sys.executable} -m vllm.entrypoints.openai.api_server --model"
COUNT = 8

Post = Callable[[dict[str, Any]], tuple[int, Any]]


def free_ports(count: int) -> list[int]:
    """Ports of this host that nothing listens at."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def send(port: int, body: dict[str, Any]) -> tuple[int, Any]:
    """The status, and the JSON or the text of the answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = answer.read().decode()
        return answer.status, json.loads(text) if text.startswith("{") else text


@pytest.fixture
def metrics_port() -> int:
    """Where the decode instance shows its metrics."""
    return free_ports(1)[0]


@pytest.fixture(params=["", "1"], ids=["one after the other", "together"])
def post(request: pytest.FixtureRequest, model: Path, tmp_path: Path, metrics_port: int) -> Iterator[Post]:
    """The launch script, as a user starts it. ``together``: decode is asked while prefill computes."""
    port, prefill, decode = free_ports(3)
    ports = {"PORT": port, "PREFILL_PORT": prefill, "DECODE_PORT": decode, "TOGETHER": request.param, "VLLM": SERVER}
    ports["DECODE_METRICS"] = f"127.0.0.1:{metrics_port}"
    env = {**os.environ, **ENVIRONMENT, **{name: str(value) for name, value in ports.items()}}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    options = ["--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--block-size", "32"]
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen(
        [str(SERVE), str(model), *options, "--no-enable-prefix-caching", "--max-model-len", "1024"],
        env={**env, "STRATEGY": "staged+layer_pipelined"}, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 400
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                text = (tmp_path / "log").read_text()
                assert server.poll() is None, text[-4000:]
                assert time.monotonic() < deadline, text[-4000:]
                time.sleep(1)
        yield lambda body: send(port, {"model": str(model), **body})
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        log.close()


def test_a_completion_over_http(
    post: Post, tokens_of: Callable[[list[int], int], list[int]], metrics_port: int
) -> None:
    """Also streamed, with several choices, and with parameters of a client, which the router replaces.

    Decode's own port shows the rooms that Prometheus gets.
    """
    common = {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    for number in range(3):
        prompt = [3 + (7 * number + 5 * one) % 500 for one in range(100 + 10 * number)]
        hostile = {"kv_transfer_params": {"do_remote_prefill": True, "addresses": ["unix:///tmp/not/ours"]}}
        status, answer = post({**common, "prompt": prompt, **hostile, "min_tokens": 2})
        assert status == 200
        assert [one["token_ids"] for one in answer["choices"]] == [tokens_of(prompt, COUNT)]
    prompt = [5, 6, 7] * 20
    status, answer = post({**common, "prompt": prompt, "n": 2, "temperature": 1.0})
    assert (status, len(answer["choices"])) == (200, 2)
    status, text = post({**common, "prompt": prompt, "stream": True})
    assert status == 200
    parts = [json.loads(line[6:])["choices"][0] for line in text.splitlines() if line.startswith("data: {")]
    assert [token for part in parts for token in part["token_ids"] or ()] == tokens_of(prompt, COUNT)
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=60) as shown:
        metrics = shown.read().decode()
    ended = re.findall(r'^disagg_kv_rooms_ended_total{.*outcome="done".*side="decode"} (\S+)$', metrics, re.MULTILINE)
    assert sum(map(float, ended)) >= 3
