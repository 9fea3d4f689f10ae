"""Ranks that fail, die or hang end a benchmark with their name; a check that cannot fail would prove nothing."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
import time
from collections import Counter
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from bench import TransferShape, bulk, machine, ranks, run_transfer
from bench.data import fill, page_ids, poison, wrong
from bench.engine import between_polls, wait_until
from bench.rank import _portable
from bench.ranks import Ranks
from disagg_kv.endpoints import DecodeEndpoint, PrefillEndpoint
from disagg_kv.endpoints.decode.handle import ReceptionHandle
from disagg_kv.errors import (
    ConfigurationError,
    DeadlineError,
    DisaggKVError,
    IncompatiblePeerError,
    IntegrityError,
    PeerLostError,
)
from disagg_kv.ids import RoomId
from disagg_kv.memory import PagedPool
from disagg_kv.testing import Fault, FaultyTransport
from disagg_kv.transports import InprocTransport, registry
from tests.support.rig import Rig, tp_shards

SMALL = TransferShape(
    transport="inproc",
    prefill_tp=1,
    tokens=20,
    layers=2,
    kv_heads=2,
    head_dim=8,
    page_size=8,
    decode_page_size=8,
    repeats=1,
    timeout_s=120.0,
)


@pytest.fixture
def ends() -> tuple[Ranks, Connection]:
    """One rank, and its end of the pipe."""
    ours, theirs = multiprocessing.Pipe()
    return Ranks("decode", [ours], 0.0), theirs


def test_the_check_sees_each_wrong_byte_inside_and_outside_the_request() -> None:
    ids = page_ids(SMALL, "decode", 0)
    pool = PagedPool.allocate(SMALL.spec(), SMALL.shards("decode")[0], pages=len(ids) + 2, page_size=8)
    poison(pool)
    assert wrong(pool, SMALL, ids) > 20 * 2 * 2 * 2 * 16 * 0.9
    fill(pool, SMALL, ids)
    assert wrong(pool, SMALL, ids) == 0
    unused = next(page for page in range(len(ids) + 2) if page not in ids)
    pool.view(0)[ids[0], 0, 0, 0] ^= 1
    pool.view(3)[unused, 7, 1, 15] ^= 1
    pool.view(2)[ids[-1], 7, 1, 15] ^= 1
    assert wrong(pool, SMALL, ids) == 3, "the last page has rows that the request does not fill"


def test_a_rank_that_has_ended_is_named(ends: tuple[Ranks, Connection]) -> None:
    there, pipe = ends
    pipe.close()
    with pytest.raises(PeerLostError, match="decode rank 0 has ended"):
        there.answers(int)


def test_a_rank_that_does_not_answer_is_named(ends: tuple[Ranks, Connection], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.0)
    there, _ = ends
    with pytest.raises(DeadlineError, match="decode rank 0 does not answer"):
        there.ask(int, "wrong")


def test_errors_cross_a_pipe() -> None:
    """Ours as they are, without a cause that ``pickle`` may refuse; others in words."""
    for ours in (IntegrityError("3 bytes", room=b"r"), IncompatiblePeerError("page", 1, 2)):
        ours.__cause__ = OSError(threading.Lock())
        found = pickle.loads(pickle.dumps(_portable(ours)))
        assert (type(found), str(found), vars(found)) == (type(ours), str(ours), vars(ours))
        assert found.__cause__ is None
    assert str(_portable(KeyError("x"))) == "KeyError: 'x'"


def test_a_rank_that_cannot_begin_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The channels' folder is too deep for a socket's address."""
    deep = Path("/tmp") / ("x" * 90)
    monkeypatch.setattr("bench.rank.Setup.address", lambda *_: f"unix://{deep}/y")
    with pytest.raises(Exception, match="cannot be bound"):
        run_transfer(SMALL)


@pytest.mark.parametrize(("fault", "error"), [(Fault.REFUSED, "injected"), (Fault.HUNG, "1 plain writes")])
def test_plain_writes_that_fail_or_hang_end_the_run(fault: Fault, error: str) -> None:
    memory = np.zeros(100, np.uint8)
    target = bulk.BulkTarget(InprocTransport(), 100)
    buffer = PagedPool.allocate(SMALL.spec(), SMALL.shards("decode")[0], pages=1, page_size=8).buffers
    source = bulk.BulkSource(FaultyTransport(InprocTransport(), lambda _: fault), buffer, 0.05)
    source.connect([(*target.describe(), 0, memory.nbytes)])
    with pytest.raises(Exception, match=error):
        source.move()
    source.close()
    target.close()


def test_a_transfer_that_fails_or_hangs_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registered, "hung", lambda: FaultyTransport(InprocTransport(), lambda _: Fault.HUNG))
    shape = attrs.evolve(SMALL, transport="hung", strategies=("staged",), timeout_s=0.5)
    with pytest.raises(DisaggKVError, match="room"):
        run_transfer(shape)


