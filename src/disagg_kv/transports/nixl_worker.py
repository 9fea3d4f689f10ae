"""The thread that drives the NIXL agent: it posts, polls, and makes progress on writes from peers.

The library copies inside the call that posts, 0.1 s for 1 GiB or 30,000 writes; hence the thread. It wakes in about
0.1 ms, which is longer than a small write takes. So the submitting thread itself posts a batch that is copied within a
millisecond or two.
"""

from __future__ import annotations

import ctypes
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeVar

from attrs import define, field

from ..errors import PeerLostError, TransportError
from ..ids import Peer, Ticket
from ..memory import Event
from .base import PeerLost, Settled, WriteEnded
from .mailbox import Mailbox
from .nixl_library import Agent, DescriptorList, Handle, Place
from .process import Exits, Watch, keep_in_children
from .waiting import happened, not_posted

log = logging.getLogger("disagg_kv")

T = TypeVar("T")
TransportEvent = WriteEnded | Settled | PeerLost

BUSY_S = 30e-6
"""The shortest pause between two polls of the library; a shorter one would take the core from the peer's thread."""

AWAY_S = 0.002
"""How long after a caller's look the thread leaves the library to the caller: it would only wait for the interpreter,
with the lock that the caller needs to post."""

HEAR_S = 0.001
"""Seconds between two turns of callers to move peers' writes on."""

LOOK_S = 0.02
"""Seconds between two checks of the processes of peers."""

PROBE_S = 1.0
"""Seconds between two empty messages to each peer, at least: the end of an idle peer shows nowhere else."""

GRACE_S = 0.2
"""How long after the observed exit of a process the writes to it that failed are given up as quiet."""

SMALL_BYTES, SMALL_WRITES = 1 << 24, 32
"""Up to here the thread that submits a batch posts it, if no other batch is in flight: that takes no longer than to
wake this thread. A GPU copies by itself, so that bytes do not count there."""

STUCK_S = 5.0
"""How long ``close`` waits for a call of the library to return."""


@define(eq=False)
class Link:
    """A peer as the thread knows it. ``lost`` may be read by others."""

    peer: Peer
    lost: bool = False
    leaving: bool = False
    exited_at: float | None = None
    probe_at: float = 0.0


@define(eq=False)
class Job:
    """One ticket.

    Args:
        ticket: which.
        peer: to whom.
        parts: what is still to be posted, one after the other.
        sources: keeps the memory that is read alive.
        nbytes: of all parts.
        near: whether the peer is on this host.
        after: when the sources are final; None: now, or it has happened.
        handle: of the part that is in flight, or described and waits for ``after``.
    """

    ticket: Ticket
    peer: Peer
    parts: deque[DescriptorList]
    sources: object
    nbytes: int
    near: bool
    after: Event | None = None
    handle: Handle | None = None

    @property
    def here(self) -> Place:
        """Where the sources of the next part are."""
        return self.parts[0].here

    def small(self) -> bool:
        """Whether to post it, and to see it through, takes no longer than to wake a thread."""
        kinds = {kind for part in self.parts for kind in (part.here[0], part.there[0])}
        few = all(len(part.local) <= SMALL_WRITES for part in self.parts)
        return few and (self.near if kinds == {"cuda"} else "cuda" not in kinds and self.nbytes <= SMALL_BYTES)


@define(eq=False)
class _Open:
    """Jobs that have not ended, and those that failed while the library may still read their memory.

    Args:
        waiting: described, until their sources are final.
        flying: posted.
        failed: not known to be quiet.
    """

    waiting: list[Job] = field(factory=list)
    flying: list[Job] = field(factory=list)
    failed: list[Job] = field(factory=list)

    def __bool__(self) -> bool:
        return bool(self.waiting or self.flying or self.failed)

    def of(self, peer: Peer) -> bool:
        return any(job.peer == peer for job in (*self.waiting, *self.flying, *self.failed))


