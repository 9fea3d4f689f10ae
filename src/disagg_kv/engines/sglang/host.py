"""A rank's side from what SGLang says of its server.

SGLang's objects are read by attribute, so this module does not import SGLang.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from ...endpoints import DecodeEndpoint, PrefillEndpoint
from ...errors import UnsupportedError
from ...geometry import Shard
from ...rendezvous import Source
from ..opening import agreed, open_endpoints, queued_work
from .bootstrap import register
from .cache import Buffers, SGLangPool, pool_of
from .options import SGLangOptions
from .rooms import Side

DTYPES = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "float16": "float16", "float32": "float32",
    "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip
"""Element types by SGLang's names of KV cache types."""


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
    """

    tp: int
    rank: int
    heads: int
    latent: bool
    dtype: str
    model: bytes
    device: str


def cache_dtype(name: str, model: str) -> str:
    """The element type of a KV cache.

    Args:
        name: SGLang's ``kv_cache_dtype``.
        model: element type of the model, which ``auto`` means.

    Raises:
        UnsupportedError: a cache whose bytes the plug-in does not know.
    """
    known = DTYPES.get(model if name == "auto" else name)
    if known is None:
        raise UnsupportedError(f"backend 'disagg_kv' does not move KV caches of type {name!r} yet; {sorted(DTYPES)}")
    return known


def refuse(args: Any, features: Mapping[str, bool]) -> None:
    """Raise an :class:`UnsupportedError` for what the plug-in does not move.

    Args:
        args: SGLang's ``KVArgs``.
        features: of SGLang, by name, and whether they are used.
    """
    used = [name for name, on in features.items() if on]
    used += [f"a cache with {getattr(kind, 'value', kind)} states" for kind in args.state_types]
    used += ["a draft model's cache"] if args.num_draft_entries else []
    used += [f"the layout {args.kv_layout}"] if args.kv_layout is not None else []
    if used:
        raise UnsupportedError(f"backend 'disagg_kv' does not support SGLang's {', '.join(used)} yet")


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

    def pool() -> tuple[SGLangPool, list[Shard]]:
        return pool_of(
            Buffers(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens),
            Buffers(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens),
            page=args.page_size,
            heads=facts.heads,
            latent=facts.latent,
            dtype=facts.dtype,
            tp=facts.tp,
            rank=facts.rank,
            model=facts.model,
            device=facts.device,
        )

    opened = open_endpoints(
        options,
        pool,
        instance=instance,
        strategy=options.names,
        tp=facts.tp,
        rank=facts.rank,
        group=group,
        produces=produces,
        consumes=not produces,
    )
    endpoint = opened.sender if produces else opened.receiver
    assert isinstance(endpoint, PrefillEndpoint | DecodeEndpoint)
    side = Side(endpoint, args.page_size, None if opened.on_cpu else queued_work, opened)
    return side, Source(instance, opened.addresses)


def announce(host: str, port: int, source: Source) -> threading.Event:
    """Register an instance at the bootstrap server of its own host; the event that is returned stops the attempts."""
    stopped = threading.Event()
    here = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    register(f"[{here}]:{port}" if ":" in here else f"{here}:{port}", source, stopped)
    return stopped
