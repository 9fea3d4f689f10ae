"""A rank's endpoints over vLLM's tensors, from the connector's options."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ...geometry import Shard
from ...ids import LayerId
from ...memory import PagedPool
from ..opening import Opened, open_endpoints, queued_work, selecting
from ..options import EngineOptions
from .cache import common_pool_of, pool_of
from .host import EngineFacts
from .quantized import float8_of
from .worker import WorkerSide


def open_worker(
    options: EngineOptions,
    facts: EngineFacts,
    tensors: Mapping[str, torch.Tensor],
    layers: Mapping[str, Any],
    *,
    e4m3: str,
    rank: int,
    group: Any,
    produces: bool,
    consumes: bool,
) -> tuple[WorkerSide, Opened]:
    """The connector's side of a rank, and its endpoints, which the caller closes.

    Args:
        options: of the connector.
        facts: of the instance.
        tensors: vLLM's cache, by layer name.
        layers: vLLM's attention layers, by name.
        e4m3: what this platform means by ``fp8``.
        rank: tensor-parallel rank.
        group: vLLM's group of the tensor-parallel ranks on the CPU; all of them call.
        produces: the instance prefills for others.
        consumes: the instance decodes for others.

    Raises:
        UnsupportedError: a tensor whose memory cannot be described, or a float8 of another kind.
        ConfigurationError: an option or a scale that cannot be, or another rank has failed.
    """
    opened = open_endpoints(
        options,
        partial(_pool, facts, tensors, layers, e4m3, rank),
        instance=facts.instance,
        strategy=selecting(options.strategy),
        tp=facts.tp,
        rank=rank,
        group=group,
        produces=produces,
        consumes=consumes,
    )
    names = {layer.name: LayerId(number) for number, layer in enumerate(facts.layers)}
    mark = None if opened.on_cpu else queued_work
    return WorkerSide(opened.sender, opened.receiver, names, mark, claim_s=options.claim_s), opened


def _pool(
    facts: EngineFacts, tensors: Mapping[str, torch.Tensor], layers: Mapping[str, Any], e4m3: str, rank: int
) -> tuple[PagedPool, list[Shard]]:
    place: dict[str, Any] = {"blocks": facts.blocks, "block": facts.block, "tp": facts.tp, "rank": rank}
    if facts.common is not None:
        return common_pool_of(facts.common, facts.layers, tensors, **place)
    float8 = float8_of(facts.layers, layers, tp=facts.tp, e4m3=e4m3)
    return pool_of(facts.layers, tensors, row=facts.row, model=facts.model, float8=float8, **place)
