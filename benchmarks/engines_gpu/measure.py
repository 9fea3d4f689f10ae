"""One run: all pairs live at once, and their modes take turns, so that each number has its peers beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from attrs import Factory, define, field, frozen

from .cases import LENGTHS, LOAD_TOKENS, LOADS, ORACLE, Mode, Pair, Spec
from .engines import Instance, Live, RequestError, Rooms, Sample

NEW, LOAD_NEW = 16, 32
"""Tokens of an answer: of a request that is alone, and under load."""

WARM_LOAD = 16
"""Requests in flight, once, before anything counts."""

SLOW_S = 4.0
"""A peer that needs longer for a prompt, twice, is left out of what follows, where peers may be left out."""

GRACE_S = 10.0
"""After the time limit, the request that runs may end."""


@frozen
class Plan:
    """What to measure.

    Args:
        pairs: that live at once.
        specs: prefill and decode of each pair.
        program: the start of an instance's command line.
        logs: folder of the instances' logs.
        limit_s: seconds after which the run ends by itself; it measures fewer repetitions then.
        reps: repetitions of each prompt length.
        rounds: of each load.
        lengths: tokens of prompts that are alone.
        loads: requests of a round, by how many are in flight.
        oracle: the mode whose tokens all others are compared with.
        alone: the mode of an instance that transfers nothing. Where there is one, a gap is the time to the first token
            less the median of this mode.
        rounds_otherwise: a mode whose tokens need not be the oracle's: decode has other tensor-parallel sizes there, so
            sums are rounded in another order.
        peers_may_fail: a peer whose requests fail, or take longer than SLOW_S, is left out, which the results say.
    """

    pairs: Sequence[Pair]
    specs: Mapping[str, tuple[Spec, ...]]
    program: Sequence[str]
    logs: Path
    limit_s: float
    reps: int
    rounds: int
    lengths: Sequence[int] = LENGTHS
    loads: Mapping[int, int] = LOADS
    oracle: str = ORACLE
    alone: str | None = None
    rounds_otherwise: str | None = None
    peers_may_fail: bool = False


def turns(modes: Sequence[Mode], number: int) -> Iterator[Mode]:
    """All modes; every second time in the reverse order, and after that from another one on."""
    first = number // 2 % len(modes)
    turn = [*modes[first:], *modes[:first]]
    return iter(turn if number % 2 == 0 else turn[::-1])


@define(eq=False)
class Run:
    """The state of a run, and what it has found."""

    plan: Plan
    began: float = Factory(time.monotonic)
    live: dict[str, Live | Rooms] = Factory(dict)
    modes: list[Mode] = Factory(list)
    singles: dict[tuple[str, int], list[Sample]] = Factory(dict)
    loads: dict[tuple[str, int], list[tuple[float, list[Sample]]]] = Factory(dict)
    firsts: dict[str, list[float]] = Factory(dict)
    starts: dict[str, float] = Factory(dict)
    red: list[str] = Factory(list)
    retried: list[str] = Factory(list)
    dropped: list[str] = Factory(list)
    ended: dict[str, float] = Factory(dict)
    _started: list[Instance] = field(init=False, factory=list)

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.began

    def note(self, text: str) -> None:
        """A line of progress."""
        print(f"[{self.now:6.1f}] {text}", flush=True)

    async def all(self) -> None:
        """Start, warm up, measure, and kill all instances whatever happens."""
        try:
            async with asyncio.timeout(self.plan.limit_s + GRACE_S):
                await self._start()
                loads_s = await self._warm_up()
                left_s = self.plan.limit_s - self.now
                reserved = min(loads_s * self.plan.rounds, max(loads_s, left_s / 2))
                await self._singles(self.plan.limit_s - reserved)
                await self._loads(loads_s)
        except TimeoutError:
            self._fail(f"the run was not over {GRACE_S:.0f} s after its limit")
        finally:
            await asyncio.gather(*(one.close() for one in self._started))
            self._done("all")

    def _fail(self, why: str, pair: Pair | None = None) -> None:
        if pair is not None and pair.connector != "ours" and self.plan.peers_may_fail:
            self.dropped.append(why)
            self.note(f"left out: {why}")
        else:
            self.red.append(why)
            self.note(f"RED: {why}")

    def _done(self, phase: str) -> None:
        self.ended[phase] = round(self.now, 1)

    async def _start(self) -> None:
        async def pair(one: Pair) -> None:
            both = []
            for spec in self.plan.specs[one.name]:
                both.append(await Instance.start(spec, self.plan.program, self.plan.logs))
                self._started.append(both[-1])
            waits = [instance.ready(0.7 * self.plan.limit_s) for instance in both]
            for instance, took in zip(both, await asyncio.gather(*waits), strict=True):
                self.starts[instance.name] = round(took, 1)
            self.live[one.name] = Rooms(one, both) if one.engine == "sglang" else Live(one, both[0], both[1])
            self.note(f"{one.name} has started")

        outcomes = await asyncio.gather(*map(pair, self.plan.pairs), return_exceptions=True)
        for one, outcome in zip(self.plan.pairs, outcomes, strict=True):
            if isinstance(outcome, RequestError):
                self._fail(f"{one.name} has not started: {outcome}", one)
            elif outcome is not None:
                raise outcome
        self.modes = [Mode(one.name, order) for one in self.plan.pairs if one.name in self.live for order in one.orders]
        self._done("start")

    async def _ask(self, mode: Mode, seed: int, length: int, new: int, again: bool = False) -> Sample | None:
        """A sample; None, and no more turns for this mode, if a request fails.

        With ``again`` a peer may fail once, which the results say. Ours may not.
        """
        try:
            return await self.live[mode.pair].ask(mode, seed, length, new)
        except RequestError as exc:
            why = f"{mode.name}, {length:,} tokens: {exc}"
        if again and self.live[mode.pair].pair.connector != "ours":
            self.retried.append(why)
            self.note(f"once more: {why}")
            return await self._ask(mode, seed, length, new)
        self._fail(why, self.live[mode.pair].pair)
        self.modes = [other for other in self.modes if other != mode]
        return None

    async def _warm_up(self) -> float:
        """First contact and every shape; returns the seconds that a round of all loads will take, about."""

        async def pair(modes: Sequence[Mode]) -> None:
            for mode in modes:
                for length in self.plan.lengths:
                    for again in range(2):
                        sample = await self._ask(mode, 900 + again, length, 4, again=True)
                        if sample is None or (again and self._is_slow(mode, length, sample)):
                            return
                        if not again:
                            first = sample.gap if self.plan.alone is None else sample.ttft
                            self.firsts.setdefault(mode.name, []).append(first)

        await asyncio.gather(*(pair([mode for mode in self.modes if mode.pair == name]) for name in self.live))
        began = self.now
        for mode in list(self.modes):
            await self._load(mode, WARM_LOAD, WARM_LOAD, 800)
        self._done("warm-up")
        return 1.2 * (self.now - began) / WARM_LOAD * sum(self.plan.loads.values())

    def _is_slow(self, mode: Mode, length: int, sample: Sample) -> bool:
        if sample.ttft < SLOW_S or self.live[mode.pair].pair.connector == "ours" or not self.plan.peers_may_fail:
            return False
        self._fail(f"{mode.name}, {length:,} tokens: {sample.ttft:.1f} s", self.live[mode.pair].pair)
        self.modes = [other for other in self.modes if other != mode]
        return True

    async def _singles(self, until: float) -> None:
        """Repetitions of all lengths, as many as fit."""
        longest = 0.0
        for rep in range(self.plan.reps):
            began = self.now
            if began + longest > until:
                self.note(f"{rep} of {self.plan.reps} repetitions")
                break
            for length in self.plan.lengths:
                for mode in turns(self.modes, rep) if self.modes else ():
                    sample = await self._ask(mode, 10_000 + 100 * rep, length, NEW)
                    if sample is not None:
                        self.singles.setdefault((mode.name, length), []).append(sample)
            longest = max(longest, self.now - began)
        self._done("singles")

    async def _load(self, mode: Mode, in_flight: int, requests: int, seed: int) -> tuple[float, list[Sample]] | None:
        """Requests, a number of them in flight: the seconds of all, and each; None if one fails."""
        gate = asyncio.Semaphore(in_flight)

        async def one(number: int) -> Sample | None:
            async with gate:
                return await self._ask(mode, seed + number, LOAD_TOKENS, LOAD_NEW) if mode in self.modes else None

        began = time.monotonic()
        samples = await asyncio.gather(*(one(number) for number in range(requests)))
        seconds = time.monotonic() - began
        good = [sample for sample in samples if sample is not None]
        return (seconds, good) if len(good) == requests else None

    async def _loads(self, expected_s: float) -> None:
        """Rounds of all loads, as many as fit."""
        for number in range(self.plan.rounds):
            began = self.now
            if began + expected_s > self.plan.limit_s + (0 if number else GRACE_S / 2):
                self.note(f"{number} of {self.plan.rounds} rounds")
                break
            for in_flight, requests in self.plan.loads.items():
                for mode in turns(self.modes, number) if self.modes else ():
                    found = await self._load(mode, in_flight, requests, 100_000 + 1000 * number)
                    if found is not None:
                        self.loads.setdefault((mode.name, in_flight), []).append(found)
            expected_s = self.now - began
        self._done("loads")


def oracle(run: Run) -> str | None:
    """The mode that all others' tokens are compared with; None: nothing was measured."""
    names = [name for name, _ in run.singles]
    return run.plan.oracle if run.plan.oracle in names else next(iter(names), None)


