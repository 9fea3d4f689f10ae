"""The command's own manners: exit codes, one JSON document, errors as one line, nothing imported for nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
import typer
from rich.text import Text

from bench import __main__ as bench
from disagg_kv.cli import output
from disagg_kv.cli.main import COMMANDS, build, main, run
from disagg_kv.cli.output import JsonFlag, emit, progress
from disagg_kv.errors import ConfigurationError, DisaggKVError, PeerLostError
from sim import __main__ as sim

PLAN = ["plan", "--layers", "2", "--kv-heads", "2", "--head-dim", "8", "--tokens", "8"]

WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
from disagg_kv.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


def command(body: Callable[[], None]) -> Callable[[Sequence[str]], typer.Typer]:
    """An application whose one command ``work`` does ``body``."""

    def work(as_json: JsonFlag = False) -> None:
        body()

    def make(argv: Sequence[str]) -> typer.Typer:
        app = typer.Typer(pretty_exceptions_enable=False)
        app.callback()(lambda: None)
        app.command()(work)
        return app

    return make


def raiser(error: BaseException) -> Callable[[], None]:
    def body() -> None:
        raise error

    return body


def document(text: str) -> dict[str, object]:
    """The one JSON document that ``text`` is."""
    found: dict[str, object] = json.loads(text)
    return found


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == version("disagg_kv") + "\n"


@pytest.mark.parametrize("argv", [[], ["--help"]])
def test_help_names_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv) == 0
    out = capsys.readouterr().out
    assert [name for name in COMMANDS if name not in out] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    assert "Usage: disagg-kv " + name in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["plan", "--what"], ["nothing"], ["plan", "--layers", "many"], ["plan"]])
def test_a_wrong_command_line_is_one_line_on_stderr_and_exit_code_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("disagg-kv: ")
    assert said.err.count("\n") == 1


def test_with_json_a_wrong_command_line_is_a_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--what", "--json"]) == 2
    found = document(capsys.readouterr().out)
    assert found["ok"] is False
    assert found["error"] == {"type": "UsageError", "message": "No such option: --what"}


def numbers_of(app: typer.Typer, names: Sequence[str] = ()) -> Iterator[tuple[str, ...]]:
    """The words of a command line up to one option that takes a number with a fraction, for each such option."""
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from numbers_of(group.typer_instance, (*names, str(group.name)))
    for one in app.registered_commands:
        body = one.callback
        assert body is not None
        for name, kind in get_type_hints(body, include_extras=True).items():
            if get_origin(kind) is Annotated and float in (kind.__origin__, *get_args(kind.__origin__)):
                yield (*names, one.name or body.__name__, f"--{name.replace('_', '-')}")


PROGRAMS = {"disagg-kv": run, "bench": bench.run, "sim": sim.run}
NUMBERS = sorted(
    (name, *words)
    for name, app in (("disagg-kv", build([])), ("bench", bench.build([])), ("sim", sim.build([])))
    for words in numbers_of(app)
)


def test_the_options_with_fractions_were_found() -> None:
    assert len(NUMBERS) >= 12
    assert ("disagg-kv", "plan", "--layer-us") in NUMBERS
    assert ("bench", "grant", "--pause") in NUMBERS
    assert ("sim", "simulate", "--seconds") in NUMBERS


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999", "-1"])
@pytest.mark.parametrize("words", NUMBERS, ids=" ".join)
def test_a_number_that_is_not_finite_or_negative_is_refused_before_anything_runs(
    words: Sequence[str], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *rest = words
    # The one command of ``python -m sim`` has no name on its command line.
    assert PROGRAMS[program]([*rest[rest[0] == "simulate" :], value]) == 2
    assert f"Invalid value for '{words[-1]}'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--ratios", "--lengths"])
@pytest.mark.parametrize("value", ["nan", "1,inf", "1,two"])
def test_a_list_of_numbers_has_finite_ones_alone(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(["pipeline", option, value]) == 2
    assert repr(value) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigurationError("TP 3 of 8 heads"), 2), (PeerLostError("rank 3 is gone"), 1)]
)
def test_errors_of_the_library_are_one_line_and_an_exit_code(
    error: DisaggKVError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["work", "--json"], command(raiser(error))) == code
    said = capsys.readouterr()
    assert said.err == f"disagg-kv: {error}\n"
    assert document(said.out)["error"] == {"type": type(error).__name__, "message": str(error)}


def test_a_bug_shows_its_traceback_on_stderr_and_still_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["work", "--json"], command(raiser(RuntimeError("oh")))) == 1
    said = capsys.readouterr()
    assert "Traceback" in said.err
    assert document(said.out)["error"] == {"type": "RuntimeError", "message": "unexpected RuntimeError: oh"}


def test_an_interrupt_ends_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["work"], command(raiser(KeyboardInterrupt()))) == 130
    assert capsys.readouterr().err == "disagg-kv: interrupted\n"


def test_a_command_chooses_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        emit({"ok": False}, "it failed", as_json=False)
        raise typer.Exit(1)

    assert run(["work"], command(body)) == 1
    assert capsys.readouterr().out == "it failed\n"


def test_people_get_markup_and_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    emit({}, "[bold]now[/bold]", Text("pip install 'disagg_kv[hf]'"), as_json=False)
    assert capsys.readouterr().out == "now\npip install 'disagg_kv[hf]'\n"


def test_json_has_no_numbers_that_json_does_not_know() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        emit({"speed": float("nan")}, as_json=True)


def test_progress_is_silent_about_what_is_quick_and_a_line_now_and_then_about_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where stderr is no terminal: the first line after 5 s, the next ones every 10 s."""
    assert (output.FIRST_S, output.EVERY_S) == (5.0, 10.0)
    with progress() as bar:
        bar.advance(bar.add_task("work", total=1))
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(output, "FIRST_S", 0.02)
    monkeypatch.setattr(output, "EVERY_S", 0.02)
    said, until = "", time.monotonic() + 60.0
    with progress() as bar:
        bar.advance(bar.add_task("requests", total=4))
        bar.add_task("checking", total=None)
        while said.count("requests: 1 of 4, ") < 2 or said.count("checking, ") < 2:
            assert time.monotonic() < until, said
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert re.fullmatch(r"(?:(?:requests: 1 of 4|requests: 0 of 4|checking), \d+ s\n)+", said)


def test_progress_is_a_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(output, "FIRST_S", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress() as bar:
        bar.advance(bar.add_task("work", total=2))
    said = capsys.readouterr().err
    assert "work" in said
    assert "1/2" in said
    assert "1 of 2" not in said


def test_the_console_script_exits_with_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["disagg-kv", "--version"])
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 0


def test_plan_runs_where_torch_cannot_be_imported() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *PLAN, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert document(done.stdout)["ok"] is True
