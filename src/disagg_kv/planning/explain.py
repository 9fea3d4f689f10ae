"""What each path would post for one request, counted without posting or even listing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import frozen

from ..errors import ConfigurationError
from ..geometry import CacheSpec, Group, Plane, Shard, Share, Site
from ..ids import GroupId, LayerId, Rank
from .base import Limits, RowRange, Segment
from .cost import Choice, CostModel, Estimate, choose
from .descriptors import direct_count, refuse_direct, runs, slice_count
from .intake import Intake
from .staged import PartView, part_view

PATHS = ("staged", "direct", "slice")
"""The library's own paths; of equally fast ones the first is taken."""


@frozen
class PairParts:
    """What one prefill rank sends to one decode rank, as a path that is asked to count it sees it.

    Args:
        source: the prefill rank's pool.
        target: the decode rank's pool.
        parts: what the prefill rank was elected to send.
        view: ``parts`` in its pool.
        segments: the segments in which it has bytes.
        rows: which rows of the room are awaited.
    """

    source: Site
    target: Site
    parts: Sequence[Share]
    view: PartView
    segments: Sequence[Segment]
    rows: RowRange


@frozen
class OtherPath:
    """A path that is not the library's own; :func:`disagg_kv.strategies.other_paths` has those that are registered.

    Args:
        name: its name.
        exposes_pages: it writes from pages to pages; else it goes through staging.
        joins_auto: ``auto`` may take it.
        count: how many writes the segments of a pair take, or why it cannot move them.
    """

    name: str
    exposes_pages: bool
    joins_auto: bool
    count: Callable[[PairParts], int | str]


@frozen
class PairPlan:
    """What one prefill rank sends to one decode rank.

    Args:
        writer: the prefill rank.
        target: the decode rank.
        nbytes: bytes, the same on every path.
        descriptors: writes, for each path that can.
        segments: segments in which the writer has bytes.
        refused: the reason, for each path that cannot.
    """

    writer: Rank
    target: Rank
    nbytes: int
    descriptors: Mapping[str, int]
    segments: int
    refused: Mapping[str, str]


@frozen
class Explanation:
    """One request, path by path.

    Args:
        pairs: the pairs of ranks between which bytes move, by decode rank, then prefill rank.
        descriptors: writes in all, for each path that every pair can take.
        nbytes: bytes in all, the same on every path.
        refused: the first reason, for each path that some pair cannot take.
        auto: what ``auto`` takes, and why: estimates are those of the prefill rank that takes longest.
    """

    pairs: tuple[PairPlan, ...]
    descriptors: Mapping[str, int]
    nbytes: int
    refused: Mapping[str, str]
    auto: Choice


