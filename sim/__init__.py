"""Deterministic simulation: the real endpoints on a fake clock, network, DMA engine and memory.

``simulate(seed)`` runs one drawn world from beginning to end and returns the rules that did not hold.
``simulate_many`` runs a range of seeds and returns the cases that none of them has reached. See the page "What is
promised and how it is tested".
"""

from .fault import EVERY, FaultClass
from .kind import Kind
from .report import GATE, Found, Summary, simulate_many
from .run import Outcome, simulate, trace
from .scenario import Scenario
from .simulation import Violation

__all__ = [
    "EVERY",
    "GATE",
    "FaultClass",
    "Found",
    "Kind",
    "Outcome",
    "Scenario",
    "Summary",
    "Violation",
    "simulate",
    "simulate_many",
    "trace",
]
