"""A prefill and a decode server for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from disagg_kv.channels import Hub
from tests.support.sglang_like import Decode, Prefill, Server

Pair = Callable[..., tuple[Prefill, Decode]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Servers P, which prefills, and D, which decodes and knows P."""
    made: list[Server] = []

    def make(tps: tuple[int, int] = (1, 1), **both: Any) -> tuple[Prefill, Decode]:
        hub, prefill, decode = Hub(), both.pop("prefill", {}), both.pop("decode", {})
        p = Prefill(hub, tp=tps[0], **{**both, **prefill})
        made.append(p)
        d = Decode(hub, tp=tps[1], **{**both, **decode})
        made.append(d)
        d.knows(p)
        return p, d

    yield make
    for server in made:
        server.close()
