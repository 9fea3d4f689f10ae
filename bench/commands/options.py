"""Options that several benchmarks have."""

from __future__ import annotations

from typing import Annotated

import typer

KvHeads = Annotated[int, typer.Option(min=1, help="K and V heads of a layer.")]
HeadDim = Annotated[int, typer.Option(min=1, help="Elements of one head.")]
