"""SGLang's pairs: this library's backend beside SGLang's own, each with and without SGLang's staging buffer.

* ``ours``: the defaults.
* ``nixl``: NIXL with UCX, SGLang's defaults: a descriptor for each page and layer, or, where tensor-parallel sizes
  differ, for each row of a page.
* ``mooncake``: Mooncake 0.3.14 over NVLink inside a host (``MC_INTRANODE_NVLINK``), as SGLang documents it.
* ``layered``: the defaults, but with layers that are sent while others are computed.
* ``wire``: the defaults over an emulated wire of 25 GB/s, of ``slow_wire.py``; ``tcp``: over NIXL and TCP.
* ``wire-layered``, ``tcp-layered``: the same as ``layered``. Of these five, a run has those that ``--pairs`` names.
* ``-staging``: ``SGLANG_DISAGG_STAGING_BUFFER``, which SGLang uses where tensor-parallel sizes differ.
* ``alone``: an instance with prefill's GPUs that transfers nothing. What a pair's time to the first token is above
  this one's is its gap, since SGLang's prefill answers only after its transfer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from .cases import CACHE_TOKENS, ROOT, SHARED, SOURCE, TOPOLOGIES, Order, Pair, Spec, places, shared_environment

PAGES = (1, 16, 64)
FIRST_PORT = 21_000
STEP = 1_500
"""Between the ports of two instances: SGLang derives further ones from each."""

_STAGING = {"SGLANG_DISAGG_STAGING_BUFFER": "1"}
_MOONCAKE = {"MC_INTRANODE_NVLINK": "1", "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "INTRA_NODE_NVLINK"}
_TCP = {"UCX_TLS": "tcp,cuda_copy"}
_LAYERED = {"strategy": "auto+layer_pipelined"}
_ORDER: Sequence[Order] = ("at once",)

ALONE = "alone"
PAIRS: Mapping[str, Pair] = {
    one.name: one
    for one in (
        Pair("ours", "ours", _ORDER, engine="sglang"),
        Pair("nixl", "nixl", _ORDER, engine="sglang"),
        Pair("nixl-staging", "nixl", _ORDER, env=_STAGING, engine="sglang"),
        Pair("mooncake", "mooncake", _ORDER, env=_MOONCAKE, engine="sglang"),
        Pair("mooncake-staging", "mooncake", _ORDER, env={**_MOONCAKE, **_STAGING}, engine="sglang"),
        Pair(ALONE, "none", _ORDER, engine="sglang"),
        Pair("layered", "ours", _ORDER, _LAYERED, engine="sglang"),
        Pair("wire", "ours", _ORDER, {"transport": "wire"}, engine="sglang"),
        Pair("wire-layered", "ours", _ORDER, {"transport": "wire", **_LAYERED}, engine="sglang"),
        Pair("tcp", "ours", _ORDER, {"transport": "nixl"}, _TCP, engine="sglang"),
        Pair("tcp-layered", "ours", _ORDER, {"transport": "nixl", **_LAYERED}, _TCP, engine="sglang"),
        Pair("whole", "ours", _ORDER, engine="sglang"),
        Pair("other", "ours", _ORDER, engine="sglang"),
    )
}
"""By name; ``other`` is another source tree of this library, and ``whole`` is one of ``serving.py``."""

ASKED = ("layered", "wire", "wire-layered", "tcp", "tcp-layered", "whole", "other")
"""Pairs that no run has unless they are asked for."""

ORACLE = "nixl, at once"


def pairs_of(topology: str, names: Sequence[str] = (), other: Path | None = None) -> list[Pair]:
    """The pairs of a run; between equal tensor-parallel sizes SGLang does not use its staging buffer.

    Raises:
        ValueError: an unknown name, or ``other`` without its source tree, or the reverse.
    """
    sizes = topology.split("to")
    can = [name for name, pair in PAIRS.items() if not (sizes[0] == sizes[1] and "staging" in pair.name)]
    given = [] if other is None else ["other"]
    chosen = list(names) or [name for name in can if name not in ASKED] + given
    if unknown := [name for name in chosen if name not in can]:
        raise ValueError(f"{topology} has no pairs {', '.join(unknown)}: there are {', '.join(can)}")
    if ("other" in chosen) != (other is not None):
        raise ValueError("the pair 'other' and its source tree go together")
    return [evolve(PAIRS[name], source=other.resolve() if other and name == "other" else SOURCE) for name in chosen]


def engine_args(page: int, tp: int) -> dict[str, Any]:
    """Arguments of an instance of SGLang: no radix cache, so that each request transfers its whole prompt."""
    return {
        "page_size": page,
        "tp_size": tp,
        "dtype": "bfloat16",
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "disable_radix_cache": True,
        "disable_custom_all_reduce": True,
        "cuda_graph_bs_decode": [1, 2, 4, 8, 16],
        "disable_prefill_cuda_graph": True,
        "max_total_tokens": CACHE_TOKENS // 64 * 64,
        # Of what is free when an instance starts; others of the same GPU start beside it.
        "mem_fraction_static": 0.95,
        "context_length": 20_000,
        "max_running_requests": 16,
        "chunked_prefill_size": 8192,
        # The default allocates room in host memory for requests that give way, which delays the start.
        "disaggregation_decode_retraction_backup": "cpu_tensor",
        "skip_server_warmup": True,
        "log_level": "info",
        "host": "127.0.0.1",
    }


def environment(gpus: Sequence[int], source: Path) -> dict[str, str]:
    """What an instance's process gets beside this process's environment."""
    shared = shared_environment(gpus, source)
    paths = [shared["PYTHONPATH"], str(ROOT), str(Path(__file__).with_name("wire"))]
    return {
        "SGLANG_HOST_IP": "127.0.0.1",
        "HOST_IP": "127.0.0.1",
        # The archive of pack_sglang.py has a kernel package for the PyTorch of the host.
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        # The other one, in Rust, is built for a newer PyTorch as well, and ends the process.
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
        "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
        **shared,
        "PYTHONPATH": os.pathsep.join(paths),
    }


def specs(
    pairs: Sequence[Pair],
    topology: str,
    page: int,
    gpus: int,
    model: Path,
    more: Mapping[str, Any] | None = None,
    *,
    share: bool = False,
) -> dict[str, tuple[Spec, ...]]:
    """Prefill and decode of each pair, by the pair's name.

    ``more`` are arguments of all instances; with ``share`` all ranks have the first GPU.
    """
    made: dict[str, tuple[Spec, ...]] = {}
    taken = 0
    placed = ((0,), (0,)) if share else places(topology, gpus)
    sizes = TOPOLOGIES[topology]
    common = {SHARED: "1", "SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS": "1"} if share else {}
    for pair in pairs:
        bootstrap, both = FIRST_PORT + STEP * taken, []
        for role, place, tp in zip(("prefill", "decode"), placed, sizes, strict=True):
            port = FIRST_PORT + STEP * taken
            taken += 1
            args = {**engine_args(page, tp), "port": port + 100, "nccl_port": port + 400, **(more or {})}
            if pair.connector != "none":
                backend = "disagg_kv" if pair.connector == "ours" else pair.connector
                args |= {
                    "disaggregation_mode": role,
                    "disaggregation_transfer_backend": backend,
                    "disaggregation_bootstrap_port": bootstrap,
                }
            config = {"model": str(model), "args": args, "bootstrap_port": bootstrap}
            options = {"DISAGG_KV_SGLANG": json.dumps(dict(pair.options))} if pair.options else {}
            env = {**environment(place, pair.source), **common, **options, **pair.env}
            both.append(Spec(f"{pair.name}-{role}", config, env))
        made[pair.name] = tuple(both[:1] if pair.connector == "none" else both)
    return made
