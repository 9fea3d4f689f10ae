"""Gather and sums of pools that are read as other caches: NumPy's and Triton's, interpreted, against the reference.

The interpreter is slow, so it takes a selection here; ``tests/gpu`` takes everything.
"""

from __future__ import annotations

import pytest
import torch

from disagg_kv.kernels import KERNELS
from disagg_kv.memory import Layout
from tests.support.convert_grid import Case, cases, check, every_code

TRITON = pytest.param("triton", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it runs natively here"))
ODD = list(cases((5, 3)))
EVEN = list(cases((16, 8)))


@pytest.mark.parametrize("case", ODD, ids=lambda case: case.name)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_numpy_gathers_and_sums_what_the_reference_does(case: Case, layout: Layout) -> None:
    check(KERNELS["cpu"], case, layout, "cpu", (1, 3))


@pytest.mark.parametrize("kernels", [TRITON])
@pytest.mark.parametrize("case", EVEN[::7], ids=lambda case: case.name)
def test_triton_gathers_and_sums_what_the_reference_does(case: Case, kernels: str) -> None:
    """Wide accesses; what needs no conversion is copied as it is."""
    check(KERNELS[kernels], case, "NHD", "cpu")


@pytest.mark.parametrize("kernels", [TRITON])
@pytest.mark.parametrize("shifts", [(0, 0), (1, 0), (0, 1)])
def test_triton_converts_cells_of_any_length_at_any_address(kernels: str, shifts: tuple[int, int]) -> None:
    for case in ODD[5::40]:
        check(KERNELS[kernels], case, "HND", "cpu", shifts)


@pytest.mark.parametrize("kernels", [TRITON])
@pytest.mark.parametrize(
    ("source", "target"), [("bfloat16", "float8_e4m3fn"), ("float16", "float8_e5m2"), ("float8_e4m3fn", "bfloat16")]
)
def test_triton_equals_the_reference_on_every_code(source: str, target: str, kernels: str) -> None:
    every_code(KERNELS[kernels], source, target, "cpu")
