"""Plans of faults that are drawn."""

from __future__ import annotations

import random
from collections.abc import Mapping

from disagg_kv.testing import Fault, Plan


def seeded(seed: int, shares: Mapping[Fault, float]) -> Plan:
    """A plan that draws each batch's fault, with the given probabilities, from the seed and the batch's number."""

    def plan(number: int) -> Fault | None:
        at = random.Random(f"{seed} {number}").random()
        for fault, share in shares.items():
            at -= share
            if at < 0:
                return fault
        return None

    return plan
