"""How long each path takes, roughly, and the choice by the order of ``auto``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from attrs import field, frozen

from ..errors import ConfigurationError

GPU_COPY_BYTES_PER_S = 1.4e12
"""Gathers and scatters of an H100, in bytes of the part; see "Gather and scatter on a GPU" among the benchmarks."""


@frozen
class Estimate:
    """What one path would post, and how long that would take.

    Args:
        path: its name.
        descriptors: writes.
        nbytes: bytes on the wire.
        seconds: estimated time from first post to last byte in its page.
    """

    path: str
    descriptors: int
    nbytes: int
    seconds: float


@frozen
class Choice:
    """The path that was taken, one sentence that says why, and the estimates that were compared."""

    path: str
    reason: str
    estimates: tuple[Estimate, ...]


def _positive(instance: object, attribute: object, value: float) -> None:
    if not value > 0:
        raise ConfigurationError(f"cost model: {getattr(attribute, 'name', attribute)} must be positive, not {value}")


@frozen
class CostModel:
    """Rough costs of one pair of ranks; good enough to tell paths that differ by factors apart.

    Args:
        write_s: seconds per descriptor, besides its bytes.
        bytes_per_s: wire.
        copy_bytes_per_s: gather or scatter, bytes of the part per second.
        round_trip_s: seconds for a grant.
        launch_s: seconds to launch one gather, scatter or copy.
        mapped_share: of ``bytes_per_s``, what a copy from pages to mapped pages reaches.
    """

    write_s: float = field(default=1e-6, validator=_positive)
    bytes_per_s: float = field(default=4e9, validator=_positive)
    copy_bytes_per_s: float = field(default=4e9, validator=_positive)
    round_trip_s: float = field(default=2e-4, validator=_positive)
    launch_s: float = field(default=2e-5, validator=_positive)
    mapped_share: float = field(default=0.9, validator=_positive)

    @classmethod
    def of_transport(cls, write_s: float, bytes_per_s: float, device: str) -> Self:
        """Costs between two ranks.

        Args:
            write_s: as the transport states it.
            bytes_per_s: the same.
            device: of the pools.
        """
        if device.startswith("cuda"):
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
        wire = descriptors * self.write_s + nbytes / self.bytes_per_s
        if segments == 0:
            return Estimate(path, descriptors, nbytes, wire)
        copy = self.launch_s * segments + nbytes / self.copy_bytes_per_s
        ends = 1 if segments == 1 else 2 * (segments - 1)
        fill = (2 * copy + wire - max(copy, wire)) / ends
        return Estimate(path, descriptors, nbytes, self.round_trip_s + max(copy, wire) + fill)

    def estimate_mapped(self, path: str, launches: int, nbytes: int) -> Estimate:
        """Time of a path whose kernels copy from pages to mapped pages: nothing is granted, gathered or scattered."""
        seconds = launches * self.launch_s + nbytes / (self.mapped_share * self.bytes_per_s)
        return Estimate(path, launches, nbytes, seconds)


def choose(estimates: Sequence[Estimate], refusals: Mapping[str, str]) -> Choice:
    """Take the first of the paths that can.

    Args:
        estimates: one per path that can, in the order in which they are preferred.
        refusals: the reason of each path that cannot.

    Raises:
        ConfigurationError: no path can; the message has every reason.
    """
    refused = [f"{path} cannot: {reason}" for path, reason in refusals.items()]
    if not estimates:
        raise ConfigurationError(f"no path is left: {'; '.join(refused) or 'none was offered'}")
    best, *others = estimates
    would = [f"{other.path} would take {_describe(other)}" for other in others]
    return Choice(best.path, "; ".join([f"{best.path} takes {_describe(best)}", *would, *refused]), tuple(estimates))


def _describe(estimate: Estimate) -> str:
    return f"{estimate.seconds * 1e3:,.2f} ms for {estimate.descriptors:,} writes of {estimate.nbytes:,} bytes"
