"""One thread at a time advances a loop, whatever interrupts it."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from attrs import Factory, define

from disagg_kv.endpoints.loop.turn import Claim, Turn

TIMES = 2000


@define(eq=False)
class Loop:
    """Counts those that advance it at once."""

    turn: Turn = Factory(Turn)
    inside: int = 0
    most: int = 0
    times: int = 0

    def advance(self, again: bool = False) -> bool:
        """Whether the turn was free."""
        claim = Claim()
        try:
            if not self.turn.take(claim):
                return False
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.times += 1
            assert self.turn.mine()
            assert not (again and self.advance()), "a call inside an advance gets no turn"
            self.inside -= 1
        finally:
            claim.over = True
        return True


def test_two_threads_never_advance_at_once() -> None:
    loop, interval = Loop(), sys.getswitchinterval()

    def run() -> None:
        for number in range(20_000):
            loop.advance(again=number % 7 == 0)

    threads = [threading.Thread(target=run) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert (loop.most, loop.inside) == (1, 0)
    assert loop.times > 1_000
    assert loop.advance()
    assert not loop.turn.mine()


class InterruptedHereError(Exception):
    """What the handler raises, as that of an interrupt from the keyboard does."""


@contextmanager
def rung(handler: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """``handler`` runs at a timer's signal; yields what sets the timer, to a moment of the next 100 us.

    The timer is that of pytest-timeout, which is kept.
    """
    draw = random.Random(1)

    def ring() -> None:
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 1e-4))

    before = signal.signal(signal.SIGALRM, lambda *_: handler())
    began = time.monotonic()
    outer_s, _ = signal.getitimer(signal.ITIMER_REAL)
    try:
        yield ring
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        if outer_s:
            signal.setitimer(signal.ITIMER_REAL, max(outer_s - (time.monotonic() - began), 1e-3))


def test_an_interrupt_at_any_point_leaves_the_turn_free() -> None:
    """The real thing: a timer's signal, whose handler raises wherever the interpreter lets it."""
    loop, interrupts = Loop(), 0

    def interrupt() -> None:
        nonlocal interrupts
        interrupts += 1
        raise InterruptedHereError

    with rung(interrupt) as ring:
        for number in range(TIMES):
            # An exception that a handler raises in a finalizer, which may run at any allocation, is not seen here.
            with suppress(InterruptedHereError):
                ring()
                while interrupts == number:
                    loop.advance(again=True)
            assert not loop.turn.mine()
            assert loop.advance()
    assert loop.times > TIMES


def test_a_handler_that_interrupts_an_advance_gets_no_turn() -> None:
    loop = Loop()
    got: list[bool] = []
    with rung(lambda: got.append(loop.turn.mine() and loop.advance())) as ring:
        for number in range(TIMES):
            ring()
            while len(got) == number:
                loop.advance()
    assert not any(got)
