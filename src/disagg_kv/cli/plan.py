"""``disagg-kv plan``: what each path would post for one request. Runs nothing and needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from attrs import asdict
from rich.table import Table
from rich.text import Text

from ..errors import ConfigurationError
from ..geometry import CacheSpec, Shard, conversions, shard, stages
from ..planning import Batch, Groups, LayerRun, Pace
from ..strategies import Explanation, LayerPipelined, PairCount, explain
from ..transports.registry import AUTO
from .model_config import spec_of
from .options import DecodePageSize, Device, PageSize, number
from .output import Json, JsonFlag, emit
from .plan_times import Rates, busiest, measured
from .plan_transports import PairChoice, chosen, hosts_of, kind_of, planned

MIB = 1 << 20
STAGING_MIB = {"cpu": (16, 256), "cuda": (128, 1024)}
"""The defaults of an endpoint, by kind of memory: a staging slot, and a ring."""

SHOWN_PAIRS = 16
"""Rank pairs in the table for people; the JSON document has all."""


def plan(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the request.")],
    config: Annotated[Path | None, typer.Option(help="A model's config.json, instead of the options below.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the model.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="K and V heads of a layer.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Elements of one K head.")] = None,
    v_head_dim: Annotated[int | None, typer.Option(min=1, help="Elements of one V head; default: as K.")] = None,
    mla_latent: Annotated[int | None, typer.Option(min=1, help="Elements of an MLA latent, instead of heads.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Element type [default: bfloat16, or the config's].")] = None,
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
    slot_mib: Annotated[
        int | None, typer.Option(min=1, help="MiB of a prefill staging slot [default: 16, or 128 on GPUs].")
    ] = None,
    ring_mib: Annotated[
        int | None, typer.Option(min=1, help="MiB of a decode rank's ring, of which a lease has 1/8 [256, or 1024].")
    ] = None,
    wire_gb_s: Annotated[float | None, number(1e-6, text="GB/s of a rank's wire: shows times.")] = None,
    copy_gb_s: Annotated[float | None, number(1e-6, text="GB/s of a copy in a rank's memory: shows times.")] = None,
    probe: Annotated[
        Path | None, typer.Option(help="Both from the JSON of disagg-kv doctor --between or --peer.")
    ] = None,
    layer_us: Annotated[float | None, number(0, text="Microseconds to compute one layer of all these tokens.")] = None,
    group_us: Annotated[float | None, number(0, text="Microseconds that one more group of layers costs.")] = None,
    layer_group: Annotated[int | None, typer.Option(min=1, help="Layers per group; overrides every rule.")] = None,
    maps: Annotated[bool, typer.Option("--maps", help="The transport shm allocated decode's pool.")] = False,
    transport: Annotated[str, typer.Option(help="Transports, joined by +; auto: as where all of them start.")] = AUTO,
    device: Annotated[
        Device | None, typer.Option(help="Memory that is moved [default: cuda, or what the transports are for].")
    ] = None,
    prefill_hosts: Annotated[str, typer.Option(help="Hosts of the prefill ranks, joined by commas.")] = "a",
    decode_hosts: Annotated[str, typer.Option(help="Hosts of the decode ranks; one name: all are there.")] = "a",
    as_json: JsonFlag = False,
) -> None:
    """Show what each path would post for one request, and which path ``auto`` selects."""
    spec = _spec(config, (layers, kv_heads, head_dim, v_head_dim), mla_latent, dtype)
    into = _decoded(spec, decode_dtype, decode_scales)
    prefills, decodes = ranks(spec, prefill_tp, prefill_pp), ranks(into, decode_tp, decode_pp)
    several = planned(transport, device)
    kind = device or ("cuda" if transport == AUTO else kind_of([one.caps for one in several]))
    hosts = hosts_of(prefill_hosts, len(prefills), "prefill"), hosts_of(decode_hosts, len(decodes), "decode")
    slot, ring = STAGING_MIB[kind]
    converted = ", ".join(sorted(conversions(spec, into))) or None
    found = explain(
        spec,
        prefills,
        decodes,
        tokens,
        (page_size, decode_page_size or page_size),
        order=(order, decode_order or order),
        slot_bytes=(slot_mib or slot) * MIB,
        lease_bytes=(ring_mib or ring) * MIB // 8,
        decode_spec=into,
    )
    choices = chosen(found, several, kind, hosts, maps)
    rates = _rates(wire_gb_s, copy_gb_s, probe, choices)
    groups = _groups(found, len(spec.layers), prefill_pp, tokens, _pace(layer_us, group_us, tokens, rates), layer_group)
    emit(
        {**document(found, groups, choices, rates), "conversion": converted},
        _paths(found, choices),
        _pairs(choices),
        *(Text(why) for why in dict.fromkeys(f"auto: {one.transport_reason}; {one.reason}" for one in choices)),
        Text(f"conversion, by prefill's kernel: {converted or 'none'}"),
        Text(f"layer_pipelined: {groups.count} groups of {groups.size} layers: {groups.reason}"),
        *([Text(line)] if (line := rates.text(busiest(found))) else []),
        as_json=as_json,
    )


def _rates(wire: float | None, copy: float | None, probe: Path | None, choices: Sequence[PairChoice]) -> Rates:
    """What times are computed with."""
    if probe is None:
        return Rates(wire, copy)
    if (wire, copy) != (None, None):
        raise ConfigurationError("--probe replaces --wire-gb-s and --copy-gb-s: give one or the other")
    return measured(probe, {one.transport for one in choices if one.transport})


def ranks(spec: CacheSpec, tp: int, pp: int) -> Sequence[Shard]:
    """The shards of an instance's ranks: stage by stage, inside a stage by tensor-parallel rank."""
    return [shard(spec, tp=tp, rank=rank, layers=stage) for stage in stages(spec, pp) for rank in range(tp)]


