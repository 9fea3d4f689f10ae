"""Whoever is awake advances the loop: engines' calls alone, or beside the endpoint's thread."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast

import pytest
import torch

from disagg_kv.channels import Channel, Hub, InprocChannel, UnixChannel, ZmqChannel
from disagg_kv.core import Options, Phase
from disagg_kv.endpoints import DecodeEndpoint, Delivery, Environment, Expectation, PrefillEndpoint, Reception, room_id
from disagg_kv.geometry import CacheSpec, PageTable, shard
from disagg_kv.ids import GroupId
from disagg_kv.memory import PagedPool
from disagg_kv.rendezvous import Source, StaticRendezvous
from disagg_kv.trace import Span
from disagg_kv.transports import ShmTransport

SPEC = CacheSpec.kv(2, 2, 8, "float32")
ROWS = 32
SHORT_S, LONG_S = 0.01, 60.0
REQUESTS = int(os.environ.get("DISAGG_KV_REQUESTS", "200"))
"""Over each kind of channel, none of which a repetition or the end of a wait may repair."""


class Raising:
    """An observer that raises, in whichever thread advances."""

    def span(self, span: Span) -> None:
        """Raise."""
        raise RuntimeError("the observer")

    def count(self, name: str, amount: int = 1) -> None:
        """Raise."""
        raise RuntimeError("the observer")


class Patient:
    """A channel whose longer waits end by messages and wake-ups alone: what waits for a time instead waits for ever."""

    deaf = False
    """Nothing but messages ends a wait."""

    def __init__(self, inner: Channel) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def wake(self) -> None:
        """See :class:`Channel`."""
        if not self.deaf:
            self._inner.wake()

    def wait(self, timeout_s: float) -> None:
        """See :class:`Channel`."""
        self._inner.wait(timeout_s if timeout_s < SHORT_S else 2 * LONG_S)


class Pair:
    """A prefill and a decode endpoint with pools of their own."""

    def __init__(self, channels: Iterator[Channel], observer: Raising | None, *, threads: bool) -> None:
        where = StaticRendezvous()
        environment = Environment(thread=threads)
        options = Options(silence_s=LONG_S, total_s=LONG_S, retry_s=LONG_S)
        pools = [PagedPool.allocate(SPEC, shard(SPEC), pages=4, page_size=16) for _ in range(2)]
        self.sender = PrefillEndpoint(
            pools[0], transport=ShmTransport(), channel=next(channels), instance="P", rendezvous=where,
            strategy="staged", verify="full", options=options, environment=environment, observer=observer,
        )  # fmt: skip
        self.receiver = DecodeEndpoint(
            pools[1], transport=ShmTransport(), channel=next(channels), instance="D", rendezvous=where,
            strategy="staged", verify="full", options=options, environment=environment, observer=observer,
        )  # fmt: skip
        self.numbers = itertools.count()

    def request(self) -> tuple[Delivery, Reception]:
        """Open a room on both sides, and send all rows."""
        room, table = room_id(f"request {next(self.numbers)}"), PageTable(GroupId("kv"), [1, 2])
        delivery, reception = self.sender.open(room), self.receiver.open(room, Source("P"))
        reception.expect(Expectation(ROWS, [table]))
        delivery.send_chunk(ROWS, [table])
        delivery.finish(ROWS)
        return delivery, reception

    def until(self, done: Callable[[], bool], step: Callable[[], object]) -> None:
        """Poll, as an engine does."""
        end = time.monotonic() + LONG_S
        while not done():
            assert time.monotonic() < end
            self.sender.poll()
            self.receiver.poll()
            step()


KINDS = ("inproc", "unix", "zmq")


def channels(kind: str, folder: Path) -> Iterator[Channel]:
    """Of a kind."""
    hub = Hub()
    for number in itertools.count():
        if kind == "inproc":
            yield InprocChannel(hub, f"{number}")
        elif kind == "unix":
            yield UnixChannel(f"unix://{folder}/{number}")
        else:
            yield ZmqChannel()


@contextmanager
def pair(
    kind: str, folder: Path, observer: Raising | None = None, *, threads: bool = True, patient: bool = False
) -> Iterator[Pair]:
    """Closed afterwards."""
    found = channels(kind, folder)
    made = Pair(cast("Iterator[Channel]", map(Patient, found)) if patient else found, observer, threads=threads)
    with ExitStack() as stack:
        stack.callback(made.sender.close, 0.0)
        stack.callback(made.receiver.close, 0.0)
        yield made


@pytest.mark.parametrize("kind", KINDS)
def test_engines_alone_move_requests_without_any_thread_of_an_endpoint(kind: str, tmp_path: Path) -> None:
    before = threading.active_count()
    with pair(kind, tmp_path, threads=False) as both:
        for _ in range(3):
            delivery, reception = both.request()
            both.until(lambda d=delivery, r=reception: d.released and r.released, lambda: None)  # type: ignore[misc]
            assert (delivery.phase, reception.phase) == (Phase.DONE, Phase.DONE)
        assert threading.active_count() == before
    for endpoint in (both.sender, both.receiver):
        assert endpoint.closed


@pytest.mark.parametrize("threads", [False, True])
def test_pages_that_an_engine_takes_back_are_waited_for_on_its_own_thread(threads: bool, tmp_path: Path) -> None:
    """``synchronize`` advances the endpoint, so it cannot wait for a thread that is not there."""
    with pair("unix", tmp_path, threads=threads) as both:
        delivery, _ = both.request()
        delivery.withdraw().synchronize()
        assert delivery.phase in (Phase.CONNECTING, Phase.READY, Phase.MOVING, Phase.DONE)


@pytest.mark.parametrize("threads", [False, True])
def test_wait_lends_the_engine_s_thread_until_poll_has_something(threads: bool, tmp_path: Path) -> None:
    with pair("unix", tmp_path, threads=threads) as both:
        began = time.monotonic()
        assert not both.receiver.wait(0.05)
        assert time.monotonic() - began >= 0.05
        delivery, reception = both.request()
        ended = threading.Event()

        def prefill() -> None:
            while not ended.is_set():
                both.sender.poll()
                time.sleep(1e-4)

        engine = threading.Thread(target=prefill)
        engine.start()
        try:
            end = time.monotonic() + LONG_S
            while not reception.released and time.monotonic() < end:
                if both.receiver.wait(1.0):
                    both.receiver.poll()
            assert reception.phase is Phase.DONE
        finally:
            ended.set()
            engine.join()
        both.until(lambda: delivery.released, lambda: None)


def test_an_advance_in_inference_mode_makes_ordinary_tensors(tmp_path: Path) -> None:
    """Both endpoints go on afterwards outside that mode, and the mode of the engine's thread is what it was."""
    with pair("unix", tmp_path, threads=False) as both:
        for inside in (True, False, True):
            with torch.inference_mode(inside):
                delivery, reception = both.request()
                both.until(lambda d=delivery, r=reception: d.released and r.released, lambda: None)  # type: ignore[misc]
                assert torch.is_inference_mode_enabled() is inside
            assert reception.phase is Phase.DONE


