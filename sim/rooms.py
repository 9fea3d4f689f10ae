"""A room of a simulation on all ranks: what every part knows of it, and what faults may ask of its engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from attrs import define, field, frozen

from disagg_kv.core import Phase
from disagg_kv.endpoints.decode.handle import ReceptionHandle
from disagg_kv.endpoints.prefill.handle import DeliveryHandle
from disagg_kv.endpoints.prefill.rooms import PrefillSide
from disagg_kv.errors import DisaggKVError
from disagg_kv.geometry import PageTable
from disagg_kv.ids import Epoch, Generation, LayerId, room_name
from disagg_kv.memory import U8, Event
from disagg_kv.prefix import PrefixLease
from disagg_kv.rendezvous import Source

from .memory import states_truth, truth
from .node import SimNode
from .prefixes import transcript
from .request import Request
from .scenario import AUX_BYTES, Scenario


@define(eq=False)
class Entry:
    """One room on one rank: what its engine knows of it."""

    room: SimRoom
    node: SimNode
    handle: DeliveryHandle | ReceptionHandle | None = None
    pages: list[int] = field(factory=list)
    slots: list[int] = field(factory=list)
    given: int = 0
    aux: int | None = None
    lease: PrefixLease | None = None
    held: int = 0
    phase: Phase | None = None
    error: DisaggKVError | None = None
    freed: bool = False
    exposed: bool = False
    segments: int = 0
    refused: bool = False
    finished: bool = False
    withdrawal: Event | None = None
    opened: float = 0.0
    waits_from: float | None = None
    ended: float = 0.0
    asked: frozenset[tuple[Epoch, Generation]] = frozenset()

    def write(
        self,
        start: int,
        stop: int,
        pages: list[int],
        layer: int | None = None,
    ) -> None:
        """The forward pass, or one layer of it, is done: the rows are in their pages."""
        memory = self.node.memory
        memory.put((memory.cells, memory.want), pages, 0, start, stop, self.room.truth, layer)

    def await_states(self) -> None:
        """Where the rank has states, the room gets a slot for them."""
        memory = self.node.memory
        self.slots = slots = memory.take_slot(self.room.number)
        memory.put_states(memory.want, slots, self.room.states)

    def askers(self) -> frozenset[tuple[Epoch, Generation]]:
        """The decode ranks whose expectations a prefill rank has, and the generations that those have there."""
        view = self.node.view
        rooms = view.rooms.values() if isinstance(view, PrefillSide) else ()
        flows = [flow for room in rooms if room.handle is self.handle for flow in room.machine.flows.values()]
        return frozenset((flow.peer, flow.generation) for flow in flows)

    @property
    def over(self) -> bool:
        """Nothing more happens to it: it is ended and free, was never opened, or its process is gone."""
        return (self.freed and self.lease is None) or self.refused or not self.node.alive


@frozen(eq=False)
class Chunk:
    """The rows ``[start, stop)`` of a room on one rank, its ``number``-th chunk, and the pages that it has by then."""

    entry: Entry
    number: int
    start: int
    stop: int
    pages: list[int]
    tables: list[PageTable]

    def lay(self, layers: Sequence[LayerId | None]) -> None:
        """Layers (None: all) are in their pages; if those were taken away, the rows are given again with the others."""
        if self.entry.pages[: len(self.pages)] == self.pages:
            for layer in layers:
                self.entry.write(self.start, self.stop, self.pages, layer)


class SimRoom(ABC):
    """One attempt of a request on all ranks of both sides.

    Where its id was used before, ``first`` is the room that had it, whose bytes this one has too, and ``again`` are the
    addresses of the ranks whose engines open the id again.
    """

    def __init__(
        self,
        scenario: Scenario,
        number: int,
        plan: Request,
        prefill: Sequence[SimNode],
        decode: Sequence[SimNode],
        first: SimRoom | None = None,
        again: Collection[str] = (),
    ) -> None:
        self.number = number
        self.plan = plan
        self.prefill = [Entry(self, node) for node in prefill]
        self.decode = [Entry(self, node) for node in decode]
        self.given_up = False
        self.again = first is not None
        for entry in self.entries:
            entry.refused = self.again and entry.node.address not in again
        head = self.prefill[0].node
        self.source = Source(head.instance)
        model, prompt = scenario.model, plan.prompt
        if prompt is None:
            self.truth: U8 = truth(model, plan.room, number, head.epoch, plan.rows) if first is None else first.truth
        else:
            self.truth = transcript(model, scenario.conversations, prompt.conversation, scenario.seed).truth
        self.states = states_truth(model, plan.room, number, head.epoch)
        self.tag = self.truth[0].tobytes()[:8] if plan.rows else b"empty"
        self.aux = (plan.room + bytes([number]))[:AUX_BYTES]

    @property
    def entries(self) -> list[Entry]:
        """Of all ranks."""
        return [*self.prefill, *self.decode]

    @property
    def over(self) -> bool:
        """Every rank has ended and freed its pages."""
        return all(entry.over for entry in self.entries)

    def before(self, plan: Request) -> bool:
        """Whether another request begins only after this one is over."""
        if (plan.request, plan.back) == (self.plan.request, self.plan.back):
            return True
        mine, prompt = self.plan.prompt, plan.prompt
        return mine is not None and prompt is not None and prompt.waits and prompt.conversation == mine.conversation

    def name(self, entry: Entry) -> str:
        """For messages."""
        return f"{room_name(self.plan.room)} (number {self.number}) on {entry.node.address}"

    @abstractmethod
    def chunk(self, entry: Entry, number: int) -> None:
        """The next chunk has pages: hand it over, or announce it and compute it."""

    @abstractmethod
    def taken(self, entry: Entry, number: int) -> Chunk | None:
        """A chunk with its pages; None: it is not wanted any more, or it waits and comes again by itself."""

    @abstractmethod
    def withdraw(self, entry: Entry) -> None:
        """Preemption: once reads have ended the pages go to others, and later the rows are computed again."""

    @abstractmethod
    def abort(self, entry: Entry) -> None:
        """An engine gives a room up."""

    @abstractmethod
    def changed(self, entry: Entry) -> None:
        """The endpoint reports a change of a room."""
