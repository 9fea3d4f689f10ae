"""Starts every rank of a demo: imports slow modules once, forks, and ends all ranks together."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import connection, get_context
from multiprocessing.context import ForkProcess
from pathlib import Path

import attrs
import msgspec
import torch
from torch.distributed.distributed_c10d import Store

from . import decode, prefill, reference
from .config import Job, Message, Role
from .devices import spread
from .lifetime import GRACE_S, die_with
from .member import Member
from .model import save_model
from .run import load_module

LINE = 4096
"""Bytes that a pipe takes in one piece (PIPE_BUF), so that lines of several processes never mix."""

WORK: Mapping[Role, Callable[[Member, Store], None]] = {
    "prefill": prefill.run,
    "decode": decode.run,
    "reference": reference.run,
}

_JOB = msgspec.json.Decoder(Job)


def send(fd: int, message: Message) -> None:
    """Write one line to the parent."""
    line = msgspec.json.encode(message)
    if len(line) >= LINE:  # JSON makes at most six bytes of one
        line = msgspec.json.encode(attrs.evolve(message, text=message.text[: LINE // 8]))
    os.write(fd, line + b"\n")


def run_member(job: Job, role: Role, rank: int, world: int, launcher: int, events: int) -> None:
    """The whole life of one rank; exits with 1 if it failed, after reporting the reason."""
    die_with(launcher)
    if job.config.device == "cuda":
        # Nothing has used CUDA before. With one GPU to see, whatever says "local rank" means that one.
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu_of(job, role, rank)
    member = Member(job, role, rank, world, lambda message: send(events, message))
    try:
        with member.group() as store:
            WORK[role](member, store)
    except Exception as error:
        traceback.print_exc()
        member.notify("failed", str(error) or "no reason given", type(error).__name__)
        sys.exit(1)
    member.notify("done")


def gpu_of(job: Job, role: Role, rank: int) -> str:
    """A rank's GPU; the reference has the first decode rank's."""
    prefill, decode = spread(job.config.prefills, job.config.decodes, len(job.gpus))
    return job.gpus[(prefill if role == "prefill" else decode)[rank]]


def supervise(job: Job, events: int) -> bool:
    """Start the job's ranks and wait for them; True if all ended well. At the first that has not, none is left."""
    fork = get_context("fork")
    live: dict[ForkProcess, tuple[Role, int]] = {}
    good = True
    try:
        for role, rank, world in job.config.members:
            process = fork.Process(target=run_member, args=(job, role, rank, world, os.getpid(), events), daemon=True)
            live[process] = (role, rank)
            process.start()
        while live and good:
            connection.wait([process.sentinel for process in live])
            for process in [p for p in live if p.exitcode is not None]:
                role, rank = live.pop(process)
                code = process.exitcode or 0
                good = good and code == 0
                if code < 0:
                    send(events, Message(role, rank, process.pid or 0, "failed", f"killed by signal {-code}"))
    finally:
        for process in live:
            process.terminate()
        for process in live:
            process.join(GRACE_S)
            process.kill()
            process.join()
    return good


def main(file: str) -> None:
    """Run the ranks that the job in ``file`` is about."""
    job = _JOB.decode(Path(file).read_bytes())
    die_with(job.parent)
    events = os.dup(1)
    os.dup2(2, 1)  # whatever libraries print is log
    torch.set_num_threads(1)
    if job.config.transport_module is not None:
        load_module(job.config.transport_module)
    save_model(job.config, Path(job.work) / "model")
    sys.exit(0 if supervise(job, events) else 1)
