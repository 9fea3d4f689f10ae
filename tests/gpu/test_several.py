"""Endpoints with ``cuda_ipc`` and ``nixl`` on GPUs: each peer gets the first that reaches it. Bytes are compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.needs import needs_nixl
from tests.support.processes import Cluster
from tests.support.several import check_far, check_near

pytestmark = needs_nixl


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Processes that all end with the test."""
    made = Cluster(tmp_path)
    yield made
    made.stop()


def test_a_peer_of_the_host_is_reached_by_cuda_ipc_and_mapped(cluster: Cluster) -> None:
    """NIXL is there, too, and carries nothing."""
    check_near(cluster, "cuda_ipc", "nixl", "cuda")


def test_a_peer_that_cuda_ipc_refuses_is_reached_by_nixl(cluster: Cluster) -> None:
    """It names another host; the reason is in the report."""
    check_far(cluster, "cuda_ipc", "nixl", "cuda")
