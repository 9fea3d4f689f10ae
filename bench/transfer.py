"""One transfer shape with several strategies, side by side: bytes first, then speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from attrs import field, frozen

from disagg_kv.errors import IntegrityError
from disagg_kv.strategies import Explanation

from .bulk import spread
from .machine import Machine
from .rank import Moved
from .ranks import Ranks, started
from .shape import WIRE, TransferShape

PHASES = ("plan", "gather", "post", "wire", "scatter", "checksum")
"""Of an endpoint's report; ``call``, ``grant``, ``placed``, ``known`` and ``total`` are measured here."""


Runs = list[tuple[list[Moved], list[Moved]]]
"""Of each repeat, what prefill's and what decode's ranks measured."""


Plain = list[list[tuple[int, int, int, int]]]
"""Of each decode rank its plain writes: where each begins, its bytes, its sender, and its place among that one's."""


@frozen
class Quantiles:
    """Seconds: half of the repeats took at most ``p50``, nineteen of twenty at most ``p95``."""

    p50: float
    p95: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Quantiles:
        """Of at least one measurement."""
        p50, p95 = np.percentile(seconds, [50, 95]).tolist()
        return cls(p50, p95)


@frozen
class Measured:
    """One strategy.

    Args:
        path: the path or paths that it took.
        descriptors: writes of one transfer, all ranks.
        segments: segments of one transfer, all prefill ranks.
        phases: seconds; of the rank that spent most on the phase. ``call``: inside the call that makes the last rows
            final, ``send_chunk`` or the ``close`` of a pass. From the first rank that handed its rows over, ``placed``:
            until the last decode rank had its own in its pages; ``known``: until the endpoint of each knew that all
            had; ``total``: until the engine of each saw that the room was released.
        gb_per_s: bytes through the median total.
        wire_s: seconds of the wire phase, where gather and scatter take no cores from it: of a further run in which
            they copy nothing, if the path has them; else as in ``phases``.
        share_of_ceiling: the ceiling's median ``wire`` over that of ``wire_s``, both of the slowest rank.
        total_share_of_ceiling: of the whole transfer: ``gb_per_s`` over the ceiling's.
        decode_step, decode_step_alone: seconds of the steps of decode ranks with a load, during transfers and right
            before them; None: there is no load.
    """

    path: str
    descriptors: int
    segments: int
    phases: Mapping[str, Quantiles]
    gb_per_s: float
    wire_s: Quantiles
    share_of_ceiling: float
    total_share_of_ceiling: float
    decode_step: Quantiles | None
    decode_step_alone: Quantiles | None


@frozen
class Ceiling:
    """The same bytes between the same ranks in plain writes.

    Args:
        writes: how many, one per pair of ranks.
        wire: of the rank that took longest, from handing its writes over until their ends are known.
        total: from the first that began until the last had ended.
        gb_per_s: bytes through the median total.
    """

    writes: int
    wire: Quantiles
    total: Quantiles
    gb_per_s: float


@frozen
class TransferReport:
    """What was found; all of it in one run.

    Args:
        shape: what was moved.
        nbytes: bytes of one transfer.
        strategies: by name.
        ceiling: what the transport itself can do.
        ratio_staged_over_slice: speed of ``staged`` over that of ``slice``, where both were measured.
        verify_cost: per strategy the median total with verification over that without, where both were measured.
        machine: what it ran on.
    """

    shape: TransferShape
    nbytes: int
    strategies: Mapping[str, Measured]
    ceiling: Ceiling
    ratio_staged_over_slice: float | None
    verify_cost: Mapping[str, float]
    machine: Machine = field(factory=Machine.here)


def steps(shape: TransferShape) -> int:
    """How often ``told`` is called."""
    return len(shape.runs) * (shape.repeats + 1)


def run_transfer(shape: TransferShape, told: Callable[[str], None] = lambda _: None) -> TransferReport:
    """Measure every strategy of ``shape`` and the ceiling in turns, and check the bytes of each transfer.

    Before each transfer, outside its time, each rank fills pages, ring and slots with bytes that no transfer brings.
    ``told`` is called with a line after each transfer.

    Raises:
        ConfigurationError: something that cannot work.
        IntegrityError: a strategy, or the plain writes, moved wrong bytes, in any transfer; there is no report then.
        DeadlineError, PeerLostError: a rank hangs, or has ended.
    """
    explanation = shape.explain()
    runs: dict[str, Runs] = {name: [] for name in shape.runs}
    plain: list[tuple[float, float]] = []
    with started(shape, explanation) as (prefill, decode):
        for name in shape.runs:
            _transfer(prefill, decode, name, 0)
            if name == WIRE:
                told(f"{name}: once before it counts")
            else:
                _check(decode, name, explanation)
                told(f"{name}: bytes are right")
        sent = _introduce(prefill, decode, explanation)
        _bulk(prefill, decode, sent)  # the first touch of the memory is not measured
        for repeat in range(1, shape.repeats + 1):
            plain.append(_bulk(prefill, decode, sent))
            for name in shape.runs:
                runs[name].append(_transfer(prefill, decode, name, repeat))
                if name != WIRE:
                    _check(decode, name, explanation)
                told(f"{name}: {repeat} of {shape.repeats}")
    nbytes = explanation.nbytes
    wire, total = (Quantiles.of(seconds) for seconds in zip(*plain, strict=True))
    ceiling = Ceiling(len(explanation.pairs), wire, total, nbytes / total.p50 / 1e9)
    found = {
        name: _measured(runs[name], runs[WIRE if name == "staged" else name], nbytes, ceiling)
        for name in (*shape.strategies, *shape.again)
    }
    ratio = None
    if {"staged", "slice"} <= found.keys():
        ratio = found["staged"].gb_per_s / found["slice"].gb_per_s

    def compared(others: Mapping[str, str]) -> dict[str, float]:
        return {name: found[o].phases["total"].p50 / found[name].phases["total"].p50 for name, o in others.items()}

    return TransferReport(shape, nbytes, found, ceiling, ratio, compared(shape.verified))


