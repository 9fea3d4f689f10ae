"""References to a prefilled prompt that are not its own, and pairs whose caches differ: what a connector answers.

Each is known to give wrong tokens, without any error, in a connector of vLLM. The same requests go through this
library's connector and through vLLM's own ``NixlConnector``.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from .instances import PREFILL, EndedError, Instance, nixl, transfer

OURS, THEIRS = "disagg_kv", "NixlConnector"
CONNECTORS = (OURS, THEIRS)

RIGHT, ERROR, WRONG, OTHER, SILENT, ENDED = (
    "right tokens", "error", "wrong tokens", "another prompt's tokens", "no answer", "the engine ends",
)  # fmt: skip
"""What a request may come to. The first two are right."""

COUNT = 12
LENGTH = 150
ANSWER_S = 100.0
BLOCKS = 128
"""Of an instance: a few other prompts overwrite all of them."""

FAR = 1 << 20
"""No instance has a block of this number."""

NULLS = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
REASON = re.compile(r"was not loaded: (.*)")
PROBLEM = re.compile(r"(?:ERROR|WARNING) [\d: -]+\[[\w.:]+\] (.*)")

TokensOf = Callable[[list[int], int], list[int]]
Params = Mapping[str, Any]


def prompt(length: int, seed: int = 0) -> list[int]:
    """Its tokens."""
    draw = random.Random(f"{length} {seed}")
    return [draw.randrange(3, 512) for _ in range(length)]


MINE, OTHERS = prompt(LENGTH), prompt(LENGTH, seed=1)


@frozen
class Case:
    """A request to decode.

    Args:
        name: of the case.
        params: the reference that it is given.
        tokens: its prompt.
    """

    name: str
    params: Params
    tokens: list[int] = field(factory=lambda: MINE)


@frozen
class Outcome:
    """What came of a case.

    Args:
        case: its name.
        connector: that was asked.
        outcome: one of the six words above.
        reason: of an error, from decode's log.
    """

    case: str
    connector: str
    outcome: str
    reason: str = ""


@define
class Served:
    """A prefill and a decode instance of one connector; an instance that has ended is started anew.

    Args:
        connector: its name.
        start: starts an instance by its name, connector's options and configuration.
        port: the first of a few free ports.
        prefilled, decoded: configuration of either side.
        made: how many instances were started.
        asked: how many requests were made.
    """

    connector: str
    start: Callable[..., Instance]
    port: int
    prefilled: Params = field(factory=dict)
    decoded: Params = field(factory=dict)
    made: int = 0
    asked: int = 0
    _prefill: Instance | None = None
    _decode: Instance | None = None

    def _begin(self, role: str, more: Params, port: int) -> Instance:
        """An instance. A second one of a role has the name and the port of the first."""
        if self.connector == OURS:
            listen = f"tcp://127.0.0.1:{port}" if more.get("tp", 1) == 1 else ""
            kv = transfer(f"kv_{role}", channel="zmq", listen=listen)
        else:
            os.environ |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
            # Without NIXL's thread an idle prefill instance never serves a read.
            kv = nixl(f"kv_{role}", progress_thread=True)
        self.made += 1
        few = {"num_gpu_blocks_override": BLOCKS}
        return self.start(f"{self.connector} {role} {self.made}", {**kv, "engine_id": role}, args=few, **more)

    def ready(self) -> None:
        """Both instances take requests."""
        missing = [self._prefill is None, self._decode is None]
        if self._prefill is None:
            self._prefill = self._begin("producer", self.prefilled, self.port)
        if self._decode is None:
            self._decode = self._begin("consumer", self.decoded, self.port + 10)
        for started, one in zip(missing, (self._prefill, self._decode), strict=True):
            if started:
                one.ready()

    @property
    def prefill(self) -> Instance:
        """It takes requests."""
        self.ready()
        assert self._prefill is not None
        return self._prefill

    @property
    def decode(self) -> Instance:
        """It takes requests."""
        self.ready()
        assert self._decode is not None
        return self._decode

    def reference(self, tokens: list[int]) -> Params:
        """Prefill a prompt."""
        self.asked += 1
        answer = self.prefill.ask(f"p{self.asked}", tokens, 1, {**PREFILL, **NULLS})
        assert answer["reason"] == "length", answer
        found: Params = answer["params"]
        return found

    def overwrite(self) -> None:
        """Other prompts take all blocks of the prefill instance."""
        for seed in range(2, 9):
            self.asked += 1
            self.prefill.ask(f"o{self.asked}", prompt(700, seed), 1)

    def restart(self) -> None:
        """The prefill instance is killed; another one has its name and its port."""
        self.prefill.kill()
        self.prefill.close()
        self._prefill = None
        self.ready()

    def try_(self, case: Case, tokens_of: TokensOf) -> Outcome:
        """Ask decode."""
        self.asked += 1
        decode, name = self.decode, f"d{self.asked}"
        before = len(decode.log.read_text())
        decode.begin(name, case.tokens, COUNT, case.params)
        try:
            answer = decode.answer(name, ANSWER_S, {"reason": SILENT})
        except EndedError:
            answer = {"reason": "error", "error": "EngineDeadError"}
        outcome = _outcome(answer, case.tokens, tokens_of)
        if outcome in (SILENT, ENDED):
            decode.kill()
            decode.close()
            self._decode = None
        if outcome in (RIGHT, WRONG, OTHER):
            return Outcome(case.name, self.connector, outcome)
        return Outcome(case.name, self.connector, outcome, _reason(decode.log.read_text()[before:]))


def _outcome(answer: Params, tokens: list[int], tokens_of: TokensOf) -> str:
    if answer["reason"] == SILENT:
        return SILENT
    if answer["reason"] == "error":
        return ENDED if "EngineDead" in answer.get("error", "") else ERROR
    if answer["tokens"] == tokens_of(tokens, COUNT):
        return RIGHT
    return OTHER if answer["tokens"] == tokens_of(OTHERS, COUNT) else WRONG


def _reason(said: str) -> str:
    """From new lines of a log."""
    found = REASON.search(said) or PROBLEM.search(said)
    return found[1].strip()[:300] if found else ""


def _changed(ids: Any, change: Callable[[int], int]) -> Any:
    """Block ids, in lists of lists."""
    return [_changed(one, change) for one in ids] if isinstance(ids, list) else change(ids)


def references(served: Served) -> Iterator[Case]:
    """References that are not the request's own."""
    ours = served.connector == OURS
    first = served.reference(MINE)
    yield Case("its own reference", first)
    served.overwrite()
    yield Case("a reference that was used, its blocks overwritten", first)
    yield Case("another prompt's reference", served.reference(OTHERS))
    yield Case("the reference of a shorter prompt", served.reference(MINE[:70]))
    mine, others = served.reference(MINE), served.reference(OTHERS)
    named = "transfer_id" if ours else "remote_block_ids"
    yield Case("another request's rows in its reference", {**mine, named: others[named]})
    mine = served.reference(MINE)
    yield Case("another number of ranks in its reference", {**mine, "tp_size": 2, **_doubled(mine)})
    ids: Any = [list(range(1, 6))] if ours else served.reference(MINE)["remote_block_ids"]
    for name, change in (("too large", lambda one: one + FAR), ("negative", lambda one: -one - 1)):
        mine = served.reference(MINE)
        yield Case(f"block ids that are {name}", {**mine, "remote_block_ids": _changed(ids, change)})


