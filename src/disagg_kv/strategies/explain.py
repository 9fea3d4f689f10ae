"""What each path would post for one request, counted without posting or even listing it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from .. import arguments
from ..errors import ConfigurationError, DisaggKVError, text_of
from ..geometry import CacheSpec, Shard, difference, read_as, shards_as
from ..ids import Rank
from ..planning import Limits, PairPlan, RankPlan, RowRange, Segment, plain_site
from .base import Job, TransferPlanner, refusal
from .registry import paths


@frozen
class Choice:
    """The path that ``auto`` takes, and one sentence that says why."""

    path: str
    reason: str


@frozen
class PairCount:
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
    """

    pairs: tuple[PairCount, ...]
    descriptors: Mapping[str, int]
    nbytes: int
    refused: Mapping[str, str]


def explain(
    spec: CacheSpec,
    prefill: Sequence[Shard],
    decode: Sequence[Shard],
    tokens: int,
    page_size: tuple[int, int],
    *,
    order: tuple[str, str] = ("NHD", "NHD"),
    slot_bytes: int = 128 << 20,
    lease_bytes: int = 512 << 20,
    decode_spec: CacheSpec | None = None,
) -> Explanation:
    """Count what each registered path posts for one request of ``tokens`` tokens, all of them sent.

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
        decode_spec: decode's cache, into which prefill's is converted; None: it is the same.

    Raises:
        ConfigurationError: numbers that cannot be, shards that do not fit together, or a path that raises.
        OversizeError: one row of one layer is more than a slot or a lease.
    """
    if not decode:
        raise ConfigurationError("a plan needs at least one decode rank")
    wanted = spec if decode_spec is None else arguments.one(decode_spec, "decode_spec", CacheSpec)
    found = difference(spec, wanted)
    if found is not None:
        raise ConfigurationError(f"{found.field}: {found.source} of prefill cannot become {found.target} of decode")
    sources = [read_as(plain_site(spec, shard, tokens, page_size[0], order[0]), wanted) for shard in prefill]
    prefill = shards_as(tuple(prefill), spec, wanted)
    limits, known, pairs = Limits(slot_bytes, lease_bytes, page_size[0]), paths(), list[PairCount]()
    for number, shard in enumerate(decode):
        site = plain_site(wanted, shard, tokens, page_size[1], order[1])
        rows = RowRange(0, tokens)
        rank_plan = RankPlan.build(wanted, prefill, shard).for_rows(rows)
        for rank, parts in enumerate(rank_plan.parts):
            sizes = {s: rank_plan.part_bytes(s, Rank(rank)) for s in rank_plan.segments(Rank(rank), 0, tokens, limits)}
            segments = [segment for segment, nbytes in sizes.items() if nbytes]
            if segments:
                pair, counts, refused = PairPlan(sources[rank], site, parts, rows), dict[str, int](), dict[str, str]()
                for path in known.values():
                    count = _count(path, pair, segments)
                    if isinstance(count, str):
                        refused[path.name] = count
                    else:
                        counts[path.name] = count
                one = Rank(rank), Rank(number), sum(sizes.values())
                pairs.append(PairCount(*one, counts, len(segments), refused))
    return _sum_up(pairs, known)


def _count(path: TransferPlanner, pair: PairPlan, segments: Sequence[Segment]) -> int | str:
    """The number of writes of a path for these segments, or the reason why it cannot move them."""
    try:
        reason = refusal(path, pair)
        if reason is not None:
            return arguments.text(reason, f"path {path.name!r}: refuse(): its result")
        counts = [path.count(Job(pair, segment)) for segment in segments]
    except DisaggKVError as exc:
        return text_of(exc)  # as a prefill endpoint takes it
    except Exception as exc:
        raise ConfigurationError(f"path {path.name!r}: {text_of(exc)}") from exc
    return sum(arguments.count(number, f"path {path.name!r}: count(): its result") for number in counts)


def _sum_up(pairs: Sequence[PairCount], known: Iterable[str]) -> Explanation:
    refused: dict[str, str] = {}
    for pair in pairs:
        for path, reason in pair.refused.items():
            refused.setdefault(path, f"prefill rank {pair.writer} to decode rank {pair.target}: {reason}")
    totals = {path: sum(pair.descriptors[path] for pair in pairs) for path in known if path not in refused}
    return Explanation(tuple(pairs), totals, sum(pair.nbytes for pair in pairs), refused)


def choose(counts: Mapping[str, int], nbytes: int, refusals: Mapping[str, str]) -> Choice:
    """Take the first of the paths that can.

    Args:
        counts: the writes of each path that can, in the order in which they are preferred.
        nbytes: bytes, the same on every path.
        refusals: the reason of each path that cannot.

    Raises:
        ConfigurationError: no path can; the message has every reason.
    """
    refused = [f"{path} cannot: {reason}" for path, reason in refusals.items()]
    if not counts:
        raise ConfigurationError(f"no path is left: {'; '.join(refused) or 'none was offered'}")
    (path, writes), *others = counts.items()
    would = [f"{other} would take {count:,}" for other, count in others]
    return Choice(path, "; ".join([f"{path} takes {writes:,} writes of {nbytes:,} bytes", *would, *refused]))
