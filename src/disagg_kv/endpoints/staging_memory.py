"""Memory for staging, and what moves it to and from pages."""

from __future__ import annotations

from collections.abc import Callable

from .. import arguments
from ..core import Verify
from ..errors import ConfigurationError, DisaggKVError, text_of
from ..kernels import Kernels, SupportsWarmUp, kernels_for
from ..memory import Buffer, MemoryPool, new_buffer
from ..staging import ALIGNMENT, StagingAllocator
from ..transports import SupportsAllocate, Transport


def new_staging(transport: Transport, nbytes: int, device: str) -> Buffer:
    """Staging memory: the transport's own where it has a say in that, else plain memory on ``device``.

    Raises:
        ConfigurationError: the transport gives memory of another kind than the pages on ``device``.
    """
    if not isinstance(transport, SupportsAllocate):
        return new_buffer(nbytes, device)
    staging = transport.allocate(nbytes)
    if staging.device.partition(":")[0] != device.partition(":")[0]:
        raise ConfigurationError(
            f"transport {transport.name!r} gives staging memory on {staging.device!r}, and the pool's pages lie on "
            f"{device!r}: gather and scatter copy within one kind of memory"
        )
    return staging


def exposable(transport: Transport, buffers: list[Buffer]) -> bool:
    """True where peers can write to these buffers once they are registered."""
    if not transport.caps.own_memory_only:
        return True
    return isinstance(transport, SupportsAllocate) and all(transport.allocated(b) for b in buffers)


def ready_kernels(pool: MemoryPool, kernels: Kernels | None, verify: Verify, copies: bool = False) -> Kernels:
    """The given kernels or the fastest for the pool's device, compiled for any peer: none waits for that.

    Checksums are, where this endpoint wants segments compared, and with ``copies`` those into peers' pages. What
    depends on the peer is left to :meth:`.prefill.read_pools.ReadPools.warm`.
    """
    chosen = kernels or kernels_for(pool.buffers[0].device)
    if isinstance(chosen, SupportsWarmUp):
        chosen.warm(pool)
        if copies:
            chosen.warm_copy(pool, pool)
        if verify != "off":
            chosen.warm_checksum(pool)
    return chosen


def staging_slots(slots: int, slot_bytes: int) -> int:
    """Bytes of a staging buffer.

    Raises:
        ConfigurationError: fewer than one slot, or slots in which no aligned part fits.
    """
    if slots < 1 or slot_bytes < ALIGNMENT or slot_bytes % ALIGNMENT:
        raise ConfigurationError(
            f"{slots} staging slots of {slot_bytes} bytes: a positive multiple of {ALIGNMENT} each"
        )
    return slots * slot_bytes


def made_by(allocator: Callable[[int], StagingAllocator], nbytes: int) -> StagingAllocator:
    """An allocator for a ring of ``nbytes`` bytes.

    Raises:
        ConfigurationError: the maker raises, or makes something else.
    """
    arguments.function(allocator, "allocator")
    try:
        made = allocator(nbytes)
    except DisaggKVError:
        raise
    except Exception as exc:
        raise ConfigurationError(f"allocator: {text_of(exc)}") from exc
    what = "a maker of staging allocators"
    arguments.methods(made, "allocator", what, "reserve", "release", "check_integrity")
    arguments.attributes(made, "allocator", what, "capacity", "alignment", "live_bytes")
    if made.capacity != nbytes or made.alignment < 1 or made.alignment % ALIGNMENT:
        made_of = f"{made.capacity} bytes, aligned to {made.alignment}"
        wanted = f"{nbytes} bytes are needed, aligned to a multiple of {ALIGNMENT}"
        raise ConfigurationError(f"allocator: {made_of}: {wanted}")
    return made
