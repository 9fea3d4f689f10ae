"""``disagg-kv plan``: what each path would post for one request. Runs nothing and needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ..errors import ConfigurationError
from ..geometry import CacheSpec, Shard, conversions, shard, stages
from ..planning import Batch, Groups, LayerRun, Pace
from ..strategies import Explanation, LayerPipelined, PairCount, explain
from .options import DecodePageSize, Layers, PageSize, number
from .output import Json, JsonFlag, emit
from .plan_lanes import PairChoice, chosen, hosts_of, planned

MIB = 1 << 20
WIRE_BYTES_PER_S = 4e9
"""Taken for the wire where layers are grouped by time."""
SHOWN_PAIRS = 16
"""Rank pairs in the table for people; the JSON document has all."""


def plan(
    layers: Layers,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the request.")],
    kv_heads: Annotated[int | None, typer.Option(min=1, help="K and V heads of a layer.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Elements of one K head.")] = None,
    v_head_dim: Annotated[int | None, typer.Option(min=1, help="Elements of one V head; default: as K.")] = None,
    mla_latent: Annotated[int | None, typer.Option(min=1, help="Elements of an MLA latent, instead of heads.")] = None,
    dtype: Annotated[str, typer.Option(help="Element type.")] = "bfloat16",
    decode_dtype: Annotated[str | None, typer.Option(help="Element type of decode's cache, if it differs.")] = None,
    decode_scales: Annotated[bool, typer.Option("--decode-scales", help="With computed float8 scales.")] = False,
    page_size: PageSize = 64,
    decode_page_size: DecodePageSize = None,
    order: Annotated[str, typer.Option(help="Order inside a page: NHD (tokens first) or HND.")] = "NHD",
    decode_order: Annotated[str | None, typer.Option(help="Order inside a page of decode, if it differs.")] = None,
    prefill_tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size of prefill.")] = 1,
    decode_tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size of decode.")] = 1,
    prefill_pp: Annotated[int, typer.Option(min=1, help="Pipeline stages of prefill.")] = 1,
    decode_pp: Annotated[int, typer.Option(min=1, help="Pipeline stages of decode.")] = 1,
    slot_mib: Annotated[int, typer.Option(min=1, help="MiB of a prefill staging slot.")] = 128,
    ring_mib: Annotated[int, typer.Option(min=1, help="MiB of a decode rank's ring; a lease has at most 1/8.")] = 1024,
    layer_us: Annotated[float | None, number(0, text="Microseconds to compute one layer of all these tokens.")] = None,
    layer_group: Annotated[int | None, typer.Option(min=1, help="Layers per group; overrides every rule.")] = None,
    maps: Annotated[
        bool, typer.Option("--maps", help="The transport maps decode's pool; with --transport: shm allocated the pool.")
    ] = False,
    transport: Annotated[
        str | None, typer.Option(help="Transports, joined by +: show which of them each pair of ranks takes.")
    ] = None,
    prefill_hosts: Annotated[str, typer.Option(help="Hosts of the prefill ranks, joined by commas.")] = "a",
    decode_hosts: Annotated[str, typer.Option(help="Hosts of the decode ranks; one name: all are there.")] = "a",
    as_json: JsonFlag = False,
) -> None:
    """Show what each path would post for one request, and which path ``auto`` selects."""
    spec = _spec(layers, kv_heads, head_dim, v_head_dim, mla_latent, dtype)
    into = _decoded(spec, dtype, decode_dtype, decode_scales)
    prefills, decodes = ranks(spec, prefill_tp, prefill_pp), ranks(into, decode_tp, decode_pp)
    lanes = None if transport is None else planned(transport)
    hosts = hosts_of(prefill_hosts, len(prefills), "prefill"), hosts_of(decode_hosts, len(decodes), "decode")
    converted = ", ".join(sorted(conversions(spec, into))) or None
    found = explain(
        spec,
        prefills,
        decodes,
        tokens,
        (page_size, decode_page_size or page_size),
        order=(order, decode_order or order),
        slot_bytes=slot_mib * MIB,
        lease_bytes=ring_mib * MIB // 8,
        maps=maps,
        decode_spec=into,
    )
    groups = _groups(found, len(spec.layers), prefill_pp, tokens, layer_us, layer_group)
    choices = None if lanes is None else chosen(found, lanes, hosts, maps)
    emit(
        {**document(found, groups, choices), "conversion": converted},
        _paths(found),
        _pairs(found),
        Text(f"conversion, by prefill's kernel: {converted or 'none'}"),
        Text(f"auto: {found.auto.reason}") if choices is None else _choices(choices),
        Text(f"layer_pipelined: {groups.count} groups of {groups.size} layers: {groups.reason}"),
        as_json=as_json,
    )


def ranks(spec: CacheSpec, tp: int, pp: int) -> Sequence[Shard]:
    """The shards of an instance's ranks: stage by stage, inside a stage by tensor-parallel rank."""
    return [shard(spec, tp=tp, rank=rank, layers=stage) for stage in stages(spec, pp) for rank in range(tp)]


