"""An endpoint that is closed in the middle of a call, as a signal handler does, and a ``close`` that is interrupted."""

from __future__ import annotations

import linecache
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING

import pytest
from attrs import define, field

from disagg_kv.channels import InprocChannel
from disagg_kv.core import Phase
from disagg_kv.endpoints import Expectation, Fail, PrefillEndpoint, RecoveringReceiver
from disagg_kv.endpoints.decode.handle import ReceptionHandle
from disagg_kv.endpoints.handle import ChangeQueue, RoomHandle
from disagg_kv.endpoints.latch import Latch
from disagg_kv.endpoints.prefill.handle import DeliveryHandle
from disagg_kv.errors import (
    AbortedError,
    DisaggKVError,
    EndpointBrokenError,
    LocalProtocolError,
    TransportError,
)
from disagg_kv.geometry import CacheSpec, PageTable
from disagg_kv.ids import Epoch, LayerId, RoomId, Ticket
from disagg_kv.rendezvous import Source
from disagg_kv.transports import InprocTransport, PeerLost, Settled, WriteEnded
from tests.support.processes import wait
from tests.support.rig import KV, Memory, Rig, tp_shards

if TYPE_CHECKING:
    from _typeshed import TraceFunction

SPEC = CacheSpec.kv(2, 2, 8, "float16")
OPEN = RoomId(b"open")
NEW = RoomId(b"new")


def _rig() -> Rig:
    rig = Rig(SPEC, threaded=True)
    rig.prefill(tp_shards(SPEC, 1))
    rig.decode(tp_shards(SPEC, 1))
    return rig


@define
class Interruption:
    """Runs ``act`` once, before a line of a call, on the thread that makes the call; as a signal handler runs.

    Args:
        act: what runs.
        after: how many other lines of the library, and of what it uses, run before; each counts once.
        raises: ``act`` raises. Then lines of the library alone count, and none that begins or ends a ``with`` block or
            gives a turn back: between the end of a block and such a line the interpreter looks for no signal.
    """

    act: Callable[[], object]
    after: int
    raises: bool = False
    lines: set[tuple[str, int]] = field(factory=set, init=False)
    done: bool = field(default=False, init=False)

    def during(self, call: Callable[[], object]) -> None:
        """Make the call."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            call()
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: object) -> TraceFunction | None:
        name = frame.f_code.co_filename
        parts = ("disagg_kv",) if self.raises else ("disagg_kv", "threading.py", "queue.py")
        if not any(part in name for part in parts) or "/tests/" in name:
            return None
        text = linecache.getline(name, frame.f_lineno).lstrip()
        skipped = self.raises and text.startswith(("with ", "finally:", "claim.over = True"))
        if event == "line" and not self.done and not skipped:
            self.lines.add((name, frame.f_lineno))
            if len(self.lines) == self.after + 1:
                self.done = True
                self.act()
        return self._trace


@define
class Case:
    """Endpoints with a room each, and the calls that are interrupted."""

    rig: Rig
    send: DeliveryHandle
    receive: ReceptionHandle
    opened: list[DeliveryHandle | ReceptionHandle] = field(factory=list)

    @classmethod
    def made(cls) -> Case:
        """With one open room on each side."""
        rig = _rig()
        send, receive = rig.prefills[0].endpoint.open(OPEN), rig.decodes[0].endpoint.open(OPEN, Source("nowhere"))
        return cls(rig, send, receive)

    def close(self) -> None:
        """Both endpoints."""
        for member in self.rig.members:
            member.endpoint.close(0.0)

    def open_prefill(self) -> None:
        """A second room."""
        self.opened.append(self.rig.prefills[0].endpoint.open(NEW))

    def open_decode(self) -> None:
        """A second room."""
        self.opened.append(self.rig.decodes[0].endpoint.open(NEW, Source("nowhere")))

    def send_chunk(self) -> None:
        """Rows."""
        self.send.send_chunk(4, [PageTable(KV, [0])])

    def finish(self) -> None:
        """The end of a room without rows."""
        self.send.finish(0)

    def withdraw(self) -> None:
        """The event happens, or says that it will not."""
        event = self.send.withdraw()
        with suppress(AbortedError):
            event.synchronize()

    def abort(self) -> None:
        """Both sides."""
        self.send.abort("the test")
        self.receive.abort("the test")

    def expect(self) -> None:
        """Rows."""
        self.receive.expect(Expectation(4, [PageTable(KV, [0])]))

    def forward_pass(self) -> None:
        """All its calls."""
        step = self.rig.prefills[0].endpoint.step({OPEN: (4, [PageTable(KV, [0])])})
        step.layer_ready(LayerId(0))
        step.close()

    def poll(self) -> None:
        """Until the ends of both rooms are told, if anything ends them."""
        self.rig.prefills[0].endpoint.poll()
        self.rig.decodes[0].endpoint.poll()

    def peers(self) -> None:
        """Both sides."""
        for member in self.rig.members:
            member.endpoint.peers()

    def confirm(self) -> None:
        """Of a peer that is not known."""
        with suppress(DisaggKVError):
            self.rig.prefills[0].endpoint.confirm_terminated(Epoch(bytes(16)))

    def recover(self) -> None:
        """A layer above."""
        receiver = RecoveringReceiver(self.rig.decodes[0].endpoint, Fail())
        receiver.open(NEW, Source("nowhere"))
        receiver.poll()
        receiver.close(0.0)

    def close_twice(self) -> None:
        """The interrupted call is ``close`` too."""
        self.close()
        self.close()


CALLS: Sequence[Callable[[Case], None]] = (
    Case.open_prefill, Case.open_decode, Case.send_chunk, Case.finish, Case.withdraw, Case.abort, Case.expect,
    Case.forward_pass, Case.poll, Case.peers, Case.confirm, Case.recover, Case.close_twice,
)  # fmt: skip


STRIDE = 4
"""Calls share most lines, as each advances its endpoint: each is interrupted at every fourth, from another one on."""


def lines_of(call: Callable[[Case], None]) -> Iterator[int]:
    """Before which of the lines of a call it is interrupted, one after the other."""
    return count(CALLS.index(call) % STRIDE, STRIDE)


def _interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_handler_may_close_wherever_it_interrupts_a_call(call: Callable[[Case], None]) -> None:
    """Before a line of a call: ``close`` returns, the call returns or is refused, and all rooms have ended."""
    for after in lines_of(call):
        case = Case.made()
        interruption = Interruption(case.close, after)
        with suppress(LocalProtocolError):
            interruption.during(partial(call, case))
        case.close()
        for handle in (case.send, case.receive, *case.opened):
            assert (handle.phase, handle.released) == (Phase.FAILED, True)
            assert isinstance(handle.error, AbortedError)
        case.poll()
        if not interruption.done:
            break
    assert after > STRIDE


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_call_that_an_exception_ends_anywhere_loses_no_room(call: Callable[[Case], None]) -> None:
    """The endpoint goes on, or breaks by name; ``close`` returns, and both rooms have ended.

    What a broken endpoint reads and writes is not known, so it releases no pages. A room that was about to fail has its
    own reason.
    """
    for after in lines_of(call):
        case = Case.made()
        interruption = Interruption(_interrupt, after, raises=True)
        with suppress(KeyboardInterrupt, LocalProtocolError, EndpointBrokenError):
            interruption.during(partial(call, case))
        case.close()
        for handle in (case.send, case.receive):
            assert handle.phase is Phase.FAILED
            assert isinstance(handle.error, AbortedError if handle.released else AbortedError | EndpointBrokenError)
        if not interruption.done:
            break
    assert after > STRIDE


def test_a_signal_that_comes_while_a_room_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing: the handler closes the endpoint before the room is queued, and the room is refused."""
    rig = _rig()
    endpoint = rig.prefills[0].endpoint
    post = endpoint.driver.loop.post

    def interrupted(command: Callable[[], None]) -> None:
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGTERM)
        post(command)

    before = signal.signal(signal.SIGTERM, lambda *_: endpoint.close(0.1))
    try:
        monkeypatch.setattr(endpoint.driver.loop, "post", interrupted)
        with pytest.raises(LocalProtocolError, match="the endpoint is closed"):
            endpoint.open(NEW)
    finally:
        signal.signal(signal.SIGTERM, before)
    rig.close()


