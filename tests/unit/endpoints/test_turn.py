"""One thread at a time advances a loop, whatever interrupts it."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from attrs import Factory, define

from disagg_kv.endpoints.loop.driver import Claim, Turn

# The instructions after which the interpreter runs a signal's handler (CPython, Python/ceval.c, CHECK_EVAL_BREAKER).
CHECKED = ("CALL", "JUMP_BACKWARD", "RESUME")


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


def run_with_signal(call: Callable[[], object], handler: Callable[[], object], moment: int) -> bool:
    """Run ``call``, and ``handler`` where the interpreter would run it for the ``moment``-th time.

    Returns:
        Whether ``call`` had such a moment.
    """
    left = moment
    last: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode":
            before, last[frame] = last.get(frame), frame.f_lasti
            if before is not None and dis.opname[frame.f_code.co_code[before]].startswith(CHECKED):
                left -= 1
                if left == -1:
                    sys.settrace(None)
                    handler()
        return trace

    traced = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(traced)
    return left < 0


def test_an_interrupt_at_any_point_leaves_the_turn_free() -> None:
    """The handler raises at each point where the interpreter lets it; a timer would hit few of them, and by luck."""

    def interrupt() -> None:
        raise InterruptedHereError

    def interrupted(loop: Loop, moment: int) -> bool:
        try:
            return run_with_signal(lambda: loop.advance(again=True), interrupt, moment)
        except InterruptedHereError:
            return True

    moment, loop = 0, Loop()
    while interrupted(loop, moment):
        assert not loop.turn.mine()
        assert loop.advance()
        moment, loop = moment + 1, Loop()
    assert moment > 10


def test_a_handler_that_interrupts_an_advance_gets_no_turn() -> None:
    got: list[bool] = []

    def handled(loop: Loop, moment: int) -> bool:
        def handler() -> None:
            got.append(loop.turn.mine())
            assert not (loop.turn.mine() and loop.advance())

        return run_with_signal(loop.advance, handler, moment)

    moment, loop = 0, Loop()
    while handled(loop, moment):
        assert loop.advance()
        moment, loop = moment + 1, Loop()
    assert len(got) == moment > 6
    assert {True, False} == set(got), "some of the moments lie inside the turn"
