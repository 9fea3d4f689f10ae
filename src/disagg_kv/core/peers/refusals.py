"""Incarnations that cannot work with us: one of the two sides refused the other. Sans IO.

Such an incarnation is no peer. But its engine may have opened a room that ours has opened too, and one of the two sides
must tell the other that the room has failed. So frames that end a room are accepted from it, and only those.
"""

from __future__ import annotations

from collections import OrderedDict

from attrs import frozen

from ...errors import About, CapacityError, DisaggKVError, IncompatiblePeerError, TransportError
from ...ids import Epoch, peer_name
from ..wire.frames import Abort, Drained, DrainedAck, Frame, Hello, Refused, words

LINK, LINKS = "link", "links"
"""The ``field`` of a ``Refused`` whose receiver is compatible, but not connected by a transport; or there is no further
link for it."""

MAX_REFUSED = 64
"""Incarnations that are remembered. Each may have a connection, so that an answer arrives."""

AGAIN_S = 1.0
"""A side that was refused asks again after this. The other one answers an address at most this often."""


def refusal(exc: IncompatiblePeerError | CapacityError, own: Epoch, hello: Hello, address: str) -> Refused:
    """The frame by which the endpoint ``own`` at ``address`` refuses the sender of a ``Hello``."""
    if isinstance(exc, CapacityError):
        return Refused(src=own, dst=hello.src, address=address, field=LINKS, ours="", theirs=words(exc))
    field, ours, theirs = words(exc.field), words(exc.theirs), words(exc.ours)
    return Refused(src=own, dst=hello.src, address=address, field=field, ours=ours, theirs=theirs)


def error_of(refused: Refused) -> DisaggKVError:
    """What a refusal means here."""
    if refused.field == LINK:
        reason = f"the transport of the peer at {refused.address} does not reach us: {refused.theirs}"
        return TransportError(reason, address=refused.address, epoch=refused.src)
    error: DisaggKVError = IncompatiblePeerError(refused.field, refused.ours, refused.theirs)
    if refused.field == LINKS:
        error = CapacityError(refused.theirs)
    return error.about(f"peer at {refused.address}", address=refused.address, epoch=refused.src)


class Answers:
    """Whether to answer an address: at most one unsolicited ``Hello`` or ``Refused`` in ``AGAIN_S``.

    Args:
        most: addresses that are remembered.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._answered: OrderedDict[str, float] = OrderedDict()

    def may(self, address: str, now: float) -> bool:
        """Whether to answer now; True counts as an answer."""
        if now - self._answered.get(address, -AGAIN_S) < AGAIN_S:
            return False
        self._answered[address] = now
        self._answered.move_to_end(address)
        while len(self._answered) > self._most:
            self._answered.popitem(last=False)
        return True


ENDINGS = (Abort, Drained, DrainedAck)
"""Frames that end a room."""


@frozen
class RefusedIncarnation:
    """One of them.

    Args:
        epoch: its incarnation.
        address: where it is.
        name: of it, for messages.
        who: what is known of it, for attributes of errors.
        error: the reason, as an error of this side.
        refused_us_at: when it refused us; None: we refused it.
    """

    epoch: Epoch
    address: str
    name: str
    who: About
    error: DisaggKVError
    refused_us_at: float | None = None

    @classmethod
    def of_hello(cls, hello: Hello, error: DisaggKVError) -> RefusedIncarnation:
        """We refuse the sender of a ``Hello``."""
        return cls(Epoch(hello.src), hello.address, hello.name, hello.who, error)

    @classmethod
    def of_refused(cls, refused: Refused, error: DisaggKVError, now: float) -> RefusedIncarnation:
        """The sender of a ``Refused`` refuses us."""
        epoch, address = Epoch(refused.src), refused.address
        who: About = {"epoch": epoch, "address": address}
        return cls(epoch, address, f"peer {peer_name(epoch)} at {address}", who, error, now)


class Refusals:
    """The last of these incarnations, at most one per address."""

    def __init__(self) -> None:
        self._at: OrderedDict[str, RefusedIncarnation] = OrderedDict()

    def add(self, incarnation: RefusedIncarnation) -> str | None:
        """Remember an incarnation; returns an address at which none is remembered any more for it, if there is one."""
        before, left = self.get(incarnation.epoch), None
        if before is not None and before.address != incarnation.address:
            left = before.address
            self.discard(left)
        self.discard(incarnation.address)
        self._at[incarnation.address] = incarnation
        if len(self._at) > MAX_REFUSED:
            left, _ = self._at.popitem(last=False)
        return left

    def discard(self, address: str) -> None:
        """Forget the incarnation at an address: one that can work with us is there."""
        self._at.pop(address, None)

    def get(self, epoch: Epoch) -> RefusedIncarnation | None:
        """The entry of an incarnation; None: it is none of them, or forgotten."""
        return next((incarnation for incarnation in self._at.values() if incarnation.epoch == epoch), None)

    def at(self, address: str) -> RefusedIncarnation | None:
        """The incarnation at an address that cannot work with us; None: there is none."""
        return self._at.get(address)

    def still(self, address: str, now: float) -> DisaggKVError | None:
        """Why the endpoint at an address refused us, if that was a moment ago."""
        incarnation = self.at(address)
        if incarnation is None or incarnation.refused_us_at is None or now - incarnation.refused_us_at >= AGAIN_S:
            return None
        return incarnation.error

    def ends_a_room(self, frame: Frame) -> bool:
        """Whether a frame is from one of these incarnations, and ends a room."""
        return isinstance(frame, ENDINGS) and self.get(Epoch(frame.src)) is not None
