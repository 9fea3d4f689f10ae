"""What tests of engines, transports and strategies need; ships with the package.

The conformance suites are modules of their own, because they need pytest: ``disagg_kv.testing.transport`` and others.
"""

from .clock import FakeClock
from .faults import Fault, FaultyTransport, MappingFault, MappingPlan, Plan, faultless

__all__ = ["FakeClock", "Fault", "FaultyTransport", "MappingFault", "MappingPlan", "Plan", "faultless"]
