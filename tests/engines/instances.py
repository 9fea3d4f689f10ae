"""vLLM instances in processes of their own, and what they answer.

They run on vLLM's CPU backend. With ``DISAGG_KV_ON_GPUS=2`` they run on two GPUs: prefill and instances without a
connector on the first, decode on the second. With 1, all run on one.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.engines_gpu.cases import environment

ROOT = Path(__file__).parents[2]
MARK = "\x1eresult "
START_S = 300
ANSWER_S = 120

ON_GPUS = int(os.environ.get("DISAGG_KV_ON_GPUS", "0"))

GPU_ARGS = {
    "attention_backend": "TRITON_ATTN",  # has float32
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 1 << 28,
    "disable_custom_all_reduce": True,
}

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


def small_model(folder: Path) -> Path:
    """A Llama with four KV heads, and weights that give varied greedy tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=2048, initializer_range=0.15,
        tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def add_tokenizer(folder: Path) -> None:
    """A tokenizer for it: a token is a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {text: number for number, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    wrapped: Any = PreTrainedTokenizerFast
    wrapped(tokenizer_object=made).save_pretrained(folder)


def transfer(role: str, policy: str = "fail", **options: Any) -> dict[str, Any]:
    """``--kv-transfer-config`` of an instance."""
    return {
        "kv_connector": "DisaggKVConnector",
        "kv_connector_module_path": "disagg_kv.engines.vllm",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": options,
    }


def nixl(role: str, progress_thread: bool = False) -> dict[str, Any]:
    """The same for vLLM's own ``NixlConnector``; see ``quiet_nixl.py``."""
    quiet = {"kv_connector": "QuietNixlConnector", "kv_connector_module_path": "tests.engines.quiet_nixl"}
    named = {"kv_connector": "NixlConnector"} if progress_thread or ON_GPUS else quiet
    return {**named, "kv_buffer_device": "cuda" if ON_GPUS else "cpu", "kv_role": role}


def on_gpus(kv: Mapping[str, Any] | None, tp: int) -> dict[str, str]:
    """The environment of an instance on GPUs."""
    first = int(ON_GPUS > 1 and kv is not None and kv["kv_role"] == "kv_consumer")
    env = environment(0, [first] if tp == 1 else list(range(tp)), ROOT / "src")
    return {name: value for name, value in env.items() if not name.startswith("VLLM_NIXL_SIDE_CHANNEL")}


class EndedError(AssertionError):
    """The instance's process has ended."""


class Instance:
    """A process that runs ``engine_process.py``."""

    def __init__(
        self,
        log: Path,
        model: Path,
        kv: Mapping[str, Any] | None,
        *,
        tp: int = 1,
        python: str = sys.executable,
        **config: Any,
    ) -> None:
        paths = [str(ROOT), os.environ.get("PYTHONPATH")]
        env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if ON_GPUS:
            env |= on_gpus(kv, tp)
            env["PYTHONPATH"] = os.pathsep.join((str(ROOT), env["PYTHONPATH"]))
            config = {**config, "args": {**GPU_ARGS, **config.get("args", {})}}
        elif tp > 1:
            env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(core % (os.cpu_count() or 1)) for core in range(tp))
        self.log = log
        given = json.dumps({"model": str(model), "kv": kv, "tp": tp, **config})
        script = str(Path(__file__).with_name("engine_process.py"))
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [python, script, given],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._answers: dict[str, queue.SimpleQueue[dict[str, Any] | None]] = {}
        self._changed = threading.Lock()
        self._sending = threading.Lock()
        self._ended = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _of(self, name: str) -> queue.SimpleQueue[dict[str, Any] | None]:
        with self._changed:
            answers = self._answers.setdefault(name, queue.SimpleQueue())
            if self._ended:
                answers.put(None)
            return answers

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if MARK in line:
                answer = json.loads(line.split(MARK, 1)[1])
                self._of(answer["id"]).put(answer)
        with self._changed:
            self._ended = True
            for answers in self._answers.values():
                answers.put(None)

    def _send(self, command: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            with self._sending:
                self._process.stdin.write(json.dumps(command) + "\n")
                self._process.stdin.flush()
        except BrokenPipeError as exc:
            raise EndedError from exc

    def answer(self, name: str, seconds: float = ANSWER_S, otherwise: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer to a request; after ``seconds`` an error, or ``otherwise`` if there is one."""
        try:
            found = self._of(name).get(timeout=seconds)
        except queue.Empty:
            if otherwise is not None:
                return otherwise
            raise AssertionError(f"{name}: no answer after {seconds} s:\n{self.log.read_text()[-4000:]}") from None
        if found is None:
            raise EndedError(f"the instance has ended:\n{self.log.read_text()[-4000:]}")
        return found

    def ready(self) -> Instance:
        """Once it takes requests."""
        self.answer("ready", START_S)
        return self

    def begin(
        self, name: str, tokens: Sequence[int], count: int, params: Mapping[str, Any] | None = None, leave: int = 0
    ) -> None:
        """Ask for ``count`` tokens after ``tokens``. The client goes away with ``leave`` of them; 0: it stays."""
        self._send({"id": name, "tokens": list(tokens), "n": count, "params": params, "leave": leave})

    def ask(
        self, name: str, tokens: Sequence[int], count: int, params: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The same, and wait for the answer."""
        self.begin(name, tokens, count, params)
        return self.answer(name)

    def abort(self, name: str) -> None:
        """The client goes away."""
        self._send({"abort": name})

    def metric(self, name: str, label: str = "") -> float:
        """The sum of one of vLLM's Prometheus metrics, of the lines with a label."""
        self._send({"metrics": "metrics"})
        lines = str(self.answer("metrics")["text"]).splitlines()
        lines = [line for line in lines if line.startswith((f"{name}{{", f"{name} ")) and label in line]
        assert lines, f"there is no metric {name} {label}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def prompt_tokens(self, source: str) -> float:
        """How many tokens of prompts were ``local_compute``, or loaded as ``external_kv_transfer``."""
        return self.metric("vllm:prompt_tokens_by_source_total", f'source="{source}"')

    def unused(self) -> bool:
        """Whether all blocks of the cache are free; the log has the number of those that are not."""
        self._send({"unused": "unused"})
        return bool(self.answer("unused")["unused"])

    def kill(self) -> None:
        """SIGKILL to all processes of the instance."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End it, gently first."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # of a command that a killed instance has not read
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with suppress(ProcessLookupError):
            self.kill()
        self._reader.join()
        self._process.stdout.close()


PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def serve(prefill: Instance, decode: Instance, name: str, tokens: Sequence[int], count: int) -> dict[str, Any]:
    """A request as a router sends it: to prefill, then to decode with what prefill answered."""
    first = prefill.ask(f"p-{name}", tokens, 1, PREFILL)
    return decode.ask(f"d-{name}", tokens, count, first["params"])
