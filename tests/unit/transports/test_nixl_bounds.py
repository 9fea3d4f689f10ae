"""A call of NIXL's library that does not return: whoever needs the library's thread is told so within a bound."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from disagg_kv.errors import ConfigurationError, RegistrationError, TransportError
from disagg_kv.memory import Buffer
from disagg_kv.testing.ends import End, HostMemory
from disagg_kv.transports import nixl_worker
from disagg_kv.transports.nixl import NixlTransport
from disagg_kv.transports.nixl_library import Agent, Registered
from tests.support.needs import needs_nixl
from tests.support.processes import wait

pytestmark = needs_nixl

SHORT_S = 0.2


class Stuck:
    """Calls of one method of the agent, each of which returns when the test lets it.

    Args:
        patch: undoes it.
        name: of the method.
    """

    def __init__(self, patch: pytest.MonkeyPatch, name: str) -> None:
        self.begun = threading.Event()
        self.free = threading.Event()
        self.calls = 0
        self._method: Callable[..., object] = getattr(Agent, name)
        patch.setattr(Agent, name, lambda agent, *args: self._call(agent, *args))

    def _call(self, agent: Agent, *args: object) -> object:
        self.calls += 1
        self.begun.set()
        self.free.wait()
        return self._method(agent, *args)


@pytest.fixture
def one() -> Iterator[End]:
    """A transport whose calls are given little time, once it is made."""
    made = End(NixlTransport, HostMemory())
    assert isinstance(made.transport, NixlTransport)
    made.transport._call_s = SHORT_S
    yield made
    made.close(0.0)


def threads() -> list[threading.Thread]:
    """The library's threads."""
    return [thread for thread in threading.enumerate() if thread.name == "disagg_kv-nixl"]


def buffer(nbytes: int = 4096) -> Buffer:
    """CPU memory."""
    data = np.zeros(nbytes, np.uint8)
    return Buffer(data.ctypes.data, nbytes, "cpu", data)


def patient(end: End) -> bool:
    """Whether memory can be registered, however long a busy host takes."""
    assert isinstance(end.transport, NixlTransport)
    end.transport._call_s = 60.0
    return len(end.transport.register([buffer()])) == 1


def regions(end: End) -> int:
    """How many a peer would be told of."""
    transport = end.transport
    assert isinstance(transport, NixlTransport)
    return len(transport._table.items())


@pytest.mark.parametrize("name", ["register", "metadata"])
def test_memory_whose_registration_does_not_return_is_refused(
    one: End, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With the seconds; what the library does of it later is taken back, and the next registration works."""
    gone: list[Registered] = []
    deregister = Agent.deregister

    def noted(agent: Agent, which: Registered) -> None:
        gone.append(which)
        deregister(agent, which)

    monkeypatch.setattr(Agent, "deregister", noted)
    with monkeypatch.context() as patch:
        stuck = Stuck(patch, name)
        # On a busy host the thread may not come to it in time; then nothing has to be taken back.
        while not stuck.begun.is_set():
            with pytest.raises(RegistrationError, match=r"nixl: .*4096 bytes.* 0\.2 s"):
                one.transport.register([buffer()])
        assert regions(one) == 0
        stuck.free.set()
        wait(lambda: len(gone) == 1, lambda: f"taken back: {len(gone)} of 1")
    assert patient(one)


def test_memory_that_is_registered_just_as_its_caller_stops_waiting_is_taken_back(
    one: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread loses its core after the library's last call, and before it hands over the result."""
    registered: set[int] = set()
    done, free = threading.Event(), threading.Event()
    register, deregister, settle = Agent.register, Agent.deregister, nixl_worker._settle

    def noted(agent: Agent, which: Buffer) -> Registered:
        made = register(agent, which)
        registered.add(id(made))
        return made

    def gone(agent: Agent, which: Registered) -> None:
        deregister(agent, which)
        registered.remove(id(which))

    def delayed(future: Future[object], act: Callable[[], object]) -> None:
        def slow() -> object:
            result = act()
            done.set()
            free.wait()
            return result

        settle(future, slow)

    monkeypatch.setattr(Agent, "register", noted)
    monkeypatch.setattr(Agent, "deregister", gone)
    with monkeypatch.context() as patch:
        patch.setattr(nixl_worker, "_settle", delayed)
        while not done.is_set():
            with pytest.raises(RegistrationError, match=r"nixl: .*8192 bytes.* 0\.2 s"):
                one.transport.register([buffer(), buffer()])
        assert len(registered) == 2
        free.set()
        wait(lambda: not registered, lambda: f"still registered: {len(registered)} of 2")
    assert patient(one)


def test_memory_that_the_thread_never_came_to_register_stays_unknown(one: End, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is in another call of the library; what gave up waiting is not done afterwards."""
    registered = 0
    register = Agent.register

    def counted(agent: Agent, which: Buffer) -> Registered:
        nonlocal registered
        registered += 1
        return register(agent, which)

    monkeypatch.setattr(Agent, "register", counted)
    with monkeypatch.context() as patch:
        stuck = Stuck(patch, "progress")
        assert stuck.begun.wait(60.0)
        with pytest.raises(RegistrationError, match=r"nixl: .*4096 bytes.* 0\.2 s"):
            one.transport.register([buffer()])
        stuck.free.set()
    assert patient(one)
    assert registered == 1


@pytest.mark.parametrize("name", ["__init__", "metadata"])
def test_an_agent_that_does_not_come_up_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Instead of an endpoint that is made for ever; the thread ends when the library returns."""
    before = len(threads())
    stuck = Stuck(monkeypatch, name)
    with pytest.raises(TransportError, match=r"nixl: .* has waited 2 s"):
        NixlTransport(call_s=2.0)
    stuck.free.set()
    wait(lambda: len(threads()) == before, lambda: f"threads left: {threads()}")


@pytest.mark.parametrize("call_s", [0.0, -1.0, float("nan"), float("inf")])
def test_the_bound_is_a_number_of_seconds(call_s: float) -> None:
    """Bad input."""
    with pytest.raises(ConfigurationError, match="call_s"):
        NixlTransport(call_s=call_s)
