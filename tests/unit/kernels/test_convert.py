"""Conversions: the specification against torch, number by number; NumPy's and Triton's against the specification."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from disagg_kv.geometry import CONVERSIONS, PlaneConversion
from disagg_kv.geometry.formats import FLOATS, LEAST_SCALE
from disagg_kv.kernels.convert import cpu, reference
from tests.support.pools import Bytes

CODES = {1: np.uint8, 2: np.uint16, 4: np.uint32}
PAIRS = sorted(CONVERSIONS)
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def every(dtype: str) -> Bytes:
    """Cells of one number: every code, or of float32 those at and beside every 16-bit float and half way between."""
    nbytes = FLOATS[dtype].nbytes
    if nbytes < 4:
        return np.arange(1 << 8 * nbytes, dtype=CODES[nbytes]).view(np.uint8).reshape(-1, nbytes)
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    half = torch.arange(1 << 16).to(torch.uint16).view(torch.float16).to(torch.float32).numpy().view(np.uint32)
    steps = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    codes = np.concatenate([*(high + step for step in steps), *(half + (n << 12) for n in (0, 1)), half + 1, half - 1])
    return codes.view(np.uint8).reshape(-1, 4)


def numbers(cells: Bytes, dtype: str) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return torch.from_numpy(cells.reshape(-1)).view(getattr(torch, dtype)).to(torch.float32).numpy()


def codes(cells: Bytes | torch.Tensor, dtype: str) -> Bytes:
    return np.ascontiguousarray(cells).view(CODES[FLOATS[dtype].nbytes]).reshape(-1)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_the_specification_is_torchs_conversion_with_the_exceptions_that_are_listed(source: str, target: str) -> None:
    """Torch differs in what is beyond the largest number, by its version; NaN stays NaN in both."""
    cells = every(source)
    x = numbers(cells, source)
    found = numbers(reference.rounded(torch.from_numpy(x)[:, None], target).numpy(), target)
    theirs = torch.from_numpy(x).to(getattr(torch, target)).to(torch.float32).numpy()
    largest = FLOATS[target].largest
    nan, beyond = np.isnan(x), np.abs(x) > largest
    assert np.isnan(found[nan]).all()
    assert np.isnan(theirs[nan]).all()
    inside = ~nan & ~beyond
    assert np.array_equal(found[inside], theirs[inside])
    assert np.array_equal(np.signbit(found[inside]), np.signbit(theirs[inside]))

    size = np.abs(found[beyond])
    kept = np.isinf(x[beyond]) & FLOATS[target].infinity
    assert np.isinf(size[kept]).all()
    assert (size[~kept] == largest).all()
    assert np.array_equal(np.signbit(found[beyond]), np.signbit(x[beyond]))
    other = theirs[beyond][~kept]
    if target == E5M2:
        assert (np.isinf(other) | (np.abs(other) == largest)).all()
    elif target == E4M3:
        assert (np.isnan(other) | (np.abs(other) == largest)).all()


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("factor", [None, 0.37, 2.5e4, 1e-30, 3e30])
def test_numpy_equals_the_specification_on_every_number(source: str, target: str, factor: float | None) -> None:
    how = PlaneConversion(source, target, FLOATS[source].nbytes, "given", () if factor is None else (factor,))
    cells = every(source)[:, None]
    want = reference.convert_cells(torch.from_numpy(cells), how, 0, None).numpy()
    assert np.array_equal(cpu.convert_cells(cells, how, 0, None), want)


def rows(dtype: str, seed: int) -> Bytes:
    """Cells ``[rows, units, bytes]`` of 16 numbers: of any code, of one size, tiny, and zero."""
    rng, nbytes = np.random.default_rng(seed), FLOATS[dtype].nbytes
    cells = rng.integers(0, 256, (96, 5, 16 * nbytes), dtype=np.uint8)
    plain = torch.from_numpy(rng.standard_normal((96, 5, 16)) * 10.0 ** rng.integers(-12, 4, (96, 1, 1)))
    cells[32:] = plain.to(getattr(torch, dtype)).view(torch.uint8).numpy()[32:]
    cells[64, 1:] = 0
    cells[65, :, nbytes:] = 0
    return cells


@pytest.mark.parametrize("rule", ["given", "computed", "scales", "read"])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_numpy_equals_the_specification_under_every_rule(source: str, target: str, rule: str) -> None:
    """Factors per unit count from the first unit of the slice."""
    if rule != "read" and rule != "given" and target not in (E4M3, E5M2):
        return
    cells, factors = rows(source, 1), (0.5, 3.0, 1e-3, 1.0, 7.25, 0.1)
    scales = np.random.default_rng(2).standard_normal((96, 5, 1)).astype(np.float32).view(np.uint8)
    how = PlaneConversion(source, target, cells.shape[2], rule, factors if rule == "given" else ())  # type: ignore[arg-type]
    want = reference.convert_cells(torch.from_numpy(cells), how, 1, torch.from_numpy(scales)).numpy()
    assert np.array_equal(cpu.convert_cells(cells, how, 1, scales), want)


@pytest.mark.parametrize("shape", [(0, 1), (0, 2), (3, 0)])
@pytest.mark.parametrize("elements", [1, 2])
@pytest.mark.parametrize("rule", ["given", "computed", "scales", "read"])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_an_entry_without_cells_gives_none(
    source: str, target: str, rule: str, elements: int, shape: tuple[int, int]
) -> None:
    """Of one number each, too: torch then views no tensor as another dtype."""
    cells = np.zeros((*shape, elements * FLOATS[source].nbytes), np.uint8)
    scales = np.zeros((*shape, 4), np.uint8)
    how = PlaneConversion(source, target, cells.shape[2], rule, (0.5,) if rule == "given" else ())  # type: ignore[arg-type]
    want = reference.convert_cells(torch.from_numpy(cells), how, 0, torch.from_numpy(scales))
    nbytes = 4 if rule == "scales" else elements * FLOATS[target].nbytes
    assert (want.shape, want.dtype) == ((*shape, nbytes), torch.uint8)
    assert np.array_equal(cpu.convert_cells(cells, how, 0, scales), want.numpy())


@pytest.mark.parametrize("target", [E4M3, E5M2])
def test_a_computed_scale_puts_the_largest_number_of_a_row_on_the_largest_of_the_format(target: str) -> None:
    """Rows of zeros have scale 1; NaN and infinity do not count; tiny rows have the least scale."""
    x = torch.zeros(6, 8)
    x[1, 3] = -896.0
    x[2, :3] = torch.tensor([2.0, float("inf"), float("nan")])
    x[3] = 1e-44
    x[4, 0] = float("nan")
    x[5] = float(FLOATS["bfloat16"].largest)
    scales = reference.scales_of(x, target)
    largest = FLOATS[target].largest
    tops = [896.0, 2.0, float(x[5, 0])]
    want = torch.tensor([1.0, tops[0] / largest, tops[1] / largest, LEAST_SCALE, 1.0, tops[2] / largest])
    assert torch.equal(scales, want.to(torch.float32))
    assert np.array_equal(cpu.scales_of(x.numpy(), target), scales.numpy())
    stored = reference.rounded(x * (1 / scales)[:, None], target)
    assert abs(float(reference.to_float32(stored, target)[1, 3])) == largest
    assert not torch.isfinite(reference.to_float32(stored, target)[2, 2])


def test_a_largest_code_is_that_of_the_largest_number() -> None:
    for dtype, of in FLOATS.items():
        code = np.array([of.largest_code], CODES[of.nbytes])
        assert numbers(code.view(np.uint8), dtype)[0] == np.float32(of.largest)
