"""A decode rank's endpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from weakref import WeakValueDictionary

from ... import arguments
from ...channels import Channel
from ...errors import AbortedError, ConfigurationError, DisaggKVError, QuarantineFullError
from ...geometry import Shard
from ...ids import Epoch, Generation, Rank, RegionId, RoomId
from ...kernels import Kernels
from ...memory import Buffer, MemoryPool
from ...planning import Segment
from ...protocol import Options, RoomKey, Verify, check_verify
from ...rendezvous import Rendezvous, Source
from ...staging import GrantQueue, RingStagingAllocator, StagingAllocator
from ...strategies import AUTO, TransferPlanner, paths
from ...strategies import strategy as named
from ...trace import Observer, Silent
from ...transports import Transport
from ..api import PeerInfo
from ..runtime.admission import Admission
from ..runtime.background import Background
from ..runtime.construction import (
    check_carriers,
    check_pool,
    check_rank,
    check_services,
    helpers,
)
from ..runtime.event_loop import EventLoop
from ..runtime.handle import ChangeQueue, check_room
from ..runtime.handshake import EndpointInfo
from ..runtime.incarnation import Incarnation
from ..runtime.staging_memory import exposable, made_by, new_staging, ready_kernels
from ..runtime.succession import check_counts
from ..runtime.thread import EndpointThread
from .handle import Expectation, ReceptionHandle
from .rate_limit import ARRIVALS_PER_POLL, SCATTER_BYTES_PER_S, RateLimiter
from .rooms import ALL_QUARANTINE, DecodeSide


class DecodeEndpoint:
    """A decode rank's endpoint; see :class:`~disagg_kv.endpoints.api.Receiver`.

    Args:
        pool: the rank's cache.
        transport: its other side writes here; the endpoint owns it from now on.
        channel: carries the frames; the endpoint owns it from now on.
        rendezvous: where prefill ranks, and the other ranks of our instance, are found.
        instance: name of this set of ranks.
        rank: our index in it.
        shards: what every rank of it holds; None: we are alone.
        strategy: the path that prefill may take, or ``"auto"``: any that works with our memory. A path that exposes
            pages keeps an aborted room's pages until there is evidence that nobody writes to them. With
            ``"+incremental"``, :meth:`~disagg_kv.endpoints.api.Reception.expect` takes held prefixes.
        ring_bytes: bytes of the staging ring, of which a segment takes an eighth at most; None: 256 MiB on a CPU, 4 GiB
            on a GPU.
        allocator: makes what hands out the ring's bytes, given how many there are.
        verify: how many segments we compare with checksums of prefill's, ``"off"``, ``"sampled"`` or ``"full"``;
            those that prefill's own wish makes it send are compared too. With ``"full"`` a room that builds on held
            rows needs ``kept`` at ``expect``; with ``"sampled"`` about one in 16 of those that have it is compared.
        scatter_bytes_per_s: how fast what arrives may be scattered into pages, so that it does not hold up what is
            being decoded; None: as fast as it comes.
        arrivals_per_poll: how many rooms that have ended well one ``poll`` tells of at most, so that requests which
            arrive together do not all join one step of an engine that polls once per step; None: all.
        options: times and bounds.
        kernels: gather and scatter; None: the fastest for the pool's device. Those that need it are compiled now.
        observer: where spans and counters go.
        clock, sleep: time.
        thread: False: the caller drives the endpoint by ``driver.step``; for simulations.
        life: its epoch and process; None: a new epoch in this process.
        background: makes what runs calls that may block, given a name and how many run at a time; None: threads, or
            the calling thread where the endpoint has none of its own.

    Raises:
        ConfigurationError: an explicit path that exposes pages, with memory that the transport cannot write to; a pace
            or a number of arrivals that is not positive.
    """

    def __init__(
        self,
        pool: MemoryPool,
        *,
        transport: Transport,
        channel: Channel,
        rendezvous: Rendezvous,
        instance: str,
        rank: int = 0,
        shards: Sequence[Shard] | None = None,
        strategy: str = AUTO,
        ring_bytes: int | None = None,
        allocator: Callable[[int], StagingAllocator] = RingStagingAllocator,
        verify: Verify = "off",
        scatter_bytes_per_s: float | None = SCATTER_BYTES_PER_S,
        arrivals_per_poll: int | None = ARRIVALS_PER_POLL,
        options: Options | None = None,
        kernels: Kernels | None = None,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        thread: bool = True,
        life: Incarnation | None = None,
        background: Callable[[str, int], Background] | None = None,
    ) -> None:
        check_pool(pool)
        check_carriers(transport, channel, rendezvous)
        instance, rank, every = check_rank(pool, instance, rank, shards)
        check_services(options, kernels, observer, clock, sleep, thread, life)
        helping = helpers(background, thread)
        check_verify(verify)
        if arrivals_per_poll is not None:
            arrivals_per_poll = arguments.count(arrivals_per_poll, "arrivals_per_poll", least=1)
        self._arrivals = arrivals_per_poll
        usable, exposed = _usable(named(strategy).path, pool, transport)
        self._selection = named(strategy).selection
        self._verify: Verify = verify
        device = pool.buffers[0].device
        pace = None if scatter_bytes_per_s is None else RateLimiter(scatter_bytes_per_s)
        movers = ready_kernels(pool, kernels)
        if ring_bytes is None:
            ring_bytes = 256 << 20 if device == "cpu" else 4 << 30
        ring_bytes = arguments.count(ring_bytes, "ring_bytes", least=1)
        ring = made_by(allocator, ring_bytes)
        memory = new_staging(transport, ring_bytes, device)
        queue: GrantQueue[Epoch, tuple[RoomKey, Segment]] = GrantQueue(ring)
        region, *regions = transport.register([memory, *(pool.buffers if exposed else ())])
        me = EndpointInfo(
            life or Incarnation(),
            channel.address,
            "decode",
            instance,
            Rank(rank),
            every,
            pool.site,
            tuple(regions),
            transport,
            usable,
            ring_region=RegionId(region),
            ring_bytes=ring_bytes,
            lease_bytes=queue.lease_limit // ring.alignment * ring.alignment,
        )
        self._pool = pool
        self._staging = memory
        self._ring_bytes = ring_bytes
        self._ring = ring
        self._options = options = Options() if options is None else options
        self._lives = count(1)
        self._open: WeakValueDictionary[RoomId, ReceptionHandle] = WeakValueDictionary()
        self._changes: ChangeQueue[ReceptionHandle] = ChangeQueue()

        def side(loop: EventLoop) -> DecodeSide:
            self._role = DecodeSide(loop, pool, memory, queue, movers, exposed, self._changes, verify, pace)
            return self._role

        self._loop = EventLoop(me, channel, rendezvous, options, observer or Silent(), clock, sleep, helping, side)
        role = self._role
        name = f"disagg_kv {instance}/{rank}"
        self.driver = EndpointThread(
            self._loop, name, role.abort_all, lambda: role.open_rooms, self._break_down, thread
        )

    def open(
        self, room: RoomId, source: Source, *, silence_s: float | None = None, total_s: float | None = None
    ) -> ReceptionHandle:
        """See :meth:`~disagg_kv.endpoints.api.Receiver.open`."""
        room = RoomId(arguments.room_id(room))
        arguments.one(source, "source", Source)
        own = self._options.of_room(silence_s, total_s)
        with self.admission.enter(f"room {room.hex()}"):
            if self._role.quarantined > ALL_QUARANTINE * self._ring_bytes:
                raise QuarantineFullError(
                    f"room {room.hex()}: {self._role.quarantined} of {self._ring_bytes} ring bytes wait for evidence"
                )
            check_room(room, self._open.get(room))
            check_counts(self._loop.succession)
            key = RoomKey(room, Generation(next(self._lives)))
            handle = ReceptionHandle(key, self._pool, self, self._selection, self._verify)
            self._open[room] = handle
            self._loop.post(partial(self._role.open, key, handle, source, own.silence_s, own.total_s))
        return handle

    def poll(self) -> Sequence[ReceptionHandle]:
        """See :meth:`~disagg_kv.endpoints.api.Receiver.poll`."""
        if self.driver.broken is not None:
            raise self.driver.broken
        return self._changes.take(self._arrivals)

    def confirm_terminated(self, epoch: Epoch | str) -> None:
        """See :meth:`~disagg_kv.endpoints.api.Receiver.confirm_terminated`."""
        named = epoch if isinstance(epoch, str) else Epoch(arguments.epoch(epoch))
        with self.admission.enter("confirm_terminated"):
            self._loop.post(partial(self._loop.confirm_terminated, self._loop.peer_registry.find(named)))

    def _break_down(self, error: DisaggKVError) -> None:
        """Endpoint's thread, as it ends: what has not ended, of what the engine still has a handle of, has failed."""
        handles = [handle for ref in self._open.valuerefs() if (handle := ref()) is not None]
        self._changes.break_down(handles, error)

    def peers(self) -> Sequence[PeerInfo]:
        """See :meth:`~disagg_kv.endpoints.api.Receiver.peers`."""
        return self._loop.peer_registry.listed()

    @property
    def open_rooms(self) -> int:
        """Rooms that are not forgotten yet: open, or ended and waiting for evidence."""
        return self._role.open_rooms

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of the ring that wait for evidence."""
        return self._role.quarantined

    @property
    def leased_bytes(self) -> int:
        """Bytes of the ring that are leased: to segments on their way, or waiting for evidence."""
        return self._ring.live_bytes

    @property
    def staging(self) -> Buffer:
        """The ring: where rows land before they are scattered."""
        return self._staging

    def close(self, drain_s: float = 5.0) -> None:
        """See :meth:`~disagg_kv.endpoints.api.Receiver.close`."""
        self.driver.close(drain_s)

    def check_integrity(self) -> None:
        """Raise AssertionError if the accounts contradict each other; on the thread that steps the endpoint."""
        self._role.check_integrity()

    # For handles.

    @property
    def admission(self) -> Admission:
        """See :class:`~disagg_kv.endpoints.decode.handle.DecodeCommands`."""
        return self.driver.admission

    def expect(self, key: RoomKey, wanted: Expectation) -> None:
        """See :class:`~disagg_kv.endpoints.decode.handle.DecodeCommands`."""
        self._loop.post(partial(self._role.expect, key, wanted))

    def abort(self, key: RoomKey, error: AbortedError) -> None:
        """See :class:`~disagg_kv.endpoints.decode.handle.DecodeCommands`."""
        self._loop.post(partial(self._role.abort, key, error))


def _usable(wanted: str, pool: MemoryPool, transport: Transport) -> tuple[tuple[TransferPlanner, ...], bool]:
    """The paths that prefill may take, and whether one of them exposes pages."""
    known = paths()
    able = exposable(transport, list(pool.buffers))
    if wanted == AUTO:
        usable = tuple(p for p in known.values() if able or not p.exposes_pages)
    else:
        usable = (known[wanted],)
        if usable[0].exposes_pages and not able:
            raise ConfigurationError(
                f"path {wanted!r} writes into pages, but transport {transport.name!r} writes only to memory that it "
                "allocated: allocate the pool with it, or take path 'staged'"
            )
    return usable, any(p.exposes_pages for p in usable)
