"""The simulated DMA engine: writes that land in pieces, in any order, late, partly, or never."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from attrs import define, evolve, frozen

from disagg_kv.errors import PeerLostError, RegistrationError, TransportError
from disagg_kv.ids import Peer, RegionId, Ticket
from disagg_kv.memory import U8, Buffer, Event, bytes_of, new_buffer
from disagg_kv.planning import Writes
from disagg_kv.staging import Lease
from disagg_kv.transports import Capabilities, LinkCost, PeerLost, Settled, Transport, WriteEnded

from .fault import FaultClass
from .flags import SimFlags
from .simulation import SimProcess, Simulation

Range = tuple[U8, int, U8, int, int]
"""Source memory, first byte there, target memory, first byte there, bytes."""

MODES = (
    FaultClass.REFUSED, FaultClass.PARTIAL, FaultClass.UNACKNOWLEDGED, FaultClass.LATE, FaultClass.HUNG,
    FaultClass.QUARANTINE,
)  # fmt: skip

UNLIKE = 0.4
"""Share of such worlds in which half of an endpoint's peers are far: a transport that maps nothing reaches them."""


@define(eq=False)
class Op:
    """One posted batch, from its submission until it is certain that it moves nothing more.

    Args:
        ticket: as the poster knows it.
        source, target: the two lives.
        ranges: what moves.
        before: the source bytes when it was posted.
        lease: where it may write, of the target's ring; None: into pages.
        owner: of the target pages, the room's number.
        pages: which those are.
        after: what it waits for before it moves anything; None: nothing.
        copied: a kernel of the source moves it; see :mod:`.copies`.
        seen: the versions of both sides' memories at the last check of the batch.
    """

    ticket: Ticket
    source: SimTransport
    target: SimTransport
    ranges: list[Range]
    before: bytes
    lease: Lease | None
    owner: int
    pages: list[int]
    after: Event | None = None
    copied: bool = False
    pieces: int = 0
    landed: int = 0
    reported: bool = False
    quiet: bool = False
    doomed: float | None = None
    seen: tuple[int, int] = (-1, -1)


@frozen(eq=False)
class Mapped:
    """The owner of a mapped buffer: whose memory it is."""

    there: SimTransport
    memory: U8


@define
class Landed:
    """A staged part that is complete: its bytes must not change before they are scattered."""

    lease: Lease
    data: bytes


