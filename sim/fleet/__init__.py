"""A simulated fleet: real endpoints by the hundred on a fake clock, network and store, without kernels and memory.

``run_fleet(FleetPlan(prefills=20, decodes=20))`` lets all ranks join, then routes requests from any prefill rank to any
decode rank, and returns what that took. See ``python -m sim --fleet``.
"""

from .fleet import run_fleet
from .plan import ALL_FAULTS, FleetFault, FleetPlan, FleetResult, fleet_size, named_faults

__all__ = ["ALL_FAULTS", "FleetFault", "FleetPlan", "FleetResult", "fleet_size", "named_faults", "run_fleet"]