def document(found: Explanation, groups: Groups, choices: Sequence[PairChoice] | None = None) -> dict[str, Json]:
    """The explanation as JSON; a path that cannot has its reason in ``refused`` and nulls for numbers.

    With ``choices``, ``auto`` is by pair: ``transports`` has each.
    """
    paths: dict[str, Json] = {
        name: {"descriptors": count, "bytes": found.nbytes, "refused": None}
        for name, count in found.descriptors.items()
    }
    for name, reason in found.refused.items():
        paths[name] = {"descriptors": None, "bytes": None, "refused": reason}
    return {
        "ok": True,
        "bytes": found.nbytes,
        "paths": paths,
        "auto": {"path": found.auto.path, "reason": found.auto.reason} if choices is None else None,
        "transports": None if choices is None else [_choice(one) for one in choices],
        "layer_pipelined": {"groups": groups.count, "layers": groups.size, "reason": groups.reason},
        "pairs": [_pair(pair) for pair in found.pairs],
    }


def _groups(found: Explanation, layers: int, pp: int, tokens: int, layer_us: float | None, fixed: int | None) -> Groups:
    """What ``layer_pipelined`` would do with one pass over the request, in the first pipeline stage."""
    of_stage = -(-layers // pp)
    nbytes = max((pair.nbytes for pair in found.pairs), default=0)
    pace = Pace(layer_us / 1e6 / tokens, WIRE_BYTES_PER_S) if layer_us else None
    run = LayerRun(of_stage, tokens, nbytes, Batch((tokens,), layered=True))
    return LayerPipelined(fixed=fixed, pace=pace).groups(run)


def _spec(
    layers: int, kv_heads: int | None, head_dim: int | None, v_head_dim: int | None, latent: int | None, dtype: str
) -> CacheSpec:
    if latent is not None:
        if (kv_heads, head_dim, v_head_dim) != (None, None, None):
            raise ConfigurationError(
                "--mla-latent replaces --kv-heads, --head-dim and --v-head-dim: give one or the other"
            )
        return CacheSpec.mla(layers, latent, dtype)
    if kv_heads is None or head_dim is None:
        raise ConfigurationError("--kv-heads and --head-dim are needed, or --mla-latent")
    return CacheSpec.kv(layers, kv_heads, head_dim, dtype, v_head_dim=v_head_dim)


def _decoded(spec: CacheSpec, dtype: str, decode_dtype: str | None, computed: bool) -> CacheSpec:
    """Decode's cache."""
    if decode_dtype is None and computed:
        raise ConfigurationError("--decode-scales needs --decode-dtype")
    if decode_dtype in (None, dtype):
        return spec
    into = spec.cast(decode_dtype, computed=computed)
    if into == spec:
        raise ConfigurationError(f"--decode-dtype: there is no conversion from {dtype} to {decode_dtype}")
    return into


def _pair(pair: PairCount) -> dict[str, Json]:
    return {
        "prefill_rank": pair.writer,
        "decode_rank": pair.target,
        "bytes": pair.nbytes,
        "segments": pair.segments,
        "descriptors": pair.descriptors,
        "refused": pair.refused,
    }


def _choice(one: PairChoice) -> dict[str, Json]:
    return {
        "prefill_rank": one.pair.writer,
        "decode_rank": one.pair.target,
        "transport": one.lane or None,
        "transport_reason": one.lane_reason,
        "path": one.path or None,
        "path_reason": one.reason,
    }


def _choices(choices: Sequence[PairChoice]) -> Table:
    more = len(choices) - SHOWN_PAIRS
    caption = f"and {more:,} more pairs: --json" if more > 0 else None
    table = Table("prefill", "decode", "transport", "path", "", title="What each pair of ranks takes", caption=caption)
    for one in choices[:SHOWN_PAIRS]:
        why = Text(f"{one.lane_reason}; {one.reason}")
        table.add_row(str(one.pair.writer), str(one.pair.target), one.lane or "-", one.path or "-", why)
    return table


def _paths(found: Explanation) -> Table:
    table = Table("path", "writes", "bytes", "", title="One request, all ranks")
    for name, count in sorted(found.descriptors.items(), key=lambda item: item[1]):
        table.add_row(name, f"{count:,}", f"{found.nbytes:,}", "auto" if name == found.auto.path else "")
    for name, reason in found.refused.items():
        table.add_row(name, "-", "-", Text(f"cannot: {reason}"))
    return _right(table, 1, 2)


def _pairs(found: Explanation) -> Table:
    able = list(found.descriptors)
    more = len(found.pairs) - SHOWN_PAIRS
    title, caption = "Rank by rank", f"and {more:,} more pairs: --json" if more > 0 else None
    table = Table("prefill", "decode", "bytes", *(f"{name} writes" for name in able), title=title, caption=caption)
    for pair in found.pairs[:SHOWN_PAIRS]:
        counts = (f"{pair.descriptors[name]:,}" for name in able)
        table.add_row(str(pair.writer), str(pair.target), f"{pair.nbytes:,}", *counts)
    return _right(table, *range(len(table.columns)))


def _right(table: Table, *columns: int) -> Table:
    for column in columns:
        table.columns[column].justify = "right"
    return table
