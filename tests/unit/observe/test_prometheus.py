"""Endpoints in Prometheus: what their rooms moved is what is shown, and a second use of a registry is refused."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from disagg_kv import Expectation, Phase, Source
from disagg_kv.endpoints import PeerInfo, RecoveringReceiver, Retry, Usage, attempt_id
from disagg_kv.errors import ConfigurationError
from disagg_kv.ids import RoomId
from disagg_kv.trace import Silent, Span
from tests.support.needs import needs_prometheus
from tests.support.observed import NBYTES, TABLE, TOKENS, endpoints, move, until

if needs_prometheus.args[0]:
    pytest.skip("prometheus-client is not installed", allow_module_level=True)

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from disagg_kv.observe.metrics import COUNTED, METRICS
from disagg_kv.observe.prometheus import OTHERS, MetricsServer, PrometheusMetrics

Samples = Mapping[str, float]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> PrometheusMetrics:
    return PrometheusMetrics(registry)


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """Every sample as Prometheus reads it: ``name{label="value",...}`` with labels in alphabetical order."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for one in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(one.labels.items()))
            assert f"{one.name}{{{labels}}}" not in found
            found[f"{one.name}{{{labels}}}"] = one.value
    return found


def of(found: Samples, side: str, name: str, **labels: str) -> float:
    """One sample of an endpoint."""
    given = {"side": side, "instance": side[0].upper(), "rank": "0", **labels}
    text = ",".join(f'{key}="{value}"' for key, value in sorted(given.items()))
    return found[f"disagg_kv_{name}{{{text}}}"]


def _ended(found: Samples) -> dict[str, float]:
    """How many rooms of each side have been counted."""
    counts = {name: value for name, value in found.items() if name.startswith("disagg_kv_room_seconds_count{")}
    return {
        side: sum(value for name, value in counts.items() if f'side="{side}"' in name) for side in ("prefill", "decode")
    }


def test_what_rooms_moved_is_shown(registry: CollectorRegistry, metrics: PrometheusMetrics) -> None:
    """Three rooms arrive, a fourth is aborted: bytes and segments are exact, and every histogram has every segment."""
    with (
        metrics.observer("prefill", "P") as p,
        metrics.observer("decode", "D") as d,
        endpoints(p, d) as (sender, receiver),
    ):
        p.watch(sender)
        d.watch(receiver)
        for number in range(3):
            move(sender, receiver, f"room {number}")
        aborted = receiver.open(RoomId(b"aborted"), Source("P"))
        aborted.abort("enough")
        until(lambda: aborted.released)
        waiting = receiver.open(RoomId(b"waits"), Source("P"))
        until(lambda: not sender.open_rooms and receiver.open_rooms == 1)
        # A room's end is counted after its handle says so.
        until(lambda: _ended(samples(registry)) == {"prefill": 3, "decode": 4})
        found = samples(registry)
        assert waiting.phase is Phase.READY
        for side in ("prefill", "decode"):
            assert of(found, side, "bytes_total") == 3 * NBYTES
            assert of(found, side, "rooms_ended_total", outcome="done", path="staged") == 3
            assert of(found, side, "room_seconds_count", outcome="done") == 3
            assert of(found, side, "quarantined_bytes") == 0
            assert of(found, side, "peers", state="connected") == 1
            assert of(found, side, "lost_peers_total") == 0
        segments = of(found, "decode", "segments_total")
        assert segments == of(found, "prefill", "segments_total") > 3
        for side, name in (("prefill", "gather"), ("prefill", "wire"), ("decode", "scatter"), ("decode", "queue")):
            assert of(found, side, f"{name}_seconds_count") == segments
            assert of(found, side, f"{name}_seconds_bucket", le="+Inf") == segments
            assert 0 < of(found, side, f"{name}_seconds_sum") < 30 or name == "queue"
        assert of(found, "prefill", "writes_total") >= segments
        assert of(found, "decode", "rooms_failed_total", error="AbortedError") == 1
        assert of(found, "decode", "room_seconds_count", outcome="failed") == 1
        assert of(found, "decode", "rooms", phase="ready") == 1
        assert of(found, "decode", "rooms", phase="moving") == 0
        assert of(found, "decode", "ring_bytes") == 1 << 16
        assert of(found, "decode", "ring_used_bytes") == 0
        assert (of(found, "prefill", "slots"), of(found, "prefill", "slots_used")) == (8, 0)
    assert samples(registry) == {}


def test_what_waits_is_shown(registry: CollectorRegistry, metrics: PrometheusMetrics) -> None:
    """Ring and slots in use, and peers that were lost."""
    with (
        metrics.observer("prefill", "P") as p,
        metrics.observer("decode", "D") as d,
        endpoints(p, d) as (sender, receiver),
    ):
        p.watch(sender)
        d.watch(receiver)
        room = RoomId(b"room")
        reception, delivery = receiver.open(room, Source("P")), sender.open(room)
        reception.expect(Expectation(TOKENS, TABLE))
        # Announced rows get leases before they are computed.
        step = sender.step({room: (TOKENS, TABLE)})
        until(lambda: of(samples(registry), "decode", "ring_used_bytes") > 0)
        found = samples(registry)
        assert of(found, "decode", "rooms", phase="moving") + of(found, "decode", "rooms", phase="waiting") == 1
        assert of(found, "prefill", "rooms", phase="moving") == 1
        sender.close(0.0)
        until(lambda: of(samples(registry), "decode", "lost_peers_total") == 1)
        until(lambda: reception.phase is Phase.FAILED)
        found = samples(registry)
        assert of(found, "decode", "peers", state="connected") == 0
        assert delivery.phase is Phase.FAILED
        del step


