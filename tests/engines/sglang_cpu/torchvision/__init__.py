"""Lets SGLang import its image processors on a host without torchvision; every name exists, and none works."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.28.0"


class Absent:
    """A name of torchvision."""

    def __getattr__(self, name: str) -> Absent:
        """A name of a name."""
        return Absent()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing works."""
        raise RuntimeError("torchvision is not installed")


def __getattr__(name: str) -> Any:
    """Any name but Python's own."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent()


class Submodules(MetaPathFinder, Loader):
    """Any submodule, with the same names."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Those of torchvision."""
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith("torchvision.") else None

    def exec_module(self, module: ModuleType) -> None:
        """Give it its names."""
        module.__dict__["__getattr__"] = __getattr__


sys.meta_path.insert(0, Submodules())
