"""The connector with a note of each moment of its requests; ``benchmarks.engines_gpu.trace`` starts instances with it.

vLLM makes it in the processes of the scheduler and of the rank. A process notes moments in memory, and writes them as
lines of JSON once it has had none for QUIET_S: ``{"name", "at", ...}``, seconds of ``CLOCK_MONOTONIC``. Moments of a
GPU's stream are events, whose times are read then. TRACE_TO is the beginning of the files' names.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from disagg_kv.endpoints.handle import RoomHandle
from disagg_kv.engines.shown import Shown
from disagg_kv.engines.vllm.connector import DisaggKVConnector
from disagg_kv.kernels.cuda_queue import CudaQueue, Mark
from disagg_kv.trace import Span

QUIET_S = 0.1
"""A pause after a request; in it nothing is measured."""

LOOKS = 5
"""At the GPU's clock; the one that was the soonest to be back counts."""

Moment = tuple[str, Any, dict[str, Any]]


class Moments:
    """Those of this process, once ``live``: earlier, vLLM may capture CUDA graphs, which other work would spoil."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._found: list[Moment] = []
        self._last = 0.0
        self.live = False
        threading.Thread(target=self._write_all, daemon=True).start()

    def note(self, name: str, **more: Any) -> None:
        """Now."""
        if self.live:
            self._last = time.monotonic()
            self._found.append((name, self._last, more))

    def mark(self, name: str, stream: Any = None) -> Any:
        """When a stream, by default the current one, has done what is queued now; without a GPU: now."""
        at: Any = time.monotonic()
        if self.live and torch.cuda.is_available():
            at = torch.cuda.Event(enable_timing=True)
            at.record(stream)
        self.add(name, at)
        return at

    def add(self, name: str, at: Any) -> None:
        """At the time of an earlier mark."""
        if self.live:
            self._found.append((name, at, {}))

    def _write_all(self) -> None:
        while True:
            time.sleep(QUIET_S / 4)
            if self._found and time.monotonic() - self._last > QUIET_S:
                found, self._found = self._found, []
                self._write(found)

    def _write(self, found: Sequence[Moment]) -> None:
        looks = []
        events = [at for _, at, _ in found if isinstance(at, torch.cuda.Event)]
        for event in events:
            event.synchronize()
        if events:
            for _ in range(LOOKS):
                now = torch.cuda.Event(enable_timing=True)
                now.record()
                now.synchronize()
                looks.append((now, time.monotonic()))
        with open(self._path, "a") as file:
            for name, at, more in found:
                if isinstance(at, torch.cuda.Event):
                    at = min(seconds - at.elapsed_time(now) / 1e3 for now, seconds in looks)
                file.write(json.dumps({"name": name, "at": at, **more}) + "\n")


class Spans:
    """An observer that notes spans."""

    layers = False

    def __init__(self, moments: Moments) -> None:
        self._moments = moments

    def span(self, span: Span) -> None:
        """One ended."""
        self._moments.note(f"span {span.name}", start=span.start, stop=span.stop, nbytes=span.nbytes)

    def count(self, name: str, amount: int = 1) -> None:
        """Drop it."""


@functools.cache
def moments() -> Moments:
    """Of this process; the endpoints note theirs, too."""
    made = Moments(f"{os.environ['TRACE_TO']}.{os.getpid()}.jsonl")
    publish, record = RoomHandle.publish, CudaQueue.record

    def published(self: RoomHandle, state: Any, error: Any, at: float) -> None:
        publish(self, state, error, at)
        made.note("room", handle=type(self).__name__, phase=state[0].name, released=state[1])

    def recorded(self: CudaQueue, stream: int) -> Mark:
        mark = record(self, stream)
        made.mark("copied", torch.cuda.ExternalStream(stream))
        made.note("launched")
        return mark

    RoomHandle.publish = published  # type: ignore[method-assign]
    CudaQueue.record = recorded  # type: ignore[method-assign]
    Shown.observer = lambda self, side, instance: Spans(made)  # type: ignore[method-assign]
    return made


class TracedConnector(DisaggKVConnector):
    """See the module. Each hook is the connector's own, between two notes."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._moments = moments()
        self._passed = False

    def on_new_request(self, request: Any) -> None:
        """The scheduler has a request."""
        self._moments.live = True
        self._moments.note("new")
        super().on_new_request(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request has its blocks."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._moments.note("allocated")

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """A step is scheduled."""
        work = super().build_connector_meta(scheduler_output)
        self._moments.note("scheduled", tokens=scheduler_output.total_num_scheduled_tokens)
        return work

    def update_connector_output(self, connector_output: Any) -> None:
        """The scheduler learns of a step's transfers."""
        if connector_output.finished_recving:
            self._moments.note("learned")
        super().update_connector_output(connector_output)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """A step begins in the rank."""
        work = connector_metadata
        self._moments.live = True
        self._moments.note("begin", idle=work.idle, chunks=len(work.chunks), loads=len(work.loads))
        super().bind_connector_metadata(work)
        self._moments.note("begun", idle=work.idle, chunks=len(work.chunks), loads=len(work.loads))

    def finish_forward(self) -> None:
        """The forward pass is queued; the connector may close it here."""
        idle, was_open = self._work.idle, self._rank._step is not None
        at = None if idle else self._moments.mark("forward")
        super().finish_forward()
        self._passed = was_open and self._rank._step is None
        if self._passed:
            self._moments.add("marked", at)

    def wait_for_save(self) -> None:
        """The connector closes the pass, if it has not yet; what it marks follows what is queued here."""
        if not self._work.idle and not self._passed:
            self._moments.mark("marked")
        self._passed = False
        super().wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """A step is over; one that computes nothing may wait here."""
        self._moments.note("wait")
        results = super().get_transfer_results(finished_req_ids)
        name = "received" if results.finished_recving else "over"
        self._moments.note(name, failed=bool(results.failed_recving), sent=bool(results.finished_sending))
        return results