def test_a_handler_may_poll_wherever_it_interrupts_a_poll() -> None:
    """Each change is told once, by one of the two."""
    after = 0
    while True:
        changes: ChangeQueue[RoomHandle] = ChangeQueue()
        handles = [RoomHandle(RoomId(b"%d" % number)) for number in range(5)]
        told: list[RoomHandle] = []
        for handle in handles:
            handle.publish((Phase.DONE, True), None, 1.0)
            changes.add(handle)

        def poll(changes: ChangeQueue[RoomHandle] = changes, told: list[RoomHandle] = told) -> None:
            told += changes.take()

        interruption = Interruption(poll, after)
        interruption.during(poll)
        while changes:
            poll()
        assert sorted(handle.room for handle in told) == [handle.room for handle in handles]
        if not interruption.done:
            break
        after += 1
    assert after > 3


class Interrupted(Exception):  # noqa: N818  (as KeyboardInterrupt is named)
    """What the handler raises."""


def _raise() -> None:
    raise Interrupted


def test_a_close_that_was_interrupted_can_be_repeated() -> None:
    """Wherever an exception ends it, every room ends; a second ``close`` waits for that."""
    after = 0
    while True:
        case = Case.made()
        interruption = Interruption(_raise, after)
        with suppress(Interrupted):
            interruption.during(partial(case.rig.prefills[0].endpoint.close, 0.0))
        case.rig.prefills[0].endpoint.close(0.0)
        assert (case.send.phase, case.send.released) == (Phase.FAILED, True)
        assert case.send in case.rig.prefills[0].endpoint.poll()
        InprocChannel(case.rig.hub, "P0").close()
        case.close()
        if not interruption.done:
            break
        after += 1
    assert after > 3


@define
class Closing:
    """An event that closes the endpoint which asks it."""

    endpoint: PrefillEndpoint

    def query(self) -> bool:
        """Close it."""
        self.endpoint.close(0.0)
        return True

    def synchronize(self) -> None:
        """It has happened."""


