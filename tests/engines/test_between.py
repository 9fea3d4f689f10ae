"""One engine prefills and the other decodes: the tokens are those of one engine, or there is a named error.

The tests run in the environment of vLLM and start SGLang in its own: ``DISAGG_KV_SGLANG_PYTHON`` is its Python.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from disagg_kv.engines.sglang.bootstrap import BootstrapServer, register
from disagg_kv.engines.sglang.host import FIRST_TOKEN
from disagg_kv.rendezvous import Source

from .conftest import Start
from .instances import ENVIRONMENT, PREFILL, ROOT, Instance, transfer
from .sglang_servers import ANSWER_S, ARGUMENTS, ON_CPU, Server, ask, free_port, give_back, sampling

SGLANG = os.environ.get("DISAGG_KV_SGLANG_PYTHON", "")
if not SGLANG:
    pytest.skip("DISAGG_KV_SGLANG_PYTHON names no Python with SGLang", allow_module_level=True)
pytestmark = pytest.mark.timeout(900)

LENGTHS = (5, 16, 33, 150, 400)
COUNT = 12
OPTIONS = {"description": "common", "verify": "full"}
TABLE = pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "page", "block"), [(1, 1, 1, 32), (1, 1, 16, 64), (2, 1, 16, 32)]
)


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{length} {seed}")
    return [draw.randrange(3, 512) for _ in range(length)]


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start a server of SGLang; its log is in the test's folder."""
    with ExitStack() as ends:

        def begin(mode: str, model: Path = model, **given: Any) -> Server:
            one = Server(tmp_path / f"sglang {mode}.log", model, mode, python=SGLANG, **{"options": OPTIONS, **given})
            ends.callback(one.close)
            return one

        yield begin


StartServer = Callable[..., Server]


class Alone:
    """What each engine answers without any transfer, about one model."""

    def __init__(self, folder: Path, model: Path) -> None:
        vllm, sglang = Instance(folder / "vllm.log", model, None), Server(folder / "sglang.log", model, python=SGLANG)
        try:
            vllm.ready(), sglang.ready()
            self.of_vllm = {n: vllm.ask(f"alone {n}", prompt(n), COUNT)["tokens"] for n in LENGTHS}
            self.of_sglang = {n: sglang.begin(prompt(n), COUNT).result()["output_ids"] for n in LENGTHS}
        finally:
            vllm.close()
            sglang.close()


