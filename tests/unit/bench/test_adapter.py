"""``bench adapter`` checks bytes, takes the library's call and the transport in turns, and names what fails."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import attrs
import pytest

from bench import adapter
from bench import raw as raws
from bench.__main__ import run
from bench.adapter import run_adapter
from disagg_kv.errors import ConfigurationError, DeadlineError, DisaggKVError, IntegrityError, TransportError
from disagg_kv.ids import Peer, Ticket
from disagg_kv.memory import Buffer, Event
from disagg_kv.planning import Writes
from disagg_kv.testing import Fault, FaultyTransport
from disagg_kv.transports import InprocTransport, registry
from tests.support.needs import needs_mooncake, needs_nixl

LONG_S = 120.0


class Plain:
    """A library of this process: its call copies."""

    pause_s: float | None = 0.001
    fades = False

    def __init__(self, memory: Buffer, name: str) -> None:
        self.name = name
        self._memory = memory
        self._calls = 0

    def target(self) -> raws.Target:
        return raws.Target(self.name.encode(), self._memory.addr)

    def prepare(self, target: raws.Target, nbytes: int) -> Callable[[], None]:
        assert target.handle == b"raw-target"

        def write() -> None:
            self._calls += 1
            if not self.fades or self._calls == 1:
                ctypes.memmove(target.addr, self._memory.addr, nbytes)

        return write

    def work(self) -> None:
        """Nothing."""


class Fading(Plain):
    """Its first call copies, and no other."""

    fades = True


class Careless(InprocTransport):
    """Loses all and says that all is well."""

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        return super().submit(peer, attrs.evolve(writes, nbytes=0 * writes.nbytes))


class Forgetful(InprocTransport):
    """Writes once, and then loses all."""

    wrote = False

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        kept, self.wrote = attrs.evolve(writes, nbytes=0 * writes.nbytes) if self.wrote else writes, True
        return super().submit(peer, kept)


class Thread(threading.Thread):
    """A target that cannot be killed, and need not be."""

    def kill(self) -> None:
        """Nothing."""


class Threads:
    """Makes targets in this process; their ends of the pipes stay open when the other side's copies are closed."""

    def Pipe(self) -> tuple[Connection, Connection]:  # noqa: N802
        """As multiprocessing names it."""
        ours, theirs = Pipe()
        return ours, theirs

    def Process(self, *, target: Callable[..., None], args: tuple[object, ...], daemon: bool) -> Thread:  # noqa: N802
        """As multiprocessing names it."""
        pipe, *rest = args
        assert isinstance(pipe, Connection)
        own = Connection(os.dup(pipe.fileno()))
        return Thread(target=target, args=(own, *rest), daemon=daemon)


@pytest.mark.parametrize(
    "name", [pytest.param("nixl", marks=needs_nixl), pytest.param("mooncake", marks=needs_mooncake)]
)
def test_the_library_and_the_transport_write_in_turns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Both sizes, both ways, in one run on the real library."""
    assert run(["adapter", "--transport", name, "--small", "5", "--large", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["transport"]) == (True, name)
    assert [(size["nbytes"], size["writes"]) for size in found["sizes"]] == [(64 << 10, 5), (16 << 20, 2)]
    for size in found["sizes"]:
        assert size["raw"]["p50"] > 0 < size["adapter"]["p50"]
        assert size["overhead_share"] == pytest.approx(size["overhead_s"] / size["raw"]["p50"])
    assert found["machine"]["cores"] >= 1


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'inproc' has no library behind it to compare with: nixl, mooncake"):
        run_adapter("inproc", {10: 1})
    for writes in ({}, {0: 1}, {10: 0}):
        with pytest.raises(ConfigurationError, match="positive"):
            run_adapter("nixl", writes)


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport within this process whose library does nothing, and its target in a thread."""
    monkeypatch.setitem(raws._RAW, "inproc", Plain)
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: Threads())


def test_bytes_that_do_not_arrive_have_no_speed(serving: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(raws._RAW, "careless", Plain)
    monkeypatch.setitem(registry._registered, "careless", Careless)
    with pytest.raises(IntegrityError, match="transport of 'careless': 100 bytes did not arrive"):
        run_adapter("careless", {100: 1}, LONG_S)


@pytest.mark.parametrize(
    ("what", "library", "made"), [("library", Fading, InprocTransport), ("transport", Plain, Forgetful)]
)
def test_a_write_that_moves_nothing_after_the_first_is_found(
    serving: None, what: str, library: type[Plain], made: type[InprocTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of an earlier write is left at the target, and both ways are looked at."""
    monkeypatch.setitem(raws._RAW, "fading", library)
    monkeypatch.setitem(registry._registered, "fading", made)
    with pytest.raises(IntegrityError, match=f"{what} of 'fading': 100 bytes"):
        run_adapter("fading", {100: 3}, LONG_S)


def test_both_ways_are_measured_where_all_bytes_arrive(serving: None) -> None:
    (size, large) = run_adapter("inproc", {100: 3, 1000: 2}, LONG_S).sizes
    assert (size.nbytes, size.writes, large.nbytes, large.writes) == (100, 3, 1000, 2)


@pytest.mark.parametrize(
    ("fault", "within_s", "error"), [(Fault.REFUSED, LONG_S, TransportError), (Fault.HUNG, 1.0, DeadlineError)]
)
def test_a_write_that_fails_or_hangs_ends_the_run(
    serving: None, fault: Fault, within_s: float, error: type[DisaggKVError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(raws._RAW, "faulty", Plain)
    monkeypatch.setitem(registry._registered, "faulty", lambda: FaultyTransport(InprocTransport(), lambda _: fault))
    with pytest.raises(error):
        run_adapter("faulty", {100: 1}, within_s)


def test_a_target_that_cannot_begin_tells_why(serving: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(memory: Buffer, name: str) -> Plain:
        if name == "raw-target":
            raise ConfigurationError("no room here")
        return Plain(memory, name)

    monkeypatch.setitem(raws._RAW, "inproc", refuse)
    with pytest.raises(ConfigurationError, match="no room here"):
        run_adapter("inproc", {100: 1}, LONG_S)


def test_a_target_that_does_not_begin_is_not_awaited_for_ever(serving: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "serve", lambda pipe, *_: pipe.poll(5.0))
    with pytest.raises(DeadlineError, match=r"does not start within 0\.1 s"):
        run_adapter("inproc", {100: 1}, 0.1)
