"""Which path a request takes towards one decode rank, and why."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, field, frozen

from ...errors import ConfigurationError, DisaggKVError, OversizeError
from ...geometry import Share, Site
from ...ids import Rank
from ...planning import UNLIMITED, CostModel, Intake, Limits, PartView, Segment, choose
from ...strategies import AUTO, Job, TransferPlanner

NOMINAL_ROWS = 1024
"""Rows for which paths are compared while nobody knows how many there will be."""


@frozen
class RankPair:
    """One prefill rank and one decode rank, for one room's election."""

    rank: Rank
    source: Site
    target: Site
    intake: Intake = field(eq=id)  # both are kept by value: equal ones are one object
    view: PartView = field(eq=id)
    limits: Limits

    @property
    def parts(self) -> Sequence[Share]:
        """What the prefill rank was elected to send."""
        return self.intake.parts[self.rank]

    def cut(self, start: int, stop: int) -> list[Segment]:
        """The segments in which this rank sends these rows and the states.

        Raises:
            OversizeError: not one row fits a slot and a lease.
        """
        return self.intake.segments(self.rank, start, stop, self.limits)

    def fitted(self) -> RankPair:
        """The same, without limits where staging is too small: a path that exposes pages needs none.

        All writers of a segment come to the same result, as limits hold for all their parts together.
        """
        try:
            self.cut(0, 1)
        except OversizeError:
            return evolve(self, limits=evolve(UNLIMITED, page_rows=self.limits.page_rows))
        return self


def choose_path(
    wanted: str,
    known: Sequence[TransferPlanner],
    allowed: Sequence[str],
    exposed: bool,
    pair: RankPair,
    rows: int,
    costs: CostModel,
) -> tuple[TransferPlanner, str]:
    """The path, and one sentence that says why.

    Args:
        wanted: a path's name, or ``"auto"``.
        known: the paths that both sides have in the same version.
        allowed: names that decode allows for this request.
        exposed: its pages are exposed.
        pair: the two ranks.
        rows: rows of the request; 0: not known.
        costs: of this pair.

    Raises:
        ConfigurationError: no path can; an explicit one cannot. The message has every reason.
    """
    refusals: dict[str, str] = {}
    able: list[TransferPlanner] = []
    for path in known:
        if wanted not in (AUTO, path.name):
            continue
        reason = _refusal(path, allowed, exposed, pair)
        if reason is None:
            able.append(path)
        else:
            refusals[path.name] = reason
    if wanted != AUTO:
        if able:
            return able[0], f"{wanted} was asked for"
        raise ConfigurationError(f"path {wanted!r} cannot: {refusals.get(wanted, 'decode does not know it')}")
    if not pair.parts and able:
        return able[0], "this rank was not elected to send anything"
    rows = rows or NOMINAL_ROWS
    segments = pair.fitted().cut(0, rows)
    jobs = [Job(pair.source, pair.target, pair.parts, pair.view, s, {}, {}, pair.intake.room) for s in segments]
    nbytes = sum(pair.intake.part_bytes(s, pair.rank) for s in segments)
    estimates = []
    for path in able:
        staged = 0 if path.exposes_pages else len(segments)
        estimates.append(costs.estimate(path.name, sum(map(path.count, jobs)), nbytes, staged))
    choice = choose(estimates, refusals)
    return next(p for p in able if p.name == choice.path), choice.reason


def _refusal(path: TransferPlanner, allowed: Sequence[str], exposed: bool, pair: RankPair) -> str | None:
    if path.name not in allowed:
        return "decode does not allow it"
    if path.exposes_pages and not exposed:
        return "decode's pages are not exposed"
    try:
        if not path.exposes_pages:
            pair.cut(0, 1)
        return path.refuse(pair.source, pair.target, pair.parts)
    except DisaggKVError as exc:
        return str(exc)
