"""A rank's side from what SGLang says of its server.

SGLang's objects are read by attribute, so this module does not import SGLang.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen

from ...endpoints import DecodeEndpoint, PrefillEndpoint
from ...errors import RemoteProtocolError, UnsupportedError
from ...geometry import Shard
from ...rendezvous import Source
from ..common import CommonCache, common_cache, read_config
from ..opening import agreed, open_endpoints, queued_work
from .bootstrap import register
from .cache import Buffers, SGLangPool, common_pool_of, pool_of
from .options import SGLangOptions
from .passes import Passes
from .quantized import Scales
from .side import Side

DTYPES = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "float16": "float16", "float32": "float32",
    "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip
"""Element types by SGLang's names of KV cache types."""

FIRST_TOKEN = "disagg_kv_first_token"
"""A key of a request's ``custom_params``: the first token of the output, if prefill is another engine."""


@frozen(kw_only=True)
class ServerFacts:
    """A server of SGLang, as the plug-in needs it.

    Args:
        tp: number of tensor-parallel ranks.
        rank: this rank.
        heads: KV heads of the whole model.
        latent: the cache has MLA's latents.
        dtype: element type of the cache; see :func:`cache_dtype`.
        model: identifies the model.
        device: where the cache is, such as ``cpu`` or ``cuda:0``.
        common: the cache in the terms that engines share; None: it is described as SGLang stores it.
        scales: of each layer those of K and of V, for a float8; empty: 1.
        defers: the server keeps the pages of a request that has failed on decode, until nothing touches them.
    """

    tp: int
    rank: int
    heads: int
    latent: bool
    dtype: str
    model: bytes
    device: str
    common: CommonCache | None = None
    scales: tuple[tuple[Scales, Scales], ...] = ()
    defers: bool = False


def common_of(server_args: Any, quantization: str | None, dtype: str) -> CommonCache:
    """The cache of a server in the terms that engines share.

    Args:
        server_args: SGLang's ``ServerArgs``.
        quantization: of the weights; None: none.
        dtype: element type of the cache, see :func:`cache_dtype`.

    Raises:
        UnsupportedError: it is not known that another engine stores the same numbers.
    """
    reasons = {
        f"device {server_args.device}": server_args.device != "cpu",
        f"quantization {quantization}": quantization is not None,
        f"a quantized cache, {dtype}": dtype.startswith("float8"),
        "json-model-override-args": server_args.json_model_override_args not in ("{}", None),
    }
    if used := [reason for reason, on in reasons.items() if on]:
        raise UnsupportedError(f"description 'common' does not support SGLang's {', '.join(used)} yet")
    path, revision = server_args.model_path, server_args.revision
    return common_cache(read_config(path, revision), path, revision, dtype)


def first_token(request: Any) -> int | None:
    """The first token of the output, which a router took from the answer of another engine; None: there is none.

    Raises:
        RemoteProtocolError: it is no token.
        UnsupportedError: the request asks for more than a token, which the other engine does not give.
    """
    params = request.sampling_params.custom_params
    token = params.get(FIRST_TOKEN) if isinstance(params, dict) else None
    if token is None:
        return None
    if type(token) is not int or not 0 <= token < 1 << 31:
        raise RemoteProtocolError(f"custom_params: {FIRST_TOKEN} {token!r:.200} is no token")
    extras = ("return_logprob", "return_hidden_states", "return_sampling_mask")
    if asked := [name for name in extras if getattr(request, name)]:
        raise UnsupportedError(f"{', '.join(asked)} of a token that another engine has computed")
    return token


def prompt_of(request: Any) -> Sequence[int] | None:
    """The prompt of a request of prefill, for comparison with decode's; None: tokens do not say all of it."""
    others = request.multimodal_inputs is not None or request.input_embeds is not None
    return None if others else request.origin_input_ids


def cache_dtype(name: str, model: str, kept: str) -> str:
    """The element type of a KV cache.

    Args:
        name: SGLang's ``kv_cache_dtype``.
        model: element type of the model, which ``auto`` means.
        kept: element type of SGLang's pool.

    Raises:
        UnsupportedError: a cache whose bytes the plug-in does not know.
    """
    known = DTYPES.get(model if name == "auto" else name)
    if known is None:
        raise UnsupportedError(f"backend 'disagg_kv' does not move KV caches of type {name!r} yet; {sorted(DTYPES)}")
    if known != kept:
        raise UnsupportedError(f"backend 'disagg_kv' does not move KV caches of {kept} yet; {name!r} means {known}")
    return known


