"""Every line that the library may log: its logger, its level, its text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

from tests.support.pages import ROOT

SOURCE = ROOT / "src/disagg_kv"
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
GAP = "..."
"""Stands for what is filled in."""


@frozen
class Line:
    """One call that logs, of one level."""

    logger: str
    level: str
    text: str


def lines() -> frozenset[Line]:
    """Of all files of the library."""
    return frozenset(line for file in SOURCE.rglob("*.py") for line in of_file(file))


def of_file(file: Path) -> Iterator[Line]:
    """``log.warning("text", ...)``, of the logger that the file names ``log``; and ``say`` of a limited log."""
    tree = ast.parse(file.read_text())
    named = re.findall(r'^log = logging\.getLogger\("([\w.]+)"\)', file.read_text(), re.MULTILINE)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called.endswith(".say") and ast.unparse(node.args[0]).startswith("logging."):
            yield Line("disagg_kv", ast.unparse(node.args[0])[8:].lower(), text_of(node.args[1]))
        if called.endswith((".failures.warn", "self.warn")):
            yield Line("disagg_kv", "warning", text_of(node.args[0]))
        found = re.findall(r"\blog\.(\w+)\b", called) if named else []
        for level in LEVELS.intersection(found):
            yield Line(named[0], "error" if level == "exception" else level, text_of(node.args[0]))


def text_of(node: ast.expr) -> str:
    """The constant parts of a text, with gaps for what is filled in; a gap alone: the text is made elsewhere."""
    if isinstance(node, ast.Constant):
        text = re.sub(r"%[sdgr]", GAP, str(node.value))
    elif isinstance(node, ast.JoinedStr):
        parts = (str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
        text = "".join(parts)
    else:
        text = GAP
    return re.sub(rf"(?:{re.escape(GAP)})+", GAP, text)
