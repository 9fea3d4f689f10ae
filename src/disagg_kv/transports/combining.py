"""Making one transport of several, and what an endpoint asks of a transport that may be such a one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .. import arguments
from ..errors import ConfigurationError, IncompatiblePeerError, TransportError
from ..ids import Peer
from .base import Capabilities, Lane, SupportsAllocate, SupportsFlags, SupportsLanes, SupportsMapping, Transport
from .descriptor import Descriptor, encode, pack
from .lane_offers import JOIN, KIND, MOST_LANES, UNNUMBERED, Offer, is_combined, listed, read
from .lanes import (
    AllocatingMappingTransport,
    AllocatingTransport,
    CombinedTransport,
    MappingTransport,
    RingingAllocatingTransport,
    RingingTransport,
)


def combined(lanes: Sequence[Transport], left_out: Mapping[str, str] | None = None) -> CombinedTransport:
    """See :func:`combine`; of lanes that were checked, also of one, and with those that were left out."""
    allocates = any(isinstance(lane, SupportsAllocate) for lane in lanes)
    maps = any(isinstance(lane, SupportsMapping) for lane in lanes)
    if maps and any(isinstance(lane, SupportsFlags) for lane in lanes):
        return (RingingAllocatingTransport if allocates else RingingTransport)(lanes, left_out)
    if maps:
        return (AllocatingMappingTransport if allocates else MappingTransport)(lanes, left_out)
    return (AllocatingTransport if allocates else CombinedTransport)(lanes, left_out)


def combine(lanes: Sequence[Transport]) -> Transport:
    """Several transports as one, which gives each peer the first transport that reaches it; one alone stays as it is.

    Those of one host come first, and a network's last: the first that connects counts. An endpoint does this with a
    list of transports.

    Raises:
        ConfigurationError: no lane, a list in the list, something that is no transport, two lanes of one name, lanes of
            which one is a combination, or two that write only to memory of their own.
    """
    return combined_or_alone(check_lanes(lanes, "transports"))


def combined_or_alone(checked: Sequence[Transport]) -> Transport:
    """See :func:`combine`; of lanes that were checked."""
    return checked[0] if len(checked) == 1 else combined(checked)


def check_lanes(lanes: Sequence[Transport], argument: str) -> tuple[Transport, ...]:
    """The lanes that an argument names.

    Raises:
        ConfigurationError: as :func:`combine`.
    """
    if not isinstance(lanes, list | tuple):
        raise arguments.wrong(argument, lanes, "a list of transports is needed")
    if not 0 < len(lanes) <= MOST_LANES:
        raise ConfigurationError(f"{argument}: 1 to {MOST_LANES} transports are needed, not {len(lanes)}")
    for at, lane in enumerate(lanes):
        if isinstance(lane, list | tuple | CombinedTransport):
            raise ConfigurationError(f"{argument}: number {at} is itself a list; name all transports in one list")
        check_transport(lane, f"{argument}: number {at}")
    names = [lane.name for lane in lanes]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(f"{argument}: more than one {', '.join(map(repr, twice))}: each has its own name")
    own = [lane.name for lane in lanes if lane.caps.own_memory_only]
    if len(own) > 1:
        raise ConfigurationError(f"{argument}: {' and '.join(own)} write only to memory of their own: take one of them")
    return tuple(lanes)


def check_transport(transport: Transport, argument: str) -> None:
    """Raise a :class:`~disagg_kv.errors.ConfigurationError` that names the argument unless this is a transport."""
    wanted = ("register", "local_descriptor", "peer_of", "connect", "disconnect", "submit", "poll", "close")
    arguments.methods(transport, argument, "a transport", *wanted)
    arguments.attributes(transport, argument, "a transport", "name", "caps")
    name = arguments.text(transport.name, f"{argument}: name", least=1)
    if JOIN in name and not isinstance(transport, CombinedTransport):
        raise ConfigurationError(f"{argument}: name {name!r} has a {JOIN!r}, which stands between names of transports")
    arguments.one(transport.caps, f"{argument}: caps", Capabilities)


def lane_of(transport: Transport, peer: Peer) -> Lane:
    """What carries writes to a connected peer."""
    if isinstance(transport, SupportsLanes):
        return transport.lane(peer)
    return Lane(transport.name, transport.caps, "the only transport")


def lane_names(name: str) -> tuple[str, ...]:
    """The lanes that a transport's name names."""
    return tuple(name.split(JOIN))


def said_name(transport: Transport) -> str:
    """A transport's name for messages: with the lanes that no peer gets, and why."""
    if not isinstance(transport, CombinedTransport) or not transport.excluded:
        return transport.name
    return f"{transport.name} (without {listed(transport.excluded)})"


def for_peer(transport: Transport, name: str, descriptor: bytes) -> bytes:
    """A peer's descriptor as ``transport`` takes it, where only one of both sides has lanes.

    Args:
        transport: ours.
        name: the name of the peer's transport.
        descriptor: the peer's.

    Raises:
        RemoteProtocolError: the descriptor is invalid.
        IncompatiblePeerError: the peer does not offer our transport.
        TransportError: the peer's regions have other numbers in that lane.
    """
    if name == transport.name and JOIN in name:
        return descriptor
    theirs = is_combined(descriptor)
    if isinstance(transport, CombinedTransport):
        if theirs:
            return descriptor
        lane = next((lane for lane in transport.lanes if lane.name == name), None)
        if lane is None:
            raise IncompatiblePeerError("transport", transport.name, name)
        offer = Offer(name, descriptor)
        return encode(Descriptor(KIND, lane.peer_of(descriptor), UNNUMBERED, (), pack((offer,))))
    if not theirs:
        return descriptor
    offers = read(descriptor)[1]
    found = offers.get(transport.name)
    if found is None or not found.descriptor:
        raise IncompatiblePeerError("transport", transport.name, listed({n: o.refused for n, o in offers.items()}))
    if found.numbers:
        raise TransportError(f"the peer's {transport.name!r} has other numbers for its regions: give a list here, too")
    return found.descriptor


def on_device(transport: Transport, device: str) -> Transport:
    """Of several, the lanes that move memory on a device; the others are closed. Nothing is registered yet.

    Raises:
        ConfigurationError: no lane does.
    """
    if not isinstance(transport, CombinedTransport):
        return transport
    kind = device.partition(":")[0]
    whys = {one.name: f"it moves memory of kind {', '.join(sorted(one.caps.devices))}" for one in transport.lanes}
    able = [lane for lane in transport.lanes if kind in lane.caps.devices]
    if len(able) == len(transport.lanes):
        return transport
    if not able:
        raise ConfigurationError(f"no transport moves memory on {device!r}: {listed({**whys, **transport.left_out})}")
    others = [lane for lane in transport.lanes if lane not in able]
    for lane in others:
        lane.close(0.0)
    return combined(able, {**transport.left_out, **{lane.name: whys[lane.name] for lane in others}})
