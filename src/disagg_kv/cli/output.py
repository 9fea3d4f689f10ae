"""What commands print: one result on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import Annotated, TypeAlias

import typer
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""A value that JSON can represent."""

FIRST_S, EVERY_S = 5.0, 10.0
"""Seconds until the first line about what takes long, and between further ones, where no bar can be drawn."""

JsonFlag = Annotated[bool, typer.Option("--json", help="Print exactly one JSON document on stdout, logs on stderr.")]
"""The option ``--json`` that every command has."""


def emit(document: Mapping[str, Json], *text: RenderableType, as_json: bool) -> None:
    """Print a command's result: the JSON document, or the text.

    Strings may use rich's markup. Wrap text from elsewhere in ``rich.text.Text``. Neither is broken into lines.
    """
    if as_json:
        sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
        return
    console = Console(highlight=False)
    for part in text:
        if isinstance(part, str | Text):
            console.print(part, soft_wrap=True)
        else:
            # A terminal breaks lines that are too long; a narrower table would lack digits.
            least = Measurement.get(console, console.options, part).minimum
            Console(highlight=False, width=max(console.width, least)).print(part)


def log(message: str) -> None:
    """Print one line on stderr, unchanged."""
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(message)


def fail(error: str, message: str, *, as_json: bool) -> None:
    """Report an error: a line on stderr, and the document ``{"ok": false, "error": ...}`` with ``--json``."""
    log(f"disagg-kv: {message}")
    if as_json:
        emit({"ok": False, "error": {"type": error, "message": message}}, as_json=True)


@contextmanager
def progress() -> Iterator[Progress]:
    """A progress bar on stderr. Where that is no terminal, a line about each task after FIRST_S, then every EVERY_S."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        if console.is_terminal:
            yield bar
            return
        over = Event()
        lines = Thread(target=_report, args=(bar, over), name="progress", daemon=True)
        lines.start()
        try:
            yield bar
        finally:
            over.set()
            lines.join()


def _report(bar: Progress, over: Event) -> None:
    wait_s = FIRST_S
    while not over.wait(wait_s):
        wait_s = EVERY_S
        for task in bar.tasks:
            of = "" if task.total is None else f": {task.completed:.0f} of {task.total:.0f}"
            log(f"{task.description}{of}, {task.elapsed or 0.0:.0f} s")
