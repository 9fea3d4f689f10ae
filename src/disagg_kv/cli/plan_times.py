"""The times that ``plan`` shows: by rates that the user states, or that a probe measured."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from attrs import frozen

from ..errors import ConfigurationError
from ..strategies import Explanation


@frozen
class Rates:
    """How fast bytes move.

    Args:
        wire_gb_s: GB/s of a rank's wire; None: not known.
        copy_gb_s: GB/s of a copy within a rank; None: not known.
        source: where the numbers are from.
    """

    wire_gb_s: float | None
    copy_gb_s: float | None
    source: str = "stated"


@frozen
class Times:
    """Bounds for one request: nothing overlaps, nothing else uses the wire.

    Args:
        nbytes: of the rank that moves most.
        rates: that were used.
    """

    nbytes: int
    rates: Rates

    @property
    def wire_s(self) -> float | None:
        """Of the wire; the same on every path."""
        return self.nbytes / self.rates.wire_gb_s / 1e9 if self.rates.wire_gb_s else None

    @property
    def copies_s(self) -> float | None:
        """Of the gather and the scatter of ``staged``; other paths copy nothing beside the wire."""
        return 2 * self.nbytes / self.rates.copy_gb_s / 1e9 if self.rates.copy_gb_s else None

    def __str__(self) -> str:
        rates, parts = self.rates, list[str]()
        if self.wire_s is not None:
            parts.append(f"{self.wire_s * 1e3:.3g} ms on the wire at {rates.wire_gb_s:.4g} GB/s")
        if self.copies_s is not None:
            parts.append(f"{self.copies_s * 1e3:.3g} ms of copies if staged at {rates.copy_gb_s:.4g} GB/s")
        return f"times ({rates.source}): the busiest rank's {self.nbytes:,} bytes take {', '.join(parts)}"


def times(found: Explanation, rates: Rates) -> Times | None:
    """For the rank that sends or receives most; None: no rate is known."""
    if rates.wire_gb_s is None and rates.copy_gb_s is None:
        return None
    ranks = Counter[tuple[str, int]]()
    for pair in found.pairs:
        ranks["prefill", pair.writer] += pair.nbytes
        ranks["decode", pair.target] += pair.nbytes
    return Times(max(ranks.values(), default=0), rates)


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
