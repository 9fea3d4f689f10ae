"""Markdown of results: of one run, or of several that were merged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from benchmarks.tables import Found, table

from .cases import PEERS, TOPOLOGIES
from .figures import Ratio, quantile, ratio

SAME = ("gpus", "driver", "versions", "settings")
"""What runs that are merged have in common."""

SHORT = (16, 64)
"""Block sizes of the tables to decide by: vLLM's default, and a larger one. docs/results.md has all."""


def merged(documents: Sequence[Found]) -> dict[str, Any]:
    """One document of several runs, made on the same hardware; each keeps its commit, and the last names all.

    Raises:
        ValueError: they differ, or a run is red.
    """
    every = list(chain.from_iterable(map(runs, documents)))
    first = documents[0]
    for other in documents[1:]:
        if different := [name for name in SAME if first[name] != other[name]]:
            raise ValueError(f"runs that differ in {', '.join(different)} are not to be merged")
    if red := [why for run in every for why in run["red"]]:
        raise ValueError(f"a run is red: {red[0]}")
    own = [{key: value for key, value in run.items() if key not in SAME} for run in every]
    order = sorted(own, key=lambda run: (list(TOPOLOGIES).index(run["topology"]), run["block"]))
    return {"commit": documents[-1]["commit"], **{name: first[name] for name in SAME}, "runs": order}


def runs(found: Found) -> list[Found]:
    """Of a document of one run or of several."""
    return list(found.get("runs", [found]))


def _short(found: Found) -> list[Found]:
    return [run for run in runs(found) if run["block"] in SHORT]


def whole(found: Found) -> str:
    """All tables of all runs."""
    return "\n\n".join(map(of_run, runs(found)))


def of_run(run: Found) -> str:
    """Requests that are alone, requests in flight together, and ours over the peers'."""
    said = f"{name_of(run)} tokens: {max(_samples(run), default=0)} repetitions"
    said += f", {max((len(one['requests_per_s']) for one in run['loads']), default=0)} rounds of each load."
    said += f" First contact failed once: {'; '.join(run['retried'])}." if run["retried"] else ""
    said += "" if run["ok"] else f" **Red:** {'; '.join(run['red'])}."
    parts = [said, table(_alone(run)), *([table(_loaded(run)), table(_ratios(run))] if run["loads"] else [])]
    return "\n\n".join(parts)


def ratios(found: Found) -> str:
    """Of each run, ours over the peers'."""
    return "\n\n".join(f"Blocks of {run['block']} tokens:\n\n{table(_ratios(run))}" for run in runs(found))


def _samples(run: Found) -> Iterator[int]:
    return (one["samples"] for one in run["singles"])


def lengths_of(run: Found) -> list[int]:
    """Tokens of the prompts that were alone."""
    return sorted({one["tokens"] for one in run["singles"]})


def loads_of(run: Found) -> list[int]:
    """How many requests were in flight."""
    return sorted({one["in_flight"] for one in run["loads"]})


def modes(run: Found) -> list[str]:
    """In the order of the first repetition."""
    return list(dict.fromkeys(one["mode"] for one in run["singles"]))


def single(run: Found, mode: str, length: int) -> Found | None:
    """The samples of a mode at a length of the prompt."""
    return next((one for one in run["singles"] if (one["mode"], one["tokens"]) == (mode, length)), None)


def load(run: Found, mode: str, in_flight: int) -> Found | None:
    """The samples of a mode under a load."""
    return next((one for one in run["loads"] if (one["mode"], one["in_flight"]) == (mode, in_flight)), None)


