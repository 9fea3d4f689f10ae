"""Metrics of endpoints for Prometheus; needs the extra ``prometheus``.

::

    metrics = PrometheusMetrics(registry)
    with metrics.observer("prefill", "prefill-0", rank) as observer:
        endpoint = PrefillEndpoint(..., instance="prefill-0", rank=rank, observer=observer)
        observer.watch(endpoint)

An event costs a dictionary look-up and an addition: the series are built when Prometheus asks for them. What an
endpoint keeps (rooms, memory, peers) is also read then.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import get_args

from .. import arguments
from ..closing import Closing
from ..core import Phase
from ..endpoints import PeerState, SupportsUsage
from ..errors import ConfigurationError, MissingDependencyError, text_of
from ..ids import Rank, Role
from ..trace import Span
from . import metrics as m
from .metrics import Metric

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.exposition import start_http_server
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.registry import Collector, CollectorRegistry
except ImportError as exc:
    raise MissingDependencyError(
        "disagg_kv.observe.prometheus", str(exc), "pip install 'disagg_kv[prometheus]'"
    ) from exc

log = logging.getLogger("disagg_kv")

Series = tuple[Metric, tuple[str, ...]]
"""A metric, and the values of its own labels."""
OTHERS = 64
"""Names of events of the caller's own that get a series each; further ones count as ``other``."""


class _Histogram:
    """Counts per bucket, and their sum."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self._bounds, seconds)] += 1
        self.total += seconds

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulated counts by upper bound, and the sum."""
        names = [*map(str, self._bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True)), self.total

    def joined(self, other: _Histogram) -> _Histogram:
        """Both together; they have the same bounds."""
        both = _Histogram(self._bounds)
        both.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        both.total = self.total + other.total
        return both


class _Ended(_Histogram):
    """Rooms of one outcome, error and path, and their times."""

    __slots__ = ("nbytes", "segments", "writes")

    def __init__(self) -> None:
        super().__init__(m.ROOM_BOUNDS)
        self.nbytes = self.segments = self.writes = 0


class PrometheusObserver(Closing):
    """The :class:`~disagg_kv.trace.Observer` of one endpoint, made by :meth:`PrometheusMetrics.observer`.

    A context closes it.
    """

    layers = False

    def __init__(self, metrics: PrometheusMetrics, labels: tuple[str, str, str]) -> None:
        self._metrics = metrics
        self.labels = labels
        self._lock = threading.Lock()
        self._seconds = {name: _Histogram(m.SEGMENT_BOUNDS) for name in m.SECONDS}
        self._ended: dict[tuple[str, str, str | None], _Ended] = {}
        self._counts: dict[str, int] = {}
        self._endpoint: SupportsUsage | None = None

    def span(self, span: Span) -> None:
        """Add the seconds of a piece of work. One thread at a time advances the endpoint, so it needs no lock."""
        histogram = self._seconds.get(span.name)
        if histogram is not None:
            histogram.add(span.stop - span.start)
        elif span.name == "room":
            labels = span.labels
            key = labels["outcome"], labels["path"], labels.get("error")
            ended = self._ended.get(key)
            if ended is None:
                ended = self._ended[key] = _Ended()
            ended.add(span.stop - span.start)
            ended.nbytes += span.nbytes
            ended.segments += int(labels["segments"])
            ended.writes += span.descriptors

    def count(self, name: str, amount: int = 1) -> None:
        """Add to the counter of an event. Any thread may call it: that of an engine counts retries."""
        counts = self._counts
        with self._lock:
            if name not in counts:
                if name not in m.COUNTED and len(counts) >= OTHERS:
                    name = "other"
                counts.setdefault(name, 0)
            counts[name] += amount

    def watch(self, endpoint: SupportsUsage) -> None:
        """Show the rooms, memory and peers of an endpoint too, until :meth:`close`.

        Raises:
            ConfigurationError: no endpoint.
        """
        arguments.methods(endpoint, "endpoint", "an endpoint", "usage", "peers")
        self._endpoint = endpoint

    def close(self) -> None:
        """Remove all series of this endpoint. Another one may then take its labels. May be repeated."""
        self._metrics.remove(self)

    def read(self, into: dict[Metric, Family]) -> None:
        """Add the series of this endpoint to those of others."""
        timed = {_series(m.SECONDS[name]): one.read() for name, one in self._seconds.items()}
        timed |= {_series(m.ROOM_SECONDS, outcome): one.read() for outcome, one in self._by_outcome().items()}
        counted = self._counted()
        for (metric, values), (buckets, total) in timed.items():
            histogram = into[metric]
            assert isinstance(histogram, HistogramMetricFamily)
            histogram.add_metric([*self.labels, *values], buckets, total)
        # What is counted comes first: it is shown also where the endpoint cannot be read.
        for (metric, values), amount in chain(counted.items(), self._kept()):
            family = into[metric]
            assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
            family.add_metric([*self.labels, *values], amount)

    def _by_outcome(self) -> dict[str, _Histogram]:
        """Of all rooms that ended so."""
        found = {outcome: _Histogram(m.ROOM_BOUNDS) for outcome in ("done", "failed")}
        for (outcome, _, _), ended in list(self._ended.items()):
            found[outcome] = found[outcome].joined(ended)
        return found

    def _counted(self) -> Counter[Series]:
        """The counters; those without labels are there from the beginning."""
        found: Counter[Series] = Counter(
            {_series(one): 0 for one in m.METRICS if one.kind == "counter" and not one.labels}
        )
        for (outcome, path, error), ended in list(self._ended.items()):
            rooms = sum(ended.counts)
            found[_series(m.ROOMS_ENDED, outcome, path)] += rooms
            if error is not None:
                found[_series(m.ROOMS_FAILED, error)] += rooms
            found[_series(m.BYTES)] += ended.nbytes
            found[_series(m.SEGMENTS)] += ended.segments
            found[_series(m.WRITES)] += ended.writes
        for name, amount in list(self._counts.items()):
            found[m.COUNTED.get(name, _series(m.OTHER_EVENTS, name))] += amount
        return found

    def _kept(self) -> Iterable[tuple[Series, int]]:
        """What the endpoint keeps now."""
        endpoint = self._endpoint
        if endpoint is None:
            return
        usage, states = endpoint.usage(), Counter(peer.state for peer in endpoint.peers())
        for phase in Phase:
            yield _series(m.ROOMS, phase.name.lower()), usage.rooms.get(phase, 0)
        for state in get_args(PeerState):
            yield _series(m.PEERS, state), states[state]
        yield _series(m.QUARANTINED), usage.quarantined_bytes
        yield _series(m.LINKS), usage.links
        yield _series(m.LINKS_BUDGET), usage.links_most
        if self.labels[0] == "decode":
            yield _series(m.RING_BYTES), usage.ring_bytes
            yield _series(m.RING_USED), usage.ring_used_bytes
        else:
            yield _series(m.SLOTS), usage.slots
            yield _series(m.SLOTS_USED), usage.slots_used


