"""Which path is cheapest, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Self

from attrs import field, frozen

from ..errors import ConfigurationError

GPU_COPY_BYTES_PER_S = 1.4e12
"""Gathers and scatters of an H100, in bytes of the part; see "Gather and scatter on a GPU" among the benchmarks."""

NOTICE_S = 5e-5
"""Roughly how long after the end of a write its end is seen."""

STEPS = 4
"""Steps of measured rates in a factor of two: estimates that differ by less are equal anyhow."""


@frozen
class Estimate:
    """What one path would post, and how long that would take.

    Args:
        path: its name.
        descriptors: writes.
        nbytes: bytes on the wire.
        seconds: estimated time from first post to last byte in its page.
        measured: the measured bytes per second that the time is of; None: nominal costs.
    """

    path: str
    descriptors: int
    nbytes: int
    seconds: float
    measured: float | None = None


@frozen
class Choice:
    """The path that was taken, one sentence that says why, and the estimates that were compared."""

    path: str
    reason: str
    estimates: tuple[Estimate, ...]


def _positive(instance: object, attribute: object, value: float) -> None:
    if not value > 0:
        raise ConfigurationError(f"cost model: {getattr(attribute, 'name', attribute)} must be positive, not {value}")


def rounded(bytes_per_s: float) -> float:
    """A measured rate in coarse steps, so that choices by it are few and seldom change."""
    return math.exp2(round(math.log2(bytes_per_s) * STEPS) / STEPS)


@frozen
class MeasuredRates:
    """What a lane was seen to carry, in bytes per second, :func:`rounded`; None: not known.

    Args:
        writes: of its transport's writes, without a gather or a scatter.
        copies: of kernels from pages to mapped pages; those of decode, which are not seen here, count as fast.
    """

    writes: float | None = None
    copies: float | None = None


NOMINAL = MeasuredRates()
"""Nothing was measured."""


@frozen
class CostModel:
    """Rough costs of one pair of ranks; good enough to tell paths that differ by factors apart.

    The nominal costs of a lane with measured rates are ``evolve(costs, measured=rates)``. What was not measured keeps
    its nominal rate, so that a path which was never used is still compared.

    Args:
        write_s: seconds per descriptor, besides its bytes.
        bytes_per_s: wire.
        copy_bytes_per_s: gather or scatter, bytes of the part per second.
        round_trip_s: seconds for a grant.
        launch_s: seconds to launch one gather, scatter or copy.
        mapped_share: of ``bytes_per_s``, what a copy from pages to mapped pages reaches.
        measured: rates that replace the nominal ones.
    """

    write_s: float = field(default=1e-6, validator=_positive)
    bytes_per_s: float = field(default=4e9, validator=_positive)
    copy_bytes_per_s: float = field(default=4e9, validator=_positive)
    round_trip_s: float = field(default=2e-4, validator=_positive)
    launch_s: float = field(default=2e-5, validator=_positive)
    mapped_share: float = field(default=0.9, validator=_positive)
    measured: MeasuredRates = NOMINAL

    @classmethod
    def of_lane(cls, write_s: float, bytes_per_s: float, device: str, maps: bool) -> Self:
        """Costs between two ranks.

        Args:
            write_s: as the transport states it.
            bytes_per_s: the same.
            device: of the pools.
            maps: decode's pool is mapped. Copies into it then cost least at every size, and a rough rate of gathers
                shall not decide otherwise for large requests.
        """
        if device.startswith("cuda") and not maps:
            return cls(write_s=write_s, bytes_per_s=bytes_per_s, copy_bytes_per_s=GPU_COPY_BYTES_PER_S)
        return cls(write_s=write_s, bytes_per_s=bytes_per_s)

    def estimate(self, path: str, descriptors: int, nbytes: int, segments: int = 0) -> Estimate:
        """Time of one path.

        Args:
            path: its name.
            descriptors: writes in all.
            nbytes: bytes in all.
            segments: pieces that go through staging, so that gather, wire and scatter of consecutive pieces overlap; of
                several the first and the last are half as long as the others, see :meth:`Intake.cut`. 0: bytes go
                straight from pages to pages.
        """
        known = self.measured.writes
        wire = descriptors * self.write_s + nbytes / (known or self.bytes_per_s)
        if segments == 0:
            return Estimate(path, descriptors, nbytes, wire, known)
        copy = self.launch_s * segments + nbytes / self.copy_bytes_per_s
        ends = 1 if segments == 1 else 2 * (segments - 1)
        fill = (2 * copy + wire - max(copy, wire)) / ends
        return Estimate(path, descriptors, nbytes, self.round_trip_s + max(copy, wire) + fill, known)

    def estimate_mapped(self, path: str, launches: int, nbytes: int) -> Estimate:
        """Time of a path whose kernels copy from pages to mapped pages: nothing is granted, gathered or scattered."""
        known = self.measured.copies
        seconds = launches * self.launch_s + nbytes / (known or self.mapped_share * self.bytes_per_s)
        return Estimate(path, launches, nbytes, seconds, known)


def shows_rate(descriptors: int, nbytes: int, write_s: float, bytes_per_s: float) -> bool:
    """Whether bytes take long at the nominal rate, against the costs of their writes and the notice of their end.

    Only then is their time, divided, a rate at which more bytes would cross.
    """
    return nbytes / bytes_per_s >= 10 * (NOTICE_S + descriptors * write_s)


def choose(estimates: Sequence[Estimate], refusals: Mapping[str, str]) -> Choice:
    """Take the fastest of the paths that can; of equal ones the first.

    Args:
        estimates: one per path that can.
        refusals: the reason of each path that cannot.

    Raises:
        ConfigurationError: no path can; the message has every reason.
    """
    refused = [f"{path} cannot: {reason}" for path, reason in refusals.items()]
    if not estimates:
        raise ConfigurationError(f"no path is left: {'; '.join(refused) or 'none was offered'}")
    best = min(estimates, key=lambda e: e.seconds)
    others = [f"{e.path} would take {_describe(e)}" for e in estimates if e is not best]
    reason = f"{best.path} takes {_describe(best)}"
    return Choice(best.path, "; ".join([reason, *others, *refused]), tuple(estimates))


def _describe(estimate: Estimate) -> str:
    what = f"{estimate.seconds * 1e3:,.2f} ms for {estimate.descriptors:,} writes of {estimate.nbytes:,} bytes"
    return what if estimate.measured is None else f"{what} at {estimate.measured / 1e9:.3g} GB/s, as measured"
