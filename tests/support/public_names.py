"""Every public name with its signature: those of ``disagg_kv``, and those that the docs list by package.

``python -m tests.support.public_names`` writes tests/unit/public_names.txt, which a test compares. The text is the same
with Python 3.11 and 3.12: it has annotations as they are written, and no value of a constant.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NewType, get_args, get_origin, get_overloads

import attrs

import disagg_kv

ROOT = Path(__file__).parents[2]
SNAPSHOT = ROOT / "tests" / "unit" / "public_names.txt"
COMMAND = "python -m tests.support.public_names"


def entries() -> list[tuple[str, str]]:
    """Module and name of everything that the reference and the page of the suites list; "": all names of the module."""
    pages = "".join(page.read_text() for page in sorted((ROOT / "docs").rglob("*.md")))
    listed = re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE)
    suites = re.findall(r"^\| `(\w+\.\w+Suite)` \|", (ROOT / "docs/suites.md").read_text(), re.MULTILINE)
    names = (*listed, *(f"disagg_kv.testing.{suite}" for suite in suites))
    return [(name, "") if _is_module(name) else (name.rpartition(".")[0], name.rpartition(".")[2]) for name in names]


def _is_module(name: str) -> bool:
    place = ROOT.joinpath("src", *name.split("."))
    return place.is_dir() or place.with_suffix(".py").exists()


def names_of(module: ModuleType) -> list[str]:
    """The ``__all__`` of a module; without one, what it defines at its top."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    found: list[str] = []
    for node in ast.parse(inspect.getsource(module)).body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                found.append(name)
            case ast.Assign(targets=targets):
                found += [target.id for target in targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.append(name)
    return sorted(name for name in found if not name.startswith("_"))


@cache
def everything() -> dict[str, object]:
    """Each public object of the packages, by its full name."""
    found: dict[str, object] = {}
    for where in (where for where, name in entries() if not name):
        module = importlib.import_module(where)
        found |= {f"{where}.{one}": getattr(module, one) for one in names_of(module)}
    known = {id(thing) for thing in found.values()}
    single = {f"{where}.{name}": getattr(importlib.import_module(where), name) for where, name in entries() if name}
    return found | {name: thing for name, thing in single.items() if id(thing) not in known}


def homes() -> dict[str, str]:
    """Each name of ``disagg_kv`` itself, and the full name under which its package has it."""
    known = {id(thing): name for name, thing in sorted(everything().items(), reverse=True)}
    return {name: known.get(id(getattr(disagg_kv, name)), "") for name in sorted(disagg_kv.__all__)}


def snapshot() -> str:
    """The text of the file."""
    face = [f"disagg_kv.{name} = {home}" for name, home in homes().items()]
    parts = [line for name, thing in sorted(everything().items()) for line in lines(name, thing)]
    return "\n".join([*face, "", *parts, ""])


def lines(name: str, thing: object) -> Iterator[str]:
    """A line for an object; of a class also one for each public member."""
    if isinstance(thing, NewType):
        yield f"{name}: NewType of {thing.__supertype__.__name__}"
    elif inspect.isfunction(thing):
        yield f"{name}{signature(thing)}"
    elif get_origin(thing) is Literal:
        yield f"{name}: Literal{list(get_args(thing))}"
    elif inspect.isclass(thing) and not hasattr(thing, "__origin__"):
        yield from _class(name, thing)
    else:
        yield f"{name}: {type(thing).__name__}"


def _class(name: str, kind: type) -> Iterator[str]:
    public = {id(other) for other in everything().values()} - {id(kind)}
    # What a public base has stands there.
    ours = [one for one in kind.__mro__ if _root(one) == _root(kind) and id(one) not in public]
    maker: Any = next((vars(one)["__init__"] for one in ours if "__init__" in vars(one)), None)
    bases = [base.__name__ for base in kind.__bases__ if base is not object]
    makes = inspect.isfunction(maker) and not getattr(kind, "_is_protocol", False)
    if bases or not makes:
        yield f"class {name}({', '.join(bases)})"
    if makes:
        yield from (f"{name}{signature(one, bound=True)}" for one in get_overloads(maker) or [maker])
    fields = {a.name: a.type for a in attrs.fields(kind)} if attrs.has(kind) else {}
    given = {n: text(one.annotation) for n, one in inspect.signature(kind).parameters.items()} if fields else {}
    annotated = {n: text for one in reversed(ours) for n, text in vars(one).get("__annotations__", {}).items()}
    members = {n: member for one in reversed(ours) for n, member in vars(one).items()}
    for n in sorted(member for member in {*members, *annotated} if not member.startswith(("_", "test_"))):
        line = _member(members.get(n), fields.get(n) or annotated.get(n))
        if line and line != f": {given.get(n)}" and not (issubclass(kind, Enum) and n not in kind.__members__):
            yield f"{name}.{n}{line}"


def _root(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _member(member: object, annotation: object) -> str:
    match member:
        case property() | cached_property():
            read: Any = member.fget if isinstance(member, property) else member.func
            return f": {text(inspect.signature(read).return_annotation)}"
        case classmethod(__func__=function):
            return f"{signature(function, bound=True)}  # of the class"
        case staticmethod(__func__=function):
            return f"{signature(function)}  # of the class"
    if inspect.isfunction(member):
        return signature(member, bound=True)
    if annotation is not None:
        return f": {text(annotation)}"
    plain = isinstance(member, bool | int | float | str | frozenset | tuple)
    if plain or _root(type(member)) == "disagg_kv":
        return f": {type(member).__name__}"
    return ""  # a fixture of a suite, for example


def signature(function: Any, *, bound: bool = False) -> str:
    """A function's parameters and result, with annotations as they are written; ``bound``: without the first."""
    found = inspect.signature(function)
    given = [one.replace(annotation=_Text.of(one.annotation), default=_Text.default(one.default))
             for one in found.parameters.values()][int(bound):]  # fmt: skip
    return str(found.replace(parameters=given, return_annotation=_Text.of(found.return_annotation)))


def text(annotation: object) -> str:
    """An annotation as it is written."""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


class _Text:
    """Something that ``str`` of a signature shows as a given text."""

    def __init__(self, shown: str) -> None:
        self._shown = shown

    def __repr__(self) -> str:
        return self._shown

    @classmethod
    def of(cls, annotation: object) -> object:
        return annotation if annotation is inspect.Parameter.empty else cls(text(annotation))

    @classmethod
    def default(cls, value: object) -> object:
        """The value of a plain one, the name of a function or member; of others, only that there is one."""
        if value is inspect.Parameter.empty or value is None or isinstance(value, bool | int | float | str | bytes):
            return value
        return cls(getattr(value, "__qualname__", "()" if value == () else "..."))


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot())
    print(f"wrote {SNAPSHOT.relative_to(ROOT)}")
