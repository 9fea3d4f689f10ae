"""Changing a line of a function for the time of a ``with`` block."""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Protocol, runtime_checkable

from attrs import frozen

from disagg_kv.planning.cache import PlanCache

HOLDERS = ("disagg_kv", "sim")
"""The packages whose modules may have imported a function that is replaced."""


@runtime_checkable
class Remembering(Protocol):
    """A function behind :func:`functools.lru_cache`."""

    def cache_clear(self) -> None:
        """Forget every result."""
        ...


@frozen
class Mutant:
    """A bug: ``old`` stands in the source of ``where`` exactly once and is replaced by ``new``.

    A function of a module is replaced in every module of the library that has imported it.

    Args:
        name: what goes wrong, in words.
        where: ``module:Class.method`` or ``module:function``; a property counts as a method.
    """

    name: str
    where: str
    old: str
    new: str

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The library has the bug inside this block."""
        module_name, _, path = self.where.partition(":")
        module = importlib.import_module(f"disagg_kv.{module_name}")
        *owners, last = path.split(".")
        owner: object = module
        for name in owners:
            owner = getattr(owner, name)
        found = vars(owner)[last]
        function = found.fget if isinstance(found, property) else found
        assert isinstance(function, FunctionType), self.where
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, (
            f"{self.where} has changed: {self.old!r} is there {source.count(self.old)} times"
        )
        body = source.replace(self.old, self.new)
        # The same future statements as the module has, or annotations would be evaluated.
        scope: dict[str, object] = {}
        code = compile(f"from __future__ import annotations\n{body}", inspect.getfile(function), "exec")
        exec(code, module.__dict__, scope)
        holders = _importers(last, found) if owner is module else [owner]
        _set(holders, last, scope[last])
        try:
            yield
        finally:
            _set(holders, last, found)


def _importers(name: str, function: FunctionType) -> list[object]:
    """The module of a function, and those that have imported it by its name."""
    modules = [module for at, module in list(sys.modules.items()) if at.partition(".")[0] in HOLDERS]
    return [module for module in modules if vars(module).get(name) is function]


def _set(holders: Iterable[object], name: str, value: object) -> None:
    for holder in holders:
        setattr(holder, name, value)
    _forget()


def _forget() -> None:
    """Drop what the library remembers of its own results: with a bug they are others than without it."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in HOLDERS:
            for kept in vars(module).values():
                if isinstance(kept, Remembering):
                    kept.cache_clear()
                elif isinstance(kept, PlanCache):
                    kept.clear()
