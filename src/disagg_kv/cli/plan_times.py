"""The times that ``plan`` shows: by rates that the user states, or that a probe measured."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from math import inf
from pathlib import Path

from attrs import frozen

from ..errors import ConfigurationError
from ..strategies import Explanation


@frozen
class Rates:
    """How fast bytes move, and what follows for one request: nothing overlaps, nothing else uses the wire.

    Args:
        wire_gb_s: GB/s of a rank's wire; None: not known.
        copy_gb_s: GB/s of a copy within a rank; None: not known.
        source: where the numbers are from.
    """

    wire_gb_s: float | None
    copy_gb_s: float | None
    source: str = "stated"

    def times(self, nbytes: int) -> tuple[float | None, float | None]:
        """Seconds of a rank's bytes on the wire, and of their gather and scatter if they are staged."""
        wire = self.wire_gb_s and nbytes / self.wire_gb_s / 1e9
        return wire, self.copy_gb_s and 2 * nbytes / self.copy_gb_s / 1e9

    def text(self, nbytes: int) -> str:
        """The times for people; empty: no rate is known."""
        wire, copies = self.times(nbytes)
        parts = [] if wire is None else [f"{wire * 1e3:,.1f} ms on the wire at {self.wire_gb_s:.4g} GB/s"]
        if copies is not None:
            parts.append(f"{copies * 1e3:,.1f} ms of copies if staged at {self.copy_gb_s:.4g} GB/s")
        return f"times ({self.source}): the busiest rank's {nbytes:,} bytes take {', '.join(parts)}" if parts else ""


def busiest(found: Explanation) -> int:
    """Bytes of the rank that sends or receives most."""
    ranks = Counter[tuple[str, int]]()
    for pair in found.pairs:
        ranks["prefill", pair.writer] += pair.nbytes
        ranks["decode", pair.target] += pair.nbytes
    return max(ranks.values(), default=0)


def measured(path: Path, transports: Collection[str]) -> Rates:
    """What ``disagg-kv doctor --between --json``, or ``--peer``, measured for the transport that all pairs take.

    Raises:
        ConfigurationError: the file is something else, or the transport was not measured, or there are several.
    """
    try:
        found = json.loads(path.read_text())
        lanes = {lane["transport"]: lane["gb_s"] for lane in found["transports"] if lane["gb_s"] is not None}
        copy_gb_s = float(found["copy_gb_s"])
        rates = {str(name): float(gb_s) for name, gb_s in lanes.items()}
        if not all(0.0 < gb_s < inf for gb_s in (copy_gb_s, *rates.values())):
            raise ValueError("a rate is not positive and finite")
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = "not what 'disagg-kv doctor --between --json' prints"
        raise ConfigurationError(f"--probe {path}: {what}: {type(error).__name__}: {error}") from error
    if len(transports) != 1 or not rates.keys() >= set(transports):
        taken = ", ".join(sorted(transports)) or "none"
        raise ConfigurationError(
            f"--probe {path}: measured {', '.join(rates) or 'none'}; the pairs of ranks take {taken}"
        )
    (name,) = transports
    return Rates(rates[name], copy_gb_s, f"measured, {name}")
