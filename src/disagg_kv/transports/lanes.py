"""Several transports as one: each peer gets the first that reaches it.

Theory of operation
===================

A *lane* is one of the transports. Memory is registered with every lane, so that each peer may use any of them. The
descriptor holds the descriptors of all lanes, each under its name. ``connect`` tries the lanes that both sides have, in
the order of this side, and the first that connects carries the writes to that peer from then on.

Both sides need not choose the same lane. Writes are one-sided: the writer's choice counts, and the target's memory is
registered with all of its lanes. So the target does not know which lane a peer writes over. It takes the promises of
the weakest: last writes of a peer have landed after the longest ``drain_s`` of the lanes that both have, and a lane's
report is a fence only where they have no other lane.

A lane connects or refuses at once if it maps memory of one host (``inproc``, ``shm``, ``cuda_ipc``). A network's lane
may connect a peer that it cannot reach, so such a lane comes last. UCX orders its transports within one connection in a
similar way: all of them are opened, and each connection gets those that reach its address
(https://openucx.readthedocs.io/en/master/faq.html, "Which transports does UCX use?").

A lane that cannot register some memory takes no further peers, with the reason by name. So does a lane whose ``poll``
raises: its peers are lost and its writes end with that error, and the other lanes go on. Whatever a lane's ``connect``
raises is the reason why a peer gets a later lane.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from threading import Lock

import msgspec
import numpy as np
from attrs import define, evolve, field, frozen

from ..errors import (
    DisaggKVError,
    IncompatiblePeerError,
    PeerLostError,
    RegistrationError,
    RemoteProtocolError,
    TransportError,
    text_of,
)
from ..ids import Peer, RegionId, Ticket
from ..memory import Buffer, Event
from ..planning import Writes
from .base import (
    Capabilities,
    Flags,
    Lane,
    LinkCost,
    PeerLost,
    Settled,
    SupportsAllocate,
    SupportsFlags,
    SupportsMapping,
    Transport,
    WriteEnded,
)
from .connected import Connected
from .descriptor import Descriptor, Region, encode, pack, unpack
from .lane_offers import JOIN, KIND, Offer, listed, read
from .process import Home
from .regions import RegionTable


@define(eq=False)
class _Carrier:
    """A lane, what it calls our regions (``same``: as we do), and which of its tickets are not quiet.

    ``offered``: a descriptor of ours has offered it, so peers may write over it, whatever becomes of it here.
    """

    transport: Transport
    out: str = ""
    failed: bool = False
    offered: bool = False
    same: bool = True
    ids: dict[RegionId, RegionId] = field(factory=dict)
    tickets: dict[Ticket, Ticket] = field(factory=dict)
    open: set[Ticket] = field(factory=set)

    @property
    def name(self) -> str:
        return self.transport.name

    def numbers(self) -> tuple[tuple[int, int], ...]:
        """See :class:`Offer`."""
        return () if self.same else tuple(self.ids.items())

    def its(self, region: RegionId) -> RegionId:
        """What the lane calls a region of ours.

        Raises:
            RegistrationError: the lane does not have it.
        """
        if region not in self.ids:
            raise RegistrationError(f"local region {region} is not registered with transport {self.name!r}")
        return self.ids[region]

    def register(self, ids: Sequence[RegionId], buffers: Sequence[Buffer]) -> None:
        """Register with the lane what we call ``ids``."""
        self.ids.update(zip(ids, self.transport.register(buffers), strict=True))
        self.same = all(ours == its for ours, its in self.ids.items())


@frozen
class _Board:
    """A flag page, as a lane says it."""

    lane: str
    place: bytes


_FLAG_PLACE = msgspec.msgpack.Decoder(_Board)


@frozen
class _Remote:
    """A connected peer; ``numbers`` None: the lane calls the peer's regions as the peer does.

    Nothing is written to ``sources``: with ``own_memory_only``, what only some of the lanes could write to.
    """

    serial: int
    carrier: _Carrier
    peer: Peer
    numbers: Mapping[RegionId, RegionId] | None
    sources: frozenset[RegionId]
    lane: Lane
    alone: bool

    def name(self, region: RegionId) -> RegionId:
        """What the lane calls a region of the peer.

        Raises:
            RegistrationError: the lane does not have it, or it is no target of writes.
        """
        its = region if self.numbers is None else self.numbers.get(region)
        if its is None or region in self.sources:
            raise RegistrationError(f"peer {self.peer.hex()[:8]}'s region {region} is no memory that peers write to")
        return its


class CombinedTransport:
    """Registers with all lanes, and writes to each peer over the first transport that reaches it.

    :func:`~disagg_kv.transports.combine` makes it. It owns the lanes. Its ``caps`` promise what holds for every peer;
    :meth:`lane` has those of one peer.

    Args:
        lanes: in the order in which they are tried.
        left_out: lanes that this side does without, and why; for messages.
        clock: seconds.
    """

    def __init__(
        self,
        lanes: Sequence[Transport],
        left_out: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = JOIN.join(lane.name for lane in lanes)
        self.caps = _weakest([lane.caps for lane in lanes])
        self.left_out: Mapping[str, str] = dict(left_out or {})
        self._clock = clock
        self._home = Home(f"this transport {self.name!r}")
        self._me = Peer(uuid.uuid4().bytes)
        self._carriers = tuple(_Carrier(lane) for lane in lanes)
        self._table = RegionTable(self.caps.devices)
        self._peers: Connected[_Remote] = Connected()
        self._owning = Lock()
        self._owners: dict[tuple[str, Peer], Peer] = {}
        self._tickets = count(1)

    @property
    def lanes(self) -> tuple[Transport, ...]:
        """In the order in which they are tried."""
        return tuple(carrier.transport for carrier in self._carriers)

    @property
    def excluded(self) -> Mapping[str, str]:
        """Lanes that no peer gets, and why: left out from the start, or since."""
        return {**self.left_out, **{one.name: one.out for one in self._carriers if one.out}}

    def lane(self, peer: Peer) -> Lane:
        """See :meth:`SupportsLanes.lane`."""
        remote = self._peers.known(peer, self.name)
        return evolve(remote.lane, lost=remote.carrier.out) if remote.carrier.failed else remote.lane

    # Memory.

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        """See :meth:`Transport.register`; with each lane that can. One that cannot takes no further peers.

        Raises:
            RegistrationError: also where no lane can: says why for each.
        """
        self._home.check_open()
        ids = self._table.add(buffers)
        done: list[_Carrier] = []
        refused: list[tuple[_Carrier, str]] = []
        try:
            for carrier in self._carriers:
                if carrier.out:
                    continue
                try:
                    carrier.register(ids, buffers)
                    done.append(carrier)
                except Exception as error:
                    if isinstance(error, DisaggKVError) and not isinstance(error, TransportError):
                        raise  # the caller's fault, whatever the lane
                    refused.append((carrier, text_of(_named(error))))
            if not done:
                whys = {one.name: why for one, why in refused}
                raise RegistrationError(f"no transport can register this memory: {listed({**whys, **self.excluded})}")
        except BaseException:
            for carrier in done:
                carrier.transport.deregister([carrier.ids.pop(region) for region in ids])
            self._table.remove(ids)
            raise
        for carrier, why in refused:
            carrier.out = f"it cannot register the memory: {why}"
        return ids

    def deregister(self, regions: Sequence[RegionId]) -> None:
        """See :meth:`Transport.deregister`; from all lanes, whatever one of them raises."""
        self._home.check_open()
        self._table.remove(regions)
        errors = []
        for carrier in self._carriers:
            its = [carrier.ids.pop(region) for region in regions if region in carrier.ids]
            try:
                if its:
                    carrier.transport.deregister(its)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    # Peers.

    def local_descriptor(self) -> bytes:
        """See :meth:`Transport.local_descriptor`."""
        regions = tuple(Region(i, b.nbytes, b.device, 0, self._target(b)) for i, b in self._table.items())
        offers = [Offer(name, refused=why[:500]) for name, why in self.left_out.items()]
        for one in self._carriers:
            descriptor = b"" if one.out else one.transport.local_descriptor()
            one.offered = one.offered or bool(descriptor)
            offers.append(Offer(one.name, descriptor, one.numbers(), one.out[:500]))
        return encode(Descriptor(KIND, self._me, self._table.serial, regions, pack(tuple(offers))))

    def _target(self, buffer: Buffer) -> bytes:
        """Not empty: peers may write to it."""
        return b"w"

    def peer_of(self, descriptor: bytes) -> Peer:
        """See :meth:`Transport.peer_of`."""
        return read(descriptor)[0].incarnation

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """See :meth:`Transport.connect`; tries the lanes in order, each with its share of the time that is left.

        A peer that is connected stays with its lane.

        Raises:
            IncompatiblePeerError: the sides have no lane in common.
            TransportError: also where no lane reaches the peer: says why for each.
        """
        self._home.check_open()
        remote, offers = read(descriptor)
        peer, until = remote.incarnation, self._clock() + timeout_s
        known = self._peers.get(peer)
        if known is not None and known.carrier.failed:
            raise PeerLostError(f"{self.name}: {known.carrier.name!r} of peer {peer.hex()}: {known.carrier.out}")
        if known is not None and known.serial >= remote.serial >= 0:
            return peer
        refusals: dict[str, DisaggKVError] = {}
        mine = self._claim(peer, offers, refusals)
        for at, (carrier, its) in enumerate(mine):
            if known is not None and carrier is not known.carrier:
                continue
            offer, share_s = offers[carrier.name], max(0.0, until - self._clock()) / (len(mine) - at)
            try:
                carrier.transport.connect(offer.descriptor, share_s)
            except Exception as error:
                refusals[carrier.name] = _named(error)
                continue
            theirs = [one for one in self._carriers if self._may_be_used(one, offers)]
            lane = self._described(carrier, theirs, refusals)
            numbers = {RegionId(a): RegionId(b) for a, b in offer.numbers} or None
            sources = frozenset(region.id for region in remote.regions if not region.blob)
            self._peers.add(peer, _Remote(remote.serial, carrier, its, numbers, sources, lane, len(theirs) == 1))
            with self._owning:
                self._owners |= {(one.name, name): peer for one, name in mine}
            return peer
        if known is None:
            self._disown(peer)
        raise self._unreached(peer, offers, refusals) from next(iter(refusals.values()), None)

    @staticmethod
    def _may_be_used(carrier: _Carrier, offers: Mapping[str, Offer]) -> bool:
        """Whether a peer may write over a lane, or we to it: also one that failed here after it was offered."""
        offer = offers.get(carrier.name)
        return offer is not None and bool(offer.descriptor) and (carrier.offered or not carrier.out)

    def _claim(
        self, peer: Peer, offers: Mapping[str, Offer], refusals: dict[str, DisaggKVError]
    ) -> list[tuple[_Carrier, Peer]]:
        """The lanes that a peer shares with us, and its names there, which no other peer may have.

        A descriptor is no secret: a peer with those of another one inside would receive, or end, that one's writes.

        Raises:
            RemoteProtocolError: another peer has one of them.
        """
        mine: list[tuple[_Carrier, Peer]] = []
        for carrier in self._carriers:
            offer = offers.get(carrier.name)
            if offer is not None and offer.descriptor and not carrier.out:
                try:
                    mine.append((carrier, carrier.transport.peer_of(offer.descriptor)))
                except Exception as error:
                    refusals[carrier.name] = _named(error)
        with self._owning:
            for carrier, its in mine:
                owner = self._owners.get((carrier.name, its), peer)
                if owner != peer:
                    raise RemoteProtocolError(f"{carrier.name!r} of peer {peer.hex()} is that of {owner.hex()}")
            self._owners |= {(carrier.name, its): peer for carrier, its in mine}
        return mine

    def _disown(self, peer: Peer) -> None:
        with self._owning:
            self._owners = {lane: owner for lane, owner in self._owners.items() if owner != peer}

    def _described(self, carrier: _Carrier, mine: Sequence[_Carrier], refusals: Mapping[str, DisaggKVError]) -> Lane:
        """What the peer gets, and why not an earlier lane; the peer may write over any of the lanes."""
        caps, whys = [one.transport.caps for one in mine], dict(self.excluded)
        whys |= {name: text_of(error) for name, error in refusals.items()}
        before = [one.name for one in self._carriers[: self._carriers.index(carrier)]]
        why = "; ".join(f"not {name}: {whys.get(name, 'the peer does not offer it')}" for name in before)
        return Lane(carrier.name, evolve(carrier.transport.caps, drain_s=_longest(caps)), why or "the first transport")

    def _unreached(
        self, peer: Peer, offers: Mapping[str, Offer], refusals: Mapping[str, DisaggKVError]
    ) -> DisaggKVError:
        """Why no lane reaches a peer. Where all lanes say the same of it, as that it has ended, so does the error."""
        ours = {**{one.name: "" for one in self._carriers}, **self.excluded}
        theirs = {name: offer.refused for name, offer in offers.items()}
        if not refusals:
            return IncompatiblePeerError("transports", listed(ours), listed(theirs))
        kinds = {type(error) for error in refusals.values()}
        whys = {name: text_of(error) for name, error in refusals.items()}
        unshared = {name: why or "the peer does not offer it" for name, why in ours.items() if name not in whys}
        message = f"no transport reaches peer {peer.hex()}: {listed({**whys, **unshared})}; it has {listed(theirs)}"
        for kind in (PeerLostError, RemoteProtocolError):
            if kinds == {kind}:
                return kind(message)
        return TransportError(message)

    def disconnect(self, peer: Peer) -> None:
        """See :meth:`Transport.disconnect`."""
        remote = self._peers.remove(peer)
        if remote is not None:
            self._disown(peer)
            remote.carrier.transport.disconnect(remote.peer)

    # Writes.

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        """See :meth:`Transport.submit`; ``after`` where the peer's lane waits for events."""
        self._home.check_open()
        remote = self._peers.known(peer, self.name)
        carrier = remote.carrier
        if carrier.failed:
            raise TransportError(f"{self.name}: transport {carrier.name!r}: {carrier.out}")
        local, there = writes.local, writes.remote
        if not carrier.same:
            local = np.array([carrier.its(RegionId(region)) for region in local.tolist()], np.int32)
        if remote.numbers is not None or remote.sources:
            there = np.array([remote.name(RegionId(region)) for region in there.tolist()], np.int32)
        its = Writes(local, writes.local_off, there, writes.remote_off, writes.nbytes)
        ticket = Ticket(next(self._tickets))
        carrier.tickets[carrier.transport.submit(remote.peer, its, after=after)] = ticket
        carrier.open.add(ticket)
        self._table.hold(ticket, writes)
        return ticket

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        """See :meth:`Transport.poll`; of a lane that raises, all peers are lost and all writes end."""
        if not self._home.here:
            return ()
        events: list[WriteEnded | Settled | PeerLost] = []
        for carrier in self._carriers:
            if carrier.failed:
                continue
            try:
                its = carrier.transport.poll()
            except Exception as error:
                events += self._fail(carrier, error)
                continue
            events += (told for event in its if (told := self._told(carrier, event)) is not None)
        return events

    def _told(
        self, carrier: _Carrier, event: WriteEnded | Settled | PeerLost
    ) -> WriteEnded | Settled | PeerLost | None:
        """A lane's event, by our names; None: of a peer or ticket that is not known here."""
        if isinstance(event, PeerLost):
            peer = self._owners.get((carrier.name, event.peer))
            remote = None if peer is None else self._peers.get(peer)
            if peer is None or remote is None or remote.carrier is not carrier:
                return None
            return PeerLost(peer, fenced=event.fenced and remote.alone)
        quiet = isinstance(event, Settled) or event.quiesced
        ticket = carrier.tickets.pop(event.ticket, None) if quiet else carrier.tickets.get(event.ticket)
        if ticket is None:
            return None
        carrier.open.discard(ticket)
        if quiet:
            self._table.quiet(ticket)
        return Settled(ticket) if isinstance(event, Settled) else WriteEnded(ticket, event.error, event.quiesced)

    def _fail(self, carrier: _Carrier, error: Exception) -> list[WriteEnded | Settled | PeerLost]:
        carrier.failed, carrier.out = True, f"it has failed: {text_of(error)}"
        why = f"{self.name}: transport {carrier.name!r}: {carrier.out}"
        lost = [peer for peer, remote in self._peers.all.items() if remote.carrier is carrier]
        ended = [WriteEnded(ticket, TransportError(why), quiesced=False) for ticket in sorted(carrier.open)]
        carrier.open.clear()
        return [*ended, *(PeerLost(peer) for peer in lost)]

    def close(self, drain_s: float) -> Sequence[Ticket]:
        """See :meth:`Transport.close`; each lane is closed, whatever another one raises."""
        self._home.check()
        until, self._home.closed = self._clock() + drain_s, True
        left: list[Ticket] = []
        errors: list[Exception] = []
        for carrier in self._carriers:
            try:
                unquiet = carrier.transport.close(max(0.0, until - self._clock()))
                left += (carrier.tickets[ticket] for ticket in unquiet if ticket in carrier.tickets)
            except Exception as error:
                errors.append(error)
                left += carrier.tickets.values()
        self._peers.clear()
        self._owners.clear()
        self._table.clear()
        if errors:
            raise errors[0]
        return left

    def _mapping(self, peer: Peer) -> tuple[_Remote, SupportsMapping] | str:
        """A peer and its lane, if that maps; else why not."""
        remote = self._peers.get(peer)
        if remote is None:
            return f"{self.name}: no peer {peer.hex()}"
        lane = remote.carrier.transport
        if not isinstance(lane, SupportsMapping):
            return f"transport {lane.name!r} does not map memory of peers ({remote.lane.reason})"
        return remote, lane


