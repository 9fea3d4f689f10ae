"""Who advances an endpoint's loop: the engine's own calls, or the endpoint's thread.

Theory of operation
===================

A thread that has to be woken stands between an engine and its bytes. Beside an engine that computes in Python it waits
for the interpreter, 5 ms and more, several times a request. So the loop is a plain object, and who is awake advances
it: :meth:`Driver.drive`, in calls that the engine makes anyway, or the endpoint's thread where no such call comes.

* One thread at a time has the :class:`Turn`. A call of the engine only tries to take it. Who gives the turn back
  looks whether commands were posted meanwhile.
* The endpoint's thread waits without the turn, for messages and for what is due. It stays away while the engine
  drives: for at most three of the engine's last intervals between two calls, and not at all where such an interval
  exceeds 1 ms, as it then would come too late.
* What the engine's call leaves to be done soon, a copy whose end must be looked for, or work beyond the budget of a
  call, wakes the endpoint's thread if that waits for longer.
* Copies of CPU memory run in the call that begins them, so they are left to the endpoint's thread. While that is awake,
  the engine's calls do not advance the loop, but sleep for an instant: the thread needs the interpreter.

A wake-up is not lost: the endpoint's thread says that it waits, and until when, while it has the turn. An engine's call
that gets the turn later sees that, and wakes it. A message that arrives ends the wait by itself.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from math import inf
from queue import SimpleQueue
from threading import get_ident
from types import FrameType

from attrs import Factory, define

from ... import arguments
from ...errors import AbortedError, DisaggKVError, EndpointBrokenError, LocalProtocolError
from ...memory import undisturbed
from ..latch import Latch
from .event_loop import EventLoop
from .failures import Broken
from .timing import BUDGET_S

STEP_S = 1.0
"""The longest single wait; whatever happens wakes the thread earlier."""

ENGINE_S = 5e-4
"""Seconds after which an advance in an engine's call begins no further piece of work: on GPUs a message that leads to a
launch needs about 400 us, and the one that ends its room comes right behind it."""

GAPS, LONGEST_GAP_S = 3, 1e-3
"""For how many of the engine's last intervals the thread stays away, and the longest interval for which it does."""

CALL_S = 5e-3
"""How long the thread stays away at most while a call of the engine goes on."""

LOOK_S, LOOKS_S = 1e-4, 1e-3
"""How long the thread looks away beside an engine that drives: at first, and at most; each time twice as long."""

LENT_S = 3e-3
"""The longest single wait of an engine's thread that is lent to the loop."""

TURN_S = 5e-5
"""Seconds between two tries to take the turn."""

YIELD_SHARE, YIELD_S = 1 / 8, 1e-3
"""How long an engine's call sleeps at most while the thread copies CPU memory: the part of the engine's last interval
between two calls, and seconds."""

PATIENCE_S = 2e-4
"""How long an engine's call that carries data tries."""


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


