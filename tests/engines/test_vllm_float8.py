"""A decode cache of float8, described by vLLM's own classes: attention layers, configuration and cache specs.

VLLM's CPU kernels for such caches need AVX-512, so no instance runs here. The tensors are as on a GPU.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from disagg_kv.core import Phase
from disagg_kv.endpoints import Expectation, room_id
from disagg_kv.engines.options import EngineOptions
from disagg_kv.engines.vllm.endpoints import open_worker
from disagg_kv.engines.vllm.host import facts
from disagg_kv.errors import ConfigurationError
from disagg_kv.geometry import PageTable
from disagg_kv.ids import GroupId
from disagg_kv.kernels.convert import reference
from disagg_kv.rendezvous import Source
from tests.support.processes import wait

from .instances import transfer

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning:torch", "default:::vllm")  # they are not ours

BLOCKS, HEADS, BLOCK, DIM, LAYERS = 9, 4, 32, 32, 4
GROUP = GroupId("group 0")


def engine(model: Path, role: str, kind: str, scales: tuple[float, float] | None) -> tuple[Any, Any, Any]:
    """VLLM's configuration, its attention layers with the scales of a checkpoint, and its ``KVCacheConfig``."""
    from vllm.config import KVTransferConfig, set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    config = EngineArgs(
        str(model), skip_tokenizer_init=True, dtype="bfloat16", kv_cache_dtype=kind, block_size=BLOCK,
        kv_transfer_config=KVTransferConfig(**transfer(role)),
    ).create_engine_config()  # fmt: skip
    names = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]
    with set_current_vllm_config(config):
        layers = [
            Attention(8, DIM, 0.1, num_kv_heads=HEADS, cache_config=config.cache_config, prefix=name) for name in names
        ]
        spec = layers[0].get_kv_cache_spec(config)
    for layer in layers:
        if scales is not None:
            method = BaseKVCacheMethod(None)
            method.create_weights(layer)
            layer.k_scale.fill_(scales[0])
            layer.v_scale.fill_(scales[1])
            method.process_weights_after_loading(layer)
    return config, spec, KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(names, spec)])


def opened(ends: ExitStack, model: Path, role: str, kind: str, scales: tuple[float, float] | None) -> Any:
    """A rank's endpoints, and its tensors ``[blocks, heads, tokens, K and V]``."""
    config, spec, cache = engine(model, role, kind, scales)
    layers = config.compilation_config.static_forward_context
    tensors = {name: torch.full((BLOCKS, HEADS, BLOCK, 2 * DIM), 7, dtype=spec.dtype) for name in layers}
    produces = role == "kv_producer"
    _, found = open_worker(
        EngineOptions(verify="full"), facts(config, cache, tiles=False), tensors, layers,
        e4m3="float8_e4m3fn", rank=0, group=None, produces=produces, consumes=not produces,
    )  # fmt: skip
    ends.callback(found.close)
    return found, tensors, config.kv_transfer_config.engine_id


@pytest.mark.parametrize(
    ("kind", "target", "scales"),
    [("fp8", "float8_e4m3fn", (0.5, 0.03)), ("fp8_e5m2", "float8_e5m2", None), ("fp8_e4m3", "float8_e4m3fn", None)],
)
def test_prefill_converts_with_the_scales_of_vllms_layers(
    model: Path, kind: str, target: str, scales: tuple[float, float] | None
) -> None:
    """Decode's bytes are the specified conversion of prefill's."""
    with ExitStack() as ends:
        p, ours, instance = opened(ends, model, "kv_producer", "auto", None)
        d, theirs, _ = opened(ends, model, "kv_consumer", kind, scales)
        for tensor in ours.values():
            tensor.copy_(torch.randn(tensor.shape) * 100)
        room = room_id("room")
        reception = d.receiver.open(room, Source(instance, p.addresses))
        reception.expect(Expectation(2 * BLOCK, [PageTable(GROUP, [2, 7])]))
        delivery = p.sender.open(room)
        delivery.send_chunk(2 * BLOCK, [PageTable(GROUP, [5, 6])])
        delivery.finish(2 * BLOCK)
        wait(lambda: reception.released, lambda: str(reception.phase))
        assert reception.phase is Phase.DONE, reception.error
        assert reception.report.nbytes == LAYERS * HEADS * 2 * BLOCK * 2 * DIM
    k, v = scales or (1.0, 1.0)
    factors = (1 / torch.tensor([k] * DIM + [v] * DIM)).float()
    for name, tensor in theirs.items():
        assert torch.equal(tensor[[2, 7]], reference.rounded(ours[name][[5, 6]].float() * factors, target))


def test_a_scale_that_was_never_loaded_is_refused_by_name(model: Path) -> None:
    """VLLM's own mark of it is -1."""
    config, spec, cache = engine(model, "kv_consumer", "fp8", None)
    layers = config.compilation_config.static_forward_context
    name = "model.layers.2.self_attn.attn"
    layers[name]._v_scale.fill_(-1.0)
    tensors = {one: torch.zeros((BLOCKS, HEADS, BLOCK, 2 * DIM), dtype=spec.dtype) for one in layers}
    with pytest.raises(ConfigurationError, match=r"layers\.2\.self_attn\.attn: v_scale is -1\.0"):
        open_worker(
            EngineOptions(), facts(config, cache, tiles=False), tensors, layers, e4m3="float8_e4m3fn",
            rank=0, group=None, produces=False, consumes=True,
        )  # fmt: skip
