"""Mooncake passes the suite that every transport is judged by."""

from __future__ import annotations

from collections.abc import Callable

from disagg_kv.testing.transport import TransportSuite
from disagg_kv.transports import Transport
from disagg_kv.transports.mooncake import MooncakeTransport
from tests.support.needs import needs_mooncake


@needs_mooncake
class TestMooncake(TransportSuite):
    """CPU memory over tcp, one process and two."""

    @classmethod
    def factory(cls) -> Callable[[], Transport]:
        return MooncakeTransport
