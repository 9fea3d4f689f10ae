"""Requests a second and first tokens over HTTP, as SGLang's own benchmark client counts them.

    python -m benchmarks.engines_gpu.serving --model MODEL --block 64 --out FOLDER [--turns 4]
    python -m benchmarks.engines_gpu.serving --cpu --model TINY_MODEL --pairs ours --tokens 60 --requests 4 --out FOLDER

A prefill and a decode server of each pair, and ``examples/router.py`` before them, live all at once; with one GPU they
share it. ``sglang.benchmark.serving`` sends OpenAI's ``/v1/completions`` to one router after the other: ``--requests``
prompts of ``--tokens`` random tokens, with 1 and with 8 requests in flight. All pairs get the same prompts, and no
server has a radix cache.

With ``--turns`` these are conversations of ``/v1/chat/completions``, each turn of which has ``TURN`` tokens more, and
all servers have a radix cache, so that prefill computes and sends what is new; the pair ``whole`` is this library's
without one on decode.

The exit code is 1 if a request failed, or the text of a request that was alone is not that of SGLang's own NIXL
backend; with ``whole`` prefill computes the answers anew, so rounding differs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from attrs import define, field

from benchmarks.tables import Found, table

from . import sglang
from .__main__ import Gpus, header, settings
from .cases import ROOT, Spec
from .model import write_tokenizer
from .tables import runs
from .turns import START_S, parser_of

IN_FLIGHT = (1, 8)
TURN = 256
WHOLE = "whole"
FIRST_ROUTER = 20_000
KEPT = ("request_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
"""Of what the client reports."""

CPU_ARGS: Mapping[str, Any] = {
    "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch", "dtype": "float32",
    "max_total_tokens": 4096, "max_running_requests": 8, "disable_overlap_schedule": True, "disable_cuda_graph": True,
    "skip_server_warmup": True, "disaggregation_decode_retraction_backup": "cpu_tensor",
}  # fmt: skip
ON_CPU = ROOT / "tests" / "engines" / "sglang_cpu"


class ServingError(Exception):
    """A server has ended, or does not answer in time."""


def words(args: Mapping[str, Any]) -> list[str]:
    """The command line of ``sglang.launch_server``, from the arguments of its engine."""
    made: list[str] = []
    for name, value in args.items():
        if value is not False:
            several = value if isinstance(value, list) else [] if value is True else [value]
            made += [f"--{name.replace('_', '-')}", *map(str, several)]
    return made


def specs(given: argparse.Namespace, gpus: int) -> dict[str, tuple[Spec, ...]]:
    """Prefill and decode of each pair."""
    pairs = sglang.pairs_of("1to1", given.pairs.split(","))
    made = sglang.specs(pairs, "1to1", given.block, gpus, given.model, {"disable_radix_cache": given.turns == 1})
    for name, (_, decode) in made.items() if given.turns > 1 else ():
        decode.config["args"]["disaggregation_decode_enable_radix_cache"] = name != WHOLE
    return made


def command(spec: Spec, *, cpu: bool) -> list[str]:
    """Of a server."""
    args = dict(spec.config["args"])
    if cpu:
        kept = ("page_size", "port", "nccl_port", "host", "disable_radix_cache")
        args = {name: value for name, value in args.items() if name.startswith("disagg") or name in kept}
        args |= dict(CPU_ARGS)
    return [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "sglang.launch_server",
        *words({"model_path": spec.config["model"], **args}),
    ]


def router(prefill: Spec, decode: Spec, port: int) -> list[str]:
    """Of the router before two servers."""
    sources, sinks = prefill.config, decode.config
    return [
        sys.executable, str(ROOT / "examples" / "router.py"), "--port", str(port), "--prefill",
        f"sglang=127.0.0.1:{sources['args']['port']}/{sources['bootstrap_port']}",
        "--decode", f"sglang=127.0.0.1:{sinks['args']['port']}",
    ]  # fmt: skip


@contextlib.contextmanager
def process(command: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process group, which ends with the context."""
    with log.open("wb") as out:
        one = subprocess.Popen(
            command, env={**os.environ, **env}, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield one
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)
        one.wait()


