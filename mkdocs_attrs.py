"""Extensions of the site's parser: the constructors of attrs' classes, and the public types of handles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import griffe

DECORATORS = ("attrs.frozen", "attrs.define")
FIELD = "attrs.field"


class Constructors(griffe.Extension):
    """Adds ``__init__`` to each such class that defines none."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called once the package is parsed."""
        for found in list(_classes(pkg)):
            if "__init__" not in found.members and _is_attrs(found):
                found.set_member("__init__", _constructor(found))


class Handles(griffe.Extension):
    """Shows the public Protocols of handles where a method returns its own class."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called once the package is parsed."""
        shown = {f"{name}Handle": griffe.ExprName(name, parent=pkg["endpoints"]) for name in ("Delivery", "Reception")}
        for found in _classes(pkg):
            for method in found.functions.values():
                method.returns = shown.get(str(method.returns), method.returns)


def _classes(within: griffe.Module | griffe.Class) -> Iterator[griffe.Class]:
    for member in within.members.values():
        if member.is_alias:
            continue
        if isinstance(member, griffe.Class):
            yield member
        if isinstance(member, griffe.Module | griffe.Class):
            yield from _classes(member)


def _decorator(found: griffe.Class) -> griffe.Expr | None:
    values = (one.value for one in found.decorators)
    return next((one for one in values if isinstance(one, griffe.Expr) and one.canonical_path in DECORATORS), None)


def _is_attrs(found: griffe.Class) -> bool:
    return _decorator(found) is not None


def _arguments(value: Any) -> dict[str, Any]:
    """Those that a call names."""
    if not isinstance(value, griffe.ExprCall):
        return {}
    return {one.name: one.value for one in value.arguments if isinstance(one, griffe.ExprKeyword)}


def _constructor(found: griffe.Class) -> griffe.Function:
    fields: dict[str, griffe.Parameter] = {}
    for kind in (*reversed([parent for parent in found.mro() if _is_attrs(parent)]), found):
        of = _arguments(_decorator(kind))
        fields |= {one.name: one for one in _parameters(kind, all_by_name=of.get("kw_only") == "True")}
    self = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    ordered = sorted(fields.values(), key=lambda one: one.kind is griffe.ParameterKind.keyword_only)
    return griffe.Function("__init__", parent=found, parameters=griffe.Parameters(self, *ordered), returns="None")


def _parameters(found: griffe.Class, *, all_by_name: bool) -> Iterator[griffe.Parameter]:
    for member in found.members.values():
        if not isinstance(member, griffe.Attribute) or member.annotation is None or "property" in member.labels:
            continue
        if "class-attribute" in member.labels and "instance-attribute" not in member.labels:
            continue  # a ClassVar
        given = _arguments(member.value) if _is_field(member.value) else {"default": member.value}
        if given.get("init") == "False":
            continue
        by_name = all_by_name or given.get("kw_only") == "True"
        default = given.get("default")
        if "factory" in given:
            default = griffe.ExprCall(given["factory"], [])
        yield griffe.Parameter(
            str(given.get("alias", member.name)).strip("'\"").lstrip("_"),
            annotation=member.annotation,
            kind=griffe.ParameterKind.keyword_only if by_name else griffe.ParameterKind.positional_or_keyword,
            default=default,
        )


def _is_field(value: Any) -> bool:
    return isinstance(value, griffe.ExprCall) and value.canonical_path in (FIELD, "attrs.Factory")
