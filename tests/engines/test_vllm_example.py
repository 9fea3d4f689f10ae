"""``examples/vllm`` and the pages of vLLM: their commands, as a reader types them, serve OpenAI's completions.

Names of the pages are replaced: the model by a small one with random weights, hosts by loopback addresses, ports by
free ones. Each server gets options with which it starts in less time, and computes as the instance to which it is
compared.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import marked

from .instances import ENVIRONMENT, ROOT, add_tokenizer, small_model, transfer

pytestmark = pytest.mark.timeout(900)

PAGES = [ROOT / "docs" / "engines" / name for name in ("vllm.md", "vllm-operate.md")]
MODEL = "Qwen/Qwen3-0.6B"
FAST = "--enforce-eager --dtype float32 --block-size 32 --no-enable-prefix-caching"
START_S = 400
COUNT = 8
GREEDY = {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}


def prompt(length: int, seed: int = 0) -> list[int]:
    return [3 + (7 * seed + 5 * one) % 250 for one in range(length)]


def free_ports(count: int) -> list[int]:
    """Ports of this host that nothing listens at."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Reader:
    """Runs the page's commands in a folder of its own; what it starts ends with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "examples").symlink_to(ROOT / "examples")
        self.model = small_model(folder / "model")
        add_tokenizer(self.model)
        router, prefill, decode, self.metrics_port, self.other_port = free_ports(5)
        self.ports = {"router": router, "prefill": prefill, "decode": decode}
        self._names = {
            MODEL: str(self.model),
            "--max-model-len 4096": f"--max-model-len 1024 {FAST}",
            "--lengths 100,1000": (
                f"--lengths 100,500 --ids 500 --router http://localhost:{router} --decode http://localhost:{decode}"
            ),
            "10.0.0.1": "127.0.0.1",
            "10.0.0.2": "127.0.0.2",
            "eth0": "lo",
            "8000": str(router),
            "8100": str(prefill),
            "8200": str(decode),
        }
        given = {"PORT": router, "PREFILL_PORT": prefill, "DECODE_PORT": decode, "UCX_TLS": "tcp"}
        self.env = {**os.environ, **ENVIRONMENT, **{name: str(value) for name, value in given.items()}}
        self.env |= {"DECODE_METRICS": f"127.0.0.1:{self.metrics_port}", "XDG_RUNTIME_DIR": str(folder)}
        self.env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{self.env['PATH']}"
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def command(self, marker: str) -> str:
        """A block of the pages."""
        text = "".join(marked(page, marker) for page in PAGES)
        assert text, f"the pages have no block {marker!r}"
        for name, own in self._names.items():
            text = text.replace(name, own)
        return text

    def runs(self, marker: str) -> str:
        """The output of a block."""
        return subprocess.run(
            ["bash", "-euc", self.command(marker)], env=self.env, cwd=self.folder, check=True, capture_output=True,
            text=True, timeout=120,
        ).stdout  # fmt: skip

    def starts(self, marker: str) -> None:
        """A block that goes on until the reader ends it."""
        self.begins(marker, self.command(marker))

    def begins(self, name: str, command: str) -> None:
        """A command that goes on."""
        with (self.folder / "log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                ["bash", "-euc", command], env=self.env, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def log(self) -> str:
        """What all of them have written."""
        return (self.folder / "log").read_text()

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        """Once it is so."""
        deadline = time.monotonic() + seconds
        while not condition():
            ended = [name for name, one in self.running.items() if one.poll() is not None]
            assert not ended, f"{ended} ended before {what}:\n{self.log[-6000:]}"
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s:\n{self.log[-6000:]}"
            time.sleep(0.2)

    def ends(self, name: str) -> None:
        """Kill one of them."""
        one = self.running.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)
        one.wait()

    def post(self, body: Mapping[str, Any], port: int | None = None) -> tuple[int, Any]:
        """The status, and the JSON or the text of the answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{port or self.ports['router']}/v1/completions",
            json.dumps({"model": str(self.model), **body}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            with refused:
                status, text = refused.code, refused.read().decode()
        return status, json.loads(text) if text.startswith("{") else text

    def tokens(self, prompt: list[int], port: int | None = None, **body: Any) -> list[int]:
        """The tokens of an answer."""
        status, answer = self.post({**GREEDY, "prompt": prompt, **body}, port)
        assert status == 200, answer
        return list(answer["choices"][0]["token_ids"])

    def alone(self, prompt: list[int]) -> list[int]:
        """What the decode instance answers if it computes the prompt itself."""
        return self.tokens(prompt, self.ports["decode"])

    def healthy(self, server: str, host: str = "127.0.0.1") -> bool:
        """Whether a server answers."""
        try:
            with urllib.request.urlopen(f"http://{host}:{self.ports[server]}/health", timeout=60):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False

    def metric(self, server: str, name: str, label: str = "") -> float:
        """The sum of one of vLLM's metrics, of the lines with a label."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[server]}/metrics", timeout=60) as shown:
            lines = shown.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{") and label in line)

    def quiet(self) -> bool:
        """Whether no server has a request or a block in use."""
        gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        return not any(self.metric(server, name) for server in ("prefill", "decode") for name in gauges)

    def close(self) -> None:
        """End all."""
        for name in list(self.running):
            self.ends(name)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """The quick start of the page."""
    made = Reader(tmp_path_factory.mktemp("quick"))
    try:
        made.starts("vllm serve")
        made.until(lambda: "serve.sh: ready: " in made.log, "the servers are ready", START_S)
        yield made
    finally:
        made.close()


def test_the_quick_start_shows_what_the_page_says(reader: Reader) -> None:
    """The answer, a line of each instance, and the table of endpoints."""
    assert f"serve.sh: ready: http://localhost:{reader.ports['router']}/v1/completions" in reader.log
    for _ in range(2):
        answer = json.loads(reader.runs("vllm ask"))
        assert len(answer["choices"]) == 1
        assert answer["usage"]["completion_tokens"] == 16
    for line in (r"^decode \| .*KV Transfer metrics: loaded=\d", r"^prefill \| .*KV Transfer metrics: sent=\d"):
        reader.until(lambda line=line: bool(re.search(line, reader.log, re.MULTILINE)), line)  # type: ignore[misc]
    top = subprocess.run(
        ["disagg-kv", "top", "--once", "--json"], env=reader.env, check=True, capture_output=True, text=True, timeout=60
    )
    assert top.stdout.count('"open"') == 2
    assert marked(PAGES[0], "vllm serve").count(MODEL) == 1


def test_the_comparison_of_the_page_finds_equal_tokens(reader: Reader) -> None:
    """One by one and at once; the servers compute in float32."""
    found = json.loads(reader.runs("vllm compare"))
    assert [row["prompt"] for row in found["one_by_one"]] == [100, 500] * 3
    assert all(row["equal"] for row in found["one_by_one"])
    assert found["at_once"] == {"requests": 6, "equal": 6}


def test_a_completion_over_http(reader: Reader) -> None:
    """Also streamed, with several choices, and with parameters of a client, which the router replaces.

    Decode's own port shows the rooms that Prometheus gets.
    """
    hostile: dict[str, Any] = {
        "kv_transfer_params": {"do_remote_prefill": True, "addresses": ["unix:///tmp/not/ours"]},
        "min_tokens": 2,
    }
    for number in range(3):
        asked = prompt(100 + 10 * number, number)
        assert reader.tokens(asked, **hostile) == reader.alone(asked)
    asked = prompt(60)
    status, answer = reader.post({**GREEDY, "prompt": asked, "n": 2, "temperature": 1.0})
    assert (status, len(answer["choices"])) == (200, 2)
    status, text = reader.post({**GREEDY, "prompt": asked, "stream": True})
    assert status == 200
    parts = [json.loads(line[6:])["choices"][0] for line in text.splitlines() if line.startswith("data: {")]
    assert [token for part in parts for token in part["token_ids"] or ()] == reader.alone(asked)
    with urllib.request.urlopen(f"http://127.0.0.1:{reader.metrics_port}/metrics", timeout=60) as shown:
        metrics = shown.read().decode()
    ended = re.findall(r'^disagg_kv_rooms_ended_total{.*outcome="done".*side="decode"} (\S+)$', metrics, re.MULTILINE)
    assert sum(map(float, ended)) >= 3


def test_two_routers_serve_the_same_instances(reader: Reader) -> None:
    """One asks at once, the other one after prefill, with requests in flight together."""
    servers = " ".join(f"--{one} vllm=127.0.0.1:{reader.ports[one]}" for one in ("prefill", "decode"))
    reader.begins("second", f"exec python3 examples/router.py --port {reader.other_port} --after-prefill {servers}")

    def listens() -> bool:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", reader.other_port)).close()
            return True
        return False

    reader.until(listens, "the second router listens")
    prompts = [prompt(40 + 20 * number, number) for number in range(8)]
    wanted = [reader.alone(one) for one in prompts]
    loaded = reader.metric("decode", "vllm:disagg_kv_loaded_total")
    with ThreadPoolExecutor(8) as pool:
        ports = [reader.ports["router"], reader.other_port] * 4
        assert list(pool.map(reader.tokens, prompts, ports)) == wanted
    assert reader.metric("decode", "vllm:disagg_kv_loaded_total") == loaded + 8
    reader.until(reader.quiet, "all blocks are free")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_refused_to_the_client(reader: Reader, stream: bool) -> None:
    """By prefill's own words; decode, which was asked at once, has no block left over."""
    status, answer = reader.post({"prompt": prompt(2000), "max_tokens": 4, "stream": stream})
    assert status == 400
    assert "context length" in answer["error"]["message"]
    reader.until(reader.quiet, "all blocks are free")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(reader: Reader, stream: bool) -> None:
    """Long before its last token."""
    before = reader.metric("decode", "vllm:generation_tokens_total")
    client = http.client.HTTPConnection("127.0.0.1", reader.ports["router"])
    body = {"model": str(reader.model), "prompt": prompt(50), "max_tokens": 960, "ignore_eos": True, "stream": stream}
    client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    if stream:
        assert client.getresponse().readline().startswith(b"data: ")
    else:
        reader.until(lambda: reader.metric("decode", "vllm:num_requests_running") > 0, "decode runs")
    client.close()
    reader.until(reader.quiet, "all blocks are free")
    assert reader.metric("decode", "vllm:generation_tokens_total") - before < 900


def test_the_commands_for_two_hosts(tmp_path: Path) -> None:
    """Keys, ZeroMQ and NIXL over TCP. A prefill server that restarts is found again."""
    reader = Reader(tmp_path)
    asked = [prompt(100 + number, number) for number in range(6)]
    try:
        reader.runs("vllm keys")
        reader.starts("vllm prefill host")
        reader.starts("vllm decode host")
        reader.until(lambda: reader.healthy("prefill") and reader.healthy("decode", "127.0.0.2"), "they serve", START_S)
        wanted = [reader.alone(one) for one in asked]
        reader.starts("vllm router host")
        reader.until(lambda: reader.healthy("router"), "the router listens")
        assert [reader.tokens(one) for one in asked[:3]] == wanted[:3]
        assert reader.metric("decode", "vllm:disagg_kv_loaded_total") == 3
        reader.ends("vllm prefill host")
        status, answer = reader.post({**GREEDY, "prompt": asked[3]})
        assert (status, answer["error"]["type"]) == (502, "router_error")
        reader.starts("vllm prefill host")
        reader.until(lambda: reader.healthy("prefill"), "prefill serves again", START_S)
        assert [reader.tokens(one) for one in asked[3:]] == wanted[3:]
        assert reader.metric("decode", "vllm:disagg_kv_loaded_total") == 6
        reader.until(reader.quiet, "all blocks are free")
    finally:
        reader.close()


def test_our_router_serves_a_conversation_both_ways(tmp_path: Path) -> None:
    """Prefill loads the rows of each answer but the last, which decode gives up; no client sees where they are."""
    made = Reader(tmp_path)
    server = f"exec python3 -m vllm.entrypoints.openai.api_server --model {made.model} --max-model-len 1024 {FAST}"
    at = {name: f"localhost:{port}" for name, port in made.ports.items()}
    try:
        for name in ("prefill", "decode"):
            given = json.dumps(transfer("kv_both", "recompute"))
            made.begins(name, f"{server} --port {made.ports[name]} --kv-transfer-config '{given}'")
        made.until(lambda: made.healthy("prefill") and made.healthy("decode"), "the servers are ready", START_S)
        made.begins(
            "router",
            f"exec python3 examples/router.py --port {made.ports['router']} --prefill vllm={at['prefill']} "
            f"--decode vllm={at['decode']} --hold-s 10",
        )
        made.until(lambda: made.healthy("router"), "the router listens")
        tokens = prompt(100)
        for turn in range(3):
            status, answer = made.post({**GREEDY, "prompt": tokens, "prompt_cache_key": "chat"})
            assert status == 200, answer
            assert "kv_transfer_params" not in answer
            found = answer["choices"][0]["token_ids"]
            assert found == made.alone(tokens), turn
            tokens += [*found, *prompt(40, turn + 1)]
        assert made.metric("prefill", "vllm:disagg_kv_loaded_total") == 2
        assert made.metric("prefill", "vllm:disagg_kv_load_failed_total") == 0
        made.until(made.quiet, "all blocks are free")
    finally:
        made.close()