def answers(one: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until a server answers.

    Raises:
        ServingError: it has ended, or takes too long.
    """
    deadline = time.monotonic() + START_S
    while one.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.3)
    raise ServingError(f"{url} does not answer:\n{log.read_text(errors='replace')[-3000:]}")


def client(router: int, given: argparse.Namespace, in_flight: int, seed: int) -> dict[str, Any]:
    """What SGLang's client reports of a round."""
    from sglang.benchmark import serving  # type: ignore[import-not-found, unused-ignore]

    out = given.out / "client.jsonl"
    out.unlink(missing_ok=True)
    prompts: Mapping[str, Any] = (
        {
            "backend": "sglang-oai", "dataset_name": "random-ids", "random_input_len": given.tokens,
            "random_output_len": given.answer, "random_range_ratio": 1.0, "num_prompts": given.requests,
        }
        if given.turns == 1
        else {
            "backend": "sglang-oai-chat", "dataset_name": "generated-shared-prefix", "gsp_num_groups": given.requests,
            "gsp_prompts_per_group": 1, "gsp_system_prompt_len": given.tokens, "gsp_question_len": TURN,
            "gsp_output_len": given.answer, "gsp_num_turns": given.turns,
        }
    )  # fmt: skip
    options = {
        **prompts, "base_url": f"http://127.0.0.1:{router}", "model": str(given.model), "tokenizer": str(given.model),
        "max_concurrency": in_flight, "seed": seed, "warmup_requests": 1, "ready_check_timeout_sec": 0,
        "output_file": out, "output_details": True, "disable_tqdm": True,
    }  # fmt: skip
    before, sys.argv = sys.argv, ["serving", *words(options)]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            serving.cli_main()
    except (SystemExit, ValueError) as exc:
        raise ServingError(f"the client ended with {exc}: {said.getvalue()[-2000:]}") from exc
    finally:
        sys.argv = before
    found: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    return found


@define(eq=False)
class Run:
    """What was asked, and what came of it: of each pair and number in flight, the reports of its rounds."""

    given: argparse.Namespace
    gpus: int
    ask: Callable[[int, argparse.Namespace, int, int], dict[str, Any]] = client
    rounds: dict[str, dict[int, list[dict[str, Any]]]] = field(factory=dict)
    red: list[str] = field(factory=list)
    left_out: list[str] = field(factory=list)
    """Pairs of SGLang's own backends whose servers have not started."""

    def all(self) -> None:
        """Start, warm up, measure; kill all servers whatever happens."""
        began, longest = time.monotonic(), 0.0
        with ExitStack() as ends:
            try:
                routers = self._start(ends)
                for number in range(-1, self.given.reps):
                    round_began = time.monotonic()
                    if number > 0 and round_began - began + longest > self.given.limit_s:
                        print(f"{number} of {self.given.reps} rounds", flush=True)
                        break
                    for in_flight in IN_FLIGHT:
                        names = list(routers)
                        for name in names[::-1] if number % 2 else names:
                            found = self.ask(routers[name], self.given, in_flight, 1000 * (number + 2) + in_flight)
                            print(
                                f"{number:3} {name}, {in_flight}: {[round(found[key], 2) for key in KEPT]}", flush=True
                            )
                            if found["completed"] != self.given.requests * self.given.turns:
                                self.red.append(f"{name}, {in_flight} in flight: {found['completed']} requests")
                            if number >= 0:
                                self.rounds.setdefault(name, {}).setdefault(in_flight, []).append(found)
                    longest = max(longest, time.monotonic() - round_began)
            except ServingError as exc:
                self.red.append(str(exc))
            except KeyboardInterrupt:
                self.red.append("interrupted")

    def _start(self, ends: ExitStack) -> dict[str, int]:
        """The routers' ports."""
        cpu, out = self.given.cpu, self.given.logs or self.given.out
        for folder in (out, self.given.out):
            folder.mkdir(parents=True, exist_ok=True)
        own: Mapping[str, str] = {"OMP_NUM_THREADS": "1"} if cpu else {}
        made, routers = specs(self.given, self.gpus), dict[str, int]()
        started: dict[str, list[tuple[subprocess.Popen[bytes], str, Path]]] = {}
        for name, both in made.items():
            for spec in both:
                log, env = out / f"{spec.name}.log", {**spec.env, **own}
                if cpu:
                    env["PYTHONPATH"] = os.pathsep.join([str(ON_CPU), env["PYTHONPATH"]])
                one = ends.enter_context(process(command(spec, cpu=cpu), env, log))
                url = f"http://127.0.0.1:{spec.config['args']['port']}/model_info"
                started.setdefault(name, []).append((one, url, log))
        for name, (prefill, decode) in made.items():
            try:
                for one, url, log in started[name]:
                    answers(one, url, log)
            except ServingError as exc:
                if sglang.PAIRS[name].connector == "ours":
                    raise
                self.left_out.append(f"{name}: {exc}")
                continue
            log, port = out / f"{name}-router.log", FIRST_ROUTER + len(routers)
            answers(
                ends.enter_context(process(router(prefill, decode, port), {}, log)),
                f"http://127.0.0.1:{port}/openapi.json",
                log,
            )
            routers[name] = port
        print("all servers have started", flush=True)
        return routers


def document(run: Run, gpus: Gpus | None) -> dict[str, Any]:
    """The results, for JSON; ``equal`` are texts of requests that were alone and are those of the NIXL backend."""
    given, red = run.given, list(run.red)
    texts = {
        name: [text for one in of.get(1, ()) for text in one["generated_texts"]] for name, of in run.rounds.items()
    }
    truth = texts.get("nixl", next(iter(texts.values()), []))
    equal = {name: sum(map(str.__eq__, of, truth)) for name, of in texts.items()}
    red += [
        f"{name}: {count} of {len(truth)} texts"
        for name, count in equal.items()
        if count < len(truth) and name != WHOLE
    ]
    return {
        **header("serving", given.commit, gpus),
        "settings": {**settings("sglang"), "block": given.block},
        "tokens": given.tokens,
        "answer": given.answer,
        "requests": given.requests,
        "turns": given.turns,
        "ok": not red,
        "red": red,
        "left_out": run.left_out,
        "texts": len(truth),
        "equal": equal,
        "rounds": {
            name: {str(count): {key: [round(one[key], 3) for one in of] for key in KEPT} for count, of in many.items()}
            for name, many in run.rounds.items()
        },
    }


def merged(documents: Sequence[Found]) -> dict[str, Any]:
    """One document of several runs on one host; each keeps its commit."""
    shared = ("command", "versions", "gpus", "driver", "settings")
    own = [{key: value for key, value in one.items() if key not in shared} for one in documents]
    return {"commit": documents[-1]["commit"], **{name: documents[-1][name] for name in shared}, "runs": own}


def shown(found: Found) -> str:
    """A row of each kind of requests, number of them in flight, and pair; the rounds of several runs are one."""
    rows = [
        ["requests", "in flight", "backend", "requests/s", "first token, ms, p50 / p99", "between tokens, p50 / p99"]
    ]
    pooled: dict[tuple[int, str, str], dict[str, list[float]]] = {}
    for run in runs(found):
        for name, many in run["rounds"].items():
            for count, of in many.items():
                every = pooled.setdefault((run["turns"], count, name), {})
                for key, values in of.items():
                    every.setdefault(key, []).extend(values)
    for (turns, count, name), of in sorted(pooled.items(), key=lambda one: one[0][:2]):
        each = {key: median(values) for key, values in of.items()}
        first, between = (f"{each[f'median_{one}_ms']:.1f} / {each[f'p99_{one}_ms']:.1f}" for one in ("ttft", "itl"))
        rate = f"{each['request_throughput']:.2f} ({len(of['request_throughput'])} rounds)"
        rows.append(["single" if turns == 1 else f"{turns} turns", count, name, rate, first, between])
    return table(rows)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Of the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--merge", type=Path, nargs="+", help="documents of several runs: print one of all")
    parser.add_argument("--pairs", default="ours,nixl,mooncake", help="names of benchmarks/engines_gpu/sglang.py")
    parser.add_argument("--tokens", type=int, default=4096, help="of a prompt")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--requests", type=int, default=24, help="of a round")
    parser.add_argument("--turns", type=int, default=1, help="requests of a conversation")
    parser.add_argument("--logs", type=Path, help="folder of the servers' logs, if not that of the document")
    parser.add_argument("--limit-s", type=float, default=240.0, help="no round begins that would end later")
    parser.add_argument("--reps", type=int, default=4, help="rounds, after one that warms up")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    given = arguments(argv)
    if given.merge:
        print(json.dumps(merged([json.loads(file.read_text()) for file in given.merge])))
        return 0
    gpus = None if given.cpu else Gpus.here()
    write_tokenizer(given.model)
    os.environ |= {"SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"}  # the client imports SGLang, too
    if given.cpu:
        sys.path.append(str(ON_CPU))
    run = Run(given, gpus=2 if gpus is None else len(gpus.names))
    run.all()
    found = document(run, gpus)
    (given.out / "serving.json").write_text(json.dumps(found) + "\n")
    print(shown(found), *found["red"], *found["left_out"], sep="\n", flush=True)
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
