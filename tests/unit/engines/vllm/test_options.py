"""What ``kv_connector_extra_config`` may hold; the package's one name."""

from __future__ import annotations

from typing import Any

import pytest

from disagg_kv import errors
from disagg_kv.engines import vllm
from disagg_kv.engines.options import EngineOptions
from disagg_kv.engines.vllm.stats import COUNTERS, FAILURES, HISTOGRAMS, REASONS, Counters, logged, merged
from disagg_kv.errors import ConfigurationError, DisaggKVError, PeerLostError, UnknownNameError


def test_the_defaults_work_on_one_host() -> None:
    options = EngineOptions.read("kv_connector_extra_config", {})
    assert options == EngineOptions(
        strategy="auto", transport="auto", channel="unix", listen="", rendezvous="", keys="", staging_bytes=None,
        verify="off", silence_s=30.0, metrics="", status_socket=False,
    )  # fmt: skip
    assert not options.layered


def test_every_option_is_taken() -> None:
    given: dict[str, Any] = {
        "strategy": "staged+layer_pipelined", "transport": "shm", "channel": "zmq", "listen": "tcp://10.0.0.1:0",
        "rendezvous": "etcd://host:1/prod", "keys": "secret,allowed", "staging_bytes": 1 << 20, "verify": "full",
        "silence_s": 5, "description": "common", "metrics": "0.0.0.0:9100", "status_socket": True,
    }  # fmt: skip
    options = EngineOptions.read("kv_connector_extra_config", given)
    assert {name: getattr(options, name) for name in given} == given
    assert options.layered
    assert options.common


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"strateggy": "auto"}, "strateggy.*strategy"),
        ({"strategy": "quick"}, "quick"),
        ({"strategy": 3}, "strategy"),
        ({"transport": None}, "transport"),
        ({"channel": "tcp"}, "channel 'tcp'.*unix, zmq"),
        ({"channel": ["unix"]}, "channel"),
        ({"listen": 5555}, "listen"),
        ({"rendezvous": "http://host:1"}, "rendezvous 'http://host:1'"),
        ({"keys": "secret,allowed"}, "keys 'secret,allowed'.*'zmq'"),
        ({"keys": "secret", "channel": "zmq"}, "keys 'secret'"),
        ({"staging_bytes": 1}, "staging_bytes"),
        ({"staging_bytes": "64M"}, "staging_bytes"),
        ({"verify": "always"}, "verify 'always'"),
        ({"description": "all"}, "description 'all'.*common, own"),
        ({"description": True}, "description"),
        ({"silence_s": 0}, "silence_s"),
        ({"silence_s": "soon"}, "silence_s"),
        ({"metrics": 9100}, "metrics"),
        ({"metrics": "9100"}, "metrics '9100': not HOST:PORT"),
        ({"metrics": "host:http"}, "metrics 'host:http': not HOST:PORT"),
        ({"metrics": "host:65536"}, "metrics 'host:65536': not HOST:PORT"),
        ({"status_socket": "yes"}, "status_socket"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EngineOptions.read("kv_connector_extra_config", given)


def test_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="silence_s"):
        EngineOptions.read("kv_connector_extra_config", {"silence": 3})


def test_the_package_has_one_name() -> None:
    with pytest.raises(AttributeError, match="Connector"):
        vllm.Connector  # noqa: B018 - the access is the test


def test_counts_and_measurements_begin_anew() -> None:
    counters = Counters()
    assert counters.take() == {}
    counters.add("sent", sent_bytes=8)
    counters.add("sent", sent_bytes=9)
    counters.fail("load_failed", PeerLostError())
    counters.fail("load_failed", KeyError())
    counters.fail("load_failed", PeerLostError())
    found = {"sent": 2, "sent_bytes": [8, 9], "load_failed": {"peer_lost": 2, "failed": 1}}
    assert counters.take() == found
    assert counters.take() == {}


def test_data_of_ranks_and_steps_are_merged_and_logged() -> None:
    one = {"loaded": 1, "load_seconds": [0.25], "load_failed": {"deadline": 1}}
    other = {"loaded": 2, "load_seconds": [1, 2], "load_failed": {"deadline": 1, "aborted": 3}, "sent_bytes": [7]}
    both = merged(one, other)
    assert one == {"loaded": 1, "load_seconds": [0.25], "load_failed": {"deadline": 1}}
    assert logged(both) == {
        "loaded": 3, "sent_bytes": 7, "load_seconds": 3.25, "load_failed_deadline": 2, "load_failed_aborted": 3,
    }  # fmt: skip
    assert logged({}) == {}


def test_every_reason_that_is_there_from_the_start_is_the_code_of_an_error() -> None:
    codes = {one.code for one in vars(errors).values() if isinstance(one, type) and issubclass(one, DisaggKVError)}
    assert codes >= set(REASONS)
    assert not set(COUNTERS) & set(HISTOGRAMS) | set(COUNTERS) & set(FAILURES)
