"""The floating-point formats between which a cache may be converted, and the rule for their scales.

A conversion takes three steps, of which each has one correct result:

1. A stored number becomes a float32, exactly. Where the stored cache has scales, it is multiplied by its scale.
2. Where the wanted cache has scales, the float32 is multiplied by the reciprocal of the scale, which is a float32 too.
3. It is rounded to the wanted format: to the nearest number, of two equally near ones to the one with the even code.

Finite numbers saturate: beyond the largest number of a format comes the largest. In float8 formats infinity does so
too, as in the conversion instructions of GPUs (PTX ISA, ``cvt.rn.satfinite``) that engines use for their float8 caches.
In other formats infinity stays infinity. NaN stays NaN, always with the same code (:attr:`Format.nan`).

float8_e4m3fn and float8_e5m2 are those of Micikevicius et al., FP8 Formats for Deep Learning, 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from attrs import frozen


@frozen
class Format:
    """A floating-point format: a sign, exponent and mantissa bits; subnormals.

    Args:
        nbytes: bytes of a number.
        mantissa: bits of the mantissa.
        bias: of the exponent.
        largest: the largest finite number.
        infinity: whether there are infinities that a conversion to the format keeps.
        nan: the code of NaN.
    """

    nbytes: int
    mantissa: int
    bias: int
    largest: float
    infinity: bool
    nan: int

    @property
    def largest_code(self) -> int:
        """The code of :attr:`largest`."""
        exponent = 0
        while 2.0 ** (exponent + 1) <= self.largest:
            exponent += 1
        fraction = int((self.largest / 2.0**exponent - 1) * 2**self.mantissa)
        return (exponent + self.bias) << self.mantissa | fraction


FLOATS: Mapping[str, Format] = MappingProxyType(
    {
        "float32": Format(4, 23, 127, (2 - 2.0**-23) * 2.0**127, True, 0x7FC00000),
        "bfloat16": Format(2, 7, 127, (2 - 2.0**-7) * 2.0**127, True, 0x7FC0),
        "float16": Format(2, 10, 15, 65504.0, True, 0x7E00),
        "float8_e4m3fn": Format(1, 3, 7, 448.0, False, 0x7F),
        "float8_e5m2": Format(1, 2, 15, 57344.0, False, 0x7F),
    }
)
"""The formats, by the name of the dtype. e5m2 has codes of infinity; a conversion to it makes none."""

_WIDE = ("float32", "bfloat16", "float16")
SCALED = ("float8_e4m3fn", "float8_e5m2")
"""Dtypes whose components may have scales."""

CONVERSIONS = frozenset(
    {(wide, narrow) for wide in _WIDE for narrow in SCALED}
    | {(narrow, wide) for wide in _WIDE for narrow in SCALED}
    | {("float32", half) for half in _WIDE[1:]}
    | {(half, "float32") for half in _WIDE[1:]}
)
"""Pairs of dtypes, of which a cache in the first may be converted to the second."""

LEAST_SCALE = 2.0**-126
"""The smallest scale: its reciprocal is still a float32. Smaller ones that are computed become this one."""


def conversion(source: str, target: str) -> str:
    """The name of a conversion, by which endpoints agree on it."""
    return f"{source} to {target}"


CONVERSION_NAMES = tuple(sorted(conversion(*pair) for pair in CONVERSIONS))
"""The names of all conversions."""
