"""The three axes of a strategy: the path (how bytes cross), the schedule (when), the selection (which rows)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal, Protocol

from attrs import field, frozen

from ..ids import GroupId
from ..planning import Groups, LayerRun, PageCopy, PairPlan, Segment, StagedLayout, Tables, Writes

MoverName = Literal["direct", "mapped", "staged"]
"""What carries out the plans of a path on the prefill side."""


@frozen
class Job:
    """One writer's part of one segment, as both sides of it see it.

    Args:
        pair: what the writer sends to the receiver, and both pools.
        segment: which rows and layers.
        source_tables: the room's pages at the writer; empty for ``receive`` and ``count``.
        target_tables: the room's pages at the receiver; for ``send`` empty unless they are exposed.
    """

    pair: PairPlan
    segment: Segment
    source_tables: Tables = field(factory=dict)
    target_tables: Tables = field(factory=dict)


class TransferPlanner(Protocol):
    """How the bytes of one part cross. Pure: it plans, the endpoints act.

    A path has code on both sides, so the endpoints agree on (name, version) before they use it. It names the mover that
    carries out what ``send`` plans:

    * ``"staged"`` goes through a lease of the receiver's ring: ``send`` says what to gather, ``receive`` what to
      scatter, both as a ``StagedLayout``, with equal sizes and order.
    * ``"direct"`` writes straight into the receiver's pages, as ``Writes`` say.
    * ``"mapped"`` copies into the receiver's pages with a kernel of the writer, as a ``PageCopy`` says. Endpoints offer
      such a path only where the transport maps the peer (:class:`~disagg_kv.transports.SupportsMapping`).

    The last two expose pages of the receiver.

    Decode names the path of each room. ``auto`` takes paths of the library alone; any other is taken where a side asks
    for it by name.

    The same arguments give the same answer: endpoints keep answers. The thread that advances calls; nothing may block.

    Args:
        name: a plain word of its own.
        version: a number, raised when both sides have to change at once.
        mover: see above; never changes.
    """

    name: str
    version: int
    mover: MoverName

    def refuse(self, pair: PairPlan) -> str | None:
        """Why this path cannot move the parts of a pair between its pools, with the numbers; None: it can."""
        ...

    def send(self, job: Job) -> Writes | StagedLayout | PageCopy:
        """What the writer posts (exposed pages: buffer numbers of both sites), gathers, or copies.

        Raises:
            GeometryError: page tables that do not cover the segment.
        """
        ...

    def receive(self, job: Job) -> StagedLayout:
        """What the receiver scatters; never called where pages are exposed."""
        ...

    def count(self, job: Job) -> int:
        """How many writes the job takes, at most; it reads no page tables."""
        ...


def exposes_pages(path: TransferPlanner) -> bool:
    """Whether the writer reaches pages of the receiver, and not only leases of its ring."""
    return path.mover != "staged"


def refusal(path: TransferPlanner, pair: PairPlan) -> str | None:
    """Why a path cannot move the parts of a pair: its own reason, or that no kernel of the writer converts them."""
    if pair.source.converts is not None and path.mover == "direct":
        return f"no kernel is on this path, but the cache is converted on the way ({pair.source.converts})"
    return path.refuse(pair)


class Feature(StrEnum):
    """What an engine may do in a forward pass that sending single layers early would break."""

    DP_ATTENTION = "dp_attention"
    EXPERT_STATISTICS = "expert_statistics"
    DRAFT_MODEL = "draft_model"
    INPUT_EMBEDDINGS = "input_embeddings"
    MULTIMODAL = "multimodal"

    @property
    def why(self) -> str:
        """The reason why single layers cannot be sent early."""
        return _WHY[self]


_WHY = {
    Feature.DP_ATTENTION: "its ranks wait for each other inside the pass, and must all hold the same layers back",
    Feature.EXPERT_STATISTICS: "they are collected over a whole pass",
    Feature.DRAFT_MODEL: "its layers write to the cache after the target's last layer",
    Feature.INPUT_EMBEDDINGS: "they may be computed again, and the layers with them",
    Feature.MULTIMODAL: "its inputs may be merged into rows after the first layers were announced",
}


class Selection(Protocol):
    """Which rows of a request cross. Pure.

    Decode asks where to begin, from what its engine holds already; prefill asks whether it begins there. All ranks of
    an instance must come to the same row, so the answers may depend on nothing but their arguments.
    """

    @property
    def name(self) -> str:
        """A plain word."""
        ...

    def start(self, held: Mapping[GroupId, int], page_rows: int) -> int:
        """Decode: the first row that crosses.

        Args:
            held: leading rows that the request's pages hold already, for every group of pages of tokens.
            page_rows: the answer is a multiple of it, and at most what every group holds.

        Raises:
            ConfigurationError: it does not take what is held.
        """
        ...

    def accepts(self, start: int) -> bool:
        """Prefill: whether a decode rank may leave out the rows before ``start``."""
        ...


class Schedule(Protocol):
    """When the rows of a chunk cross. Pure.

    All ranks of an instance that send parts of one segment must come to the same groups, so the answer may depend on
    nothing but its argument.
    """

    @property
    def name(self) -> str:
        """A plain word."""
        ...

    def groups(self, run: LayerRun) -> Groups:
        """Into which groups a run of layers is cut; each crosses as soon as all its layers are final."""
        ...
