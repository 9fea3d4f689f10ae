"""A description of a cache that different engines have in common, so that rows cross between them.

A plane has one stride for its units. Some engines keep the elements of K of a token and head apart: the attention of
vLLM's CPU backend stores K of a head as ``[head_dim, tokens]``. So a unit of K is one element here, and the K of each
head is a component of its own. A unit of V is a head. Both sides describe their memory in these terms, whatever its
order; the price is a copy of single elements of K.

Equal descriptions have to mean equal numbers, so both sides derive them from the same facts: the model's own
``config.json`` and weights, and how K is rotated before it is stored. The format of K names the rotation. The element
types may differ where a conversion exists.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from attrs import frozen

from ..errors import UnsupportedError
from ..geometry import CacheSpec, Component, Holding, Plane, Shard, even_units, item_bytes
from ..geometry.spec import PLAIN
from ..ids import KV, LayerId
from .model import model_digest

OWN, COMMON = "own", "common"
DESCRIPTIONS = (OWN, COMMON)
"""Of a cache: as the engine stores it, or in the terms of this module."""

ARCHITECTURES = ("LlamaForCausalLM",)
"""Models of which both engines were seen to store the same numbers, with K rotated by halves."""

ROTATIONS = ("default", "llama3")
"""Kinds of rotation (``rope_type``) with which this was seen."""

MOST_NAMED = 200
"""Characters of a rotation in a format; of a longer one, a digest."""


@frozen
class Strides:
    """Where the K or V of a layer lies, in bytes.

    Args:
        buffer: number of the buffer.
        offset: of the first element.
        page: between pages.
        token: between tokens of a page.
        head: between heads.
        element: between elements of a token and head.
    """

    buffer: int
    offset: int
    page: int
    token: int
    head: int
    element: int


@frozen(kw_only=True)
class CommonCache:
    """A model's cache in the common terms.

    Args:
        layers: number of layers.
        heads: KV heads of the whole model.
        dim: elements of a head.
        dtype: element type.
        rotation: names how K is rotated.
        model: identifies configuration and weights.
    """

    layers: int
    heads: int
    dim: int
    dtype: str
    rotation: str
    model: bytes

    @cached_property
    def spec(self) -> CacheSpec:
        """The same on both sides."""
        size = item_bytes(self.dtype)
        k = [Component(_k(head), self.dtype, self.dim, size, format=self.rotation) for head in range(self.heads)]
        return CacheSpec.uniform(
            self.layers, [*k, Component("v", self.dtype, self.heads, self.dim * size)], self.model
        )  # fmt: skip

    def shard(self, tp: int, rank: int) -> Shard:
        """The part of a tensor-parallel rank: all elements of its heads."""
        mine, layers = even_units(self.heads, tp, rank), frozenset(self.spec.layers)
        k = [Holding(_k(head), layers, range(self.dim)) for head in mine]
        return Shard([*k, Holding("v", layers, mine)])

    def planes(self, layer: int, heads: Sequence[int], k: Strides, v: Strides) -> Iterator[Plane]:
        """The planes of a layer.

        Args:
            layer: its number.
            heads: that this rank holds, in the order of its memory.
            k: where K lies.
            v: where V lies.

        Raises:
            UnsupportedError: the elements of V of a token and head are not side by side.
        """
        if v.element != item_bytes(self.dtype):
            raise UnsupportedError(f"layer {layer}: elements of V lie {v.element} bytes apart")
        at = LayerId(layer)
        for place, head in enumerate(heads):
            yield Plane(at, _k(head), KV, k.buffer, k.offset + place * k.head, k.page, k.token, k.element)
        yield Plane(at, "v", KV, v.buffer, v.offset, v.page, v.token, v.head)


def _k(head: int) -> str:
    return f"k of head {head}"


def common_cache(config: Mapping[str, Any], model: str, revision: str | None, dtype: str) -> CommonCache:
    """From the facts that both engines have.

    Args:
        config: the model's ``config.json``, as it is.
        model: its directory or name.
        revision: of a name; None: the newest.
        dtype: element type of the cache.

    Raises:
        UnsupportedError: a model of which it is not known that both engines store the same numbers.
    """
    kinds = config.get("architectures") or []
    if list(kinds)[:1] not in [[one] for one in ARCHITECTURES]:
        raise UnsupportedError(_unknown(f"of the architecture {kinds}", ARCHITECTURES))
    others = {name: config.get(name) for name in ("quantization_config", "sliding_window", "layer_types")}
    if used := [name for name, value in others.items() if value]:
        raise UnsupportedError(f"{_unknown('of this kind', ARCHITECTURES)}; config.json has {', '.join(used)}")
    heads = int(config["num_attention_heads"])
    return CommonCache(
        layers=int(config["num_hidden_layers"]),
        heads=int(config.get("num_key_value_heads") or heads),
        dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
        dtype=dtype,
        rotation=rotation(config),
        model=model_digest(model, config, *([] if Path(model).is_dir() else [revision])),
    )


def rotation(config: Mapping[str, Any]) -> str:
    """Names how K is rotated, with all parameters; ``config.json`` may have them in its old or its new spelling.

    Raises:
        UnsupportedError: a kind of rotation of which it is not known that both engines do the same.
    """
    old = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    old["partial_rotary_factor"] = config.get("partial_rotary_factor", 1.0)
    given = {**old, **(config.get("rope_parameters") or {})}
    kind = given.pop("type", None)
    kind = given.pop("rope_type", kind) or "default"
    if kind not in ROTATIONS:
        raise UnsupportedError(_unknown(f"with the rotation {kind!r}", ROTATIONS))
    named = ", ".join(f"{name} {_plain(given[name])}" for name in sorted(given) if given[name] is not None)
    if len(named) > MOST_NAMED:
        named = hashlib.blake2b(named.encode(), digest_size=16).hexdigest()
    return f"{PLAIN}, rotated by halves: {kind}, {named}"


def _plain(value: object) -> object:
    """One spelling of a number: a file may have ``10000`` or ``10000.0``."""
    return float(value) if isinstance(value, int | float) else value


def _unknown(what: str, known: Sequence[str]) -> str:
    return (
        f"description 'common': of a model {what} it is not known that two engines store the same numbers; "
        f"it is of {', '.join(known)}"
    )


def read_config(model: str, revision: str | None) -> Mapping[str, Any]:
    """The model's ``config.json``, before any engine has changed it. ``model`` is a directory, or a name."""
    file = Path(model) / "config.json"
    if file.is_file():
        return dict(json.loads(file.read_text()))
    from transformers import PretrainedConfig

    return dict(PretrainedConfig.get_config_dict(model, revision=revision)[0])
