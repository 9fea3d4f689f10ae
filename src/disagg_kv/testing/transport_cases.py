"""What the parts of the transport suite share: what is under test, and two connected ends of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ..transports import Transport
from ..transports.descriptor import later_version
from .ends import Child, End, HostMemory, Memory
from .pair import Pair

NBYTES = 1 << 16
"""Bytes of a pair's first regions."""


class TransportCases:
    """Fixtures; see :class:`disagg_kv.testing.transport.TransportSuite`."""

    one_process = True
    """Whether two transports of one process can reach each other; False: every test takes two processes."""

    timeout_s = 120.0
    """How long any single thing may take before the test fails."""

    kept_per_connect = 0
    """Open files and threads that the transport's library keeps for each connection that it ever made."""

    @classmethod
    def factory(cls) -> Callable[[], Transport]:
        """What makes a transport; a child process must be able to import it by its name."""
        raise NotImplementedError

    @classmethod
    def memory(cls) -> Memory:
        """The memory to test with; by default the CPU's."""
        return HostMemory()

    @classmethod
    def of_another_version(cls, descriptor: bytes) -> bytes | None:
        """The descriptor as a later version would write it; None: the suite does not know how.

        By default, one that :func:`disagg_kv.transports.encode` made. Override it for an encoding of your own.
        """
        return later_version(descriptor)

    @pytest.fixture(scope="class")
    @classmethod
    def child(cls) -> Iterator[Child]:
        """A process that lives as long as the class's tests."""
        child = Child(cls.factory(), cls.memory(), cls.timeout_s)
        yield child
        child.stop()

    @pytest.fixture
    def end(self) -> Iterator[End]:
        """One end in this process."""
        end = End(self.factory(), self.memory())
        yield end
        end.close(0.0)

    @pytest.fixture(params=["one process", "two processes"])
    def pair(self, request: pytest.FixtureRequest, end: End) -> Iterator[Pair]:
        """Two connected ends."""
        target: End | Child
        if request.param == "two processes":
            if end.transport.caps.in_process_only:
                pytest.skip("in_process_only")
            child: Child = request.getfixturevalue("child")
            child.open()
            target = child
        else:
            if not self.one_process:
                pytest.skip("needs two processes")
            target = End(self.factory(), self.memory())
        yield Pair(end, target, NBYTES, self.timeout_s)
        end.close(self.timeout_s)
        target.close(self.timeout_s)

    def _lose(self, pair: Pair, victim: Child) -> None:
        """Kill the target, and wait until the source has reported that."""
        victim.kill()
        victim.wait()
        pair.heard(lambda: pair.log.lost(pair.peer), "the loss")


class VictimCases(TransportCases):
    """A peer in a process of its own, which the test may kill."""

    @pytest.fixture
    def victim(self) -> Iterator[Child]:
        """A process for one test."""
        child = Child(self.factory(), self.memory(), self.timeout_s)
        yield child
        child.stop()

    @pytest.fixture
    def apart(self, end: End, victim: Child) -> Pair:
        """Two connected ends, the target in the victim."""
        victim.open()
        return Pair(end, victim, NBYTES, self.timeout_s)

    @pytest.fixture(autouse=True)
    def _reaches_processes(self, request: pytest.FixtureRequest) -> None:
        if "victim" in request.fixturenames and request.getfixturevalue("end").transport.caps.in_process_only:
            pytest.skip("in_process_only")
