"""Figures of samples: quantiles, and intervals of paired ratios."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

DRAWS, SEED = 4000, 0


@frozen
class Ratio:
    """The median of paired ratios, and the bounds of its 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def quantile(values: Sequence[float], share: float) -> float:
    """Between order statistics where it has to be."""
    return float(np.quantile(values, share))


def ratio(ones: Sequence[float], others: Sequence[float]) -> Ratio:
    """Of ``ones`` over ``others``, repetition by repetition; a bootstrap draws repetitions, with a fixed seed.

    Raises:
        ValueError: no repetition has both.
    """
    number = min(len(ones), len(others))
    if not number:
        raise ValueError("no repetition has both")
    paired = np.asarray(ones[:number]) / np.asarray(others[:number])
    drawn = np.random.default_rng(SEED).integers(number, size=(DRAWS, number))
    low, high = np.quantile(np.median(paired[drawn], axis=1), (0.025, 0.975))
    return Ratio(float(np.median(paired)), float(low), float(high))
