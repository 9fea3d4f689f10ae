"""One process of a demo: its role, and the results that it writes for the parent."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed does not export it to type checkers
from torch.distributed.distributed_c10d import PrefixStore, Store

from ....trace import Recorder, Silent
from .config import Job, Kind, Message, Role


class Member:
    """The identity of this process.

    Args:
        job: the demo.
        role: its role.
        rank: its rank in that role.
        world: number of ranks in that role: instance by instance, in it pipeline stage by stage, inside a stage by
            tensor-parallel rank.
        send: sends one message to the parent.

    Attributes:
        instance: the number of its instance in that role.
        place: its rank in the instance.
    """

    def __init__(self, job: Job, role: Role, rank: int, world: int, send: Callable[[Message], None]) -> None:
        self.job = job
        self.config = job.config
        self.role: Role = role
        self.rank = rank
        self.world = world
        self.tp, self.pp = job.config.grid(role)
        self.instance, self.place = divmod(rank, self.tp * self.pp)
        self.stage, self.tp_rank = divmod(self.place, self.tp)
        self.work = Path(job.work)
        self.model = self.work / "model"
        self.observer = Silent() if job.config.trace is None else Recorder()
        self.device = "cpu" if self.config.device == "cpu" else "cuda:0"
        self._send = send

    def notify(self, kind: Kind, text: str = "", error: str = "") -> None:
        """Send a message to the parent."""
        self._send(Message(self.role, self.rank, os.getpid(), kind, text, error))

    @contextmanager
    def group(self) -> Iterator[Store]:
        """Inside, this process is in its stage's tensor-parallel group; yields the parent's store."""
        timeout = timedelta(seconds=self.config.timeout_s)
        store = TCPStore("127.0.0.1", self.job.store_port, is_master=False, timeout=timeout)
        torch.set_num_threads(1)
        if self.device != "cpu":
            torch.cuda.set_device(self.device)
        _join(self.tp_rank, self.tp, PrefixStore(f"group-{self.role}-{self.instance}-{self.stage}", store), self.device)
        try:
            with torch.inference_mode():
                yield store
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def meet(self, store: Store) -> None:
        """Wait until every prefill and decode rank has come here: none may end while another needs its answers."""
        config = self.config
        if store.add("met", 1) == config.prefills + config.decodes:
            store.set("all met", "")
        wait_for(store, "all met")

    def save(self, name: str, array: npt.NDArray[np.generic]) -> None:
        """Leave an array as ``name-<role>-<rank>.npy``."""
        np.save(self.work / f"{name}-{self.role}-{self.rank}.npy", array)

    def leave(self, result: object) -> None:
        """Write the result to ``<role>-<rank>.json``, and the trace to a file beside it."""
        if isinstance(self.observer, Recorder):
            (self.work / f"trace-{self.role}-{self.rank}.json").write_bytes(msgspec.json.encode(self.observer.spans))
        (self.work / f"{self.role}-{self.rank}.json").write_bytes(msgspec.json.encode(result))


def wait_for(store: Store, key: str) -> bytes:
    """What another process stores under ``key``."""
    while not store.check([key]):  # polls, because a blocking call would delay signals
        time.sleep(0.002)
    value: bytes = store.get(key)
    return value


def _join(rank: int, world: int, store: Store, device: str) -> None:
    """Create the default process group with the environment that ``torchrun`` sets; with one rank do nothing.

    Gloo also for GPUs: NCCL refuses ranks that share one.
    """
    if world == 1:
        return
    local = rank if device == "cpu" else 0
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
