"""Which path a request takes towards one decode rank, and why."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen

from ...errors import ConfigurationError, DisaggKVError, OversizeError
from ...ids import Epoch, Rank
from ...planning import UNLIMITED, CostModel, Intake, Limits, PairPlan, choose
from ...planning.cache import PlanCache
from ...strategies import AUTO, Job, TransferPlanner, maps_pages, refusal

NOMINAL_ROWS = 1024
"""Rows for which paths are compared where the request's length is not known yet."""


@frozen(eq=False)
class PathRequest:
    """What a path is asked for.

    Args:
        pair: what the prefill rank sends to the decode rank.
        intake: what the decode rank gets from all prefill ranks.
        writer: the prefill rank.
        limits: of staging memory.
        allowed: names of the paths that decode allows.
        exposed: decode's pages are exposed.
        rows: rows of the request, rounded; 0: not known.
        unmapped: why decode's pool is not mapped here; None: it is.
        uncut: nothing may go through staging memory, on any rank of our instance.
    """

    pair: PairPlan
    intake: Intake
    writer: Rank
    limits: Limits
    allowed: tuple[str, ...]
    exposed: bool
    rows: int
    unmapped: str | None = None
    uncut: bool = False


@frozen(eq=False)
class PathChoice:
    """The path of a room towards one decode rank.

    Args:
        path: what carries its rows.
        reason: one sentence that says why.
        unstaged: the choice among all paths needs no staging memory, and rows could be copied into mapped pages; None:
            there are no rows.
    """

    path: TransferPlanner
    reason: str
    unstaged: bool | None


_Question = tuple[int, tuple[str, ...], bool, bool, int, CostModel]
"""A rotation, the paths that decode allows, whether its pages are exposed, whether the room is uncut, rows, and the
costs of the lane."""


class PathChooser:
    """Chooses, and remembers what it chose: to compare paths takes longer than to send a short request.

    Args:
        wanted: a path's name, or ``"auto"``.
        paths: those that are known here.
    """

    def __init__(self, wanted: str, paths: Sequence[TransferPlanner]) -> None:
        self._wanted = wanted
        self._paths = paths
        self._chosen: dict[Epoch, PlanCache[_Question, PathChoice]] = {}

    def forget(self, epoch: Epoch) -> None:
        """A decode rank is lost."""
        self._chosen.pop(epoch, None)

    def choose(
        self,
        epoch: Epoch,
        rotation: int,
        theirs: Sequence[tuple[str, int]],
        request: PathRequest,
        costs: CostModel,
    ) -> PathChoice:
        """Choose a path.

        Args:
            epoch: the decode rank's.
            rotation: of the room.
            theirs: names and versions of the paths that the decode rank knows.
            request: what the path is for.
            costs: of the lane to the decode rank.

        Raises:
            ConfigurationError: as :func:`choose_path`.
        """
        chosen = self._chosen.setdefault(epoch, PlanCache())
        key = rotation, request.allowed, request.exposed, request.uncut, request.rows, costs
        found = chosen.get(key)
        if found is None:
            known = [path for path in self._paths if (path.name, path.version) in theirs]
            found = chosen.keep(key, _choice(self._wanted, known, request, costs))
        return found


def _choice(wanted: str, known: Sequence[TransferPlanner], request: PathRequest, costs: CostModel) -> PathChoice:
    """Choose among all paths, and for an uncut room among those that need no staging memory.

    A rank that sends nothing of a room keeps its choice.
    """
    path, reason = choose_path(wanted, known, request, costs)
    if not request.pair.parts:
        return PathChoice(path, reason, None)
    maps = any(maps_pages(one) and _refusal(one, request) is None for one in known)
    unstaged = maps and path.exposes_pages
    if request.uncut and not path.exposes_pages:
        try:
            path, _ = choose_path(wanted, [one for one in known if one.exposes_pages], request, costs)
        except ConfigurationError as exc:
            raise ConfigurationError(f"the room is uncut, and {path.name} needs staging memory: {exc}") from exc
        reason = f"the room is uncut, so {path.name} stands in for the choice ({reason})"
    return PathChoice(path, reason, unstaged)


def choose_path(
    wanted: str, known: Sequence[TransferPlanner], request: PathRequest, costs: CostModel
) -> tuple[TransferPlanner, str]:
    """The path, and one sentence that says why.

    Args:
        wanted: a path's name, or ``"auto"``.
        known: the paths that both sides have in the same version.
        request: what the path is for.
        costs: of this pair.

    Raises:
        ConfigurationError: no path can; an explicit one cannot. The message has every reason.
    """
    refusals: dict[str, str] = {}
    able: list[TransferPlanner] = []
    for path in known:
        if wanted not in (AUTO, path.name):
            continue
        reason = _refusal(path, request)
        if reason is None:
            able.append(path)
        else:
            refusals[path.name] = reason
    if wanted != AUTO:
        if able:
            return able[0], f"{wanted} was asked for"
        raise ConfigurationError(f"path {wanted!r} cannot: {refusals.get(wanted, 'decode does not know it')}")
    if not request.pair.parts and able:
        return able[0], "this rank was not elected to send anything"
    intake, writer, limits = request.intake, request.writer, fitted(request.intake, request.writer, request.limits)
    segments = intake.segments(writer, 0, request.rows or NOMINAL_ROWS, limits)
    jobs = [Job(request.pair, segment) for segment in segments]
    nbytes = sum(intake.part_bytes(segment, writer) for segment in segments)
    estimates = []
    for path in able:
        count = sum(map(path.count, jobs))
        if maps_pages(path):
            estimates.append(costs.estimate_mapped(path.name, count, nbytes))
        else:
            staged = 0 if path.exposes_pages else len(segments)
            estimates.append(costs.estimate(path.name, count, nbytes, staged))
    choice = choose(estimates, refusals)
    return next(p for p in able if p.name == choice.path), choice.reason


def fitted(intake: Intake, writer: Rank, limits: Limits) -> Limits:
    """The same limits, or none where staging is too small: a path that exposes pages needs none.

    All writers of a segment come to the same result, as limits hold for all their parts together.
    """
    try:
        intake.segments(writer, 0, 1, limits)
    except OversizeError:
        return evolve(UNLIMITED, page_rows=limits.page_rows)
    return limits


def segment_limits(request: PathRequest) -> Limits:
    """What cuts a chunk into segments: staging memory, where some writer's bytes may go through it.

    In an uncut room one segment costs each side one frame, and the GPU one launch.
    """
    if request.uncut:
        return evolve(UNLIMITED, page_rows=request.limits.page_rows)
    return fitted(request.intake, request.writer, request.limits)


def _refusal(path: TransferPlanner, request: PathRequest) -> str | None:
    if path.name not in request.allowed:
        return "decode does not allow it"
    if path.exposes_pages and not request.exposed:
        return "decode's pages are not exposed"
    if maps_pages(path) and request.unmapped is not None:
        return request.unmapped
    try:
        if not path.exposes_pages:
            request.intake.segments(request.writer, 0, 1, request.limits)
        return refusal(path, request.pair)
    except DisaggKVError as exc:
        return str(exc)
