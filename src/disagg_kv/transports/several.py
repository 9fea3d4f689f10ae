"""The transports of one endpoint, a list: memory is registered with all, and each peer gets the first that reaches it.

Theory of operation
===================

A ``Hello`` offers the descriptors of all transports, each under its name. :meth:`Transports.shared` finds those that
both sides have, and :meth:`Transports.connect` tries them in the order of this side. The first that connects carries
the writes to that peer from then on: the :class:`Carrier` of its session.

Both sides need not choose the same transport. Writes are one-sided: the writer's choice counts, and the target's memory
is registered with all transports. So the target does not know over which one a peer writes. Last writes of a peer have
landed after the longest ``drain_s`` of the transports that both have, and what one of them proves is a fence only where
they share no other.

A transport connects or refuses at once if it maps memory of one host (``inproc``, ``shm``, ``cuda_ipc``). A network may
connect a peer that it cannot reach, so it comes last. UCX orders its transports within one connection in a similar way:
all of them are opened, and each connection gets those that reach its address
(https://openucx.readthedocs.io/en/master/faq.html, "Which transports does UCX use?").

A transport that cannot register some memory takes no peers, with the reason by name. So does one whose ``poll`` raises:
its peers are lost, and the others go on. Whatever ``connect`` of a transport raises is the reason why a peer gets a
later one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
from attrs import evolve, frozen

from .. import arguments
from ..errors import (
    ConfigurationError,
    DisaggKVError,
    IncompatiblePeerError,
    PeerLostError,
    RegistrationError,
    RemoteProtocolError,
    TransportError,
    text_of,
)
from ..ids import Peer, RegionId
from ..memory import Buffer
from .base import Capabilities, LinkCost, PeerLost, Settled, SupportsAllocate, SupportsMapping, Transport, WriteEnded
from .descriptor import pack, unpack

JOIN = "+"
"""Between names of transports."""

MOST = 8
"""More transports than that are refused, of this side and of a peer."""


@frozen
class Offer:
    """One transport, as its owner describes it to peers.

    Args:
        name: of the transport.
        descriptor: its own; empty where peers cannot use it.
        refused: why peers cannot use it.
    """

    name: str
    descriptor: bytes = b""
    refused: str = ""


_OFFERS = msgspec.msgpack.Decoder(tuple[Offer, ...])


@frozen
class Shared:
    """What a peer offers, and which of our transports can be tried.

    Args:
        offers: by name.
        names: of each transport that both sides have, in our order: the peer's name there.
        refusals: transports that cannot read what the peer offers for them.
    """

    offers: Mapping[str, Offer]
    names: Mapping[str, Peer]
    refusals: Mapping[str, DisaggKVError]


@frozen
class Carrier:
    """The transport that carries the writes to one peer.

    Args:
        transport: the first that reaches it.
        peer: its name there.
        caps: what the transport promises for this peer; ``drain_s`` holds for all that the peer may write over.
        reason: why the peer got it.
        alone: the peer writes over no other one.
        name: of the transport.
    """

    transport: Transport
    peer: Peer
    caps: Capabilities
    reason: str
    alone: bool
    name: str


@frozen
class Failed:
    """A transport's ``poll`` has raised: it carries nothing any more."""

    reason: str


Report = WriteEnded | Settled | PeerLost | Failed


