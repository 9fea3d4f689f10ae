"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

Device = Literal["cpu", "cuda"]
Verify = Literal["off", "sampled", "full"]

Transport = Annotated[
    str | None, typer.Option(help="A transport, or several joined by +; default: shm for the CPU, cuda_ipc for GPUs.")
]
Layers = Annotated[int, typer.Option(min=1, help="Layers of the model.")]
KvHeads = Annotated[int, typer.Option(min=1, help="K and V heads of a layer.")]
HeadDim = Annotated[int, typer.Option(min=1, help="Elements of one head.")]
PageSize = Annotated[int, typer.Option(min=1, help="Tokens of a page.")]
Programs = Annotated[
    int | None,
    typer.Option(min=1, help="Most programs of a copy of mapped pages on a GPU; default: one per multiprocessor."),
]
DecodePageSize = Annotated[int | None, typer.Option(min=1, help="Tokens of a page of decode, if it differs.")]
