"""The Grafana dashboard, and a picture of it from a simulated hour of a fleet.

    python -m benchmarks.dashboard

writes ``docs/dashboards/disagg_kv.json`` and ``docs/images/dashboard.svg``. The panels are written once, here: the file
has their queries in Prometheus' language, and ``benchmarks.dashboard_hour`` answers the same queries from its samples.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

from disagg_kv.observe import metrics as m
from disagg_kv.observe.metrics import Metric

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "dashboards" / "disagg_kv.json"
PICTURE = ROOT / "docs" / "images" / "dashboard.svg"

COLUMNS, WIDTH, HEIGHT = 4, 6, 6
"""Panels beside each other, and the size of each on Grafana's grid of 24 columns."""

LINKS = 8
"""Budget of each rank in the picture: fewer than the peers that it meets."""

Side = Literal["", "prefill", "decode"]


@frozen
class Query:
    """A query of a panel: one series for each value of ``by``.

    Args:
        kind: ``rate``: increase per second, summed. ``quantile``: of a histogram. ``gauge``: summed. ``share``: of
            ``metric`` in ``of``.
        metric: what is asked for.
        by: the label whose values are series of their own; "": one series.
        of: the whole of a share.
        quantile: of a histogram.
        side: only of this side; "": of both.
    """

    kind: Literal["rate", "quantile", "gauge", "share"]
    metric: Metric
    by: str = ""
    of: Metric | None = None
    quantile: float = 0.0
    side: Side = ""

    @property
    def expression(self) -> str:
        """In Prometheus' language."""
        side = f', side="{self.side}"' if self.side else ""
        chosen = '{instance=~"$instance"' + side + "}"
        name, by = self.metric.shown, f" by ({self.by})" if self.by else ""
        match self.kind:
            case "rate":
                return f"sum{by} (rate({name}{chosen}[$__rate_interval]))"
            case "quantile":
                buckets = f"sum by (le) (rate({name}_bucket{chosen}[$__rate_interval]))"
                return f"histogram_quantile({self.quantile:g}, {buckets})"
            case "share":
                assert self.of is not None
                return f"sum{by} ({name}{chosen}) / sum{by} ({self.of.shown}{chosen})"
            case "gauge":
                return f"sum{by} ({name}{chosen})"

    def legend(self, value: str) -> str:
        """The name of a series, by the value of its label."""
        words = self.metric.name.removesuffix("_seconds").removesuffix("_used_bytes").replace("_", " ")
        if self.kind == "quantile":
            return f"{words} p{self.quantile * 100:g}"
        return value if self.by else words


@frozen
class Panel:
    """A graph: its title, the unit of its axis by Grafana's name, and its queries."""

    title: str
    unit: Literal["ops", "binBps", "s", "short", "percentunit", "bytes"]
    queries: tuple[Query, ...]


def _rates(*metrics: Metric) -> tuple[Query, ...]:
    return tuple(Query("rate", metric) for metric in metrics)


PANELS = (
    Panel("Rooms that ended", "ops", (Query("rate", m.ROOMS_ENDED, "outcome", side="decode"),)),
    Panel("Rooms that failed, by error", "ops", (Query("rate", m.ROOMS_FAILED, "error", side="decode"),)),
    Panel("Paths of rooms", "ops", (Query("rate", m.ROOMS_ENDED, "path", side="decode"),)),
    Panel("Bytes", "binBps", (Query("rate", m.BYTES, "side"),)),
    Panel("Time of a room", "s",
          tuple(Query("quantile", m.ROOM_SECONDS, quantile=q, side="decode") for q in (0.5, 0.99))),
    Panel("Time of a segment", "s", tuple(Query("quantile", one, quantile=0.99) for one in m.SECONDS.values())),
    Panel("Open rooms, by phase", "short", (Query("gauge", m.ROOMS, "phase", side="decode"),)),
    Panel("Staging memory in use", "percentunit",
          (Query("share", m.RING_USED, of=m.RING_BYTES), Query("share", m.SLOTS_USED, of=m.SLOTS))),
    Panel("Bytes in quarantine", "bytes", (Query("gauge", m.QUARANTINED, "side"),)),
    Panel("Peers, by state", "short", (Query("gauge", m.PEERS, "state", side="decode"),)),
    Panel("Losses, retries, look-ups", "ops", _rates(m.LOST_PEERS, m.RETRIES, m.LOOKUP_FAILURES)),
    Panel("Refusals, by reason", "ops",
          (Query("rate", m.REFUSALS, "reason"), *_rates(m.FRAMES_DROPPED, m.INTERNAL_ERRORS))),
    Panel("Links, of their budget", "percentunit", (Query("share", m.LINKS, "side", of=m.LINKS_BUDGET),)),
    Panel("Links that were dropped", "ops", (Query("rate", m.LINKS_DROPPED, "side"),)),
    Panel("Segments and writes", "ops", tuple(Query("rate", one, side="prefill") for one in (m.SEGMENTS, m.WRITES))),
    Panel("Layer groups, other events", "ops", _rates(m.LAYER_GROUPS, m.OTHER_EVENTS)),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """What Grafana imports; see its documentation, "Dashboard JSON model"."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels = []
    for number, panel in enumerate(PANELS):
        row, column = divmod(number, COLUMNS)
        targets = [
            {
                "datasource": source,
                "expr": query.expression,
                "legendFormat": query.legend(f"{{{{{query.by}}}}}"),
                "refId": chr(ord("A") + at),
            }
            for at, query in enumerate(panel.queries)
        ]
        panels.append(
            {
                "id": number + 1,
                "type": "timeseries",
                "title": panel.title,
                "datasource": source,
                "gridPos": {"h": HEIGHT, "w": WIDTH, "x": column * WIDTH, "y": row * HEIGHT},
                "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                "targets": targets,
            }
        )
    instances = {
        "name": "instance",
        "type": "query",
        "datasource": source,
        "query": f"label_values({m.PEERS.shown}, instance)",
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "refresh": 2,
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "title": "disagg_kv",
        "uid": "disagg-kv",
        "schemaVersion": 39,
        "tags": ["disagg_kv"],
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}, instances]},
        "panels": panels,
    }


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    from benchmarks.dashboard_hour import Events, answers, draw, simulated
    from sim.fleet import ALL_FAULTS, FleetPlan

    FILE.write_text(text())
    plan = FleetPlan(prefills=10, decodes=10, seconds=3600.0, rate=0.5, faults=ALL_FAULTS, links=LINKS)
    PICTURE.write_text(draw(answers(simulated(plan, every_s=30.0, events=Events()))))
