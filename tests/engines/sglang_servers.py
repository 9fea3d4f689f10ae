"""Servers of SGLang on the CPU, in processes of their own, and what they answer over HTTP."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ON_CPU = Path(__file__).with_name("sglang_cpu")
ROUTER = ROOT / "examples" / "router.py"
START_S = 240
ANSWER_S = 120

ARGUMENTS = {
    "device": "cpu", "attention-backend": "torch_native", "sampling-backend": "pytorch", "dtype": "float32",
    "max-total-tokens": 4096, "max-running-requests": 8, "disable-overlap-schedule": True, "disable-cuda-graph": True,
    "skip-tokenizer-init": True, "disable-custom-all-reduce": True, "skip-server-warmup": True,
    "disaggregation-decode-retraction-backup": "cpu_tensor",
}  # fmt: skip

_taken: set[int] = set()


def free_port() -> int:
    """A port that nothing listens at; SGLang derives further ports from some, so they lie far apart.

    There is room for about twenty: :func:`give_back` those that are not used any more.
    """
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port < 60_000 and all(abs(port - other) > 500 for other in _taken):
            _taken.add(port)
            return port


def give_back(*ports: int) -> None:
    """Ports of :func:`free_port` that are not used any more."""
    _taken.difference_update(ports)


def sampling(count: int) -> dict[str, Any]:
    """The best ``count`` tokens."""
    return {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}


def ask(port: int, method: str, path: str, body: object = None) -> Any:
    """The answer to a request, as JSON if it is."""
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        content = connection.getresponse().read()
    finally:
        connection.close()
    try:
        return json.loads(content)
    except ValueError:
        return content.decode()


def on_cpu() -> dict[str, str]:
    """Variables of a process that imports SGLang on a CPU."""
    paths = [str(ON_CPU), str(ROOT / "src"), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}


class Server:
    """A process group that runs ``sglang.launch_server``.

    Args:
        log: where its output goes.
        model: folder of the model.
        mode: ``null``, ``prefill`` or ``decode``.
        backend: transfer backend.
        bootstrap: port of the bootstrap server of prefill; None: one that is free.
        options: of the plug-in.
        environment: further variables.
        python: of an environment with SGLang.
        args: arguments of the server, with underscores; False: it has not got this one.
    """

    def __init__(
        self,
        log: Path,
        model: Path,
        mode: str = "null",
        *,
        backend: str = "disagg_kv",
        bootstrap: int | None = None,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
        **args: Any,
    ) -> None:
        self.log, self.port, self.bootstrap = log, free_port(), bootstrap or free_port()
        self._nccl = free_port()
        given = {
            **ARGUMENTS, "model-path": str(model), "port": self.port, "nccl-port": self._nccl, "page-size": 1,
            **{name.replace("_", "-"): value for name, value in args.items()},
        }  # fmt: skip
        if "dp-size" in given:  # each replica needs a port of its own, and finds one
            del given["nccl-port"]
        if mode != "null":
            given |= {"disaggregation-mode": mode, "disaggregation-transfer-backend": backend}
            given["disaggregation-bootstrap-port"] = self.bootstrap
        words = [
            word
            for name, value in given.items()
            if value is not False
            for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
        ]
        env = {
            **on_cpu(), "OMP_NUM_THREADS": "1", "DISAGG_KV_SGLANG": json.dumps(dict(options or {})),
            **(environment or {}),
        }  # fmt: skip
        if (ranks := math.prod(int(given.get(f"{one}-size", 1)) for one in ("tp", "pp", "dp"))) > 1:
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(core % (os.cpu_count() or 1)) for core in range(ranks))
        with log.open("w") as out:
            self._process = subprocess.Popen(
                [python, "-W", "ignore", "-m", "sglang.launch_server", *words],
                env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        self._threads = ThreadPoolExecutor(64)

    def call(self, method: str, path: str, body: object = None) -> Any:
        """The answer to a request, as JSON if it is."""
        return ask(self.port, method, path, body)

    def ready(self) -> Server:
        """Once it answers."""
        deadline = time.monotonic() + START_S
        while True:
            assert self._process.poll() is None, f"the server has ended:\n{self.log.read_text()[-6000:]}"
            assert time.monotonic() < deadline, f"the server does not start:\n{self.log.read_text()[-6000:]}"
            try:
                if isinstance(self.call("GET", "/model_info"), dict):
                    return self
            except (OSError, HTTPException):
                time.sleep(0.3)

    def begin(
        self, tokens: Sequence[int], count: int, prefill: Server | None = None, room: int | None = None, rid: str = ""
    ) -> Future[Any]:
        """Ask for ``count`` tokens after ``tokens``; with the bootstrap server of ``prefill`` and a room."""
        body: dict[str, Any] = {"input_ids": list(tokens), "sampling_params": sampling(count)}
        if rid:
            body["rid"] = rid
        if prefill is not None:
            body |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap, "bootstrap_room": room}
        return self._threads.submit(self.call, "POST", "/generate", body)

    def abort(self, rid: str) -> None:
        """The client goes away."""
        self.call("POST", "/abort_request", {"rid": rid})

    def used_tokens(self) -> int:
        """Tokens of the cache that requests hold."""
        loads = self.call("GET", "/v1/loads")["loads"]
        return sum(load["num_used_tokens"] for load in loads)

    def logged(self, text: str) -> bool:
        """Whether its log has a text."""
        return text in self.log.read_text()

    def pause(self) -> None:
        """SIGSTOP to all processes of the server."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """After a pause."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to all processes of the server."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End it."""
        if self._process.poll() is None:
            self.kill()
        give_back(self.port, self.bootstrap, self._nccl)
        self._threads.shutdown(wait=True, cancel_futures=True)


def serve(prefill: Server, decode: Server, room: int, tokens: Sequence[int], count: int) -> tuple[Any, Any]:
    """A request as a router sends it: to both at once. Both answers."""
    first = prefill.begin(tokens, 1, prefill, room)
    second = decode.begin(tokens, count, prefill, room)
    return first.result(ANSWER_S), second.result(ANSWER_S)


class Router:
    """The router of ``examples``, in a process of its own, between two servers."""

    def __init__(self, prefill: Server, decode: Server) -> None:
        self.port = free_port()
        self._process = subprocess.Popen(
            [
                sys.executable, str(ROUTER), "--port", str(self.port), "--prefill",
                f"sglang=127.0.0.1:{prefill.port}/{prefill.bootstrap}", "--decode", f"sglang=127.0.0.1:{decode.port}",
            ],
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + ANSWER_S
        while True:
            assert self._process.poll() is None, "the router has ended"
            assert time.monotonic() < deadline, "the router does not start"
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                time.sleep(0.2)

    def call(self, method: str, path: str, body: object = None) -> Any:
        """The answer to a request, as JSON if it is."""
        return ask(self.port, method, path, body)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        give_back(self.port)
