"""What README and docs show works: python blocks run, cheap commands too; and they leave nothing out."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import get_args

import attrs
import pytest

from bench import __main__ as bench
from disagg_kv import errors
from disagg_kv.cli.main import COMMANDS, run
from disagg_kv.core import AnyFrame, Options
from disagg_kv.endpoints import Report
from disagg_kv.observe.metrics import METRICS
from disagg_kv.strategies import registry as strategies
from disagg_kv.transports import registry as transports
from tests.support.log_calls import Line, of_file
from tests.support.log_calls import lines as log_lines
from tests.support.pages import PAGES, ROOT, blocks, marked, name_of, parse

CHEAP = ("--version", "plan", "doctor")
"""Commands that are run here; ``demo`` has tests of its own, as ``python -m sim`` and ``python -m bench`` have."""

SAVED = {"transport": "tutorial_transport", "async": "async_transport", "names": "my_transports"}
"""Blocks with these markers are files of the reader, not run with the others."""

PYTHON_PAGES = [p for p in PAGES if any(b.language == "python" and not b.skipped for b in blocks(p))]
COMMAND_LINES = {
    line.removeprefix("$ "): block
    for page in PAGES
    for block in blocks(page)
    if block.language in ("bash", "console") and not block.skipped
    for line in block.source.replace("\\\n", "").splitlines()
    if "disagg-kv " in line
}
"""Each once, with the last block that has it."""


@pytest.fixture
def tutorial(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the blocks that a page marks importable, under the names of the files that the page says."""
    for marker, name in SAVED.items():
        (tmp_path / f"{name}.py").write_text(marked(page, marker))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in SAVED.values():
        sys.modules.pop(name, None)


