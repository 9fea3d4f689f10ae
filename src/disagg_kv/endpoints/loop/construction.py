"""What an endpoint is made from: clock, threads and identity, the cores that they run on, and its checked arguments."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from weakref import ref

from attrs import frozen

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
from ...transports import Transport, Transports, between_processes
from ...transports.registry import AUTO
from ..peers.background import Background, HelperThreads, Inline
from ..peers.handshake import EndpointInfo, check_instance
from ..peers.incarnation import Incarnation


@frozen(kw_only=True)
class Environment:
    """Clock, threads and identity of an endpoint. The defaults serve every engine; simulations and tests replace them.

    Args:
        clock: seconds; must never go back.
        sleep: blocks the endpoint's thread for a number of seconds.
        thread: False: the endpoint has no thread, and the engine's calls alone advance it. The engine must poll at
            least every third of ``silence_s``, or peers lose it.
        engine: False: the engine's calls do not advance the endpoint. Without a thread, the caller does, by
            ``driver.step``.
        incarnation: epoch and process of the endpoint; None: a new epoch in this process. No epoch may be used twice.
        background: creates the helpers for calls that may block: a function of a name and of the number of calls that
            run at a time. None: threads, or the calling thread where the endpoint has no thread.

    Raises:
        ConfigurationError: a value of another type.
    """

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    thread: bool = True
    engine: bool = True
    incarnation: Incarnation | None = None
    background: Callable[[str, int], Background] | None = None

    def __attrs_post_init__(self) -> None:
        arguments.clock(self.clock, "clock")
        arguments.function(self.sleep, "sleep")
        arguments.flag(self.thread, "thread")
        arguments.flag(self.engine, "engine")
        if self.incarnation is not None:
            arguments.one(self.incarnation, "incarnation", Incarnation)
        if self.background is not None:
            arguments.function(self.background, "background")


def helpers(environment: Environment, name: str, most: int) -> Background:
    """Helpers that run at most ``most`` calls at a time.

    Raises:
        ConfigurationError: ``background`` raises, or returns no helper.
    """
    background = environment.background
    if background is None:
        return HelperThreads(name, most) if environment.thread else Inline()
    try:
        made = background(name, most)
    except Exception as exc:
        raise arguments.wrong("background", background, "a function that makes helpers is needed") from exc
    arguments.methods(made, "background", "what runs calls", "start", "close")
    return made


@contextmanager
def threads_on(cores: Collection[int]) -> Iterator[None]:
    """Create a channel, a transport or an endpoint inside: the threads that they start run on these cores.

    A thread inherits the cores of the thread that starts it. So the calling thread moves to these cores, and gets its
    own ones back at the end. Engines use it where they pin a whole process to few cores.

    Args:
        cores: numbers of cores. Those that the host does not allow are left out.

    Raises:
        ConfigurationError: not numbers of cores, or the host allows none of them, or it cannot place threads.
    """
    wanted = arguments.counts(cores, "cores")
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigurationError("cores: this host cannot place threads")
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, wanted)
    except (OSError, OverflowError, ValueError) as exc:
        raise ConfigurationError(f"cores {sorted(set(wanted))} cannot be used: {exc}") from exc
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


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


def carriers(
    transport: Transport | Transports | Sequence[Transport] | None, device: str, channel: Channel
) -> Transports:
    """The transports that move memory on the pool's device.

    Of None, what starts here. A network is left out where the channel does not leave the host: no peer would use it.
    Other hosts reach it at the channel's address.

    Raises:
        ConfigurationError: no transport, or several that do not go together, or of which none moves such memory.
    """
    if transport is None:
        address = channel.address
        return between_processes(AUTO, device, reached_at(address), network=leaves_host(address))
    if not isinstance(transport, Transports):
        several = transport if isinstance(transport, Sequence) else [transport]
        transport = Transports(several, argument="transport")
    return transport.on_device(device)


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
        transport: Transport | Transports | Sequence[Transport] | None,
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
        self.transports = carriers(transport, pool.buffers[0].device, channel)

    def __enter__(self) -> Parts:
        """An error inside closes the transport, if no caller has it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and self._ours:
            self.transports.close(0.0)

    def info(self, role: Role, regions: Sequence[RegionId], paths: tuple[TransferPlanner, ...]) -> EndpointInfo:
        """How an endpoint introduces itself, without the fields of one side."""
        return EndpointInfo(
            self.environment.incarnation or Incarnation(),
            self.channel.address,
            role,
            self.instance,
            self.rank,
            self.shards,
            self.pool.site,
            tuple(regions),
            self.transports,
            paths,
            verdict=self.verdict,
            device=self.pool.buffers[0].device,
        )
