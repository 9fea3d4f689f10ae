"""Copies that the endpoint's thread has planned before their rows are final, and that the engine's thread launches.

Theory of operation
===================

No thread has to wake for a copy into mapped pages if the engine's own call that makes rows final launches it: the pages
of both sides are known since the forward pass was announced. So the endpoint's thread plans the copy meanwhile, and
*arms* it::

    endpoint's thread                                  engine's thread
    plan, count as a read of pages, and arm
                                                       layer_ready, close: take, launch, leave the result
    find the result: now it is a copy like any other

    or: take, because the room has failed,             layer_ready, close: too late, nothing to do
    lost its pages, or its rows are final and
    the engine's thread left them to it

The thread that takes an armed launch decides. The engine's launches it. The endpoint's launches it or drops it.
:meth:`Armed.take` returns True once, to one of both threads: it is all that they share, besides fields that one of them
writes and the other reads. An armed copy counts as one that reads and writes (``Post.copying``) until its end is known
or the endpoint's thread has taken it. So ``Drained`` and ``released`` wait for it as for a launched one. It does not
matter when the endpoint's thread sees an abort: either it takes the launch then, or it waits for the copy's end.

The engine's thread launches no copy for pages that it has withdrawn: it reads ``revoked``, which only its own calls
change. Its launch never waits. It leaves to the endpoint's thread what would block: rows whose event no device awaits,
and all of it while it captures a CUDA graph. Kernels that copy in the call are not armed at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping

from attrs import define, frozen

from ...ids import LayerId
from ...kernels import Kernels, SupportsArming, SupportsStreams
from ...memory import All, Event

Launch = Callable[[Event | None], Event | None]
"""Launches behind an event and returns the event of the end, as ``Kernels.copy`` does."""


@frozen
class Launched:
    """What became of a launch.

    Args:
        started, took: when it began, and the seconds of the call.
        after: what it comes after.
        event: its end; None: it has ended.
        error: why nothing was launched, or nothing of it moves any more.
    """

    started: float
    took: float
    after: Event | None
    event: Event | None = None
    error: Exception | None = None


class Interrupted:
    """The end of a launch that an exception such as ``KeyboardInterrupt`` cut off: whether it runs is never known."""

    def __init__(self, cause: BaseException) -> None:
        self._cause = cause

    def query(self) -> bool:
        """Raise."""
        raise RuntimeError(f"a launch on the engine's thread was interrupted: {self._cause!r}")

    def synchronize(self) -> None:
        """Raise."""
        self.query()


class Armed:
    """One launch for all that is final with these layers of the rows of one call.

    Args:
        layers: of the rows; the launch comes after all of them.
        launch: launches it.
    """

    def __init__(self, layers: frozenset[LayerId], launch: Launch) -> None:
        self.layers = layers
        self.launched: Launched | None = None
        self._launch = launch
        # Acquired once and never released. To try that is one atomic step in every build of Python: it needs neither
        # the interpreter lock nor a lock that an interrupted call might hold.
        self._taken = threading.Lock()

    def take(self) -> bool:
        """True for one caller of all, on any thread: only that one may launch it, or drop it."""
        return self._taken.acquire(blocking=False)

    def launch(self, after: Event | None, clock: Callable[[], float]) -> bool:
        """Launch it behind ``after`` and leave ``launched``; False: another thread has taken it."""
        if not self.take():
            return False
        _LAUNCHED[self] = None
        started = clock()
        try:
            event = self._launch(after)
        except Exception as exc:
            self.launched = Launched(started, clock() - started, after, error=exc)
        except BaseException as exc:
            self.launched = Launched(started, clock() - started, after, Interrupted(exc))
            raise
        else:
            self.launched = Launched(started, clock() - started, after, event)
        return True

    def settle(self) -> None:
        """Endpoint's thread: it has found ``launched``, and keeps what the copy needs from now on."""
        del _LAUNCHED[self]


_LAUNCHED: dict[Armed, None] = {}
"""Launches that no endpoint's thread has found yet. They keep memory mapped, also where their endpoint has closed."""


@define(eq=False)
class ArmedCopies:
    """What is armed for the rows of one call of the engine.

    Args:
        revoked: engine's thread: whether it has withdrawn the rows' pages since.
        launches: written by the endpoint's thread; never changed, but replaced.
    """

    revoked: Callable[[], bool]
    launches: tuple[Armed, ...] = ()

    def add(self, armed: Armed) -> None:
        """Endpoint's thread: the engine's may launch it from now on."""
        self.launches = (*self.launches, armed)

    def remove(self, armed: Armed) -> None:
        """Endpoint's thread: it was taken."""
        self.launches = tuple(one for one in self.launches if one is not armed)

    def final(self, events: Mapping[LayerId, Event | None]) -> Iterator[tuple[Armed, Event | None]]:
        """Engine's thread: those of which all layers are final, and after what; ``events`` are of final layers."""
        if self.revoked():
            return
        for armed in self.launches:
            if events.keys() >= armed.layers:
                yield armed, _joined(events[layer] for layer in armed.layers)


def _joined(events: Iterator[Event | None]) -> Event | None:
    different = list({id(event): event for event in events if event is not None}.values())
    return different[0] if len(different) == 1 else All(different) if different else None


class EngineLaunches:
    """Engine's thread: launches what is armed, where that does not block.

    Args:
        kernels: they copy.
        clock: seconds.
    """

    def __init__(self, kernels: Kernels, clock: Callable[[], float]) -> None:
        self._streams = kernels if isinstance(kernels, SupportsStreams) else None
        self._arming = kernels if isinstance(kernels, SupportsArming) else None
        self._clock = clock

    def launch(self, calls: Collection[ArmedCopies], events: Mapping[LayerId, Event | None]) -> bool:
        """Launch all that is final; True: something was launched, so that the endpoint's thread has a look to take.

        Raises nothing: the rooms fail with an error of their launch, and the endpoint asks an event that raises again.
        """
        due = [one for call in calls for one in call.final(events)]
        if not due or (self._arming is not None and not self._arming.may_launch()):
            return False
        launched = False
        for armed, after in due:
            if self._at_once(after):
                launched |= armed.launch(after, self._clock)
        return launched

    def _at_once(self, after: Event | None) -> bool:
        """Whether a launch behind ``after`` returns at once."""
        try:
            ordered = after is None or (self._streams is not None and self._streams.orders(after))
            return ordered or (after is not None and bool(after.query()))
        except Exception:
            return False