def _alone(run: Found) -> Iterator[list[str]]:
    lengths = lengths_of(run)
    names = ("gap", "TTFT")
    heads = [f"{name}, {length:,}" for name in names for length in lengths]
    yield ["one request: ms, p50 / p90", *heads, "between tokens", "same tokens"]
    for mode in modes(run):
        of = [single(run, mode, length) for length in lengths]
        cells = [_p50_p90(one[f"{name.lower()}_ms"] if one else []) for name in names for one in of]
        here = [one for one in of if one is not None]
        between = _p50_p90([value for one in here for value in one["itl_ms"]], 2)
        equal = f"{sum(one['equal'] for one in here)} of {sum(one['samples'] for one in here)}"
        yield [mode, *cells, between, equal]


def _loaded(run: Found) -> Iterator[list[str]]:
    in_flight = loads_of(run)
    heads = [f"{name}, {number}" for number in in_flight for name in ("requests/s", "gap", "between tokens")]
    yield ["in flight: ms, p50 / p90", *heads]
    for mode in modes(run):
        cells = []
        for number in in_flight:
            one = load(run, mode, number)
            cells.append("" if one is None else f"{mean(one['requests_per_s']):.1f}")
            cells += [_p50_p90(_flat(one[f"{name}_ms"]) if one else []) for name in ("gap", "itl")]
        yield [mode, *cells]


def _ratios(run: Found) -> Iterator[list[str]]:
    lengths, in_flight = lengths_of(run), loads_of(run)
    heads = [f"gap, {length:,}" for length in lengths] + [f"requests/s, {number} in flight" for number in in_flight]
    yield ["ratio, 95% interval", *heads]
    there = modes(run)
    for mode, peers in PEERS.items():
        for peer in peers:
            if mode in there and peer in there:
                gaps = (gap_ratio(run, mode, peer, length) for length in lengths)
                rates = (_rounds(speeds(run, mode, peer, number)) for number in in_flight)
                yield [f"{mode} / {peer}", *("" if one is None else str(one) for one in gaps), *rates]


def gap_ratio(run: Found, mode: str, peer: str, length: int) -> Ratio | None:
    """The gap of a mode over that of a peer."""
    ours, theirs = single(run, mode, length), single(run, peer, length)
    return ratio(ours["gap_ms"], theirs["gap_ms"]) if ours and theirs else None


def speeds(run: Found, mode: str, peer: str, in_flight: int) -> Sequence[float]:
    """Requests per second over a peer's, of each round of both."""
    ours, theirs = load(run, mode, in_flight), load(run, peer, in_flight)
    if not ours or not theirs:
        return ()
    return [a / b for a, b in zip(ours["requests_per_s"], theirs["requests_per_s"], strict=False)]


def _rounds(ratios: Sequence[float]) -> str:
    """Of few rounds all, not an interval."""
    return f"{mean(ratios):.2f} (rounds {min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""


