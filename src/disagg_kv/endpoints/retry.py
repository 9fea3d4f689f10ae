"""What becomes of a request whose prefill fails it: it fails too, or another prefill sends it.

A layer over a :class:`Receiver`, for its engine's thread alone. The endpoints below know nothing of it: each attempt is
a life of the same room, and begins only when the one before has released the pages, so a late write of the old prefill
never meets what the new one sends. An attempt awaits all rows from the prefix that the engine holds on; what of them an
earlier one had landed is written again. All ranks of a decode instance see the same outcome of each attempt; a policy
that decides by what every rank knows alike keeps them together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Protocol

from attrs import define, field, frozen

from .. import arguments
from ..errors import AbortedError, DeadlineError, DisaggKVError, LocalProtocolError
from ..ids import Epoch, GroupId, RoomId
from ..protocol import Options, Phase
from ..protocol.machine import ours
from ..rendezvous import Source
from .api import PeerInfo, Receiver, Reception, Report
from .expectation import Expectation


@frozen
class Attempt:
    """One life of a room that failed.

    Args:
        room: which.
        number: 1 for the first.
        source: the prefill instance that did not deliver.
        error: why, as this rank has it; other ranks of the instance may have another.
    """

    room: RoomId
    number: int
    source: Source
    error: DisaggKVError


class Recovery(Protocol):
    """The engine's policy."""

    def again(self, failed: Attempt) -> Source | None:
        """Where the room is to be sent from now; None: it fails. Called once for each failed attempt; must not block.

        Whoever is named must have been given the request, or be about to be: this says nothing to prefill. It may be
        the same instance. Asked at once when an attempt fails, so that prefill can compute while pages come back. What
        it raises ends the room.
        """
        ...


class Fail:
    """The first failure is the room's."""

    def again(self, failed: Attempt) -> None:
        """Never."""


class Retry:
    """Up to so many attempts, each at the next of the sources.

    Whatever the error is, as ranks of one instance must decide alike and have different errors. So a room whose held
    prefix has changed fails in every attempt; it takes a new room, with a new claim, to await what was held.

    Args:
        place: hands the request to a prefill instance other than those in the attempt, and tells which; None: none is
            left.
        attempts: in all, at least 1.
    """

    def __init__(self, place: Callable[[Attempt], Source | None], attempts: int = 3) -> None:
        arguments.function(place, "place")
        self._place = place
        self._attempts = arguments.count(attempts, "attempts", least=1)

    def again(self, failed: Attempt) -> Source | None:
        """See :class:`Recovery`."""
        return self._place(failed) if failed.number < self._attempts else None


@define(eq=False)
class _Life:
    """The present attempt."""

    number: int
    source: Source
    reception: Reception
    following: Source | None = None
    asked: bool = False


