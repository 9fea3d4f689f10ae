"""The Grafana dashboard asks for metrics and labels that endpoints export; its picture answers its queries."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from disagg_kv.observe import metrics as m
from tests.support.needs import needs_prometheus
from tests.support.pages import ROOT

pytestmark = needs_prometheus

FILE = ROOT / "docs" / "dashboards" / "disagg_kv.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
SELECTOR = re.compile(r"\b(disagg_kv_\w+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')
BY = re.compile(r"\bby \((\w+)\)")


def queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


@pytest.fixture(scope="module")
def exported() -> Mapping[str, set[str]]:
    """The labels of every sample of a registry in which every series exists, by the sample's name."""
    from prometheus_client import CollectorRegistry

    from benchmarks.dashboard_hour import Events, Hour
    from disagg_kv.ids import RoomId
    from disagg_kv.observe.prometheus import PrometheusMetrics
    from disagg_kv.trace import Observer, Span
    from sim.fleet import FleetPlan

    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    observers = {"prefill": metrics.observer("prefill", "p"), "decode": metrics.observer("decode", "d")}

    def observe(role: str, number: int) -> Observer:
        return observers[role]

    fleet = Hour(FleetPlan(1, 1, seconds=1.0), observe, Events())
    fleet.join()
    for rank in fleet.ranks:
        observer = observers[rank.role]
        observer.watch(rank.endpoint)
        for name in [*m.COUNTED, "own"]:
            observer.count(name)
        labels = {"outcome": "failed", "path": "", "segments": "0", "error": "PeerLostError"}
        observer.span(Span("room", RoomId(b"a"), 0.0, 1.0, labels=labels))
    return {sample.name: set(sample.labels) for family in registry.collect() for sample in family.samples}


def test_every_query_asks_for_metrics_and_labels_that_are_exported(exported: Mapping[str, set[str]]) -> None:
    """Its matchers, too; and histograms by their buckets alone."""
    kinds = {"histogram": "_bucket"}
    assert {metric.shown + kinds.get(metric.kind, "") for metric in m.METRICS} <= set(exported)
    for query in queries():
        selectors = SELECTOR.findall(query)
        assert len(selectors) == query.count("disagg_kv_") > 0
        for name, matchers in selectors:
            assert name in exported, query
            found = MATCHER.findall(matchers)
            assert {label for label, _, _ in found} <= exported[name], query
            assert set(BY.findall(query)) <= exported[name], query
            assert {value for label, _, value in found if label == "side"} <= {"prefill", "decode"}
            assert name.endswith("_bucket") == ("histogram_quantile" in query)


def test_variables_are_defined_and_legends_name_labels_of_their_query() -> None:
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "instance"}
    (asked,) = [one["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    assert asked == f"label_values({m.PEERS.shown}, instance)"
    used = set(re.findall(r"\$\{?(\w+)", FILE.read_text())) - {"__rate_interval", "__all"}
    assert used == variables
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            assert re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]) in (
                [],
                [*dict.fromkeys(BY.findall(target["expr"]))],
            )


def test_panels_fill_one_screen_without_gaps() -> None:
    """Sixteen of them: four in a row, as high as a screen; no id and no letter is used twice."""
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = {(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])}
    assert len(cells) == sum(p["w"] * p["h"] for p in places) == 24 * 24
    assert cells == {(x, y) for x in range(24) for y in range(24)}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
    for panel in DASHBOARD["panels"]:
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)


def test_the_file_is_what_the_panels_say() -> None:
    from benchmarks.dashboard import text

    assert FILE.read_text() == text(), "run python -m benchmarks.dashboard"


def test_the_picture_has_every_panel_and_is_of_an_hour_in_which_something_happened() -> None:
    from benchmarks.dashboard import PICTURE

    picture = PICTURE.read_text()
    titles = re.findall(r'<text class="title"[^>]*>([^<]+)</text>', picture)
    assert titles == [panel["title"] for panel in DASHBOARD["panels"]]
    assert picture.count('<path class="line') >= 2 * 16
    assert "PeerLostError" in picture


def test_queries_are_answered_as_prometheus_answers_them() -> None:
    """A rate over a counter that begins anew, a sum by label, a share, and a quantile inside a bucket."""
    from benchmarks.dashboard import Query
    from benchmarks.dashboard_hour import Sample, _asked

    def at(seconds: float, counts: Mapping[str, float], buckets: tuple[float, float, float]) -> Sample:
        own = {"side": "decode", "instance": "a", "rank": "0"}
        ended = {frozenset({**own, "outcome": k}.items()): v for k, v in counts.items()}
        bounds = zip(("0.1", "0.2", "+Inf"), buckets, strict=True)
        names = {
            m.ROOMS_ENDED.shown: ended,
            f"{m.ROOM_SECONDS.shown}_bucket": {frozenset({**own, "le": b}.items()): v for b, v in bounds},
            m.RING_USED.shown: {frozenset(own.items()): seconds},
            m.RING_BYTES.shown: {frozenset(own.items()): 100.0},
        }
        return Sample(seconds, names)

    samples = [at(0, {"done": 10}, (0, 0, 0)), at(10, {"done": 30, "failed": 5}, (10, 20, 20)),
               at(20, {"done": 4, "failed": 5}, (0, 4, 8))]  # fmt: skip

    def asked(query: Query) -> dict[str, list[tuple[float, float | None]]]:
        return {series.name: list(series.points) for series in _asked(query, samples)}

    assert asked(Query("rate", m.ROOMS_ENDED, "outcome")) == {
        "done": [(10, 2.0), (20, 0.4)],
        "failed": [(10, 0.5), (20, 0.0)],
    }
    assert asked(Query("rate", m.ROOMS_ENDED, side="prefill")) == {}
    assert asked(Query("share", m.RING_USED, of=m.RING_BYTES)) == {"ring": [(10, 0.1), (20, 0.2)]}
    assert asked(Query("gauge", m.RING_BYTES, "side")) == {"decode": [(10, 100.0), (20, 100.0)]}
    (points,) = asked(Query("quantile", m.ROOM_SECONDS, quantile=0.75)).values()
    assert points == [(10, pytest.approx(0.15)), (20, 0.2)]
