"""The contents of a model's cache: components, and the layers that have them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
from attrs import evolve, field, frozen

from .. import arguments
from ..errors import GeometryError
from ..ids import LayerId
from .formats import CONVERSIONS, LEAST_SCALE, SCALED

ITEM_BYTES: Mapping[str, int] = {
    "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""Bytes per element of every dtype that a component may name."""


def item_bytes(dtype: str) -> int:
    """Bytes per element of ``dtype``; a :class:`GeometryError` lists the known ones."""
    if arguments.text(dtype, "dtype") not in ITEM_BYTES:
        raise GeometryError(f"unknown dtype {dtype!r}; known: {', '.join(sorted(ITEM_BYTES))}")
    return ITEM_BYTES[dtype]


@frozen
class Extent:
    """The rows of a component that a room has, and those that decode needs.

    Args:
        window: decode needs only this number of last rows; None: all.
        rows: rows of a state, which has no token axis; 0: rows of tokens.
    """

    window: int | None = None
    rows: int = 0

    def bounds(self, start: int, stop: int | None) -> tuple[int, int]:
        """The needed rows ``[first, end)`` of a room; ``end`` is :data:`ENDLESS` if it is the end of the room.

        Args:
            start: decode already holds the rows before it. Rows inside a window do not count as held: an engine that
                stores only a window overwrites them.
            stop: the room's length in rows; None: unknown, so a window may begin at any row.
        """
        if self.rows:
            return 0, self.rows
        if self.window is None:
            return start, ENDLESS
        return (0 if stop is None else max(0, stop - self.window)), ENDLESS


def window_rows(tokens: int, tokens_per_row: int) -> int:
    """The fewest last rows that hold the last ``tokens`` tokens of any room.

    The last row may hold a single token of the room, so the others reach back over
    ``ceil((tokens - 1) / tokens_per_row)`` rows before it.
    """
    return 1 - (1 - tokens) // tokens_per_row


def _scales(scales: Iterable[float]) -> tuple[float, ...]:
    """The float32 nearest to each."""
    given = arguments.reals(scales, "scales", GeometryError)
    with np.errstate(over="ignore"):
        return tuple(float(np.float32(scale)) for scale in given)


PLAIN = "plain"
"""The first word of a format whose units are elements side by side."""

MOST_LAYERS = 65_536
"""Layers of a model that a frame can describe."""

ENDLESS = 1 << 62
"""More rows than any room has."""


@frozen
class Component:
    """One kind of data in a layer's cache: K, V, an MLA latent, a scale, an index, a recurrent state.

    Args:
        name: ``"k"``, ``"v"``, ``"latent"`` ... unique in its layer.
        dtype: element type, one of :data:`ITEM_BYTES`.
        units: number of pieces into which tensor parallelism may cut this (heads, channel groups), over the whole
            model.
        unit_bytes: bytes of one unit of one row; a unit is never cut.
        tokens_per_row: 1; more where the memory never separates the tokens of a row: a compressed cache, or a page that
            is one opaque tile per unit; 0 for a state, which has ``rows`` rows and no token axis.
        rows: rows of a state, else 0. A slot of a state's group has this number of its rows.
        window: decode needs only the last ``window`` tokens; None: all.
        format: the arrangement of bytes inside a unit; two sides with different formats are refused. ``"plain"``, or
            ``"plain, "`` and what else both sides must share: elements side by side, so that a conversion may change
            their dtype.
        scales: of a float8 dtype: what stored numbers are multiplied with, as float32: one for all units, or one per
            unit; none: 1. An engine's calibrated ``k_scale`` and ``v_scale`` are such scales.
        scaled_by: of a float8 dtype: the component of the same layers that has a float32 scale for every row and unit.
    """

    name: str
    dtype: str
    units: int
    unit_bytes: int
    tokens_per_row: int = 1
    rows: int = 0
    window: int | None = None
    format: str = PLAIN
    scales: tuple[float, ...] = field(default=(), converter=_scales)
    scaled_by: str | None = None

    def __attrs_post_init__(self) -> None:
        where = f"component {arguments.shown(self.name)}"
        arguments.text(self.name, where, most=256)
        arguments.text(self.format, f"{where}: format", most=256)
        for name in ("units", "unit_bytes", "tokens_per_row", "rows", "window"):
            value = getattr(self, name)
            if not (name == "window" and value is None):
                object.__setattr__(self, name, arguments.count(value, f"{where}: {name}", error=GeometryError))
        size = item_bytes(self.dtype)
        if not self.name or self.units < 1 or self.unit_bytes < 1:
            raise GeometryError(f"component {self.name!r}: needs a name and positive sizes: {self}")
        if self.unit_bytes % size:
            raise GeometryError(f"component {self.name!r}: unit_bytes {self.unit_bytes} is not whole {self.dtype}s")
        if self.tokens_per_row < 0 or (self.tokens_per_row == 0) != (self.rows > 0):
            raise GeometryError(f"component {self.name!r}: a state has rows and tokens_per_row 0, others neither")
        if self.window is not None and self.window < 1:
            raise GeometryError(f"component {self.name!r}: window {self.window} must be at least 1 token")
        if self.window is not None and self.rows:
            raise GeometryError(f"component {self.name!r}: a state has no tokens, so it cannot have a window of them")
        self._check_scales()

    def _check_scales(self) -> None:
        where = f"component {self.name!r}"
        if self.scaled_by is not None:
            arguments.text(self.scaled_by, f"{where}: scaled_by", least=1, most=256)
        if not self.scales and self.scaled_by is None:
            return
        if self.dtype not in SCALED or self.rows:
            what = "a state" if self.rows else self.dtype
            raise GeometryError(f"{where}: {what} has no scales; components of {' and '.join(SCALED)} may have them")
        if self.scales and self.scaled_by is not None:
            raise GeometryError(f"{where}: scales are given, and scaled_by names {self.scaled_by!r}: one or the other")
        if len(self.scales) not in (0, 1, self.units):
            raise GeometryError(f"{where}: {len(self.scales)} scales for {self.units} units: give one, or one per unit")
        for unit, scale in enumerate(self.scales):
            if not LEAST_SCALE <= scale < math.inf:
                raise GeometryError(f"{where}: scale {unit} is {scale}; it must be finite, and at least {LEAST_SCALE}")

    @property
    def plain(self) -> bool:
        """Whether a unit is elements side by side."""
        return self.format.split(",", 1)[0] == PLAIN

    @property
    def extent(self) -> Extent:
        """Which rows there are, and which decode needs; a window is rounded outwards to whole rows."""
        window = None if self.window is None else window_rows(self.window, self.tokens_per_row)
        return Extent(window, self.rows)


