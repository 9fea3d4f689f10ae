"""Strategies by name: a path, a schedule and a selection, joined by ``+``."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast, get_args

from attrs import frozen

from .. import arguments
from ..errors import ConfigurationError, UnknownNameError
from .base import MoverName, Schedule, Selection, TransferPlanner
from .paths import DirectPlanner, MappedPlanner, SlicePlanner, StagedPlanner
from .schedules import LayerPipelined, PerChunk
from .selections import Full, Incremental

ENTRY_POINTS = "disagg_kv.strategies"
"""Installed packages name paths, schedules and selections here; an entry point is such an object, or makes one."""

AUTO = "auto"
AUTO_ORDER = ("mapped", "staged", "slice")
"""The paths that ``auto`` takes, the first one that can; the others are for those who ask for them by name."""

PER_CHUNK = "per_chunk"

_loading = threading.RLock()


_parts: dict[str, dict[str, Any]] = {
    "path": {one.name: one for one in (DirectPlanner(), SlicePlanner(), StagedPlanner(), MappedPlanner())},
    "schedule": {one.name: one for one in (PerChunk(), LayerPipelined())},
    "selection": {one.name: one for one in (Full(), Incremental())},
}
"""What is known on each axis, by name."""

_METHODS = {
    "path": ("send", "receive", "count", "refuse"),
    "schedule": ("groups",),
    "selection": ("start", "accepts"),
}


@frozen
class Strategy:
    """One choice on each axis.

    Args:
        path: a path's name, or ``"auto"``: the first of :data:`AUTO_ORDER` that can, chosen by decode per request.
        schedule: when rows are sent.
        selection: which rows are sent.
    """

    path: str = AUTO
    schedule: Schedule = PerChunk()  # noqa: RUF009 - immutable
    selection: Selection = Full()  # noqa: RUF009 - immutable

    def __str__(self) -> str:
        return f"{self.path}+{self.schedule.name}+{self.selection.name}"


Part = TransferPlanner | Schedule | Selection


def register(part: Part) -> None:
    """Make a path, a schedule or a selection known by its name.

    Raises:
        ConfigurationError: the name is taken by another part, or is not a plain word; a path's version or another of
            its attributes is of another type.
    """
    what = "a path, a schedule or a selection"
    arguments.attributes(part, "part", what, "name")
    name = arguments.text(part.name, "part: name")
    kind = "schedule" if hasattr(part, "groups") else "selection" if hasattr(part, "accepts") else "path"
    arguments.methods(part, "part", what, *_METHODS[kind])
    if kind == "path":
        _check_path(cast("TransferPlanner", part))
    with _loading:
        known = _known(name)
        if not name.isidentifier() or name == AUTO or (known is not None and known is not part):
            raise ConfigurationError(f"a {kind} cannot be called {name!r}: it must be a new plain word")
        _parts[kind][name] = part


def _known(name: str) -> object | None:
    return next((axis[name] for axis in _parts.values() if name in axis), None)


def _check_path(path: TransferPlanner) -> None:
    arguments.attributes(path, "part", "a path", "version", "mover")
    arguments.count(path.version, "part: version")
    if arguments.text(path.mover, "part: mover") not in get_args(MoverName):
        raise UnknownNameError("part: mover", path.mover, get_args(MoverName))


@cache
def _installed() -> Sequence[EntryPoint]:
    """The entry points of installed packages; searched once, as a search reads a file of every package."""
    return tuple(entry_points(group=ENTRY_POINTS))


def _load() -> None:
    """Register the entry points of installed packages; if two threads make a part of one name, the first one counts.

    Nothing is imported under the lock: a module may call :func:`register` while another thread imports it.
    """
    for point in _installed():
        if _known(point.name) is None:
            part = _made(point)
            with _loading:
                if _known(point.name) is None:
                    register(part)


def _made(point: EntryPoint) -> Part:
    try:
        found = point.load()
        part: Part = found() if callable(found) else found
    except Exception as error:
        raise ConfigurationError(f"strategy {point.name!r}: {point.value} cannot be loaded: {error}") from error
    if part.name != point.name:
        raise ConfigurationError(f"strategy {point.name!r}: {point.value} calls itself {part.name!r}")
    return part


def paths() -> dict[str, TransferPlanner]:
    """Every known path by name, those of installed packages included."""
    _load()
    return dict(_parts["path"])


def in_auto_order(known: Iterable[TransferPlanner]) -> list[TransferPlanner]:
    """Those of some paths that ``auto`` takes, in its order."""
    by_name = {path.name: path for path in known}
    return [by_name[name] for name in AUTO_ORDER if name in by_name]


def strategy(name: str) -> Strategy:
    """The strategy of that name, for example ``"staged"``, ``"auto"`` or ``"staged+per_chunk+full"``.

    Raises:
        UnknownNameError: a part of the name is not known.
        ConfigurationError: two parts for one axis.
    """
    arguments.text(name, "strategy")
    _load()
    chosen: dict[str, str] = {}
    for part in name.split("+"):
        word = part.strip().replace("-", "_")
        axis = "path" if word == AUTO else next((kind for kind, known in _parts.items() if word in known), "")
        if not axis:
            raise UnknownNameError("strategy", part, {AUTO, *(known for axis in _parts.values() for known in axis)})
        if axis in chosen:
            raise ConfigurationError(f"strategy {name!r}: {chosen[axis]!r} and {word!r} are both a {axis}")
        chosen[axis] = word
    return Strategy(
        chosen.get("path", AUTO),
        _parts["schedule"][chosen.get("schedule", PER_CHUNK)],
        _parts["selection"][chosen.get("selection", "full")],
    )
