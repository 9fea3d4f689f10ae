"""Retries: what happens to a request when its prefill instance fails.

A layer over a :class:`Receiver`, for its engine's thread alone. The endpoints below know nothing of it: each attempt is
a room with an id of its own (:func:`attempt_id`). An attempt begins only when the one before has released the pages, so
a late write of the old prefill never meets what the new one sends. Every attempt awaits all rows after the prefix that
the engine holds, also those that an earlier attempt delivered. All ranks of a decode instance see the same outcome of
each attempt; a policy that decides by what every rank knows alike keeps them together.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Protocol

from attrs import define, field, frozen

from .. import arguments
from ..core import Options, Phase
from ..core.room.machine import ours
from ..errors import AbortedError, ConfigurationError, DeadlineError, DisaggKVError, LocalProtocolError
from ..ids import Epoch, GroupId, RoomId, room_name
from ..rendezvous import Source
from ..trace import Guarded, Observer, Silent
from .api import Receiver, Reception
from .expectation import Expectation
from .handle import room_state
from .loop.endpoint import Endpoint
from .status import PeerInfo, Report

REQUEST_BYTES = 48
"""Longest id of a request that may be retried; the ids of its attempts need the rest of 64 bytes."""

_MARK = b"~attempt-"


def room_id(text: str) -> RoomId:
    """A room id for the text by which an engine names a request, so short that the request may be retried.

    Text of at most 48 bytes in UTF-8 and without ``~`` stays as it is. Of other text, the id has the beginning and a
    digest of 128 bits. Different texts have different ids.

    Args:
        text: any text that is not empty.

    Raises:
        ConfigurationError: no text, or text that UTF-8 cannot encode.
    """
    given = arguments.text(text, "room id", least=1, most=arguments.MOST)
    name = given.encode()
    if len(name) <= REQUEST_BYTES and b"~" not in name:
        return RoomId(name)
    digest = hashlib.blake2b(name, digest_size=16).hexdigest()
    head = name[: REQUEST_BYTES - len(digest) - 1].decode(errors="ignore").replace("~", "-")
    return RoomId(f"{head}~{digest}".encode())


def attempt_id(request: RoomId, attempt: int) -> RoomId:
    """The id of the room in which an attempt transfers a request.

    A room id is used once. So decode and prefill open each attempt under its own id.

    Args:
        request: the id of the request, 1 to 64 bytes; at most 48 for attempts after the first.
        attempt: 1 for the first, which has the id of the request; at most 1,000,000.

    Raises:
        ConfigurationError: no room id, no such number, or an id that is too long or belongs to a later attempt itself.
    """
    room = arguments.room_id(request)
    number = arguments.count(attempt, "attempt", least=1, most=10**6)
    if _MARK in room:
        raise ConfigurationError(f"{room_name(room)} is a later attempt itself; give the id of the request")
    if number == 1:
        return RoomId(room)
    if len(room) > REQUEST_BYTES:
        raise ConfigurationError(
            f"{room_name(room)}: an id of {len(room)} bytes, but that of a request with retries has at most "
            f"{REQUEST_BYTES}"
        )
    return RoomId(b"%b%b%d" % (room, _MARK, number))


@frozen
class Attempt:
    """An attempt that failed.

    Args:
        room: the id of the request.
        number: 1 for the first.
        source: the prefill instance that did not deliver.
        error: why, as this rank has it; other ranks of the instance may have another.
    """

    room: RoomId
    number: int
    source: Source
    error: DisaggKVError

    @property
    def next_id(self) -> RoomId:
        """The id under which the next attempt opens its room: prefill must open it under the same."""
        return attempt_id(self.room, self.number + 1)


class Recovery(Protocol):
    """The engine's policy."""

    def again(self, failed: Attempt) -> Source | None:
        """The prefill instance that sends the request now; None: the request fails.

        Called once for each failed attempt, at once, so that prefill can compute while pages come back. It must not
        block. This does not notify prefill: the policy hands the request to the instance that it returns, to be opened
        under the id ``failed.next_id``. It may be the same instance. An exception ends the request.
        """
        ...


class Fail:
    """The first failure is the request's."""

    def again(self, failed: Attempt) -> None:
        """Never."""