def _freeze(
    layers: Mapping[LayerId, Iterable[Component]] | Mapping[int, Iterable[Component]],
) -> dict[LayerId, tuple[Component, ...]]:
    found: dict[LayerId, tuple[Component, ...]] = {}
    for given, components in arguments.mapping(layers, "layers").items():
        layer = LayerId(arguments.count(given, "layers: layer", most=MOST_LAYERS - 1, error=GeometryError))
        found[layer] = arguments.several(components, f"layer {layer}", Component, GeometryError)
    return {layer: found[layer] for layer in sorted(found)}


def _check_scaled(layer: LayerId, component: Component, components: tuple[Component, ...]) -> None:
    """Raise a GeometryError unless the component's scales are there, a float32 for every row and unit."""
    if component.scaled_by is None:
        return
    where = f"layer {layer}, {component.name!r}: scaled_by {component.scaled_by!r}"
    for scale in components:
        if scale.name == component.scaled_by:
            wanted = Component(
                scale.name, "float32", component.units, 4, component.tokens_per_row, window=component.window
            )
            if scale != wanted:
                raise GeometryError(f"{where} must be {wanted}, not {scale}")
            return
    raise GeometryError(f"{where}: there is no such component; there are {[c.name for c in components]}")


def _items(layers: Mapping[LayerId, tuple[Component, ...]]) -> tuple[tuple[LayerId, tuple[Component, ...]], ...]:
    return tuple(layers.items())


