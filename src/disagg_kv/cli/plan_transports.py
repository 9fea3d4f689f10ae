"""Which transport, and which path of ``auto``, carries the bytes between two ranks, by the hosts that they are on."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen

from ..errors import ConfigurationError
from ..strategies import Explanation, PairCount, exposes_pages
from ..strategies.explain import choose
from ..strategies.registry import in_auto_order, paths
from ..transports import Capabilities
from ..transports.registry import AUTO, factory_of
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


def planned(name: str) -> Sequence[PlannedTransport]:
    """The transports of a name, by what their classes promise.

    Raises:
        ConfigurationError: ``auto``, or one that promises nothing before it is started.
        UnknownNameError: there is no transport of that name.
    """
    several, on_gpu = list[PlannedTransport](), dict[str, Capabilities]()
    for one in names_of(name):
        if one == AUTO:
            instead = "name them in its order, cuda_ipc+nixl for GPUs or shm+nixl for CPUs"
            raise ConfigurationError(f"transport 'auto' takes what starts on a host, which plan does not: {instead}")
        factory = factory_of(one)
        caps, maps = getattr(factory, "caps", None), hasattr(factory, "map") and hasattr(factory, "unmappable")
        if not isinstance(caps, Capabilities):
            raise ConfigurationError(f"transport {one!r}: what it promises is known only once it is started")
        several.append(PlannedTransport(one, caps, maps))
        on_gpu[one] = getattr(factory, "gpu_caps", caps)
    if kind_of([one.caps for one in several]) == "cpu":
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
    hosts: tuple[Sequence[str], Sequence[str]],
    own_memory: bool,
) -> Sequence[PairChoice]:
    """What each pair of ranks gets.

    Args:
        found: what each path would post.
        several: in the order in which they are tried.
        hosts: of the prefill ranks, and of the decode ranks.
        own_memory: decode's pool is memory of a transport that writes only to its own.
    """
    device = kind_of([one.caps for one in several])
    usable = [one for one in several if device in one.caps.devices]
    exposed = own_memory or not any(one.caps.own_memory_only for one in usable)
    out = []
    for pair in found.pairs:
        one, why = _transport(several, device, hosts[0][pair.writer] == hosts[1][pair.target])
        if one is None:
            out.append(PairChoice(pair, "", why, "", "no transport reaches it"))
        else:
            out.append(PairChoice(pair, one.name, why, *_path(pair, one, exposed)))
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


def _path(pair: PairCount, one: PlannedTransport, exposed: bool) -> tuple[str, str]:
    """As ``auto`` chooses it once all prefill ranks have mapped decode's pool that can."""
    counts, refusals = dict[str, int](), dict[str, str]()
    for path in in_auto_order(paths().values()):
        if path.name in pair.refused:
            refusals[path.name] = pair.refused[path.name]
        elif exposes_pages(path) and not exposed:
            refusals[path.name] = "decode's pages are not exposed: its pool is not the transport's own memory (--maps)"
        elif path.mover == "mapped" and not one.maps:
            refusals[path.name] = f"transport {one.name!r} does not map memory of peers"
        else:
            counts[path.name] = pair.descriptors[path.name]
    choice = choose(counts, pair.nbytes, refusals)
    return choice.path, choice.reason
