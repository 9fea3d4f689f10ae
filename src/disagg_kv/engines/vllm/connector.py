"""vLLM's hooks (vLLM 0.32, ``vllm.distributed.kv_transfer.kv_connector.v1.base``).

vLLM makes one connector in the scheduler's process and one in each worker's. Each hook calls one method of that
process' side. What a hook raises is logged, and the hook returns what does least harm: an exception in one worker's
hook would hang the other workers. One error ends the engine: if an endpoint is broken, a peer may still read or write
blocks that vLLM would use again.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tp_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ...errors import EndpointBrokenError
from ..opening import Opened
from ..options import EngineOptions
from ..versions import require
from .element_order import check_order
from .endpoints import open_worker
from .host import facts, refuse_layered, refuse_states
from .scheduler import SchedulerSide
from .stats import COUNTERS, FAILURES, HISTOGRAMS, REASONS, logged, merged
from .work import RankAddress, StepWork
from .worker import WorkerSide

init_logger(__name__)
log = logging.getLogger("vllm.disagg_kv")

KVConnectorMetadata.register(StepWork)
KVConnectorHandshakeMetadata.register(RankAddress)

EXTRA_CONFIG = "kv_connector_extra_config"
"""Where vLLM's user sets the connector's options."""

PREFIX = "vllm:disagg_kv_"
"""Of the metrics on vLLM's endpoint."""

_T = TypeVar("_T")


def guarded(default: Callable[..., Any]) -> Callable[[Callable[..., _T]], Callable[..., _T]]:
    """A hook that fails alone: the error is logged, and ``default`` of the hook's arguments returned."""

    def decorate(hook: Callable[..., _T]) -> Callable[..., _T]:
        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except EndpointBrokenError as exc:
                _end_rank(exc)
                raise
            except Exception:
                log.exception("disagg_kv: %s failed", hook.__name__)
                return default(*args, **kwargs)

        return call

    return decorate


def _none(*args: Any, **kwargs: Any) -> None:
    return None


def _end_rank(exc: EndpointBrokenError) -> None:
    """End a worker of which vLLM awaits no result, by which it would learn of the error. It notices the exit."""
    log.critical("the engine ends, since blocks cannot be used again: %s", exc)
    if get_tensor_model_parallel_rank():
        os._exit(1)


class DisaggKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Serves prefill and decode instances of vLLM through this library; see docs/engines/vllm.md."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """VLLM calls this in the scheduler and in each worker.

        Raises:
            UnknownNameError: an option of another name.
            ConfigurationError: an option's value that cannot be.
            UnsupportedError: a feature of vLLM that the connector does not support.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        _log_through_vllm()
        require("vllm")
        transfer = vllm_config.kv_transfer_config
        self._options = EngineOptions.read(EXTRA_CONFIG, transfer.kv_connector_extra_config)
        on_cpu, common = current_platform.is_cpu(), self._options.common
        channels_first = is_conv_state_dim_first()
        self._facts = facts(vllm_config, kv_cache_config, tiles=on_cpu, common=common, channels_first=channels_first)
        if self._facts.common is not None:
            _check_order(vllm_config, self._facts.block, self._facts.common.dim)
        if self._options.layered:
            refuse_layered(vllm_config)
        self._produces, self._consumes = transfer.is_kv_producer, transfer.is_kv_consumer
        if self._produces and not on_cpu and any(group.states for group in self._facts.groups):
            refuse_states(vllm_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._opened: Opened | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                self._facts.instance,
                self._facts.groups,
                produces=self._produces,
                consumes=self._consumes,
                total_s=self._options.total_s,
                lossy=vllm_config.cache_config.cache_dtype not in ("auto", str(vllm_config.model_config.dtype)[6:]),
            )
            if self._produces and self._consumes and transfer.kv_load_failure_policy == "fail":
                log.warning(
                    "kv_role kv_both: a prompt whose earlier rows cannot be loaded fails; "
                    "kv_load_failure_policy 'recompute' computes it"
                )

    # What vLLM asks the class.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Heads outside tokens: the part of one head is one run of bytes, whatever the other side's TP size."""
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Full CUDA graphs skip ``save_kv_layer``, by which layers are sent while others are computed."""
        return EngineOptions.read(EXTRA_CONFIG, extra_config).layered

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """The endpoints have registered the cache where it lies, and peers may have mapped it. VLLM 0.33 asks this."""
        return False

    # The scheduler.

    @property
    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """The addresses of the prefill ranks, which the responses carry. Other connectors' values are passed over."""
        of_ranks = [metadata[rank] for rank in sorted(metadata)]
        addresses = [one.address for one in of_ranks if isinstance(one, RankAddress)]
        if addresses:
            self._side.meet(addresses)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Answers are held only while more than a tenth of the blocks is free."""
        super().bind_gpu_block_pool(gpu_block_pool)
        if self._scheduler is not None:
            few = gpu_block_pool.num_gpu_blocks // 10
            self._scheduler.held.few = lambda: gpu_block_pool.get_num_free_blocks() < few

    def reset_cache(self) -> bool | None:
        """Give up the answers that are held; False until all their blocks are free."""
        return None if self._scheduler is None else self._scheduler.reset()

    @guarded(_none)
    def on_new_request(self, request: Any) -> None:
        """See :meth:`SchedulerSide.on_new_request`."""
        self._side.on_new_request(request)

    @guarded(lambda *_: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """See :meth:`SchedulerSide.matched_tokens`."""
        return self._side.matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """A load fills the blocks of every group."""
        return tuple(group.index for group in self._facts.groups)

    @guarded(_none)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See :meth:`SchedulerSide.on_allocated`."""
        self._side.on_allocated(request, blocks.get_block_ids(), num_external_tokens)

    @guarded(lambda *_: StepWork())
    def build_connector_meta(self, scheduler_output: Any) -> StepWork:
        """See :meth:`SchedulerSide.build`."""
        return self._side.build(scheduler_output.num_scheduled_tokens, scheduler_output.kv_connector_block_state)

    @guarded(_none)
    def update_connector_output(self, connector_output: Any) -> None:
        """See :meth:`SchedulerSide.on_results`."""
        self._side.on_results(
            set(connector_output.finished_sending or ()), set(connector_output.finished_recving or ())
        )

    @guarded(lambda self, request, _: (self._side.sends(request.request_id), None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See :meth:`SchedulerSide.finished`."""
        return self._side.finished(request, block_ids)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The same for a cache with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_push_work(self) -> bool:
        """See :attr:`SchedulerSide.pending`."""
        return self._side.pending

    # The worker.

    @property
    def _rank(self) -> WorkerSide:
        assert self._worker is not None
        return self._worker

    @property
    def _work(self) -> StepWork:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepWork)
        return metadata

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Open this rank's endpoints over vLLM's tensors.

        Raises:
            UnsupportedError: a tensor whose memory cannot be described, or a float8 of another kind.
            ConfigurationError: a scale of a float8 cache that cannot be.
        """
        self._worker, self._opened = open_worker(
            self._options,
            self._facts,
            kv_caches,
            self._vllm_config.compilation_config.static_forward_context,
            e4m3=str(current_platform.fp8_dtype()).removeprefix("torch."),
            rank=get_tensor_model_parallel_rank(),
            group=get_tp_group().cpu_group,
            produces=self._produces,
            consumes=self._consumes,
        )

    def get_handshake_metadata(self) -> RankAddress | None:
        """This rank's address, for the scheduler; None: it prefills for no other instance."""
        return RankAddress(self._opened.address) if self._opened is not None and self._opened.address else None

    @guarded(_none)
    def handle_preemptions(self, kv_connector_metadata: StepWork) -> None:
        """See :meth:`WorkerSide.preempt`."""
        self._rank.preempt(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: StepWork) -> None:
        """See :meth:`WorkerSide.begin`. ``start_load_kv`` would be too late: it follows the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        self._begin()

    @guarded(_none)
    def _begin(self) -> None:
        if self._worker is not None:
            self._worker.begin(self._work)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads began with the step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request runs only once all its rows are there."""

    @guarded(_none)
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """See :meth:`WorkerSide.layer_ready`."""
        if self._options.layered:
            self._rank.layer_ready(layer_name)

    @guarded(_none)
    def wait_for_save(self) -> None:
        """See :meth:`WorkerSide.end`."""
        self._rank.end()

    @guarded(lambda *_: KVConnectorTransferResults())
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See :meth:`WorkerSide.results`."""
        results = self._rank.results(finished_req_ids)
        return KVConnectorTransferResults(results.sent, results.received, results.failed)

    def shutdown(self) -> None:
        """Close the endpoints."""
        if self._opened is not None:
            self._opened.close()

    # Statistics.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What this rank has counted since the last call."""
        counts = {} if self._worker is None else self._worker.counters.take()
        return TransferStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """From what a worker sent."""
        return TransferStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Counters and histograms on vLLM's Prometheus endpoint."""
        return TransferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _check_order(vllm_config: Any, block: int, dim: int) -> None:
    """See :func:`~disagg_kv.engines.vllm.element_order.check_order`."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype, kind = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    kernel = _get_attn_isa(dtype, block, dim, kind)

    def store(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        halves = cache.view((*cache.shape[:2], 2 * block, -1)).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(k, v, *halves, slots, kernel, kv_cache_dtype=kind)

    check_order(store, block=block, dim=dim, dtype=dtype, kernel=kernel)


# ``MultiConnector`` makes the statistics of its parts by name, in a process that has none of them.
KVConnectorFactory.register_connector("DisaggKVConnector", "disagg_kv.engines.vllm", "DisaggKVConnector")


class TransferStats(KVConnectorStats):
    """The data of :class:`~disagg_kv.engines.vllm.stats.Counters`, of all ranks and several steps."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Begin anew."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> TransferStats:
        """Add another rank's, or a later step's."""
        self.data = merged(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """As vLLM logs them."""
        return logged(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class TransferMetrics(KVConnectorPromMetrics):
    """Counters and histograms of Prometheus for what :mod:`~disagg_kv.engines.vllm.stats` names."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        of = {"labelnames": labelnames}
        reasons = {"labelnames": [*labelnames, "reason"]}
        self._counters = {name: self._counter_cls(PREFIX + name, said, **of) for name, said in COUNTERS.items()}
        self._failures = {name: self._counter_cls(PREFIX + name, said, **reasons) for name, said in FAILURES.items()}
        self._histograms = {
            name: self._histogram_cls(PREFIX + name, said, buckets=list(bounds), **of)
            for name, (said, bounds) in HISTOGRAMS.items()
        }
        zero = {**dict.fromkeys(COUNTERS, 0), **{name: dict.fromkeys(REASONS, 0) for name in FAILURES}}
        for engine in per_engine_labelvalues:
            self.observe({**zero, **dict.fromkeys(HISTOGRAMS, ())}, engine)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what an engine counted and measured."""
        values = self.per_engine_labelvalues[engine_idx]
        for name, given in transfer_stats_data.items():
            if name in HISTOGRAMS:
                histogram = self._histograms[name].labels(*values)
                for one in given:
                    histogram.observe(one)
            elif name in FAILURES:
                for code, count in given.items():
                    self._failures[name].labels(*values, code).inc(count)
            else:
                self._counters[name].labels(*values).inc(given)


def _log_through_vllm() -> None:
    """Without this, the library's warnings reach a root logger that prints nothing."""
    library, engine = logging.getLogger("disagg_kv"), logging.getLogger("vllm")
    if not library.handlers:
        library.handlers = engine.handlers
        library.propagate = False