@pytest.fixture
def module(page: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module for a page's blocks to live in; what they register is gone after the test."""
    made = ModuleType(f"page_{page.stem.replace('-', '_').lower()}")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr(strategies, "_parts", {axis: dict(parts) for axis, parts in strategies._parts.items()})
    monkeypatch.setattr(transports, "_registered", dict(transports._registered))
    return made


@pytest.mark.usefixtures("tutorial")
@pytest.mark.parametrize("page", PYTHON_PAGES, ids=name_of)
def test_the_python_blocks_of_a_page_run_in_order_and_print_what_it_shows(
    page: Path, module: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for block in blocks(page):
        if block.language == "python" and not block.skipped and block.marker not in SAVED:
            capsys.readouterr()
            block.run(module.__dict__)
        elif block.marker == "output":
            assert capsys.readouterr().out == block.source, f"{name_of(page)}, line {block.line}"


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_commands_exist_and_the_cheap_ones_succeed(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    block, argv = COMMAND_LINES[line], shlex.split(line, comments=True)
    assert argv[0] == "disagg-kv", f"{block.page.name}: start the line with the command"
    assert argv[1] in (*COMMANDS, "--version", "--help")
    if argv[1] in CHEAP:
        assert run(argv[1:]) == 0, capsys.readouterr().err


def test_the_tour_shows_what_each_of_its_steps_prints() -> None:
    """Peers, memory and rooms, at the beginning and after each change."""
    shown = [block.source for block in blocks(ROOT / "docs/tour.md") if block.marker == "output"]
    assert len(shown) >= 7
    assert all("32 pages are free" in output for output in shown)
    assert sum("silent" in output for output in shown) == 1


MOST_WORDS = 43_490
"""Of all pages but those that are generated: what a reader has to find their way in."""


def test_the_pages_do_not_grow() -> None:
    written = [page for page in PAGES[1:] if page.name not in ("results.md", "ledger.md")]
    assert sum(len(page.read_text().split()) for page in written) <= MOST_WORDS


def test_the_readmes_code_fits_a_screen_and_prints_something() -> None:
    python, shown = (block for block in blocks(ROOT / "README.md") if block.language in ("python", "text"))
    assert python.source.count("\n") <= 40
    assert shown.marker == "output"


def test_an_entry_of_the_glossary_is_a_line() -> None:
    entries = re.findall(r"^\| ([\w ]+) \| (.+) \|$", words("docs/glossary.md"), re.MULTILINE)[1:]
    assert len(entries) > 30
    assert [name for name, _ in entries] == sorted(name for name, _ in entries)
    assert [name for name, meaning in entries if len(meaning.split()) > 15] == []


def test_relative_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    targets = [part.split(")")[0].split("#")[0] for part in text.split("](")[1:]]
    assert [t for t in targets if t and "://" not in t and not (ROOT / t).exists()] == []


def test_the_source_archive_has_what_the_readme_names() -> None:
    """Hatchling adds the license and pyproject.toml by itself."""
    text = words("README.md")
    linked = {part.split(")")[0].split("#")[0] for part in text.split("](")[1:] if "://" not in part.split(")")[0]}
    named = set(re.findall(r"python (examples/[\w/.]+)", text))
    build = tomllib.loads(words("pyproject.toml"))["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert len(linked) > 20
    assert named
    assert {one.split("/")[0] for one in linked | named} - {*build, "LICENSE"} == set()


def test_a_block_knows_its_line_its_marker_and_whether_it_is_skipped() -> None:
    page = Path("page.md")
    text = "# Page\n\n```python\nx = 1\n```\n\n<!-- test: skip needs a GPU -->\n```python\n1 / 0\n```\n"
    first, second = parse(text, page)
    assert (first.line, first.language, first.marker, first.skipped) == (4, "python", "", False)
    assert (second.line, second.marker, second.skipped) == (9, "skip needs a GPU", True)
    with pytest.raises(ZeroDivisionError) as raised:
        second.run({})
    assert (raised.traceback[-1].lineno, str(raised.traceback[-1].path)) == (8, "page.md")


def test_marked_blocks_of_a_page_join_to_one_source(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- test: transport -->\n```python\na = 1\n```\n\n```python\nb = 2\n```\n\n"
                    "<!-- test: transport -->\n```python\nc = 3\n```\n")  # fmt: skip
    assert marked(page, "transport") == "a = 1\n\nc = 3\n"


def words(page: str) -> str:
    return (ROOT / page).read_text()


def test_the_protocols_page_names_every_frame_and_option() -> None:
    names = [kind.__name__ for kind in get_args(AnyFrame)] + [a.name for a in attrs.fields(Options)]
    assert [name for name in names if f"`{name}`" not in words("docs/protocol.md")] == []


def test_the_page_of_the_command_line_has_every_command() -> None:
    benches = [c.callback.__name__ for c in bench.build([]).registered_commands if c.callback]
    assert len(benches) > 1
    shown = [f"| `disagg-kv {name}` |" for name in COMMANDS] + [f"| `{name}` |" for name in benches]
    assert [row for row in shown if row not in words("docs/cli.md")] == []


ERROR_ROWS = re.compile(r"^\| `(\w+)` \| `(\w+)` \| (\w+) \| [^|]+ \| [^|]+ \| [^|]+ \|$", re.MULTILINE)
"""Code, class, retry; what it means, and what engine and operator do."""


def raised_errors() -> tuple[list[type[errors.DisaggKVError]], list[type[errors.DisaggKVError]]]:
    """Every class, and those that are raised and are not only a base of others."""
    source = "\n".join(path.read_text() for path in (ROOT / "src/disagg_kv").rglob("*.py"))
    kinds = [getattr(errors, name) for name in errors.__all__]
    return kinds, [kind for kind in kinds if re.search(rf"(?<!class )\b{kind.__name__}\(", source)]


def test_the_page_of_errors_has_each_code_once() -> None:
    """A class that is never raised, only a base of others, has no row."""
    kinds, raised = raised_errors()
    retry = {True: "yes", False: "no", None: "depends"}
    rows = [(kind.code, kind.__name__, retry[kind.retryable]) for kind in raised]
    assert sorted(ERROR_ROWS.findall(words("docs/errors.md"))) == sorted(rows)
    assert [kind.__name__ for kind in kinds if kind not in raised] == ["ProtocolError"]


def test_the_page_for_operators_names_metrics_that_there_are() -> None:
    known = {metric.shown for metric in METRICS}
    named = set(re.findall(r"disagg_kv_[a-z_]+", words("docs/deploying.md"))) - {"disagg_kv_"}
    assert len(named) >= 7
    assert named - known == set()


LOG_ROW = re.compile(r"^\| `([\w.]+)` \| (\w+) \| `([^`]+)` \|", re.MULTILINE)


def test_the_page_of_logging_has_every_line_of_the_library_and_no_other() -> None:
    found, shown = log_lines(), {Line(*row) for row in LOG_ROW.findall(words("docs/logging.md"))}
    assert len(found) > 40
    assert (sorted(map(str, found - shown)), sorted(map(str, shown - found))) == ([], [])


def test_a_line_that_is_logged_is_found_whatever_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        'log = logging.getLogger("disagg_kv.x")\n'
        'log.exception("%s of %d", a, b)\n(log.debug if a else log.info)("c")\n'
        'self._log.say(logging.ERROR, f"{a} d", e)\nself.failures.warn(f"e: {a!r}{b}")\nother.warning("no")\n'
    )
    assert set(of_file(file)) == {
        Line("disagg_kv.x", "error", "... of ..."),
        Line("disagg_kv.x", "debug", "c"),
        Line("disagg_kv.x", "info", "c"),
        Line("disagg_kv", "error", "... d"),
        Line("disagg_kv", "warning", "e: ..."),
    }


def test_the_report_names_every_phase_whose_time_it_has() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "src/disagg_kv/endpoints").rglob("*.py"))
    phases = set(re.findall(r'\.spend\("(\w+)"', source))
    assert {"plan", "gather", "scatter", "total"} <= phases
    assert [phase for phase in phases if f"``{phase}``" not in (Report.__doc__ or "")] == []


def test_the_readme_has_every_transport() -> None:
    assert [name for name in transports._BUILTIN if f"| `{name}` |" not in words("README.md")] == []


def test_every_page_is_in_the_sites_navigation() -> None:
    pages = [page.relative_to(ROOT / "docs") for page in PAGES[1:]]
    assert [page for page in pages if f" {page}\n" not in words("mkdocs.yml")] == []


FAMILIES = {
    "Llama": "Llama", "Mistral": "Mistral", "Gemma3": "Gemma 3", "DeepseekV3": "DeepSeek V3", "FalconH1": "Falcon-H1",
    "Qwen3Next": "Qwen3-Next",
}  # fmt: skip
"""Models of the tests in real engines: the name of the class, and that in the matrix."""


def test_the_matrix_has_every_model_that_the_engines_run() -> None:
    source = "".join(file.read_text() for file in (ROOT / "tests/engines").glob("*.py"))
    assert set(re.findall(r"\b(\w+)ForCausalLM\(", source)) == set(FAMILIES)
    matrix = [line for line in words("docs/why.md").splitlines() if "tested" in line or "refused" in line]
    assert [name for name in FAMILIES.values() if not any(f": {name} |" in line for line in matrix)] == []


def test_the_reference_has_every_layer() -> None:
    """What users do not import, the command line, is left out."""
    layers = {path.parent.name for path in (ROOT / "src/disagg_kv").glob("*/__init__.py")} - {"cli"}
    listed = words("docs/reference-packages.md")
    assert [name for name in sorted(layers) if f"\n::: disagg_kv.{name}" not in listed] == []