@define(eq=False)
class Recovering:
    """A room over all its attempts; a :class:`Reception`."""

    _open: Callable[[Source, float], Reception]
    _policy: Recovery
    _until: float
    _clock: Callable[[], float]
    _life: _Life
    _expected: Expectation | None = field(default=None, init=False)
    _error: DisaggKVError | None = field(default=None, init=False)
    _aborted: bool = field(default=False, init=False)
    _seen: tuple[Phase, bool] = field(default=(Phase.CONNECTING, False), init=False)

    @property
    def room(self) -> RoomId:
        """Its id, the same in each attempt."""
        return self._life.reception.room

    @property
    def attempts(self) -> int:
        """How many have begun."""
        return self._life.number

    @property
    def source(self) -> Source:
        """Where the present attempt is sent from."""
        return self._life.source

    @property
    def phase(self) -> Phase:
        """The present attempt's; CONNECTING while the next is to begin."""
        phase = self._life.reception.phase
        if phase is Phase.FAILED and self._error is None:
            return Phase.CONNECTING
        return phase

    @property
    def released(self) -> bool:
        """True, for good: no attempt follows, and nobody touches the pages any more."""
        life = self._life
        return life.reception.released and (life.reception.phase is not Phase.FAILED or self._error is not None)

    @property
    def error(self) -> DisaggKVError | None:
        """Why the last attempt failed; None while another is to come."""
        return self._error

    @property
    def report(self) -> Report:
        """What the present attempt cost so far."""
        return self._life.reception.report

    def expect(self, expectation: Expectation) -> Mapping[GroupId, int]:
        """See :meth:`Reception.expect`; every attempt awaits the same rows in the same pages."""
        if self._expected is not None:
            raise LocalProtocolError(f"room {self.room.hex()}: expect was called already")
        taken = self._life.reception.expect(expectation)
        self._expected = expectation
        return taken

    def abort(self, reason: str) -> None:
        """See :meth:`Handle.abort`; no attempt follows."""
        arguments.one(reason, "reason", str)
        self._aborted = True
        if self._life.reception.phase is Phase.FAILED and self._error is None:
            self._error = AbortedError(f"room {self.room.hex()}: {reason}")
        self._life.reception.abort(reason)

    def due(self, told: Container[int]) -> bool:
        """Whether to look at the room: what has ended well waits until the endpoint has told of it."""
        return self.phase is not Phase.DONE or id(self._life.reception) in told

    def look(self) -> bool:
        """Go on where an attempt has failed; True if the engine should look at the room."""
        life = self._life
        if life.reception.phase is Phase.FAILED and self._error is None:
            self._after(life)
        now = (self.phase, self.released)
        changed, self._seen = now != self._seen, now
        return changed

    def _after(self, life: _Life) -> None:
        error = life.reception.error
        assert error is not None
        left = self._until - self._clock()
        if not life.asked:
            life.asked = True
            if not self._aborted and left > 0:
                try:
                    life.following = self._policy.again(Attempt(self.room, life.number, life.source, error))
                except Exception as exc:
                    # A policy is somebody else's code: its errors end this room alone, and the others are still told.
                    self._error = ours(exc, f"room {self.room.hex()}: the policy failed after attempt {life.number}")
                    return
        if self._aborted or life.following is None:
            self._error = error
        elif left <= 0:
            self._error = DeadlineError(
                f"room {self.room.hex()}: its time was over before attempt {life.number + 1} could begin: {error}"
            )
        elif life.reception.released:
            try:
                following = self._open(life.following, left)
            except DisaggKVError as exc:
                self._error = exc
                return
            self._life = _Life(life.number + 1, life.following, following)
            if self._expected is not None:
                try:
                    following.expect(self._expected)
                except LocalProtocolError:
                    # The endpoint was closed meanwhile, and its last act is to fail the attempt.
                    self._aborted = True


class RecoveringReceiver:
    """A receiver whose rooms may be sent again; a :class:`Receiver`.

    Call ``poll`` regularly, as of any receiver: attempts begin there.

    Args:
        inner: the endpoint; this layer owns its ``poll`` from now on.
        policy: what to do when an attempt fails.
        options: the endpoint's, for the time that a room has in all.
        clock: the endpoint's.
    """

    def __init__(
        self,
        inner: Receiver,
        policy: Recovery,
        *,
        options: Options | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        arguments.methods(inner, "inner", "a receiver", "open", "poll", "confirm_terminated", "close")
        arguments.methods(policy, "policy", "a policy", "again")
        self._inner = inner
        self._policy = policy
        self._options = Options() if options is None else arguments.one(options, "options", Options)
        self._clock = clock
        arguments.clock(clock, "clock")
        self._rooms: dict[RoomId, Recovering] = {}

    def open(
        self, room: RoomId, source: Source, *, silence_s: float | None = None, total_s: float | None = None
    ) -> Recovering:
        """See :meth:`Receiver.open`; ``total_s`` is the room's time over all attempts."""
        room = RoomId(arguments.room_id(room))
        if room in self._rooms:
            raise LocalProtocolError(f"room {room.hex()} is open already")
        total = self._options.total_s if total_s is None else arguments.seconds(total_s, "total_s")

        def begin(source: Source, left_s: float) -> Reception:
            return self._inner.open(room, source, silence_s=silence_s, total_s=left_s)

        first = _Life(1, source, begin(source, total))
        made = self._rooms[room] = Recovering(begin, self._policy, self._clock() + total, self._clock, first)
        return made

    def poll(self) -> Sequence[Recovering]:
        """See :meth:`Receiver.poll`."""
        told = {id(one) for one in self._inner.poll()}
        changed = [one for one in list(self._rooms.values()) if one.due(told) and one.look()]
        for one in changed:
            if one.released:
                del self._rooms[one.room]
        return changed

    def peers(self) -> Sequence[PeerInfo]:
        """See :meth:`Receiver.peers`."""
        return self._inner.peers()

    def confirm_terminated(self, epoch: Epoch | str) -> None:
        """See :meth:`Receiver.confirm_terminated`."""
        self._inner.confirm_terminated(epoch)

    def close(self, drain_s: float = 5.0) -> None:
        """See :meth:`Receiver.close`; no attempt follows."""
        drain_s = arguments.seconds(drain_s, "drain_s", zero=True)
        try:
            for one in self._rooms.values():
                one.abort("the endpoint closes")
        finally:
            self._inner.close(drain_s)