REASONS: Mapping[str, str] = {
    "pipeline parallelism": "a rank has some of the layers, and only the last stage has the first token",
    "context parallelism": "a rank has some of the tokens",
    "speculative decoding": "the cache of the draft model and its states are not described",
    "hierarchical cache": "decode would also take rows from host memory, of which the backend is not told",
    "KV checksums": "they compare equal layouts alone; set the option verify instead",
    "role switch": "an endpoint keeps its side",
    "automatic truncation": "each server would cut a prompt at a length of its own",
    "several tokenizer workers": "each would start a bootstrap server",
    "allocation on decode after prefill": "prefill would have to keep rows for which decode has no pages",
    "hierarchical sparse attention": "its pages are in host memory",
    "own staging buffer (SGLANG_DISAGG_STAGING_BUFFER)": "this backend has its own",
    "vectorized cache layout": "the bytes of a head are not in one piece",
    "load balancing of data-parallel ranks": "decode finds the rank of a request by follow_bootstrap_room alone",
    "data-parallel attention": "SGLang does not run it on CPUs, so no test has compared its tokens",
    "two-batch overlap with a strategy that sends layers": "each layer is computed in two parts",
    "radix cache with a store of its own, with a strategy that sends layers": "it may free rows before they are sent",
    "diffusion models with a strategy that sends layers": "rows are computed several times",
    "data-parallel ranks on several nodes": "the bootstrap server takes descriptions from its own host alone",
    "query of data-parallel ranks (SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK)": "the bootstrap server has none",
}
"""What of SGLang is refused when a server starts, and why."""

BESIDE: Mapping[str, str] = {
    "swa": "layers with a sliding window have pages of their own, for the window alone",
    "swa_ring": "layers with a sliding window have a ring of their own",
    "mamba": "a request has one state in place of rows",
    "dsa": "a sparse index has a buffer of its own",
    "dsa_tail": "a sparse index has a buffer of its own",
    "block_scale": "scales lie in buffers of their own",
    "block_scale_swa": "scales lie in buffers of their own",
}
"""Kinds of states that SGLang would move beside its pages, and what they are."""


def refuse(args: Any, used: Mapping[str, bool]) -> None:
    """Raise an :class:`UnsupportedError` for what the plug-in does not move, with the reasons.

    Args:
        args: SGLang's ``KVArgs``.
        used: which of :data:`REASONS` are used.
    """
    found = [f"{name} ({REASONS[name]})" for name, on in used.items() if on]
    kinds = [str(getattr(kind, "value", kind)) for kind in args.state_types]
    found += [f"a cache with {kind} states ({BESIDE.get(kind, 'they are not described')})" for kind in kinds]
    found += ["a draft model's cache (its layers are not described)"] if args.num_draft_entries else []
    found += [f"the layout {args.kv_layout} (its bytes are not described)"] if args.kv_layout is not None else []
    if found:
        raise UnsupportedError(f"backend 'disagg_kv' does not support SGLang's {', '.join(found)} yet")


def open_side(
    read: Callable[[], tuple[SGLangOptions, ServerFacts]], args: Any, *, tp: int, produces: bool, group: Any
) -> tuple[Side, Source]:
    """This rank's side, and how decode finds the instance. All ranks of the instance call.

    Args:
        read: the options of the plug-in, and what it has to know of the server. If it raises on one rank, the others
            raise a :class:`~disagg_kv.errors.ConfigurationError` that names that rank.
        args: SGLang's ``KVArgs``.
        tp: number of tensor-parallel ranks.
        produces: this is a prefill server.
        group: SGLang's group of the tensor-parallel ranks on the CPU.
    """
    own = f"sglang {socket.gethostname()} {os.getpid()} {uuid.uuid4().hex[:12]}"
    (options, facts), everyone = agreed(lambda: (read(), {"instance": own}), "the SGLang server", tp, group)
    instance = everyone[0]["instance"]

    made: list[SGLangPool] = []

    def pool() -> tuple[SGLangPool, list[Shard]]:
        found, shards = _pool(args, facts)
        made.append(found)
        return found, shards

    opened = open_endpoints(
        options,
        pool,
        instance=instance,
        strategy=options.names(exposes=produces or facts.defers),
        tp=facts.tp,
        rank=facts.rank,
        group=group,
        produces=produces,
        consumes=not produces,
    )
    endpoint = opened.sender if produces else opened.receiver
    assert isinstance(endpoint, PrefillEndpoint | DecodeEndpoint)
    rows = made[0] if facts.common is not None and not produces else None
    mark, defers = None if opened.on_cpu else queued_work, facts.defers and not produces
    side = Side(endpoint, args.page_size, mark, opened, rows, defers)
    if options.layered and isinstance(endpoint, PrefillEndpoint):
        side.passes = Passes(endpoint)
    return side, Source(instance, opened.addresses)


def _pool(args: Any, facts: ServerFacts) -> tuple[SGLangPool, list[Shard]]:
    kv = Buffers(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)
    rows = Buffers(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens)
    place: dict[str, Any] = {"page": args.page_size, "tp": facts.tp, "rank": facts.rank, "device": facts.device}
    if facts.common is not None:
        return common_pool_of(facts.common, kv, rows, **place)
    return pool_of(
        kv, rows, heads=facts.heads, latent=facts.latent, dtype=facts.dtype, model=facts.model, scales=facts.scales,
        **place,
    )  # fmt: skip


def announce(host: str, port: int, source: Source, rank: int = 0, count: int = 1) -> threading.Event:
    """Register an instance at the bootstrap server of its own host; the event that is returned stops the attempts.

    ``rank`` is its data-parallel rank, of ``count``.
    """
    stopped = threading.Event()
    here = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    register(f"[{here}]:{port}" if ":" in here else f"{here}:{port}", source, stopped, rank, count)
    return stopped
