"""An endpoint may make the interpreter switch between threads sooner, and never later."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from disagg_kv import PagedPool, PrefillEndpoint, shard
from disagg_kv.channels import Hub, InprocChannel
from disagg_kv.endpoints import Environment
from disagg_kv.geometry import CacheSpec
from disagg_kv.rendezvous import StaticRendezvous
from disagg_kv.transports import InprocTransport

SPEC = CacheSpec.kv(1, 1, 8, "float16")


@pytest.fixture(autouse=True)
def _interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(("asked", "after"), [(None, 0.005), (0.0001, 0.0001), (0.02, 0.005)])
def test_the_interval_is_set_at_the_start_if_it_is_shorter(asked: float | None, after: float) -> None:
    sys.setswitchinterval(0.005)
    end = PrefillEndpoint(
        PagedPool.allocate(SPEC, shard(SPEC), pages=2, page_size=4),
        transport=InprocTransport(),
        channel=InprocChannel(Hub(), "prefill"),
        rendezvous=StaticRendezvous(),
        instance="prefill",
        environment=Environment(switch_s=asked),
    )
    with closing(end):
        assert sys.getswitchinterval() == pytest.approx(after)
    assert sys.getswitchinterval() == pytest.approx(after)