def same(ones: Sequence[Sample], others: Sequence[Sample]) -> int:
    """How many answers have the same tokens."""
    return sum(list(one.tokens) == list(other.tokens) for one, other in zip(ones, others, strict=False))


def results(run: Run) -> dict[str, Any]:
    """The samples, for JSON, and whether all tokens are right.

    A request that is alone must give the oracle's tokens. Under load, batches differ from run to run, and so does
    rounding: there the first token of most answers must be the oracle's, which no wrong cache could bring about.
    """
    truth = oracle(run)
    red = list(run.red)
    if "loads" not in run.ended:
        red.append("the run did not come to its end")
    singles, loads = [], []
    for (mode, length), samples in run.singles.items():
        theirs = run.singles.get((str(truth), length), [])
        equal, compared = same(samples, theirs), min(len(samples), len(theirs))
        if equal < compared and mode != run.plan.rounds_otherwise:
            red.append(f"{mode}, {length:,} tokens: {equal} of {compared} answers have the tokens of {truth}")
        found: dict[str, Any] = {"mode": mode, "tokens": length, "samples": len(samples), "equal": equal}
        columns = {name: [getattr(one, name) for one in samples] for name in ("prefill", "gap", "ttft", "itl")}
        if (alone := run.singles.get((str(run.plan.alone), length))) is not None:
            least = median(one.ttft for one in alone)
            columns["gap"] = [one - least for one in columns["ttft"]]
        singles.append({**found, **{f"{name}_ms": _ms(values) for name, values in columns.items()}})
    for (mode, in_flight), rounds in run.loads.items():
        of_oracle = run.loads.get((str(truth), in_flight), [])
        pairs = list(chain.from_iterable(zip(a[1], b[1], strict=True) for a, b in zip(rounds, of_oracle, strict=False)))
        equal = sum(list(one.tokens) == list(other.tokens) for one, other in pairs)
        firsts = sum(one.tokens[:1] == other.tokens[:1] for one, other in pairs)
        if firsts < len(pairs) / 2:
            red.append(f"{mode}, {in_flight} in flight: {firsts} of {len(pairs)} first tokens are those of {truth}")
        loads.append(
            {
                "mode": mode,
                "in_flight": in_flight,
                "tokens": LOAD_TOKENS,
                "requests_per_s": [round(len(samples) / seconds, 3) for seconds, samples in rounds],
                "equal": equal,
                "first_equal": firsts,
                "compared": len(pairs),
                "gap_ms": [_ms([one.gap for one in samples]) for _, samples in rounds],
                "ttft_ms": [_ms([one.ttft for one in samples]) for _, samples in rounds],
                "itl_ms": [_ms([one.itl for one in samples]) for _, samples in rounds],
            }
        )
    return {
        "ok": not red,
        "red": red,
        "retried": run.retried,
        "dropped": run.dropped,
        "oracle": truth,
        "ended_s": run.ended,
        "starts_s": run.starts,
        "first_gap_ms": {mode: _ms(seconds) for mode, seconds in run.firsts.items()},
        "singles": singles,
        "loads": loads,
    }


def _ms(seconds: Sequence[float]) -> list[float]:
    return [round(one * 1e3, 3) for one in seconds]