class Retry:
    """A limited number of attempts, each at the prefill instance that ``place`` chooses.

    The error does not matter, since ranks of one instance must decide alike and have different errors.

    Args:
        place: hands the request to a prefill instance, to be opened under the id ``failed.next_id``, and returns that
            instance; None: none is left.
        attempts: in all, at least 1.
    """

    def __init__(self, place: Callable[[Attempt], Source | None], attempts: int = 3) -> None:
        arguments.function(place, "place")
        self._place = place
        self._attempts = arguments.count(attempts, "attempts", least=1)

    def again(self, failed: Attempt) -> Source | None:
        """The prefill instance that sends the request now; None: no attempt is left, or no instance."""
        return self._place(failed) if failed.number < self._attempts else None


@define(eq=False)
class _Current:
    """The present attempt."""

    number: int
    source: Source
    reception: Reception
    next_source: Source | None = None
    asked: bool = False


@define(eq=False, repr=False)
class Recovering:
    """A request over all its attempts; a :class:`Reception`.

    Attributes:
        room: the id of the request; that of its first attempt.
        error: why the last attempt failed; None while another is to come.
    """

    room: RoomId
    _open: Callable[[RoomId, Source, float], Reception]
    _policy: Recovery
    _until: float
    _clock: Callable[[], float]
    _current: _Current
    _expected: Expectation | None = field(default=None, init=False)
    error: DisaggKVError | None = field(default=None, init=False)
    _aborted: bool = field(default=False, init=False)
    _seen: tuple[Phase, bool] = field(default=(Phase.CONNECTING, False), init=False)

    def __repr__(self) -> str:
        room = self.room
        return arguments.brief(self, lambda: f"{room_state(room, self.phase, self.released)}, attempt {self.attempts}")

    @property
    def attempts(self) -> int:
        """Number of attempts that have begun."""
        return self._current.number

    @property
    def source(self) -> Source:
        """The prefill instance of the present attempt."""
        return self._current.source

    @property
    def phase(self) -> Phase:
        """The present attempt's; CONNECTING while the next is to begin."""
        phase = self._current.reception.phase
        if phase is Phase.FAILED and self.error is None:
            return Phase.CONNECTING
        return phase

    @property
    def released(self) -> bool:
        """True, for good: no attempt follows, and nothing reads or writes the pages any more."""
        current = self._current
        return current.reception.released and (current.reception.phase is not Phase.FAILED or self.error is not None)

    @property
    def report(self) -> Report:
        """What the present attempt cost so far."""
        return self._current.reception.report

    def expect(self, expectation: Expectation) -> Mapping[GroupId, int]:
        """Await rows, and return the held rows that count, per group.

        Every attempt awaits the same rows in the same pages.
        """
        if self._expected is not None:
            raise LocalProtocolError(f"{room_name(self.room)}: expect was called already")
        taken = self._current.reception.expect(expectation)
        self._expected = expectation
        return taken

    def abort(self, reason: str) -> None:
        """End the request with a failure; no attempt follows."""
        arguments.one(reason, "reason", str)
        self._aborted = True
        if self._current.reception.phase is Phase.FAILED and self.error is None:
            self.error = AbortedError(f"{room_name(self.room)}: {reason}", room=self.room)
        self._current.reception.abort(reason)

    def due(self, reported: Container[int]) -> bool:
        """Whether to look at the request: one that has ended well waits until the endpoint has reported it."""
        return self.phase is not Phase.DONE or id(self._current.reception) in reported

    def look(self) -> bool:
        """Go on where an attempt has failed; True if the engine should look at the request."""
        current = self._current
        if current.reception.phase is Phase.FAILED and self.error is None:
            self._after(current)
        now = (self.phase, self.released)
        changed, self._seen = now != self._seen, now
        return changed

    def _after(self, current: _Current) -> None:
        error = current.reception.error
        assert error is not None
        left = self._until - self._clock()
        failed = Attempt(self.room, current.number, current.source, error)
        if not current.asked:
            current.asked = True
            if not self._aborted and left > 0:
                try:
                    current.next_source = self._policy.again(failed)
                except Exception as exc:
                    # A policy is the engine's code: its errors end this request alone.
                    where = f"{room_name(self.room)}: the policy failed after attempt {failed.number}"
                    self.error = ours(exc, where, room=self.room)
                    return
        if self._aborted or current.next_source is None:
            self.error = error
        elif left <= 0:
            self.error = DeadlineError(
                f"{room_name(self.room)}: its time was over before attempt {failed.number + 1} could begin: {error}",
                room=self.room,
            )
        elif current.reception.released:
            try:
                following = self._open(failed.next_id, current.next_source, left)
            except DisaggKVError as exc:
                self.error = exc
                return
            self._current = _Current(failed.number + 1, current.next_source, following)
            if self._expected is not None:
                try:
                    following.expect(self._expected)
                except LocalProtocolError:
                    # The endpoint was closed meanwhile, and its last act is to fail the attempt.
                    self._aborted = True


