"""Which thread advances a loop: one at a time."""

from __future__ import annotations

from threading import get_ident

from attrs import Factory, define


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
        last = self._last()
        return not last.over and last.owner == get_ident()

    def take(self, claim: Claim) -> bool:
        """Try to get it; False: another claim has it, of this thread or of another one."""
        last = self._last()
        while last.over:
            last = self._known = last.follower.setdefault(None, claim)
            if last is claim:
                return True
        return False

    def _last(self) -> Claim:
        claim = self._known
        while (follower := claim.follower.get(None)) is not None:
            claim = follower
        return claim
