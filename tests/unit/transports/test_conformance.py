"""The transports of this package pass the suite that they are judged by."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from disagg_kv.testing.ends import End
from disagg_kv.testing.pair import Pair
from disagg_kv.testing.transport import TransportSuite
from disagg_kv.testing.transport_cases import NBYTES
from disagg_kv.testing.transport_peers import PeerCases
from disagg_kv.transports import InprocTransport, ShmTransport, SupportsFlags, Transport
from tests.support.needs import needs_nixl
from tests.support.transports import SlowTransport, faultless_inproc, faultless_shm, inproc_or_shm, shm_or_nixl


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


class TestInprocOrShm(TransportSuite):
    """Two lanes: one process takes the first, two processes take the second."""

    @classmethod
    def factory(cls) -> Callable[[], Transport]:
        return inproc_or_shm

    @staticmethod
    def raising(pair: Pair) -> SupportsFlags:
        """Flags are of the first transport alone, which reaches no other process."""
        if not isinstance(pair.target, End):
            pytest.skip("the page is that of the first transport")
        return TransportSuite.raising(pair)


@needs_nixl
class TestShmOrNixl(PeerCases):
    """Shared memory beside a lane with a thread and a library of its own; what that could change."""

    @classmethod
    def factory(cls) -> Callable[[], Transport]:
        return shm_or_nixl

    @pytest.fixture
    def pair(self, end: End) -> Iterator[Pair]:
        """Both ends in this process: each process would load NIXL."""
        target = End(self.factory(), self.memory())
        yield Pair(end, target, NBYTES, self.timeout_s)
        end.close(self.timeout_s)
        target.close(self.timeout_s)
