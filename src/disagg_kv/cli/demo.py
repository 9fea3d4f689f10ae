"""``disagg-kv demo``: a real model's cache from tensor-parallel prefill processes to decode processes, and checked."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer
from rich.table import Table
from rich.text import Text

from .options import DecodePageSize, Device, Layers, PageSize, Verify, number
from .output import Json, JsonFlag, emit, progress

if TYPE_CHECKING:
    from ..engines.hf.demo import DemoConfig, Report


class Inject(StrEnum):
    """The errors that ``--inject`` can introduce."""

    swap_heads = "swap-heads"
    negate = "negate"


class Model(StrEnum):
    """The architecture of the model."""

    llama = "llama"
    mla = "mla"
    hybrid = "hybrid"
    mamba = "mamba"
    window = "window"


ModelOption = Annotated[
    Model, typer.Option(help="Llama; latents (DeepSeek-V3); states (Qwen3-Next, Falcon-H1); a window (Qwen3).")
]
Transport = Annotated[
    str | None,
    typer.Option(help="A transport, or several joined by +; default: auto, which takes what reaches the peers."),
]
Turns = Annotated[
    int, typer.Option(min=1, help="Prompts per conversation; a later one adds 48 tokens to the conversation so far.")
]
BothWays = Annotated[
    bool, typer.Option(help="Before a later prompt, prefill takes from decode the rows that it lacks; needs --turns.")
]
PrefillInstances = Annotated[int, typer.Option(min=1, help="Prefill instances that take turns, with --both-ways.")]
Evict = Annotated[
    int | None, typer.Option(min=1, help="The turn before which decode evicts all pages, with --both-ways.")
]
InjectOption = Annotated[
    Inject | None,
    typer.Option(help="Introduce an error: exchange KV heads 0 and 1 in the gather, or change signs."),
]
Dtype = Annotated[
    str | None,
    typer.Option(help="Dtype of prefill's cache: float32 [default], bfloat16 [default for a float8 decode], float16."),
]
LayerGroup = Annotated[int, typer.Option(min=1, help="Layers per group, with the schedule layer_pipelined.")]


def demo(
    model: ModelOption = Model.llama,
    prefill_tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel processes of a prefill stage.")] = 4,
    prefill_pp: Annotated[int, typer.Option(min=1, help="Pipeline stages of prefill.")] = 1,
    decode_tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel processes of a decode stage.")] = 1,
    decode_pp: Annotated[int, typer.Option(min=1, help="Pipeline stages of decode.")] = 1,
    strategy: Annotated[str, typer.Option(help="The strategy: staged, slice, direct, auto ...")] = "staged",
    transport: Transport = None,
    device: Annotated[Device, typer.Option(help="Device of models and caches; cuda: all GPUs.")] = "cpu",
    transport_module: Annotated[str | None, typer.Option(help="A module that registers the transport.")] = None,
    dtype: Dtype = None,
    decode_dtype: Annotated[str | None, typer.Option(help="Dtype of decode's cache: converted on the way.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Number of conversations.")] = 4,
    turns: Turns = 1,
    both_ways: BothWays = False,
    prefill_instances: PrefillInstances = 1,
    evict: Evict = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per prompt.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the shortest prompt.")] = 384,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one forward pass of prefill.")] = 150,
    page_size: PageSize = 16,
    decode_page_size: DecodePageSize = None,
    layers: Layers = 4,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads of the model; both TP sizes divide it.")] = 8,
    inject: InjectOption = None,
    layer_group: LayerGroup = 1,
    trace: Annotated[Path | None, typer.Option(help="Write a trace of the endpoints for ui.perfetto.dev.")] = None,
    verify: Annotated[Verify, typer.Option(help="Verify received data with checksums.")] = "off",
    timeout: Annotated[float, number(1, text="Seconds after which the demo fails.")] = 300.0,
    as_json: JsonFlag = False,
) -> None:
    """Move a model's cache between process groups, generate from it, and compare tokens and bytes.

    A model with random weights runs prefill on some processes and decode on others; one more
    process runs the whole model. Exit code 0: the same tokens, and every byte where it belongs.
    """
    from ..engines.hf.demo import DemoConfig
    from ..transports.registry import AUTO

    config = DemoConfig(
        model=model.value,
        prefill_tp=prefill_tp,
        prefill_pp=prefill_pp,
        decode_tp=decode_tp,
        decode_pp=decode_pp,
        strategy=strategy,
        transport=transport or AUTO,
        device=device,
        transport_module=transport_module,
        dtype=dtype,
        decode_dtype=decode_dtype,
        requests=requests,
        turns=turns,
        both_ways=both_ways,
        prefill_instances=prefill_instances,
        evict=evict,
        max_new_tokens=max_new_tokens,
        prompt_tokens=prompt_tokens,
        chunk_tokens=chunk_tokens,
        prefill_page_size=page_size,
        decode_page_size=decode_page_size or page_size,
        layers=layers,
        kv_heads=kv_heads,
        inject=inject.value if inject else None,
        layer_group=layer_group,
        trace=None if trace is None else str(trace.resolve()),
        verify=verify,
        timeout_s=timeout,
    )
    _show(config, _run(config), as_json=as_json)


def _run(config: DemoConfig) -> Report:
    """Run it behind a progress bar."""
    from ..engines.hf.demo import run_demo, steps

    with progress() as bar:
        task = bar.add_task("starting", total=steps(config))
        return run_demo(
            config, lambda one: bar.update(task, advance=1, description=f"{one.role} {one.rank}: {one.kind}")
        )


def _show(config: DemoConfig, report: Report, *, as_json: bool) -> None:
    """Print the report; exit with 1 after a failure."""
    tables = [
        moved(config, report),
        _ranks(report),
        *([_turns(report, back=config.both_ways)] if config.turns > 1 else ()),
    ]
    emit(document(report), *tables, verdict(report), as_json=as_json)
    if not report.ok:
        raise typer.Exit(1)


def document(report: Report) -> dict[str, Json]:
    """The report as JSON."""
    found: dict[str, Json] = attrs.asdict(report)
    return {"ok": found.pop("ok"), **found}


def verdict(report: Report) -> Text:
    """One line: success, or the reasons for the failure."""
    wrong = [] if report.tokens_equal else ["the tokens differ from those of one process"]
    if report.wrong_bytes:
        wrong.append(f"{report.wrong_bytes:,} bytes are wrong")
    if report.stray_bytes:
        wrong.append(f"{report.stray_bytes:,} other bytes were changed")
    if not report.ok:
        return Text(f"FAILED: {', '.join(wrong)}", "red")
    return Text("OK: the tokens are those of one process, and every byte is right", "green")


def moved(config: DemoConfig, report: Report) -> Table:
    """Bytes, writes and times of the transfers."""
    stages = "" if report.prefill_pp == report.decode_pp == 1 else f", PP {report.prefill_pp} -> {report.decode_pp}"
    split = f"TP {report.prefill_tp} -> {report.decode_tp}{stages}"
    carrier = "+".join(report.transports) or report.transport
    table = Table("what", "", title=f"{report.model}, {split}, {report.strategy}, {carrier}")
    per_token = f"{report.descriptors:,} (one per token and head slice: {report.descriptors_slice:,})"
    rows = {
        "requests": f"{report.requests} ({report.prompt_tokens:,} tokens, {report.new_tokens} new ones each)",
        "chunks": f"{config.passes} forward passes of prefill",
        "KV bytes": _kv_bytes(report),
        "writes": per_token,
        "path": ", ".join(report.paths),
        "GB/s": f"{report.gb_per_s:.2f} while bytes were in flight",
        **{f"{name} s": f"{seconds:.3f}" for name, seconds in report.phases.items()},
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _kv_bytes(report: Report) -> str:
    if report.dtype == report.decode_dtype:
        return f"{report.kv_bytes:,}"
    return f"{report.kv_bytes:,} of {report.decode_dtype} (of {report.dtype}: {report.kv_bytes_unconverted:,})"


def _turns(report: Report, *, back: bool) -> Table:
    columns = ["turn", "prompt tokens", "held by decode", "KV bytes", "at best"]
    table = Table(*columns, *(["sent back", "at best"] if back else []), title="Turns")
    for place, turn in enumerate(report.turns):
        sizes = [turn.prompt_tokens, turn.held_tokens, turn.kv_bytes, turn.kv_bytes_ideal]
        sizes += [turn.returned_bytes, turn.returned_bytes_ideal] if back else []
        table.add_row(str(place), *(f"{size:,}" for size in sizes))
    return table


def _ranks(report: Report) -> Table:
    table = Table("rank", "pid", "KV heads", "bytes", "writes", title="Processes")
    for rank in report.ranks:
        heads = f"{rank.kv_heads[0]}-{rank.kv_heads[-1]}" if len(rank.kv_heads) > 1 else str(rank.kv_heads[0])
        table.add_row(f"{rank.role} {rank.rank}", str(rank.pid), heads, f"{rank.nbytes:,}", f"{rank.descriptors:,}")
    return table
