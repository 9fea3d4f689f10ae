"""Clock, threads and identity of an endpoint."""

from __future__ import annotations

import time
from collections.abc import Callable

from attrs import frozen

from ... import arguments
from ..peers.background import Background, HelperThreads, inline
from ..peers.incarnation import Incarnation


@frozen(kw_only=True)
class Environment:
    """Clock, threads and identity of an endpoint. The defaults serve every engine; simulations and tests replace them.

    Args:
        clock: seconds; must never go back.
        sleep: blocks the endpoint's thread for a number of seconds.
        thread: False: the endpoint has no thread, and the engine's calls alone advance it. The engine must poll at
            least every third of ``silence_s``, or peers lose it.
        engine: False: the engine's calls do not advance the endpoint. Without a thread, the caller does, by
            ``driver.step``.
        life: epoch and process of the endpoint; None: a new epoch in this process. An epoch must not be used twice.
        background: creates the helpers for calls that may block: a function of a name and of the number of calls that
            run at a time. None: threads, or the calling thread where the endpoint has no thread.

    Raises:
        ConfigurationError: a value of another type.
    """

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    thread: bool = True
    engine: bool = True
    life: Incarnation | None = None
    background: Callable[[str, int], Background] | None = None

    def __attrs_post_init__(self) -> None:
        arguments.clock(self.clock, "clock")
        arguments.function(self.sleep, "sleep")
        arguments.flag(self.thread, "thread")
        arguments.flag(self.engine, "engine")
        if self.life is not None:
            arguments.one(self.life, "life", Incarnation)
        if self.background is not None:
            arguments.function(self.background, "background")


def helpers(environment: Environment, name: str, most: int) -> Background:
    """Helpers that run at most ``most`` calls at a time.

    Raises:
        ConfigurationError: ``background`` raises, or returns no helper.
    """
    background = environment.background
    if background is None:
        return HelperThreads(name, most) if environment.thread else inline(name, most)
    try:
        made = background(name, most)
    except Exception as exc:
        raise arguments.wrong("background", background, "a function that makes helpers is needed") from exc
    arguments.methods(made, "background", "what runs calls", "start", "close")
    return made