@pytest.fixture(scope="session")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Asked once."""
    return Alone(tmp_path_factory.mktemp("alone"), model)


@pytest.fixture(scope="session")
def scaled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, and another rotation of K: that of Llama 3.1, scaled from 64 positions on."""
    folder = tmp_path_factory.mktemp("scaled") / "model"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_both_engines_answer_alike(alone: Alone) -> None:
    """What the others compare with."""
    assert alone.of_vllm == alone.of_sglang
    assert all(len(set(tokens)) > COUNT // 2 for tokens in alone.of_vllm.values())


def test_a_scaled_rotation(start: Start, server: StartServer, scaled: Path, alone: Alone, tmp_path: Path) -> None:
    """The engines alone agree on it, and so they do together. Its tokens are not those of the model above."""
    both = Alone(tmp_path, scaled)
    assert both.of_vllm == both.of_sglang
    assert both.of_vllm[400] != alone.of_vllm[400]
    prefill = server("prefill", scaled)
    decode = Instance(tmp_path / "decode.log", scaled, transfer("kv_consumer", **OPTIONS)).ready()
    try:
        prefill.ready()
        for room, length in enumerate(LENGTHS, 1):
            assert from_sglang(prefill, decode, room, prompt(length))["tokens"] == both.of_vllm[length], length
    finally:
        decode.close()


def from_sglang(prefill: Server, decode: Instance, room: int, tokens: list[int]) -> dict[str, Any]:
    """A request as the router sends it to both."""
    found = HTTPConnection("127.0.0.1", prefill.bootstrap, timeout=ANSWER_S)
    found.request("GET", "/instance")
    where = json.loads(found.getresponse().read())
    found.close()
    first = prefill.begin(tokens, 1, prefill, room)
    params = {"do_remote_prefill": True, "transfer_id": f"sglang {room}", **where}
    answer = decode.ask(f"room {room}", tokens, COUNT, params)
    first.result()
    return answer


class FromVLLM:
    """Requests as the router sends them, first to vLLM, and the bootstrap server that SGLang asks."""

    def __init__(self, prefill: Instance) -> None:
        self._prefill, self._server = prefill, BootstrapServer("127.0.0.1", 0)

    def __call__(self, decode: Server, room: int, tokens: list[int], **changes: Any) -> Any:
        params = {**PREFILL, "transfer_id": f"sglang {room}"}
        found = self._prefill.ask(f"room {room}", tokens, 1, params)["params"]
        source = Source(found["instance"], found["addresses"])
        register(f"127.0.0.1:{self._server.port}", source, threading.Event()).join()
        custom = {"custom_params": {FIRST_TOKEN: found["first_token"], **changes}}
        return decode.call("POST", "/generate", {
            "input_ids": tokens, "sampling_params": {**sampling(COUNT), **custom}, "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self._server.port, "bootstrap_room": room,
        })  # fmt: skip

    def close(self) -> None:
        """End the server."""
        self._server.close()


@pytest.fixture
def from_vllm() -> Iterator[Callable[[Instance], FromVLLM]]:
    """See :class:`FromVLLM`."""
    with ExitStack() as ends:

        def begin(prefill: Instance) -> FromVLLM:
            one = FromVLLM(prefill)
            ends.callback(one.close)
            return one

        yield begin


@TABLE
def test_sglang_prefills_and_vllm_decodes(
    start: Start, server: StartServer, alone: Alone, prefill_tp: int, decode_tp: int, page: int, block: int
) -> None:
    """Chunked prefill of 64 tokens, and a checksum of every byte."""
    prefill = server("prefill", tp_size=prefill_tp, page_size=page, chunked_prefill_size=64)
    decode = start("decode", transfer("kv_consumer", **OPTIONS), tp=decode_tp, block_size=block).ready()
    prefill.ready()
    for room, length in enumerate(LENGTHS, 1):
        answer = from_sglang(prefill, decode, room, prompt(length))
        assert (answer["reason"], answer["tokens"]) == ("length", alone.of_vllm[length]), length
    assert decode.prompt_tokens("local_compute") <= len(LENGTHS)  # the last token of each


@TABLE
def test_vllm_prefills_and_sglang_decodes(
    start: Start, server: StartServer, from_vllm: Callable[[Instance], FromVLLM], alone: Alone,
    prefill_tp: int, decode_tp: int, page: int, block: int,
) -> None:  # fmt: skip
    """The same the other way round."""
    args = {"max_num_batched_tokens": 64}
    prefill = start("prefill", transfer("kv_producer", **OPTIONS), tp=prefill_tp, block_size=block, args=args)
    decode = server("decode", tp_size=decode_tp, page_size=page).ready()
    ask = from_vllm(prefill.ready())
    for room, length in enumerate(LENGTHS, 1):
        assert ask(decode, room, prompt(length)).get("output_ids") == alone.of_sglang[length], length
    assert not decode.used_tokens()


def test_swapped_heads_give_other_tokens(
    start: Start, server: StartServer, from_vllm: Callable[[Instance], FromVLLM], alone: Alone
) -> None:
    """The comparisons above can fail, on both engines."""
    tokens, swapped = prompt(150), {"kv_connector": "SwappedHeads", "kv_connector_module_path": "tests.engines.swapped"}
    prefill = server("prefill")
    decode = start("decode", {**transfer("kv_consumer", **OPTIONS), **swapped}).ready()
    answer = from_sglang(prefill.ready(), decode, 1, tokens)
    assert len(answer["tokens"]) == COUNT
    assert answer["tokens"] != alone.of_vllm[150]
    prefill.close()
    decode.close()
    ask = from_vllm(start("prefill", transfer("kv_producer", **OPTIONS)).ready())
    found = ask(server("decode", environment={"SGLANG_CPU_SWAP": "1"}).ready(), 1, tokens)
    assert len(found["output_ids"]) == COUNT
    assert found["output_ids"] != alone.of_sglang[150]


def test_another_rotation_is_refused_by_name(
    start: Start, server: StartServer, from_vllm: Callable[[Instance], FromVLLM], scaled: Path, alone: Alone
) -> None:
    """Every request between the two fails."""
    ask = from_vllm(start("prefill", transfer("kv_producer", **OPTIONS)).ready())
    decode = server("decode", scaled).ready()
    for room in (1, 2):
        answer = ask(decode, room, prompt(50))
        assert answer["object"] == "error", answer
        assert "spec.layers[0].k of head 0.format" in answer["message"]
        assert "llama3" in answer["message"]
    assert not decode.used_tokens()


@pytest.fixture(scope="session")
def spoken(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a tokenizer, without which SGLang does not answer OpenAI's completions."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("spoken") / "model"
    shutil.copytree(model, folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(512)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("first", ["sglang", "vllm"])
def test_the_example_answers_over_http(spoken: Path, alone: Alone, tmp_path: Path, first: str) -> None:
    """The launch script, as a user starts it; also streamed, and with parameters of a client, which are dropped."""
    port, prefill, decode, bootstrap = ports = [free_port() for _ in range(4)]
    cpu = " ".join(
        f"--{name}" if value is True else f"--{name} {value}"
        for name, value in ARGUMENTS.items()
        if name != "skip-tokenizer-init"
    )
    env = {
        **os.environ, **ENVIRONMENT, "PORT": str(port), "PREFILL_PORT": str(prefill),
        "DECODE_PORT": str(decode), "BOOTSTRAP_PORT": str(bootstrap), "ROUTER_PYTHON": sys.executable,
        "SGLANG": f"env PYTHONPATH={ON_CPU}:{ROOT / 'src'}:{ROOT} {SGLANG} -W ignore -m sglang.launch_server",
        "SGLANG_OPTIONS": cpu, "VLLM": f"{sys.executable} -m vllm.entrypoints.openai.api_server --model",
        "VLLM_OPTIONS": "--dtype float32 --enforce-eager --block-size 32 --max-model-len 1024",
    }  # fmt: skip
    log = (tmp_path / "log").open("w")
    script = subprocess.Popen(
        [str(ROOT / "examples" / "between" / "serve.sh"), first, str(spoken)],
        env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        while True:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            assert script.poll() is None, (tmp_path / "log").read_text()[-6000:]
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-6000:]
            time.sleep(0.5)
        common = {"model": str(spoken), "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
        hostile = {"kv_transfer_params": {"do_remote_prefill": True}, "custom_params": {FIRST_TOKEN: 3}}
        for length in LENGTHS:
            wanted = " ".join(f"w{token}" for token in alone.of_vllm[length])
            for body in ({"prompt": prompt(length)}, {"prompt": " ".join(f"w{token}" for token in prompt(length))}):
                answer = ask(port, "POST", "/v1/completions", {**common, **hostile, **body})
                assert answer["choices"][0]["text"].split() == wanted.split(), answer
        streamed = ask(port, "POST", "/v1/completions", {**common, "prompt": prompt(400), "stream": True})
        parts = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        assert len(parts) > 1
        assert "".join(part["choices"][0]["text"] for part in parts if part["choices"]).split() == wanted.split()
        assert "one choice" in str(ask(port, "POST", "/v1/completions", {**common, "prompt": [5], "n": 2}))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
        script.wait()
        log.close()
        give_back(*ports)
