"""The report of a demo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import field, frozen

from ....geometry import item_bytes
from .check import Checked
from .config import DemoConfig, Role
from .results import DecodeResult, Moved, PrefillResult, Results


@frozen
class RankReport:
    """One process.

    Args:
        role: ``prefill``, ``decode`` or ``reference``.
        rank: which of its role.
        pid: its process id.
        kv_heads: the KV heads it holds.
        nbytes: bytes of cache that it sent or received.
        descriptors: writes that it posted.
    """

    role: Role
    rank: int
    pid: int
    kv_heads: tuple[int, ...]
    nbytes: int = 0
    descriptors: int = 0


@frozen
class TurnReport:
    """One prompt of every conversation.

    Args:
        prompt_tokens: tokens of all prompts of this turn.
        held_tokens: tokens of them that every decode rank already held.
        kv_bytes: bytes of cache that prefill sent.
        kv_bytes_ideal: bytes that decode cannot have had: those of all tokens after the previous turn's whole pages.
        returned_bytes: bytes of cache that decode sent back before prefill computed this prompt.
        returned_bytes_ideal: of the rows that decode had, those after prefill's own whole pages.
    """

    prompt_tokens: int
    held_tokens: int
    kv_bytes: int
    kv_bytes_ideal: int
    returned_bytes: int
    returned_bytes_ideal: int


@frozen
class Report:
    """One demo. It succeeded (``ok``) if the tokens are equal and no byte is wrong.

    Args:
        tokens_equal: every decode rank generated the tokens of one process with the whole model.
        wrong_bytes: bytes in decode's pages that differ from prefill's; where rows go both ways, in prefill's, too.
        stray_bytes: bytes of that memory, outside those rows, that changed.
        requests: number of conversations.
        prompt_tokens: tokens of all prompts of all turns.
        new_tokens: tokens generated per prompt.
        kv_bytes: bytes of cache that prefill sent, over all ranks and turns.
        returned_bytes: bytes of cache that decode sent back, over all ranks and turns.
        evicted: prompts before which decode had no rows to send back, as it had evicted them.
        kv_bytes_unconverted: the same in the dtype of prefill's cache.
        descriptors: writes that prefill posted.
        descriptors_slice: writes that the path ``slice`` would post: one per token and head slice.
        strategy: as configured.
        paths: the paths that rooms took.
        transports: those that carried the bytes.
        transport: as configured.
        device: as configured.
        model: as configured.
        dtype: of prefill's cache.
        decode_dtype: of decode's cache.
        prefill_tp: processes of a prefill stage; prefill_pp: its stages.
        decode_tp: processes of a decode stage; decode_pp: its stages.
        inject: the error that was introduced on purpose.
        phases: seconds. ``start``: until every process was ready; ``prefill``: forward passes, first to last;
            ``transfer``: from the first forward pass to the last arrival, so it overlaps ``prefill``; ``decode`` and
            ``reference``: forward passes; ``check``: comparing; the phases of the endpoints: the slowest rank's sum.
        gb_per_s: ``kv_bytes`` in 1e9 bytes over the ``wire`` seconds of the slowest rank.
        ranks: every process.
        turns: the report of each turn.
    """

    tokens_equal: bool
    wrong_bytes: int
    stray_bytes: int
    requests: int
    prompt_tokens: int
    new_tokens: int
    kv_bytes: int
    returned_bytes: int
    evicted: int
    kv_bytes_unconverted: int
    descriptors: int
    descriptors_slice: int
    strategy: str
    paths: tuple[str, ...]
    transports: tuple[str, ...]
    transport: str
    device: str
    model: str
    dtype: str
    decode_dtype: str
    prefill_tp: int
    prefill_pp: int
    decode_tp: int
    decode_pp: int
    inject: str | None
    phases: Mapping[str, float]
    gb_per_s: float
    ranks: tuple[RankReport, ...]
    turns: tuple[TurnReport, ...]
    ok: bool = field(init=False)

    @ok.default
    def _ok(self) -> bool:
        return self.tokens_equal and self.wrong_bytes == 0 and self.stray_bytes == 0


def assemble(
    config: DemoConfig, results: Results, checked: Sequence[Checked], started: float, check_s: float
) -> Report:
    """Assemble the report from the results of the processes and of the comparison.

    Args:
        config: the demo.
        results: the results of the processes.
        checked: the comparisons.
        started: start of the parent, on the processes' clock.
        check_s: seconds that the comparison took.
    """
    sent = [room for rank in results.prefill for room in rank.rooms]
    ready = max(*(rank.ready for rank in results.prefill), *(rank.ready for rank in results.decode))
    phases = {
        "start": ready - started,
        "prefill": max(rank.ended for rank in results.prefill) - ready,
        "transfer": max(rank.arrived for rank in results.decode) - ready,
        "decode": max(rank.ended - rank.arrived for rank in results.decode),
        "reference": results.reference.seconds,
        "check": check_s,
        **_endpoint_phases(results),
    }
    wire = phases.get("wire", 0.0)
    turns = tuple(_turn(config, results, turn) for turn in range(config.turns))
    kv_bytes = sum(turn.kv_bytes for turn in turns)
    return Report(
        tokens_equal=all(rank.tokens == results.reference.tokens for rank in results.decode),
        wrong_bytes=sum(of.wrong for of in checked),
        stray_bytes=sum(of.stray for of in checked),
        requests=config.requests,
        prompt_tokens=sum(turn.prompt_tokens for turn in turns),
        new_tokens=config.max_new_tokens,
        kv_bytes=kv_bytes,
        returned_bytes=sum(turn.returned_bytes for turn in turns),
        evicted=sum(rank.evicted for rank in results.prefill) // len(config.ranks("prefill", 0)),
        kv_bytes_unconverted=kv_bytes * item_bytes(config.kept_dtype) // item_bytes(config.decoded_dtype),
        descriptors=sum(room.descriptors for room in sent),
        descriptors_slice=results.reference.descriptors_slice,
        strategy=config.strategy,
        paths=tuple(sorted({room.path for room in sent if room.path})),
        transports=tuple(sorted({room.transport for room in sent if room.transport})),
        transport=config.transport,
        device=config.device,
        model=config.model,
        dtype=config.kept_dtype,
        decode_dtype=config.decoded_dtype,
        prefill_tp=config.prefill_tp,
        prefill_pp=config.prefill_pp,
        decode_tp=config.decode_tp,
        decode_pp=config.decode_pp,
        inject=config.inject,
        phases={name: round(seconds, 6) for name, seconds in phases.items()},
        gb_per_s=round(kv_bytes / wire / 1e9, 3) if wire else 0.0,
        ranks=(
            *(_rank("prefill", rank, of.pid, of.heads, _all(of)) for rank, of in enumerate(results.prefill)),
            *(_rank("decode", rank, of.pid, of.heads, _all(of)) for rank, of in enumerate(results.decode)),
            _rank("reference", 0, results.reference.pid, tuple(range(config.kv_heads)), ()),
        ),
        turns=turns,
    )


def _all(of: PrefillResult | DecodeResult) -> tuple[Moved, ...]:
    """Its rooms in both directions."""
    return (*of.rooms, *of.returned)


def _turn(config: DemoConfig, results: Results, turn: int) -> TurnReport:
    of = slice(turn * config.requests, (turn + 1) * config.requests)
    busy = [results.prefill[rank] for rank in config.ranks("prefill", turn)]
    first = turn // config.prefill_instances * config.requests
    back = max(0, turn - 1) * config.requests
    there = results.decode if turn else ()
    size = item_bytes(config.decoded_dtype)
    row_bytes = config.layers * 2 * config.kv_heads * config.head_dim * size
    return TurnReport(
        prompt_tokens=sum(config.lengths(turn)),
        held_tokens=sum(min(held) for held in zip(*(rank.held[of] for rank in results.decode), strict=True)),
        kv_bytes=sum(room.nbytes for rank in busy for room in rank.rooms[first : first + config.requests]),
        kv_bytes_ideal=row_bytes * sum(config.lacking(turn)),
        returned_bytes=sum(room.nbytes for rank in there for room in rank.returned[back : back + config.requests]),
        returned_bytes_ideal=row_bytes * sum(config.returned(turn)),
    )


def _rank(role: Role, rank: int, pid: int, heads: tuple[int, ...], rooms: Sequence[Moved]) -> RankReport:
    nbytes = sum(room.nbytes for room in rooms)
    return RankReport(role, rank, pid, heads, nbytes, sum(room.descriptors for room in rooms))


def _endpoint_phases(results: Results) -> dict[str, float]:
    """Seconds of each phase that endpoints report, of the rank that spent most in it."""
    slowest: dict[str, float] = {}
    for rooms in (*(rank.rooms for rank in results.prefill), *(rank.rooms for rank in results.decode)):
        mine: dict[str, float] = {}
        for room in rooms:
            for phase, seconds in room.seconds.items():
                if phase != "total":  # a room's whole life, the forward passes included
                    mine[phase] = mine.get(phase, 0.0) + seconds
        for phase, seconds in mine.items():
            slowest[phase] = max(slowest.get(phase, 0.0), seconds)
    return slowest