class MappingTransport(CombinedTransport):
    """With lanes of which some map."""

    def unmappable(self, peer: Peer, regions: Sequence[RegionId], device: str) -> str | None:
        """See :meth:`SupportsMapping.unmappable`; of a peer whose lane does not map, nothing is."""
        found = self._mapping(peer)
        if isinstance(found, str):
            return found
        remote, lane = found
        try:
            return lane.unmappable(remote.peer, [remote.name(region) for region in regions], device)
        except RegistrationError as error:
            return text_of(error)

    def map(self, peer: Peer, region: RegionId, device: str) -> Buffer:
        """See :meth:`SupportsMapping.map`; over the peer's lane."""
        self._home.check_open()
        found = self._mapping(peer)
        if isinstance(found, str):
            raise TransportError(found) if self._peers.get(peer) is None else RegistrationError(found)
        remote, lane = found
        return lane.map(remote.peer, remote.name(region), device)


class AllocatingTransport(CombinedTransport):
    """With lanes of which some give memory of their own."""

    def allocate(self, nbytes: int) -> Buffer:
        """See :meth:`SupportsAllocate.allocate`; from the lane that writes only to its own, else the first that can."""
        able = [lane for lane in self.lanes if isinstance(lane, SupportsAllocate)]
        chosen = next((lane for lane in able if lane.caps.own_memory_only), able[0])
        assert isinstance(chosen, SupportsAllocate)
        return chosen.allocate(nbytes)

    def allocated(self, buffer: Buffer) -> bool:
        """See :meth:`SupportsAllocate.allocated`."""
        return any(isinstance(lane, SupportsAllocate) and lane.allocated(buffer) for lane in self.lanes)

    def _target(self, buffer: Buffer) -> bytes:
        return b"w" if not self.caps.own_memory_only or self.allocated(buffer) else b""