def headline(found: Found) -> str:
    """The gap of ours, asked at once, and that of the fastest mode of NIXL's connectors, at the middle length."""
    lengths = lengths_of(runs(found)[0])
    shown = lengths[len(lengths) // 2]

    def rows() -> Iterator[list[str]]:
        yield [f"prompt of {shown:,} tokens", "`disagg_kv`, ms", "fastest of NIXL's, ms", "ratio (95 % interval)"]
        for run in _short(found):
            ours, best, of = _against_best(run, shown)
            yield [name_of(run), f"{ours:.1f}", f"{best:.1f}", f"**{of.median:.2f}** ({of.low:.2f} to {of.high:.2f})"]

    def others() -> Iterator[str]:
        for length in lengths:
            if length != shown:
                medians = [_against_best(run, length)[2].median for run in _short(found)]
                yield f"{min(medians):.2f} to {max(medians):.2f} at {length:,} tokens"

    return f"{table(rows())}\n\nThe ratios at other lengths: {', '.join(others())}."


def beside(found: Found) -> str:
    """Ours over vLLM's ``NixlConnector``, in either order and with either cache layout."""

    def gap(run: Found, mode: str, peer: str, length: int) -> str:
        of = gap_ratio(run, mode, peer, length)
        return "" if of is None else f"{of.median:.2f} ({of.low:.2f}-{of.high:.2f})"

    def rows() -> Iterator[list[str]]:
        lengths, in_flight = lengths_of(runs(found)[0]), loads_of(runs(found)[0])
        gaps = (f"gap, {length:,} tokens" for length in lengths)
        yield ["TP, block, decode is asked", *gaps, *(f"requests/s, {number} in flight" for number in in_flight)]
        for run in _short(found):
            prefill, decode = TOPOLOGIES[run["topology"]]
            for mode, peers in PEERS.items():
                for peer in (one for one in peers if one.startswith("nixl") and one in modes(run)):
                    order = f"{mode.removeprefix('ours, ')}{' / packed' if 'packed' in peer else ''}"
                    ratios = (gap(run, mode, peer, length) for length in lengths)
                    rates = (f"{mean(speeds(run, mode, peer, number)):.2f}" for number in in_flight)
                    yield [f"{prefill}->{decode}, {run['block']}, {order}", *ratios, *rates]

    return table(rows())


def all_modes(found: Found) -> str:
    """Of each mode in each run, the medians."""
    every = runs(found)
    lengths, in_flight = lengths_of(every[0]), loads_of(every[0])

    def alone(run: Found, mode: str, name: str) -> str:
        of = [one for length in lengths if (one := single(run, mode, length))]
        return " / ".join(f"{_median(one[name]):.1f}" for one in of)

    def loaded(run: Found, mode: str) -> str:
        of = [one for number in in_flight if (one := load(run, mode, number))]
        return " / ".join(f"{mean(one['requests_per_s']):.1f}" for one in of)

    def of(head: str, cell: Callable[[Found, str], str]) -> str:
        names = dict.fromkeys(chain.from_iterable(map(modes, every)))
        return table([[head, *map(name_of, every)], *([mode, *(cell(run, mode) for run in every)] for mode in names)])

    tokens, numbers = (" / ".join(f"{one:,}" for one in some) for some in (lengths, in_flight))
    return "\n\n".join(
        (
            of(f"gap, ms, {tokens} tokens", lambda run, mode: alone(run, mode, "gap_ms")),
            of(f"TTFT, ms, {tokens} tokens", lambda run, mode: alone(run, mode, "ttft_ms")),
            of(f"requests/s, {numbers} in flight", loaded),
        )
    )


def name_of(run: Found) -> str:
    """Its tensor-parallel sizes, and the size of a block, which SGLang calls a page."""
    prefill, decode = TOPOLOGIES[run["topology"]]
    return f"TP {prefill}->{decode}, {'pages' if run.get('engine') == 'sglang' else 'blocks'} of {run['block']}"


def _against_best(run: Found, length: int) -> tuple[float, float, Ratio]:
    """The medians of ours and of the best, and the ratio."""
    gaps = {mode: _median(one["gap_ms"]) for mode in modes(run) if (one := single(run, mode, length))}
    best = min((mode for mode in gaps if mode.startswith(("nixl", "push"))), key=lambda mode: gaps[mode])
    of = gap_ratio(run, "ours, at once", best, length)
    assert of is not None
    return gaps["ours, at once"], gaps[best], of


def _p50_p90(values: Sequence[float], digits: int = 1) -> str:
    return "" if not values else f"{quantile(values, 0.5):.{digits}f} / {quantile(values, 0.9):.{digits}f}"


def _flat(rounds: Sequence[Sequence[float]]) -> list[float]:
    return list(chain.from_iterable(rounds))


def _median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


def mean(values: Sequence[float]) -> float:
    """Of at least one."""
    return sum(values) / len(values)


def medians(run: Found) -> Mapping[tuple[str, int], tuple[float, float]]:
    """The median gap and its 90 % quantile, ms, by mode and length; of SGLang the time to the first token."""
    name = "ttft_ms" if run.get("engine") == "sglang" else "gap_ms"
    return {
        (one["mode"], one["tokens"]): (quantile(one[name], 0.5), quantile(one[name], 0.9)) for one in run["singles"]
    }
