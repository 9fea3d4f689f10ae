"""The transfer backend ``disagg_kv`` in SGLang's own classes (SGLang 0.5.23, ``sglang.srt.disaggregation.base.conn``).

SGLang's list of backends is closed. So the plug-in adds a member to it, and answers for this member when SGLang asks
for a backend's classes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import frozen
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.base.conn import (
    BaseKVBootstrapServer,
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    KVTransferMetric,
)
from sglang.srt.disaggregation.utils import DisaggregationMode, KVClassType, MetadataBuffers, TransferBackend
from sglang.srt.environ import envs
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_disagg, get_parallel
from sglang.srt.server_args import add_disagg_transfer_backend_choices

from ...errors import DisaggKVError, UnsupportedError
from ..model import model_digest
from ..opening import queued_work
from .bootstrap import BootstrapServer
from .host import ServerFacts, announce, cache_dtype, common_of, first_token, open_side, prompt_of, refuse
from .options import SGLangOptions
from .passes import Chunk, Passes
from .quantized import scales_of
from .rooms import I32, ReceiverRoom, SenderRoom

NAME = "disagg_kv"

NEW_MANAGER = (
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager",
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._init_kv_manager",
)
NEW_SENDER = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender"
NEW_RECEIVER = "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue"
RUN_BATCH = "sglang.srt.managers.scheduler.Scheduler.run_batch"
CHECKPOINT = "sglang.srt.managers.scheduler.Scheduler.checkpoint_disagg_prefill"
ATTENTION = "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward"
"""Of most backends; what SGLang captures in a graph comes here too, unless the graph has the attention itself."""


_runner: ContextVar[Any] = ContextVar("runner")
"""SGLang's ``ModelRunner``, while a queue makes its manager."""

_request: ContextVar[Any] = ContextVar("request")
"""SGLang's ``Req``, while prefill's queue makes its sender."""


@frozen
class PrefillInfo:
    """What SGLang's decode queue reads of a prefill server."""

    dp_size: int
    follow_bootstrap_room: bool = True


