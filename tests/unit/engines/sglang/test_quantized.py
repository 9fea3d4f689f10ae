"""Scales of a float8 cache as SGLang's attention layers keep them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disagg_kv.engines.sglang.quantized import scales_of
from disagg_kv.errors import ConfigurationError, UnsupportedError


class RadixAttention:
    """A layer known by its class name."""

    def __init__(self, layer_id: int, k_scale: object = None, v_scale: object = None) -> None:
        self.layer_id, self.k_scale, self.v_scale = layer_id, k_scale, v_scale


class TorchNativeAttnBackend:
    """A backend known by its class name."""


class TritonAttnBackend:
    """One that uses scales."""


def of(*modules: Any, **given: Any) -> list[Any]:
    """The scales of a model with two layers."""
    what = {"dtype": "float8_e4m3fn", "layers": 2, "heads": 2, "tp": 1, "latent": False, "backend": TritonAttnBackend()}
    return scales_of(modules, **{**what, **given})


def test_scales_are_read_of_the_layers() -> None:
    """Numbers, or parameters of torch; a layer without any stores numbers as they are, as one does whose scale is 1."""
    assert of(object(), RadixAttention(1, torch.tensor(0.5), 2.0), RadixAttention(0)) == [((), ()), ((0.5,), (2.0,))]
    both = SimpleNamespace(prefill_backend=TritonAttnBackend(), decode_backend=TritonAttnBackend())
    assert of(RadixAttention(0), RadixAttention(1, 2.0, 2.0), backend=both) == [((), ()), ((2.0,), (2.0,))]
    assert of(RadixAttention(0, 1.0, 1.0), RadixAttention(1, torch.tensor([3.0, 4.0]), 1)) == [
        ((), ()),
        ((3.0, 4.0), ()),
    ]


def test_other_dtypes_have_none_whatever_the_layers_say() -> None:
    """A checkpoint may have scales that a cache of the model's type does not use."""
    assert of(RadixAttention(0, float("nan"), 2.0), dtype="bfloat16") == [((), ())] * 2


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([RadixAttention(0)], "layer 1: no attention layers"),
        ([RadixAttention(0), RadixAttention(1), RadixAttention(1, 2.0, 2.0)], "layer 1: 2 attention layers"),
        ([RadixAttention(0), RadixAttention(1, None, 2.0)], "layer 1: k_scale is None: a number is needed"),
        ([RadixAttention(0, 0.0, 1.0), RadixAttention(1)], "layer 0: k_scale is 0.0; it must be finite"),
        ([RadixAttention(0, 1.0, torch.tensor(-1.0)), RadixAttention(1)], "layer 0: v_scale is -1.0; it must"),
        ([RadixAttention(0, float("nan"), 1.0), RadixAttention(1)], "layer 0: k_scale is nan; it must be finite"),
        ([RadixAttention(0, 1.0, float("inf")), RadixAttention(1)], "layer 0: v_scale is inf; it must be finite"),
        ([RadixAttention(0, torch.ones(3), 1.0), RadixAttention(1)], "layer 0: k_scale: 3 numbers for 2 heads"),
    ],
)
def test_scales_that_are_missing_or_cannot_be_are_refused_by_name(layers: list[Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        of(*layers)


def test_a_layer_of_another_version_without_the_attribute_is_refused_by_name() -> None:
    layer = RadixAttention(0)
    del layer.v_scale
    with pytest.raises(ConfigurationError, match="layer 0: k_scale is None"):
        of(layer, RadixAttention(1))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"backend": TorchNativeAttnBackend()}, "the attention backend TorchNativeAttnBackend"),
        (
            {"backend": SimpleNamespace(prefill_backend=TritonAttnBackend(), decode_backend=TorchNativeAttnBackend())},
            "the attention backend TorchNative",
        ),
        ({"backend": SimpleNamespace()}, "the attention backend SimpleNamespace"),
        ({"latent": True}, "MLA"),
    ],
)
def test_scales_that_sglang_would_not_use_are_refused_by_name(given: dict[str, Any], words: str) -> None:
    """Scales of 1 are no scales."""
    with pytest.raises(UnsupportedError, match=words):
        of(RadixAttention(0), RadixAttention(1, 2.0, 2.0), **given)
    assert of(RadixAttention(0), RadixAttention(1, 1.0, 1.0), **given) == [((), ())] * 2
