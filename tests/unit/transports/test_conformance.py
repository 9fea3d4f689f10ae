"""The transports of this package pass the suite that they are judged by."""

from __future__ import annotations

from collections.abc import Callable

from disagg_kv.testing.transport import TransportSuite
from disagg_kv.transports import InprocTransport, ShmTransport, Transport
from tests.support.transports import SlowTransport, faultless_inproc, faultless_shm


class TestInproc(TransportSuite):
    """Both ends in one process."""

    @classmethod
    def factory(cls) -> Callable[[], Transport]:
        return InprocTransport


class TestShm(TransportSuite):
    """Shared memory."""

    @classmethod
    def factory(cls) -> Callable[[], Transport]:
        return ShmTransport


class TestFaultlessInproc(TransportSuite):
    """The fault injector is itself a transport."""

    @classmethod
    def factory(cls) -> Callable[[], Transport]:
        return faultless_inproc


class TestFaultlessShm(TransportSuite):
    """The fault injector around a transport that allocates and crosses processes."""

    @classmethod
    def factory(cls) -> Callable[[], Transport]:
        return faultless_shm


class TestSlow(TransportSuite):
    """The suite itself allows for a transport whose tickets are in flight for a while."""

    @classmethod
    def factory(cls) -> Callable[[], Transport]:
        return SlowTransport


class TestShmApart(TransportSuite):
    """As for a transport that cannot reach another one of its own process."""

    one_process = False

    @classmethod
    def factory(cls) -> Callable[[], Transport]:
        return ShmTransport
