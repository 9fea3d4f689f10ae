"""A decode cache of float8 with vLLM's scales: prefill converts, or the scales are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disagg_kv.core import Phase
from disagg_kv.endpoints import Expectation, room_id
from disagg_kv.engines.opening import Opened
from disagg_kv.engines.options import EngineOptions
from disagg_kv.engines.scales import checked_scales
from disagg_kv.engines.vllm.cache import LayerShape, pool_of
from disagg_kv.engines.vllm.endpoints import open_worker
from disagg_kv.engines.vllm.host import facts
from disagg_kv.engines.vllm.quantized import float8_of
from disagg_kv.errors import ConfigurationError, DisaggKVError, GeometryError, UnsupportedError
from disagg_kv.geometry import PageTable
from disagg_kv.ids import GroupId
from disagg_kv.kernels.convert import reference
from disagg_kv.rendezvous import Source
from tests.support.processes import wait
from tests.support.vllm_like import Model, configs, layer_name

BLOCKS, HEADS, BLOCK, PARTS, LAYERS = 9, 4, 4, (5, 3), 3
GROUP = GroupId("group 0")
SHAPE = LayerShape(layer_name(0), GROUP, HEADS, None, "plain, vllm", PARTS)


def attention(kind: str, k: object = 1.0, v: object = 1.0, **changes: Any) -> Any:
    """What the connector reads of a layer of vLLM."""
    scales = {"_k_scale": torch.as_tensor(k), "_v_scale": torch.as_tensor(v)}
    return SimpleNamespace(**{"kv_cache_dtype": kind, **scales, **changes})


def of(layer: Any, *, tp: int = 1, e4m3: str = "float8_e4m3fn") -> dict[str, tuple[float, ...]]:
    """The scales of a layer."""
    return dict(float8_of([SHAPE], {SHAPE.name: layer}, tp=tp, e4m3=e4m3)[SHAPE.name].scales)


def test_scales_are_read_of_the_layers() -> None:
    """One for all heads, or one per head; 1 is none."""
    assert of(attention("fp8", 0.5, 2.0)) == {"k": (0.5,), "v": (2.0,)}
    assert of(attention("fp8_e5m2")) == {"k": (), "v": ()}
    assert of(attention("fp8", [0.5, 1.0, 2.0, 4.0], [3.0])) == {"k": (0.5, 1.0, 2.0, 4.0), "v": (3.0,)}
    assert float8_of([SHAPE], {SHAPE.name: attention("auto")}, tp=1) == {}
    opaque = LayerShape(SHAPE.name, GROUP, HEADS, None, "vllm kv of a block fp8_per_tensor fp8")
    assert float8_of([opaque], {}, tp=1) == {}


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (attention("fp8", 0.0), "k_scale is 0.0; it must be finite"),
        (attention("fp8", 1.0, -1.0), "v_scale is -1.0; it must be finite"),
        (attention("fp8", float("nan")), "k_scale is nan; it must be finite"),
        (attention("fp8", 1.0, [1.0, float("inf"), 1.0, 1.0]), "v_scale is inf; it must be finite"),
        (attention("fp8", torch.tensor(1e300, dtype=torch.float64)), "k_scale is inf; it must be finite"),
        (attention("fp8", [1.0, 2.0]), "k_scale: 2 numbers for 4 heads"),
        (attention("fp8", _k_scale=None), "k_scale is None: a number is needed"),
        (SimpleNamespace(kv_cache_dtype="fp8", _k_scale=torch.tensor(1.0)), "v_scale is None: a number is needed"),
        (None, "vLLM has no attention layer of this name"),
    ],
)
def test_scales_that_are_missing_or_cannot_be_are_refused_by_name(layer: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as found:
        of(layer)
    assert SHAPE.name in str(found.value)


def test_what_is_not_supported_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="float8_e4m3fnuz are not moved"):
        of(attention("fp8"), e4m3="float8_e4m3fnuz")
    assert of(attention("fp8_e5m2"), e4m3="float8_e4m3fnuz") == {"k": (), "v": ()}
    with pytest.raises(UnsupportedError, match="a scale per head is not supported on 2"):
        checked_scales("k_scale", torch.tensor([1.0, 2.0]), heads=2, tp=2)


def test_tensors_that_are_no_float8_are_refused_by_name() -> None:
    place: dict[str, Any] = {"blocks": BLOCKS, "block": BLOCK, "row": 1, "tp": 1, "rank": 0, "model": b"m"}
    float8 = float8_of([SHAPE], {SHAPE.name: attention("fp8")}, tp=1)
    with pytest.raises(GeometryError, match=r"torch\.float16 are no float8_e4m3fn"):
        pool_of([SHAPE], {SHAPE.name: cache(torch.float16)}, float8=float8, **place)
    other = LayerShape(SHAPE.name, GROUP, HEADS, None, "plain, vllm", (4, 3))
    with pytest.raises(GeometryError, match="8 elements of a token and head, not"):
        pool_of([other], {SHAPE.name: cache(torch.float16)}, **place)


def cache(dtype: torch.dtype) -> torch.Tensor:
    """A layer's, all bytes poison."""
    made = torch.empty(BLOCKS, HEADS, BLOCK, sum(PARTS), dtype=dtype)
    made.view(torch.uint8).fill_(0xA5)
    return made


