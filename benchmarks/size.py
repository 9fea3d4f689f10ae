"""How large the library is, and how many mechanisms each of its files knows.

Lines are lines of code: no docstrings, comments or blank lines. A file knows a mechanism if one of its names has one of
the mechanism's words: ``RoomFlags`` and ``arm_flag`` have ``flag``. ``benchmarks/mechanisms.toml`` has the words, and
two numbers for each measure: the limit, which fails the run, and the target. A limit only ever falls.

    python -m benchmarks.size             the tables; exit code 1 if a limit is broken
    python -m benchmarks.size flags       the files that know a mechanism
    python -m benchmarks.size --ledger    writes the number of those files into docs/ledger.md
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WHEEL = ROOT / "src" / "disagg_kv"
LEDGER = ROOT / "docs" / "ledger.md"
CORE = frozenset({
    "channels", "core", "endpoints", "geometry", "kernels", "memory", "planning", "staging", "strategies", "transports",
})  # fmt: skip
"""The packages that a transfer runs through."""

NO_CODE = frozenset({
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
})  # fmt: skip
PART = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
BY_EPOCH = re.compile(r"self\._?\w+: \w*[dD]ict\[Epoch\b")
ROW = re.compile(r"^\| `(?P<name>[\w -]+)` \|(?P<between>.*)\| (?P<files>\d+) \|$", re.MULTILINE)


@cache
def code_lines(text: str) -> int:
    """The lines of a module with code on them; strings that document something are none."""
    documents: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for one in body if isinstance(body, list) else ():
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                documents.update(range(one.lineno, (one.end_lineno or one.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documents)


@cache
def names(text: str) -> frozenset[str]:
    """The names of a module, each as lower-case words between underscores: ``RoomFlags`` is ``_room_flags_``."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return frozenset(f"_{'_'.join(PART.findall(one.string)).lower()}_" for one in tokens if one.type == tokenize.NAME)


@cache
def words() -> Mapping[str, Sequence[str]]:
    """The words of each mechanism."""
    found: Mapping[str, Sequence[str]] = _settings()["mechanisms"]
    return found


@cache
def known() -> Mapping[Path, frozenset[str]]:
    """The mechanisms that each file of the library knows; paths are relative to its root."""
    found = {}
    for path in sorted(WHEEL.rglob("*.py")):
        text = " ".join(names(path.read_text()))
        found[path.relative_to(WHEEL)] = frozenset(
            mechanism for mechanism, of in words().items() if any(f"_{word}_" in text for word in of)
        )
    return found


def files_of(mechanism: str) -> list[Path]:
    """The files that know a mechanism."""
    return [path for path, mechanisms in known().items() if mechanism in mechanisms]


def rooms(root: Path) -> Counter[str]:
    """Lines of code of each package below ``root``; its own modules are the package ``.``."""
    found: Counter[str] = Counter()
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        found[parts[0] if len(parts) > 1 else "."] += code_lines(path.read_text())
    return found


def measures() -> dict[str, int]:
    """What has a limit and a target."""
    lines = rooms(WHEEL)
    texts = {path: (WHEEL / path).read_text() for path in known()}
    most = max(len(of) for path, of in known().items() if path.parts[0] in CORE and path.parts[:2] != ("core", "wire"))
    return {
        "lines of the wheel": lines.total(),
        "lines of the core": sum(count for room, count in lines.items() if room in CORE),
        "files over 500 lines": sum(text.count("\n") > 500 for text in texts.values()),
        "mechanisms in a file of the core": most,
        "kinds of frames": len(_members(texts[Path("core/wire/frames.py")], "AnyFrame")),
        "options": len(_fields(texts[Path("core/base.py")], "Options")),
        "dicts keyed by epoch": sum(len(BY_EPOCH.findall(text)) for text in texts.values()),
    }


def broken(found: Mapping[str, int]) -> list[str]:
    """The limits that do not hold, in words."""
    limits: Mapping[str, Sequence[int]] = _settings()["limits"]
    return [f"{name}: {found[name]:,}, limit {limit:,}" for name, (limit, _) in limits.items() if found[name] > limit]


def ledger(text: str) -> str:
    """The text of the ledger with the number of files that know each mechanism."""
    return ROW.sub(lambda row: f"| `{row['name']}` |{row['between']}| {len(files_of(row['name']))} |", text)


def _settings() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "mechanisms.toml").read_text())


def _members(text: str, union: str) -> list[ast.Name]:
    """The names in the value that is assigned to ``union``."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == union:
            return [one for one in ast.walk(node.value) if isinstance(one, ast.Name)]
    raise LookupError(f"{union} is not assigned")


def _fields(text: str, name: str) -> list[ast.AnnAssign]:
    """The annotated fields of a class."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return [one for one in node.body if isinstance(one, ast.AnnAssign)]
    raise LookupError(f"there is no class {name}")


def main(argv: Sequence[str]) -> int:
    """Print the tables, or what was asked for; 1: a limit is broken."""
    if argv == ["--ledger"]:
        LEDGER.write_text(ledger(LEDGER.read_text()))
        return 0
    if argv:
        print(*files_of(" ".join(argv)), sep="\n")
        return 0
    for root in (WHEEL, ROOT / "sim", ROOT / "bench"):
        lines = rooms(root)
        print(f"{root.relative_to(ROOT)}: {lines.total():,} lines of code")
        print(*(f"{count:8,}  {room}" for room, count in lines.most_common()), sep="\n")
    print("\nmechanisms, and how many files know them")
    for mechanism in words():
        print(f"{len(files_of(mechanism)):8}  {mechanism}")
    print("\nfiles that know most")
    for path, of in sorted(known().items(), key=lambda one: -len(one[1]))[:12]:
        print(f"{len(of):8}  {path}: {', '.join(sorted(of))}")
    found = measures()
    print(f"\n{'':36}{'now':>8}{'limit':>8}{'target':>8}")
    for name, (limit, target) in _settings()["limits"].items():
        print(f"{name:36}{found[name]:8,}{limit:8,}{target:8,}")
    for line in broken(found):
        print(f"RED: {line}")
    return 1 if broken(found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
