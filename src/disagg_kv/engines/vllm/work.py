"""What the scheduler's side asks of every rank in a step. Values only: they are pickled to the ranks."""

from __future__ import annotations

from typing import TypeAlias

from attrs import define, field, frozen

from ...geometry import PageTable
from ...ids import GroupId
from .params import Origin

Pages: TypeAlias = tuple[tuple[GroupId, tuple[int, ...], int], ...]
"""Per group its id, page ids, and the row at which the first page begins."""


def tables(pages: Pages) -> list[PageTable]:
    """As the endpoints take them."""
    return [PageTable(group, list(ids), first) for group, ids, first in pages]


@frozen
class Chunk:
    """Rows of a prefill request that this step computes.

    Args:
        transfer: id of the transfer.
        stop: one past the last row.
        rows: how many there are since the request's last chunk.
        pages: of these.
        last: these are the last rows of the prompt.
        tag: digest of the prompt.
        states: of the last rows, the slot of each group of states.
    """

    transfer: str
    stop: int
    rows: int
    pages: Pages
    last: bool
    tag: bytes
    states: Pages = ()


@frozen
class Load:
    """Rows that a decode request awaits.

    Args:
        origin: where they come from.
        stop: one past the last row.
        pages: where they go.
        held: leading rows that are in vLLM's prefix cache, per group.
        tag: digest of the prompt.
        states: the slot of each group of states.
        claim_s: seconds within which the other instance must open the transfer; None: as in the options.
    """

    origin: Origin
    stop: int
    pages: Pages
    held: dict[GroupId, int]
    tag: bytes
    states: Pages = ()
    claim_s: float | None = None


@frozen
class Hold:
    """Rows of an answer, which the instance that prefills the next turn may ask for.

    Args:
        transfer: id of the transfer.
        stop: one past the last row.
        pages: of the rows.
        tag: digest of their tokens.
        seconds: within which it is expected to ask.
    """

    transfer: str
    stop: int
    pages: Pages
    tag: bytes
    seconds: float


@frozen
class Declined:
    """A transfer that this decode instance does not need.

    Args:
        origin: where it would come from.
        tag: digest of the prompt. A transfer of another prompt is another request's, and goes on. Empty: any.
    """

    origin: Origin
    tag: bytes


@define
class StepWork:
    """One step of all ranks, by request id.

    Args:
        chunks: prefill requests whose rows this step computes.
        preempted: prefill requests whose pages the engine takes back before this step.
        loads: decode requests that begin to wait.
        declined: transfers that this decode instance does not need; prefill frees their pages.
        refused: decode requests that cannot be loaded, and why.
        unsent: transfers of prefill requests that ended before any row was computed.
        aborted: requests of either side that the engine has ended.
        early: prefill requests that still wait in the engine's queue: id of the transfer, and digest of the prompt.
        queued: transfers whose decode requests wait in the engine's queue.
        left: those of earlier ``queued`` that wait there no more, by id.
        holds: decode requests that have ended, whose rows are held.
        dropped: prefill requests that ended while they awaited rows; their transfers end.
        idle: the step computes nothing.
    """

    chunks: dict[str, Chunk] = field(factory=dict)
    preempted: list[str] = field(factory=list)
    loads: dict[str, Load] = field(factory=dict)
    declined: list[Declined] = field(factory=list)
    refused: dict[str, Exception] = field(factory=dict)
    unsent: list[str] = field(factory=list)
    aborted: list[str] = field(factory=list)
    early: dict[str, tuple[str, bytes]] = field(factory=dict)
    queued: list[Origin] = field(factory=list)
    left: list[str] = field(factory=list)
    holds: dict[str, Hold] = field(factory=dict)
    dropped: list[str] = field(factory=list)
    idle: bool = False

    def __bool__(self) -> bool:
        requests = (self.chunks, self.preempted, self.loads, self.declined, self.refused, self.unsent, self.aborted)
        return any((*requests, self.early, self.queued, self.left, self.holds, self.dropped))


@frozen
class RankAddress:
    """The address of a prefill rank, for vLLM's handshake between workers and scheduler."""

    address: str
