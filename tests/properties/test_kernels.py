"""Gather and scatter over any strides, tables and sets of moves, against byte loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from disagg_kv.kernels import CpuKernels, Kernels, Move, ReferenceKernels
from disagg_kv.kernels.moves import cpu_copy
from disagg_kv.memory import PagedPool
from tests.support.kernel_cases import CopyCase, cases, copy_cases
from tests.support.pools import Bytes, buffer_over, copies

ON_CPU: list[Kernels] = [CpuKernels(), ReferenceKernels()]


@pytest.mark.parametrize("kernels", ON_CPU, ids=lambda kernels: kernels.name)
@given(case=cases())
def test_gather_copies_every_named_unit_and_writes_no_other_byte(
    kernels: Kernels, case: tuple[PagedPool, Bytes, list[Move], Bytes]
) -> None:
    """Any strides, gaps, page sizes, tables and moves."""
    pool, memory, moves, staging = case
    expected = staging.copy()
    for cell, at, nbytes in copies(pool, moves):
        expected[at : at + nbytes] = memory[cell : cell + nbytes]
    before = memory.copy()
    assert kernels.gather(pool, moves, buffer_over(staging), None) is None
    assert np.array_equal(staging, expected)
    assert np.array_equal(memory, before)


@pytest.mark.parametrize("kernels", ON_CPU, ids=lambda kernels: kernels.name)
@given(case=cases())
def test_scatter_copies_every_named_unit_and_writes_no_other_byte(
    kernels: Kernels, case: tuple[PagedPool, Bytes, list[Move], Bytes]
) -> None:
    """Any strides, gaps, page sizes, tables and moves."""
    pool, memory, moves, staging = case
    expected = memory.copy()
    for cell, at, nbytes in copies(pool, moves):
        expected[cell : cell + nbytes] = staging[at : at + nbytes]
    before = staging.copy()
    assert kernels.scatter(pool, moves, buffer_over(staging)) is None
    assert np.array_equal(memory, expected)
    assert np.array_equal(staging, before)


@pytest.mark.parametrize("small", [1, 1 << 60], ids=["in blocks", "through a buffer"])
@pytest.mark.parametrize("kernels", ON_CPU, ids=lambda kernels: kernels.name)
@given(case=copy_cases())
def test_copy_copies_every_named_unit_and_writes_no_other_byte(kernels: Kernels, small: int, case: CopyCase) -> None:
    """Any strides, gaps, page sizes, tables and moves on either side; both ways of the NumPy kernel."""
    expected, before = case.into.copy(), case.memory.copy()
    for move in case.moves:
        cells = [
            list(copies(pool, [Move(layout, pages.tables, 0)]))
            for pool, layout, pages in (
                (case.source, move.copy.source, move.source),
                (case.target, move.copy.target, move.target),
            )
        ]
        for (cell, _, nbytes), (into, _, _) in zip(*cells, strict=True):
            expected[into : into + nbytes] = case.memory[cell : cell + nbytes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_copy, "SMALL", small)
        assert kernels.copy(case.moves, None) is None
    assert np.array_equal(case.into, expected)
    assert np.array_equal(case.memory, before)
