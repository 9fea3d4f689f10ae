"""What a run starts: pairs of instances, their GPUs and settings, and the orders in which a router asks them.

Settings that all pairs share are those of a server that decodes with CUDA graphs. Prefix caches are off, so that each
request transfers its whole prompt. Each connector has the settings that are best for it on one host:

* ``ours``: the defaults; only the staging memory is smaller, since copies of mapped pages do not use it.
* ``nixl`` and ``push``: ``NixlConnector`` reads from prefill, ``NixlPushConnector`` writes to decode. The defaults: UCX
  with four threads and a progress thread, and the cache layout ``LBHNC``, which the connectors choose. NIXL posts a
  descriptor for each block and layer there.
* ``nixl-packed`` and ``push-packed``: the same with ``VLLM_KV_CACHE_LAYOUT=BHLNC``. All layers of a block lie together,
  and NIXL posts a descriptor for each block. vLLM refuses that between different tensor-parallel sizes.

The roles are ``kv_producer`` and ``kv_consumer``, as vLLM recommends.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attrs import evolve, frozen

from .model import BYTES_PER_TOKEN

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
"""Of this checkout's library."""

Connector = Literal["ours", "nixl", "push", "mooncake", "none"]
Engine = Literal["vllm", "sglang"]
Order = Literal["after prefill", "at once"]

TOPOLOGIES: Mapping[str, tuple[int, int]] = {
    "1to1": (1, 1),
    "2to1": (2, 1),
    "1to2": (1, 2),
    "2to2": (2, 2),
    "4to1": (4, 1),
}
"""Tensor-parallel sizes of prefill and decode."""

BLOCKS = (16, 64, 128)
LENGTHS = (512, 4096, 16384)
"""Tokens of a prompt that is alone."""

LOAD_TOKENS = 4096
"""Tokens of each prompt where several are in flight."""

LOADS: Mapping[int, int] = {8: 40, 16: 48}
"""Requests of a round, by how many are in flight."""

CACHE_TOKENS = 72_000
"""What the cache of an instance holds: 16 prompts in flight, and some whose blocks are about to be freed."""

FIRST_PORT = 5600

SHARED = "ENGINES_GPU_SHARED"
"""Where this variable is set, all ranks of an instance of SGLang have one GPU."""


@frozen
class Pair:
    """A prefill and a decode instance of one connector.

    Args:
        name: in the command line and in tables.
        connector: of both instances.
        orders: in which the router can ask; the first must be one that needs no earlier request.
        options: ``kv_connector_extra_config``.
        env: of both instances.
        source: the library's source tree.
        engine: of both instances.
    """

    name: str
    connector: Connector
    orders: Sequence[Order] = ("after prefill", "at once")
    options: Mapping[str, object] = {}
    env: Mapping[str, str] = {}
    source: Path = SOURCE
    engine: Engine = "vllm"


@frozen
class Mode:
    """A pair, asked in one order: what a row of the tables is about."""

    pair: str
    order: Order

    @property
    def name(self) -> str:
        """In results and tables."""
        return f"{self.pair}, {self.order}"


@frozen
class Spec:
    """An instance to start: its name, what its process is given, and its environment."""

    name: str
    config: Mapping[str, Any]
    env: Mapping[str, str]


_OURS: Mapping[str, object] = {"staging_bytes": 1 << 30}
_PACKED = {"VLLM_KV_CACHE_LAYOUT": "BHLNC"}

PAIRS: Mapping[str, Pair] = {
    one.name: one
    for one in (
        Pair("ours", "ours", options=_OURS),
        Pair("nixl", "nixl", ("after prefill",)),
        Pair("push", "push"),
        Pair("nixl-packed", "nixl", ("after prefill",), env=_PACKED),
        Pair("push-packed", "push", env=_PACKED),
        Pair("other", "ours", options=_OURS),
    )
}
"""By name; ``other`` is another source tree of this library."""

ORACLE = "nixl, after prefill"
"""The mode whose tokens all others are compared with."""

PEERS: Mapping[str, Sequence[str]] = {
    "ours, at once": (
        "push, at once", "push-packed, at once", "push, after prefill", "nixl, after prefill",
        "nixl-packed, after prefill", "other, at once",
    ),
    "ours, after prefill": (
        "nixl, after prefill", "nixl-packed, after prefill", "push, after prefill", "push-packed, after prefill",
        "other, after prefill",
    ),
    "layered, at once": ("ours, at once",),
    "wire-layered, at once": ("wire, at once",),
    "tcp-layered, at once": ("tcp, at once",),
}  # fmt: skip
"""What our modes are compared with, the most important first."""