@frozen
class Turns:
    """What was seen of one strategy.

    Args:
        totals: seconds of each repeat, from the first rank that began until the engine of the last decode rank saw that
            the room was released.
        groups: into how many groups the last one cut the layers.
    """

    totals: tuple[float, ...]
    groups: int


def run_turns(shape: TransferShape) -> dict[str, Turns]:
    """Measure every strategy in turns, without a ceiling, and check the bytes of each transfer.

    Raises:
        As :func:`run_transfer`.
    """
    explanation = shape.explain()
    runs: dict[str, Runs] = {name: [] for name in shape.strategies}
    with started(shape, explanation) as (prefill, decode):
        for repeat in range(shape.repeats + 1):
            for name in shape.strategies:
                runs[name].append(_transfer(prefill, decode, name, repeat))
                _check(decode, name, explanation)
    return {name: Turns(tuple(_totals(of[1:])), max(m.groups for m in of[-1][0])) for name, of in runs.items()}


def _transfer(prefill: Ranks, decode: Ranks, strategy: str, number: int) -> tuple[list[Moved], list[Moved]]:
    room = f"{strategy[:32]} {number}".encode()
    decode.ask(type(None), "prepare", strategy, room)
    prefill.ask(type(None), "prepare", strategy, room)
    decode.tell("move")
    prefill.tell("move")
    return prefill.answers(Moved), decode.answers(Moved)


def _check(decode: Ranks, strategy: str, explanation: Explanation) -> None:
    bad = sum(decode.ask(int, "wrong", strategy))
    if bad:
        raise IntegrityError(
            f"strategy {strategy!r}: {bad:,} bytes are wrong after a transfer of {explanation.nbytes:,}; "
            "nothing is measured"
        )


def _introduce(prefill: Ranks, decode: Ranks, explanation: Explanation) -> Plain:
    """Tell every prefill rank where its plain writes go."""
    targets = decode.ask(tuple, "describe")
    sent: dict[int, list[tuple[object, ...]]] = {}
    plain: Plain = [[] for _ in targets]
    for number, target in enumerate(targets):
        pairs = [p for p in explanation.pairs if p.target == number]
        for pair, offset in zip(pairs, spread([p.nbytes for p in pairs]), strict=True):
            mine = sent.setdefault(pair.writer, [])
            plain[number].append((offset, pair.nbytes, pair.writer, len(mine)))
            mine.append((*target, offset, pair.nbytes))
    prefill.give("connect", [sent.get(rank, []) for rank in range(prefill.size)])
    return plain


def _bulk(prefill: Ranks, decode: Ranks, plain: Plain) -> tuple[float, float]:
    """Seconds: of the slowest rank, and of all together; what is there is compared with what was sent."""
    decode.ask(type(None), "blank_plain")
    times = prefill.ask(tuple, "bulk")
    sums = prefill.ask(list, "plain_sums")
    decode.send("plain_sums", [[part[:2] for part in parts] for parts in plain])
    for number, (parts, found) in enumerate(zip(plain, decode.answers(list), strict=True)):
        if found != [sums[writer][place] for _, _, writer, place in parts]:
            raise IntegrityError(
                f"plain writes: decode rank {number} has other bytes than were sent; nothing is measured"
            )
    slowest = max(ended - began for began, ended in times)
    return slowest, max(ended for _, ended in times) - min(began for began, _ in times)


def _measured(runs: Runs, wire_runs: Runs, nbytes: int, ceiling: Ceiling) -> Measured:
    phases = {phase: _phase(runs, phase) for phase in PHASES}
    grants = [grant for prefill, _ in runs for rank in prefill for grant in rank.grants]
    phases["call"] = Quantiles.of([max(m.called for m in prefill) for prefill, _ in runs])
    phases["grant"] = Quantiles.of(grants or [0.0])
    wire = _phase(wire_runs, "wire")
    phases["placed"] = Quantiles.of([max(m.placed for m in decode) - _since(prefill) for prefill, decode in runs])
    phases["known"] = Quantiles.of([max(m.known for m in decode) - _since(prefill) for prefill, decode in runs])
    phases["total"] = Quantiles.of(_totals(runs))
    last, moved = runs[-1][0], [m for _, decode in runs for m in decode]
    steps = [seconds for m in moved for seconds in m.steps], [seconds for m in moved for seconds in m.alone]
    speed = nbytes / phases["total"].p50 / 1e9
    return Measured(
        "+".join(sorted({m.path for m in last})),
        sum(m.descriptors for m in last),
        sum(m.segments for m in last),
        phases,
        speed,
        wire,
        ceiling.wire.p50 / wire.p50,
        speed / ceiling.gb_per_s,
        *(Quantiles.of(of) if of else None for of in steps),
    )


def _totals(runs: Runs) -> list[float]:
    return [max(d.ended for d in decode) - _since(prefill) for prefill, decode in runs]


def _since(prefill: Sequence[Moved]) -> float:
    return min(m.began for m in prefill)


def _phase(runs: Runs, phase: str) -> Quantiles:
    """Of the rank that spent most on it."""
    return Quantiles.of([max(m.seconds.get(phase, 0.0) for m in (*prefill, *decode)) for prefill, decode in runs])