def test_a_transfer_takes_no_less_than_emulated_compute_and_the_wire_after_it() -> None:
    """Rows are not sent before they are computed, nor faster than the wire; the bytes are right all the same."""
    shape = attrs.evolve(SMALL, strategies=("staged",), compute_s=0.2, wire_bytes_per_s=20 * 2 * 2 * 2 * 16 / 0.1)
    assert run_transfer(shape).strategies["staged"].phases["total"].p50 > 0.3


def test_numbers_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="0 repeats"):
        attrs.evolve(SMALL, repeats=0).explain()
    with pytest.raises(ValueError, match="of compute"):
        attrs.evolve(SMALL, compute_s=120.0).explain()


def test_where_a_part_begins_follows_from_those_before() -> None:
    assert bulk.spread([3, 0, 5]) == [0, 3, 3]
    assert bulk.spread([]) == []


def test_the_machine_is_named_also_where_less_is_known(tmp_path: Path) -> None:
    assert machine.cpu_model(tmp_path / "none")
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name : Fast: 9000\n")
    assert machine.cpu_model(tmp_path / "cpuinfo") == "Fast: 9000"
    (tmp_path / "file.py").write_text("")
    assert machine.commit(tmp_path / "file.py") is None
    here = machine.commit(Path(machine.__file__))
    assert here is None or len(here.removesuffix("-dirty")) == 40


def test_a_busy_engine_thread_computes_between_two_polls_and_one_that_waits_sleeps() -> None:
    """The processor time of the same number of pauses, on a host that may give the thread a third of a core."""
    spent: list[float] = []
    for between in (between_polls(busy=False, pause_s=0.001), between_polls(busy=True)):
        began = time.thread_time()
        for _ in range(200):
            between()
        spent.append(time.thread_time() - began)
    assert spent[1] > 3 * spent[0]


def test_an_engine_thread_polls_once_between_two_pieces_of_work() -> None:
    polls: list[str] = []
    rig = Rig(SMALL.spec())
    (prefill,) = rig.prefill(tp_shards(SMALL.spec(), 1))
    with closing(prefill.endpoint) as end:
        delivery = end.open(RoomId(b"in turns"))
        wait_until(lambda: polls.append("poll"), lambda: len(polls) == 5, delivery, 60.0, lambda: polls.append("work"))
    assert polls == ["poll", "work", "poll", "work", "poll"]


@pytest.mark.parametrize("busy", [False, True])
def test_engine_threads_of_both_sides_poll_while_they_wait(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill's while it waits for the room and for its release, and decode's while it waits for the release."""
    polls: Counter[type] = Counter()

    def watched(kind: type[PrefillEndpoint | DecodeEndpoint]) -> None:
        real = kind.poll

        def poll(self: Any) -> Any:
            polls[kind] += 1
            return real(self)

        monkeypatch.setattr(kind, "poll", poll)

    for kind in (PrefillEndpoint, DecodeEndpoint):
        watched(kind)
    run_transfer(attrs.evolve(SMALL, strategies=("slice",), busy=busy, repeats=2))
    assert polls[PrefillEndpoint] >= 6
    assert polls[DecodeEndpoint] >= 3


def test_a_transfer_ends_when_decodes_engine_sees_the_release_and_known_is_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where decode's pages are held for 100 ms after the end, ``total`` has them and ``known`` has not."""

    def late(self: ReceptionHandle) -> bool:
        ended = self.report.ended
        return self.state[1] and ended is not None and time.monotonic() > ended + 0.1

    monkeypatch.setattr(ReceptionHandle, "released", property(late))
    phases = run_transfer(attrs.evolve(SMALL, strategies=("slice",))).strategies["slice"].phases
    assert phases["known"].p50 + 0.1 < phases["total"].p50
    assert phases["placed"].p50 <= phases["known"].p50


@pytest.mark.parametrize("strategy", ["staged", "mapped"])
def test_decodes_cache_may_have_another_dtype(strategy: str) -> None:
    """The bytes are compared with the conversion of prefill's, and half of them cross."""
    report = run_transfer(attrs.evolve(SMALL, strategies=(strategy,), decode_dtype="float8_e4m3fn"))
    assert report.nbytes == run_transfer(attrs.evolve(SMALL, strategies=(strategy,))).nbytes // 2


def test_a_conversion_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="no conversion from 'bfloat16' to 'int8'"):
        attrs.evolve(SMALL, decode_dtype="int8").explain()


@pytest.mark.parametrize(("programs", "device"), [(0, "cuda"), (8, "cpu")])
def test_programs_are_bounded_on_gpus_only(programs: int, device: str) -> None:
    shape = attrs.evolve(SMALL, strategies=("mapped",), programs=programs, device=device)
    with pytest.raises(ConfigurationError, match="programs of a copy"):
        shape.explain()