def pairs_of(topology: str, names: Sequence[str] = (), other: Path | None = None) -> list[Pair]:
    """The pairs of a run.

    Args:
        topology: one of ``TOPOLOGIES``.
        names: of pairs; empty: all that can run, with ``other`` only if there is one.
        other: the source tree of the pair ``other``.

    Raises:
        ValueError: an unknown name, a pair that cannot run, or ``other`` without its source tree, or the reverse.
    """
    prefill, decode = TOPOLOGIES[topology]
    can = [name for name, pair in PAIRS.items() if not pair.env or prefill == decode]
    chosen = list(names) or [name for name in can if name != "other" or other is not None]
    if unknown := [name for name in chosen if name not in can]:
        raise ValueError(f"{topology} has no pairs {', '.join(unknown)}: there are {', '.join(can)}")
    if ("other" in chosen) != (other is not None):
        raise ValueError("the pair 'other' and its source tree go together")
    given = PAIRS if other is None else {**PAIRS, "other": evolve(PAIRS["other"], source=other.resolve())}
    return [given[name] for name in chosen]


def modes_of(pairs: Sequence[Pair]) -> list[Mode]:
    """All orders of all pairs."""
    return [Mode(pair.name, order) for pair in pairs for order in pair.orders]


def places(topology: str, gpus: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The GPUs of prefill, from the first, and of decode, up to the last.

    Where a host has fewer GPUs than ranks, a rank of prefill and one of decode share a GPU.

    Raises:
        ValueError: too few GPUs: of 2to2, some rank would have its peer on its own GPU only.
    """
    prefill, decode = TOPOLOGIES[topology]
    least = 4 if prefill == decode == 2 else max(prefill, decode)
    if gpus < least:
        raise ValueError(f"{topology} needs {least} GPUs, and there are {gpus}")
    return tuple(range(prefill)), tuple(range(gpus - decode, gpus))


def engine_args(block: int, tp: int) -> dict[str, Any]:
    """Arguments of an instance of vLLM; several instances share a GPU, so the size of the cache is given."""
    return {
        "block_size": block,
        "tensor_parallel_size": tp,
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
        "max_model_len": 20_000,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": CACHE_TOKENS * BYTES_PER_TOKEN // tp,
        "disable_custom_all_reduce": True,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
        },
    }


def transfer(pair: Pair, role: str) -> dict[str, Any]:
    """The ``KVTransferConfig`` of an instance of vLLM."""
    config: dict[str, Any] = {"kv_role": role, "kv_connector_extra_config": dict(pair.options)}
    if pair.connector == "ours":
        return {"kv_connector": "DisaggKVConnector", "kv_connector_module_path": "disagg_kv.engines.vllm", **config}
    name = {"nixl": "NixlConnector", "push": "NixlPushConnector"}[pair.connector]
    return {"kv_connector": name, "kv_buffer_device": "cuda", **config}


def shared_environment(gpus: Sequence[int], source: Path) -> dict[str, str]:
    """What the processes of either engine get."""
    paths = [str(source), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        "PYTHONPATH": os.pathsep.join(paths),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "UCX_MODULES": "^efa",
        # Multicast over NVLink is not allowed everywhere.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "4",
        "TRITON_CACHE_DIR": str(Path(tempfile.gettempdir(), "triton_cache")),
    }


def environment(port: int, gpus: Sequence[int], source: Path) -> dict[str, str]:
    """What an instance's process gets beside this process's environment."""
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "VLLM_HOST_IP": "127.0.0.1",
        # FlashInfer is not installed everywhere.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_CACHE_ROOT": str(Path(tempfile.gettempdir(), "vllm_cache")),
        **shared_environment(gpus, source),
    }


def specs(pairs: Sequence[Pair], topology: str, block: int, gpus: int, model: Path) -> dict[str, tuple[Spec, ...]]:
    """Prefill and decode of each pair, by the pair's name."""
    made: dict[str, tuple[Spec, ...]] = {}
    for pair in pairs:
        both: list[Spec] = []
        for role, place in zip(("kv_producer", "kv_consumer"), places(topology, gpus), strict=True):
            name = f"{pair.name}-{'prefill' if role == 'kv_producer' else 'decode'}"
            port = FIRST_PORT + 20 * (2 * len(made) + len(both))
            config = {
                "model": str(model),
                "args": engine_args(block, len(place)),
                "kv": {**transfer(pair, role), "engine_id": name},
            }
            both.append(Spec(name, config, {**environment(port, place, pair.source), **pair.env}))
        made[pair.name] = both[0], both[1]
    return made
