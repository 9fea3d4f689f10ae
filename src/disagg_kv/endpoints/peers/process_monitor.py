"""Noticing that a peer's process has ended, which is evidence where silence is not."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import PeerLostError, TransportError
from ...transports.process import Ending, Exits, Process
from .session import PeerSession


class ProcessMonitor:
    """Watches the processes of peers on this host, and counts the time since an end was observed or confirmed.

    Args:
        clock: time.
        own: our own process.
        watch: how the process of a peer is watched.

    ``landing``: those whose end was seen, and whose last writes may not have landed.
    """

    def __init__(self, clock: Callable[[], float], own: Process, watch: Callable[[Process], Ending]) -> None:
        self._clock = clock
        self._own = own
        self._watch = watch
        self._watches: Exits[PeerSession] = Exits()
        self.landing: dict[PeerSession, None] = {}
        self._news: list[PeerSession] = []

    def watch(self, session: PeerSession) -> None:
        """Watch a peer, if it is a process of this host; one of our own process never ends before us.

        Raises:
            TransportError: no descriptor or memory is left to watch it.
        """
        hello = session.hello
        process = Process(hello.pid, hello.started, hello.host)
        if process == self._own or session in self._watches or session.ended_at is not None:
            return
        try:
            self._watches.add(session, self._watch(process))
        except TransportError as error:
            if error.retryable:
                raise
            return  # another host: only its operator can know
        except PeerLostError:
            self._end(session)

    def ended(self, *, at_once: bool = False) -> list[PeerSession]:
        """Peers whose process has ended since the last call; unless ``at_once``, an end a moment ago may be missing."""
        if not len(self._watches) and not self._news:
            return []
        for session in self._watches.ended(at_once=at_once):
            self._end(session)
        if not self._news:
            return []
        found, self._news = self._news, []
        return found

    def _end(self, session: PeerSession) -> None:
        self.confirm(session)
        self._news.append(session)

    def confirm(self, session: PeerSession) -> None:
        """The end of a process was seen, or the operator has confirmed it."""
        if session.ended_at is None:
            session.ended_at = self._clock()
            self.landing[session] = None

    def drained(self, drain_s: Callable[[PeerSession], float | None]) -> list[PeerSession]:
        """Peers whose last writes have landed: they ended ``drain_s`` ago (None: it is unknown how long that takes)."""
        now = self._clock()
        since = ((session, now - (session.ended_at or 0.0), drain_s(session)) for session in self.landing)
        return [session for session, passed, needed in since if needed is not None and passed >= needed]

    def forget(self, session: PeerSession) -> None:
        """Its evidence was used, or nothing is owed to it."""
        session.ended_at = None
        self.landing.pop(session, None)
        self._watches.remove(session)

    def close(self) -> None:
        """Watch no process any more."""
        self._watches.clear()
