"""Markdown of runs of SGLang: this library's backend over the best of SGLang's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from benchmarks.tables import Found, table

from .cases import LENGTHS
from .figures import quantile, ratio
from .sglang import ALONE, PAIRS
from .tables import SAME, all_modes, lengths_of, load, loads_of, mean, modes, name_of, of_run, runs, single, speeds

OURS = "ours, at once"


def peers(run: Found) -> list[str]:
    """SGLang's own backends that were measured."""
    own = {f"{name}, at once" for name, pair in PAIRS.items() if pair.connector != "ours" and name != ALONE}
    return [mode for mode in modes(run) if mode in own]


def headline(found: Found) -> str:
    """Of each run: time to the first token, requests per second, and the time between tokens under load."""

    def rows() -> Iterator[list[str]]:
        lengths, in_flight = lengths_of(runs(found)[0]), loads_of(runs(found)[0])
        yield [
            "ours / best of SGLang's",
            *(f"TTFT, ms, {one:,} tokens" for one in lengths),
            *(f"{what}, {one} in flight" for one in in_flight for what in ("requests/s", "between tokens")),
        ]
        for run in runs(found):
            cells = [_first(run, length) for length in lengths]
            for number in in_flight:
                cells += [_speed(run, number), _between(run, number)]
            yield [name_of(run), *cells]

    return table(rows())


LAYERED = {"layered, at once": OURS, "wire-layered, at once": "wire, at once"}
"""Modes that send layers, and the same without."""


def layers(found: Found) -> str:
    """Of a run: times to the first token of modes that send layers over those that do not, and all modes."""

    def rows() -> Iterator[list[str]]:
        lengths, in_flight = lengths_of(found), loads_of(found)
        yield [
            "TTFT, ms: layers / whole passes",
            *(f"{one:,} tokens" for one in lengths),
            *(f"requests/s, {one} in flight" for one in in_flight),
        ]
        for mode, whole in LAYERED.items():
            cells = []
            for length in lengths:
                both = [one["ttft_ms"] for name in (mode, whole) if (one := single(found, name, length))]
                medians = " / ".join(f"{quantile(one, 0.5):.1f}" for one in both)
                cells.append(f"{medians}: **{ratio(*both)}**")
            rates = (f"**{mean(speeds(found, mode, whole, one)):.2f}**" for one in in_flight)
            yield [_short(mode), *cells, *rates]

    return f"{table(rows())}\n\n{of_run(found)}"


def first_requests(documents: Sequence[Found]) -> dict[str, Any]:
    """What the first request of each length took in each run, also of runs that did not come to their end."""
    own = ("topology", "block", "engine")
    firsts = [{**{name: run[name] for name in own}, "first_ttft_ms": run["first_gap_ms"]} for run in documents]
    return {name: documents[-1][name] for name in ("commit", *SAME)} | {"runs": firsts, "lengths": list(LENGTHS)}


def firsts(found: Found) -> str:
    """The first request of each length; a request that was not answered in time is missing."""

    def rows() -> Iterator[list[str]]:
        every = dict.fromkeys(mode for run in found["runs"] for mode in run["first_ttft_ms"])
        yield [f"ms, {' / '.join(f'{one:,}' for one in found['lengths'])} tokens", *map(name_of, found["runs"])]
        for mode in sorted(every, key=lambda one: not one.startswith("ours")):
            of = (run["first_ttft_ms"].get(mode, []) for run in found["runs"])
            yield [_short(mode), *(" / ".join(f"{one:,.0f}" for one in some) for some in of)]

    return table(rows())


def shown(found: Found) -> str:
    """All tables."""
    return f"{headline(found)}\n\n{all_modes(found)}"


def _best(run: Found, value: Callable[[str], float | None]) -> tuple[str, float] | None:
    """The peer with the least value."""
    there = ((mode, found) for mode in peers(run) if (found := value(mode)) is not None)
    return min(there, key=lambda one: one[1], default=None)


def _first(run: Found, length: int) -> str:
    def ttft(mode: str) -> float | None:
        one = single(run, mode, length)
        return quantile(one["ttft_ms"], 0.5) if one else None

    ours, best = ttft(OURS), _best(run, ttft)
    if ours is None or best is None:
        return ""
    both = [single(run, mode, length) for mode in (OURS, best[0])]
    found = ratio(*(one["ttft_ms"] for one in both if one))
    return f"{ours:.1f} / {best[1]:.1f} ({_short(best[0])}): **{found}**"


def _speed(run: Found, in_flight: int) -> str:
    def seconds(mode: str) -> float | None:
        one = load(run, mode, in_flight)
        return 1 / mean(one["requests_per_s"]) if one else None

    ours, best = seconds(OURS), _best(run, seconds)
    if ours is None or best is None:
        return ""
    ratio = mean(speeds(run, OURS, best[0], in_flight))
    return f"{1 / ours:.1f} / {1 / best[1]:.1f} ({_short(best[0])}): **{ratio:.2f}**"


def _between(run: Found, in_flight: int) -> str:
    def itl(mode: str) -> float | None:
        one = load(run, mode, in_flight)
        return quantile(list(chain.from_iterable(one["itl_ms"])), 0.5) if one else None

    ours, best = itl(OURS), _best(run, itl)
    return "" if ours is None or best is None else f"{ours:.1f} / {best[1]:.1f} ms: **{ours / best[1]:.2f}**"


def _short(mode: str) -> str:
    return mode.partition(",")[0]
