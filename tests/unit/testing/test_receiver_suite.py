"""The conformance suite for receivers: the library's own pass, and broken ones do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from disagg_kv.core import Phase
from disagg_kv.endpoints import Fail, PeerInfo, Receiver, Reception, RecoveringReceiver
from disagg_kv.errors import DisaggKVError, LocalProtocolError
from disagg_kv.ids import Epoch, RoomId
from disagg_kv.rendezvous import Source
from disagg_kv.testing.receiver import Exchange, ReceiverSuite
from tests.support import delaying


class TestDecodeEndpoint(ReceiverSuite):
    """Itself."""

    def receiver(self, inner: Receiver) -> Receiver:
        return inner


class TestRecoveringReceiver(ReceiverSuite):
    """The library's own layer."""

    def receiver(self, inner: Receiver) -> Receiver:
        return RecoveringReceiver(inner, Fail())


class TestDelaying(ReceiverSuite):
    """One that lets rooms wait."""

    begins = delaying.MOST

    def receiver(self, inner: Receiver) -> Receiver:
        return delaying.Delaying(inner)


class Room:
    """Passes on what a room says, until a subclass of its receiver breaks that."""

    def __init__(self, inner: Reception, broken: Broken) -> None:
        self.inner = inner
        self._broken = broken

    def __getattr__(self, name: str) -> object:
        return getattr(self._broken, f"room_{name}", lambda inner: getattr(inner, name))(self.inner)


class Broken:
    """Passes on all calls, until a subclass breaks one."""

    def __init__(self, inner: Receiver) -> None:
        self.inner = inner
        self.rooms: dict[int, Reception] = {}

    def open(
        self,
        room: RoomId,
        source: Source,
        *,
        tag: bytes = b"",
        total_s: float | None = None,
        claim_s: float | None = None,
    ) -> Reception:
        made = self.inner.open(room, source, tag=tag, total_s=total_s, claim_s=claim_s)
        self.rooms[id(made)] = wrapped = cast("Reception", Room(made, self))
        return wrapped

    def poll(self) -> Sequence[Reception]:
        return [self.rooms[id(one)] for one in self.inner.poll()]

    def peers(self) -> Sequence[PeerInfo]:
        return self.inner.peers()

    def confirm_terminated(self, epoch: Epoch | str) -> None:
        self.inner.confirm_terminated(epoch)

    def close(self, drain_s: float = 5.0) -> None:
        self.inner.close(drain_s)


class TestPassing(ReceiverSuite):
    """One that breaks nothing: the others are noticed for what they break."""

    def receiver(self, inner: Receiver) -> Receiver:
        return Broken(inner)


class Hasty(Broken):
    """What has failed is released."""

    def room_released(self, inner: Reception) -> bool:
        return inner.released or inner.phase is Phase.FAILED


class Slow(Broken):
    """A room that is DONE is never released."""

    def room_released(self, inner: Reception) -> bool:
        return inner.released and inner.phase is not Phase.DONE


class Forgetful(Broken):
    """It tells of one room in a call, and forgets the others."""

    def poll(self) -> Sequence[Reception]:
        return super().poll()[:1]


class Talkative(Broken):
    """It tells of what has ended, again and again."""

    def poll(self) -> Sequence[Reception]:
        super().poll()
        return list(self.rooms.values())


class Doubling(Broken):
    """It tells of each room twice."""

    def poll(self) -> Sequence[Reception]:
        return [*(told := super().poll()), *told]


class Strange(Broken):
    """It tells of its own objects."""

    def poll(self) -> Sequence[Reception]:
        return self.inner.poll()


class Deaf(Broken):
    """It takes no abort."""

    def room_abort(self, inner: Reception) -> object:
        return lambda reason: None


class Fickle(Broken):
    """An abort makes a room that is DONE fail."""

    gone = False

    def room_abort(self, inner: Reception) -> object:
        self.gone = inner.phase is Phase.DONE
        return inner.abort

    def room_phase(self, inner: Reception) -> Phase:
        return Phase.FAILED if self.gone else inner.phase


class Patient(Broken):
    """It gives a room more time than it was asked for."""

    def open(
        self,
        room: RoomId,
        source: Source,
        *,
        tag: bytes = b"",
        total_s: float | None = None,
        claim_s: float | None = None,
    ) -> Reception:
        return super().open(room, source)


class Polite(Broken):
    """A second ``expect`` is passed over in silence."""

    def room_expect(self, inner: Reception) -> object:
        def expect(*args: object, **more: object) -> object:
            try:
                return inner.expect(*args, **more)  # type: ignore[arg-type]
            except DisaggKVError:
                return {}

        return expect


class Lax(Broken):
    """A room that is open already is given once more."""

    def open(
        self,
        room: RoomId,
        source: Source,
        *,
        tag: bytes = b"",
        total_s: float | None = None,
        claim_s: float | None = None,
    ) -> Reception:
        try:
            return super().open(room, source, tag=tag, total_s=total_s, claim_s=claim_s)
        except LocalProtocolError:
            return next(iter(self.rooms.values()))


class Blind(Broken):
    """It names no peer."""

    def peers(self) -> Sequence[PeerInfo]:
        return ()


class Careless(Broken):
    """It passes on no operator's word."""

    def confirm_terminated(self, epoch: Epoch | str) -> None:
        return


class Open(Broken):
    """Its end is not the endpoint's."""

    def close(self, drain_s: float = 5.0) -> None:
        return


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (Hasty, "test_released_waits_for_the_last_write"),
        (Slow, "test_rooms_are_carried"),
        (Forgetful, "test_poll_loses_nothing"),
        (Talkative, "test_rooms_are_carried"),
        (Doubling, "test_rooms_are_carried"),
        (Strange, "test_rooms_are_carried"),
        (Deaf, "test_a_room_that_awaits_nothing_yet_can_be_given_up"),
        (Deaf, "test_released_waits_for_the_last_write"),
        (Fickle, "test_an_end_is_final"),
        (Patient, "test_a_room_without_prefill_ends"),
        (Polite, "test_a_room_awaits_one_thing"),
        (Polite, "test_pages_that_are_not_there_are_refused"),
        (Lax, "test_what_cannot_be_opened_is_refused"),
        (Blind, "test_an_operator_confirms_an_end"),
        (Careless, "test_an_operator_confirms_an_end"),
        (Open, "test_close_ends_all_rooms"),
    ],
)
def test_a_broken_receiver_is_noticed(kind: type[Broken], test: str) -> None:
    """By the test that its fault is the subject of."""
    two = Exchange(kind, timeout_s=1.0)
    try:
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            getattr(ReceiverSuite(), test)(two)
    finally:
        two.close()


ONCE = "test_a_room_that_waits_begins_once_and_unchanged"


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (delaying.TellsOfNoAbort, "test_a_room_that_waits_can_be_given_up"),
        (delaying.LeavesWaiting, "test_close_ends_rooms_that_wait"),
        (delaying.CountsHeld, "test_a_room_that_waits_counts_no_held_rows"),
        (delaying.LosesTag, ONCE),
        (delaying.BeginsTwice, ONCE),
    ],
)
def test_a_receiver_that_delays_wrongly_is_noticed(kind: type[delaying.Delaying], test: str) -> None:
    """By the test that its fault is the subject of."""
    two = Exchange(kind, timeout_s=1.0)
    two.fill(delaying.MOST)
    try:
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            getattr(ReceiverSuite(), test)(two)
    finally:
        two.close()
