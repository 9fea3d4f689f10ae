"""Which transport, and which path of ``auto``, carries the bytes between two ranks, by the hosts that they are on."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen

from ..errors import ConfigurationError
from ..strategies import Explanation, PairCount, TransferPlanner, exposes_pages
from ..strategies.explain import Choice, choose
from ..strategies.registry import in_auto_order, paths
from ..transports import Capabilities
from ..transports.registry import AUTO, IN_AUTO, factory_of
from ..transports.several import names_of


@frozen
class PlannedTransport:
    """A transport that is not started.

    Args:
        name: of it.
        caps: what it promises for the memory that is moved.
        maps: it maps memory of peers, and so reaches those of its host alone.
    """

    name: str
    caps: Capabilities
    maps: bool


@frozen
class PairChoice:
    """What carries the bytes of one prefill rank to one decode rank; "": nothing can."""

    pair: PairCount
    transport: str
    transport_reason: str
    path: str
    reason: str


def planned(name: str, device: str | None) -> Sequence[PlannedTransport]:
    """The transports of a name, by what their classes promise for memory of a device.

    ``auto`` takes what starts on a host, and nothing is started here: it is the transport within a host and the first
    network, as where both start.

    Args:
        name: of transports, joined by ``+``.
        device: ``cpu`` or ``cuda``; None: a GPU's with ``auto``, or if a transport is for that alone.

    Raises:
        ConfigurationError: one that promises nothing before it is started.
        UnknownNameError: there is no transport of that name.
    """
    names = IN_AUTO[device or "cuda"][:2] if name == AUTO else names_of(name)
    several, on_gpu = list[PlannedTransport](), dict[str, Capabilities]()
    for one in names:
        factory = factory_of(one)
        caps, maps = getattr(factory, "caps", None), hasattr(factory, "map") and hasattr(factory, "unmappable")
        if not isinstance(caps, Capabilities):
            raise ConfigurationError(f"transport {one!r}: what it promises is known only once it is started")
        several.append(PlannedTransport(one, caps, maps))
        on_gpu[one] = getattr(factory, "gpu_caps", caps)
    if (device or kind_of([one.caps for one in several])) == "cpu":
        return several
    return [evolve(one, caps=on_gpu[one.name]) for one in several]


def kind_of(several: Sequence[Capabilities]) -> str:
    """The memory that is moved: a GPU's, if a transport is for that alone."""
    return "cuda" if any(caps.devices == {"cuda"} for caps in several) else "cpu"


def hosts_of(text: str, ranks: int, side: str) -> Sequence[str]:
    """The host of each rank: names joined by commas, or one for all.

    Raises:
        ConfigurationError: another number of names.
    """
    names = text.split(",")
    if "" in names or len(names) not in (1, ranks):
        many = f"one host, or one for each of the {ranks} ranks, joined by commas"
        raise ConfigurationError(f"--{side}-hosts {text!r}: {many}")
    return names * ranks if len(names) == 1 else names


def chosen(
    found: Explanation,
    several: Sequence[PlannedTransport],
    device: str,
    hosts: tuple[Sequence[str], Sequence[str]],
    own_memory: bool,
) -> Sequence[PairChoice]:
    """What each pair of ranks gets.

    A decode rank takes one path for all prefill ranks that send to it, as its endpoint does once these have mapped its
    pool where they can.

    Args:
        found: what each path would post.
        several: in the order in which they are tried.
        device: ``cpu`` or ``cuda``, the memory that is moved.
        hosts: of the prefill ranks, and of the decode ranks.
        own_memory: decode's pool is memory of a transport that writes only to its own.
    """
    usable = [one for one in several if device in one.caps.devices]
    exposed = own_memory or not any(one.caps.own_memory_only for one in usable)
    out = list[PairChoice]()
    for target in dict.fromkeys(pair.target for pair in found.pairs):
        pairs = [pair for pair in found.pairs if pair.target == target]
        taken = [_transport(several, device, hosts[0][pair.writer] == hosts[1][target]) for pair in pairs]
        choice = _path(list(zip(pairs, (one for one, _ in taken), strict=True)), exposed)
        for pair, (one, why) in zip(pairs, taken, strict=True):
            name = "" if one is None else one.name
            out.append(PairChoice(pair, name, why, choice.path, choice.reason))
    return out


def _transport(several: Sequence[PlannedTransport], device: str, together: bool) -> tuple[PlannedTransport | None, str]:
    """The first that reaches the peer, and why not an earlier one."""
    whys: list[str] = []
    for one in several:
        if device not in one.caps.devices:
            whys.append(f"not {one.name}: it moves memory of kind {', '.join(sorted(one.caps.devices))}")
        elif one.caps.in_process_only:
            whys.append(f"not {one.name}: it reaches only peers of its process")
        elif one.maps and not together:
            whys.append(f"not {one.name}: the ranks are on different hosts")
        else:
            return one, "; ".join(whys) or "the first transport"
    return None, "; ".join(whys)


def _path(pairs: Sequence[tuple[PairCount, PlannedTransport | None]], exposed: bool) -> Choice:
    """The path of a decode rank, for all that send to it, each over its transport."""
    lost = [pair.writer for pair, one in pairs if one is None]
    if lost:
        return Choice("", f"no transport reaches it from prefill rank {lost[0]}")
    counts, refusals = dict[str, int](), dict[str, str]()
    for path in in_auto_order(paths().values()):
        whys = (_refusal(path, pair, one, exposed) for pair, one in pairs if one is not None)
        why = next(filter(None, whys), None)
        if why is None:
            counts[path.name] = sum(pair.descriptors[path.name] for pair, _ in pairs)
        else:
            refusals[path.name] = why
    return choose(counts, sum(pair.nbytes for pair, _ in pairs), refusals)


def _refusal(path: TransferPlanner, pair: PairCount, one: PlannedTransport, exposed: bool) -> str | None:
    """Why a path cannot carry what a pair moves over a transport; None: it can."""
    if path.name in pair.refused:
        return f"prefill rank {pair.writer}: {pair.refused[path.name]}"
    if exposes_pages(path) and not exposed:
        return "decode's pages are not exposed: its pool is not the transport's own memory (--maps)"
    if path.mover == "mapped" and not one.maps:
        return f"prefill rank {pair.writer}: transport {one.name!r} does not map memory of peers"
    return None