def plain_site(spec: CacheSpec, shard: Shard, rows: int, page_size: int, order: str = "NHD") -> Site:
    """A pool as engines lay it out: a buffer per plane, dense pages, room for one request of ``rows`` tokens.

    Args:
        spec: the whole cache.
        shard: what the rank holds.
        rows: tokens.
        page_size: rows of a page.
        order: ``"NHD"``: units of a row together; ``"HND"``: rows of a unit together, page by page.

    Raises:
        ConfigurationError: another order, or sizes below 1.
    """
    if order not in ("NHD", "HND") or rows < 1 or page_size < 1:
        raise ConfigurationError(f"a pool of {rows} tokens in pages of {page_size}, order {order!r} (NHD or HND)")
    tokens = Group(GroupId("kv"), page_size, -(-rows // page_size))
    states = Group(GroupId("state"), max(1, spec.state_rows()), 1)
    planes: list[Plane] = []
    sizes: list[int] = []
    held: dict[tuple[LayerId, str], int] = {}
    for holding in shard:
        for layer in holding.layers:
            held[layer, holding.component] = held.get((layer, holding.component), 0) + len(holding.units)
    for (layer, name), units in sorted(held.items()):
        component = spec.component(layer, name)
        nbytes, size = component.unit_bytes, component.rows or page_size
        group = states if component.rows else tokens
        row, unit = (units * nbytes, nbytes) if order == "NHD" else (nbytes, size * nbytes)
        planes.append(Plane(layer, name, group.id, len(sizes), 0, size * units * nbytes, row, unit))
        sizes.append(group.pages * size * units * nbytes)
    used = {plane.group for plane in planes}
    return Site(spec, shard, [g for g in (tokens, states) if g.id in used], planes, sizes)


def explain(
    spec: CacheSpec,
    prefill: Sequence[Shard],
    decode: Sequence[Shard],
    tokens: int,
    page_size: tuple[int, int],
    *,
    order: tuple[str, str] = ("NHD", "NHD"),
    slot_bytes: int = 64 << 20,
    lease_bytes: int = 512 << 20,
    rotation: int = 0,
    cost: CostModel | None = None,
    others: Sequence[OtherPath] = (),
) -> Explanation:
    """Count what each path posts for one request of ``tokens`` tokens, all of them sent.

    No two pages of the request follow one another in memory, as in a pool that has been in use for a while.

    Args:
        spec: the whole cache.
        prefill: shards of the prefill ranks.
        decode: shards of the decode ranks.
        tokens: rows of the request.
        page_size: rows of a page, (prefill, decode).
        order: ``"NHD"`` or ``"HND"``, (prefill, decode).
        slot_bytes: size of a prefill staging slot.
        lease_bytes: the most that one lease may have.
        rotation: which replica takes which piece.
        cost: costs of the fabric; None: the defaults.
        others: paths to explain beside the library's own.

    Raises:
        ConfigurationError: numbers that cannot be, or shards that do not fit together.
        OversizeError: one row of one layer is more than a slot or a lease.
    """
    if not decode:
        raise ConfigurationError("a plan needs at least one decode rank")
    sources = [plain_site(spec, shard, tokens, page_size[0], order[0]) for shard in prefill]
    limits = Limits(slot_bytes, lease_bytes, page_size[0])
    pairs: list[PairPlan] = []
    for number, shard in enumerate(decode):
        site = plain_site(spec, shard, tokens, page_size[1], order[1])
        rows = RowRange(0, tokens)
        intake = Intake.build(spec, prefill, shard, rotation).for_rows(rows)
        cuts = [
            segment
            for stage in intake.stages
            for segment in (
                *intake.cut(0, tokens, stage, limits),
                *intake.cut_states(stage, limits),
            )
        ]
        sizes = [intake.lease(segment)[0] for segment in cuts]
        for rank, parts in enumerate(intake.parts):
            writer, source = Rank(rank), sources[rank]
            own = [(segment, of[writer][1]) for segment, of in zip(cuts, sizes, strict=True) if writer in of]
            if own:
                view = part_view(source, tuple(parts), spec).for_rows(rows)
                pair = PairParts(source, site, parts, view, [segment for segment, _ in own], rows)
                pairs.append(_pair(writer, Rank(number), pair, sum(nbytes for _, nbytes in own), others))
    return _sum_up(pairs, cost or CostModel(), others)


def _pair(writer: Rank, target: Rank, pair: PairParts, nbytes: int, others: Sequence[OtherPath]) -> PairPlan:
    source, site, parts, rows = pair.source, pair.target, pair.parts, pair.rows
    layers = [layer for part in parts for layer in part.layers]
    assert rows.stop is not None
    kinds = ((rows.stop, False), (source.spec.state_rows(), True))
    boxes = [Segment(0, stop, min(layers), max(layers) + 1, state) for stop, state in kinds]
    given = [run for box in boxes for run in runs(source, site, parts, box, rows)]
    descriptors = {"staged": len(pair.segments), "slice": sum(slice_count(run) for run in given)}
    refused: dict[str, str] = {}
    if reason := refuse_direct(source, site, parts):
        refused["direct"] = reason
    else:
        descriptors["direct"] = sum(direct_count(run) for run in given)
    for path in others:
        found = path.count(pair)
        if isinstance(found, str):
            refused[path.name] = found
        else:
            descriptors[path.name] = found
    return PairPlan(writer, target, nbytes, descriptors, len(pair.segments), refused)


def _sum_up(pairs: Sequence[PairPlan], cost: CostModel, others: Sequence[OtherPath]) -> Explanation:
    refused: dict[str, str] = {}
    for pair in pairs:
        for path, reason in pair.refused.items():
            refused.setdefault(path, f"prefill rank {pair.writer} to decode rank {pair.target}: {reason}")
    able = [path for path in (*PATHS, *(other.name for other in others)) if path not in refused]
    totals = {path: sum(pair.descriptors[path] for pair in pairs) for path in able}
    staged = {"staged", *(other.name for other in others if not other.exposes_pages)}
    left_out = {other.name for other in others if not other.joins_auto}
    slowest = [_slowest(pairs, path, path in staged, cost) for path in able if path not in left_out]
    refusals = {path: reason for path, reason in refused.items() if path not in left_out}
    return Explanation(tuple(pairs), totals, sum(pair.nbytes for pair in pairs), refused, choose(slowest, refusals))


def _slowest(pairs: Sequence[PairPlan], path: str, staged: bool, cost: CostModel) -> Estimate:
    """The estimate of the prefill rank that takes longest for all that it sends."""
    estimates: list[Estimate] = []
    for writer in sorted({pair.writer for pair in pairs}):
        mine = [pair for pair in pairs if pair.writer == writer]
        descriptors, nbytes = (sum(pair.descriptors[path] for pair in mine), sum(pair.nbytes for pair in mine))
        segments = sum(pair.segments for pair in mine) if staged else 0
        estimates.append(cost.estimate(path, descriptors, nbytes, segments))
    return max(estimates, key=lambda e: e.seconds)
