"""Tables of the engines' adapters beside the engines' own."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.tables import Found, table


def vllm(found: Found) -> str:
    """The connector in vLLM, and an engine that transfers nothing."""

    def row(of: Found) -> list[str]:
        times = [_ms(of[f"{name}_ms"]) for name in ("disagg_kv", "NixlConnector", "alone")]
        return [f"{of['tp']}{', prefill busy' if of['busy'] else ''}", str(of["requests"]), *times,
                f"{of['load_ms']:.1f}", _ratio(of)]  # fmt: skip

    head = ["TP", "requests", "ours", "NixlConnector", "no transfer", "load", "ours / theirs"]
    unused = found["unused"]
    said = (
        f"An engine that transfers nothing, with the connector over without it, {unused['turns']} turns: "
        f"**{unused['ratio']:.3f}** ({unused['low']:.3f} to {unused['high']:.3f}) of the time."
    )
    return f"Decode's first token, ms, p50 / p95:\n\n{table([head, *map(row, found['latency'])])}\n\n{said}"


def sglang(found: Found) -> str:
    """The plug-in in SGLang."""
    rows = (
        [of["tp"], str(of["requests"]), _ms(of["disagg_kv_ms"]), _ms(of["mooncake_tcp_ms"]), _ratio(of)]
        for of in found["latency"]
    )
    head = ["TP", "requests", "ours", "mooncake_tcp", "ours / theirs"]
    return f"Prefill and decode's first token, ms, p50 / p95:\n\n{table([head, *rows])}"


GOOD = ("right tokens", "error")
"""What a request with a wrong reference may come to."""


def wrong(found: Found) -> str:
    """Wrong references, and what the connectors answer."""
    cases: dict[str, dict[str, str]] = {}
    for of in found["cases"]:
        cases.setdefault(of["case"], {})[of["connector"]] = of["outcome"]

    def cell(outcome: str) -> str:
        return outcome if outcome in GOOD else f"**{outcome}**"

    rows = ([case, cell(of["disagg_kv"]), cell(of["NixlConnector"])] for case, of in cases.items())
    return table([["reference", "ours", "`NixlConnector`"], *rows])


def _ms(of: Mapping[str, float]) -> str:
    return f"{of['p50']:.1f} / {of['p95']:.1f}"


def _ratio(of: Found) -> str:
    return f"**{of['ratio']:.2f}** ({of['low']:.2f} to {of['high']:.2f})"
