"""Options that several commands have."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import typer

Device = Literal["cpu", "cuda"]
Verify = Literal["off", "sampled", "full"]

Layers = Annotated[int, typer.Option(min=1, help="Layers of the model.")]
PageSize = Annotated[int, typer.Option(min=1, help="Tokens of a page.")]
DecodePageSize = Annotated[int | None, typer.Option(min=1, help="Tokens of a page of decode, if it differs.")]


def number(least: float, most: float | None = None, *, text: str) -> Any:
    """The option of a number from ``least`` to ``most``, both included. It must be finite: a range lets NaN pass."""
    return typer.Option(min=least, max=most, callback=_finite, help=text)


def _finite(value: float | None) -> float | None:
    """``value``, which a command line named; one that is not finite is refused."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value