class SimTransport:
    """One life's end; satisfies :class:`~disagg_kv.transports.Transport`."""

    name = "sim"

    def __init__(self, dma: Dma, node: SimProcess) -> None:
        self.dma = dma
        self._world = world = node.world
        self.node = node
        self.me = Peer(b"sim" + node.epoch)
        dma.transports[self.me] = self
        self.caps = Capabilities(
            waits_events=world.scenario.waits_events,
            late_writes=True,
            detects_peer_death=world.scenario.detects_death,
            drain_s=world.scenario.drain_s,
            max_batch=64,
            link=LinkCost(0, 0),
        )
        self.regions: dict[int, U8] = {}
        self.ring: U8 | None = None
        self.page: Buffer | None = None
        self.landed: dict[int, Landed] = {}
        self.alive = True
        self._peers: dict[Peer, SimTransport] = {}
        self._events: list[WriteEnded | Settled | PeerLost] = []
        self._waiting: list[Op] = []
        self._serial = 0
        self.far = FarTransport(self) if dma.unlike else None

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        """Number the buffers."""
        ids = []
        for buffer in buffers:
            self._serial += 1
            memory = bytes_of(buffer)
            self.regions[self._serial] = memory
            if buffer.addr != self.node.memory.place:
                self.ring = memory
            ids.append(RegionId(self._serial))
        return ids

    def peer_of(self, descriptor: bytes) -> Peer:
        """A peer by its name."""
        return Peer(descriptor)

    def local_descriptor(self) -> bytes:
        """Our name."""
        return self.me

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """Find a peer by its name; as a fault, or if it is gone, it cannot be reached."""
        there = self.dma.transports.get(Peer(descriptor))
        if there is not None and self._is_far(there):
            raise TransportError("sim: it is far")
        return self.reach(descriptor, timeout_s)

    def reach(self, descriptor: bytes, timeout_s: float) -> Peer:
        """Connect a peer, near or far."""
        self.node.may_block("connects its transport")
        peer = Peer(descriptor)
        there = self.dma.transports.get(peer)
        if there is None or not there.alive:
            raise PeerLostError(f"sim: peer {descriptor.hex()} has ended")
        if self._world.faulty and self._world.chance(FaultClass.UNREACHABLE):
            self._world.hit(FaultClass.UNREACHABLE)
            raise TransportError(f"sim: peer {descriptor.hex()} was not reached in {timeout_s:g} s")
        self._peers[peer] = there
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Forget a peer; as a fault, also with an error."""
        self._peers.pop(peer, None)
        if self._world.outside.happens(FaultClass.STUCK, 0.5):
            raise RuntimeError("sim: the peer could not be disconnected")

    @property
    def several(self) -> Sequence[Transport]:
        """What the process's endpoint gets: in some worlds also what reaches those that are far."""
        return [self] if self.far is None else [self, self.far]

    def _is_far(self, there: SimTransport) -> bool:
        return self.far is not None and bool((self.node.index + there.node.index) % 2)

    def unmappable(self, peer: Peer, regions: Sequence[RegionId], device: str) -> str | None:
        """In some worlds nothing is mapped."""
        return None if self._world.scenario.maps else "sim: nothing is mapped in this world"

    def map(self, peer: Peer, region: RegionId, device: str) -> Buffer:
        """A region of a peer; as a fault, not, where the endpoint has other paths: it maps once per connection."""
        self.node.may_block("maps a peer's memory")
        there = self._peers[peer]
        memory = there.regions.get(region)
        if memory is None:
            raise RegistrationError(f"sim: region {region} is not registered")
        path = self._world.scenario.prefill_paths[self._world.scenario.source_of(self.node.index)]
        if not path.startswith("mapped") and self._world.faulty and self._world.chance(FaultClass.UNREACHABLE):
            self._world.hit(FaultClass.UNREACHABLE)
            self._world.mark("mapped:a mapping fails")
            raise TransportError("sim: the memory could not be mapped")
        return self.dma.mapped(there, memory)

    def flag_page(self, nbytes: int) -> tuple[Buffer, bytes]:
        """Words of the process."""
        self.page = new_buffer(nbytes, "cpu")
        return self.page, b"flags"

    def open_flags(self, peer: Peer, page: bytes) -> SimFlags:
        """The words of a peer; as a fault, not."""
        self.node.may_block("opens a peer's flags")
        there = self._peers[peer]
        if there.page is None or self._world.outside.happens(FaultClass.FLAG, 0.1):
            self._world.mark("flags:there are none")
            raise TransportError("sim: the flag page could not be opened")
        return SimFlags(self._world, self.node, there.node, there.page)

    def submit(
        self,
        peer: Peer,
        writes: Writes,
        *,
        after: Event | None = None,
    ) -> Ticket:
        """Post a batch; the engine decides when and how it lands."""
        return self.post(peer, writes, after, self.caps)

    def post(self, peer: Peer, writes: Writes, after: Event | None, caps: Capabilities) -> Ticket:
        """The same, for a peer that is near or far."""
        if peer not in self._peers:
            raise TransportError(f"sim: no peer {peer.hex()}")
        if after is not None and not caps.waits_events:
            raise TransportError("sim waits for no events in this world")
        there = self._peers[peer]
        ours, theirs = self.regions, there.regions
        ranges: list[Range] = []
        for local, at, remote, to, n in zip(
            writes.local.tolist(), writes.local_off.tolist(), writes.remote.tolist(), writes.remote_off.tolist(),
            writes.nbytes.tolist(), strict=True,
        ):  # fmt: skip
            source, target = ours.get(local), theirs.get(remote)
            if source is None or not 0 <= at <= at + n <= len(source):
                raise _outside(source, local, at, n)
            if target is None or not 0 <= to <= to + n <= len(target):
                raise _outside(target, remote, to, n)
            ranges.append((source, at, target, to, n))
        if self._world.faulty and self._world.chance(FaultClass.REFUSED):
            self._world.hit(FaultClass.REFUSED)
            raise TransportError(
                "sim: the write was not taken",
                retryable=self._world.random.random() < 0.7,
            )
        self._serial += 1
        ticket = Ticket(self._serial)
        op = self.dma.place(self, there, ticket, ranges, after)
        if after is not None:
            self._world.mark("events:a write waits for one")
            self._waiting.append(op)
        else:
            self.dma.begin(op)
        return ticket

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        """What happened since the last call; what waits for an event begins when it is seen to have happened."""
        if self.node.poll_raises:
            self.node.polls_left -= 1
            if self.node.polls_left < 0:
                raise RuntimeError("sim: the transport's poll failed")
        if self._waiting:
            self._waiting = [op for op in self._waiting if not self.dma.due(op)]
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    def tell(self, event: WriteEnded | Settled | PeerLost) -> None:
        """Something happened."""
        if self.alive:
            far = self.far is not None and self.far.owns(event)
            (self.far.events if far and self.far is not None else self._events).append(event)
            self.node.touch()

    def knows(self, peer: Peer) -> bool:
        """Whether it is connected to a peer."""
        return peer in self._peers

    def linked(self) -> Sequence[SimTransport]:
        """The other ends of its connections."""
        return tuple(self._peers.values())

    @property
    def links(self) -> int:
        """How many peers it is connected to."""
        return len(self._peers)

    def close(self, drain_s: float) -> Sequence[Ticket]:
        """Stop; what is posted and not quiet is returned."""
        self.alive = False
        self.regions.clear()
        self._peers.clear()
        for op in self._waiting:
            self.dma.drop(op, TransportError("sim: closed before its event"))
        return tuple(op.ticket for op in self.dma.live if op.source is self and not op.quiet)