class RecoveringReceiver:
    """A receiver that retries requests; a :class:`Receiver`.

    Call ``poll`` regularly, as of any receiver: attempts begin there.

    Args:
        inner: the endpoint; this layer owns its ``poll`` from now on.
        policy: what to do when an attempt fails.
        options: the endpoint's, for the time that a room has in all.
        clock: the endpoint's.
        observer: counts the attempts after the first ones, as ``requests.retried``.
    """

    def __init__(
        self,
        inner: Receiver,
        policy: Recovery,
        *,
        options: Options | None = None,
        clock: Callable[[], float] = time.monotonic,
        observer: Observer | None = None,
    ) -> None:
        arguments.methods(inner, "inner", "a receiver", "open", "poll", "confirm_terminated", "close")
        if isinstance(inner, Endpoint) and inner.decides_alone:
            raise ConfigurationError("inner: all its ranks retry together, so it needs verdict Elected, not Alone")
        arguments.methods(policy, "policy", "a policy", "again")
        self._inner = inner
        self._policy = policy
        self._options = Options() if options is None else arguments.one(options, "options", Options)
        self._clock = clock
        arguments.clock(clock, "clock")
        if observer is not None:
            arguments.methods(observer, "observer", "an observer", "span", "count")
        self._observer = Silent() if observer is None else Guarded(observer)
        self._rooms: dict[RoomId, Recovering] = {}

    def __repr__(self) -> str:
        return arguments.brief(self, lambda: f"over {self._inner!r}: {len(self._rooms)} requests")

    def open(
        self,
        room: RoomId,
        source: Source,
        *,
        tag: bytes = b"",
        total_s: float | None = None,
        claim_s: float | None = None,
    ) -> Recovering:
        """Begin a request; see :meth:`Receiver.open`.

        Args:
            room: the id of the request; its first attempt uses it, later ones have ids of :func:`attempt_id`.
            source: the prefill instance of the first attempt.
            tag: of every attempt.
            claim_s: as for a room.
            total_s: seconds for all attempts together.

        Raises:
            ConfigurationError: as for a room, or an id that is too long for later attempts.
        """
        attempt_id(room, 2)
        room = attempt_id(room, 1)
        if room in self._rooms:
            raise LocalProtocolError(f"{room_name(room)} is open already")
        total = self._options.total_s if total_s is None else arguments.seconds(total_s, "total_s")

        def begin(room: RoomId, source: Source, left_s: float) -> Reception:
            return self._inner.open(room, source, tag=tag, total_s=left_s, claim_s=claim_s)

        first = _Current(1, source, begin(room, source, total))
        made = Recovering(room, begin, self._policy, self._clock() + total, self._clock, first)
        self._rooms[room] = made
        return made

    def poll(self) -> Sequence[Recovering]:
        """Begin the attempts that are due, and return the requests whose ``phase`` or ``released`` changed.

        Raises:
            EndpointBrokenError: the endpoint cannot go on.
        """
        reported = {id(one) for one in self._inner.poll()}
        before = sum(one.attempts for one in self._rooms.values())
        changed = [one for one in list(self._rooms.values()) if one.due(reported) and one.look()]
        retried = sum(one.attempts for one in self._rooms.values()) - before
        if retried:
            self._observer.count("requests.retried", retried)
        for one in changed:
            if one.released:
                del self._rooms[one.room]
        return changed

    def peers(self) -> Sequence[PeerInfo]:
        """Return every peer that is connected or still holds memory here. Any thread may call it."""
        return self._inner.peers()

    def confirm_terminated(self, epoch: Epoch | str) -> None:
        """Declare that the process of a peer has ended: evidence that memory held for it may be reused.

        Args:
            epoch: the peer's epoch, as in :class:`~disagg_kv.endpoints.PeerInfo`; or its 32 hex digits.

        Raises:
            UnknownNameError: no such epoch is known; the message lists those that hold memory here.
        """
        self._inner.confirm_terminated(epoch)

    def close(self, drain_s: float = 5.0) -> None:
        """Abort the open requests, wait at most ``drain_s`` seconds for writes in flight, and stop; no attempt follows.

        Raises:
            TransportError: the transport could not be closed; everything else is closed.
        """
        drain_s = arguments.seconds(drain_s, "drain_s", zero=True)
        try:
            for one in self._rooms.values():
                one.abort("the endpoint closes")
        finally:
            self._inner.close(drain_s)