class Driver:
    """Advances an event loop until it is closed: in the engine's calls, and on a thread of its own, if there is one.

    Who closes the loop has the turn: the endpoint's thread, or without one the engine's. :meth:`close` waits for that.
    So a ``close`` that an exception interrupts, such as a ``KeyboardInterrupt``, loses nothing: the endpoint goes on to
    close, and the next ``close`` waits again. A ``close`` in a signal handler that interrupts an advance, or in code of
    the user that an advance calls, cannot wait for that advance: it marks the endpoint as closed and returns. So it is
    for every endpoint of the process: their threads may wait for what the advance holds, such as the lock of a log.

    Args:
        loop: what is advanced.
        name: of the thread.
        break_down: fails what the engine still has a handle of and has not ended.
        thread: whether there is one.
        engine: whether the engine's calls advance the loop.

    Attributes:
        closed: ``close`` was called: no call is taken any more.
    """

    def __init__(
        self,
        loop: EventLoop,
        name: str,
        break_down: Callable[[DisaggKVError], None],
        *,
        thread: bool,
        engine: bool,
    ) -> None:
        self.loop = loop
        self._break_down = break_down
        self._engine = engine
        self._where = f"endpoint {loop.me.instance}/{loop.me.rank}"
        self._asked: SimpleQueue[None] = SimpleQueue()  # to close; its ``put`` may interrupt itself
        self._until = inf
        self._over = Latch()
        self._failed: BaseException | None = None
        self._turn = Turn()
        self._called = self._engine_until = -inf
        self._fast = self._lent = False
        self._rest_s = 0.0
        self._waits_until = -inf
        self.closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True) if thread else None
        if self._thread is not None:
            self._thread.start()

    @property
    def broken(self) -> EndpointBrokenError | None:
        """Why the endpoint takes no calls any more; None: it does.

        Raises:
            LocalProtocolError: this is a forked child of the process that has the endpoint.
        """
        self.loop.home.check()
        return self.loop.failures.broken

    # The engine's calls.

    def check(self, what: str) -> None:
        """Raise if no call is taken any more; another thread may end that at any moment.

        Every public call that queues something looks here first, and :meth:`post` looks once more when the command is
        queued. The endpoint's last command aborts its rooms, and is queued after ``closed`` is set. If that was not set
        yet, the call's command comes before the last one. If it was, the call is refused although it has queued
        something, and its engine has no handle of what that begins. So a room that was accepted always ends. There is
        no lock: a signal handler may close the endpoint wherever it interrupts a call.

        Raises:
            EndpointBrokenError: the endpoint has failed.
            LocalProtocolError: the endpoint is closed, or this is a forked child of the process that has it.
        """
        self.loop.home.check()
        if (error := self.loop.failures.broken) is not None:
            raise error
        if self.closed:
            raise LocalProtocolError(f"{what}: the endpoint is closed")

    def post(self, command: Callable[[], None], what: str = "") -> None:
        """Do something on the loop, in order: in this call, if no other thread advances; else that thread does it.

        ``what``: the call that is refused if the endpoint was closed before this; empty: it is not.

        Raises:
            EndpointBrokenError: the endpoint has failed. What was posted before fails with it.
            LocalProtocolError: as :meth:`check`, or this is a forked child of the process that has the endpoint.
        """
        if not what:
            self.loop.home.check()
        self.loop.post(command)
        self.drive(PATIENCE_S)
        if what and (self.closed or self.loop.failures.broken is not None):
            self.check(what)

    def drive(self, patience_s: float = 0.0) -> None:
        """Advance on the calling thread, an engine's; where another thread advances, try for ``patience_s``.

        A try in vain hands the interpreter to the other thread, which may be in the middle of a copy. That thread sees
        what was posted before it gives the turn back.
        """
        if not self._engine:
            if self.loop.behind:
                self.loop.channel.wake()
            return
        clock = self.loop.clock
        now = clock()
        gap, self._called = now - self._called, now
        fast = self._fast = gap <= LONGEST_GAP_S
        self._engine_until = now + CALL_S if fast else now
        if self.loop.makes_copies and self._thread is not None and self._waits_until == -inf:
            # The thread is awake, and copies. An engine that computes in Python lets the interpreter go nowhere else.
            until = now + min(YIELD_SHARE * gap, YIELD_S)
            self.loop.sleep(TURN_S)
            while self._waits_until == -inf and clock() < until:
                self.loop.sleep(TURN_S)
            return
        with undisturbed() as may_drive:
            while may_drive and not self.advance(ENGINE_S, engine=True):
                if self._over.is_set or self._turn.mine():
                    return
                self.loop.sleep(TURN_S)
                if clock() >= now + patience_s:
                    break
        if fast:
            self._engine_until = clock() + GAPS * gap
        if self.loop.behind:
            self.loop.channel.wake()

    def wait(self, timeout_s: float, over: Callable[[], bool]) -> bool:
        """Lend the calling thread to the loop until ``over()``; False: that did not come within ``timeout_s``."""
        clock = self.loop.clock
        until = clock() + timeout_s
        before, self._lent = self._lent, True
        try:
            while not over() and (left := until - clock()) > 0 and not self._over.is_set and not self._turn.mine():
                self.drive()
                if not over() and not self.loop.behind:
                    self.loop.wait(self.loop.rest(min(left, LENT_S)))
        finally:
            self._lent = before
        return over()

    def lend(self, over: Callable[[], bool]) -> None:
        """As :meth:`wait`, for as long as it takes; where engines' calls do not advance the loop, nothing."""
        if self._engine:
            self.wait(inf, over)

    def step(self, timeout_s: float = 0.0) -> None:
        """Advance on the calling thread, then wait for the next thing; only without a thread of our own.

        Raises:
            EndpointBrokenError: the endpoint cannot go on.
            LocalProtocolError: as :attr:`broken`.
        """
        assert self._thread is None
        loop = self.loop
        loop.home.check()
        if self.advance(BUDGET_S) and timeout_s > 0 and not loop.behind:
            loop.wait(loop.rest(timeout_s))
            self.advance(BUDGET_S)
        if loop.failures.broken is not None:
            raise loop.failures.broken

    # Whichever thread advances.

    def advance(self, budget_s: float, *, engine: bool = False) -> bool:
        """Advance the loop once; False: another call does. An error that the loop does not handle ends the endpoint.

        ``engine``: in a call of the engine, whose exceptions, such as ``KeyboardInterrupt``, go on to it.
        """
        claim = Claim()
        try:
            if not self._turn.take(claim):
                return False
            if not self._over.is_set and self.loop.failures.broken is None:
                self._advance(budget_s, engine=engine)
        finally:
            claim.over = True
        if self._thread is None and not self._asked.empty():
            self._finish()  # a signal handler, or code that this advance called, has closed the endpoint
        return True

    def _advance(self, budget_s: float, *, engine: bool = False) -> None:
        try:
            self.loop.advance(budget_s, copies=self._thread is None or not engine)
            if self._thread is not None:
                self._plan()
        except BaseException as exc:
            self._break_down(self.loop.failures.break_down(exc))
            self.loop.commands.clear()  # every room has ended: nothing of what was posted is done any more
            if engine and not isinstance(exc, Exception | Broken):
                raise

    def _plan(self) -> None:
        """The endpoint's thread: say until when it waits. An engine's: wake that thread if it waits for too long."""
        loop = self.loop
        if threading.current_thread() is self._thread:
            self._rest_s = loop.rest(STEP_S)
            self._waits_until = loop.now + self._rest_s
            return
        waits_until = self._waits_until  # that thread may go on at any moment
        if waits_until == -inf:
            return
        if (
            loop.left
            or loop.behind
            or (self._fast and loop.pending)
            or loop.now + loop.rest(STEP_S) < waits_until - TURN_S  # the same time, but for rounding, is none
        ):
            # ``_waits_until`` stays: until that thread has begun to wait, a later advance may take this wake-up from
            # the channel, and has to repeat it.
            loop.channel.wake()

    def _run(self) -> None:
        """The endpoint's thread."""
        try:
            self._serve()
        except Exception as exc:
            self._break_down(self.loop.failures.break_down(exc))
        self._asked.get()
        self._finish()

    def _serve(self) -> None:
        """Until ``close`` is called, or the endpoint breaks."""
        loop, look = self.loop, LOOK_S
        while self._asked.empty() and loop.failures.broken is None:
            left = self._engine_until - loop.clock()
            if not loop.makes_copies and (self._lent or (left > 0 and loop.pending)):
                self._waits_until = -inf
                loop.sleep(max(left, look))
                look = min(2 * look, LOOKS_S)
                continue
            look = LOOK_S
            if not self.advance(BUDGET_S):
                loop.sleep(TURN_S)
            elif not loop.behind and self._asked.empty():
                if not loop.left:
                    loop.wait(self._rest_s)
                self._waits_until = -inf

    def close(self, drain_s: float) -> None:
        """Abort every open room, wait at most ``drain_s`` seconds for their ends, and stop; a second call is harmless.

        Any thread, also in a signal handler. Inside an advance, of this endpoint or of another one, it returns at once:
        the endpoint closes after that. After an interruption, call it again. Of several calls the one whose time is
        over first counts.

        Raises:
            LocalProtocolError: as :attr:`broken`; nothing is closed then.
            TransportError: the transport could not be closed; all else is.
        """
        self.loop.home.check()
        drain_s = arguments.seconds(drain_s, "drain_s", zero=True)
        self.closed = True
        self._until = min(self._until, self.loop.clock() + drain_s)
        self._asked.put(None)
        if _advancing():
            return  # the advance below may hold what this endpoint's thread waits for, if it is another endpoint's too
        if self._thread is None:
            self._finish()
        else:
            self.loop.channel.wake()
            self._over.wait()
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _finish(self) -> None:
        """What raises here is raised by ``close``."""
        claim = Claim()
        try:
            while not self._turn.take(claim):
                if self._over.is_set:
                    return
                self.loop.sleep(TURN_S)
            try:
                if not self._over.is_set:
                    try:
                        self._drain()
                    finally:
                        self._stop()
            except BaseException as exc:
                self._failed = exc
            finally:
                self._over.set()
        finally:
            claim.over = True

    def _drain(self) -> None:
        """The last steps."""
        loop = self.loop
        with suppress(EndpointBrokenError):
            loop.post(lambda: loop.side.integrity_failure(AbortedError("the endpoint closes")))
        if loop.failures.broken is None:
            self._advance(BUDGET_S)
        while loop.failures.broken is None and loop.behind:
            self._advance(BUDGET_S)
        while loop.failures.broken is None and loop.side.open_rooms and loop.clock() < self._until:
            loop.wait(loop.rest(0.02))
            self._advance(BUDGET_S)

    def _stop(self) -> None:
        """Close everything, and fail every handle that has not ended, whatever raises."""
        loop = self.loop
        try:
            if self._thread is not None:
                loop.directory.withdraw(loop.me.instance, loop.me.rank)
        finally:
            try:
                loop.stop(max(0.0, self._until - loop.clock()))
            finally:
                self._break_down(AbortedError(f"{self._where} has closed"))


def _advancing() -> bool:
    """Whether the calling thread advances an endpoint, further up its stack."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in _ADVANCES:
            return True
        frame = frame.f_back
    return False


_ADVANCES = Driver.advance.__code__, Driver._finish.__code__