class AllocatingMappingTransport(AllocatingTransport, MappingTransport):
    """With both."""


class RingingTransport(MappingTransport):
    """With lanes of which some have flags. The page is that of the first such lane, for peers of that lane alone."""

    def flag_page(self, nbytes: int) -> tuple[Buffer, bytes]:
        """See :meth:`SupportsFlags.flag_page`."""
        self._home.check_open()
        lane = next(lane for lane in self.lanes if isinstance(lane, SupportsFlags))
        buffer, place = lane.flag_page(nbytes)
        return buffer, pack(_Board(lane.name, place))

    def open_flags(self, peer: Peer, page: bytes) -> Flags:
        """See :meth:`SupportsFlags.open_flags`; if the peer's lane is the page's."""
        self._home.check_open()
        there, remote = unpack(page, _FLAG_PLACE), self._peers.known(peer, self.name)
        lane = remote.carrier.transport
        if lane.name != there.lane or not isinstance(lane, SupportsFlags):
            raise TransportError(f"the peer's flags are of {there.lane!r}, and its transport is {lane.name!r}")
        return lane.open_flags(remote.peer, there.place)


class RingingAllocatingTransport(RingingTransport, AllocatingMappingTransport):
    """With lanes that give memory, too."""


def _named(error: Exception) -> DisaggKVError:
    """The error of a lane. An adapter may let those of its library through: they become a TransportError's cause."""
    if isinstance(error, DisaggKVError):
        return error
    ours = TransportError(f"{type(error).__name__}: {text_of(error)}")
    ours.__cause__ = error
    return ours


def _longest(caps: Sequence[Capabilities]) -> float | None:
    drains = [one.drain_s for one in caps]
    return None if None in drains else max(s for s in drains if s is not None)


def _weakest(caps: Sequence[Capabilities]) -> Capabilities:
    """What holds for each peer, whichever lane it gets. The speed, and the cost of a descriptor, are the fastest's."""
    bounded = [one.max_batch for one in caps if one.max_batch is not None]
    return Capabilities(
        devices=frozenset().union(*(one.devices for one in caps)),
        own_memory_only=any(one.own_memory_only for one in caps),
        in_process_only=all(one.in_process_only for one in caps),
        needs_target_polling=any(one.needs_target_polling for one in caps),
        waits_events=all(one.waits_events for one in caps),
        detects_peer_death=all(one.detects_peer_death for one in caps),
        late_writes=True,
        max_batch=min(bounded, default=None),
        drain_s=_longest(caps),
        write_s=min(one.write_s for one in caps),
        bytes_per_s=max(one.bytes_per_s for one in caps),
        link=LinkCost(max(one.link.nbytes for one in caps), max(one.link.descriptors for one in caps)),
    )