def test_every_metric_is_shown_with_its_type(registry: CollectorRegistry, metrics: PrometheusMetrics) -> None:
    """In Prometheus' text format, with help; every event that endpoints count has a series."""
    observer = metrics.observer("decode", "D")
    for name in (*COUNTED, "mine"):
        observer.count(name, 2)
    observer.span(Span("room", RoomId(b"r"), 0.0, 1.0, labels={"outcome": "failed", "path": "", "segments": "0",
                                                               "error": "DeadlineError"}))  # fmt: skip
    families = {one.name: one for one in text_string_to_metric_families(generate_latest(registry).decode())}
    shown = {f"disagg_kv_{metric.name}": (metric.kind, metric.help) for metric in METRICS}
    assert {name: (one.type, one.documentation) for name, one in families.items()} == shown
    found = samples(registry)
    for metric, values in COUNTED.values():
        assert of(found, "decode", f"{metric.name}_total", **dict(zip(metric.labels, values, strict=True))) == 2
    assert of(found, "decode", "other_events_total", event="mine") == 2
    # Spans of other names cost nothing, and show nothing.
    observer.span(Span("compute", RoomId(b"r"), 0.0, 1.0))
    assert samples(registry) == found


def test_a_bucket_has_what_is_not_above_its_bound(registry: CollectorRegistry, metrics: PrometheusMetrics) -> None:
    observer = metrics.observer("decode", "D")
    for seconds in (0.0, 1e-5, 1.1e-5, 10.0, 10.1, 1e9):
        observer.span(Span("scatter", RoomId(b"r"), 0.0, seconds))
    found = samples(registry)
    counts = {le: of(found, "decode", "scatter_seconds_bucket", le=le) for le in ("1e-05", "3e-05", "10.0", "+Inf")}
    assert counts == {"1e-05": 2, "3e-05": 3, "10.0": 4, "+Inf": 6}


def test_own_events_are_bounded(registry: CollectorRegistry, metrics: PrometheusMetrics) -> None:
    """A caller that makes names of requests cannot fill the memory."""
    observer = metrics.observer("decode", "D")
    for number in range(3 * OTHERS):
        observer.count(f"request {number}")
    observer.count("peers.lost")
    found = samples(registry)
    assert of(found, "decode", "other_events_total", event="other") == 2 * OTHERS
    assert of(found, "decode", "lost_peers_total") == 1


def test_a_registry_that_is_used_twice_is_refused_by_name(
    registry: CollectorRegistry, metrics: PrometheusMetrics
) -> None:
    """Nothing of the first one is lost; another registry has metrics of its own."""
    with pytest.raises(ConfigurationError, match=r"registry: it has metrics of these names already.*disagg_kv_room"):
        PrometheusMetrics(registry)
    metrics.observer("decode", "D").count("peers.lost")
    PrometheusMetrics(CollectorRegistry()).observer("decode", "D")
    assert of(samples(registry), "decode", "lost_peers_total") == 1


def test_a_registry_with_a_metric_of_one_of_these_names_is_refused() -> None:
    other = CollectorRegistry()
    Counter("disagg_kv_retries", "Another library's.", registry=other)
    with pytest.raises(ConfigurationError, match="disagg_kv_retries"):
        PrometheusMetrics(other)


def test_two_endpoints_of_one_name_are_refused_by_name(metrics: PrometheusMetrics) -> None:
    """Until the first one is closed; other ranks and the other side have series of their own."""
    first = metrics.observer("prefill", "P", 1)
    with pytest.raises(ConfigurationError, match="instance 'P': rank 1 of prefill has an observer already"):
        metrics.observer("prefill", "P", 1)
    metrics.observer("prefill", "P", 0)
    metrics.observer("decode", "P", 1)
    first.close()
    second = metrics.observer("prefill", "P", 1)
    first.close()
    with pytest.raises(ConfigurationError):
        metrics.observer("prefill", "P", 1)
    second.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda metrics: PrometheusMetrics(None),  # type: ignore[arg-type]
        lambda metrics: PrometheusMetrics(CollectorRegistry),  # type: ignore[arg-type]
        lambda metrics: metrics.observer("both", "P"),
        lambda metrics: metrics.observer(["prefill"], "P"),
        lambda metrics: metrics.observer("prefill", ""),
        lambda metrics: metrics.observer("prefill", "P", -1),
        lambda metrics: metrics.observer("prefill", "P").watch(object()),
    ],
    ids=range(7),
)
def test_arguments_that_cannot_be_are_refused(
    metrics: PrometheusMetrics, call: Callable[[PrometheusMetrics], object]
) -> None:
    with pytest.raises(ConfigurationError):
        call(metrics)


