"""A simulated hour of a fleet as Prometheus would have stored it, and the dashboard that it gives, as SVG.

The endpoints, their observers and the registry are real, and so is every count. Clock, network, memory and kernels are
those of the simulated fleet, which moves no bytes. One rank of a hundred restarts each minute. The store is away for a
minute. Some clients go away, a rack is cut off for longer than peers may be silent, and prefill is restarted rank by
rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import inf
from xml.sax.saxutils import escape

from attrs import field, frozen
from prometheus_client import CollectorRegistry

from benchmarks.dashboard import COLUMNS, PANELS, Panel, Query
from disagg_kv.endpoints.decode.handle import ReceptionHandle
from disagg_kv.observe.prometheus import PrometheusMetrics, PrometheusObserver
from disagg_kv.trace import Observer
from sim.fleet import FleetPlan
from sim.fleet.fleet import Fleet
from sim.fleet.rank import FleetRank

Labels = frozenset[tuple[str, str]]


@frozen
class Sample:
    """What Prometheus gets at one time: a value by labels, by name."""

    at: float
    values: Mapping[str, Mapping[Labels, float]] = field(repr=False)


@frozen
class Series:
    """A line of a panel: points of time and value; None: no value."""

    name: str
    points: Sequence[tuple[float, float | None]]


@frozen
class Events:
    """What happens in the hour beside the faults of the plan, at shares of its time.

    Args:
        leaving: while clients go away, each with the probability ``gone``.
        gone: see there.
        cut_s: seconds for which the rack is cut off, beginning at the half.
        rolling: when each rank of prefill is restarted in its turn.
    """

    leaving: tuple[float, float] = (0.2, 0.3)
    gone: float = 0.05
    cut_s: float = 60.0
    rolling: tuple[float, float] = (0.7, 0.85)


class Hour(Fleet):
    """A fleet with :class:`Events`."""

    def __init__(self, plan: FleetPlan, observe: Callable[[str, int], Observer], events: Events) -> None:
        super().__init__(plan, observe)
        self._planned = events
        self._leaving = (inf, inf)

    def arrange(self) -> None:
        """Plan the events of the traffic that begins now."""
        seconds, count = self.plan.seconds, self.plan.prefills
        first, last = self._planned.rolling
        for number in range(count):
            at = seconds * (first + (last - first) * number / count)
            self.later(at, partial(self._restart, "prefill", number))
        first, last = self._planned.leaving
        self._leaving = self.now + seconds * first, self.now + seconds * last

    def begin(self, prefill: FleetRank, decode: FleetRank) -> None:
        """See :meth:`Fleet.begin`; the client may go away while prefill computes."""
        before = len(self._requests)
        super().begin(prefill, decode)
        first, last = self._leaving
        if len(self._requests) > before and first <= self.now < last and self._random.random() < self._planned.gone:
            handles = next(reversed(self._requests.values())).handles
            assert handles is not None
            reception = handles[1]
            assert isinstance(reception, ReceptionHandle)
            self.later(0.02, partial(reception.abort, "the client has gone"))

    def _cut_rack(self, seconds: float) -> None:
        super()._cut_rack(self._planned.cut_s)


def simulated(plan: FleetPlan, every_s: float, events: Events = Events()) -> Sequence[Sample]:
    """Run a fleet, and scrape it at equal distances of simulated time."""
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    observers: dict[str, PrometheusObserver] = {}

    def observe(role: str, number: int) -> Observer:
        name = f"{role}-{number}"
        if name in observers:
            observers[name].close()  # its process has ended: the next one counts from zero
        made = observers[name] = metrics.observer("prefill" if role == "prefill" else "decode", name)
        return made

    fleet = Hour(plan, observe, events)
    fleet.join()
    fleet.arrange()
    began, samples = fleet.now, list[Sample]()

    def scrape() -> None:
        for rank in fleet.ranks:
            observers[rank.instance].watch(rank.endpoint)
        values: dict[str, dict[Labels, float]] = defaultdict(dict)
        for family in registry.collect():
            for one in family.samples:
                values[one.name][frozenset(one.labels.items())] = one.value
        samples.append(Sample(fleet.now - began, values))
        if fleet.now - began < plan.seconds:
            fleet.later(every_s, scrape)

    fleet.later(0.0, scrape)
    fleet.steady()
    return samples


def answers(samples: Sequence[Sample]) -> Sequence[tuple[Panel, Sequence[Series]]]:
    """The series of every panel."""
    return [(panel, [series for query in panel.queries for series in _asked(query, samples)]) for panel in PANELS]


def _asked(query: Query, samples: Sequence[Sample]) -> Iterator[Series]:
    """What Prometheus would answer to a query, with the distance of the samples as the interval of rates."""
    points: dict[str, list[tuple[float, float | None]]] = defaultdict(list)
    for before, now in pairwise(samples):
        found: Mapping[str, float | None]
        match query.kind:
            case "rate":
                found = _summed(query, _increase(query.metric.shown, before, now), now.at - before.at)
            case "gauge":
                found = _summed(query, now.values.get(query.metric.shown, {}))
            case "share":
                assert query.of is not None
                whole = _summed(query, now.values.get(query.of.shown, {}))
                part = _summed(query, now.values.get(query.metric.shown, {}))
                found = {key: value / whole[key] for key, value in part.items() if whole.get(key)}
            case "quantile":
                found = {"": _quantile(query, _increase(f"{query.metric.shown}_bucket", before, now))}
        for value, number in found.items():
            points[value].append((now.at, number))
    for value, line in sorted(points.items()):
        yield Series(query.legend(value) or "none", line)


def _increase(name: str, before: Sample, now: Sample) -> Mapping[Labels, float]:
    """Of counters; one that is smaller than before has begun anew, see Prometheus' ``increase``."""
    old = before.values.get(name, {})
    return {
        labels: value - (old.get(labels, 0.0) if old.get(labels, 0.0) <= value else 0.0)
        for labels, value in now.values.get(name, {}).items()
    }


