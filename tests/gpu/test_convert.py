"""Conversions natively: every byte and every sum is the reference's, for every code of every format."""

from __future__ import annotations

import pytest

from disagg_kv.geometry import CONVERSIONS
from disagg_kv.kernels import KERNELS
from tests.support.convert_grid import Case, cases, check, every_code

ODD = list(cases((5, 3)))
EVEN = list(cases((128, 64)))


@pytest.mark.parametrize("case", EVEN, ids=lambda case: case.name)
def test_gathers_and_sums_equal_the_reference(case: Case) -> None:
    check(KERNELS["triton"], case, "NHD", "cuda")


@pytest.mark.parametrize("shifts", [(0, 0), (1, 0), (0, 1), (2, 4)])
def test_cells_of_any_length_are_converted_at_any_address(shifts: tuple[int, int]) -> None:
    for case in ODD:
        check(KERNELS["triton"], case, "HND", "cuda", shifts)


@pytest.mark.parametrize(("source", "target"), sorted(CONVERSIONS))
def test_every_code_becomes_what_the_reference_says(source: str, target: str) -> None:
    every_code(KERNELS["triton"], source, target, "cuda")
