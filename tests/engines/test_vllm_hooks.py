"""What vLLM asks the connector's class, and the metrics that it makes; no instance runs."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest

from .instances import transfer

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning:torch", "default:::vllm")  # they are not ours

LABELS = {"model_name": "m", "engine": "0"}


def connector() -> Any:
    """Its class."""
    from disagg_kv.engines.vllm import DisaggKVConnector

    return DisaggKVConnector


def test_the_cache_may_not_move() -> None:
    """VLLM 0.33 asks this before it lets an instance sleep."""
    assert connector().supports_sleep_mode(SimpleNamespace()) is False


def test_every_hook_is_one_of_vllm() -> None:
    """A name that vLLM does not call does nothing; ``supports_sleep_mode`` comes with vLLM 0.33."""
    own = {name for name, _ in inspect.getmembers(connector()) if name in vars(connector())}
    (base,) = (one for one in connector().__mro__ if one.__name__ == "KVConnectorBase_V1")
    known = {name for one in connector().__mro__[1:] for name in vars(one)} | set(vars(base))
    assert {name for name in own - known if not name.startswith("_")} == {"supports_sleep_mode"}


@pytest.fixture
def metrics() -> Any:
    """Of one engine, as vLLM makes them; they end with the test."""
    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    before = set(REGISTRY._collector_to_names)
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(**transfer("kv_both")))
    yield connector().build_prom_metrics(config, types, list(LABELS), {0: list(LABELS.values())})
    for one in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(one)


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"vllm:disagg_kv_{name}", LABELS | labels)


def test_metrics_are_there_before_the_first_request(metrics: Any) -> None:
    """So the first failure is an increase."""
    assert value("loaded_total") == value("load_seconds_count") == value("load_seconds_sum") == 0
    assert value("load_failed_total", reason="peer_lost") == value("sent_failed_total", reason="aborted") == 0
    assert value("load_failed_total", reason="capacity") is None


def test_measurements_become_histograms_and_failures_have_a_reason(metrics: Any) -> None:
    """Of several ranks, summed as vLLM sums them."""
    of = connector()
    stats = of.build_kv_connector_stats({"loaded": 1, "load_seconds": [0.004], "loaded_bytes": [1 << 20]})
    assert not stats.is_empty()
    other = of.build_kv_connector_stats({"loaded": 2, "load_seconds": [0.3, 0.004], "load_failed": {"capacity": 2}})
    metrics.observe(stats.aggregate(other).to_dict(), 0)
    assert value("loaded_total") == value("load_seconds_count") == 3
    assert value("load_seconds_bucket", le="0.005") == 2
    assert value("load_seconds_bucket", le="0.5") == 3
    assert value("loaded_bytes_sum") == 1 << 20
    assert value("load_failed_total", reason="capacity") == 2
    assert 'reason="capacity"' in generate_latest().decode()
    assert stats.reduce() == {
        "loaded": 3, "loaded_bytes": 1 << 20, "load_seconds": 0.308, "load_failed_capacity": 2,
    }  # fmt: skip
    stats.reset()
    assert stats.is_empty()
