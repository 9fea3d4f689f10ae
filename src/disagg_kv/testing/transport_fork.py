"""The part of the transport suite about forked children: no call works there, and nothing of the parent's changes."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Mapping

import numpy as np

from ..errors import LocalProtocolError
from .ends import plain
from .pair import Pair, batch
from .transport_cases import TransportCases

LIMIT_S = 60.0
"""How long all calls of the child may take."""


def _outcome(call: Callable[[], object]) -> str:
    """What a call does: a sentence, empty where it is what it should be."""
    try:
        found = call()
    except LocalProtocolError:
        return ""
    except BaseException as error:
        return f"raises {error!r} instead of a LocalProtocolError"
    return f"returns {found!r} instead of raising a LocalProtocolError"


def _in_child(calls: Mapping[str, Callable[[], str]], timeout_s: float) -> str:
    """The first call that does the wrong thing in a forked child; empty: none does."""
    out, into = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork in a process with threads: that is what is tested here.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        try:
            for name, call in calls.items():
                os.write(into, f"{name} ".encode())
                if said := call():
                    os.write(into, f"\n{name} {said}".encode()[:3000])
                    os._exit(1)
        finally:
            os._exit(0)
    os.close(into)
    deadline = time.monotonic() + timeout_s
    try:
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.005)
        if not ended[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        said = os.read(out, 1 << 16).decode()
    finally:
        os.close(out)
    begun, _, wrong = said.partition("\n")
    if not ended[0]:
        return f"no end of {begun}within {timeout_s:g} s"
    if wrong or begun.split() == list(calls):
        return wrong
    return f"the process ended with status {os.waitstatus_to_exitcode(ended[1])} in the last of {begun}"


class ForkCases(TransportCases):
    """A transport belongs to the process that made it."""

    def test_a_forked_child_can_call_nothing_and_changes_nothing(self, pair: Pair) -> None:
        """Its calls raise a LocalProtocolError, ``poll`` returns no event, and the parent's ticket still ends."""
        transport, descriptor = pair.source.transport, pair.target.descriptor()
        writes = batch(pair.local, pair.remote, [(50, 50, 10)])
        ticket = pair.submit((0, 0, 10))
        extra = plain(np.zeros(100, np.uint8))

        def polls() -> str:
            events = transport.poll()
            return f"returns {list(events)}, events of the parent" if len(events) else ""

        calls: dict[str, Callable[[], str]] = {
            "poll": polls,
            "register": lambda: _outcome(lambda: transport.register([extra])),
            "connect": lambda: _outcome(lambda: transport.connect(descriptor, 1.0)),
            "submit": lambda: _outcome(lambda: transport.submit(pair.peer, writes)),
            "close": lambda: _outcome(lambda: transport.close(0.0)),
        }
        wrong = _in_child(calls, min(LIMIT_S, self.timeout_s))
        assert not wrong, f"in a forked child: {wrong}"
        pair.land(ticket, (0, 0, 10))
        pair.put((1000, 1000, 1000))
        pair.check()