@pytest.mark.parametrize("threads", [False, True])
def test_an_observer_that_raises_in_an_engine_s_call_changes_nothing(threads: bool, tmp_path: Path) -> None:
    with pair("unix", tmp_path, observer=Raising(), threads=threads) as both:
        delivery, reception = both.request()
        both.until(lambda: delivery.released and reception.released, lambda: None)
        assert reception.phase is Phase.DONE


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_may_poll_while_a_third_one_opens_rooms(kind: str, tmp_path: Path) -> None:
    """Threads take turns every microsecond; every room ends once, with the right outcome."""
    interval = sys.getswitchinterval()
    with pair(kind, tmp_path) as both:
        ended = threading.Event()

        def poll() -> None:
            while not ended.is_set():
                both.sender.poll()
                both.receiver.poll()

        engines = [threading.Thread(target=poll) for _ in range(2)]
        sys.setswitchinterval(1e-6)
        try:
            for engine in engines:
                engine.start()
            for _ in range(20):
                delivery, reception = both.request()
                end = time.monotonic() + LONG_S
                while not (delivery.released and reception.released):
                    assert time.monotonic() < end
                    time.sleep(1e-4)
                assert (delivery.phase, reception.phase) == (Phase.DONE, Phase.DONE)
        finally:
            sys.setswitchinterval(interval)
            ended.set()
            for engine in engines:
                engine.join()


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_stops_polling_leaves_the_rest_to_the_thread(kind: str, tmp_path: Path) -> None:
    """At any point: nothing waits for a deadline, a retry, or the end of a wait, all of which come too late here."""
    stops_polling(kind, tmp_path, (number % 60 for number in range(REQUESTS)), LONG_S / 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_that_waits_holds_up_no_call(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that poll move a request although no thread can be woken."""
    with monkeypatch.context() as deaf:
        polls_alone(kind, tmp_path, deaf, LONG_S)


def polls_alone(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, longest_s: float) -> None:
    """A request between endpoints whose threads wait for ever."""
    with pair(kind, folder, patient=True) as both:
        time.sleep(SHORT_S)  # both threads wait
        with monkeypatch.context() as deaf:
            deaf.setattr(Patient, "deaf", True)
            delivery, reception = both.request()
            end = time.monotonic() + longest_s
            while not (delivery.released and reception.released):
                assert time.monotonic() < end
                both.sender.poll()
                both.receiver.poll()


def stops_polling(kind: str, folder: Path, polls: Iterable[int], longest_s: float) -> None:
    """Requests whose engines poll so many times, and no more until the room is over."""
    with pair(kind, folder, patient=True) as both:
        for number in polls:
            delivery, reception = both.request()
            for _ in range(number):
                both.sender.poll()
                both.receiver.poll()
            end = time.monotonic() + longest_s
            while both.sender.open_rooms or both.receiver.open_rooms:
                assert time.monotonic() < end, f"after {number} polls"
                time.sleep(1e-4)
            both.sender.poll()
            both.receiver.poll()
            assert (delivery.phase, reception.phase) == (Phase.DONE, Phase.DONE)
            assert delivery.released
            assert reception.released
