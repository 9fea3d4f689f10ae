"""Up to when silence may be judged: what has come and was not taken in is no silence."""

from __future__ import annotations

from collections.abc import Sequence

from disagg_kv.channels import Arrived, News
from disagg_kv.channels.base import MAX_FRAME
from disagg_kv.endpoints.loop.buffers import GRACE_S, STALLED_S, ReceiveBuffer
from disagg_kv.testing import FakeClock


class Mailbox:
    """A channel that hands over what it is given, and in whose calls time passes."""

    address = "mailbox"
    eager = False

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.came: list[News] = []
        self.stops_s = 0.0

    def poll(self) -> Sequence[News]:
        """All that has come."""
        self.clock.advance(self.stops_s)
        came, self.came = self.came, []
        return came

    def send(self, address: str, frame: bytes) -> bool:
        """Nothing is sent here."""
        raise NotImplementedError

    def wait(self, timeout_s: float) -> None:
        """Time passes in ``poll`` alone."""

    def wake(self) -> None:
        """Nobody waits."""

    def forget(self, address: str) -> None:
        """Nobody is known."""

    def close(self) -> None:
        """Nothing is open."""


def raises(exc: Exception) -> None:
    """What a channel raises is not expected here."""
    raise exc


def buffer() -> tuple[ReceiveBuffer, Mailbox, FakeClock]:
    """One that has been asked at time 1."""
    clock = FakeClock()
    mailbox = Mailbox(clock)
    received = ReceiveBuffer(mailbox, raises, clock)
    clock.advance(STALLED_S)
    received.fetch()
    assert received.caught_up == clock()
    return received, mailbox, clock


def test_what_came_during_the_last_call_may_not_have_been_given() -> None:
    received, mailbox, clock = buffer()
    before = clock()
    mailbox.stops_s = STALLED_S / 2
    received.fetch()
    assert received.caught_up == before


def test_after_a_stop_a_channel_has_time_to_read_its_sockets() -> None:
    """Another thread reads them, which was stopped as well."""
    received, _, clock = buffer()
    asked = clock()
    clock.advance(10.0)
    for _ in range(2):
        received.fetch()
        assert received.caught_up == asked
        clock.advance(GRACE_S * 0.6)
    received.fetch()
    assert received.caught_up == clock()


def test_a_stop_inside_the_call_counts_as_well() -> None:
    received, mailbox, clock = buffer()
    asked = clock()
    mailbox.stops_s = 10.0
    received.fetch()
    mailbox.stops_s = 0.0
    received.fetch()
    assert received.caught_up == asked
    clock.advance(GRACE_S)
    received.fetch()
    assert received.caught_up == clock()


def test_what_is_left_or_may_be_more_than_a_call_gives_is_not_taken_in() -> None:
    received, mailbox, clock = buffer()
    asked = clock()
    clock.advance(0.1)
    mailbox.came = [Arrived(b"x" * MAX_FRAME)] * 33
    received.fetch()
    up_to = received.caught_up
    assert up_to is None
    assert len(received.left) == 33
    received.left.clear()
    assert received.caught_up == asked
    received.fetch()
    assert received.caught_up == clock()
