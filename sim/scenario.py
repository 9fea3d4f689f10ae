"""One seed's world as it is drawn: who is there, what they are asked to do, and what may go wrong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping
from functools import lru_cache

from attrs import evolve, frozen

from disagg_kv.core import Options, Verify
from disagg_kv.endpoints.peers.link_budget import OWN_LINK
from disagg_kv.geometry import CacheSpec, Shard, Site, shard, stages
from disagg_kv.ids import GroupId, LayerId, RoomId
from disagg_kv.memory import PagedPool
from disagg_kv.memory.paged import Layout
from disagg_kv.planning import Adaptive, Pace
from disagg_kv.strategies import LayerPipelined

from .conversations import Conversation, converse
from .fault import FaultClass, outside, survives, swarm, while_agreeing
from .model import Model, States, draw_model, fits, slot_row_of, spec_of
from .path_draws import agrees, paths_of, queue, refused_of, slow_mappings
from .request import Request, flagged

AUX_BYTES = 8

SCHEDULES = (
    None,
    None,
    LayerPipelined(fixed=1),
    LayerPipelined(fixed=2),
    LayerPipelined(),
    LayerPipelined(pace=Pace(1e-5, 1e6, 1e-6)),
    LayerPipelined(pace=Pace(1e-4, 1e6, 1e-6)),
    LayerPipelined(adaptive=Adaptive(min_tokens=8, few_layers=1, least=2, most=4)),
)
"""None: chunks cross whole. Groups of layers have a fixed size, or follow a measured or given pace, or the formula."""

FAR = 0.6
"""Share of the worlds in which the frames of one rank take long, if its instance has others: those wait for it."""

LATE = 0.4
"""Share of the requests that are given up, or preempted, only after all their rows are there."""

CHUNKED = 0.12
"""Share of the worlds in which a request has a chunk for every row, among those whose requests are unlike."""

CROWDS, CROWD_S = 0.15, 0.25
"""Share of the suitable worlds in which many small requests begin within a short time, and that time in seconds."""

UNMET, COMES_S = 0.1, 3.0
"""Share of the worlds without conversations in which one side of a request comes too late or never, and the seconds
after which the late one comes: the other side has given the room up by then."""

REMEMBERED = (1, 2, 64)
"""Ended rooms that endpoints remember by id: a frame of an earlier one may come late."""

FEW_LINKS, LINKS = 0.5, (1, 1, 2)
"""Share of the worlds in which endpoints drop links that no room uses, and the links that they may keep then."""

LARGE, MOST_PAGES = 0.15, (2, 6)
"""Share of the worlds with exposed pages in which requests of more than a few pages expose none, and those few."""

ALONE = 0.5
"""Share of worlds in which each rank of a side decides for itself; drawn for each side."""

RINGS = 0.8
"""Share of worlds in which flags can be raised for most requests."""

PREFIXES = 0.35
"""Share of worlds whose decode ranks keep prefixes, and whose requests are turns of conversations."""

BOTH_WAYS = 0.3
"""Share of the suitable worlds in which decode's ranks send rooms, too, to the first prefill instance."""

ROOMS, FEW_ROOMS, WIDE = (3, 4, 4, 5, 5), (2, 3, 4), 5
"""Rooms of a world; rooms of a wide world; the ranks that make it wide. A room costs as much as its pairs of ranks."""

TPS = (1, 1, 2, 2, 3, 4)
"""Tensor parallel sizes, as often as they are drawn where a topology leaves them open."""

One = tuple[int, int]
TOPOLOGIES: tuple[tuple[tuple[One, ...], One] | None, ...] = (
    (((1, 1),), (1, 1)),
    (((2, 1),), (1, 1)),
    None,
    (((1, 1),), (2, 1)),
    (((1, 1),), (1, 1)),
    (((1, 1),), (2, 1)),
    (((1, 1),), (1, 1)),
    None,
    (((1, 1), (1, 1)), (1, 1)),
    (((1, 2),), (1, 1)),
    (((1, 1),), (1, 1)),
    (((2, 1),), (2, 1)),
    (((1, 1),), (2, 1)),
    None,
    (((1, 1),), (1, 1)),
    (((1, 1), (1, 1)), (1, 1)),
)
"""Tensor and pipeline parallel sizes of the prefill instances and of decode; None: any. Seeds take them in turn, so
that few of them have as many ranks as on average; most have few, which are run fast and reach what many reach."""