class DisaggKVManager(BaseKVManager):
    """A rank's endpoint."""

    supports_deferred_decode_kv_release = True

    def __init__(
        self, args: Any, disaggregation_mode: DisaggregationMode, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        """SGLang calls this on every rank, once the cache is allocated.

        Raises:
            UnknownNameError: an option of another name.
            ConfigurationError: an option's value that cannot be.
            UnsupportedError: a feature of SGLang that the plug-in does not support.
        """
        self.kv_args = args
        parallel, produces = get_parallel(), disaggregation_mode == DisaggregationMode.PREFILL
        tp = parallel.attn_tp_size
        self.side, self._source = open_side(
            partial(_read, args, server_args, produces, bool(is_mla_backend)),
            args,
            tp=tp,
            produces=produces,
            group=parallel.attn_tp_group.cpu_group if tp > 1 else None,
        )
        self.enable_deferred_decode_kv_release = self.side.defers
        self.prefill_info_table = self
        if produces and parallel.attn_tp_rank == 0:
            self._host, self._port = server_args.host, get_disagg().disaggregation_bootstrap_port
            self.register_to_bootstrap()
        if not produces:
            HookRegistry.register(NEW_RECEIVER, _new_receiver, HookType.AROUND)
        elif self.side.passes is not None:
            HookRegistry.register(RUN_BATCH, partial(_with_layers, self.side.passes), HookType.AROUND)
            HookRegistry.register(ATTENTION, partial(_with_layer, self.side.passes), HookType.AROUND)
        HookRegistry.apply_hooks()

    def register_to_bootstrap(self) -> None:
        """Describe this instance to its bootstrap server."""
        announce(self._host, self._port, self._source, *_data_parallel())

    def get(self, bootstrap_addr: str) -> PrefillInfo | None:
        """As SGLang's table of prefill servers: the one of a bootstrap server, if it is known."""
        count = len(self.side.directory.get(bootstrap_addr))
        return PrefillInfo(count) if count else None

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Ask a bootstrap server; False: it has not answered yet."""
        return self.side.ensure(bootstrap_addr)

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether the pages of a failed request, which SGLang keeps, are free on this rank."""
        return self.side.free(bootstrap_room)

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """SGLang has freed these pages."""
        self.side.kept.pop(bootstrap_room, None)

    def submit_prefill_recompute(self, kv_receiver: DisaggKVReceiver, payload: Any) -> None:
        """SGLang has retracted a request, to compute it again on prefill under the same room: it fails by name."""
        kv_receiver.refuse(UnsupportedError("a retracted request that prefill computes again is not supported yet"))


def _read(args: Any, server_args: Any, produces: bool, latent: bool) -> tuple[SGLangOptions, ServerFacts]:
    """The options, and what the plug-in has to know of the server; raises what it refuses."""
    parallel, disagg, (number, count) = get_parallel(), get_disagg(), _data_parallel()
    follows = parallel.load_balance_method == "follow_bootstrap_room"
    options = SGLangOptions.from_environment(os.environ).of_instance(number, parallel.attn_tp_size)
    layers = produces and options.layered
    refuse(
        args,
        {
            "pipeline parallelism": parallel.pp_size > 1,
            "context parallelism": parallel.attn_cp_size > 1 or server_args.dcp_size > 1,
            "speculative decoding": server_args.speculative_algorithm is not None,
            "hierarchical cache": server_args.enable_hierarchical_cache,
            "KV checksums": disagg.disaggregation_enable_kv_checksum,
            "role switch": disagg.enable_pd_role_switch,
            "automatic truncation": server_args.allow_auto_truncate,
            "several tokenizer workers": server_args.tokenizer_worker_num > 1,
            "allocation on decode after prefill": disagg.disaggregation_decode_allocation_policy != "early",
            "hierarchical sparse attention": server_args.enable_hisparse,
            "own staging buffer (SGLANG_DISAGG_STAGING_BUFFER)": envs.SGLANG_DISAGG_STAGING_BUFFER.get(),
            "vectorized cache layout": os.environ.get("SGLANG_AITER_KV_CACHE_LAYOUT", "nhd") != "nhd",
            "load balancing of data-parallel ranks": produces and count > 1 and not follows,
            "data-parallel attention": parallel.attn_dp_size > 1,
            "two-batch overlap with a strategy that sends layers": layers and server_args.enable_two_batch_overlap,
            "radix cache with a store of its own, with a strategy that sends layers": layers
            and (
                server_args.enable_lmcache
                or server_args.enable_flexkv
                or server_args.enable_unified_cache_external_linker
                or server_args.radix_cache_backend is not None
            ),
            "diffusion models with a strategy that sends layers": layers and server_args.dllm_algorithm is not None,
            "data-parallel ranks on several nodes": produces and count > 1 and parallel.nnodes > 1,
            "query of data-parallel ranks (SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK)": (
                envs.SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK.get()
            ),
        },
    )
    model = ModelConfig.from_server_args(server_args)
    runner, plain = _runner.get(), str(model.dtype).removeprefix("torch.")
    dtype = cache_dtype(args.kv_cache_dtype_str, plain, str(runner.kv_cache_dtype).removeprefix("torch."))
    heads = model.get_total_num_kv_heads()
    if options.common and not produces:
        _check_rows()
    facts = ServerFacts(
        tp=parallel.attn_tp_size,
        rank=parallel.attn_tp_rank,
        heads=heads,
        latent=latent,
        dtype=dtype,
        model=model_digest(server_args.model_path, model.hf_config.to_dict(), model.dtype, model.quantization),
        device="cpu" if server_args.device == "cpu" else f"cuda:{torch.cuda.current_device()}",
        common=common_of(server_args, model.quantization, dtype) if options.common else None,
        scales=tuple(
            scales_of(
                runner.model.modules(), dtype=dtype, layers=len(args.kv_item_lens) // (1 if latent else 2),
                heads=max(1, heads // parallel.attn_tp_size), tp=parallel.attn_tp_size, latent=latent,
                backend=runner.attn_backend,
            )
        ),
        # Memory that SGLang gives back and takes again is other memory than peers have mapped.
        defers=envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get() and not server_args.enable_memory_saver,
    )  # fmt: skip
    return options, facts


def _data_parallel() -> tuple[int, int]:
    """Number of this instance among the data-parallel ranks of its server, each a whole model, and their count."""
    parallel = get_parallel()
    return parallel.dp_rank or 0, parallel.dp_size


def _with_runner(original: Callable[..., Any], queue: Any, *args: Any, **others: Any) -> Any:
    """Around the making of a manager, which SGLang does not give the model.

    SGLang would free the pages of a failed request after 30 s, whatever may still write into them.
    """
    token = _runner.set(queue.scheduler.tp_worker.model_runner)
    try:
        made = original(queue, *args, **others)
    finally:
        _runner.reset(token)
    if isinstance(made, DisaggKVManager) and made.enable_deferred_decode_kv_release:
        queue.transfer_queue.deferred_kv_release_timeout = math.inf
    return made


def _with_request(original: Callable[..., Any], queue: Any, request: Any, *args: Any, **others: Any) -> Any:
    """Around the making of a sender, which SGLang does not give the prompt."""
    token = _request.set(request)
    try:
        return original(queue, request, *args, **others)
    finally:
        _request.reset(token)


def _check_rows() -> None:
    """The first buffer of metadata rows has the first token, the last one the room: the plug-in writes both."""
    rows = MetadataBuffers(1, 1, torch.float32, 1)
    addresses = rows.get_buf_infos()[0]
    if [addresses[0], addresses[-1]] != [rows.output_ids.data_ptr(), rows.bootstrap_room.data_ptr()]:
        raise UnsupportedError("description 'common': SGLang's metadata rows have another order")


def _new_receiver(original: Callable[..., Any], queue: Any, request: Any, *args: Any, **others: Any) -> Any:
    """Around SGLang's decode queue: a receiver learns the prompt, which stream computes, and perhaps the first token.

    Under overlap, the last forward pass of a request that has ended may still write to pages that this one gets.
    """
    made, scheduler = original(queue, request, *args, **others), queue.scheduler
    if isinstance(made.kv_receiver, DisaggKVReceiver):
        overlap = scheduler.enable_overlap and scheduler.device != "cpu"
        busy = partial(queued_work, scheduler.forward_stream) if overlap else None
        try:
            first = first_token(request)
        except DisaggKVError as exc:
            made.kv_receiver.refuse(exc)
        else:
            made.kv_receiver.asked(request.origin_input_ids, busy, first)
    return made


def _with_layers(
    passes: Passes, original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **others: Any
) -> Any:
    """Around a forward pass of prefill, whose rows are announced before it."""
    if not batch.forward_mode.is_extend():
        return original(scheduler, batch, *args, **others)
    page = scheduler.token_to_kv_pool_allocator.page_size
    rows: list[tuple[Any, int]] = []
    for request in batch.reqs:
        if isinstance(request.disagg_kv_sender, DisaggKVSender):
            length = len(request.origin_input_ids)
            rows.append((request, length if request.extend_end >= length else request.extend_end // page * page))
    chunks: list[Chunk] = [
        (request.disagg_kv_sender, stop, pages)
        for (request, stop), pages in zip(rows, _pages(scheduler, page, rows), strict=True)
    ]
    stream = scheduler.forward_stream if scheduler.enable_overlap else None
    with passes.computing(chunks, None if scheduler.device == "cpu" else partial(queued_work, stream)):
        return original(scheduler, batch, *args, **others)


def _pages(scheduler: Any, page: int, rows: Sequence[tuple[Any, int]]) -> Sequence[I32]:
    """The pages of the next rows of some requests, as SGLang gives them to its senders; the GPU is read once."""
    slots = [
        scheduler.req_to_token_pool.req_to_token[
            request.kv.req_pool_idx, request.disagg_kv_sender.next_row : stop : page
        ]
        for request, stop in rows
    ]
    if not slots:
        return ()
    every = scheduler.token_to_kv_pool_allocator.translate_kv_indices_for_transfer(torch.cat(slots))
    return np.split((every // page).cpu().numpy(), np.cumsum([len(one) for one in slots[:-1]]))


def _published_later(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Around the insertion of a prefill request's rows into the radix cache, after each of its passes.

    Of rows that the cache has already it frees the request's own ones, of which layers may still be sent. So it gets
    them when SGLang releases the request. Its next pass begins where this one ended, as of one that SGLang keeps out.
    """
    sender = request.disagg_kv_sender
    if not isinstance(sender, DisaggKVSender) or sender.kv_mgr.side.passes is None or request.pending_bootstrap:
        return original(scheduler, request)
    request.prefix_len = request.extend_end
    return None


def _with_layer(
    passes: Passes,
    original: Callable[..., Any],
    backend: Any,
    q: Any,
    k: Any,
    v: Any,
    layer: Any,
    *args: Any,
    **others: Any,
) -> Any:
    """Around the attention of a layer; without K it writes no rows."""
    passes.layer_begins(layer.layer_id, writes=k is not None)
    return original(backend, q, k, v, layer, *args, **others)


class DisaggKVSender(SenderRoom, BaseKVSender):
    """A request of a prefill rank."""

    def __init__(
        self,
        mgr: DisaggKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self.kv_mgr = mgr
        super().__init__(mgr.side, bootstrap_room, prompt_of(_request.get()))
        number, count = _data_parallel()
        if count > 1 and not req_has_disagg_prefill_dp_rank and bootstrap_room % count != number:
            self.refuse(
                UnsupportedError(
                    f"room {bootstrap_room}: decode expects data-parallel rank {bootstrap_room % count} of prefill, "
                    f"not {number}: a router that names another rank has to tell decode, too"
                )
            )

    def get_transfer_metric(self) -> KVTransferMetric:
        """For SGLang's metrics."""
        return KVTransferMetric(
            transfer_latency_s=self.report.seconds.get("wire"), transfer_total_bytes=self.report.nbytes
        )


class DisaggKVReceiver(ReceiverRoom, BaseKVReceiver):
    """A request of a decode rank."""

    require_staging = False

    def __init__(self, mgr: DisaggKVManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr = mgr
        super().__init__(mgr.side, bootstrap_addr, bootstrap_room)


class DisaggKVBootstrapServer(BootstrapServer, BaseKVBootstrapServer):
    """Where decode finds this server."""


def register_backend() -> None:
    """Make the backend known to SGLang."""
    member = object.__new__(TransferBackend)
    member._name_, member._value_ = NAME.upper(), NAME
    TransferBackend._member_names_.append(member._name_)
    TransferBackend._member_map_[member._name_] = member
    TransferBackend._value2member_map_[NAME] = member
    add_disagg_transfer_backend_choices([NAME])
    classes = {
        KVClassType.MANAGER: DisaggKVManager,
        KVClassType.SENDER: DisaggKVSender,
        KVClassType.RECEIVER: DisaggKVReceiver,
        KVClassType.BOOTSTRAP_SERVER: DisaggKVBootstrapServer,
    }

    def kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
        ours = transfer_backend is member and class_type in classes
        return classes[class_type] if ours else original(transfer_backend, class_type)

    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", kv_class, HookType.AROUND)
    for queue in NEW_MANAGER:
        HookRegistry.register(queue, _with_runner, HookType.AROUND)
    HookRegistry.register(NEW_SENDER, _with_request, HookType.AROUND)
    HookRegistry.register(CHECKPOINT, _published_later, HookType.AROUND)
