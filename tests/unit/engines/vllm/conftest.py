"""A prefill and a decode instance for each test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from disagg_kv.channels import Hub
from tests.support.vllm_like import Engine, Model, Pair


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Instances P, which prefills, and D, which decodes."""
    made: list[Engine] = []

    def make(tps: tuple[int, int] = (1, 1), model: Model | None = None, **both: Any) -> tuple[Engine, Engine]:
        hub, model = Hub(), model or Model()
        prefill, decode = both.pop("prefill", {}), both.pop("decode", {})
        made.append(Engine(hub, "P", model=model, tp=tps[0], consumes=False, **both, **prefill))
        made.append(Engine(hub, "D", model=model, tp=tps[1], produces=False, **both, **decode))
        return made[-2], made[-1]

    yield make
    for engine in made:
        engine.close()