@frozen(cache_hash=True)
class CacheSpec:
    """The cache of a whole model, before any parallelism: the same on every rank of both sides.

    Rows count tokens or runs of them: all components but states have the same ``tokens_per_row``.

    Args:
        layers: the components of each layer; layers may differ.
        model: identifies weights, adapter, RoPE and quantisation scales; equal bytes mean equal caches.
    """

    layers: Mapping[LayerId, tuple[Component, ...]] = field(converter=_freeze, eq=_items)
    model: bytes = b""

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "model", arguments.octets(self.model, "model", most=4096))
        if not self.layers:
            raise GeometryError("a cache spec needs at least one layer")
        for layer, components in self.layers.items():
            names = [c.name for c in components]
            if not names or len(set(names)) != len(names):
                raise GeometryError(f"layer {layer}: needs components with distinct names, has {names}")
            for component in components:
                _check_scaled(layer, component, components)
        self._check_rows()

    def _check_rows(self) -> None:
        first: tuple[LayerId, Component] | None = None
        for layer, component in ((layer, c) for layer, cs in self.layers.items() for c in cs if not c.rows):
            first = first or (layer, component)
            if component.tokens_per_row != first[1].tokens_per_row:
                raise GeometryError(
                    f"rows of one spec have the same tokens_per_row, but layer {first[0]}, {first[1].name!r} has "
                    f"{first[1].tokens_per_row} and layer {layer}, {component.name!r} has {component.tokens_per_row}"
                )

    @classmethod
    def uniform(cls, num_layers: int, components: Iterable[Component], model: bytes = b"") -> CacheSpec:
        """``num_layers`` layers that all have the same components."""
        num_layers = arguments.count(num_layers, "num_layers", least=1, most=MOST_LAYERS, error=GeometryError)
        same = arguments.several(components, "components", Component, GeometryError)
        return cls({LayerId(i): same for i in range(num_layers)}, model)

    @classmethod
    def kv(
        cls,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        *,
        v_head_dim: int | None = None,
        v_dtype: str | None = None,
        model: bytes = b"",
    ) -> CacheSpec:
        """Multi-head or grouped-query attention: ``k`` and ``v`` with ``kv_heads`` units each."""
        head_dim = arguments.count(head_dim, "head_dim", least=1, error=GeometryError)
        if v_head_dim is not None:
            v_head_dim = arguments.count(v_head_dim, "v_head_dim", least=1, error=GeometryError)
        v_dtype = dtype if v_dtype is None else v_dtype
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        k = Component("k", dtype, kv_heads, head_dim * item_bytes(dtype))
        v = Component("v", v_dtype, kv_heads, v_head_dim * item_bytes(v_dtype))
        return cls.uniform(num_layers, (k, v), model)

    @classmethod
    def mla(cls, num_layers: int, latent_dim: int, dtype: str, *, model: bytes = b"") -> CacheSpec:
        """Multi-head latent attention: one ``latent`` unit a row, held whole by every tensor-parallel rank."""
        latent_dim = arguments.count(latent_dim, "latent_dim", least=1, error=GeometryError)
        latent = Component("latent", dtype, 1, latent_dim * item_bytes(dtype))
        return cls.uniform(num_layers, (latent,), model)

    def cast(self, dtype: str, *, computed: bool = False) -> CacheSpec:
        """The same cache in another dtype, where a conversion to it exists; states and other dtypes stay as they are.

        Scales of the components that change are left out. For calibrated scales, evolve the result's components.

        Args:
            dtype: for example ``"float8_e4m3fn"``.
            computed: with a component of scales, ``"k_scale"`` for ``"k"``: one per row and unit; only to a float8
                dtype.

        Raises:
            GeometryError: an unknown dtype, or one that has no scales.
        """
        size = item_bytes(dtype)
        if arguments.flag(computed, "computed") and dtype not in SCALED:
            raise GeometryError(f"{dtype} has no scales; {' and '.join(SCALED)} may have them")
        layers: dict[LayerId, list[Component]] = {}
        for layer, components in self.layers.items():
            used = {c.scaled_by for c in components if (c.dtype, dtype) in CONVERSIONS}
            of = layers[layer] = []
            for c in components:
                if c.name in used:
                    continue
                if (c.dtype, dtype) not in CONVERSIONS or c.rows or c.tokens_per_row != 1 or not c.plain:
                    of.append(c)
                    continue
                name, nbytes = f"{c.name}_scale", c.unit_bytes // item_bytes(c.dtype) * size
                scaled_by = name if computed else None
                of.append(evolve(c, dtype=dtype, unit_bytes=nbytes, scales=(), scaled_by=scaled_by))
                if computed:
                    of.append(Component(name, "float32", c.units, 4, window=c.window))
        return CacheSpec(layers, self.model)

    def component(self, layer: int, name: str) -> Component:
        """The component of that name in that layer.

        Raises:
            GeometryError: the layer has no such component; the message lists its components.
        """
        layer = LayerId(arguments.count(layer, "layer", least=-arguments.MOST, error=GeometryError))
        arguments.one(name, "component", str, GeometryError)
        for component in self.layers.get(layer, ()):
            if component.name == name:
                return component
        there = [c.name for c in self.layers.get(layer, ())]
        raise GeometryError(f"layer {layer} has no component {name!r}; it has {there}")

    def names(self) -> tuple[str, ...]:
        """Every component name, in order of first appearance: the order of planes in a staged segment."""
        return tuple(dict.fromkeys(c.name for cs in self.layers.values() for c in cs))

    def state_rows(self) -> int:
        """The most rows that a state has; 0: there are no states."""
        return max(c.rows for cs in self.layers.values() for c in cs)

    def slides(self) -> bool:
        """True if some component has a window: the rows that decode needs then depend on the end of the room."""
        return any(c.window is not None for cs in self.layers.values() for c in cs)