class Unreadable:
    """An endpoint that raises when it is read."""

    def usage(self) -> Usage:
        raise RuntimeError("not now")

    def peers(self) -> tuple[PeerInfo, ...]:
        return ()


def test_an_endpoint_that_cannot_be_read_hides_no_other(
    registry: CollectorRegistry, metrics: PrometheusMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    """Its counters are shown too; the log names it."""
    bad, good = metrics.observer("prefill", "P"), metrics.observer("decode", "D")
    bad.watch(Unreadable())
    for one in (bad, good):
        one.count("peers.lost")
    with caplog.at_level(logging.WARNING):
        found = samples(registry)
    assert (of(found, "prefill", "lost_peers_total"), of(found, "decode", "lost_peers_total")) == (1, 1)
    assert "metrics of prefill/P/0 could not be read: not now" in caplog.text


def test_threads_may_count_at_once(registry: CollectorRegistry, metrics: PrometheusMetrics) -> None:
    """Those of engines count, the endpoint's gives spans, and Prometheus reads."""
    observer, over = metrics.observer("decode", "D"), threading.Event()

    def work() -> None:
        for _ in range(20000):
            observer.count("peers.lost")

    def spans() -> None:
        for number in range(20000):
            observer.span(Span("wire", RoomId(b"r"), 0.0, 0.001))
            labels = {"outcome": "done", "path": f"path {number % 50}", "segments": "1"}
            observer.span(Span("room", RoomId(b"r"), 0.0, 0.001, labels=labels))

    def read() -> None:
        while not over.is_set():
            samples(registry)

    threads = [threading.Thread(target=one) for one in (spans, work, work, work, work)]
    reader = threading.Thread(target=read)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in (*threads, reader):
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        over.set()
        reader.join()
    found = samples(registry)
    assert of(found, "decode", "lost_peers_total") == 80000
    assert of(found, "decode", "wire_seconds_count") == of(found, "decode", "segments_total") == 20000


def test_retries_are_counted(registry: CollectorRegistry, metrics: PrometheusMetrics) -> None:
    """The attempt after one that prefill aborted."""
    observer = metrics.observer("decode", "D")
    with endpoints() as (sender, receiver):
        recovering = RecoveringReceiver(receiver, Retry(lambda failed: failed.source), observer=observer)
        request = RoomId(b"request")
        reception = recovering.open(request, Source("P"))
        reception.expect(Expectation(TOKENS, TABLE))
        sender.open(request).abort("first attempt")

        def attempts() -> int:
            recovering.poll()
            number: int = reception.attempts
            return number

        until(lambda: attempts() == 2)
        sender.open(attempt_id(request, 2)).abort("second attempt")
        until(lambda: attempts() == 3)
    assert of(samples(registry), "decode", "retries_total") == 2


def test_layers_are_not_traced(metrics: PrometheusMetrics) -> None:
    """An observer of metrics must not wake the endpoint's thread for each layer of a pass."""
    with endpoints(metrics.observer("prefill", "P"), metrics.observer("decode", "D")) as made:
        assert [(one._loop.observed, one._loop.traced) for one in made] == [(True, False)] * 2


def test_the_default_observes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rooms and segments make no span."""
    spans: list[Span] = []
    monkeypatch.setattr(Silent, "span", lambda self, span: spans.append(span))
    with endpoints() as (sender, receiver):
        move(sender, receiver, "room")
        assert [span.name for span in spans if span.name != "groups"] == []
        assert [one._loop.observed for one in (sender, receiver)] == [False, False]


def test_a_server_shows_them(caplog: pytest.LogCaptureFixture) -> None:
    """Over HTTP, as Prometheus asks for them; the log says where. It ends once."""
    with caplog.at_level("INFO", "disagg_kv"):
        server = MetricsServer("127.0.0.1:0")
    assert f"metrics are served at http://{server.address}/metrics" in caplog.text
    server.metrics.observer("decode", "D").count("peers.lost")
    with urllib.request.urlopen(f"http://{server.address}/metrics") as answer:
        text = answer.read().decode()
    assert 'disagg_kv_lost_peers_total{instance="D",rank="0",side="decode"} 1.0' in text
    with pytest.raises(ConfigurationError, match=rf"address '{server.address}': metrics cannot be served there"):
        MetricsServer(server.address)
    server.close()
    server.close()
    MetricsServer(server.address).close()


@pytest.mark.parametrize("address", ["", "9100", ":9100", "host:", "host:http", "host:65536", None, 9101])
def test_an_address_that_is_none_is_refused_by_name(address: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^address"):
        MetricsServer(address)


def test_without_the_package_the_error_has_the_command() -> None:
    program = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "import disagg_kv.observe.metrics\n"
        "from disagg_kv.errors import MissingDependencyError\n"
        "try:\n    import disagg_kv.observe.prometheus\n"
        "except MissingDependencyError as exc:\n    print(exc)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "remedy: pip install 'disagg_kv[prometheus]'" in shown
