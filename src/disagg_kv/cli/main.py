"""The command line: finds the command, and turns errors into one line and an exit code.

Exit codes: 0 success; 1 failure; 2 the request or the setup is invalid; 130 interrupted.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Annotated

import typer

from ..errors import ConfigurationError, DisaggKVError
from .output import fail

COMMANDS = ("demo", "plan", "doctor", "keys", "top")
"""Each is a module of this package with a function of the same name."""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("disagg_kv"))
        raise typer.Exit


def _root(
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Move KV cache from prefill GPUs to decode GPUs."""


def build(argv: Sequence[str]) -> typer.Typer:
    """The application with the command that ``argv`` names, or with all commands.

    Only the named command is imported: ``plan`` must run where torch cannot be imported.
    """
    app = typer.Typer(name="disagg-kv", callback=_root, add_completion=False, pretty_exceptions_enable=False)
    named = next((word for word in argv if not word.startswith("-")), None)
    for command in COMMANDS:
        if named == command or named not in COMMANDS:
            app.command()(getattr(import_module(f"{__package__}.{command}"), command))
    return app


def run(argv: Sequence[str], make: Callable[[Sequence[str]], typer.Typer] = build, name: str = "disagg-kv") -> int:
    """Run one command line with the application ``name`` that ``make`` builds for it, and return its exit code."""
    as_json = "--json" in argv
    try:
        code = make(argv)(list(argv) or ["--help"], prog_name=name, standalone_mode=False)
    except typer.TyperException as error:
        fail("UsageError", error.format_message(), as_json=as_json)
        return 2
    except DisaggKVError as error:
        fail(type(error).__name__, str(error), as_json=as_json)
        return 2 if isinstance(error, ConfigurationError) else 1
    except Exception as error:
        traceback.print_exc()
        fail(type(error).__name__, f"unexpected {type(error).__name__}: {error}", as_json=as_json)
        return 1
    if code == 130:
        fail("KeyboardInterrupt", "interrupted", as_json=as_json)
    return code if isinstance(code, int) else 0


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))
