"""One layer of a model between transformers' own cache and the planes of a pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import frozen

from ...errors import GeometryError, UnsupportedError
from ...geometry import Component, item_bytes
from ...ids import LayerId
from ...memory import PagedPool

if TYPE_CHECKING:
    import torch
    from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer


@frozen(eq=False)
class Planed:
    """One component's memory as ``[pages, rows, units, elements]``."""

    layer: LayerId
    component: Component
    cells: torch.Tensor

    def check(self, given: torch.Tensor, shape: tuple[int, ...], dtype: str | None = None) -> None:
        """Raise a :class:`GeometryError` unless the model's tensor has this shape and type; None: the plane's type."""
        wanted = f"torch.{dtype or self.component.dtype}"
        if tuple(given.shape) != shape or str(given.dtype) != wanted:
            raise GeometryError(
                f"layer {self.layer}, {self.component.name!r}: the model caches {given.dtype} {tuple(given.shape)}, "
                f"this rank's shard has {wanted} {shape}"
            )

    def stored(self, given: torch.Tensor) -> torch.Tensor:
        """The model's tensor in the plane's type, by the specified conversion where it has another."""
        if given.dtype == self.cells.dtype:
            return given
        from ...kernels.convert import reference

        return reference.rounded(given.float(), self.component.dtype).view(self.cells.dtype)


@frozen(eq=False)
class Layer:
    """The cache of one layer.

    Args:
        tokens: keys and values; empty if the layer has only states.
        index: keys of a sparse-attention index, if the layer has one.
        conv: the blocks of a conv state, in the order of its channels.
        recurrent: the recurrent state.
    """

    tokens: tuple[Planed, ...]
    index: Planed | None
    conv: tuple[Planed, ...]
    recurrent: Planed | None

    @property
    def window(self) -> int | None:
        """Number of last tokens in the cache; None: all."""
        return self.tokens[0].component.window if self.tokens else None

    def fresh(self) -> CacheLayerMixin | LinearAttentionLayer:
        """An empty layer of this kind as transformers makes it."""
        from transformers import cache_utils as hf

        if self.conv:
            return hf.LinearAttentionAndFullAttentionLayer() if self.tokens else hf.LinearAttentionLayer()
        if self.window is None:
            plain: Callable[[], CacheLayerMixin] = hf.DynamicLayer if self.index is None else hf.DynamicIndexedLayer
            return plain()
        return hf.DynamicSlidingWindowLayer(sliding_window=self.window + 1)

    def write_states(self, slot: int, conv: torch.Tensor, recurrent: torch.Tensor) -> None:
        """Write a conv state ``[1, channels, kernel]`` and a recurrent state ``[1, heads, rows, columns]`` into a slot.

        Raises:
            GeometryError: other sizes or types than the shard's; nothing is written then.
        """
        import torch

        assert self.recurrent is not None
        widths = [block.cells.shape[2] * block.cells.shape[3] for block in self.conv]
        self.conv[0].check(conv, (1, sum(widths), self.conv[0].cells.shape[1]))
        _, rows, units, columns = self.recurrent.cells.shape
        self.recurrent.check(recurrent, (1, units, rows, columns))
        for block, part in zip(self.conv, torch.split(conv[0], widths), strict=True):
            block.cells[slot] = part.T.reshape(block.cells.shape[1:])
        self.recurrent.cells[slot] = recurrent[0].transpose(0, 1)

    def read_states(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of a slot's conv state ``[1, channels, kernel]`` and recurrent state ``[1, heads, rows, columns]``."""
        import torch

        assert self.recurrent is not None
        conv = torch.cat([block.cells[slot].flatten(1).T for block in self.conv])
        return conv.unsqueeze(0), self.recurrent.cells[slot].transpose(0, 1).unsqueeze(0).clone()


def layers_of(pool: PagedPool) -> list[Layer]:
    """The layers that a pool holds, in order.

    Raises:
        UnsupportedError: one that transformers does not keep like this.
        GeometryError: memory whose strides do not suit its type.
    """
    site = pool.site
    numbers = {(p.layer, p.component): i for i, p in enumerate(site.planes)}
    layers: list[Layer] = []
    for layer in site.shard.layers():
        held = [
            Planed(layer, c, _cells(pool, numbers[layer, c.name], layer, c))
            for c in site.spec.layers[layer]
            if (layer, c.name) in numbers
        ]
        index = next((p for p in held if p.component.name == "index"), None)
        tokens = tuple(p for p in held if not p.component.rows and p is not index)
        states = tuple(p for p in held if p.component.rows)
        if len(tokens) not in (0, 2) or len(states) == 1:
            names = tuple(p.component.name for p in held)
            raise UnsupportedError(
                f"layer {layer} holds {names}; transformers keeps keys and values, or a conv and a recurrent state"
            )
        layers.append(Layer(tokens, index, states[:-1], states[-1] if states else None))
    return layers


def _cells(pool: PagedPool, number: int, layer: LayerId, component: Component) -> torch.Tensor:
    import torch

    from ...kernels.tensors import plane_of

    dtype: torch.dtype = getattr(torch, component.dtype)
    cells = plane_of(pool, number)
    strides = cells.stride()
    size = item_bytes(component.dtype)
    if any(stride % size for stride in strides[:3]):
        raise GeometryError(f"layer {layer}, {component.name!r}: strides {strides[:3]} do not align {component.dtype}")
    return cells.view(dtype)