def document(found: Explanation, groups: Groups, choices: Sequence[PairChoice], rates: Rates) -> dict[str, Json]:
    """The explanation as JSON; a path that cannot has its reason in ``refused`` and nulls for numbers.

    ``auto`` is null where not all decode ranks take the same path; ``transports`` has each pair of ranks.
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
        "auto": {"path": choices[0].path, "reason": choices[0].reason} if len(_taken(choices)) == 1 else None,
        "transports": [_choice(one) for one in choices],
        "layer_pipelined": {"groups": groups.count, "layers": groups.size, "reason": groups.reason},
        "times": _times(rates, busiest(found)),
        "pairs": [_pair(pair) for pair in found.pairs],
    }


def _times(rates: Rates, nbytes: int) -> Json:
    wire, copies = rates.times(nbytes)
    times = {"busiest_rank_bytes": nbytes, "wire_s": wire, "staged_copies_s": copies}
    return None if wire is copies is None else {**times, **asdict(rates)}


def _taken(choices: Sequence[PairChoice]) -> set[str]:
    """The paths that ``auto`` takes."""
    return {one.path for one in choices}


def _pace(layer_us: float | None, group_us: float | None, tokens: int, rates: Rates) -> Pace | None:
    """By times of the user; None: no time was given."""
    if not layer_us:
        return None
    if group_us is None or rates.wire_gb_s is None:
        raise ConfigurationError("--layer-us needs --group-us, and --wire-gb-s or --probe: plan knows no times")
    return Pace(layer_us / 1e6 / tokens, rates.wire_gb_s * 1e9, group_us / 1e6)


def _groups(found: Explanation, layers: int, pp: int, tokens: int, pace: Pace | None, fixed: int | None) -> Groups:
    """What ``layer_pipelined`` would do with one pass over the request, in the first pipeline stage."""
    nbytes = max((pair.nbytes for pair in found.pairs), default=0)
    run = LayerRun(-(-layers // pp), tokens, nbytes, Batch((tokens,), layered=True))
    return LayerPipelined(fixed=fixed, pace=pace).groups(run)


def _spec(config: Path | None, sizes: tuple[int | None, ...], latent: int | None, dtype: str | None) -> CacheSpec:
    """Prefill's cache: of a config, or of layers, KV heads, K head and V head."""
    layers, kv_heads, head_dim, v_head_dim = sizes
    if config is not None:
        if {latent, *sizes} != {None}:
            replaced = "--layers, --kv-heads, --head-dim, --v-head-dim and --mla-latent"
            raise ConfigurationError(f"--config replaces {replaced}: give one or the other")
        return spec_of(config, dtype)
    dtype = dtype or "bfloat16"
    if layers is None:
        raise ConfigurationError("--layers is needed, or --config with a model's config.json")
    if latent is not None:
        if sizes[1:] != (None, None, None):
            raise ConfigurationError(
                "--mla-latent replaces --kv-heads, --head-dim and --v-head-dim: give one or the other"
            )
        return CacheSpec.mla(layers, latent, dtype)
    if kv_heads is None or head_dim is None:
        raise ConfigurationError("--kv-heads and --head-dim are needed, or --mla-latent, or --config")
    return CacheSpec.kv(layers, kv_heads, head_dim, dtype, v_head_dim=v_head_dim)