def _doubled(reference: Params) -> dict[str, Any]:
    """Our references name an address of each rank."""
    return {"addresses": [*reference["addresses"]] * 2} if "addresses" in reference else {}


def restarts(served: Served) -> Iterator[Case]:
    """The prefill instance is another one of the same name, at the same address."""
    yield Case("before the restart", served.reference(MINE))
    old = served.reference(MINE)
    served.restart()
    served.overwrite()
    yield Case("a reference from before the restart", old)
    yield Case("a reference from after the restart", served.reference(MINE))


def sizes(served: Served) -> Iterator[Case]:
    """Decode has blocks of another size."""
    yield Case("blocks of 32 tokens, decode's of 64", served.reference(MINE))


def ranks(served: Served) -> Iterator[Case]:
    """Prefill has two ranks, each with half of the heads."""
    mine = served.reference(MINE)
    yield Case("two prefill ranks", mine)
    mine = served.reference(MINE)
    swapped = {"addresses": [*reversed(mine["addresses"])]} if "addresses" in mine else {"tp_size": 1}
    yield Case("two prefill ranks, swapped or hidden in the reference", {**mine, **swapped})


Cases = Callable[[Served], Iterator[Case]]

GROUPS: Mapping[str, tuple[Cases, Params, Params]] = {
    "references": (references, {}, {}),
    "restarts": (restarts, {}, {}),
    "sizes": (sizes, {}, {"block_size": 64}),
    "ranks": (ranks, {"tp": 2}, {}),
}
"""By name: the cases, and the configuration of prefill and of decode."""


def outcomes(group: str, connector: str, model: Path, folder: Path, tokens_of: TokensOf) -> list[Outcome]:
    """Serve the cases of a group through a connector, on instances of their own."""
    cases, prefilled, decoded = GROUPS[group]
    port = random.SystemRandom().randrange(12_000, 32_000)  # below those that other listeners are given
    with ExitStack() as ends:

        def start(name: str, kv: Params, **config: Any) -> Instance:
            instance = Instance(folder / f"{name}.log", model, kv, **config)
            ends.callback(instance.close)
            return instance

        served = Served(connector, start, port, prefilled, decoded)
        return [served.try_(case, tokens_of) for case in cases(served)]
