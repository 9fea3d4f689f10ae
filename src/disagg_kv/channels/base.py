"""Control frames between endpoints: a mailbox with an address each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from attrs import frozen

from ..errors import ConfigurationError
from ..transports import LinkCost

MAX_FRAME = (1 << 20) + (1 << 16)
"""Bytes of the largest control frame: 1 MiB of page tables, and 64 KiB beside them."""


MAX_TOGETHER = 64
"""Frames that cross as one message at most; together they have at most MAX_FRAME bytes."""


def fit_together(frames: Sequence[bytes]) -> bool:
    """Whether frames of this number and these sizes may cross as one message."""
    return len(frames) <= MAX_TOGETHER and sum(map(len, frames)) <= MAX_FRAME


def check_frame(address: str, frame: bytes) -> None:
    """Raise a :class:`ConfigurationError` if the frame is larger than MAX_FRAME."""
    if len(frame) > MAX_FRAME:
        raise ConfigurationError(f"a frame of {len(frame)} bytes to {address}: at most {MAX_FRAME} are allowed")


def check_together(address: str, frames: Sequence[bytes]) -> None:
    """Raise a :class:`ConfigurationError` if there are no frames, or more than may cross as one message."""
    if not frames or not fit_together(frames):
        nbytes = sum(map(len, frames))
        most = f"1 to {MAX_TOGETHER} of {MAX_FRAME} bytes"
        raise ConfigurationError(f"{len(frames)} frames of {nbytes} bytes to {address}: one message takes {most}")


@frozen
class Arrived:
    """A frame arrived. The frame itself names its sender; the channel does not.

    Args:
        frame: its bytes, at most MAX_FRAME.
        key: the public key that its sender has proved to own; empty if the channel uses no keys.
    """

    frame: bytes
    key: str = ""


@frozen
class Closed:
    """The connection to ``address`` broke, or the first attempt found no listener there.

    Frames sent after it broke may be lost. Frames for a first connection are kept. The channel reconnects by itself.
    """

    address: str


@frozen
class Opened:
    """The connection to ``address`` is established, for the first time or again."""

    address: str


@frozen
class Denied:
    """Nothing can be sent to ``address``.

    Args:
        address: it.
        reason: why this channel sends nothing there; empty: one side does not allow the other's key or user.
    """

    address: str
    reason: str = ""


@frozen
class Rejected:
    """What came in and was refused before it was a frame.

    Args:
        connections: without a key, with one that is not allowed, or that were no connections of this kind.
        messages: with too many frames or too many bytes.
    """

    connections: int = 0
    messages: int = 0


News = Arrived | Closed | Opened | Denied | Rejected


class Channel(Protocol):
    """An inbox with an address, and best-effort sending to other addresses.

    A frame arrives whole and at most once, or not at all. Between two endpoints frames usually arrive in order.

    One thread at a time makes all calls except ``wait`` and ``wake``: its owner. The owner must poll regularly, because
    a frame may leave only during ``poll``. Any thread may wait meanwhile, and several at once.
    """

    @property
    def eager(self) -> bool:
        """True: a frame goes from the thread that sends to the one that waits, and no thread between them has to wake.

        An endpoint then sends what a peer waits for at once, and waits for messages where it otherwise sleeps.
        """
        ...

    @property
    def address(self) -> str:
        """Where others reach this inbox, for example ``tcp://127.0.0.1:40123``."""
        ...

    def send(self, address: str, frame: bytes) -> bool:
        """Hand a frame over; never blocks. False: it was dropped (queue full, address malformed).

        Raises:
            ConfigurationError: the frame is larger than MAX_FRAME.
        """
        ...

    def poll(self) -> Sequence[News]:
        """What came in since the last call; never blocks."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Block until ``poll`` would return something, ``wake`` was called since the last wait, or time is over.

        Any thread may call it, beside all other calls, ``close`` included. It takes nothing in: a poll by the owner may
        come before the thread that waits has noticed a message, and then it goes on waiting. It may return
        early, and is accurate to microseconds. It releases the interpreter lock. ``close`` first makes it return;
        afterwards it returns at once.
        """
        ...

    def wake(self) -> None:
        """Make a ``wait`` that goes on return, or the next one; from any thread, at any time.

        Calls of other threads meanwhile change nothing about that. Where several threads wait, one at least returns.
        """
        ...

    def forget(self, address: str) -> None:
        """Drop the connection towards an address that is no longer needed."""
        ...

    def close(self) -> None:
        """Stop; nothing is received or sent afterwards. A thread that waits returns."""
        ...


@runtime_checkable
class SupportsBatches(Protocol):
    """A channel on which a message costs more than a frame, so endpoints batch the frames for one address."""

    def send_all(self, address: str, frames: Sequence[bytes]) -> bool:
        """Hand over 1 to MAX_TOGETHER frames; they arrive in this order, or none does. Else as :meth:`Channel.send`.

        Raises:
            ConfigurationError: none, too many, or together more than MAX_FRAME bytes.
        """
        ...


@runtime_checkable
class SupportsLinkCost(Protocol):
    """A channel that knows what a peer costs it: its own connection to the peer, and the peer's to it."""

    @property
    def link_cost(self) -> LinkCost:
        """Bytes and descriptors of one peer; a constant."""
        ...


UNKNOWN_LINK = LinkCost(65_536, 5)
"""What is assumed of a channel that does not know."""
