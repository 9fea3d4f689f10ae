"""The specification of conversions, in torch; :mod:`disagg_kv.geometry.formats` states it in words."""

from __future__ import annotations

from functools import cache

import torch

from ...geometry import PlaneConversion
from ...geometry.formats import FLOATS, LEAST_SCALE


def to_float32(cells: torch.Tensor, dtype: str) -> torch.Tensor:
    """The numbers of cells, uint8 ``[..., bytes]``, as float32 ``[..., elements]``: exact."""
    kind: torch.dtype = getattr(torch, dtype)
    return _viewed(cells, kind).to(torch.float32)


def _viewed(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """The bytes of a tensor as numbers of another kind, along the last axis."""
    if not x.numel():  # torch may give it any strides, and refuses to view most of them
        return x.new_empty((*x.shape[:-1], x.shape[-1] * x.itemsize // kind.itemsize), dtype=kind)
    return x.contiguous().view(kind)


def scales_of(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """The scale of every row of float32 ``[..., elements]``: its largest finite size lands on the largest number.

    The division rounds to nearest. A row without a finite number other than zero has the scale 1.
    """
    largest = torch.where(torch.isfinite(x), x, 0).abs().amax(-1)
    scales = (largest / torch.tensor(FLOATS[dtype].largest, device=x.device)).clamp(min=LEAST_SCALE)
    return torch.where(largest == 0, torch.ones_like(scales), scales)


def rounded(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Float32 ``[..., elements]`` rounded to ``dtype``, as uint8 ``[..., bytes]``."""
    to = FLOATS[dtype]
    if not to.infinity:
        return _nearest(x, dtype)
    kind: torch.dtype = getattr(torch, dtype)
    finite = torch.where(torch.isfinite(x), x.clamp(-to.largest, to.largest), x).to(kind)
    integer = {2: torch.int16, 4: torch.int32}[to.nbytes]
    nan = torch.tensor(to.nan, dtype=integer, device=x.device)
    return _viewed(torch.where(torch.isnan(x), nan, finite.view(integer)), torch.uint8)


def _nearest(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """The code of the nearest number: codes of one sign ascend with their numbers."""
    between, tie_goes_up = (table.to(x.device) for table in _between(dtype))
    size = x.abs().double()
    code = torch.searchsorted(between, size)
    tie = between[code.clamp(max=len(between) - 1)] == size
    code += tie & tie_goes_up[code.clamp(max=len(between) - 1)]
    signed = code | torch.signbit(x).long() << 7
    return torch.where(torch.isnan(x), FLOATS[dtype].nan, signed).to(torch.uint8)


@cache
def _between(dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Half way from each code's number to the next; whether the next code is even."""
    codes = torch.arange(FLOATS[dtype].largest_code + 1)
    numbers = codes.to(torch.uint8).view(getattr(torch, dtype)).double()
    return (numbers[:-1] + numbers[1:]) / 2, codes[1:] % 2 == 0


def convert_cells(cells: torch.Tensor, how: PlaneConversion, first: int, scales: torch.Tensor | None) -> torch.Tensor:
    """Cells of a plane as cells of the wanted cache, uint8 ``[rows, units, bytes]`` both.

    Args:
        cells: in memory.
        how: what is wanted.
        first: the number of the first unit within the plane.
        scales: of the rule ``"read"``: the cells of the scales, uint8 ``[rows, units, 4]``.
    """
    x = to_float32(cells, how.source)
    if how.rule == "scales":
        return _viewed(scales_of(x, how.target).unsqueeze(-1), torch.uint8)
    if how.rule == "computed":
        x = x * (1 / scales_of(x, how.target)).unsqueeze(-1)
    elif how.rule == "read":
        assert scales is not None
        x = x * to_float32(scales, "float32")
    elif how.factors:
        units = x.shape[1]
        factors = how.factors * units if len(how.factors) == 1 else how.factors[first : first + units]
        x = x * torch.tensor(factors, dtype=torch.float32, device=x.device)[:, None]
    return rounded(x, how.target)