SELDOM: Mapping[int, tuple[tuple[tuple[One, ...], One], int, int | None]] = {
    9: ((((1, 2),), (1, 1)), 4, None),
    11: ((((2, 1),), (2, 1)), 4, 1),
    13: ((((1, 1),), (1, 2)), 2, 1),
}
"""Shapes of kinds that are seldom drawn, by number; every other block uses them. Each is a topology, a number of
layers, and a number of units of a state (None: as drawn). They have stages of several layers; ranks that hold the same
state; and a decode stage that has states and no tokens."""

BLOCK = 128
"""Number of consecutive seeds that share one shape per topology. Results that are cached per shape are used several
times, and the shapes in use at once are fewer than the library's caches hold."""


OVERLAID = 0.5
"""Share of the instances whose layers with a window lie in the bytes of the others, where there is a window."""

FULL, SLIDE = GroupId("kv"), GroupId("slide")
"""The groups of layers without and with a window, where they are overlaid; else all layers are in the first."""


@frozen
class Split:
    """How an instance divides the cache, and where each rank keeps its part.

    Where ``overlaid``, a page of a room is a page of each of two groups, which lie in the same bytes: so a pool has
    twice the number of page ids.
    """

    tp: int
    pp: int
    page_rows: int
    pages: int
    layout: Layout
    fused: bool
    overlaid: bool = False

    @property
    def world(self) -> int:
        """How many ranks."""
        return self.tp * self.pp


@frozen
class Shape:
    """What does not depend on one seed alone: the cache, who holds which part of it, and how large staging is.

    Args:
        model: the cache.
        slot_bytes: of a staging slot.
        rows: the fewest and the most rows of a room, if it has any.
        prefills, decode: the instances.
    """

    model: Model
    slot_bytes: int
    rows: tuple[int, int]
    prefills: tuple[Split, ...]
    decode: Split

    @property
    def ranks(self) -> int:
        """How many endpoints there are."""
        return sum(p.world for p in self.prefills) + self.decode.world


@lru_cache(4096)
def shards_of(model: Model, tp: int, pp: int) -> tuple[Shard, ...]:
    """The shards of an instance, stage by stage."""
    spec = spec_of(model)
    return tuple(shard(spec, tp=tp, rank=r, layers=stage) for stage in stages(spec, pp) for r in range(tp))


@lru_cache(4096)
def site_of(model: Model, split: Split, rank: int) -> Site:
    """Where a rank's part lies."""
    spec, held = spec_of(model), shards_of(model, split.tp, split.pp)[rank]
    if not split.overlaid:
        return _site_of(spec, held, split, split.pages, FULL)
    sliding = {layer for layer, components in spec.layers.items() if components[0].window is not None}
    parts = [
        _site_of(spec, part, split, 2 * split.pages, group)
        for group, part in ((FULL, _without(held, sliding)), (SLIDE, _without(held, spec.layers.keys() - sliding)))
        if part.holdings
    ]
    groups = [group for part in parts for group in part.groups]
    planes = [plane for part in parts for plane in part.planes]
    return Site(spec, held, groups, planes, (max(part.buffers[0] for part in parts),), overlaid=True)


def _site_of(spec: CacheSpec, held: Shard, split: Split, pages: int, group: GroupId) -> Site:
    return PagedPool.allocate(
        spec,
        held,
        pages=pages,
        page_size=split.page_rows,
        state_slots=ROOMS[-1],
        layout=split.layout,
        fused=split.fused,
        group=group,
    ).site


def _without(held: Shard, layers: Collection[LayerId]) -> Shard:
    return Shard([evolve(one, layers=rest) for one in held if (rest := one.layers.difference(layers))])


