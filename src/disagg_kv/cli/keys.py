"""``disagg-kv keys``: a key pair for endpoints that talk over a network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ..channels import write_keys
from .output import JsonFlag, emit


def keys(
    folder: Annotated[Path, typer.Argument(help="The folder for the two files; it is created if it does not exist.")],
    name: Annotated[str, typer.Argument(help="Name of the pair, for example an instance's name.")],
    as_json: JsonFlag = False,
) -> None:
    """Make a key pair: NAME.key for the others' folder of allowed keys, NAME.key_secret for its owner alone."""
    public, secret = write_keys(folder, name)
    emit(
        {"public": str(public), "secret": str(secret)},
        Text(f"public: {public}"),
        Text(f"secret: {secret}, which only you can read"),
        as_json=as_json,
    )
