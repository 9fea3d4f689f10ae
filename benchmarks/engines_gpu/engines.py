"""Processes of instances, and the two orders in which a router asks a prefill and a decode instance."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import Factory, define, field, frozen

from .cases import ROOT, Mode, Pair, Spec

ASK_S = 60.0
"""An instance that has not answered by then has failed."""

LOG_LINES = 3
"""Lines of an instance's log that a failed start shows."""

PREFILL_PARAMS: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
NIXL_UNKNOWN: Mapping[str, Any] = dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)  # fmt: skip
"""What NIXL's connectors expect to be there in prefill's request."""

OF_INSTANCE: Mapping[str, Sequence[str]] = {
    "ours": ("instance", "addresses"),
    "nixl": ("remote_engine_id", "remote_host", "remote_port", "tp_size", "dcp_size", "pp_size", "transfer_mode"),
}
"""Keys of prefill's answer that are about the instance; the others are about the request."""

CLOSE_S = 5.0


class RequestError(Exception):
    """An instance answered with an error, not in time, or has ended."""


@frozen
class Sample:
    """One request through a pair; seconds.

    Args:
        prefill: from prefill's request to its answer.
        gap: from prefill's answer to decode's first token.
        ttft: from the request's arrival at the router to decode's first token.
        itl: between two tokens of decode, on average.
        tokens: of decode.
    """

    prefill: float
    gap: float
    ttft: float
    itl: float
    tokens: Sequence[int]

    @classmethod
    def of(cls, first: Mapping[str, Any], second: Mapping[str, Any], arrived: float, new: int) -> Sample:
        """From the answers of prefill and decode; the request arrived then, and ``new`` tokens were asked for."""
        return cls(
            prefill=first["t1"] - first["t0"],
            gap=second["t1"] - first["t1"],
            ttft=second["t1"] - arrived,
            itl=(second["t2"] - second["t1"]) / max(1, new - 1),
            tokens=second["tokens"],
        )