class Instance:
    """A rank of vLLM and its endpoints, from what the engine says of itself."""

    def __init__(self, name: str, dtype: torch.dtype, layers: list[Any], *, produces: bool) -> None:
        vllm, of = configs(Model(), name, block=BLOCK, blocks=BLOCKS)
        vllm.cache_config.cache_dtype = layers[0].kv_cache_dtype
        self.tensors = {layer_name(n): cache(dtype) for n in range(LAYERS)}
        options = EngineOptions.read("kv_connector_extra_config", {"staging_bytes": 1 << 16, "verify": "full"})
        found = facts(vllm, of, tiles=False)
        named = {layer_name(n): layer for n, layer in enumerate(layers)}
        _, self.ends = open_worker(
            options, found, self.tensors, named, e4m3="float8_e4m3fn", rank=0, group=None, produces=produces,
            consumes=not produces,
        )  # fmt: skip


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def moved(p: Opened, d: Opened, rows: int) -> DisaggKVError | None:
    """Rows from blocks 5 and 6 to blocks 2 and 7; why not, if they did not arrive."""
    assert p.sender is not None
    assert d.receiver is not None
    room = room_id("room")
    reception = d.receiver.open(room, Source("P", p.addresses))
    reception.expect(Expectation(rows, [PageTable(GROUP, [2, 7])]))
    delivery = p.sender.open(room)
    delivery.send_chunk(rows, [PageTable(GROUP, [5, 6])])
    delivery.finish(rows)
    wait(lambda: reception.released, lambda: str(reception.phase))
    return None if reception.phase is Phase.DONE else reception.error


@pytest.mark.parametrize(
    ("kind", "target", "k", "v"),
    [
        ("fp8", "float8_e4m3fn", 0.5, 2.0),
        ("fp8_e5m2", "float8_e5m2", 1.0, 1.0),
        ("fp8_e4m3", "float8_e4m3fn", [0.25, 0.5, 1.0, 3.0], 0.125),
    ],
)
def test_prefill_converts_to_decodes_float8_with_its_scales(
    closing: ExitStack, kind: str, target: str, k: Any, v: Any
) -> None:
    """Bytes are the specified conversion of prefill's, in decode's blocks alone; every segment's sums are compared."""
    scales = [(torch.tensor(k) * (n + 1), torch.tensor(v) / (n + 1)) for n in range(LAYERS)]
    p = Instance("P", torch.bfloat16, [attention("auto")] * LAYERS, produces=True)
    closing.callback(p.ends.close)
    layers = [attention(kind, _k_scale=ks, _v_scale=vs) for ks, vs in scales]
    d = Instance("D", torch.uint8, layers, produces=False)
    closing.callback(d.ends.close)
    wanted = {name: one.clone() for name, one in d.tensors.items()}
    draw = torch.Generator().manual_seed(0)
    for number, (name, tensor) in enumerate(p.tensors.items()):
        tensor.copy_(torch.randn(tensor.shape, generator=draw) * 400)
        k_and_v = zip(scales[number], PARTS, strict=True)
        each = torch.cat([scale.reshape(-1, 1, 1).expand(HEADS, 1, part) for scale, part in k_and_v], -1)
        bytes_ = reference.rounded(tensor.float() * (1 / each), target)
        wanted[name][2], wanted[name][7, :, :3] = bytes_[5], bytes_[6, :, :3]
    assert moved(p.ends, d.ends, 7) is None
    for name, tensor in d.tensors.items():
        assert torch.equal(tensor, wanted[name])


def test_float8_caches_with_other_scales_are_refused_by_name(closing: ExitStack) -> None:
    """Equal bytes would mean other numbers."""
    p = Instance("P", torch.uint8, [attention("fp8", 0.5)] * LAYERS, produces=True)
    closing.callback(p.ends.close)
    d = Instance("D", torch.uint8, [attention("fp8", 0.25)] * LAYERS, produces=False)
    closing.callback(d.ends.close)
    assert "spec.layers[0].k.scales" in str(moved(p.ends, d.ends, 7))
    assert all(bool((one == 0xA5).all()) for one in d.tensors.values())