class PrometheusMetrics(Collector):
    """The metrics of all endpoints of a process, in one registry.

    Args:
        registry: where the metrics are shown. There is no default: a library does not choose it.

    Raises:
        ConfigurationError: no registry, or one that has these metrics already.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        arguments.one(registry, "registry", CollectorRegistry)
        self._lock = threading.Lock()
        self._observers: dict[tuple[str, str, str], PrometheusObserver] = {}
        try:
            registry.register(self)
        except ValueError as exc:
            raise ConfigurationError(
                f"registry: it has metrics of these names already; make one PrometheusMetrics per registry: {exc}"
            ) from exc

    def observer(self, side: Role, instance: str, rank: int = 0) -> PrometheusObserver:
        """An observer for one endpoint.

        Args:
            side: ``"prefill"`` or ``"decode"``.
            instance: name of its instance.
            rank: its rank.

        Raises:
            ConfigurationError: another side, no name, a negative rank, or labels that another observer has.
        """
        if side not in get_args(Role):
            raise ConfigurationError(f"side: 'prefill' or 'decode', not {arguments.shown(side)}")
        arguments.text(instance, "instance", least=1, most=256)
        labels = (side, instance, str(Rank(arguments.count(rank, "rank"))))
        with self._lock:
            if labels in self._observers:
                raise ConfigurationError(
                    f"instance {instance!r}: rank {rank} of {side} has an observer already; close that one before"
                )
            made = self._observers[labels] = PrometheusObserver(self, labels)
        return made

    def remove(self, observer: PrometheusObserver) -> None:
        """Remove the series of an observer; see :meth:`PrometheusObserver.close`."""
        with self._lock:
            if self._observers.get(observer.labels) is observer:
                del self._observers[observer.labels]

    def describe(self) -> Iterator[Family]:
        """The names, for the registry; see ``prometheus_client``'s page on custom collectors."""
        yield from _families().values()

    def collect(self) -> Iterator[Family]:
        """All series. An endpoint that cannot be read is left out, with a line in the log."""
        found = _families()
        with self._lock:
            observers = list(self._observers.values())
        for observer in observers:
            try:
                observer.read(found)
            except Exception as exc:
                log.warning("metrics of %s could not be read: %s", "/".join(observer.labels), text_of(exc))
        yield from found.values()


class MetricsServer:
    """Shows the metrics of the endpoints of a process over HTTP, for engines that show none of them.

    Args:
        address: ``HOST:PORT``. Port 0 takes a free one. Everything that reaches the port may read the metrics.

    Raises:
        ConfigurationError: no such address, or the port is not free.
    """

    def __init__(self, address: str) -> None:
        host, _, port = arguments.text(address, "address").rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
            raise ConfigurationError(f"address {arguments.shown(address)}: HOST:PORT is needed")
        registry = CollectorRegistry()
        self.metrics = PrometheusMetrics(registry)
        try:
            self._server, self._thread = start_http_server(int(port), host, registry)
        except OSError as exc:
            raise ConfigurationError(f"address {address!r}: metrics cannot be served there: {exc}") from exc
        self.address = f"{host}:{self._server.server_port}"
        log.info("metrics are served at http://%s/metrics", self.address)

    def close(self) -> None:
        """End it. May be repeated."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def _series(metric: Metric, *values: str) -> Series:
    return metric, values


def _families() -> dict[Metric, Family]:
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    return {
        metric: kinds[metric.kind](m.PREFIX + metric.name, metric.help, labels=[*m.OF_ENDPOINT, *metric.labels])
        for metric in m.METRICS
    }
