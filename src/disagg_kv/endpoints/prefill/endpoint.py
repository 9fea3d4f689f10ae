"""A prefill rank's endpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from weakref import WeakValueDictionary

from ... import arguments
from ...channels import Channel
from ...errors import DisaggKVError, LocalProtocolError, QuarantineFullError
from ...geometry import PageTable, Shard
from ...ids import Epoch, Generation, GroupId, LayerId, Rank, RoomId
from ...kernels import Kernels
from ...memory import Buffer, Event, MemoryPool
from ...planning import Batch
from ...protocol import Options, RoomKey, Verify, check_verify
from ...rendezvous import Rendezvous
from ...strategies import AUTO, PER_CHUNK, Feature, Schedule, auto_paths, paths
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
from ..runtime.handle import ChangeQueue, HostEvent, check_room
from ..runtime.handshake import EndpointInfo
from ..runtime.incarnation import Incarnation
from ..runtime.staging_memory import new_staging, ready_kernels, staging_slots
from ..runtime.succession import check_counts
from ..runtime.thread import EndpointThread
from .handle import Act, DeliveryHandle, ForwardPass, LayerGroups, SubmittedChunk
from .rooms import PrefillSide
from .routes import Router
from .throughput import ThroughputEstimator
from .transfers import TransferQueue


class PrefillEndpoint:
    """A prefill rank's endpoint; see :class:`~disagg_kv.endpoints.api.Sender`.

    Args:
        pool: the rank's cache.
        transport: carries the bytes; the endpoint owns it from now on.
        channel: carries the frames; the endpoint owns it from now on.
        rendezvous: where decode ranks find us.
        instance: name of this set of ranks; one life of an instance, one name.
        rank: our index in it.
        shards: what every rank of it holds; None: we are alone.
        strategy: which path to take, ``"auto"`` or a name; when, and what: see :func:`~disagg_kv.strategies.strategy`.
        schedule: in place of the one that ``strategy`` names, for example ``LayerPipelined(fixed=4)``; equal on all
            ranks.
        uses: what the engine does in every forward pass that may forbid to send single layers.
        slot_bytes: bytes of a staging slot; None: 16 MiB on a CPU, 64 MiB on a GPU. Equal on all ranks.
        slots: how many there are.
        verify: how many segments decode shall compare with checksums of ours, ``"off"``, ``"sampled"`` or ``"full"``;
            decode's own wish counts too.
        options: times and bounds.
        kernels: gather and scatter; None: the fastest for the pool's device. Those that need it are compiled now.
        observer: where spans and counters go.
        clock, sleep: time.
        thread: False: the caller drives the endpoint by ``driver.step``; for simulations.
        life: its epoch and process; None: a new epoch in this process.
        background: makes what runs calls that may block, given a name and how many run at a time; None: threads, or
            the calling thread where the endpoint has none of its own.
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
        strategy: str = "auto",
        schedule: Schedule | None = None,
        uses: Collection[Feature] = (),
        slot_bytes: int | None = None,
        slots: int = 8,
        verify: Verify = "off",
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
        if schedule is not None:
            arguments.methods(schedule, "schedule", "a schedule", "groups")
            arguments.attributes(schedule, "schedule", "a schedule", "name")
        slots = arguments.count(slots, "slots", least=1)
        check_verify(verify)
        chosen = named(strategy)
        device = pool.buffers[0].device
        movers = ready_kernels(pool, kernels)
        if slot_bytes is None:
            slot_bytes = 16 << 20 if device == "cpu" else 64 << 20
        slot_bytes = arguments.count(slot_bytes, "slot_bytes", least=1)
        staging = new_staging(transport, staging_slots(slots, slot_bytes), device)
        regions = transport.register([*pool.buffers, staging])
        self._schedule = chosen.schedule if schedule is None else schedule
        self._uses = frozenset(arguments.several(uses, "uses", Feature))
        usable = auto_paths() if chosen.path == AUTO else (paths()[chosen.path],)
        me = EndpointInfo(
            life or Incarnation(),
            channel.address,
            "prefill",
            instance,
            Rank(rank),
            every,
            pool.site,
            tuple(regions[:-1]),
            transport,
            usable,
            slot_bytes=slot_bytes,
        )
        self._pool = pool
        self._staging = staging
        self._slots = slots
        self._options = options = Options() if options is None else options
        self._lives = count(1)
        self._open: WeakValueDictionary[RoomId, DeliveryHandle] = WeakValueDictionary()
        self._changes: ChangeQueue[DeliveryHandle] = ChangeQueue()

        def side(loop: EventLoop) -> PrefillSide:
            throughput = ThroughputEstimator(clock, len(pool.site.shard.layers()), traced=loop.traced)
            router = Router(me, pool, chosen, self._schedule, usable, throughput.pace)
            self._transfers = TransferQueue(
                loop, pool, movers, staging, regions[-1], slot_bytes, router, throughput, verify
            )
            self._role = PrefillSide(loop, pool, router, throughput, self._transfers, self._changes)
            return self._role

        self._loop = EventLoop(me, channel, rendezvous, options, observer or Silent(), clock, sleep, helping, side)
        role = self._role
        name = f"disagg_kv {instance}/{rank}"
        self.driver = EndpointThread(
            self._loop, name, role.abort_all, lambda: role.open_rooms, self._break_down, thread
        )

    def open(self, room: RoomId, *, silence_s: float | None = None, total_s: float | None = None) -> DeliveryHandle:
        """See :meth:`~disagg_kv.endpoints.api.Sender.open`."""
        room = RoomId(arguments.room_id(room))
        own = self._options.of_room(silence_s, total_s)
        with self.admission.enter(f"room {room.hex()}"):
            stuck = self._role.quarantined_slots
            if 2 * stuck > self._slots:
                raise QuarantineFullError(
                    f"room {room.hex()}: {stuck} of {self._slots} staging slots wait for evidence"
                )
            check_room(room, self._open.get(room))
            check_counts(self._loop.succession)
            key = RoomKey(room, Generation(next(self._lives)))
            handle = DeliveryHandle(key, self._pool, self)
            self._open[room] = handle
            self._loop.post(partial(self._role.open, key, handle, own.silence_s, own.total_s))
        return handle

    def step(
        self, chunks: Mapping[RoomId, tuple[int, Sequence[PageTable]]], uses: Collection[Feature] = ()
    ) -> ForwardPass:
        """See :meth:`~disagg_kv.endpoints.api.Sender.step`."""
        rooms: list[tuple[DeliveryHandle, int, Mapping[GroupId, PageTable]]] = []
        for room, stop, pages in _chunks(chunks):
            handle = self._open.get(room)
            if handle is None:
                raise LocalProtocolError(f"room {room.hex()} is not open")
            rooms.append((handle, stop, handle.checked(stop, pages)))
        used = self._uses | frozenset(arguments.several(uses, "uses", Feature))
        layered = self._schedule.name != PER_CHUNK
        tokens = tuple(stop - handle.given for handle, stop, _ in rooms)
        batch = Batch(tokens, used, layered)
        with self.admission.enter("a forward pass"):
            submitted = [handle.taken(stop, tables, batch) for handle, stop, tables in rooms]
            cuts = LayerGroups([one.key for one in submitted], self._role.row_layers)
            self._loop.post(partial(self._role.announce, submitted, self._loop.clock(), cuts))
        layers, traced = self._pool.site.shard.layers(), self._loop.traced
        return ForwardPass(submitted, layers, self, cuts, layered=layered, traced=traced)

    def poll(self) -> Sequence[DeliveryHandle]:
        """See :meth:`~disagg_kv.endpoints.api.Sender.poll`."""
        if self.driver.broken is not None:
            raise self.driver.broken
        return self._changes.take()

    def confirm_terminated(self, epoch: Epoch | str) -> None:
        """See :meth:`~disagg_kv.endpoints.api.Sender.confirm_terminated`."""
        named = epoch if isinstance(epoch, str) else Epoch(arguments.epoch(epoch))
        with self.admission.enter("confirm_terminated"):
            self._loop.post(partial(self._loop.confirm_terminated, self._loop.peer_registry.find(named)))

    def _break_down(self, error: DisaggKVError) -> None:
        """Endpoint's thread, as it ends: what has not ended, of what the engine still has a handle of, has failed."""
        handles = [handle for ref in self._open.valuerefs() if (handle := ref()) is not None]
        self._changes.break_down(handles, error)

    def peers(self) -> Sequence[PeerInfo]:
        """See :meth:`~disagg_kv.endpoints.api.Sender.peers`."""
        return self._loop.peer_registry.listed()

    @property
    def open_rooms(self) -> int:
        """Rooms that are not forgotten yet: open, or ended and waiting for a last answer."""
        return self._role.open_rooms

    @property
    def pinned_slots(self) -> int:
        """Staging slots that are being filled or that a write may still read."""
        return self._transfers.pinned_slots

    @property
    def staging(self) -> Buffer:
        """Where rows are gathered before they are sent."""
        return self._staging

    def close(self, drain_s: float = 5.0) -> None:
        """See :meth:`~disagg_kv.endpoints.api.Sender.close`."""
        self.driver.close(drain_s)

    def check_integrity(self) -> None:
        """Raise AssertionError if the accounts contradict each other; on the thread that steps the endpoint."""
        self._role.check_integrity()

    # For handles.

    @property
    def admission(self) -> Admission:
        """See :class:`~disagg_kv.endpoints.prefill.handle.PrefillCommands`."""
        return self.driver.admission

    def change(self, key: RoomKey, act: Act, ready: Event | None = None) -> None:
        """See :class:`~disagg_kv.endpoints.prefill.handle.PrefillCommands`."""
        loop, role = self._loop, self._role
        loop.post(lambda: loop.when(ready, lambda: role.change(key, act), lambda exc: role.broken([key], exc)))

    def send(self, submitted: SubmittedChunk, ready: Event | None) -> None:
        """See :class:`~disagg_kv.endpoints.prefill.handle.PrefillCommands`."""
        self._loop.post(partial(self._role.send, submitted, ready))

    def final(
        self, submitted: Sequence[SubmittedChunk], layers: Collection[LayerId] | None, ready: Event | None
    ) -> None:
        """See :class:`~disagg_kv.endpoints.prefill.handle.PrefillCommands`."""
        self._loop.post(partial(self._role.final_at, submitted, layers, ready, self._loop.clock()), wake=False)

    def begun(self, submitted: Sequence[SubmittedChunk]) -> None:
        """See :class:`~disagg_kv.endpoints.prefill.handle.PrefillCommands`."""
        self._loop.post(partial(self._role.begun, submitted, self._loop.clock()), wake=False)

    def wake(self) -> None:
        """See :class:`~disagg_kv.endpoints.prefill.handle.PrefillCommands`."""
        self._loop.channel.wake()

    def closed(self, submitted: Sequence[SubmittedChunk], ready: Event | None) -> None:
        """See :class:`~disagg_kv.endpoints.prefill.handle.PrefillCommands`."""
        self._loop.post(partial(self._role.closed_at, submitted, ready, self._loop.clock()))

    def withdraw(self, key: RoomKey, fired: HostEvent) -> None:
        """See :class:`~disagg_kv.endpoints.prefill.handle.PrefillCommands`."""
        self._loop.post(partial(self._role.withdraw, key, fired))


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
            raise arguments.wrong(f"room {room.hex()}: chunk", chunk, "a pair is needed: (stop, [PageTable ...])")
        stop, pages = chunk
        yield room, arguments.count(stop, f"room {room.hex()}: stop"), pages
