"""Conversions on the CPU with NumPy, on the bits of numbers; tables where a number has at most 16 bits."""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from ...geometry import PlaneConversion
from ...geometry.formats import FLOATS, LEAST_SCALE, Format
from ...memory import U8

F32 = npt.NDArray[np.float32]
U32 = npt.NDArray[np.uint32]

_SIZE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_CODES = {1: np.uint8, 2: np.uint16, 4: np.uint32}

TABLES = 256
"""Tables of whole conversions that are kept; one has at most 256 KiB."""


def to_float32(cells: U8, dtype: str) -> F32:
    """The numbers of cells, uint8 ``[..., bytes]``, as float32 ``[..., elements]``: exact."""
    cells = np.ascontiguousarray(cells)
    if dtype == "float32":
        return cells.view(np.float32)
    if dtype == "float16":
        return cells.view(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        found: F32 = (cells.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        return found
    return _numbers(dtype)[cells]


@cache
def _numbers(dtype: str) -> F32:
    """The number of every code of a float8 format, by a float16 of the same mantissa."""
    code = np.arange(256, dtype=np.uint16)
    if dtype == "float8_e5m2":
        return (code << 8).view(np.float16).astype(np.float32)
    half = (code & 0x7F) << 7 | (code & 0x80) << 8
    found: F32 = np.where(code & 0x7F == 0x7F, np.float32(np.nan), half.view(np.float16).astype(np.float32) * 256)
    return found


def scales_of(x: F32, dtype: str) -> F32:
    """See :func:`.reference.scales_of`."""
    bits = x.view(np.uint32) & _SIZE
    largest = np.where(bits < _INFINITY, bits, np.uint32(0)).max(-1).view(np.float32)
    scales: F32 = np.maximum(largest / np.float32(FLOATS[dtype].largest), np.float32(LEAST_SCALE))
    scales[largest == 0] = 1
    return scales


def rounded(x: F32, dtype: str) -> U8:
    """See :func:`.reference.rounded`."""
    to, bits = FLOATS[dtype], x.view(np.uint32)
    if dtype == "float32":
        codes: npt.NDArray[np.unsignedinteger] = bits.copy()
    else:
        codes = _rounded(bits, to)
    codes[np.isnan(x)] = to.nan
    found: U8 = codes.view(np.uint8)
    return found


def _rounded(bits: U32, to: Format) -> npt.NDArray[np.unsignedinteger]:
    """The codes nearest to float32 numbers, for whatever NaN there is.

    A normal number is rounded in its bits: what is cut off carries into the exponent. A subnormal one is added to the
    power of two whose last bit is worth the smallest number of the format, so that the sum's rounding does it.
    """
    cut = np.uint32(23 - to.mantissa)
    size = bits & _SIZE
    largest = np.array(to.largest, np.float32).view(np.uint32)
    infinite = size >= _INFINITY
    size = np.minimum(size, largest)
    last = (size >> cut) & np.uint32(1)
    half = np.uint32((1 << (22 - to.mantissa)) - 1)
    codes = (size + half + last - np.uint32((127 - to.bias) << 23)) >> cut
    if to.bias < 127:
        magic = np.array(2.0 ** (23 + 1 - to.bias - to.mantissa), np.float32)
        small = (size.view(np.float32) + magic).view(np.uint32) - magic.view(np.uint32)
        codes = np.where(size < np.uint32((128 - to.bias) << 23), small, codes)
    if to.infinity:
        codes[infinite] = to.largest_code + 1
    sign = (bits >> np.uint32(32 - 8 * to.nbytes)) & np.uint32(1 << 8 * to.nbytes - 1)
    found: npt.NDArray[np.unsignedinteger] = (codes | sign).astype(_CODES[to.nbytes])
    return found


def convert_cells(cells: U8, how: PlaneConversion, first: int, scales: U8 | None) -> U8:
    """See :func:`.reference.convert`."""
    if how.rule == "given" and len(set(how.factors)) <= 1:
        return _by_table(cells, how.source, how.target, how.factors[0] if how.factors else 1.0)
    x = to_float32(cells, how.source)
    if how.rule == "scales":
        return scales_of(x, how.target)[..., None].view(np.uint8)
    if how.rule == "computed":
        factors: F32 = np.float32(1) / scales_of(x, how.target)[..., None]
    elif how.rule == "read":
        assert scales is not None
        factors = to_float32(scales, "float32")
    else:
        factors = np.array(how.factors[first : first + x.shape[1]], np.float32)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        return rounded(x * factors, how.target)


def _by_table(cells: U8, source: str, target: str, factor: float) -> U8:
    """Cells in another format, each number multiplied by one factor in float32."""
    nbytes = FLOATS[source].nbytes
    if nbytes == 4:
        with np.errstate(over="ignore", invalid="ignore"):
            return rounded(to_float32(cells, source) * np.float32(factor), target)
    codes = np.ascontiguousarray(cells).view(_CODES[nbytes])
    found: U8 = _table(source, target, factor)[codes].view(np.uint8)
    return found


@lru_cache(TABLES)
def _table(source: str, target: str, factor: float) -> npt.NDArray[np.unsignedinteger]:
    """The code of the result for every code."""
    nbytes = FLOATS[source].nbytes
    codes = np.arange(1 << 8 * nbytes, dtype=_CODES[nbytes])
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = to_float32(codes.view(np.uint8), source) * np.float32(factor)
    found: npt.NDArray[np.unsignedinteger] = rounded(numbers, target).view(_CODES[FLOATS[target].nbytes])
    return found
