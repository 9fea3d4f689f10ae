"""Which calls an endpoint still takes, and which thread advances its loop: one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

from attrs import Factory, define

from ...errors import LocalProtocolError
from ...transports import Home
from .failures import Failures


class Admission:
    """Every public call that queues something goes through here; thread-safe, and without a lock.

    The endpoint's last command aborts its rooms, and is queued after ``end``. A call looks once more when it has queued
    its own command. If that was not the end yet, its command comes before the last one. If it was, the call is refused
    although it has queued something, and its engine has no handle of what that begins. So a room that was accepted
    always ends. A signal handler may close the endpoint wherever it interrupts a call.

    Args:
        home: the process that has the endpoint.
        failures: whether the endpoint cannot go on.

    ``ended``: no call is taken any more.
    """

    def __init__(self, home: Home, failures: Failures) -> None:
        self._home = home
        self._failures = failures
        self.ended = False

    def check(self, what: str) -> None:
        """Raise if no call is taken any more; another thread may end that at any moment.

        Raises:
            EndpointBrokenError: the endpoint has failed.
            LocalProtocolError: the endpoint is closed, or this is a forked child of the process that has it.
        """
        self._home.check()
        error = self._failures.broken
        if error is not None:
            raise error
        if self.ended:
            raise LocalProtocolError(f"{what}: the endpoint is closed")

    @contextmanager
    def enter(self, what: str) -> Iterator[None]:
        """Queue something inside this block; raises as :meth:`check` does, when it begins and when it ends."""
        self.check(what)
        yield
        self.check(what)

    def end(self) -> None:
        """Take no call any more; again is harmless."""
        self.ended = True


@define(eq=False)
class Claim:
    """One time that a thread wants the turn.

    Args:
        owner: ident of the thread.
        over: it does not want the turn, or has given it back.
        follower: the claim that took the turn after this one, if any; to set it is one step of the interpreter.
    """

    owner: int = Factory(get_ident)
    over: bool = False
    follower: dict[None, Claim] = Factory(dict)


class Turn:
    """Taken by the thread that advances, and given back by it. Taking never waits.

    As it is used::

        claim = Claim()
        try:
            if turn.take(claim):
                ...
        finally:
            claim.over = True

    A ``KeyboardInterrupt`` may end a call after any call that it makes, and a signal handler may make calls of its own
    there. So a turn is no lock: one that is acquired right before an interrupt is never given back. A claim is made
    before it is used, and the interpreter looks for no signal between the end of ``try`` and the store after it.
    """

    def __init__(self) -> None:
        self._known = Claim(over=True)  # the last one that took the turn, or one before it

    def mine(self) -> bool:
        """Whether the calling thread has it: further up its stack it advances."""
        last = self._known
        while (follower := last.follower.get(None)) is not None:
            last = follower
        return not last.over and last.owner == get_ident()

    def take(self, claim: Claim) -> bool:
        """Try to get it; False: another claim has it, of this thread or of another one."""
        last = self._known
        while last.over:  # so is each one that has a follower
            last = self._known = last.follower.setdefault(None, claim)
            if last is claim:
                return True
        return False
