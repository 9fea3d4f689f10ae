"""Planes, layers and buffers as ``Hello`` carries them: what repeats is written once.

A pool of 80 layers has 160 planes, which differ in their layer, and in their buffer or offset by equal steps. A run is
a pattern of planes that is repeated with such steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from ...errors import RemoteProtocolError
from .frames import MAX_ENTRIES, PlaneRun, WirePlane

PATTERN = 16
"""Planes of the longest pattern: more than the components of the layers between which a hybrid cache alternates."""

PlaneRow = tuple[int, str, str, int, int, int, int, int]
"""Layer, component, group, buffer, offset, page stride, row stride, unit stride."""


def planes_to_runs(planes: Sequence[PlaneRow]) -> tuple[PlaneRun, ...]:
    """Runs that name these planes in this order."""
    runs: list[PlaneRun] = []
    at = 0
    while at < len(planes):
        length, count = max(((m, _repeats(planes, at, m)) for m in range(1, PATTERN + 1)), key=_saved)
        pattern = (_with_steps(planes, at + i, length, count) for i in range(length))
        runs.append((count, tuple(pattern)))
        at += length * count
    return tuple(runs)


def _saved(run: tuple[int, int]) -> tuple[int, int]:
    """Planes that a run need not name; of equal ones the shorter pattern counts."""
    length, count = run
    return length * (count - 1), -length


def _repeats(planes: Sequence[PlaneRow], at: int, length: int) -> int:
    """How often the ``length`` planes from ``at`` on come, each time with the same steps."""
    if at + 2 * length > len(planes):
        return 1
    steps = [_step(planes, at + length + i, length) for i in range(length)]
    if None in steps:
        return 1
    count = 2
    while at + length * (count + 1) <= len(planes):
        first = at + length * count
        if any(_step(planes, first + i, length) != step for i, step in enumerate(steps)):
            break
        count += 1
    return count


def _step(planes: Sequence[PlaneRow], at: int, length: int) -> tuple[int, int, int] | None:
    """How a plane differs from the one ``length`` before it; None: not by steps alone."""
    before, plane = planes[at - length], planes[at]
    if before[1:3] != plane[1:3] or before[5:] != plane[5:]:
        return None
    return plane[0] - before[0], plane[3] - before[3], plane[4] - before[4]


def _with_steps(planes: Sequence[PlaneRow], at: int, length: int, count: int) -> WirePlane:
    steps = _step(planes, at + length, length) if count > 1 else (0, 0, 0)
    assert steps is not None
    layer, component, group, buffer, offset, page, row, unit = planes[at]
    return (layer, component, group, buffer, offset, page, row, unit, *steps)


def planes_from_runs(runs: Sequence[PlaneRun]) -> list[PlaneRow]:
    """The planes, in order.

    Raises:
        RemoteProtocolError: more than ``MAX_ENTRIES``, or a number that is not one of a plane.
    """
    check_total("planes", (count * len(pattern) for count, pattern in runs))
    planes: list[PlaneRow] = []
    for count, pattern in runs:
        for n in range(count):
            for layer, component, group, buffer, offset, page, row, unit, by_layer, by_buffer, by_offset in pattern:
                place = layer + n * by_layer, buffer + n * by_buffer, offset + n * by_offset
                if min(place) < 0 or place[0] >= MAX_ENTRIES or max(place) > 2**62:
                    raise RemoteProtocolError(f"a plane that cannot be: layer, buffer and offset {place}")
                planes.append((place[0], component, group, *place[1:], page, row, unit))
    return planes


def numbers_to_runs(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Each number, and how often it comes in a row."""
    return tuple((number, len(list(same))) for number, same in groupby(numbers))


def numbers_from_runs(runs: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """The numbers; raises a RemoteProtocolError if they are more than ``MAX_ENTRIES``."""
    check_total("numbers", (count for _, count in runs))
    return tuple(number for number, count in runs for _ in range(count))


def layers_to_runs(layers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ascending layers: the first of each run of consecutive ones, and how many they are."""
    runs = groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])
    return tuple((run[0][1], len(run)) for run in (list(pairs) for _, pairs in runs))


def layers_from_runs(runs: Sequence[tuple[int, int]], below: int = MAX_ENTRIES) -> tuple[int, ...]:
    """The layers; raises a RemoteProtocolError if they are more than ``MAX_ENTRIES``, or one is not ``below``."""
    check_total("layers", (count for _, count in runs))
    if runs and (last := max(first + count for first, count in runs)) > below:
        raise RemoteProtocolError(f"layer {last - 1} in a Hello; at most {below - 1} is allowed")
    return tuple(layer for first, count in runs for layer in range(first, first + count))


def check_total(what: str, counts: Iterable[int], most: int = MAX_ENTRIES) -> None:
    """Raise a RemoteProtocolError if what a ``Hello`` unfolds to is more than ``most`` in all."""
    if (total := sum(counts)) > most:
        raise RemoteProtocolError(f"{total} {what} in a Hello; at most {most} are allowed")