def _summed(query: Query, values: Mapping[Labels, float], seconds: float = 1.0) -> dict[str, float]:
    """By the label of the query."""
    found: dict[str, float] = defaultdict(float)
    for labels, value in values.items():
        if not query.side or ("side", query.side) in labels:
            found[dict(labels).get(query.by, "")] += value / seconds
    return found


def _quantile(query: Query, buckets: Mapping[Labels, float]) -> float | None:
    """See Prometheus' ``histogram_quantile``: linear inside a bucket; None: nothing was counted."""
    counts: dict[float, float] = defaultdict(float)
    for labels, value in buckets.items():
        named = dict(labels)
        if not query.side or named["side"] == query.side:
            counts[float(named["le"])] += value
    rank = query.quantile * counts.get(inf, 0.0)
    if not rank:
        return None
    lower, below = 0.0, 0.0
    for bound, count in sorted(counts.items()):
        if count >= rank:
            return lower if bound == inf else lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    raise AssertionError("a histogram without its last bucket")


# The picture.

CELL, ROW, EDGE = 220, 168, 10
LINES = ("#4f46e5", "#c2410c", "#15803d", "#b91c1c", "#0e7490", "#a16207", "#9333ea", "#64748b")
DARK = ("#a5b4fc", "#fdba74", "#86efac", "#fca5a5", "#67e8f9", "#fde047", "#d8b4fe", "#cbd5e1")
"""The colours of the lines: on a light ground, and on a dark one."""

STYLE = """
text { fill: #1f2937; font-size: 10px; }
.bg { fill: #ffffff; } .panel { fill: #f8fafc; stroke: #cbd5e1; } .grid { stroke: #cbd5e1; }
.title { font-weight: bold; font-size: 12px; }
path { fill: none; stroke-width: 1.4; }
@media (prefers-color-scheme: dark) {
  text { fill: #e5e7eb; } .bg { fill: #0f172a; } .panel { fill: #1e293b; stroke: #475569; } .grid { stroke: #475569; }
}
""".strip()
STYLE += "\n" + " ".join(f".line{n} {{ stroke: {colour}; }}" for n, colour in enumerate(LINES))
STYLE += "\n@media (prefers-color-scheme: dark) {\n  "
STYLE += " ".join(f".line{n} {{ stroke: {colour}; }}" for n, colour in enumerate(DARK)) + "\n}"


