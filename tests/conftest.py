"""Hypothesis profiles, slow tests first, interpreted Triton where there is no GPU, loud deadlocks in children too."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# One slow example is a noisy neighbour, not a bug: no profile has a deadline.
settings.register_profile("dev", deadline=None)
settings.register_profile(
    "ci", deadline=None, derandomize=True, database=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

# On a host without a GPU, Triton interprets its kernels, and they move the CPU's memory. It asks where functions are
# decorated, its own ones too: before anything imports it, as some models do.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Children dump their stacks on a crash as the test process itself does.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")

# UCX would also listen on, and spread writes over, the host's other networks.
os.environ.setdefault("UCX_NET_DEVICES", "lo")


@pytest.fixture(autouse=True)
def nothing_stays_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test makes known by a name is forgotten after it: tests run in any order, and several in one process."""
    from disagg_kv.strategies import registry as strategies
    from disagg_kv.transports import registry as transports

    monkeypatch.setattr(transports, "_registered", dict(transports._registered))
    monkeypatch.setattr(strategies, "_parts", {axis: dict(parts) for axis, parts in strategies._parts.items()})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin slow tests before all others: one that begins last runs alone while every other process has ended."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
