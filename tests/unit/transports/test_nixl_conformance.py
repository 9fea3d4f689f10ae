"""NIXL passes the suite that every transport is judged by."""

from __future__ import annotations

from collections.abc import Callable

from disagg_kv.testing.transport import TransportSuite
from disagg_kv.transports import Transport
from disagg_kv.transports.nixl import NixlTransport
from tests.support.needs import needs_nixl


@needs_nixl
class TestNixl(TransportSuite):
    """CPU memory, one process and two. UCX keeps a file of each side of a connection until its agent is closed."""

    kept_per_connect = 2

    @classmethod
    def factory(cls) -> Callable[[], Transport]:
        return NixlTransport
