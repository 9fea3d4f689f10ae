"""The measured probe: what it measures is proved byte by byte, and whatever fails has its reason and ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import msgspec
import pytest

from disagg_kv.channels import Denied, News, UnixChannel
from disagg_kv.cli import probe
from disagg_kv.cli.lanes import about
from disagg_kv.cli.probe import Answer, Ask, Bye, Check, Hello, Link, measure, serve
from disagg_kv.errors import (
    ConfigurationError,
    DisaggKVError,
    PeerLostError,
    RemoteProtocolError,
    TransportError,
)
from disagg_kv.ids import Peer, Ticket
from disagg_kv.transports import PeerLost, ShmTransport, Transport, WriteEnded, registry
from tests.support.needs import needs_nixl

SMALL = 1 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "NBYTES", SMALL)


@contextmanager
def listener(folder: Path, **options: float) -> Iterator[tuple[Link, list[BaseException]]]:
    """A link to a listening thread, and what that raised."""
    raised: list[BaseException] = []
    inbox, mine = UnixChannel(f"unix://{folder}/to"), UnixChannel(f"unix://{folder}/from")

    def run() -> None:
        try:
            serve(inbox, about("cpu"), "cpu", "", **options)
        except DisaggKVError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    link = Link(mine, inbox.address)
    try:
        yield link, raised
        link.send(Bye())
        thread.join(60.0)
        assert not thread.is_alive()
    finally:
        mine.close()
        inbox.close()


def until(raised: list[BaseException]) -> None:
    """The listener has raised something."""
    end = time.monotonic() + 60.0
    while not raised and time.monotonic() < end:
        time.sleep(0.01)


def greet(link: Link) -> None:
    link.greet(60.0, lambda: True)


@pytest.mark.parametrize("name", ["auto", "shm", pytest.param("nixl", marks=needs_nixl)])
def test_a_transport_is_measured_after_its_bytes_were_compared(tmp_path: Path, name: str) -> None:
    with listener(tmp_path) as (link, raised):
        greet(link)
        lane = measure(link, name, "cpu", "")
    assert raised == []
    assert (lane.transport, lane.error) == ("shm" if name == "auto" else name, "")
    assert 0 < len(lane.seconds) <= probe.TIMES
    assert all(seconds > 0 for seconds in lane.seconds)


class Careless(ShmTransport):
    """Writes nothing."""

    name = "careless"

    def submit(self, *_: object, **__: object) -> Ticket:
        self._events.append(WriteEnded(Ticket(1)))
        return Ticket(1)


class Failing(Careless):
    """Its writes fail."""

    name = "failing"

    def submit(self, *_: object, **__: object) -> Ticket:
        self._events.append(WriteEnded(Ticket(1), TransportError("cable is cut")))
        return Ticket(1)


class Losing(Careless):
    """It loses the peer, as it is written to."""

    name = "losing"

    def submit(self, *given: object, **__: object) -> Ticket:
        self._events.append(PeerLost(cast("Peer", given[0])))
        return Ticket(1)


class Endless(Careless):
    """Its writes do not end."""

    name = "endless"

    def submit(self, *_: object, **__: object) -> Ticket:
        return Ticket(1)


def at_one_side() -> Callable[[], Transport]:
    """A transport that starts on the thread that measures alone."""
    mine = threading.current_thread()

    def make() -> Transport:
        if threading.current_thread() is not mine:
            raise TransportError("not here")
        return ShmTransport()

    return make


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (Careless, "131072 of 131072 words are wrong"),
        (Failing, "cable is cut"),
        (Losing, "losing has lost the other side"),
        (Endless, "endless: a write did not end within 0.3 s"),
        (None, "at the other side: not here"),
    ],
)
def test_a_transport_that_fails_has_its_reason_and_the_next_is_measured(
    tmp_path: Path, factory: type[Careless] | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "other" if factory is None else factory.name
    monkeypatch.setitem(registry._registered, name, factory or at_one_side())
    with listener(tmp_path) as (link, _):
        greet(link)
        monkeypatch.setattr(probe, "WRITE_S", 0.3 if factory is Endless else 20.0)
        lane = measure(link, name, "cpu", "")
        monkeypatch.setattr(probe, "WRITE_S", 20.0)
        assert measure(link, "shm", "cpu", "").error == ""
    assert says in lane.error
    assert (lane.transport, lane.seconds) == (name, ())


def test_a_transport_that_does_not_start_here_leaves_the_other_side_ready_for_the_next(tmp_path: Path) -> None:
    with listener(tmp_path) as (link, raised):
        greet(link)
        assert "unknown transport 'pigeon'" in measure(link, "pigeon", "cpu", "").error
        assert measure(link, "shm", "cpu", "").error == ""
    assert raised == []


def test_nothing_listens(tmp_path: Path) -> None:
    link = Link(UnixChannel(f"unix://{tmp_path}/from"), f"unix://{tmp_path}/none")
    with pytest.raises(PeerLostError, match=r"nothing answers at unix:.*doctor --listen"):
        link.greet(0.3, lambda: True)
    began = time.monotonic()
    with pytest.raises(PeerLostError, match="nothing answers"):
        link.greet(60.0, lambda: False)
    assert time.monotonic() - began < 30
    link.channel.close()


def test_a_side_that_is_silent_ends_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that never comes, one that greets and says no more, one that does not answer."""
    with listener(tmp_path, first_s=0.1) as (_, raised):
        until(raised)
    assert isinstance(raised[0], PeerLostError)
    monkeypatch.setattr(probe, "ANSWER_S", 0.1)
    monkeypatch.setattr(probe, "SILENCE_S", 0.1)
    with listener(tmp_path) as (link, raised):
        greet(link)
        until(raised)
        with pytest.raises(PeerLostError, match=r"did not answer within 0\.1 s"):
            link.answer()
    assert "silent" in str(raised[0])