class Worker:
    """The thread. It runs until :meth:`close`, and appends events to ``events``.

    Args:
        make: makes the agent, on the thread.
        idle_s: the longest pause between two polls of the library, seconds.
        make_s: how long ``make`` may take.

    Raises:
        DisaggKVError: what ``make`` raises.
        TransportError: it takes longer than ``make_s``; the thread ends once it returns.
    """

    def __init__(self, make: Callable[[], Agent], events: deque[TransportEvent], idle_s: float, make_s: float) -> None:
        self._agent: Agent
        self._events = events
        self._idle_s = idle_s
        self._links: dict[Peer, Link] = {}
        self._open = _Open()
        # Held while a thread uses the agent or the fields below.
        self._lock = threading.Lock()
        self._commands: Mailbox[Callable[[], object]] = Mailbox()
        self._active_at = time.monotonic()
        self._look_at = self._hear_at = 0.0
        self._exits: Exits[Peer] = Exits()
        self._probes: deque[Link] = deque()  # by ``probe_at``
        self._looked_at = -math.inf
        self._until: float | None = None
        self._over = False
        made: Future[Agent] = Future()
        self._thread = threading.Thread(target=self._run, args=(make, made), name="disagg_kv-nixl", daemon=True)
        self._thread.start()
        try:
            made.result(make_s)
        except TimeoutError as error:
            self._until = time.monotonic()
            raise _late("making an agent", make_s) from error

    # For other threads.

    def call(self, act: Callable[[Agent], T], what: str, timeout_s: float) -> T:
        """Do something on the thread and wait at most ``timeout_s`` for its result; ``what`` names it in errors.

        Raises:
            TransportError: not in time: the thread is in a call of the library, this or another one. What has not begun
                is never done.
        """
        future: Future[T] = Future()
        self._commands.put(lambda: _settle(future, lambda: act(self._agent)))
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            future.cancel()
            raise _late(what, timeout_s) from error

    def undo(self, act: Callable[[Agent], object]) -> None:
        """Do something on the thread after all earlier calls, without waiting; what it raises is dropped."""
        self._commands.put(lambda: _settle(Future(), lambda: act(self._agent)))

    def post(self, job: Job) -> None:
        """Begin a job; an event reports its end."""
        if job.small() and self._commands.empty() and self._lock.acquire(blocking=False):
            try:
                if self._over:
                    self._events.append(WriteEnded(job.ticket, TransportError("nixl: the transport is closed")))
                    return
                self._begin(job)
                flying = job.handle is not None and job.here[0] == "cpu"
            finally:
                self._lock.release()
            if flying:
                self._commands.put(self._advance_all)
        else:
            self._commands.put(partial(self._begin, job))

    def look(self) -> None:
        """Do the thread's work in the caller's, which is awake; without waiting, and nothing that copies for long."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._over:
                    self._turn(self._progress_small)
            finally:
                self._lock.release()

    def forget(self, peer: Peer) -> None:
        """Forget a peer once its jobs are quiet."""
        self._commands.put(partial(self._leave, peer))

    def close(self, drain_s: float) -> None:
        """Stop when all is quiet, or after ``drain_s`` seconds; again is harmless."""
        self._commands.put(partial(self._stop, time.monotonic() + drain_s))
        # A transport that is garbage may be collected by any thread.
        if threading.current_thread() is not self._thread:
            self._thread.join(drain_s + STUCK_S)

    # On the thread.

    def _run(self, make: Callable[[], Agent], made: Future[Agent]) -> None:
        _settle(made, make)
        if made.exception() is not None:
            return
        self._agent = made.result()
        keep_in_children(self._agent)
        while self._until is None or (self._open and time.monotonic() < self._until):
            # The longer nothing has happened, the longer the pause.
            now = time.monotonic()
            away_s = self._looked_at + AWAY_S - now
            command = self._commands.get(max(away_s, min(self._idle_s, max(BUSY_S, (now - self._active_at) / 16))))
            if command is None and time.monotonic() < self._looked_at + AWAY_S:
                continue
            # A thread that posts now also moves the library on, and must not have to wait for this thread afterwards.
            if self._lock.acquire(blocking=command is not None):
                try:
                    if command is not None:
                        self._turn(command)
                    self._turn(self._progress)
                finally:
                    self._lock.release()
        with self._lock:
            for job in tuple(self._open.waiting):
                self._drop(job, not_posted("nixl", job.ticket))
            if self._open:
                # The library may still read the memory, and would crash if its handles were collected at exit.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object((self._agent, self._open)))
            self._exits.clear()
            self._over = True
            del self._agent

    def _turn(self, act: Callable[[], object]) -> None:
        """An unforeseen error ends the writes that it may have hit, and never this thread: other jobs need it."""
        try:
            act()
        except Exception as error:
            log.exception("nixl: an error that was not foreseen; the writes in flight have failed")
            for job in tuple(self._open.flying):
                failure = TransportError(f"nixl: the adapter failed: {error}")
                failure.__cause__ = error
                self._fail(job, failure)

    def learn(self, peer: Peer, watch: Watch | None, metadata: bytes, agent: Agent) -> Link:
        """Learn a peer, or more of its regions; for :meth:`call`.

        Raises:
            PeerLostError: it was lost before.
            RemoteProtocolError: the metadata is garbage.
        """
        link = self._links.get(peer)
        if link is not None and link.lost:
            raise PeerLostError(f"nixl: peer {peer.hex()} is lost")
        agent.add(metadata, peer.hex())
        if link is None:
            try:
                if watch is not None:
                    self._exits.add(peer, watch)
            except TransportError:
                agent.remove(peer.hex())
                raise
            link = self._links[peer] = Link(peer)
            # The first message makes the connection; better now than with the first write.
            self._probes.appendleft(link)
        link.leaving = False
        return link

    def _stop(self, until: float) -> None:
        self._until = until

    def _leave(self, peer: Peer) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.leaving = True

    def _progress(self) -> None:
        self._hear()
        self._advance_all()
        self._look(time.monotonic())

    def _progress_small(self) -> None:
        """Progress on a caller's thread. Where the thread must copy for long, the caller leaves all to it."""
        copied = 0
        for job in tuple(self._open.waiting):
            if self._due(job):
                # The thread that posts or polls copies CPU memory, so this copies little.
                nbytes = job.nbytes if job.here[0] == "cpu" else 0
                if job.small() and copied + nbytes <= SMALL_BYTES:
                    copied += nbytes
                    self._post(job)
                elif self._commands.empty():
                    self._commands.put(self._advance_all)
        now = time.monotonic()
        if all(job.small() for job in self._open.flying):
            self._looked_at = now
            for job in tuple(self._open.flying):
                self._advance(job)
        if now >= self._hear_at:
            self._hear_at = now + HEAR_S
            self._hear()
        self._look(now)

    def _look(self, now: float) -> None:
        """Send one empty message at most; if it is time, act on what became of peers, and of jobs that failed."""
        if self._probes and now >= self._probes[0].probe_at:
            self._probe(self._probes.popleft(), now)
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        for peer in self._exits.ended(at_once=True):
            link = self._links.get(peer)
            if link is not None:
                link.exited_at = now
                self._lose(link)
        for link in tuple(self._links.values()):
            if link.leaving and not self._open.of(link.peer):
                del self._links[link.peer]
                self._exits.remove(link.peer)
                with suppress(TransportError, PeerLostError):
                    self._agent.remove(link.peer.hex())
        for job in tuple(self._open.failed):
            self._settled(job, now)

    def _advance_all(self) -> None:
        for job in tuple(self._open.waiting):
            if self._due(job):
                self._post(job)
        for job in tuple(self._open.flying):
            self._advance(job)

    def _hear(self) -> None:
        # A peer's end shows where it is written to; it is no reason not to hear the others.
        with suppress(TransportError, PeerLostError):
            self._agent.progress()

    # Jobs.

    def _begin(self, job: Job) -> None:
        """Post the next part of a job, or end it."""
        if not job.parts:
            self._events.append(WriteEnded(job.ticket))
            return
        try:
            job.handle = self._agent.prepare(job.peer.hex(), job.parts[0])
        except (TransportError, PeerLostError) as error:
            self._events.append(WriteEnded(job.ticket, error))
            return
        self._open.waiting.append(job)
        if self._due(job):
            self._post(job)

    def _due(self, job: Job) -> bool:
        """Whether a job that waits may be posted now; one that never may ends here."""
        link = self._links.get(job.peer)
        try:
            if link is None or link.lost:
                raise PeerLostError(f"nixl: peer {job.peer.hex()} is lost")
            if job.after is not None and not happened(job.after, "nixl", job.ticket):
                return False
        except (TransportError, PeerLostError) as error:
            self._drop(job, error)
            return False
        job.after = None
        return True

    def _drop(self, job: Job, error: TransportError | PeerLostError) -> None:
        """End a job of which nothing was posted."""
        self._open.waiting.remove(job)
        self._released(job)
        self._events.append(WriteEnded(job.ticket, error))

    def _post(self, job: Job) -> None:
        assert job.handle is not None
        name = job.peer.hex()
        self._open.waiting.remove(job)
        self._open.flying.append(job)
        try:
            done = self._agent.post(name, job.handle, job.here)
            if not done and job.here[0] == "cpu":
                # The bytes of a large write have been copied by then too, and to see it takes another look.
                done = self._agent.done(name, job.handle, job.here)
        except (TransportError, PeerLostError) as error:
            self._fail(job, error)
        else:
            if done:
                self._landed(job)
            else:
                self._active_at = time.monotonic()

    def _advance(self, job: Job) -> None:
        assert job.handle is not None
        try:
            done = self._agent.done(job.peer.hex(), job.handle, job.here)
        except (TransportError, PeerLostError) as error:
            self._fail(job, error)
            return
        link = self._links.get(job.peer)
        if done:
            self._landed(job)
        elif link is not None and link.lost:
            self._fail(job, PeerLostError(f"nixl: peer {link.peer.hex()} is lost"))

    def _landed(self, job: Job) -> None:
        self._open.flying.remove(job)
        self._released(job)
        job.parts.popleft()
        self._begin(job)

    def _released(self, job: Job) -> bool:
        """Release the handle of a write that is over; False: the library does not release it."""
        assert job.handle is not None
        try:
            self._agent.release(job.handle)
        except (TransportError, PeerLostError):
            return False
        job.handle = None
        return True

    def _fail(self, job: Job, error: Exception) -> None:
        """The ticket ends; whether the library still reads and writes is not known."""
        self._open.flying.remove(job)
        self._open.failed.append(job)
        self._events.append(WriteEnded(job.ticket, error, quiesced=False))
        link = self._links.get(job.peer)
        if isinstance(error, PeerLostError) and link is not None:
            self._lose(link)

    def _settled(self, job: Job, now: float) -> None:
        """A failed job is quiet when all of it was written, or the process that it wrote to has ended."""
        assert job.handle is not None
        link = self._links.get(job.peer)
        exited = link is not None and link.exited_at is not None and now >= link.exited_at + GRACE_S
        try:
            quiet = self._agent.done(job.peer.hex(), job.handle, job.here)
        except (TransportError, PeerLostError):
            quiet = exited
        if quiet and self._released(job):
            self._open.failed.remove(job)
            self._events.append(Settled(job.ticket))

    # Peers.

    def _probe(self, link: Link, now: float) -> None:
        if link.lost or self._links.get(link.peer) is not link:
            return
        link.probe_at = now + PROBE_S
        self._probes.append(link)
        try:
            self._agent.probe(link.peer.hex())
        except PeerLostError:
            self._lose(link)
        except TransportError:
            pass  # not a statement about the peer; a write will say what is wrong

    def _lose(self, link: Link) -> None:
        if not link.lost:
            link.lost = True
            self._events.append(PeerLost(link.peer))


def _late(what: str, timeout_s: float) -> TransportError:
    problem = f"nixl: {what} has waited {timeout_s:.3g} s for a call of the library to return"
    return TransportError(problem, retryable=True)


def _settle(future: Future[T], act: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(act())
    except BaseException as error:
        future.set_exception(error)