@frozen
class Scenario:
    """Everything that is drawn before the first event; equal seeds and faults give equal scenarios.

    ``conversations`` is empty where decode keeps no prefixes; with ``collisions``, unequal prefixes have equal hashes.
    With ``together``, frames to one peer leave as one message.
    With ``maps``, transports map memory of peers.
    ``queues``, of each prefill rank: its kernels queue copies. Those of decode always do.
    ``pieces`` of work of one kind are done in a turn at most.
    ``refused`` is the number of a prefill instance that cannot work with decode, as they have no path in common; None:
    all can.
    Where rooms go ``both_ways``, each rank of decode and of the first prefill instance has an endpoint of either side.
    ``far`` is the side and the number of a rank whose frames take longer than those of the others; None: of no rank.
    Where clocks may jump, nothing lands after the end of a process: the drain bound is measured by the clock.
    """

    seed: int
    model: Model
    prefills: tuple[Split, ...]
    decode: Split
    prefill_paths: tuple[str, ...]
    decode_path: str
    schedule: LayerPipelined | None
    verify: Verify
    slot_bytes: int
    slots: int
    ring_bytes: int
    options: Options
    drain_s: float | None
    one_host: bool
    alone: frozenset[str]
    resets: bool
    detects_death: bool
    notices_late: bool
    slow_kernels: bool
    waits_events: bool
    orders: bool
    queues: tuple[bool, ...]
    maps: bool
    together: bool
    far: tuple[str, int] | None
    refused: int | None
    pieces: int
    faults: dict[FaultClass, float]
    faults_until: float
    requests: tuple[Request, ...]
    conversations: tuple[Conversation, ...]
    collisions: bool
    both_ways: bool = False

    @property
    def ranks(self) -> int:
        """How many processes there are."""
        return sum(p.world for p in self.prefills) + self.decode.world

    def source_of(self, index: int) -> int:
        """Which prefill instance a rank belongs to; ranks of decode that send are like the first."""
        for number, split in enumerate(self.prefills):
            if index < split.world:
                return number
            index -= split.world
        return 0

    def outside(self) -> random.Random:
        """What draws the faults of what endpoints are given."""
        return random.Random(f"outside {self.seed}")

    @classmethod
    def draw(cls, seed: int, allowed: frozenset[FaultClass]) -> Scenario:
        """The scenario of a seed."""
        rng = random.Random(f"scenario {seed}")
        shape = shape_of(seed // BLOCK, seed % len(TOPOLOGIES))
        faults = _faults(seed, rng, allowed, shape.decode.world)
        stuck = FaultClass.QUARANTINE in faults
        requests = _requests(rng, shape, faults)
        prefills, decode, slot = shape.prefills, shape.decode, shape.slot_bytes
        scarce = stuck or (not survives(faults) and rng.random() < 0.2)
        options = _options(seed, rng)
        lease = slot + 256 * max(p.world for p in prefills)
        slow_kernels = rng.random() < 0.5
        decode_path = rng.choice(("auto", "auto", "staged"))
        ring = 8 * lease * (1 if stuck or FaultClass.RING in faults else rng.choice((2, 4)))
        conversations: tuple[Conversation, ...] = ()
        if rng.random() < PREFIXES and _keeps(shape):
            space = min(split.pages * split.page_rows for split in (*prefills, decode))
            drawn = [(one.rows, len(one.edges)) for one in requests]
            conversations, turns = converse(rng, drawn, space, decode.page_rows)
            pairs = zip(requests, turns, strict=True)
            requests = tuple(evolve(a, rows=b.rows, edges=b.edges, prompt=b.prompt) for a, b in pairs)
            if not survives(faults):
                decode = evolve(decode, pages=decode.pages // rng.choice((4, 8, 8)))
        elif scarce:
            decode = evolve(decode, pages=decode.pages // 3)
        rings = agrees(seed, decode.world) or random.Random(f"rings {seed}").random() < RINGS
        if rings:
            requests = flagged(seed, requests)
        if not conversations and not stuck:
            requests, options = _crowded(seed, shape, _unmet(seed, requests), options)
            requests = _chunked(seed, shape, requests)
        selection = "+incremental" if conversations else ""
        draws = random.Random(f"maps {seed}")
        maps, decode_path, prefill_paths = paths_of(seed, decode.world, decode_path, draws)
        exposing, large = maps and decode_path != "staged", random.Random(f"large {seed}")
        if exposing and not agrees(seed, decode.world) and large.random() < LARGE:
            options = evolve(options, request_pages=large.choice(MOST_PAGES))
            exposing, prefill_paths = False, ["auto", "staged"]
        both_ways = not conversations and not stuck and _both_ways(seed, shape, faults)
        if both_ways:
            requests, options = _mirrored(seed, requests), evolve(options, window=16)
            prefills = tuple(evolve(one, pages=2 * one.pages) for one in prefills)
            decode = evolve(decode, pages=2 * decode.pages)
        refused = (
            None if both_ways or exposing or conversations or scarce else refused_of(seed, decode_path, len(prefills))
        )
        return cls(
            seed=seed,
            model=shape.model,
            prefills=prefills,
            decode=decode,
            prefill_paths=tuple(
                ("slice" if n == refused else "mapped" if exposing and draws.random() < 0.4 else path) + selection
                for n, path in enumerate([rng.choice(prefill_paths) for _ in prefills])
            ),
            refused=refused,
            decode_path=decode_path + selection,
            schedule=rng.choice(SCHEDULES),
            verify="off" if slow_kernels or rings else rng.choice(("off", "sampled", "full")),
            slot_bytes=slot,
            slots=1 if stuck else rng.choice((2, 4, 8)),
            ring_bytes=8 * lease
            if both_ways
            else ring,  # with a wide window, rings of both directions are full at once
            options=options,
            drain_s=0.0 if FaultClass.CLOCK in faults else rng.choice((0.0, 0.0, 0.1, 0.3, None)),
            one_host=rng.random() < 0.5 or rings,
            alone=frozenset(s for s in ("prefill", "decode") if random.Random(f"alone {s} {seed}").random() < ALONE),
            resets=rng.random() < 0.5,
            detects_death=rng.random() < 0.4,
            notices_late=rng.random() < 0.5,
            slow_kernels=slow_kernels,
            together=rng.random() < 0.5,
            far=_far(rng, shape) if rng.random() < FAR else None,
            faults=faults | _outside(seed, allowed, bool(faults)),
            faults_until=2.0 if stuck else rng.choice((0.25, 0.5, 2.0)),
            requests=requests,
            conversations=conversations,
            collisions=rng.random() < 0.1,
            waits_events=rng.random() < 0.5,
            orders=slow_kernels and rng.random() < 0.6,
            queues=queue(seed, sum(split.world for split in prefills)) + (True,) * (both_ways * decode.world),
            both_ways=both_ways,
            maps=maps,
            pieces=random.Random(f"pieces {seed}").choice((2, 8, 64, 256)),
        )


def _faults(seed: int, rng: random.Random, allowed: frozenset[FaultClass], ranks: int) -> dict[FaultClass, float]:
    """Those of frames, processes and memory; some more where ranks of decode vote on rooms of exposed pages."""
    faults = swarm(rng, allowed)
    if agrees(seed, ranks) and not survives(faults):
        draws = random.Random(f"while agreeing {seed}")
        others = faults if draws.random() < 0.5 else {}  # few rooms get as far as to a vote among many faults
        return {**while_agreeing(draws, allowed), **others}
    return faults


def _outside(seed: int, allowed: frozenset[FaultClass], others: bool) -> dict[FaultClass, float]:
    """Those of what endpoints are given."""
    drawn = outside(random.Random(f"outside faults {seed}"), allowed, others)
    slow = FaultClass.MAPPING in allowed and slow_mappings(seed)
    return drawn | ({FaultClass.MAPPING: 1.0} if slow else {})


def _options(seed: int, rng: random.Random) -> Options:
    """Short times, and small bounds in many worlds."""
    return Options(
        silence_s=2.0,
        total_s=4.0,
        claim_s=1.5,
        heartbeat_s=0.5,
        missed=2,
        closed_s=0.5,
        retry_s=0.05,
        window=rng.choice((1, 2, 4, 16)),
        tombstones=random.Random(f"remembered {seed}").choice(REMEMBERED),
        parked=rng.choice((1, 64)),
        link_bytes=_link_bytes(seed),
    )


def _link_bytes(seed: int) -> int:
    """The budget of links: of few, or of more than a world has."""
    rng = random.Random(f"links {seed}")
    return OWN_LINK.nbytes * (rng.choice(LINKS) if rng.random() < FEW_LINKS else 1000)


@lru_cache(2 * len(TOPOLOGIES))
def shape_of(block: int, number: int) -> Shape:
    """The shape of a block of seeds that has this topology."""
    rng = random.Random(f"shape {block} {number}")
    model = draw_model(rng)
    topology = TOPOLOGIES[number]
    if block % 2 and number in SELDOM:
        topology, layers, units = SELDOM[number]
        states = model.states if units is None else States(units, rng.choice((1, 3)), alone=layers == 2)
        model = evolve(model, layers=layers, states=states)
    if topology is None:
        topology = tuple(_any(rng, model) for _ in range(rng.choice((1, 1, 1, 2)))), _any(rng, model)
    else:
        while not all(fits(model, tp, pp) for tp, pp in (*topology[0], topology[1])):
            model = draw_model(rng)
    row = slot_row_of(model)
    page = rng.choice((1, 2, 4, 4))
    slot = 256 * (1 + row * page // 256)
    least, most = max(4, slot // row), max(8, 4 * slot // row)
    rows = ROOMS[-1] * (16 + most)

    def split(one: One, page: int) -> Split:
        return Split(*one, page, -(-rows // page), rng.choice(("NHD", "HND")), rng.random() < 0.3)

    prefills = tuple(split(one, page if rng.random() < 0.6 else rng.choice((1, 2, 4))) for one in topology[0])
    decode = split(topology[1], page)
    if model.window and model.states is None:
        draws = random.Random(f"overlaid {block} {number}")
        decode, *rest = (evolve(one, overlaid=draws.random() < OVERLAID) for one in (decode, *prefills))
        prefills = tuple(rest)
    return Shape(model, slot, (least, most), prefills, decode)


def _far(rng: random.Random, shape: Shape) -> tuple[str, int] | None:
    """A rank whose instance has others."""
    worlds = [p.world for p in shape.prefills]
    ranks = [
        ("prefill", i)
        for n, world in enumerate(worlds)
        if world > 1
        for i in range(sum(worlds[:n]), sum(worlds[: n + 1]))
    ]
    if shape.decode.world > 1:
        ranks += [("decode", i) for i in range(shape.decode.world)]
    return rng.choice(ranks) if ranks else None


def _keeps(shape: Shape) -> bool:
    """Whether prefixes can be kept: every decode rank has rows of tokens, which no window's end moves."""
    ranks = range(shape.decode.world)
    return not shape.model.window and all(site_of(shape.model, shape.decode, r).token_groups for r in ranks)


def _any(rng: random.Random, model: Model) -> One:
    tp = rng.choice([tp for tp in TPS if fits(model, tp, 1)])
    return tp, 2 if fits(model, tp, 2) and tp < 3 and rng.random() < 0.3 else 1


def _requests(rng: random.Random, shape: Shape, faults: dict[FaultClass, float]) -> tuple[Request, ...]:
    count = rng.choice(ROOMS if shape.ranks < WIDE else FEW_ROOMS)
    ids = [RoomId(rng.getrandbits(64).to_bytes(8, "big")) for _ in range(count)]
    requests, attempts = [], Counter[RoomId]()
    stuck = FaultClass.QUARANTINE in faults
    steps = rng.choice((0.1, 0.4, 0.9))
    busy = not stuck and rng.random() < 0.7
    for number in range(count):
        request = ids[rng.randrange(number + 1)] if rng.random() < 0.2 else ids[number]
        attempts[request] += 1
        rows = 0 if rng.random() < 0.04 else rng.randint(*shape.rows)
        chunks = rng.choice((1, 1, 2, 3))
        edges = sorted({rng.randint(1, rows) for _ in range(chunks - 1)} | {rows}) if rows else []
        late = (_ms(rng, 5), _ms(rng, 5)) if busy else (_ms(rng, 40), _ms(rng, 200))
        requests.append(
            Request(
                request=request,
                attempt=attempts[request],
                source=rng.randrange(len(shape.prefills)),
                rows=rows,
                edges=tuple(edges),
                at=_ms(rng, 400 if stuck else 20 if busy else 100),
                prefill_late=(_ms(rng, 5), _ms(rng, 5)) if busy else (_ms(rng, 60), _ms(rng, 60)),
                decode_late=late,
                pass_s=_ms(rng, 4 if busy else 30),
                open_end=rng.random() < 0.3,
                aux=rng.random() < 0.5,
                steps=rng.random() < steps,
                abort_decode=_drawn(rng, faults, FaultClass.ABORT),
                abort_prefill=_drawn(rng, faults, FaultClass.ABORT),
                withdraw=_drawn(rng, faults, FaultClass.WITHDRAW, (8, 16, 60)),
                late=rng.random() < LATE,
                total_s=4.0 if survives(faults) else rng.choice((1.0, 4.0, 4.0, 4.0)),
            )
        )
    return tuple(requests)


def _crowded(
    seed: int, shape: Shape, requests: tuple[Request, ...], options: Options
) -> tuple[tuple[Request, ...], Options]:
    """In some worlds little is remembered by name, and many small requests end while one waits somewhere."""
    rng = random.Random(f"crowd {seed}")
    if rng.random() >= CROWDS or shape.model.states is not None or shape.ranks >= WIDE:
        return requests, options
    late = CROWD_S + 0.05
    waits = evolve(requests[0], at=0.0, abort_decode=None, abort_prefill=None, withdraw=None, total_s=4.0, unmet="")
    if requests[0].unmet:
        waits = evolve(waits, decode_late=(0.0, 0.0), prefill_late=(0.0, 0.0))
    who = rng.randrange(4)
    if who == 0:
        waits = evolve(waits, decode_late=(0.0, late), prefill_late=(0.0, 0.0))
    elif who == 1:
        waits = evolve(waits, decode_late=(0.0, 0.0), prefill_late=(late, 0.0))
    elif who == 2:
        waits = evolve(waits, decode_late=(0.0, 0.0), prefill_late=(0.0, late))
    small = [
        evolve(
            waits, request=RoomId(b"crowd %d" % n), attempt=1, source=waits.source, rows=1, edges=(1,),
            at=rng.uniform(0.01, CROWD_S),
            decode_late=(0.0, 0.0), prefill_late=(0.0, 0.0), pass_s=0.0, open_end=False, aux=False, steps=False,
        )
        for n in range(rng.randint(6, 12))
    ]  # fmt: skip
    return (waits, *requests[1:], *small), evolve(options, tombstones=rng.choice((1, 2, 4)))


def _chunked(seed: int, shape: Shape, requests: tuple[Request, ...]) -> tuple[Request, ...]:
    """In some worlds one request has a chunk for every row, and time for one after the other over slow links."""
    rng = random.Random(f"chunks {seed}")
    if rng.random() >= CHUNKED:
        return requests
    number, rows = rng.randrange(len(requests)), shape.rows[1]
    one = requests[number]
    total_s = 2 * one.total_s
    edges = tuple(range(1, rows + 1))
    long = evolve(one, rows=rows, edges=edges, steps=False, pass_s=0.0, burst=True, total_s=total_s)
    return (*requests[:number], long, *requests[number + 1 :])


def _both_ways(seed: int, shape: Shape, faults: Mapping[FaultClass, float]) -> bool:
    """Whether rooms go both ways in the world of a seed. A process is not replaced there: its endpoints are two."""
    few = shape.ranks < WIDE and shape.model.states is None and FaultClass.REPLACED not in faults
    return few and random.Random(f"both ways {seed}").random() < BOTH_WAYS


def _mirrored(seed: int, requests: tuple[Request, ...]) -> tuple[Request, ...]:
    """Beside each of the first requests, one that goes the other way at about the same time, perhaps of the same id."""
    rng = random.Random(f"mirrored {seed}")
    name = rng.choice((b"", b" back"))
    others = [
        evolve(one, request=RoomId(one.request + name), back=True, source=0, aux=False, at=one.at + _ms(rng, 5))
        for one in requests[: ROOMS[-1]]
    ]
    return (*requests, *others)


def _unmet(seed: int, requests: tuple[Request, ...]) -> tuple[Request, ...]:
    """In some worlds one side of one request comes too late, or never."""
    rng = random.Random(f"unmet {seed}")
    if rng.random() >= UNMET:
        return requests
    number, side, never = rng.randrange(len(requests)), rng.choice(("prefill", "decode")), rng.random() < 0.5
    one, late = evolve(requests[number], unmet=side, never=never), (COMES_S, 0.0)
    one = evolve(one, prefill_late=late) if side == "prefill" else evolve(one, decode_late=late)
    return (*requests[:number], one, *requests[number + 1 :])


def _drawn(
    rng: random.Random,
    faults: dict[FaultClass, float],
    fault: FaultClass,
    within: tuple[int, ...] = (5, 5, 10, 30, 200),
) -> float | None:
    rate = faults.get(fault, 0.0)
    return _ms(rng, rng.choice(within)) if rate and rng.random() < rate else None


def _ms(rng: random.Random, most: int) -> float:
    """Some milliseconds: events on a coarse grid often happen at once, which is where orders matter."""
    return rng.randint(0, most) / 1000