@pytest.mark.parametrize(("frame", "says"), [(Check(1), "unexpected Check"), (Answer(), "unexpected Answer")])
def test_a_frame_out_of_turn_ends_the_listener(tmp_path: Path, frame: Check | Answer, says: str) -> None:
    with listener(tmp_path) as (link, raised):
        greet(link)
        link.send(frame)
        link.next(time.monotonic() + 0.5)
    assert isinstance(raised[0], RemoteProtocolError)
    assert says in str(raised[0])


class Said:
    """A channel on which this comes in."""

    address = "here"

    def __init__(self, *news: News) -> None:
        self._news = news

    def wait(self, timeout_s: float) -> None:
        pass

    def poll(self) -> Sequence[News]:
        return self._news


def test_a_denial_and_junk_are_errors_that_say_what_to_do(tmp_path: Path) -> None:
    for denied, words in ((Denied("there"), "see disagg-kv keys"), (Denied("there", "no such host"), "no such host")):
        with pytest.raises(ConfigurationError, match=words):
            Link(Said(denied)).next(time.monotonic() + 1)  # type: ignore[arg-type]
    with listener(tmp_path) as (link, raised):
        greet(link)
        link.channel.send(link.to, b"junk")
        link.next(time.monotonic() + 0.5)
    assert "no frame of this version" in str(raised[0])


def test_an_answer_of_another_kind_is_refused_and_a_late_greeting_passed_over(tmp_path: Path) -> None:
    here, there = UnixChannel(f"unix://{tmp_path}/a"), UnixChannel(f"unix://{tmp_path}/b")
    link, other = Link(here, there.address), Link(there, here.address)
    other.send(Answer(about("cpu")))
    other.send(Answer(region=7))
    other.next(time.monotonic() + 0.2)
    assert link.answer().region == 7
    other.send(Ask("shm"))
    other.next(time.monotonic() + 0.2)
    with pytest.raises(RemoteProtocolError, match="unexpected Ask"):
        link.answer()
    here.close()
    there.close()


def test_frames_are_what_they_were() -> None:
    for frame in (Hello("a"), Answer(about("cpu")), Ask("shm"), Answer(None, b"x", 1, "no", 2), Check(1), Bye()):
        assert probe._DECODER.decode(msgspec.msgpack.encode(frame)) == frame
