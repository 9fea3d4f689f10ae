"""vLLM's KV tensors as a pool, in place.

vLLM gives each layer one tensor ``[blocks, heads, tokens, content]``, with strides of its own choice; MLA's has no axis
of heads. ``content`` is all that a layer keeps of one token and head: K and V, or the latent. On GPUs a row is a token,
and K and V are components of their own, so that decode's cache may have another dtype than prefill's. The attention of
vLLM's CPU backend stores the K of a whole block before its V, so there a row is a block, which is never cut; see
``csrc/cpu`` of vLLM 0.32.

The cache groups share one pool of blocks. A block belongs to one group at a time, and the groups lie in the same bytes.
A block of a group of states holds the states of one request; see ``states``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import frozen

from ...errors import GeometryError, UnsupportedError
from ...geometry import CacheSpec, Component, Group, Plane, Shard, Site, even_units, item_bytes, shard
from ...ids import KV, GroupId, LayerId
from ...memory import Buffer, PagedPool
from ..common import CommonCache, Strides
from ..scales import Float8
from .states import StateShape


@frozen
class LayerShape:
    """A layer's cache, as vLLM describes it.

    Args:
        name: vLLM's name of the layer.
        group: the page-id space.
        heads: heads of the whole model, which tensor parallelism divides; 1: every rank holds all of it.
        window: tokens of a sliding window; None: none.
        format: names what is inside ``content``; sides with different ones are refused.
        parts: elements of K and of V in ``content``; None: it is one component, which is not converted.
        states: what it has instead of tokens; None: it has tokens.
    """

    name: str
    group: GroupId
    heads: int
    window: int | None
    format: str
    parts: tuple[int, int] | None = None
    states: StateShape | None = None


def pool_of(
    layers: Sequence[LayerShape],
    tensors: Mapping[str, torch.Tensor],
    *,
    blocks: int,
    block: int,
    row: int,
    tp: int,
    rank: int,
    model: bytes,
    float8: Mapping[str, Float8] | None = None,
) -> tuple[PagedPool, list[Shard]]:
    """The rank's pool, and the shards of all ranks.

    Args:
        layers: in the order of the model.
        tensors: per layer name ``[blocks, heads, tokens, content]``, or ``[blocks, tokens, content]``; of a layer with
            states ``[blocks, 1, 1, bytes]``.
        blocks: number of blocks.
        block: tokens of a block.
        row: tokens of a row: 1, or ``block``.
        tp: number of tensor-parallel ranks.
        rank: this rank.
        model: identifies the model.
        float8: the layers whose K and V are float8, by name.

    Raises:
        UnsupportedError: a tensor that cannot be described by one stride per axis.
        GeometryError: a tensor of another shape.
    """
    components: dict[LayerId, list[Component]] = {}
    views: dict[LayerId, dict[str, torch.Tensor]] = {}
    groups: dict[LayerId, GroupId] = {}
    for number, layer in enumerate(layers):
        at, groups[LayerId(number)] = LayerId(number), layer.group
        if layer.states is not None:
            parts = list(layer.states.parts(tensors[layer.name], tp, rank))
            views[at], components[at] = {one.name: view for one, view in parts}, [one for one, _ in parts]
            continue
        cells = _rows(layer.name, tensors[layer.name], blocks, block, row)
        kept = (float8 or {}).get(layer.name)
        views[at] = _parts(layer, cells, kept)
        components[at] = [
            Component(
                name, str(view.dtype).removeprefix("torch."), layer.heads, view.shape[-1] * view.element_size(),
                tokens_per_row=row, window=layer.window, format=layer.format, scales=kept.scales[name] if kept else (),
            )
            for name, view in views[at].items()
        ]  # fmt: skip
    spec = CacheSpec(components, model)
    shards = [shard(spec, tp=tp, rank=one) for one in range(tp)]
    pool = PagedPool.from_tensors(
        spec, shards[rank], views, layout="HND", group=groups, state_group=groups, null_page=0, overlaid=True
    )
    return pool, shards


def common_pool_of(
    cache: CommonCache,
    layers: Sequence[LayerShape],
    tensors: Mapping[str, torch.Tensor],
    *,
    blocks: int,
    block: int,
    tp: int,
    rank: int,
) -> tuple[PagedPool, list[Shard]]:
    """The same for the CPU backend, in the terms that engines share; see ``element_order``.

    Inside each block and head lie all K, ``[head_dim, tokens]``, and then all V, ``[tokens, head_dim]``.

    Args:
        cache: the model's.
        layers: in the order of the model.
        tensors: per layer name ``[blocks, heads, tokens, 2 * head_dim]``.
        blocks: number of blocks.
        block: tokens of a block.
        tp: number of tensor-parallel ranks.
        rank: this rank.

    Raises:
        UnsupportedError: tensors that are not those of the model.
    """
    mine, size = even_units(cache.heads, tp, rank), item_bytes(cache.dtype)
    if len(layers) != cache.layers:
        raise UnsupportedError(f"description 'common': {len(layers)} layers of vLLM, {cache.layers} in config.json")
    buffers: dict[int, Buffer] = {}
    planes: list[Plane] = []
    for number, layer in enumerate(layers):
        tensor = tensors[layer.name]
        shape, inner = (blocks, len(mine), block, 2 * cache.dim), (2 * cache.dim, 1)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if (tuple(tensor.shape), dtype, tensor.stride()[2:]) != (shape, cache.dtype, inner):
            raise UnsupportedError(
                f"description 'common': layer {layer.name}: a cache {tuple(tensor.shape)} of {dtype} with strides "
                f"{tensor.stride()}; {shape} of {cache.dtype} is needed, with a block and head in one piece"
            )
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        buffers.setdefault(start, Buffer(start, storage.nbytes(), str(tensor.device), storage))
        page, head = tensor.stride(0) * size, tensor.stride(1) * size
        place, first = list(buffers).index(start), tensor.data_ptr() - start
        k = Strides(place, first, page=page, token=size, head=head, element=block * size)
        half = first + block * cache.dim * size
        v = Strides(place, half, page=page, token=cache.dim * size, head=head, element=size)
        planes += cache.planes(number, mine, k, v)
    shards = [cache.shard(tp, one) for one in range(tp)]
    lengths = [one.nbytes for one in buffers.values()]
    site = Site(cache.spec, shards[rank], [Group(KV, block, blocks, null_page=0)], planes, lengths)
    return PagedPool(site, list(buffers.values())), shards


def _parts(layer: LayerShape, cells: torch.Tensor, float8: Float8 | None) -> dict[str, torch.Tensor]:
    """The components of a layer, which lie side by side in ``content``."""
    if layer.parts is None:
        return {"kv": cells}
    if cells.shape[-1] != sum(layer.parts):
        raise GeometryError(f"layer {layer.name}: {cells.shape[-1]} elements of a token and head, not {layer.parts}")
    if float8 is not None:
        if cells.element_size() != 1:
            raise GeometryError(f"layer {layer.name}: {cells.dtype} are no {float8.dtype}")
        cells = cells.view(getattr(torch, float8.dtype))
    return dict(zip(("k", "v"), torch.split(cells, list(layer.parts), dim=-1), strict=True))


def _rows(name: str, tensor: torch.Tensor, blocks: int, block: int, row: int) -> torch.Tensor:
    """``[blocks, heads, rows, content of a row]``, a view."""
    where, given = f"layer {name}", tensor
    if tensor.dim() == 3:
        tensor = tensor.unsqueeze(1)
    if tensor.dim() != 4 or tensor.shape[0] % blocks:
        raise UnsupportedError(f"{where}: a cache of shape {tuple(given.shape)} for {blocks} blocks is not supported")
    if tensor.shape[0] != blocks:
        tensor = _joined(where, tensor, blocks)
    if tensor.shape[2] != block:
        raise GeometryError(f"{where}: {tensor.shape[2]} tokens in a block of {block}")
    if row == 1:
        return tensor
    if tensor.stride(2) != tensor.shape[3] * tensor.stride(3):
        raise UnsupportedError(f"{where}: strides {tensor.stride()} split the tokens of a block")
    return tensor.flatten(2).unsqueeze(2)


def _joined(where: str, tensor: torch.Tensor, blocks: int) -> torch.Tensor:
    """Kernel blocks that are parts of a block, joined where one stride reaches all tokens of a block."""
    parts = tensor.shape[0] // blocks
    kernel, step = tensor.shape[2], tensor.stride()
    if step[0] != kernel * step[2]:
        raise UnsupportedError(f"{where}: {parts} kernel blocks make a block, with strides {step}; use one per block")
    shape = (blocks, tensor.shape[1], parts * kernel, tensor.shape[3])
    return tensor.as_strided(shape, (parts * step[0], *step[1:]))
