"""Checks of a rank's record, shared by every rendezvous."""

from __future__ import annotations

from .. import arguments
from ..core import MAX_RANKS
from ..errors import ConfigurationError
from ..ids import Rank


def check_rank(instance: str, rank: Rank, world: int) -> tuple[Rank, int]:
    """Plain numbers; a :class:`ConfigurationError` for a nameless instance or a rank outside ``[0, world)``."""
    rank = Rank(arguments.count(rank, "rank", least=-arguments.MOST))
    world = arguments.count(world, "world", least=-arguments.MOST)
    if not arguments.text(instance, "instance", most=256):
        raise ConfigurationError(f"rank {rank} of {world}: the instance has no name")
    if world > MAX_RANKS:
        raise ConfigurationError(f"instance {instance!r}: {world} ranks; at most {MAX_RANKS} are allowed")
    if not 0 <= rank < world:
        raise ConfigurationError(f"instance {instance!r}: rank {rank} is not one of {world}")
    return rank, world


def check_world(instance: str, rank: Rank, world: int, known: int) -> None:
    """Raise a :class:`ConfigurationError` if a rank's world size is not that of the ranks before it."""
    if world != known:
        raise ConfigurationError(
            f"instance {instance!r}: rank {rank} publishes {world} ranks, others published {known}"
        )
