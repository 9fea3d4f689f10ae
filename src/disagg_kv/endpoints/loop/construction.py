"""Checks of the arguments of both endpoints, before any of them is used."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from weakref import ref

from ... import arguments
from ...channels import Channel
from ...channels.reach import leaves_host, reached_at
from ...core import MAX_AUX, Alone, Elected, Options, Verify, check_verify
from ...errors import ConfigurationError, OversizeError
from ...geometry import Shard, Site
from ...ids import Rank, RegionId, Role
from ...kernels import Kernels
from ...memory import Buffer, MemoryPool, check_memory
from ...rendezvous import Rendezvous
from ...strategies import TransferPlanner
from ...strategies import strategy as named
from ...trace import Observer, Silent
from ...transports import Transport, between_processes
from ...transports.combining import check_lanes, check_transport, combined_or_alone, on_device
from ...transports.registry import AUTO
from ..peers.handshake import EndpointInfo, check_instance
from ..peers.incarnation import Incarnation
from .environment import Environment


def check_pool(pool: MemoryPool) -> None:
    """Check that a pool keeps the promises of :class:`~disagg_kv.memory.MemoryPool`.

    Raises:
        ConfigurationError: no pool, a pool that is compared by value, or one whose site or buffers change.
        GeometryError: its memory does not match its site.
        OversizeError: its aux rows are longer than aux data may be.
    """
    arguments.methods(pool, "pool", "a pool", "read_aux", "write_aux")
    arguments.attributes(pool, "pool", "a pool", "site", "buffers", "aux_bytes")
    _check_identity(pool)
    site = arguments.one(pool.site, "pool: site", Site)
    buffers = arguments.several(pool.buffers, "pool: buffers", Buffer)
    if pool.site != site or tuple(pool.buffers) != buffers:
        raise ConfigurationError("pool: site and buffers must stay the same, and differ between two looks at them")
    check_aux(arguments.count(pool.aux_bytes, "pool: aux_bytes"))
    check_memory(site, buffers)


def check_aux(nbytes: int) -> None:
    """Raise an :class:`~disagg_kv.errors.OversizeError` for aux data of more bytes than one frame carries."""
    if nbytes > MAX_AUX:
        raise OversizeError("the aux data of a room", nbytes, MAX_AUX)


def _check_identity(pool: MemoryPool) -> None:
    """Kernels cache tables per pool in weak dictionaries, so a pool needs identity and weak references."""
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


def carrier(transport: Transport | Sequence[Transport] | None, device: str, channel: Channel) -> Transport:
    """The transport, or several as one: those that move memory on the pool's device.

    Of None, what starts here. A network is left out where the channel does not leave the host: no peer would use it.
    Other hosts reach it at the channel's address.

    Raises:
        ConfigurationError: no transport, or lanes that cannot be combined, or of which none moves such memory.
    """
    if transport is None:
        address = channel.address
        return between_processes(AUTO, device, reached_at(address), network=leaves_host(address))
    if isinstance(transport, Sequence):
        transport = combined_or_alone(check_lanes(transport, "transport"))
    check_transport(transport, "transport")
    return on_device(transport, device)


def check_carriers(channel: Channel, rendezvous: Rendezvous) -> None:
    """Raise a :class:`~disagg_kv.errors.ConfigurationError` unless these are a channel and a rendezvous."""
    arguments.methods(channel, "channel", "a channel", "send", "poll", "wake", "forget", "close")
    arguments.attributes(channel, "channel", "a channel", "address")
    arguments.text(channel.address, "channel: address", least=1)
    arguments.methods(rendezvous, "rendezvous", "a rendezvous", "publish", "lookup")


class Parts:
    """The arguments that both endpoints take, checked, with defaults in place of None; nothing of them is used yet.

    Raises:
        ConfigurationError: an argument of another type, or an empty name.
        GeometryError: the pool's memory does not match its site, or its shard is not that of ``rank`` in ``shards``.
    """

    def __init__(
        self,
        pool: MemoryPool,
        transport: Transport | Sequence[Transport] | None,
        channel: Channel,
        rendezvous: Rendezvous,
        instance: str,
        rank: int,
        shards: Sequence[Shard] | None,
        strategy: str,
        verify: Verify,
        verdict: type[Elected] | type[Alone],
        options: Options | None,
        kernels: Kernels | None,
        observer: Observer | None,
        environment: Environment | None,
    ) -> None:
        check_pool(pool)
        check_carriers(channel, rendezvous)
        if kernels is not None:
            arguments.methods(kernels, "kernels", "a set of kernels", "gather", "scatter", "checksum")
        if observer is not None:
            arguments.methods(observer, "observer", "an observer", "span", "count")
        self.pool = pool
        self.channel = channel
        self.rendezvous = rendezvous
        self.instance = arguments.text(instance, "instance", least=1, most=256)
        self.rank = Rank(arguments.count(rank, "rank"))
        self.shards = (pool.site.shard,) if shards is None else arguments.several(shards, "shards", Shard)
        check_instance(self.shards, self.rank, pool.site)
        self.strategy = named(strategy)
        check_verify(verify)
        if verdict not in (Elected, Alone):
            raise arguments.wrong("verdict", verdict, "Elected or Alone is needed")
        self.verdict = verdict
        self.options = Options() if options is None else arguments.one(options, "options", Options)
        self.observer: Observer = Silent() if observer is None else observer
        environment = Environment() if environment is None else environment
        self.environment = arguments.one(environment, "environment", Environment)
        # Last: what starts here has threads and ports, and is closed where an endpoint is refused later.
        self._ours = transport is None
        self.transport = carrier(transport, pool.buffers[0].device, channel)

    def __enter__(self) -> Parts:
        """An error inside closes the transport, if no caller has it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._ours:
            self.transport.close(0.0)

    def info(self, role: Role, regions: Sequence[RegionId], paths: tuple[TransferPlanner, ...]) -> EndpointInfo:
        """How an endpoint introduces itself, without the fields of one side."""
        return EndpointInfo(
            self.environment.life or Incarnation(),
            self.channel.address,
            role,
            self.instance,
            self.rank,
            self.shards,
            self.pool.site,
            tuple(regions),
            self.transport,
            paths,
            verdict=self.verdict,
            device=self.pool.buffers[0].device,
        )
