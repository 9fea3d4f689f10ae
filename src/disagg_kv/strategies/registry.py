"""Strategies by name: a path, a schedule and a selection, joined by ``+``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from attrs import frozen

from ..errors import ConfigurationError, UnknownNameError, UnsupportedError
from .base import Path
from .paths import DirectPath, SlicePath, StagedPath

ENTRY_POINTS = "disagg_kv.strategies"
"""Installed packages name their paths here; each entry point is a Path object or a callable that makes one."""

AUTO = "auto"
SCHEDULES = ("per_chunk",)
SELECTIONS = ("full", "incremental")
PLANNED = {"layer_pipelined": "schedule"}

_paths: dict[str, Path] = {path.name: path for path in (DirectPath(), SlicePath(), StagedPath())}


@frozen
class Strategy:
    """One choice on each axis.

    Args:
        path: a path's name, or ``"auto"``: the cheapest that both sides can, chosen per request.
        schedule: when rows are sent.
        selection: which rows are sent.
    """

    path: str = AUTO
    schedule: str = "per_chunk"
    selection: str = "full"

    def __str__(self) -> str:
        return f"{self.path}+{self.schedule}+{self.selection}"


def register(path: Path) -> None:
    """Make a path known by its name.

    Raises:
        ConfigurationError: the name is taken by another path, or is not a plain word.
    """
    taken = {*_paths, *SCHEDULES, *SELECTIONS, *PLANNED, AUTO}
    if not path.name.isidentifier() or (path.name in taken and _paths.get(path.name) is not path):
        raise ConfigurationError(f"a path cannot be called {path.name!r}: it must be a new plain word")
    _paths[path.name] = path


@cache
def _installed() -> Sequence[EntryPoint]:
    """What installed packages name; looked for once, as that reads a file of every package there is."""
    return tuple(entry_points(group=ENTRY_POINTS))


def paths() -> dict[str, Path]:
    """Every known path by name, those of installed packages included."""
    for point in _installed():
        if point.name in _paths:
            continue
        try:
            found = point.load()
            path: Path = found() if callable(found) else found
        except Exception as error:
            raise ConfigurationError(f"strategy {point.name!r}: {point.value} cannot be loaded: {error}") from error
        if path.name != point.name:
            raise ConfigurationError(f"strategy {point.name!r}: {point.value} calls itself {path.name!r}")
        register(path)
    return dict(_paths)


def strategy(name: str) -> Strategy:
    """The strategy of that name, for example ``"staged"``, ``"auto"`` or ``"staged+per_chunk+full"``.

    Raises:
        UnknownNameError: a part that nothing is known by.
        UnsupportedError: a part that this version does not have yet.
        ConfigurationError: two parts for one axis.
    """
    known = paths()
    chosen: dict[str, str] = {}
    for part in name.split("+"):
        word = part.strip().replace("-", "_")
        if word in PLANNED:
            raise UnsupportedError(f"strategy {name!r}: the {PLANNED[word]} {word!r} is not in this version")
        if word == AUTO or word in known:
            axis = "path"
        elif word in SCHEDULES:
            axis = "schedule"
        elif word in SELECTIONS:
            axis = "selection"
        else:
            raise UnknownNameError("strategy", part, {AUTO, *known, *SCHEDULES, *SELECTIONS})
        if axis in chosen:
            raise ConfigurationError(f"strategy {name!r}: {chosen[axis]!r} and {word!r} are both a {axis}")
        chosen[axis] = word
    return Strategy(**chosen)
