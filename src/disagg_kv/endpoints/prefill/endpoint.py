"""A prefill rank's endpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

import attrs

from ... import arguments
from ...channels import Channel
from ...core import Alone, Elected, Options, Verify
from ...errors import LocalProtocolError, QuarantineFullError
from ...geometry import PageTable, Shard
from ...ids import GroupId, RoomId, room_name
from ...kernels import Kernels, SupportsConversions, SupportsStreams
from ...memory import MemoryPool
from ...planning import Batch
from ...rendezvous import Rendezvous
from ...strategies import AUTO, PER_CHUNK, Feature, Schedule, paths
from ...trace import Observer
from ...transports import Transport, Transports
from ..handle import ChangeQueue
from ..loop.construction import Environment, Parts
from ..loop.endpoint import Endpoint
from ..loop.event_loop import EventLoop
from ..peers.mapping import check_mapping
from ..staging_memory import new_staging, ready_kernels, staging_slots
from ..status import Usage
from .handle import DeliveryHandle, ForwardPass, LayerGroups
from .movers.posts import Posts, StagingSlots
from .movers.verified import VerifiedMover
from .read_pools import ReadPools
from .rooms import PrefillSide
from .routes import Router
from .throughput import ThroughputEstimator
from .transfers import TransferQueue


class PrefillEndpoint(Endpoint[DeliveryHandle, PrefillSide]):
    """A prefill rank's endpoint: sends the rows of requests to the decode ranks that await them.

    :meth:`open` begins a request. :meth:`step`, or ``send_chunk`` of the room's handle, hands over its rows, and
    ``finish`` of the handle ends it. :meth:`poll` reports what has changed.

    Args:
        pool: the rank's cache.
        transport: writes the bytes; or a list of transports, of which each peer gets the first that reaches it. The
            endpoint owns them from now on. None: ``"auto"``, what starts on this host for the pool's memory, with a
            network only if other hosts can reach ``channel``; see :func:`~disagg_kv.transports.transport`.
        channel: carries the frames. The endpoint owns it from now on.
        rendezvous: where decode ranks find this one.
        instance: name of this set of ranks. A restarted instance takes a new name.
        rank: index of this rank in the instance.
        shards: the shard of every rank of the instance; None: there is one rank.
        strategy: path, schedule and selection; see :func:`~disagg_kv.strategies.strategy`. ``"auto"`` chooses a path.
        schedule: replaces the schedule of ``strategy``, for example ``LayerPipelined(fixed=4)``. All ranks must use the
            same one.
        uses: features that the engine uses in every forward pass. Some of them forbid to send single layers.
        slot_bytes: bytes of a staging slot; None: 16 MiB on a CPU, 128 MiB on a GPU. All ranks must use the same size.
        slots: number of staging slots.
        verify: which segments decode compares with checksums of this rank, ``"off"``, ``"sampled"`` or ``"full"``.
            Decode's own setting counts too.
        verdict: :class:`~disagg_kv.core.Elected`: a room ends alike on all ranks of the instance, which vote.
            :class:`~disagg_kv.core.Alone`: each rank's outcome is its own, and the engine reduces over ranks. All ranks
            of the instance take the same.
        options: times and bounds.
        kernels: gather, copy and checksum kernels; None: the fastest for the pool's device. They are compiled now, for
            peers of any layout. For a cache of another dtype they are when such a peer is connected.
        observer: receives spans and counters.
        environment: clock, threads and identity, for tests and simulations.

    Attributes:
        staging: where rows are gathered before they are sent.

    Raises:
        ConfigurationError: an argument of another type or out of range; or an explicit path that maps pages, with a
            transport that does not map memory.
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
        schedule: Schedule | None = None,
        uses: Collection[Feature] = (),
        slot_bytes: int | None = None,
        slots: int = 8,
        verify: Verify = "off",
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
            if schedule is not None:
                arguments.methods(schedule, "schedule", "a schedule", "groups")
                arguments.attributes(schedule, "schedule", "a schedule", "name")
            self._slots = arguments.count(slots, "slots", least=1)
            chosen = parts.strategy
            usable = tuple(paths().values()) if chosen.path == AUTO else (paths()[chosen.path],)
            check_mapping(chosen.path, usable, parts.transports)
            self._schedule = chosen.schedule if schedule is None else schedule
            self._uses = frozenset(arguments.several(uses, "uses", Feature))
            device = pool.buffers[0].device
            if slot_bytes is None:
                slot_bytes = 16 << 20 if device == "cpu" else 128 << 20
            self._slot_bytes = slot_bytes = arguments.count(slot_bytes, "slot_bytes", least=1)
            maps = any(path.mover == "mapped" for path in usable) and parts.transports.maps
            ready = ready_kernels(pool, kernels, verify, maps)
            self.staging = staging = new_staging(parts.transports, staging_slots(self._slots, slot_bytes), device)
            *regions, staged = parts.transports.register([*pool.buffers, staging])
            pools = ReadPools(pool, ready, verify)
            known = tuple(ready.conversions) if isinstance(ready, SupportsConversions) else ()
            me = parts.info("prefill", regions, usable)
            queues = isinstance(ready, SupportsStreams)
            me = attrs.evolve(me, slot_bytes=slot_bytes, prepare=pools.warm, conversions=known, queues=queues)

            def side(loop: EventLoop, changes: ChangeQueue[DeliveryHandle]) -> PrefillSide:
                throughput = ThroughputEstimator(loop.clock, len(pool.site.shard.layers()), traced=loop.traced)
                pages = loop.options.request_pages
                router = Router(me, pools, chosen.selection, self._schedule, usable, throughput.pace, pages, verify)
                posts = Posts(loop, StagingSlots(staging.nbytes, slot_bytes), throughput)
                self._transfers = transfers = TransferQueue(loop, ready, staging, staged, posts)
                mover = VerifiedMover(transfers, posts, ready, loop.clock)
                return PrefillSide(loop, pool, router, transfers, mover, changes)

            super().__init__(parts, me, side)

    def open(
        self,
        room: RoomId,
        *,
        tag: bytes = b"",
        total_s: float | None = None,
        claim_s: float | None = None,
    ) -> DeliveryHandle:
        """Open a room, and return its :class:`~disagg_kv.endpoints.Delivery`.

        Every room that this returns ends, even if another thread calls ``close`` at the same time.

        Args:
            room: 1 to 64 bytes; :func:`~disagg_kv.endpoints.room_id` makes them of text. Equal on both sides, and used
                once: a retry has another id, see :func:`~disagg_kv.endpoints.attempt_id`.
            tag: at most 256 bytes, such as a digest of the prompt. A decode instance that opens the room with another
                tag fails with an :class:`~disagg_kv.errors.IntegrityError`, and the room stays open for others.
            total_s: seconds after which the room fails; None: as in the endpoint's options.
            claim_s: seconds after ``finish`` after which the room fails if no decode rank has asked for it; None: as in
                the endpoint's options.

        Raises:
            ConfigurationError: an id that is not 1 to 64 bytes, or a time that is not positive and finite.
            LocalProtocolError: the id was used before, or the endpoint is closed.
            QuarantineFullError: too much staging memory waits for evidence.
            SupersededError: another process has taken the place of this rank.
        """
        room = RoomId(arguments.room_id(room))
        name = room_name(room)
        tag = arguments.octets(tag, f"{name}: tag")
        own = self._options.of_room(total_s, claim_s)
        self.driver.check(name)
        stuck = self._side.quarantined_slots
        if 2 * stuck > self._slots:
            raise QuarantineFullError(f"{name}: {stuck} of {self._slots} staging slots wait for evidence", room=room)
        key = self._new_key(room)
        handle = DeliveryHandle(key, self._pool, self.driver, self._side)
        self._ids.add(room, handle)
        self.driver.post(partial(self._side.open, key, handle, own, tag), name)
        return handle

    def step(
        self,
        chunks: Mapping[RoomId, tuple[int, Sequence[PageTable]]],
        uses: Collection[Feature] = (),
        *,
        tokens: Sequence[int] | None = None,
    ) -> ForwardPass:
        """Announce a forward pass, so that grants are requested before the rows are computed.

        All ranks of an instance must announce the same passes.

        Args:
            chunks: per room ``stop`` and ``pages``, as for :meth:`~disagg_kv.endpoints.Delivery.send_chunk`.
            uses: features that the engine uses in this pass. Some features forbid layer groups.
            tokens: new rows of each room, by which schedules decide, where a room is missing on this rank alone; None:
                those of ``chunks``.

        Raises:
            GeometryError: as :meth:`~disagg_kv.endpoints.Delivery.send_chunk`.
            LocalProtocolError: a room is not open or does not grow, or the endpoint is closed.
        """
        rooms: list[tuple[DeliveryHandle, int, Mapping[GroupId, PageTable]]] = []
        for room, stop, pages in _chunks(chunks):
            handle = self._ids.get(room)
            if handle is None:
                raise LocalProtocolError(f"{room_name(room)} is not open")
            rooms.append((handle, stop, handle.checked(stop, pages)))
        used = self._uses | frozenset(arguments.several(uses, "uses", Feature))
        layered = self._schedule.name != PER_CHUNK
        own = tuple(stop - handle.given for handle, stop, _ in rooms)
        batch = Batch(own if tokens is None else arguments.counts(tokens, "tokens"), used, layered)
        self.driver.check("a forward pass")
        submitted = [handle.taken(stop, tables, batch) for handle, stop, tables in rooms]
        cuts = LayerGroups([one.key for one in submitted], self._side.row_layers)
        self.driver.post(partial(self._side.announce, submitted, self._loop.clock(), cuts), "a forward pass")
        layers, traced = self._pool.site.shard.layers(), self._loop.traced
        return ForwardPass(submitted, layers, self.driver, self._side, cuts, layered=layered, traced=traced)

    def _memory(self) -> Usage:
        stuck = self._side.quarantined_slots * self._slot_bytes
        return Usage({}, slots=self._slots, slots_used=self._transfers.staged.slots.in_use, quarantined_bytes=stuck)


def _chunks(
    given: Mapping[RoomId, tuple[int, Sequence[PageTable]]],
) -> Iterator[tuple[RoomId, int, Sequence[PageTable]]]:
    """Room, last row and tables of each chunk of a pass; what is wrong with the tables is seen later.

    Raises:
        ConfigurationError: no mapping from ids of rooms to pairs.
    """
    for name, chunk in arguments.mapping(given, "chunks").items():
        room = RoomId(arguments.room_id(name))
        if not isinstance(chunk, tuple | list) or len(chunk) != 2:
            raise arguments.wrong(f"{room_name(room)}: chunk", chunk, "a pair is needed: (stop, [PageTable ...])")
        stop, pages = chunk
        yield room, arguments.count(stop, f"{room_name(room)}: stop"), pages