def _decoded(spec: CacheSpec, decode_dtype: str | None, computed: bool) -> CacheSpec:
    """Decode's cache."""
    if decode_dtype is None and computed:
        raise ConfigurationError("--decode-scales needs --decode-dtype")
    dtypes = {component.dtype for components in spec.layers.values() for component in components}
    if decode_dtype is None or dtypes == {decode_dtype}:
        return spec
    into = spec.cast(decode_dtype, computed=computed)
    if into == spec:
        raise ConfigurationError(f"--decode-dtype: there is no conversion from {', '.join(dtypes)} to {decode_dtype}")
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
        "transport": one.transport or None,
        "transport_reason": one.transport_reason,
        "path": one.path or None,
        "path_reason": one.reason,
    }


def _paths(found: Explanation, choices: Sequence[PairChoice]) -> Table:
    taken = _taken(choices)
    table = _table("One request, all ranks", None, "path", "writes", "bytes")
    table.add_column("")
    for name, count in sorted(found.descriptors.items(), key=lambda item: item[1]):
        auto = "" if name not in taken else "auto" if len(taken) == 1 else "auto, for some decode ranks"
        table.add_row(name, f"{count:,}", f"{found.nbytes:,}", auto)
    for name, reason in found.refused.items():
        table.add_row(name, "-", "-", Text(f"cannot: {reason}"))
    return table


def _pairs(choices: Sequence[PairChoice]) -> Table:
    """What each pair of ranks takes, and what it moves."""
    more = len(choices) - SHOWN_PAIRS
    caption = f"and {more:,} more pairs: --json" if more > 0 else None
    names = ("prefill", "decode", "bytes", "segments", "writes", "path", "transport")
    table = _table("What each pair of ranks takes", caption, *names)
    for one in choices[:SHOWN_PAIRS]:
        pair, writes = one.pair, f"{one.pair.descriptors[one.path]:,}" if one.path else "-"
        ranks, counts = (str(pair.writer), str(pair.target)), (f"{pair.nbytes:,}", str(pair.segments))
        table.add_row(*ranks, *counts, writes, one.path or "-", one.transport or "-")
    return table


def _table(title: str, caption: str | None, *names: str) -> Table:
    """A table whose columns of these names are never cut."""
    table = Table(title=title, caption=caption, box=None, pad_edge=False, title_justify="left", caption_justify="left")
    for name in names:
        table.add_column(name, no_wrap=True, justify="left" if name in ("path", "transport") else "right")
    return table
