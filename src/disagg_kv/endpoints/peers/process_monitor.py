"""Noticing that a peer's process has ended, which is evidence where silence is not."""

from __future__ import annotations

from collections.abc import Callable

from ...core import Hello
from ...errors import PeerLostError, TransportError
from ...ids import Epoch
from ...transports.process import Ending, Exits, Process


class ProcessMonitor:
    """Watches the processes of peers on this host, and counts the time since an end was observed or confirmed.

    Args:
        clock: time.
        own: our own process.
        watch: how the process of a peer is watched.

    ``landing``: when the end of a process was seen whose last writes may not have landed.
    """

    def __init__(self, clock: Callable[[], float], own: Process, watch: Callable[[Process], Ending]) -> None:
        self._clock = clock
        self._own = own
        self._watch = watch
        self._watches: Exits[Epoch] = Exits()
        self.landing: dict[Epoch, float] = {}
        self._news: list[Epoch] = []

    def watch(self, epoch: Epoch, hello: Hello) -> None:
        """Watch a peer, if it is a process of this host; one of our own process never ends before us.

        Raises:
            TransportError: no descriptor or memory is left to watch it.
        """
        process = Process(hello.pid, hello.started, hello.host)
        if process == self._own or epoch in self._watches or epoch in self.landing:
            return
        try:
            self._watches.add(epoch, self._watch(process))
        except TransportError as error:
            if error.retryable:
                raise
            return  # another host: only its operator can know
        except PeerLostError:
            self._end(epoch)

    def ended(self, *, at_once: bool = False) -> list[Epoch]:
        """Peers whose process has ended since the last call; unless ``at_once``, an end a moment ago may be missing."""
        if not len(self._watches) and not self._news:
            return []
        for epoch in self._watches.ended(at_once=at_once):
            self._end(epoch)
        if not self._news:
            return []
        found, self._news = self._news, []
        return found

    def _end(self, epoch: Epoch) -> None:
        self.landing[epoch] = self._clock()
        self._news.append(epoch)

    def confirm(self, epoch: Epoch) -> None:
        """The operator has confirmed the end of the process."""
        self.landing.setdefault(epoch, self._clock())

    def drained(self, drain_s: Callable[[Epoch], float | None]) -> list[Epoch]:
        """Peers whose last writes have landed: they ended ``drain_s`` ago (None: it is unknown how long that takes)."""
        now = self._clock()
        since = ((epoch, now - at, drain_s(epoch)) for epoch, at in self.landing.items())
        return [epoch for epoch, passed, needed in since if needed is not None and passed >= needed]

    def forget(self, epoch: Epoch) -> None:
        """Its evidence was used, or nothing is owed to it."""
        self.landing.pop(epoch, None)
        self._watches.remove(epoch)

    def close(self) -> None:
        """Watch no process any more."""
        self._watches.clear()
