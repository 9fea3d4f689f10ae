"""The metrics: all are documented, all events of endpoints have one, and names follow Prometheus' conventions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from disagg_kv.observe.metrics import COUNTED, METRICS, OF_ENDPOINT, PREFIX, ROOM_BOUNDS, SECONDS, SEGMENT_BOUNDS
from tests.support.pages import ROOT

PAGE = (ROOT / "docs/observe.md").read_text()
ROW = re.compile(r"^\| `(disagg_kv_\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", re.MULTILINE)
UNITS = ("seconds", "bytes")
COUNTS = {"rooms", "slots", "slots_used", "peers", "links", "links_budget"}
"""Gauges that count things, which have no unit."""


def counted_in_source() -> Iterator[str]:
    """The first argument of every ``count`` of an observer; what varies in it becomes ``*``."""
    for path in (ROOT / "src/disagg_kv/endpoints").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr="count"),
                    args=[ast.Constant(value=str(name)), *_],
                ) if owner.endswith("observer"):
                    yield name
                case ast.Call(
                    func=ast.Attribute(value=ast.Attribute(attr=owner), attr="count"), args=[ast.JoinedStr(values), *_]
                ) if owner.endswith("observer"):
                    yield "".join(str(one.value) if isinstance(one, ast.Constant) else "*" for one in values)


def test_every_event_that_endpoints_count_has_a_metric_and_no_other() -> None:
    names = set(counted_in_source())
    assert {"peers.lost", "frames.stale", "*.not_prepared"} <= names
    known = {f"*.{name.split('.')[1]}" if name.split(".")[0] in ("gathers", "scatters") else name for name in COUNTED}
    assert known == names


def test_every_value_of_a_label_is_given_for_every_label() -> None:
    assert [name for name, (metric, values) in COUNTED.items() if len(metric.labels) != len(values)] == []
    assert len(set(COUNTED.values())) == len(COUNTED)


def test_the_table_of_the_page_is_complete() -> None:
    rows = ROW.findall(PAGE)
    labels = {metric: ", ".join(f"`{label}`" for label in metric.labels) for metric in METRICS}
    assert rows == [(metric.shown, metric.kind, labels[metric], metric.help) for metric in METRICS]


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric: object) -> None:
    """Base units as suffix, ``_total`` on counters alone, no label in the name."""
    assert metric in METRICS
    (one,) = (known for known in METRICS if known is metric)
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", one.name)
    assert one.shown.startswith(PREFIX)
    assert one.shown.endswith("_total") == (one.kind == "counter")
    assert not set(one.name.split("_")) & {"ms", "us", "ns", "mb", "gb", "kb", "mib", "percent"}
    assert not set(one.labels) & {*OF_ENDPOINT, "le"}
    if one.kind == "histogram":
        assert one.name.endswith("_seconds")
    if one.kind == "gauge":
        assert one.name.endswith(UNITS) or one.name in COUNTS
    assert one.help.endswith(".")


def test_bounds_grow() -> None:
    for bounds in (SEGMENT_BOUNDS, ROOM_BOUNDS):
        assert list(bounds) == sorted(set(bounds))


def test_spans_that_are_measured_are_those_of_the_trace() -> None:
    from disagg_kv.trace import Span

    assert [name for name in SECONDS if f"``{name}``" not in (Span.__doc__ or "")] == []


def test_reasons_are_explained() -> None:
    reasons = {values[0] for _, values in COUNTED.values() if values}
    assert [reason for reason in sorted(reasons) if f"`{reason}`" not in PAGE] == []