def draw(panels: Sequence[tuple[Panel, Sequence[Series]]]) -> str:
    """The dashboard as SVG; series that are 0 all the time have no line, but a name."""
    rows = -(-len(panels) // COLUMNS)
    width, height = COLUMNS * CELL + EDGE, rows * ROW + EDGE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" role="img">',
        "<title>The dashboard after a simulated hour of a fleet</title>",
        f"<style>\n{STYLE}\n</style>",
        f'<rect class="bg" width="{width}" height="{height}" rx="8"/>',
    ]
    for number, (panel, series) in enumerate(panels):
        row, column = divmod(number, COLUMNS)
        parts += _panel(panel, series, column * CELL + EDGE, row * ROW + EDGE)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, series: Sequence[Series], left: float, top: float) -> Iterator[str]:
    wide, tall = CELL - EDGE, ROW - EDGE
    plot_left, plot_top, plot_wide, plot_tall = left + 56, top + 26, wide - 66, tall - 76
    most = max((value for one in series for _, value in one.points if value is not None), default=0.0)
    end = max((at for one in series for at, _ in one.points), default=1.0)
    yield f'<rect class="panel" x="{left}" y="{top}" width="{wide}" height="{tall}" rx="4"/>'
    yield f'<text class="title" x="{left + 8}" y="{top + 16}">{escape(panel.title)}</text>'
    for share in (0.0, 0.5, 1.0):
        y = plot_top + plot_tall * (1 - share)
        yield f'<path class="grid" d="M{plot_left} {y:.1f}h{plot_wide}"/>'
        label = shown(most * share, panel.unit)
        yield f'<text x="{plot_left - 4}" y="{y + 3:.1f}" text-anchor="end">{label}</text>'
    bottom = plot_top + plot_tall + 12
    yield f'<text x="{plot_left}" y="{bottom}">0</text>'
    yield f'<text x="{plot_left + plot_wide}" y="{bottom}" text-anchor="end">{end / 60:g} min</text>'
    drawn = [one for one in series if any(value for _, value in one.points)]
    for number, one in enumerate(drawn[: len(LINES)]):
        path, pen = "", "M"
        for at, value in one.points:
            if value is None:
                pen = "M"
                continue
            path += f"{pen}{plot_left + plot_wide * at / end:.1f} {plot_top + plot_tall * (1 - value / most):.1f}"
            pen = "L"
        yield f'<path class="line{number}" d="{path}"/>'
    yield from _legend(drawn, left + 8, bottom + 14)


def _legend(drawn: Sequence[Series], left: float, top: float) -> Iterator[str]:
    """The names of the lines, in up to three rows; no line: nothing happened."""
    if not drawn:
        yield f'<text x="{left}" y="{top}">0 all the time</text>'
    x, y = left, top
    for number, one in enumerate(drawn[: len(LINES)]):
        wide = 16 + 5.6 * len(one.name)
        if x > left and x + wide > left + CELL - EDGE - 12:
            x, y = left, y + 12
        yield f'<path class="line{number}" d="M{x:.0f} {y - 3:.0f}h8"/>'
        yield f'<text x="{x + 11:.0f}" y="{y:.0f}">{escape(one.name)}</text>'
        x += wide


def shown(value: float, unit: str) -> str:
    """A number of an axis, with its unit."""
    match unit:
        case "percentunit":
            return f"{value:.2%}" if value < 0.1 else f"{value:.0%}"
        case "s":
            return _scaled(value * 1e6, ("us", "ms", "s"), 1000.0)
        case "bytes":
            return _scaled(value, ("B", "KiB", "MiB", "GiB"), 1024.0)
        case "binBps":
            return _scaled(value, ("B/s", "KiB/s", "MiB/s", "GiB/s"), 1024.0)
        case "ops":
            return f"{value:.3g}/s"
    return f"{value:.3g}"


def _scaled(value: float, units: Sequence[str], step: float) -> str:
    for unit in units[:-1]:
        if value < step:
            return f"{value:.3g} {unit}"
        value /= step
    return f"{value:.3g} {units[-1]}"
