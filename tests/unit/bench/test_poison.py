"""A benchmark prints no speed of a transfer that moved nothing, or a wrong byte, however late in the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import pytest

from bench import TransferShape, run_transfer
from bench.bulk import BulkSource
from bench.grant import run_grant
from bench.rank import DecodeRank, Moved
from bench.shape import WIRE
from bench.timing import Queued
from bench.transfer import run_turns
from disagg_kv.errors import IntegrityError
from disagg_kv.geometry import I64
from disagg_kv.kernels import Move
from disagg_kv.kernels.select import CpuKernels
from disagg_kv.memory import Buffer, Event, MemoryPool
from disagg_kv.transports import inproc
from disagg_kv.transports.regions import copy

SMALL = TransferShape(
    transport="inproc",
    prefill_tp=1,
    tokens=20,
    layers=2,
    kv_heads=2,
    head_dim=8,
    page_size=8,
    decode_page_size=8,
    strategies=("staged",),
    repeats=3,
    timeout_s=120.0,
)


class Planted:
    """A bug that is there after the first transfer: for good, or in the second one only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, once: bool) -> None:
        self.set = monkeypatch.setattr
        self._once = once
        self._moved = 0
        real, planted = DecodeRank.move, self

        def move(self: DecodeRank) -> Moved:
            moved = real(self)
            planted._moved += self._reception.room[: len(WIRE)].decode() != WIRE
            return moved

        self.set(DecodeRank, "move", move)

    @property
    def on(self) -> bool:
        """Whether it is there now."""
        return self._moved == 1 if self._once else self._moved >= 1


def still_gather(bug: Planted) -> None:
    """What the slots hold from before is sent."""
    real = CpuKernels.gather

    def gather(self: CpuKernels, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None) -> None:
        if not bug.on:
            real(self, pool, moves, staging, after)

    bug.set(CpuKernels, "gather", gather)


def still_scatter(bug: Planted) -> None:
    """What the pages hold from before stays."""
    real = CpuKernels.scatter

    def scatter(self: CpuKernels, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> None:
        if not bug.on:
            real(self, pool, moves, staging)

    bug.set(CpuKernels, "scatter", scatter)


def still_wire(bug: Planted) -> None:
    """What the ring, or the pages, hold from before stays."""

    def some(target: I64, source: I64, nbytes: I64) -> None:
        if not bug.on:
            copy(target, source, nbytes)

    bug.set(inproc, "copy", some)


def wrong_byte(bug: Planted) -> None:
    """One bit of the last byte that a write moves."""

    def worse(target: I64, source: I64, nbytes: I64) -> None:
        copy(target, source, nbytes)
        if bug.on:
            copy(target[-1:] + nbytes[-1:] - 1, source[:1] + 5, nbytes[:1] * 0 + 1)

    bug.set(inproc, "copy", worse)


BUGS = [still_gather, still_scatter, still_wire, wrong_byte]


@pytest.mark.parametrize("once", [False, True], ids=["for good", "once"])
@pytest.mark.parametrize("plant", BUGS)
def test_a_transfer_that_goes_wrong_after_the_first_is_found(
    plant: Callable[[Planted], None], once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of an earlier transfer is left where a later one could find it, and each is looked at."""
    plant(Planted(monkeypatch, once=once))
    with pytest.raises(IntegrityError, match="nothing is measured"):
        run_transfer(SMALL)


@pytest.mark.parametrize("strategy", ["slice", "direct"])
def test_writes_straight_into_pages_are_found_too(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    still_wire(Planted(monkeypatch, once=True))
    with pytest.raises(IntegrityError, match=strategy):
        run_turns(attrs.evolve(SMALL, strategies=(strategy,)))


@pytest.mark.parametrize("plant", BUGS)
def test_so_it_is_where_there_is_no_ceiling(plant: Callable[[Planted], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(Planted(monkeypatch, once=True))
    with pytest.raises(IntegrityError):
        run_turns(SMALL)


@pytest.mark.parametrize("plant", BUGS)
def test_so_it_is_of_grants(plant: Callable[[Planted], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rooms use the leases that were measured."""
    plant(Planted(monkeypatch, once=True))
    with pytest.raises(IntegrityError):
        run_grant("inproc", 2, pause_s=0.001)


def test_plain_writes_that_move_nothing_are_no_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds are shares of theirs."""
    on: list[bool] = []
    move = BulkSource.move

    def watched(self: BulkSource, queued: Queued | None = None) -> tuple[float, float]:
        on.append(True)
        try:
            return move(self, queued)
        finally:
            on.clear()

    def some(target: I64, source: I64, nbytes: I64) -> None:
        if not on:
            copy(target, source, nbytes)

    monkeypatch.setattr(BulkSource, "move", watched)
    monkeypatch.setattr(inproc, "copy", some)
    with pytest.raises(IntegrityError, match="plain writes"):
        run_transfer(SMALL)
