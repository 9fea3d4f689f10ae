"""What a simulated fleet is asked to do, and what it did."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from attrs import field, frozen

from disagg_kv import arguments
from disagg_kv.errors import ConfigurationError, UnknownNameError

MOST_RANKS, MOST_SECONDS, MOST_RATE = 16_384, 3600.0, 1000.0

JOIN_LIMIT_S = 60.0
"""Every rank of a fleet has served a request this soon after the last process has started."""

STORE_LIMIT = 1.0
"""Requests of a rank to the store in a minute of steady traffic stay below this."""

COUNTED_RANK_S = 1200.0
"""Seconds of traffic, times ranks, from which the requests to the store are enough to be judged."""

CPU_LIMIT = 0.02
"""A rank's share of a core in steady traffic stays below this, on an idle machine."""


class FleetFault(Enum):
    """What may go wrong in a fleet: processes restart, the store is away, a rack is cut off."""

    RESTARTS = "restarts"
    STORE = "store"
    RACK = "rack"


ALL_FAULTS = frozenset(FleetFault)


def named_faults(text: str) -> frozenset[FleetFault]:
    """Faults by their names, separated by commas; ``all``: all of them; empty: none.

    Raises:
        UnknownNameError: there is no such fault.
    """
    if text == "all":
        return ALL_FAULTS
    known = {fault.value: fault for fault in FleetFault}
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UnknownNameError("fault of a fleet", name, [*known, "all"])
    return frozenset(known[name] for name in names)


def fleet_size(text: str) -> tuple[int, int]:
    """``PREFILLSxDECODES``, such as ``1000x1000``.

    Raises:
        ConfigurationError: something else.
    """
    prefills, cross, decodes = text.partition("x")
    if not cross or not (prefills.isdecimal() and decodes.isdecimal() and text.isascii()):
        raise ConfigurationError(f"fleet {text[:64]!r}: PREFILLSxDECODES is needed, such as 200x200")
    if max(len(prefills), len(decodes)) > 9:
        raise ConfigurationError(f"fleet {text[:64]!r}: at most {MOST_RANKS} ranks of a side")
    return int(prefills), int(decodes)


def _faults(given: object) -> frozenset[FleetFault]:
    return frozenset(arguments.several(given, "faults", FleetFault))


@frozen
class FleetPlan:
    """What is simulated.

    Args:
        prefills: ranks that compute, each an instance of its own.
        decodes: ranks that generate, each an instance of its own.
        seconds: of traffic, once all have joined.
        rate: requests per second of a decode rank, each from a prefill rank drawn at random.
        faults: ``RESTARTS``: one of a hundred ranks restarts each minute. ``STORE``: the store is away for a minute.
            ``RACK``: one of ten ranks is cut off from the others.
        seed: of everything that is drawn.
        links: budget of each rank, in links; 0: the endpoints' own.

    Raises:
        ConfigurationError: a number out of its range, or a fault of another type.
    """

    prefills: int = 20
    decodes: int = 20
    seconds: float = 60.0
    rate: float = 2.0
    faults: frozenset[FleetFault] = field(default=frozenset(), converter=_faults)
    seed: int = 0
    links: int = 0

    def __attrs_post_init__(self) -> None:
        for name in ("prefills", "decodes"):
            arguments.count(getattr(self, name), name, least=1, most=MOST_RANKS)
        arguments.count(self.seed, "seed")
        arguments.count(self.links, "links", most=MOST_RANKS)
        for name, most in (("seconds", MOST_SECONDS), ("rate", MOST_RATE)):
            value = arguments.seconds(getattr(self, name), name)
            if not 0 < value <= most:
                raise ConfigurationError(f"{name} {value:g} of a fleet: more than 0 and at most {most:g}")

    @property
    def ranks(self) -> int:
        """Of both sides."""
        return self.prefills + self.decodes


@frozen
class FleetResult:
    """What a fleet did.

    Args:
        plan: what it was asked to do.
        joined_s: simulated seconds from the start of the last process until every rank had served a request; the
            whole time that was waited if some never did.
        requests: requests of the steady traffic.
        failed: those of them that failed.
        excused: of the failed ones, those of a rank that was faulty meanwhile or a moment before.
        unfinished: handles of requests that never ended.
        errors: of the failed ones that are not excused, the first few messages.
        restarts: processes that ended and started anew.
        frames_per_rank_s: control frames that a rank sent in a second of the steady traffic.
        bytes_per_rank_s: bytes of these.
        hello_bytes: of the largest frame: a ``Hello``.
        store_requests_per_rank_min: registrations and renewals of a rank in a minute of the steady traffic.
        lookups_per_rank_min: look-ups in the same time, which the table of the process answers.
        cpu_share: processor seconds of a rank in a second of the steady traffic, its engine's calls included.
        joining_cpu_s: processor seconds of a rank while all joined.
        withheld: looks, one a second at each decode rank, that found a peer whose requests for a lease had to wait
            because it counted as silent; of peers that were not faulty.
        peers_per_rank: peers that a rank knows at the end.
        links_per_rank: links that a rank has at the end.
        links_dropped_per_rank: links that a rank has dropped, as no room used them.
        events: of the simulation.
        wall_s: seconds that the simulation took.
        memory_bytes: the most memory that it took.
    """

    plan: FleetPlan
    joined_s: float
    requests: int
    failed: int
    excused: int
    unfinished: int
    errors: tuple[str, ...]
    restarts: int
    frames_per_rank_s: float
    bytes_per_rank_s: float
    hello_bytes: int
    store_requests_per_rank_min: float
    lookups_per_rank_min: float
    cpu_share: float
    joining_cpu_s: float
    withheld: int
    peers_per_rank: float
    links_per_rank: float
    links_dropped_per_rank: float
    events: int
    wall_s: float
    memory_bytes: int

    @property
    def limits(self) -> Mapping[str, tuple[float, float, bool]]:
        """Of each limit: the value, the limit, and whether it holds.

        Ranks ask a store often while it is away, and a small fleet asks too seldom for a mean: there is no limit then.
        """
        failed = self.failed - self.excused + self.unfinished
        limits: dict[str, tuple[float, float, bool]] = {}
        if FleetFault.STORE not in self.plan.faults and self.plan.ranks * self.plan.seconds >= COUNTED_RANK_S:
            asked = self.store_requests_per_rank_min
            limits["store_requests_per_rank_min"] = (asked, STORE_LIMIT, asked < STORE_LIMIT)
        return limits | {
            "joined_s": (self.joined_s, JOIN_LIMIT_S, self.joined_s <= JOIN_LIMIT_S),
            "failed_not_excused": (failed, 0, failed == 0),
            "withheld": (self.withheld, 0, self.withheld == 0),
            "cpu_share": (self.cpu_share, CPU_LIMIT, self.cpu_share < CPU_LIMIT),
        }

    @property
    def ok(self) -> bool:
        """Whether every limit holds, except that of processor time, which depends on the machine."""
        return all(holds for name, (_, _, holds) in self.limits.items() if name != "cpu_share")
