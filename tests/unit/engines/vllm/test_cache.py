"""VLLM's tensors as a pool, in place: which memory can be described, and what identifies a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from disagg_kv.engines.common import CommonCache
from disagg_kv.engines.model import model_digest
from disagg_kv.engines.vllm.cache import LayerShape, common_pool_of, pool_of
from disagg_kv.errors import GeometryError, UnsupportedError
from disagg_kv.ids import GroupId
from disagg_kv.memory import PagedPool

BLOCKS, HEADS, BLOCK, DIM = 6, 2, 4, 8


def pool(tensor: torch.Tensor, row: int = 1, **other: Any) -> PagedPool:
    layer = LayerShape("layer 0", GroupId("group 0"), other.pop("heads", HEADS), None, "kv")
    sizes = {"blocks": BLOCKS, "block": BLOCK, "row": row, "tp": 1, "rank": 0, "model": b"m", **other}
    return pool_of([layer], {"layer 0": tensor}, **sizes)[0]


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.int32).reshape(shape)


def test_rows_are_tokens_or_blocks_of_the_same_memory() -> None:
    tensor = numbers(BLOCKS, HEADS, BLOCK, DIM)
    tokens, tiles = pool(tensor), pool(tensor, row=BLOCK)
    assert tokens.site.groups[0].rows_per_page == BLOCK
    assert tiles.site.groups[0].rows_per_page == 1
    rows = tensor.transpose(1, 2).contiguous().view(torch.uint8).numpy()
    assert np.array_equal(tokens.view(0), rows)
    assert np.array_equal(tiles.view(0), tensor.flatten(2).unsqueeze(1).view(torch.uint8).numpy())
    tensor.zero_()
    assert not tokens.view(0).any()
    assert not tiles.view(0).any()


def test_the_null_block_is_no_page_of_rows() -> None:
    """VLLM puts block 0 before the window of a sliding layer."""
    assert pool(numbers(BLOCKS, HEADS, BLOCK, DIM)).site.groups[0].null_page == 0


def test_a_latent_has_no_axis_of_heads() -> None:
    found = pool(numbers(BLOCKS, BLOCK, DIM), heads=1)
    assert found.site.groups[0].rows_per_page == BLOCK


@pytest.mark.parametrize("row", [1, BLOCK])
def test_tokens_outside_heads(row: int) -> None:
    """Memory of tokens before heads can be described by strides, unless a row is a block."""
    tensor = numbers(BLOCKS, BLOCK, HEADS, DIM).transpose(1, 2)
    if row == 1:
        assert pool(tensor).site.groups[0].rows_per_page == BLOCK
        return
    with pytest.raises(UnsupportedError, match=r"layer 0: strides .* split the tokens of a block"):
        pool(tensor, row=row)


def test_kernel_blocks_are_joined_where_one_stride_reaches_all_tokens() -> None:
    """The attention kernel has blocks of 2 tokens, vLLM of 4; tokens lie outside heads."""
    whole = numbers(BLOCKS, BLOCK, HEADS, DIM)
    kernel = whole.reshape(2 * BLOCKS, BLOCK // 2, HEADS, DIM).transpose(1, 2)
    joined, plain = pool(kernel), pool(whole.transpose(1, 2))
    assert np.array_equal(joined.view(0), plain.view(0))
    assert np.array_equal(joined.view(0), whole.view(torch.uint8).numpy())


def test_kernel_blocks_with_heads_outside_tokens_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="layer 0: 2 kernel blocks make a block"):
        pool(numbers(2 * BLOCKS, HEADS, BLOCK // 2, DIM))


@pytest.mark.parametrize("shape", [(BLOCKS, DIM), (BLOCKS + 1, HEADS, BLOCK, DIM), (2, BLOCKS, HEADS, BLOCK, DIM)])
def test_a_tensor_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedError, match=r"layer 0: a cache of shape .* for 6 blocks"):
        pool(numbers(*shape))


def test_blocks_of_another_size_are_refused() -> None:
    with pytest.raises(GeometryError, match="layer 0: 8 tokens in a block of 4"):
        pool(numbers(BLOCKS, HEADS, 2 * BLOCK, DIM))


# What identifies a model.


def folder(at: Path, **files: bytes) -> str:
    at.mkdir()
    for name, given in files.items():
        (at / f"{name}.safetensors").write_bytes(given)
    return str(at)


def test_weights_count_wherever_they_differ_not_by_their_directory(tmp_path: Path) -> None:
    a = folder(tmp_path / "a", one=b"x" * 9000 + b"1", two=b"2")
    b = folder(tmp_path / "b", one=b"x" * 9000 + b"1", two=b"2")
    digest = model_digest(a, {"layers": 2, "_name_or_path": "a", "transformers_version": "5"}, "float16")
    assert digest == model_digest(b, {"layers": 2, "_name_or_path": "b", "transformers_version": "6"}, "float16")
    others: list[tuple[Any, ...]] = [
        (folder(tmp_path / "c", one=b"x" * 9000 + b"0", two=b"2"), {"layers": 2}, "float16"),
        (folder(tmp_path / "d", one=b"x" * 9001 + b"1", two=b"2"), {"layers": 2}, "float16"),
        (folder(tmp_path / "e", one=b"x" * 9000 + b"1", three=b"2"), {"layers": 2}, "float16"),
        (folder(tmp_path / "f", one=b"x" * 9000 + b"1"), {"layers": 2}, "float16"),
        (folder(tmp_path / "g", one=b"x" * 4500 + b"0" + b"x" * 4499 + b"1", two=b"2"), {"layers": 2}, "float16"),
        (a, {"layers": 3}, "float16"),
        (a, {"layers": 2}, "bfloat16"),
        (a, {"layers": 2}, "float16", None),
    ]
    assert len({digest, *(model_digest(*one) for one in others)}) == 1 + len(others)


def test_a_model_without_local_weights_counts_by_its_name(tmp_path: Path) -> None:
    empty = folder(tmp_path / "empty")
    names = ["some/model", "another/model", empty]
    assert len({model_digest(name, {}) for name in names}) == 3
    assert model_digest("some/model", {}) == model_digest("some/model", {})


def test_a_configuration_may_hold_what_json_does_not() -> None:
    """A set has another order in each process."""
    assert model_digest("m", {"a": {"b", "c", "d"}}) == model_digest("m", {"a": frozenset(["d", "c", "b"])})
    assert model_digest("m", {"a": {"b", "c"}}) != model_digest("m", {"a": {"b", "d"}})
    assert model_digest("m", {"dtype": torch.float16}) != model_digest("m", {"dtype": torch.float32})


COMMON = CommonCache(layers=1, heads=HEADS, dim=DIM, dtype="float16", rotation="rotated", model=b"m")


def common_pool(tensor: torch.Tensor, layers: int = 1) -> PagedPool:
    shapes = [LayerShape("layer 0", GroupId("kv"), HEADS, None, "")] * layers
    return common_pool_of(COMMON, shapes, {"layer 0": tensor}, blocks=BLOCKS, block=BLOCK, tp=1, rank=0)[0]


def test_k_and_v_of_the_cpu_backend_in_the_terms_that_engines_share() -> None:
    """Layers may lie side by side in one allocation."""
    tensor = torch.zeros(BLOCKS, 2, HEADS, BLOCK, 2 * DIM, dtype=torch.float16)[:, 1]
    found = common_pool(tensor)
    assert [plane.component for plane in found.site.planes] == ["k of head 0", "k of head 1", "v"]
    found.view(1)[3, 2, 5] = 255  # [pages, tokens, elements, bytes]
    found.view(2)[4, 1, 0] = 255  # [pages, tokens, heads, bytes]
    halves = tensor.view(torch.int16).reshape(BLOCKS, HEADS, 2, BLOCK * DIM)
    assert halves[3, 1, 0].reshape(DIM, BLOCK)[5, 2] == -1
    assert (halves[4, 0, 1].reshape(BLOCK, DIM)[1] == -1).all()
    assert int((tensor.view(torch.int16) == -1).sum()) == 1 + DIM


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(BLOCKS, HEADS, BLOCK, DIM, dtype=torch.float16),
        torch.zeros(BLOCKS + 1, HEADS, BLOCK, 2 * DIM, dtype=torch.float16),
        torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM, dtype=torch.bfloat16),
        torch.zeros(BLOCKS, BLOCK, HEADS, 2 * DIM, dtype=torch.float16).transpose(1, 2),
    ],
)
def test_a_tensor_of_another_model_or_order_has_no_common_description(tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedError, match=r"description 'common': layer layer 0: a cache .* with strides"):
        common_pool(tensor)


def test_layers_that_config_json_does_not_have() -> None:
    with pytest.raises(UnsupportedError, match="2 layers of vLLM, 1 in"):
        common_pool(torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM, dtype=torch.float16), layers=2)