@define(eq=False)
class Instance:
    """A process of ``instance.py``, or of another program that speaks the same lines."""

    name: str
    _process: asyncio.subprocess.Process
    _log: Path
    _waiting: dict[str, asyncio.Future[dict[str, Any]]] = Factory(dict)
    _reader: asyncio.Task[None] = field(init=False)

    @classmethod
    async def start(cls, spec: Spec, program: Sequence[str], logs: Path) -> Instance:
        """Start the process; :meth:`ready` waits for its engine."""
        log = logs / f"{spec.name}.log"
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *program,
                json.dumps(spec.config),
                env={**os.environ, **spec.env},
                cwd=ROOT,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                limit=1 << 24,
            )
        self = cls(spec.name, process, log)
        self._waiting["ready"] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read())
        return self

    async def ready(self, within_s: float) -> float:
        """Seconds that the engine took to start.

        Raises:
            RequestError: it has ended, or takes longer.
        """
        try:
            answer = await self._answer("ready", within_s)
        except RequestError as exc:
            raise RequestError(f"{exc}{''.join(f'; {line}' for line in self._complaints())}") from exc
        return float(answer["start_s"])

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            RequestError: as it says.
        """
        name = str(request["id"])
        self._waiting[name] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        if self._reader.done():
            raise RequestError(f"{self.name} has ended")
        self._process.stdin.write((json.dumps(request) + "\n").encode())
        return await self._answer(name, ASK_S)

    async def close(self) -> None:
        """Kill the process and those that it has started."""
        with suppress(ProcessLookupError):  # it has ended before
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        # A process that left the group may keep the pipe open.
        await asyncio.wait({self._reader}, timeout=CLOSE_S)
        self._reader.cancel()
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def _answer(self, name: str, within_s: float) -> dict[str, Any]:
        future = self._waiting[name]
        try:
            answer = await asyncio.wait_for(future, within_s)
        except TimeoutError:
            raise RequestError(f"{self.name} has not answered {name} within {within_s:.0f} s") from None
        finally:
            del self._waiting[name]
        if "error" in answer:
            raise RequestError(f"{self.name}: {answer['error']}")
        return answer

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            future = self._waiting.get(answer["id"])
            if future is not None and not future.done():
                future.set_result(answer)
        for future in self._waiting.values():
            if not future.done():
                future.set_result({"error": "the process has ended"})

    def _complaints(self) -> list[str]:
        lines = self._log.read_text(errors="replace").splitlines()
        return [line[-300:] for line in lines if "Error" in line and "File" not in line][:LOG_LINES]


@define(eq=False)
class Live:
    """A pair of vLLM's instances that run, and the router in front of them."""

    pair: Pair
    prefill: Instance
    decode: Instance
    _origin: dict[str, Any] = Factory(dict)
    _numbers: itertools.count[int] = Factory(itertools.count)

    async def ask(self, mode: Mode, seed: int, length: int, new: int) -> Sample:
        """A request through both instances.

        Raises:
            RequestError: of either instance.
        """
        return Sample.of(*await self.answers(mode, seed, length, new), new)

    async def answers(
        self, mode: Mode, seed: int, length: int, new: int
    ) -> tuple[dict[str, Any], dict[str, Any], float]:
        """The answers of prefill and decode, and when the request arrived at the router.

        Raises:
            RequestError: of either instance.
        """
        request = {"id": f"{self.pair.name} {next(self._numbers)}", "seed": seed, "length": length}
        arrived = time.monotonic()
        asked = self._after_prefill if mode.order == "after prefill" else self._at_once
        return *await asked(request, new), arrived

    async def _after_prefill(self, request: dict[str, Any], new: int) -> tuple[dict[str, Any], dict[str, Any]]:
        unknown = {} if self.pair.connector == "ours" else NIXL_UNKNOWN
        first = await self.prefill.ask({**request, "new": 1, "params": {**PREFILL_PARAMS, **unknown}})
        if not first["params"]:
            raise RequestError(f"{self.prefill.name} returned no parameters")
        keys = OF_INSTANCE["ours" if self.pair.connector == "ours" else "nixl"]
        self._origin = {"do_remote_prefill": True, "do_remote_decode": False, **{k: first["params"][k] for k in keys}}
        return first, await self.decode.ask({**request, "new": new, "params": first["params"]})

    async def _at_once(self, request: dict[str, Any], new: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Both instances get the request; the router knows the prefill instance from an earlier answer."""
        if not self._origin:
            raise RequestError(f"{self.prefill.name} is not known: no request was asked after prefill")
        if self.pair.connector == "ours":
            prefill: Mapping[str, Any] = {"transfer_id": request["id"]}
            decode: Mapping[str, Any] = prefill
        else:
            prefill = NIXL_UNKNOWN
            decode = {
                "remote_block_ids": None,
                "remote_request_id": request["id"],
                "remote_num_tokens": request["length"],
            }
        first, second = await asyncio.gather(
            self.prefill.ask({**request, "new": 1, "params": {**PREFILL_PARAMS, **prefill}}),
            self.decode.ask({**request, "new": new, "params": {**self._origin, **decode}}),
        )
        return first, second


@define(eq=False)
class Rooms:
    """Instances of SGLang that run: its router asks both at once, and names a room; or one that transfers nothing."""

    pair: Pair
    instances: Sequence[Instance]
    _rooms: itertools.count[int] = Factory(lambda: itertools.count(time.time_ns() // 1000))

    async def ask(self, mode: Mode, seed: int, length: int, new: int) -> Sample:
        """A request through all instances.

        Raises:
            RequestError: of either instance.
        """
        room = next(self._rooms)
        request = {"id": f"{self.pair.name} {room}", "seed": seed, "length": length, "new": new, "room": room}
        arrived = time.monotonic()
        answers = await asyncio.gather(*(one.ask(request) for one in self.instances))
        first, second = answers[0], answers[-1]
        return Sample.of(first, second, arrived, new)