@pytest.mark.parametrize("threaded", [True, False])
def test_code_that_an_advance_calls_may_close_the_endpoint(threaded: bool) -> None:
    """It returns at once, and the endpoint closes when the advance has ended; the next ``close`` waits for that."""
    rig = Rig(SPEC, threaded=threaded)
    endpoint = rig.prefill(tp_shards(SPEC, 1))[0].endpoint

    handle, other = endpoint.open(OPEN), endpoint.open(NEW)
    with suppress(LocalProtocolError):  # where this call itself advances the endpoint
        handle.finish(0, ready=Closing(endpoint))
    if threaded:
        rig.until(lambda: endpoint.closed, "the close")
    else:
        rig.turn()
    assert endpoint.closed
    endpoint.close(0.0)
    for one in (handle, other):
        assert (one.phase, one.released) == (Phase.FAILED, True)
        assert isinstance(one.error, AbortedError)
    rig.close()


class Failing(InprocTransport):
    """Its ``close`` raises, once it has done its work."""

    def close(self, drain_s: float) -> Sequence[Ticket]:
        """Raise."""
        super().close(drain_s)
        raise RuntimeError("the library says no")


@pytest.mark.parametrize("threaded", [True, False])
def test_a_transport_that_cannot_be_closed_keeps_nothing_else_open(threaded: bool) -> None:
    """The error is told once, with its cause; the address is free, watches are gone, and rooms have ended."""
    rig = Rig(SPEC, threaded=threaded)
    endpoint = rig.prefill(tp_shards(SPEC, 1), memory=Memory(transport=Failing))[0].endpoint
    handle = endpoint.open(OPEN)
    with pytest.raises(TransportError, match=r"endpoint P/0: .*the library says no") as raised:
        endpoint.close(0.0)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert handle.phase is Phase.FAILED
    InprocChannel(rig.hub, "P0").close()
    endpoint.close(0.0)


class NeverQuiet(InprocTransport):
    """Nothing is ever said of a write that has ended."""

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        """What is said of peers alone."""
        return [event for event in super().poll() if isinstance(event, PeerLost)]


@pytest.mark.parametrize("again", [False, True])
def test_a_withdrawal_does_not_outlast_its_endpoint(again: bool) -> None:
    """Where reads are not proven quiet when it closes, the event says so; the pages stay unreleased."""
    rig = Rig(SPEC, threaded=True)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=Memory(transport=NeverQuiet), strategy="direct")
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="direct")
    request = rig.request("room", prefills, decodes, 12)
    request.open_decode().expect(12).open_prefill().send(12)
    rig.until(lambda: bool(request.sends[0].report.descriptors), "a write")
    fired = [request.sends[0].withdraw() for _ in range(1 + again)]
    prefills[0].endpoint.close(0.0)
    for event in fired:
        for look in (event.query, event.synchronize):
            with pytest.raises(AbortedError, match="endpoint P/0 has closed"):
                look()
    assert not request.sends[0].released
    rig.close()


def test_a_recovering_receiver_closes_a_broken_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rooms have failed already: to abort them is harmless, and the address is free afterwards."""
    rig = _rig()
    endpoint = rig.decodes[0].endpoint
    receiver = RecoveringReceiver(endpoint, Fail())
    room = receiver.open(OPEN, Source("nowhere"))
    send = rig.prefills[0].endpoint.open(OPEN)
    for member in rig.members:
        monkeypatch.setattr(member.endpoint.driver.loop.side, "integrity_failure", lambda error: _raise())
        member.endpoint.driver.loop.post(_raise)
    rig.until(lambda: all(member.endpoint.driver.broken is not None for member in rig.members), "the ends")
    rig.until(lambda: room._current.reception.phase is Phase.FAILED and send.phase is Phase.FAILED, "the rooms' ends")
    send.abort("the test")
    room.abort("the test")
    receiver.close(0.0)
    rig.prefills[0].endpoint.close(0.0)
    for name in ("D0", "P0"):
        InprocChannel(rig.hub, name).close()
    assert isinstance(send.error, EndpointBrokenError)


def test_a_recovering_receiver_closes_its_endpoint_whatever_a_room_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the room is told."""
    rig = _rig()
    endpoint = rig.decodes[0].endpoint
    receiver = RecoveringReceiver(endpoint, Fail())
    room = receiver.open(OPEN, Source("nowhere"))
    monkeypatch.setattr(room._current.reception, "abort", lambda reason: _raise())
    with pytest.raises(Interrupted):
        receiver.close(0.0)
    assert endpoint.driver.closed
    InprocChannel(rig.hub, "D0").close()
    rig.close()


def test_many_threads_wait_for_one_latch() -> None:
    """All of them go on, and one that comes later does not wait."""
    latch = Latch()
    threads = [threading.Thread(target=latch.wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert not latch.is_set
    latch.set()
    latch.set()
    latch.wait()
    wait(lambda: not any(thread.is_alive() for thread in threads), lambda: "the threads")
    assert latch.is_set
