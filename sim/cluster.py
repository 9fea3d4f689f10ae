"""The processes of a simulation, what connects them, and the rooms that they serve."""

from __future__ import annotations

from collections.abc import Callable

from disagg_kv.ids import Epoch

from .dma import Dma
from .fault import FaultClass
from .network import Network
from .node import SimNode
from .request import Request
from .rooms import Entry, SimRoom
from .scenario import Scenario
from .simulation import Simulation

UNHEARD = (
    FaultClass.DROP, FaultClass.DELAY, FaultClass.PARTITION,
    FaultClass.CLOG, FaultClass.PAUSE, FaultClass.PREFILL_CRASH, FaultClass.DECODE_CRASH, FaultClass.BROKEN,
    FaultClass.POLL,
)  # fmt: skip
"""Faults after which a rank may wait in vain for a frame of another."""


class Cluster(Simulation):
    """What checks and faults look at.

    Args:
        scenario: what is drawn.
        trace: takes a line per event, for people.
    """

    def __init__(self, scenario: Scenario, trace: Callable[[str], None] | None = None) -> None:
        super().__init__(scenario, trace)
        self.stood_still = 0.0
        self.errors: list[str] = []
        self.places: dict[str, SimNode] = {}
        self.lives: dict[Epoch, SimNode] = {}
        self.groups: dict[str, list[SimNode]] = {}
        self.dead: list[SimNode] = []
        self.entries: dict[int, Entry] = {}
        self.rooms: list[SimRoom] = []
        self.passes: dict[str, list[list[tuple[int, int]]]] = {}
        """Of an instance whose ranks compute the same passes: of each pass, the numbers of its rooms and chunks."""
        self.last: list[Request] | None = None
        """Requests that come after all that was drawn; None: it is too early for them."""
        self.network = Network(self)
        self.dma = Dma(self)

    @property
    def nodes(self) -> list[SimNode]:
        """The processes that live."""
        return list(self.places.values())

    @property
    def unheard(self) -> bool:
        """Whether frames between ranks of one instance may be lost: they then wait until a silent peer is lost."""
        return any(f in self.hits for f in UNHEARD)

    @property
    def calm(self) -> bool:
        """Whether only the requests are left that come after all that was drawn."""
        return self.last is not None

    def instance(self, group: str) -> list[SimNode]:
        """The ranks of an instance, dead ones included."""
        return self.groups[group]
