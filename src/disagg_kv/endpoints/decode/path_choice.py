"""Which path a room takes, and why: one for all prefill ranks that send rows of it here. ``Expect`` names it.

Both sides have to know a path. Where that leaves one, as a side asked for it by name, it is taken. Else the rule of
``auto`` holds, :data:`~disagg_kv.strategies.AUTO_ORDER`: copies into mapped pages, if each of these ranks announces
that our pool is mapped there; else staging memory; else single writes into exposed pages. A rank announces it with the
answer to the first ``Expect`` that it gets, so the first room is staged.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from ...errors import ConfigurationError, DisaggKVError
from ...geometry import read_as
from ...ids import Epoch, Rank
from ...planning import InstancePlans, Limits, PairPlan, RankPlan, RowRange
from ...planning.cache import PlanCache
from ...strategies import TransferPlanner, exposes_pages, in_auto_order, refusal
from ..peers.handshake import EndpointInfo, RemoteEndpoint, page_rows

UNSAID = "decode does not know yet whether its pool is mapped there"


@frozen(eq=False)
class PathChoice:
    """The path of a room.

    Args:
        path: what carries its rows.
        reason: one sentence that says why.
        unsegmented: no staging slot cuts its segments. Kernels of all ranks that send rows have to queue copies for
            that: others keep a thread for as long as a segment takes.
    """

    path: TransferPlanner
    reason: str
    unsegmented: bool


_Question = tuple[tuple[Epoch, ...], int, tuple[str, ...]]
"""The prefill ranks, a rotation, and why our pool is not mapped at each rank."""


class PathChooser:
    """Runs on the thread that advances. What it chose is kept, as few rooms differ.

    Args:
        me: this endpoint; its paths are those that its strategy allows.
    """

    def __init__(self, me: EndpointInfo) -> None:
        self._me = me
        self._chosen: PlanCache[_Question, PathChoice] = PlanCache()

    def choose(
        self,
        remotes: Sequence[RemoteEndpoint],
        said: tuple[str, ...],
        plans: InstancePlans,
        rotation: int,
        rows: RowRange,
        unexposed: str | None = None,
    ) -> PathChoice:
        """Choose the path of a room.

        Args:
            remotes: all prefill ranks, by rank.
            said: why our pool is not mapped at each of them; empty: it is.
            plans: between them and this rank.
            rotation: of the room.
            rows: those that are awaited.
            unexposed: why its pages cannot be exposed; None: they can.

        Raises:
            ConfigurationError: no path can; the message has the reason of each.
        """
        key = tuple(one.epoch for one in remotes), rotation, said
        found = self._chosen.get(key) if unexposed is None else None
        if found is not None:
            return found
        rank_plan = plans.rank_plan(rotation)
        writers = [
            (remote, plans.pair(rotation, Rank(rank), read_as(remote.site, self._me.site.spec), rows))
            for rank, remote in enumerate(remotes)
            if rank_plan.parts[rank]
        ]
        common = [p for p in self._me.paths if all((p.name, p.version) in one.hello.paths for one in remotes)]
        asked = len(common) == 1
        refusals: dict[str, str] = {}
        for path in common if asked else in_auto_order(common):
            why = unexposed if exposes_pages(path) else None
            for remote, pair in writers:
                unmapped = "" if asked else said[remote.hello.rank]
                why = why or self._refusal(path, remote, rank_plan, pair, unmapped)
            if why is None:
                refused = "; ".join(f"{name} cannot: {reason}" for name, reason in refusals.items())
                reason = f"both sides allow only {path.name}" if asked else f"auto takes {path.name}"
                reason = f"{reason}; {refused}" if refused else reason
                queue = path.mover == "mapped" and all(remote.hello.queues for remote, _ in writers)
                choice = PathChoice(path, reason, bool(writers) and queue)
                return choice if unexposed is not None else self._chosen.keep(key, choice)
            refusals[path.name] = why
        reasons = "; ".join(f"{name} cannot: {why}" for name, why in refusals.items())
        raise ConfigurationError(f"no path is left: {reasons or 'none that both sides know'}")

    def _refusal(
        self, path: TransferPlanner, remote: RemoteEndpoint, rank_plan: RankPlan, pair: PairPlan, unmapped: str
    ) -> str | None:
        """Why a path cannot carry what one prefill rank sends; None: it can."""
        rank = Rank(remote.hello.rank)
        if path.mover == "mapped" and unmapped:
            return f"prefill rank {rank}: {unmapped}"
        try:
            if not exposes_pages(path):
                limits = Limits(remote.hello.slot_bytes, self._me.lease_bytes, page_rows(self._me.site))
                rank_plan.segments(rank, 0, 1, limits)
            why = refusal(path, pair)
        except DisaggKVError as exc:
            why = str(exc)
        return None if why is None else f"prefill rank {rank}: {why}"
