"""Strategies by name: a path, a schedule and a selection, joined by ``+``."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from attrs import frozen

from .. import arguments
from ..errors import ConfigurationError, DisaggKVError, UnknownNameError, text_of
from ..planning import OtherPath, PairParts
from .base import Job, Schedule, TransferPlanner
from .paths import DirectPlanner, SlicePlanner, StagedPlanner
from .schedules import LayerPipelined, PerChunk

ENTRY_POINTS = "disagg_kv.strategies"
"""Installed packages name paths and schedules here; each entry point is such an object or a callable that makes one."""

AUTO = "auto"
PER_CHUNK = "per_chunk"
SELECTIONS = ("full", "incremental")

_paths: dict[str, TransferPlanner] = {path.name: path for path in (DirectPlanner(), SlicePlanner(), StagedPlanner())}
_BUILT_IN = frozenset(_paths)
_loading = threading.RLock()
_schedules: dict[str, Schedule] = {one.name: one for one in (PerChunk(), LayerPipelined())}


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


def register(part: TransferPlanner | Schedule) -> None:
    """Make a path or a schedule known by its name.

    ``auto`` takes a path only if it has an attribute ``joins_auto`` that is True; see :class:`TransferPlanner`.

    Raises:
        ConfigurationError: the name is taken by another part, or is not a plain word; a path's version or another of
            its attributes is of another type.
    """
    arguments.attributes(part, "part", "a path or a schedule", "name")
    name, scheduling = arguments.text(part.name, "part: name"), hasattr(part, "groups")
    if not scheduling:
        _check_path(cast("TransferPlanner", part))
    with _loading:
        known = _paths.get(name, _schedules.get(name))
        taken = {*_paths, *_schedules, *SELECTIONS, AUTO}
        if not name.isidentifier() or (name in taken and known is not part):
            kind = "schedule" if scheduling else "path"
            raise ConfigurationError(f"a {kind} cannot be called {name!r}: it must be a new plain word")
        if scheduling:
            _schedules[name] = cast("Schedule", part)
        else:
            _paths[name] = cast("TransferPlanner", part)


def _check_path(path: TransferPlanner) -> None:
    arguments.methods(path, "part", "a path or a schedule", "send", "receive", "count", "refuse")
    arguments.attributes(path, "part", "a path", "version", "exposes_pages")
    arguments.count(path.version, "part: version")
    arguments.flag(path.exposes_pages, "part: exposes_pages")
    arguments.flag(_says_auto(path), "part: joins_auto")


def _says_auto(path: TransferPlanner) -> object:
    return getattr(path, "joins_auto", False)


@cache
def _installed() -> Sequence[EntryPoint]:
    """What installed packages name; looked for once, as that reads a file of every package there is."""
    return tuple(entry_points(group=ENTRY_POINTS))


def _load() -> None:
    """Register what installed packages name; of two threads that make a part of one name, the first one's counts.

    Nothing is imported under the lock: a module may call :func:`register` while another thread imports it.
    """
    for point in _installed():
        if point.name not in _paths and point.name not in _schedules:
            part = _made(point)
            with _loading:
                if point.name not in _paths and point.name not in _schedules:
                    register(part)


def _made(point: EntryPoint) -> TransferPlanner | Schedule:
    try:
        found = point.load()
        part: TransferPlanner | Schedule = found() if callable(found) else found
    except Exception as error:
        raise ConfigurationError(f"strategy {point.name!r}: {point.value} cannot be loaded: {error}") from error
    if part.name != point.name:
        raise ConfigurationError(f"strategy {point.name!r}: {point.value} calls itself {part.name!r}")
    return part


def paths() -> dict[str, TransferPlanner]:
    """Every known path by name, those of installed packages included."""
    _load()
    return dict(_paths)


def auto_paths() -> tuple[TransferPlanner, ...]:
    """The paths that ``auto`` compares: the library's own, and the registered ones that say ``joins_auto``."""
    return tuple(path for path in paths().values() if path.name in _BUILT_IN or _says_auto(path) is True)


def other_paths() -> tuple[OtherPath, ...]:
    """The registered paths that are not the library's own, for :func:`disagg_kv.planning.explain`."""
    return tuple(
        OtherPath(path.name, path.exposes_pages, _says_auto(path) is True, partial(_count, path))
        for path in paths().values()
        if path.name not in _BUILT_IN
    )


def _count(path: TransferPlanner, pair: PairParts) -> int | str:
    """How many writes a path takes for all that a prefill rank sends to a decode rank, or why it cannot."""
    try:
        reason = path.refuse(pair.source, pair.target, pair.parts)
        if reason is not None:
            return arguments.text(reason, f"path {path.name!r}: refuse(): its result")
        what = pair.source, pair.target, pair.parts, pair.view
        counts = [path.count(Job(*what, segment, {}, {}, pair.rows)) for segment in pair.segments]
    except DisaggKVError as exc:
        return text_of(exc)  # as a prefill endpoint takes it
    except Exception as exc:
        raise ConfigurationError(f"path {path.name!r}: {text_of(exc)}") from exc
    return sum(arguments.count(number, f"path {path.name!r}: count(): its result") for number in counts)


def schedules() -> dict[str, Schedule]:
    """Every known schedule by name, those of installed packages included."""
    _load()
    return dict(_schedules)


def strategy(name: str) -> Strategy:
    """The strategy of that name, for example ``"staged"``, ``"auto"`` or ``"staged+per_chunk+full"``.

    Raises:
        UnknownNameError: a part that nothing is known by.
        ConfigurationError: two parts for one axis.
    """
    arguments.text(name, "strategy")
    known, known_schedules = paths(), schedules()
    chosen: dict[str, str] = {}
    for part in name.split("+"):
        word = part.strip().replace("-", "_")
        if word == AUTO or word in known:
            axis = "path"
        elif word in known_schedules:
            axis = "schedule"
        elif word in SELECTIONS:
            axis = "selection"
        else:
            raise UnknownNameError("strategy", part, {AUTO, *known, *known_schedules, *SELECTIONS})
        if axis in chosen:
            raise ConfigurationError(f"strategy {name!r}: {chosen[axis]!r} and {word!r} are both a {axis}")
        chosen[axis] = word
    return Strategy(**chosen)