class FarTransport:
    """Reaches the peers of a process that are far: it maps nothing, and waits for events where the other does not."""

    name = "far"

    def __init__(self, near: SimTransport) -> None:
        self._near = near
        self.caps = evolve(near.caps, waits_events=not near.caps.waits_events)
        self.events: list[WriteEnded | Settled | PeerLost] = []
        self._peers: set[Peer] = set()
        self._tickets: set[Ticket] = set()

    def owns(self, event: WriteEnded | Settled | PeerLost) -> bool:
        """Whether an event is of a peer that is far."""
        return event.peer in self._peers if isinstance(event, PeerLost) else event.ticket in self._tickets

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        """The other one has numbered them."""
        return [RegionId(region) for region in self._near.regions][-len(buffers) :]

    def peer_of(self, descriptor: bytes) -> Peer:
        """A peer by its name."""
        return Peer(descriptor)

    def local_descriptor(self) -> bytes:
        """The name of the process."""
        return self._near.me

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """Find a peer by its name."""
        peer = self._near.reach(descriptor, timeout_s)
        self._peers.add(peer)
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Forget a peer."""
        self._peers.discard(peer)
        self._near.disconnect(peer)

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        """Post a batch."""
        ticket = self._near.post(peer, writes, after, self.caps)
        self._tickets.add(ticket)
        return ticket

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        """What happened since the last call."""
        events, self.events = self.events, []
        return events

    def close(self, drain_s: float) -> Sequence[Ticket]:
        """The other one stops."""
        return ()


def _outside(memory: U8 | None, region: int, offset: int, nbytes: int) -> RegistrationError:
    size = 0 if memory is None else len(memory)
    return RegistrationError(f"sim: region {region} of {size} bytes: {nbytes} bytes at {offset}")


class Dma:
    """Moves bytes between memories at its own times, and checks whose they are whenever it does."""

    def __init__(self, world: Simulation) -> None:
        self.world = self._world = world
        self._random = world.random
        self._number = 0
        self.live: dict[Op, None] = {}
        self.transports: dict[Peer, SimTransport] = {}
        self._hung: list[Op] = []
        # Some peers of an endpoint are far, where no prefill rank insists on a path that only near ones have, and
        # where no poll raises: that ends one of several transports for good.
        insists = any(path.startswith("mapped") for path in world.scenario.prefill_paths)
        insists |= any(fault in world.scenario.faults for fault in (FaultClass.POLL, FaultClass.BROKEN))
        self.unlike = not insists and random.Random(f"lanes {world.scenario.seed}").random() < UNLIKE
        self._odd = any(mode in world.scenario.faults for mode in MODES)

    # Beginning.

    def place(
        self, source: SimTransport, target: SimTransport, ticket: Ticket, ranges: list[Range], after: Event | None
    ) -> Op:
        """A batch is submitted: from now on its target's memory is held for it."""
        lease, owner, pages = self._place(target, ranges)
        op = Op(ticket, source, target, ranges, b"", lease, owner, pages, after)
        self.live[op] = None
        return op

    def due(self, op: Op) -> bool:
        """Begin a batch whose event has happened, or end one whose event fails; False: it waits still."""
        if op.reported or op.quiet:
            return True
        assert op.after is not None
        if not op.target.alive and op.source.knows(op.target.me):
            self._world.mark("events:its peer has ended")
        try:
            if not op.after.query():
                return False
        except Exception as error:
            self._world.mark("events:it fails")
            self.drop(op, TransportError(f"sim: its event: {error}"))
            return True
        op.after = None
        self.begin(op)
        return True

    def drop(self, op: Op, error: Exception) -> None:
        """End a batch of which nothing has moved."""
        self._tell(op, error, quiesced=True)

    def begin(self, op: Op) -> None:
        """A batch is posted."""
        world, source, target = self._world, op.source, op.target
        op.before = _read(op.ranges)
        world.note("write", source.node.address, target.node.address, op.before)
        if op.doomed is not None:
            return
        mode = self._mode() if self._odd and world.faulty else None
        if mode is not None:
            world.hit(mode)
        slow = world.faulty and world.chance(FaultClass.SLOW)
        if slow:
            world.hit(FaultClass.SLOW)
        self._schedule(op, mode, self._random.choice((0.02, 0.2, 1.0)) if slow else 0.0)
        if not target.alive:
            # The sender has not seen its end yet, and waits for the bound from when it does.
            self._doom(op)
            self._target_died(op)

    def _place(self, target: SimTransport, ranges: list[Range]) -> tuple[Lease | None, int, list[int]]:
        """Which lease, or whose pages, a batch is for; anything else is a violation of I5."""
        world = self._world
        if not target.alive or not ranges:
            return None, 0, []
        if ranges[0][2] is target.ring:
            _, _, _, to, n = ranges[0]
            for lease in target.node.leases():
                if lease.offset <= to and to + n <= lease.offset + lease.nbytes:
                    return lease, 0, []
            world.violation(
                "I5",
                f"{target.node.address}: a write of {n} bytes at ring byte {to}, which no lease has",
            )
        memory = target.node.memory
        pages, owner = memory.pages_of([(to, n) for _, _, _, to, n in ranges])
        if owner <= 0:
            world.violation(
                "I5",
                f"{target.node.address}: a write into pages {pages}, which are not one room's",
            )
        return None, owner, pages

    def _mode(self) -> FaultClass | None:
        return next((mode for mode in MODES if self._world.chance(mode)), None)

    def _schedule(self, op: Op, mode: FaultClass | None, slow: float) -> None:
        world, rng = self._world, self._random
        pieces = torn(op.ranges, rng.choice((1, 1, 1, 2, 3)), rng.random())
        whole = len(pieces)
        error = TransportError(f"sim: {mode.value}", retryable=rng.random() < 0.7) if mode is not None else None
        if mode is FaultClass.REFUSED:
            pieces = []
        elif mode in (FaultClass.PARTIAL, FaultClass.HUNG, FaultClass.QUARANTINE):
            pieces = pieces[: rng.randrange(whole + 1)] if whole > 1 else pieces[: rng.randrange(2)]
        op.pieces = len(pieces)
        begin = 0.0
        if mode is FaultClass.LATE:
            begin = rng.choice((0.01, 0.1, 0.6))
        end = 0.0
        for piece in pieces:
            at = begin + (rng.randint(0, 3) / 1000 + slow * rng.random() if begin or slow else rng.randint(0, 2) / 1000)
            end = max(end, at)
            if at:
                world.later(at, partial(self.land, op, piece))
            else:
                self.land(op, piece)
        if mode in (FaultClass.HUNG, FaultClass.QUARANTINE):
            self._hung.append(op)
        elif mode is FaultClass.LATE:
            world.later(0.002, lambda: self._tell(op, error, quiesced=False))
            world.later(end + rng.choice((0.001, 0.05)), lambda: self._settle(op))
        elif mode is FaultClass.UNACKNOWLEDGED:
            world.later(end + 0.001, lambda: self._tell(op, error, quiesced=False))
            world.later(end + rng.choice((0.002, 0.1, 0.6)), lambda: self._settle(op))
        else:
            world.later(end + 0.001, lambda: self._tell(op, error, quiesced=True))

    # Copies into mapped pages.

    def number(self) -> int:
        """Of a copy."""
        self._number += 1
        return self._number

    def mapped(self, there: SimTransport, memory: U8) -> Buffer:
        """A region of another process, as a process sees it."""
        return Buffer(memory.__array_interface__["data"][0], memory.nbytes, owner=Mapped(there, memory))

    def begin_copy(self, op: Op) -> None:
        """A device begins to copy."""
        op.after, op.before = None, _read(op.ranges)
        self._world.note("copy", op.source.node.address, op.target.node.address, op.before)

    # Landing.

    def land(self, op: Op, piece: list[Range]) -> None:
        """Some bytes of it move, unless it cannot move any more."""
        world = self._world
        op.landed += 1
        if op.quiet or not op.target.alive or (op.doomed is not None and world.now >= op.doomed):
            return
        self.check(op)
        if op.lease is not None:
            there = op.target.landed.get(op.ranges[0][3])
            if there is not None and there.lease is op.lease:
                world.violation(
                    "I1",
                    f"{op.target.node.address}: {op.lease} is written again after it landed",
                )
        op.target.node.memory.version += 1
        for source, at, target, to, n in piece:
            target[to : to + n] = source[at : at + n]
        world.note("landed", op.target.node.address, op.ticket, len(piece))
        if op.lease is None:
            memory = op.target.node.memory
            for _, _, _, to, n in piece:
                if memory.cells[to : to + n].tobytes() != memory.want[to : to + n].tobytes():
                    world.violation(
                        "I2",
                        f"{op.target.node.address}: wrong bytes land in pages at byte {to}",
                    )

    def _tell(self, op: Op, error: Exception | None, *, quiesced: bool) -> None:
        if op.reported or op.quiet:
            return
        op.reported = True
        if error is None and op.lease is not None:
            op.target.landed[op.ranges[0][3]] = Landed(op.lease, op.before)
        if quiesced:
            self.end(op)
        op.source.tell(WriteEnded(op.ticket, error, quiesced))

    def _settle(self, op: Op) -> None:
        if not op.quiet:
            self.end(op)
            self._world.mark("release:settled")
            op.source.tell(Settled(op.ticket))

    def end(self, op: Op) -> None:
        """From now on nothing of it moves."""
        self.check(op)
        op.quiet = True
        self.live.pop(op, None)

    # Ends of processes, and of faults.

    def died(self, dead: SimTransport) -> None:
        """A process has ended: what it posted lands within the drain bound or never."""
        world = self._world
        dead.alive = False
        for op in list(self.live):
            if op.copied and op.source is not dead:
                # A mapping outlives its owner: a kernel goes on.
                continue
            if op.source is dead or op.target is dead:
                self._doom(op)
            if op.source is dead and op.doomed is not None:
                world.later(op.doomed - world.now + 0.0005, partial(self._forget, op))
            elif op.target is dead:
                self._target_died(op)

    def _doom(self, op: Op) -> None:
        """One side has ended: nothing of it moves after the drain bound."""
        bound, rng = self._world.scenario.drain_s, self._random
        op.doomed = self._world.now + (rng.choice((0.0, 0.05, 0.2)) if bound is None else rng.random() * bound)

    def _forget(self, op: Op) -> None:
        if not op.quiet:
            self.end(op)

    def _target_died(self, op: Op) -> None:
        error = PeerLostError(f"sim: peer {op.target.me.hex()} has ended")
        if op.reported:
            return
        if self._random.random() < 0.3 and not self._world.healed:
            self._hung.append(op)
        else:
            self._world.later(0.005, lambda: self._tell(op, error, quiesced=True))

    def fence(self) -> None:
        """Fence all writes that hang: they move nothing more, and end."""
        hung, self._hung = self._hung, []
        for op in hung:
            if not op.quiet:
                if op.reported:
                    self._settle(op)
                else:
                    self._tell(op, TransportError("sim: fenced"), quiesced=True)

    # Whose memory it is.

    def check(self, op: Op) -> None:
        """I5: what a write reads and writes is its own until it is quiet."""
        world = self._world
        if op.quiet or (op.doomed is not None and world.now >= op.doomed):
            return
        if op.after is None and op.source.alive and _read(op.ranges) != op.before:
            world.violation("I5", f"{op.source.node.address}: memory that write {op.ticket} reads has changed")
        if not op.target.alive:
            return
        if op.lease is not None:
            if not op.target.node.holds(op.lease):
                world.violation(
                    "I5",
                    f"{op.target.node.address}: {op.lease} was released while a write may land there",
                )
        elif op.pages and not bool((op.target.node.memory.owners[op.pages] == op.owner).all()):
            world.violation(
                "I5",
                f"{op.target.node.address}: pages {op.pages} were freed while a write may land there",
            )

    def check_all(self, here: SimTransport) -> None:
        """After every step: check the writes from and to this process; others are checked as they land and end."""
        for op in self.live:
            if op.source is not here and op.target is not here:
                continue
            versions = op.source.node.memory.version, op.target.node.memory.version
            if op.seen != versions:
                self.check(op)
                op.seen = versions
            elif op.lease is not None and op.target.alive and not op.target.node.holds(op.lease):
                self.check(op)


def _read(ranges: Sequence[Range]) -> bytes:
    """What a write reads now."""
    return b"".join([memory[at : at + n].tobytes() for memory, at, _, _, n in ranges])


def torn(ranges: list[Range], pieces: int, order: float) -> list[list[Range]]:
    """The ranges in this many parts, which may cut a range in two, in some order."""
    if pieces == 1 or not ranges:
        return [ranges] if ranges else []
    torn: list[list[Range]] = [[] for _ in range(pieces)]
    for number, (source, at, target, to, n) in enumerate(ranges):
        if len(ranges) >= pieces:
            torn[number % pieces].append((source, at, target, to, n))
            continue
        edges = [n * i // pieces for i in range(pieces + 1)]
        for i in range(pieces):
            cut = edges[i]
            torn[i].append((source, at + cut, target, to + cut, edges[i + 1] - cut))
    turn = int(order * pieces)
    return [*torn[turn:], *torn[:turn]]
