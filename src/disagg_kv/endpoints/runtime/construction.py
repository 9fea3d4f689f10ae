"""What an endpoint is made of, checked before anything of it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar
from weakref import ref

from ... import arguments
from ...channels import Channel
from ...errors import ConfigurationError
from ...geometry import Shard, Site
from ...kernels import Kernels
from ...memory import Buffer, MemoryPool, check_memory
from ...protocol import Options
from ...rendezvous import Rendezvous
from ...trace import Observer
from ...transports import Capabilities, Transport
from .background import Background, HelperThreads, inline
from .handshake import check_instance
from .incarnation import Incarnation

T = TypeVar("T")


def check_pool(pool: MemoryPool) -> None:
    """Check what :class:`~disagg_kv.memory.MemoryPool` says of a pool.

    Raises:
        ConfigurationError: what is no pool, is compared by value, or gives another answer when it is asked again.
        GeometryError: its memory is not what its site says.
    """
    arguments.methods(pool, "pool", "a pool", "read_aux", "write_aux")
    arguments.attributes(pool, "pool", "a pool", "site", "buffers", "aux_bytes")
    _check_identity(pool)
    site = arguments.one(pool.site, "pool: site", Site)
    buffers = arguments.several(pool.buffers, "pool: buffers", Buffer)
    if pool.site != site or tuple(pool.buffers) != buffers:
        raise ConfigurationError("pool: site and buffers must stay the same, and differ between two looks at them")
    arguments.count(pool.aux_bytes, "pool: aux_bytes")
    check_memory(site, buffers)


def _check_identity(pool: MemoryPool) -> None:
    """Kernels keep by the pool what they know of its memory, as long as there is the pool."""
    kind = type(pool)
    if kind.__eq__ is not object.__eq__ or kind.__hash__ is not object.__hash__:
        raise ConfigurationError(
            f"pool: {kind.__name__} is compared by value: a pool is compared by identity, so of a data class eq=False"
        )
    try:
        ref(pool)
    except TypeError as exc:
        raise ConfigurationError(
            f"pool: {kind.__name__} allows no weak reference: name '__weakref__' in its __slots__"
        ) from exc


def check_carriers(transport: Transport, channel: Channel, rendezvous: Rendezvous) -> None:
    """Raise a :class:`~disagg_kv.errors.ConfigurationError` for what cannot carry bytes, frames or addresses."""
    wanted = ("register", "local_descriptor", "peer_of", "connect", "disconnect", "submit", "poll", "close")
    arguments.methods(transport, "transport", "a transport", *wanted)
    arguments.attributes(transport, "transport", "a transport", "name", "caps")
    arguments.text(transport.name, "transport: name", least=1)
    arguments.one(transport.caps, "transport: caps", Capabilities)
    arguments.methods(channel, "channel", "a channel", "send", "poll", "wake", "forget", "close")
    arguments.attributes(channel, "channel", "a channel", "address")
    arguments.text(channel.address, "channel: address", least=1)
    arguments.methods(rendezvous, "rendezvous", "a rendezvous", "publish", "lookup")


def check_rank(
    pool: MemoryPool, instance: str, rank: int, shards: Sequence[Shard] | None
) -> tuple[str, int, tuple[Shard, ...]]:
    """Name, index and shards of an instance, as an endpoint keeps them.

    Raises:
        ConfigurationError: another type, or no name.
        GeometryError: the pool is not what the instance says this rank holds.
    """
    name = arguments.text(instance, "instance", least=1, most=256)
    index = arguments.count(rank, "rank")
    every = (pool.site.shard,) if shards is None else arguments.several(shards, "shards", Shard)
    check_instance(every, index, pool.site)
    return name, index, every


def check_services(
    options: Options | None,
    kernels: Kernels | None,
    observer: Observer | None,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    thread: bool,
    life: Incarnation | None,
) -> None:
    """Raise a :class:`~disagg_kv.errors.ConfigurationError` for what cannot do what an endpoint asks of it."""
    optional(options, "options", Options)
    optional(life, "life", Incarnation)
    if kernels is not None:
        arguments.methods(kernels, "kernels", "a set of kernels", "gather", "scatter", "checksum")
    if observer is not None:
        arguments.methods(observer, "observer", "an observer", "span", "count")
    arguments.clock(clock, "clock")
    arguments.function(sleep, "sleep")
    arguments.flag(thread, "thread")


def optional(value: T | None, name: str, kind: type[T]) -> T | None:
    """An instance of a class, or None; else a :class:`~disagg_kv.errors.ConfigurationError`."""
    return None if value is None else arguments.one(value, name, kind)


def helpers(background: Callable[[str, int], Background] | None, thread: bool) -> Callable[[str, int], Background]:
    """What makes the helpers of an endpoint; see :class:`~disagg_kv.endpoints.PrefillEndpoint`.

    Raises:
        ConfigurationError: no function. What this returns raises it, too, where the function makes no helper.
    """
    if background is None:
        return HelperThreads if thread else inline
    make = arguments.function(background, "background")

    def checked(name: str, most: int) -> Background:
        try:
            made = background(name, most)
        except Exception as exc:
            raise arguments.wrong("background", make, "a function that makes helpers is needed") from exc
        arguments.methods(made, "background", "what runs calls", "start", "close")
        return made

    return checked