class Transports:
    """Transports in the order in which they are tried. It owns them.

    A list is for one endpoint. A constructor that fails has used it up: transports may keep memory that was registered
    with them, and refuse it the next time. The caller closes the list, and makes new transports.

    Args:
        several: those of one host first, and a network last.
        left_out: those that this side does without, and why; for messages.
        argument: the name of ``several`` in errors.

    Raises:
        ConfigurationError: no list, none or more than :data:`MOST`, something that is no transport, two of one name, or
            two that write only to memory of their own.
    """

    def __init__(
        self,
        several: Sequence[Transport],
        left_out: Mapping[str, str] | None = None,
        argument: str = "transports",
    ) -> None:
        self._all = _checked(several, argument)
        self._left_out = dict(left_out or {})
        self._out: dict[str, str] = {}
        self._offered: set[str] = set()
        self._polled = self._all

    def __iter__(self) -> Iterator[Transport]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __str__(self) -> str:
        return f"{self.name} (without {listed(self.excluded)})" if self.excluded else self.name

    @property
    def name(self) -> str:
        """The names of all."""
        return JOIN.join(one.name for one in self._all)

    @property
    def excluded(self) -> Mapping[str, str]:
        """Transports that no peer gets, and why: left out from the start, or since."""
        return {**self._left_out, **self._out}

    @property
    def drain_s(self) -> float | None:
        """The longest ``drain_s`` of all."""
        return _longest([one.caps for one in self._all])

    @property
    def link(self) -> LinkCost:
        """What a connected peer costs at most."""
        costs = [one.caps.link for one in self._all]
        return LinkCost(max(one.nbytes for one in costs), max(one.descriptors for one in costs))

    @property
    def allocator(self) -> Callable[[int], Buffer] | None:
        """What gives memory that peers can write to: that of the transport that writes only to its own, else the first.

        None: any memory will do.
        """
        able = [one for one in self._all if isinstance(one, SupportsAllocate)]
        able.sort(key=lambda one: not one.caps.own_memory_only)
        return able[0].allocate if able else None

    @property
    def maps(self) -> bool:
        """Whether one of them maps memory of its peers."""
        return any(isinstance(one, SupportsMapping) for one in self._all)

    def on_device(self, device: str) -> Transports:
        """Those that move memory on a device; the others are closed. Nothing is registered yet.

        Raises:
            ConfigurationError: there is none.
        """
        whys = {one.name: why for one in self._all if (why := unfit(one, device))}
        if not whys:
            return self
        able = [one for one in self._all if one.name not in whys]
        if not able:
            raise ConfigurationError(f"no transport moves memory on {device!r}: {listed({**whys, **self._left_out})}")
        for one in self._all:
            if one.name in whys:
                one.close(0.0)
        return Transports(able, {**self._left_out, **whys})

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        """Register memory with each transport that can, once; see :meth:`Transport.register`.

        A transport that cannot, or that gives other ids than the first, takes no peers.

        Raises:
            ConfigurationError: the caller's fault, as memory that overlaps a live region. Earlier transports keep what
                they have registered.
            RegistrationError: no transport can: says why for each.
        """
        ids: list[RegionId] | None = None
        for one in self._all:
            try:
                its = list(one.register(buffers))
            except Exception as error:
                if isinstance(error, DisaggKVError) and not isinstance(error, TransportError):
                    raise  # the caller's fault, whatever the transport
                self._out[one.name] = f"it cannot register the memory: {text_of(_named(error))}"
                continue
            ids = its if ids is None else ids
            if its != ids:
                self._out[one.name] = f"it calls the memory {its}, and an earlier one calls it {ids}"
        if ids is None:
            raise RegistrationError(f"no transport can register this memory: {listed(self.excluded)}")
        return ids

    # Peers.

    def offers(self) -> bytes:
        """What a peer passes to :meth:`shared`; once the memory is registered."""
        found = [Offer(name, refused=why[:500]) for name, why in self.excluded.items()]
        usable = [one for one in self._all if one.name not in self._out]
        self._offered |= {one.name for one in usable}
        return pack((*found, *(Offer(one.name, one.local_descriptor()) for one in usable)))

    def shared(self, offers: bytes) -> Shared:
        """What a peer offers that this side has. Blocks nothing.

        Raises:
            RemoteProtocolError: it is no result of :meth:`offers`.
            IncompatiblePeerError: the sides have no transport in common.
            TransportError: no transport can read its offer.
        """
        found = read(offers)
        names: dict[str, Peer] = {}
        refusals: dict[str, DisaggKVError] = {}
        for one in self._all:
            offer = found.get(one.name)
            if offer is None or not offer.descriptor or one.name in self._out:
                continue
            try:
                names[one.name] = one.peer_of(offer.descriptor)
            except Exception as error:
                refusals[one.name] = _named(error)
        if not names:
            raise self._unreached(found, refusals)
        return Shared(found, names, refusals)

    def connect(self, shared: Shared, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> Carrier:
        """Connect a peer; any thread, as :meth:`Transport.connect`. Each transport has its share of the time left.

        Raises:
            TransportError: no transport reaches the peer: says why for each.
        """
        until, refusals = clock() + timeout_s, dict(shared.refusals)
        mine = [one for one in self._all if one.name in shared.names]
        for at, one in enumerate(mine):
            share_s = max(0.0, until - clock()) / (len(mine) - at)
            try:
                peer = one.connect(shared.offers[one.name].descriptor, share_s)
            except Exception as error:
                refusals[one.name] = _named(error)
                continue
            return self._carrier(one, peer, shared.offers, refusals)
        raise self._unreached(shared.offers, refusals)

    def _carrier(
        self, one: Transport, peer: Peer, offers: Mapping[str, Offer], refusals: Mapping[str, DisaggKVError]
    ) -> Carrier:
        """What the peer gets, and why not an earlier one. It may write over all that both sides have offered."""
        whys = {**self.excluded, **{name: text_of(error) for name, error in refusals.items()}}
        before = [each.name for each in self._all[: self._all.index(one)]]
        why = "; ".join(f"not {name}: {whys.get(name, 'the peer does not offer it')}" for name in before)
        first = "the first transport" if len(self._all) > 1 else "the only transport"
        may = [each.caps for each in self._all if each is one or self._may_be_used(each.name, offers)]
        return Carrier(one, peer, evolve(one.caps, drain_s=_longest(may)), why or first, len(may) == 1, one.name)

    def _may_be_used(self, name: str, offers: Mapping[str, Offer]) -> bool:
        """Whether a peer may write over a transport: also over one that failed here after it was offered."""
        offer = offers.get(name)
        return name in self._offered and offer is not None and bool(offer.descriptor)

    def _unreached(self, offers: Mapping[str, Offer], refusals: Mapping[str, DisaggKVError]) -> DisaggKVError:
        """Why none reaches a peer. Where all transports say the same of it, as that it has ended, so does the error."""
        ours = {**{one.name: "" for one in self._all}, **self.excluded}
        theirs = {name: offer.refused for name, offer in offers.items()}
        if not refusals:
            return IncompatiblePeerError("transport", listed(ours), listed(theirs))
        if len(ours) == 1:
            return next(iter(refusals.values()))
        whys = {name: text_of(error) for name, error in refusals.items()}
        unshared = {name: why or "the peer does not offer it" for name, why in ours.items() if name not in whys}
        message = f"no transport reaches the peer: {listed({**whys, **unshared})}; it has {listed(theirs)}"
        kinds = {type(error) for error in refusals.values()}
        same = next((kind for kind in (PeerLostError, RemoteProtocolError) if kinds == {kind}), TransportError)
        error = same(message)
        error.__cause__ = next(iter(refusals.values()))
        return error

    def failed(self, one: Transport) -> str:
        """Why a transport carries nothing any more; empty: it does."""
        return "" if one in self._polled else f"{one.name}: {self._out[one.name]}"

    def poll(self) -> Sequence[tuple[Transport, Report]]:
        """The reports of each since the last call. One that raises has :class:`Failed`; an only one raises."""
        reports: list[tuple[Transport, Report]] = []
        for one in self._polled:
            try:
                for report in one.poll():
                    reports.append((one, report))
            except Exception as error:
                if len(self._all) == 1:
                    raise
                self._out[one.name] = f"it has failed: {text_of(error)}"
                self._polled = tuple(each for each in self._polled if each is not one)
                reports.append((one, Failed(self.failed(one))))
        return reports

    def close(self, drain_s: float) -> int:
        """Close each transport, whatever another one raises; the number of writes that are not proven quiet."""
        until, left = time.monotonic() + drain_s, 0
        errors: list[Exception] = []
        for one in self._all:
            try:
                left += len(one.close(max(0.0, until - time.monotonic())))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return left


def _checked(several: Sequence[Transport], argument: str) -> tuple[Transport, ...]:
    """The transports of an argument; see :class:`Transports`."""
    if not isinstance(several, list | tuple):
        raise arguments.wrong(argument, several, "a list of transports is needed")
    if not 0 < len(several) <= MOST:
        raise ConfigurationError(f"{argument}: 1 to {MOST} transports are needed, not {len(several)}")
    for at, one in enumerate(several):
        where = argument if len(several) == 1 else f"{argument}: number {at}"
        if isinstance(one, list | tuple | Transports):
            raise ConfigurationError(f"{argument}: number {at} is itself a list; name all transports in one list")
        check(one, where)
    names = [one.name for one in several]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(f"{argument}: more than one {', '.join(map(repr, twice))}: each has its own name")
    own = [one.name for one in several if one.caps.own_memory_only]
    if len(own) > 1:
        raise ConfigurationError(f"{argument}: {' and '.join(own)} write only to memory of their own: take one of them")
    return tuple(several)


def check(one: Transport, argument: str) -> None:
    """Raise a :class:`ConfigurationError` unless this is a transport."""
    wanted = ("register", "local_descriptor", "peer_of", "connect", "disconnect", "submit", "poll", "close")
    arguments.methods(one, argument, "a transport", *wanted)
    arguments.attributes(one, argument, "a transport", "name", "caps")
    name = arguments.text(one.name, f"{argument}: name", least=1)
    if JOIN in name:
        raise ConfigurationError(f"{argument}: name {name!r} has a {JOIN!r}, which stands between names of transports")
    arguments.one(one.caps, f"{argument}: caps", Capabilities)


def unfit(one: Transport, device: str) -> str:
    """Why a transport does not move memory on a device; empty: it does."""
    kinds = one.caps.devices
    return "" if device.partition(":")[0] in kinds else f"it moves memory of kind {', '.join(sorted(kinds))}"


def read(offers: bytes) -> Mapping[str, Offer]:
    """What :meth:`Transports.offers` of a peer gave, by name.

    Raises:
        RemoteProtocolError: it is something else, or has impossible transports.
    """
    found = unpack(offers, _OFFERS)
    named = {offer.name: offer for offer in found}
    if len(named) != len(found) or len(found) > 2 * MOST:
        raise RemoteProtocolError(f"{len(found)} transports are offered, and {len(named)} names of transports")
    return named


def names_of(name: str) -> tuple[str, ...]:
    """The transports that a name names."""
    return tuple(name.split(JOIN))


def listed(several: Mapping[str, str]) -> str:
    """Transports, each with what is to be said about it, for messages."""
    return ", ".join(f"{name} ({why})" if why else name for name, why in several.items()) or "no transport"


def _named(error: Exception) -> DisaggKVError:
    """The error of a transport. One may let those of its library through: they become a TransportError's cause."""
    if isinstance(error, DisaggKVError):
        return error
    ours = TransportError(f"{type(error).__name__}: {text_of(error)}")
    ours.__cause__ = error
    return ours


def _longest(caps: Sequence[Capabilities]) -> float | None:
    drains = [one.drain_s for one in caps]
    return None if None in drains else max(s for s in drains if s is not None)
