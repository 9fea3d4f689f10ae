"""Which transport, and which path of ``auto``, carries the bytes between two ranks, by the hosts that they are on."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen

from ..errors import ConfigurationError
from ..strategies import Explanation, PairCount, exposes_pages
from ..strategies.explain import choose
from ..strategies.registry import in_auto_order, paths
from ..transports import Capabilities
from ..transports.combining import lane_names
from ..transports.registry import AUTO, factory_of


@frozen
class PlannedLane:
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
    lane: str
    lane_reason: str
    path: str
    reason: str


def planned(name: str) -> Sequence[PlannedLane]:
    """The transports of a name, by what their classes promise.

    Raises:
        ConfigurationError: ``auto``, or one that promises nothing before it is started.
        UnknownNameError: there is no transport of that name.
    """
    lanes, on_gpu = list[PlannedLane](), dict[str, Capabilities]()
    for lane in lane_names(name):
        if lane == AUTO:
            instead = "name them in its order, cuda_ipc+nixl for GPUs or shm+nixl for CPUs"
            raise ConfigurationError(f"transport 'auto' takes what starts on a host, which plan does not: {instead}")
        factory = factory_of(lane)
        caps, maps = getattr(factory, "caps", None), hasattr(factory, "map") and hasattr(factory, "unmappable")
        if not isinstance(caps, Capabilities):
            raise ConfigurationError(f"transport {lane!r}: what it promises is known only once it is started")
        lanes.append(PlannedLane(lane, caps, maps))
        on_gpu[lane] = getattr(factory, "gpu_caps", caps)
    if kind_of([lane.caps for lane in lanes]) == "cpu":
        return lanes
    return [evolve(lane, caps=on_gpu[lane.name]) for lane in lanes]


def kind_of(lanes: Sequence[Capabilities]) -> str:
    """The memory that is moved: a GPU's, if a transport is for that alone."""
    return "cuda" if any(caps.devices == {"cuda"} for caps in lanes) else "cpu"


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
    lanes: Sequence[PlannedLane],
    hosts: tuple[Sequence[str], Sequence[str]],
    own_memory: bool,
) -> Sequence[PairChoice]:
    """What each pair of ranks gets.

    Args:
        found: what each path would post.
        lanes: in the order in which they are tried.
        hosts: of the prefill ranks, and of the decode ranks.
        own_memory: decode's pool is memory of a transport that writes only to its own.
    """
    device = kind_of([lane.caps for lane in lanes])
    usable = [lane for lane in lanes if device in lane.caps.devices]
    exposed = own_memory or not any(lane.caps.own_memory_only for lane in usable)
    out = []
    for pair in found.pairs:
        lane, why = _lane(lanes, device, hosts[0][pair.writer] == hosts[1][pair.target])
        if lane is None:
            out.append(PairChoice(pair, "", why, "", "no transport reaches it"))
        else:
            out.append(PairChoice(pair, lane.name, why, *_path(pair, lane, exposed)))
    return out


def _lane(lanes: Sequence[PlannedLane], device: str, together: bool) -> tuple[PlannedLane | None, str]:
    """The first that reaches the peer, and why not an earlier one."""
    whys: list[str] = []
    for lane in lanes:
        if device not in lane.caps.devices:
            whys.append(f"not {lane.name}: it moves memory of kind {', '.join(sorted(lane.caps.devices))}")
        elif lane.caps.in_process_only:
            whys.append(f"not {lane.name}: it reaches only peers of its process")
        elif lane.maps and not together:
            whys.append(f"not {lane.name}: the ranks are on different hosts")
        else:
            return lane, "; ".join(whys) or "the first transport"
    return None, "; ".join(whys)


def _path(pair: PairCount, lane: PlannedLane, exposed: bool) -> tuple[str, str]:
    """As ``auto`` chooses it once all prefill ranks have mapped decode's pool that can."""
    counts, refusals = dict[str, int](), dict[str, str]()
    for path in in_auto_order(paths().values()):
        if path.name in pair.refused:
            refusals[path.name] = pair.refused[path.name]
        elif exposes_pages(path) and not exposed:
            refusals[path.name] = "decode's pages are not exposed: its pool is not the transport's own memory (--maps)"
        elif path.mover == "mapped" and not lane.maps:
            refusals[path.name] = f"transport {lane.name!r} does not map memory of peers"
        else:
            counts[path.name] = pair.descriptors[path.name]
    choice = choose(counts, pair.nbytes, refusals)
    return choice.path, choice.reason
