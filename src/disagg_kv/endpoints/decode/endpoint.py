"""A decode rank's endpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs

from ... import arguments
from ...channels import Channel
from ...core import Alone, Elected, Options, RoomKey, Verify
from ...errors import ConfigurationError, QuarantineFullError
from ...geometry import Shard
from ...ids import Epoch, RoomId, room_name
from ...kernels import Kernels
from ...memory import MemoryPool
from ...planning import Segment
from ...rendezvous import Rendezvous, Source
from ...staging import GrantQueue, RingStagingAllocator, StagingAllocator
from ...strategies import AUTO, TransferPlanner, exposes_pages, paths
from ...trace import Observer
from ...transports import Transport, Transports
from ..handle import ChangeQueue
from ..loop.construction import Environment, Parts
from ..loop.endpoint import Endpoint
from ..loop.event_loop import EventLoop
from ..peers.mapping import check_mapping, new_flag_page
from ..staging_memory import exposable, made_by, new_staging, ready_kernels
from ..status import Usage
from .handle import ReceptionHandle
from .path_choice import ALL_QUARANTINE
from .rooms import DecodeSide
from .scatter import SCATTER_BYTES_PER_S, RateLimiter


class DecodeEndpoint(Endpoint[ReceptionHandle, DecodeSide]):
    """A decode rank's endpoint: awaits the rows of requests, and puts them into pages of its pool.

    :meth:`open` begins a request, and ``expect`` of the room's handle says into which pages. :meth:`poll` reports what
    has changed. Satisfies :class:`~disagg_kv.endpoints.Receiver`.

    Args:
        pool: the rank's cache.
        transport: peers write here through it; or a list of transports, of which each peer takes the first by which it
            reaches this rank. The endpoint owns them from now on. None: ``"auto"``, what starts on this
            host for the pool's memory, with a network only if other hosts can reach ``channel``; see
            :func:`~disagg_kv.transports.transport`.
        channel: carries the frames. The endpoint owns it from now on.
        rendezvous: where prefill ranks, and the other ranks of this instance, are found.
        instance: name of this set of ranks.
        rank: index of this rank in the instance.
        shards: the shard of every rank of the instance; None: there is one rank.
        strategy: the paths that prefill may take, and the selection. ``"auto"`` allows the paths that work with the
            pool's memory. ``"staged"`` is for an engine that cannot keep the pages of a failed room until there is
            evidence that no peer writes to them: pages are never exposed, and ``released`` waits for own kernels alone.
            With ``"+incremental"``, :class:`~disagg_kv.endpoints.Expectation` takes held prefixes.
        ring_bytes: bytes of the staging ring; None: 256 MiB on a CPU, 1 GiB on a GPU. A segment takes at most an eighth
            of it.
        allocator: creates the allocator of the ring from its number of bytes.
        verify: which segments this rank compares with checksums of prefill, ``"off"``, ``"sampled"`` or ``"full"``.
            Segments that prefill sends with checksums are compared too. Held rows are not compared.
        scatter_bytes_per_s: most bytes per second that are scattered into pages, so that scatters do not delay the
            engine's decode steps; None: no limit.
        verdict: :class:`~disagg_kv.core.Elected`: a room ends alike on all ranks of the instance, which vote.
            :class:`~disagg_kv.core.Alone`: each rank's outcome is its own, and the engine reduces over ranks. All ranks
            of the instance take the same.
        options: times and bounds.
        kernels: scatter and checksum kernels; None: the fastest for the pool's device. They are compiled now.
        observer: receives spans and counters.
        environment: clock, threads and identity, for tests and simulations.

    Attributes:
        staging: the ring: where rows land before they are scattered.

    Raises:
        ConfigurationError: an argument of another type or out of range; or an explicit path that exposes pages, with
            memory that the transport cannot write to, or that it does not map although the path needs that.
        GeometryError: the pool's memory does not match its site, or its shard is not that of ``rank`` in ``shards``.
        OversizeError: the pool's aux rows have more than 512 KiB.
    """

    def __init__(
        self,
        pool: MemoryPool,
        *,
        transport: Transport | Transports | Sequence[Transport] | None = None,
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
        verdict: type[Elected] | type[Alone] = Elected,
        options: Options | None = None,
        kernels: Kernels | None = None,
        observer: Observer | None = None,
        environment: Environment | None = None,
    ) -> None:
        with Parts(
            pool, transport, channel, rendezvous, instance, rank, shards, strategy, verify, verdict, options, kernels,
            observer, environment,
        ) as parts:  # fmt: skip
            self._selection = parts.strategy.selection
            usable, exposed = _usable(parts.strategy.path, pool, parts.transports)
            limiter = None if scatter_bytes_per_s is None else RateLimiter(scatter_bytes_per_s)
            device = pool.buffers[0].device
            if ring_bytes is None:
                ring_bytes = 256 << 20 if device == "cpu" else 1 << 30
            self._ring_bytes = ring_bytes = arguments.count(ring_bytes, "ring_bytes", least=1)
            movers = ready_kernels(pool, kernels, verify)
            self._ring = ring = made_by(allocator, ring_bytes)
            self.staging = memory = new_staging(parts.transports, ring_bytes, device)
            queue: GrantQueue[Epoch, tuple[RoomKey, Segment]] = GrantQueue(ring)
            ring_region, *regions = parts.transports.register([memory, *(pool.buffers if exposed else ())])
            flags, place = new_flag_page(parts.transports, usable) if verify == "off" else (None, b"")
            me = parts.info("decode", regions, usable)
            me = attrs.evolve(
                me,
                flags=place,
                ring_region=ring_region,
                ring_bytes=ring_bytes,
                lease_bytes=queue.lease_limit // ring.alignment * ring.alignment,
            )

            def side(loop: EventLoop, changes: ChangeQueue[ReceptionHandle]) -> DecodeSide:
                return DecodeSide(loop, pool, memory, queue, movers, exposed, changes, verify, limiter, flags)

            super().__init__(parts, me, side)

    def open(
        self,
        room: RoomId,
        source: Source,
        *,
        tag: bytes = b"",
        total_s: float | None = None,
        claim_s: float | None = None,
    ) -> ReceptionHandle:
        """Open a room that the prefill instance ``source`` sends.

        Every room that this returns ends, even if another thread calls ``close`` at the same time.

        Args:
            room: as prefill opens it.
            source: the prefill instance.
            tag: of prefill's room; with another one the room fails.
            total_s: seconds after which the room fails; None: as in the endpoint's options.
            claim_s: seconds after ``expect`` after which the room fails if prefill has not opened it; None: as in the
                endpoint's options.

        Raises:
            ConfigurationError: an id that is not 1 to 64 bytes, or a time that is not positive and finite.
            LocalProtocolError: the id was used before, or the endpoint is closed.
            QuarantineFullError: too much staging memory waits for evidence.
            SupersededError: another process has taken the place of this rank.
        """
        room = RoomId(arguments.room_id(room))
        name = room_name(room)
        tag = arguments.octets(tag, f"{name}: tag")
        arguments.one(source, "source", Source)
        own = self._options.of_room(total_s, claim_s)
        self.driver.check(name)
        stuck = self._side.quarantined
        if stuck > ALL_QUARANTINE * self._ring_bytes:
            raise QuarantineFullError(f"{name}: {stuck} of {self._ring_bytes} ring bytes wait for evidence", room=room)
        key = self._new_key(room)
        handle = ReceptionHandle(key, self._pool, self.driver, self._side, self._selection)
        self._ids.add(room, handle)
        self.driver.post(partial(self._side.open, key, handle, source, own, tag), name)
        return handle

    def _memory(self) -> Usage:
        leased, stuck = self._ring.live_bytes, self._side.quarantined
        return Usage({}, ring_bytes=self._ring_bytes, ring_used_bytes=leased, quarantined_bytes=stuck)


def _usable(wanted: str, pool: MemoryPool, transports: Transports) -> tuple[tuple[TransferPlanner, ...], bool]:
    """The paths that prefill may take, and whether one of them exposes pages."""
    known = paths()
    able = exposable(transports, list(pool.buffers))
    if wanted == AUTO:
        usable = tuple(p for p in known.values() if able or not exposes_pages(p))
    else:
        usable = (known[wanted],)
        check_mapping(wanted, usable, transports)
        if exposes_pages(usable[0]) and not able:
            raise ConfigurationError(
                f"path {wanted!r} writes into pages, but transport {transports.name!r} writes only to memory that it "
                "allocated: allocate the pool with it, or take path 'staged'"
            )
    return usable, any(map(exposes_pages, usable))
