"""Scales of a float8 cache, as an engine keeps them in its attention layers: read once, and checked before any use."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from attrs import frozen

from ..errors import ConfigurationError, UnsupportedError
from ..geometry.formats import LEAST_SCALE


@frozen
class Float8:
    """The K and V of a layer in a float8.

    Args:
        dtype: element type.
        scales: by component, ``"k"`` and ``"v"``: what stored numbers are multiplied with, one for all heads, or one
            per head; none: 1.
    """

    dtype: str
    scales: Mapping[str, tuple[float, ...]]


def checked_scales(where: str, given: object, *, heads: int, tp: int) -> tuple[float, ...]:
    """An engine's scale: one number, or one per head; none: 1.

    Args:
        where: names it, for errors.
        given: a number, or a tensor of numbers.
        heads: KV heads of this rank.
        tp: number of tensor-parallel ranks.

    Raises:
        ConfigurationError: it is missing, zero, negative, NaN or infinite, or of another shape.
        UnsupportedError: one per head, of which each rank has its own.
    """
    if not isinstance(given, torch.Tensor | float | int):
        raise ConfigurationError(f"{where} is {given!r:.100}: a number is needed, or one per head")
    numbers = torch.as_tensor(given).detach().double().flatten().tolist()
    if len(numbers) not in (1, heads):
        raise ConfigurationError(f"{where}: {len(numbers)} numbers for {heads} heads")
    with np.errstate(over="ignore"):
        scales = tuple(float(np.float32(number)) for number in numbers)
    for scale in scales:
        if not LEAST_SCALE <= scale < math.inf:
            raise ConfigurationError(f"{where} is {scale}; it must be finite, and at least {LEAST_SCALE}")
    if len(scales) > 1 and tp > 1:
        raise UnsupportedError(f"{where}: a scale per head is not supported on {tp} tensor-parallel ranks yet")
    return () if set(scales) == {1.0} else scales
