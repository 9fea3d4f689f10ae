"""The parent of a demo: starts its processes, reads their messages, compares their results, and cleans up."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore  # torch.distributed does not export it to type checkers

from .... import errors
from ....errors import ConfigurationError, DeadlineError, IntegrityError, PeerLostError
from ....strategies import strategy
from ....trace import Span, chrome_trace
from ....transports import between_processes
from ...versions import require
from .check import check
from .config import DemoConfig, Job, Message
from .devices import spread
from .lifetime import GRACE_S, now
from .report import Report, assemble
from .results import Results

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # ranks share the host's few cores, and float32 sums keep one order
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}

_SPANS = msgspec.json.Decoder(list[Span])
_MESSAGE = msgspec.json.Decoder(Message)


def run_demo(config: DemoConfig, on_message: Callable[[Message], None] = lambda _: None) -> Report:
    """Run one demo in processes of its own. When this returns or raises, no process and no file of it is left.

    Args:
        config: the demo.
        on_message: called with every message of the processes; a successful demo sends ``steps(config)`` of them.

    Raises:
        ConfigurationError: the transport or strategy is unknown or cannot do this.
        MissingDependencyError: transformers is not installed.
        UnsupportedError: transformers is older than the tested versions.
        PeerLostError: a process ended too early; the message names it, and the reason if it reported one.
        DeadlineError: ``config.timeout_s`` has passed; the message names the processes that have not finished.
    """
    require("transformers", older=False)
    strategy(config.strategy)
    visible = gpus(config)
    _check_transport(config)
    started = now()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="disagg-kv-demo-") as folder:
        work = Path(folder)
        job = Job(config, folder, os.getpid(), store.port, visible)
        with _launched(job) as launcher:
            _listen(config, launcher, work, on_message, started + config.timeout_s)
        checking = now()
        results = Results.read(work, config)
        if config.trace is not None:
            Path(config.trace).write_text(json.dumps(chrome_trace(_traces(work, config))))
        tokens = config.lengths(config.turns - 1)
        there = [rank.pool for rank in results.decode]
        back = [rank.pool for rank in results.prefill if rank.pool is not None]
        checked = [check(work, "decode", tokens, config.prefills, there)]
        if back:
            checked.append(check(work, "prefill", tokens, config.prefills, back))
        return assemble(config, results, checked, started, now() - checking)


def _traces(work: Path, config: DemoConfig) -> dict[str, list[Span]]:
    """The spans of every endpoint; on one host all endpoints use one clock."""
    ends = [(role, rank) for role, rank, _ in config.members if role != "reference"]
    read = {f"{role} {rank}": (work / f"trace-{role}-{rank}.json").read_bytes() for role, rank in ends}
    return {name: _SPANS.decode(of) for name, of in read.items()}


def _check_transport(config: DemoConfig) -> None:
    if config.transport_module is not None:
        load_module(config.transport_module)
    carriers = between_processes(config.transport, config.device)
    carriers.close(0.0)
    if all(one.caps.in_process_only for one in carriers):
        raise ConfigurationError(f"transport {config.transport!r} works only within one process; the demo has several")


def gpus(config: DemoConfig) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES calls the GPUs that a demo has.

    Raises:
        ConfigurationError: it needs one, and there is none.
    """
    if config.device == "cpu":
        return ()
    count = torch.cuda.device_count()
    spread(config.prefills, config.decodes, count)
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(named.split(",")[:count]) if named else tuple(map(str, range(count)))


@contextmanager
def _launched(job: Job) -> Iterator[subprocess.Popen[bytes]]:
    """The process that starts all others, in a process group of its own: an interrupt comes to the parent alone."""
    work = Path(job.work)
    file = work / "job.json"
    file.write_bytes(msgspec.json.encode(job))
    with (
        (work / "log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-c", f"from {__package__}.launch import main; main({str(file)!r})"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **ENVIRONMENT, "TMPDIR": str(work)},
            process_group=0,
        ) as launcher,
    ):
        try:
            yield launcher
        finally:
            launcher.terminate()
            try:
                launcher.wait(2 * GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(launcher.pid, signal.SIGKILL)


def _listen(
    config: DemoConfig,
    launcher: subprocess.Popen[bytes],
    work: Path,
    on_message: Callable[[Message], None],
    deadline: float,
) -> None:
    """Read every message until the last process has ended; raise if one of them failed or the deadline has passed."""
    waiting = {(role, rank) for role, rank, _ in config.members}
    failures: list[Message] = []
    try:
        for line in _lines(launcher, deadline):
            one = _MESSAGE.decode(line)
            if one.kind == "failed":
                failures.append(one)
                continue
            if one.kind == "done":
                waiting.discard((one.role, one.rank))
            on_message(one)
    except TimeoutError as exc:
        names = ", ".join(f"{role} rank {rank}" for role, rank in sorted(waiting))
        raise DeadlineError(f"demo: not done after {config.timeout_s:g} s; not finished: {names}") from exc
    if launcher.wait() or failures:
        raise _failure(failures, launcher.returncode, work)


def _lines(launcher: subprocess.Popen[bytes], deadline: float) -> Iterator[bytes]:
    """Lines of its standard output until that is closed; a TimeoutError after the deadline, on the clock of ``now``."""
    assert launcher.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(launcher.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(max(deadline - now(), 0.0)):
                raise TimeoutError
            data = os.read(launcher.stdout.fileno(), 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from lines


def _failure(failures: list[Message], code: int, work: Path) -> errors.DisaggKVError:
    """One error for all failures: a killed process first, since others fail because of it, then wrong bytes."""
    if not failures:
        tail = " | ".join((work / "log").read_text(errors="replace").splitlines()[-5:])
        return PeerLostError(f"demo: its processes could not be run (exit code {code}): {tail}")
    first = min(failures, key=lambda one: {"": 0, "IntegrityError": 1}.get(one.error, 2))
    others = sorted({f"{one.role} rank {one.rank}" for one in failures} - {f"{first.role} rank {first.rank}"})
    also = f" (after that also: {', '.join(others)})" if others else ""
    message = f"demo: {first.role} rank {first.rank} (pid {first.pid}) failed: {first.text}{also}"
    kind = getattr(errors, first.error, None)
    for known in (ConfigurationError, IntegrityError):
        if isinstance(kind, type) and issubclass(kind, known):
            return known(message)
    return PeerLostError(message)


def load_module(name: str) -> None:
    """Import a module that registers a transport; also one in the current folder.

    Raises:
        ConfigurationError: it cannot be imported.
    """
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        import_module(name)
    except Exception as error:
        raise ConfigurationError(f"transport module {name!r} cannot be imported: {error}") from error
