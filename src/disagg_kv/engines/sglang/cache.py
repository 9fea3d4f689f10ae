"""SGLang's KV buffers and metadata rows as a pool, in place.

SGLang describes its cache by addresses. Each layer has a buffer of K and a buffer of V, ``[slots, heads, head_dim]``,
and a page is a run of slots; the order is K of all layers, then V of all layers. MLA has one buffer of latents for each
layer. Page 0 takes the rows of padded tokens, so no request owns it. See ``MHATokenToKVPool`` of SGLang 0.5.23.

A metadata row has the first token of a request and what else SGLang's decode side needs of the prefill side. It is one
row in each of several buffers in CPU memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from attrs import frozen

from ...errors import GeometryError, UnsupportedError
from ...geometry import CacheSpec, Component, Group, Plane, Shard, Site, even_units, item_bytes, shard
from ...ids import KV, LayerId
from ...memory import Buffer, PagedPool
from ...memory.raw import bytes_of
from ..common import CommonCache, Strides
from .quantized import Scales

TOKEN, ROOM = np.dtype(np.int32), np.dtype(np.uint64)
"""Element types of the first buffer of metadata rows, which has the first token, and of the last one: the room."""


@frozen
class Buffers:
    """Buffers of SGLang's ``KVArgs``.

    Args:
        addresses: of each.
        lengths: bytes of each.
        items: bytes of a page, or of a metadata row, of each.
    """

    addresses: Sequence[int]
    lengths: Sequence[int]
    items: Sequence[int]

    def __attrs_post_init__(self) -> None:
        if not len(self.addresses) == len(self.lengths) == len(self.items):
            raise GeometryError(
                f"{len(self.addresses)} addresses, {len(self.lengths)} lengths and {len(self.items)} sizes of items"
            )

    def count(self, what: str) -> int:
        """Items of a buffer.

        Raises:
            GeometryError: no buffers, or buffers of different numbers of items.
        """
        counts = {length // item for length, item in zip(self.lengths, self.items, strict=True)}
        if len(counts) != 1:
            raise GeometryError(f"buffers of {sorted(counts)} {what}, not of one number")
        return counts.pop()


class SGLangPool(PagedPool):
    """A rank's pages; its aux rows are SGLang's metadata rows.

    Args:
        site: where everything lies.
        buffers: the allocations.
        metadata: buffers of metadata rows, in CPU memory.

    Raises:
        GeometryError: see :class:`~disagg_kv.memory.PagedPool`; or metadata buffers with different numbers of rows.
    """

    def __init__(self, site: Site, buffers: Sequence[Buffer], metadata: Buffers) -> None:
        super().__init__(site, buffers)
        slots = metadata.count("metadata rows")
        self._parts: list[npt.NDArray[np.uint8]] = [
            bytes_of(Buffer(at, slots * size)).reshape(slots, size)
            for at, size in zip(metadata.addresses, metadata.items, strict=True)
        ]
        self._slots = slots

    @property
    def aux_bytes(self) -> int:
        """Bytes of one metadata row."""
        return sum(part.shape[1] for part in self._parts)

    def read_aux(self, slot: int) -> bytes:
        """Copy out the metadata row ``slot``; a GeometryError if there is none of that number."""
        return b"".join(part[self._checked(slot)].tobytes() for part in self._parts)

    def write_aux(self, slot: int, data: bytes) -> None:
        """Copy ``data`` into the metadata row ``slot``; a GeometryError if prefill's rows have another length."""
        self._checked(slot)
        if len(data) != self.aux_bytes:
            raise GeometryError(
                f"metadata row {slot}: prefill's rows have {len(data)} bytes, decode's {self.aux_bytes}: the servers "
                "differ in options that change the metadata"
            )
        at = 0
        for part in self._parts:
            part[slot] = np.frombuffer(data, np.uint8, part.shape[1], at)
            at += part.shape[1]

    def write_first(self, slot: int, token: int, room: int) -> None:
        """Write a metadata row as SGLang's prefill does, with nothing but the first token of the output, and the room.

        Raises:
            GeometryError: there is no such row; a token or a room that is no number of its buffer.
        """
        self._checked(slot)
        for what, value, kind in (("token", token, TOKEN), ("room", room, ROOM)):
            if not 0 <= value <= np.iinfo(kind).max:
                raise GeometryError(f"metadata row {slot}: {what} {value} is no {kind}")
        for part in self._parts:
            part[slot] = 0
        self._parts[0][slot].view(TOKEN)[0] = token
        self._parts[-1][slot].view(ROOM)[0] = room

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self._slots:
            raise GeometryError(f"metadata row {slot}: there are {self._slots}")
        return slot


def pool_of(
    kv: Buffers,
    metadata: Buffers,
    *,
    page: int,
    heads: int,
    latent: bool,
    dtype: str,
    tp: int,
    rank: int,
    model: bytes,
    device: str,
    scales: Sequence[tuple[Scales, Scales]] = (),
) -> tuple[SGLangPool, list[Shard]]:
    """The rank's pool, and the shards of all ranks.

    Args:
        kv: buffers of pages.
        metadata: buffers of metadata rows.
        page: tokens of a page.
        heads: KV heads of the whole model; not read for MLA.
        latent: the buffers hold MLA's latents.
        dtype: element type.
        tp: number of tensor-parallel ranks.
        rank: this rank.
        model: identifies the model.
        device: where the pages are, such as ``cpu`` or ``cuda:0``.
        scales: of each layer those of K and of V, for a float8; empty: 1.

    Raises:
        UnsupportedError: sizes that do not divide into the model's heads.
        GeometryError: buffers of different numbers of pages.
    """
    names = ("latent",) if latent else ("k", "v")
    units = 1 if latent else heads
    local = 1 if latent else max(1, heads // tp)
    if not kv.items or len(kv.items) % len(names) or (not latent and heads % tp and tp % heads):
        raise UnsupportedError(f"{len(kv.items)} KV buffers of {heads} heads on {tp} ranks are not supported")
    layers = len(kv.items) // len(names)
    planes, components = [], {LayerId(layer): list[Component]() for layer in range(layers)}
    for number, item in enumerate(kv.items):
        component, layer = divmod(number, layers)
        unit, rest = divmod(item, page * local)
        if rest:
            raise UnsupportedError(f"KV buffer {number}: {item} bytes of a page of {page} tokens of {local} heads")
        of = scales[layer][component] if scales else ()
        components[LayerId(layer)].append(Component(names[component], dtype, units, unit, scales=of))
        planes.append(Plane(LayerId(layer), names[component], KV, number, 0, item, local * unit, unit))
    spec = CacheSpec(components, model)
    shards = [shard(spec, tp=tp, rank=one) for one in range(tp)]
    group = Group(KV, page, kv.count("pages"), null_page=0)
    buffers = [Buffer(at, length, device) for at, length in zip(kv.addresses, kv.lengths, strict=True)]
    site = Site(spec, shards[rank], [group], planes, tuple(kv.lengths))
    return SGLangPool(site, buffers, metadata), shards


def common_pool_of(
    cache: CommonCache, kv: Buffers, metadata: Buffers, *, page: int, tp: int, rank: int, device: str
) -> tuple[SGLangPool, list[Shard]]:
    """The same in the terms that engines share.

    Args:
        cache: the model's.
        kv: buffers of pages.
        metadata: buffers of metadata rows.
        page: tokens of a page.
        tp: number of tensor-parallel ranks.
        rank: this rank.
        device: where the pages are.

    Raises:
        UnsupportedError: buffers that are not those of the model; V with elements that lie apart.
        GeometryError: buffers of different numbers of pages.
    """
    mine, size = even_units(cache.heads, tp, rank), item_bytes(cache.dtype)
    head = cache.dim * size
    token = len(mine) * head
    if list(kv.items) != [page * token] * (2 * cache.layers):
        raise UnsupportedError(
            f"description 'common': {len(kv.items)} KV buffers with pages of {sorted(set(kv.items))} bytes; "
            f"K and V of {cache.layers} layers have {page * token}"
        )
    planes: list[Plane] = []
    for layer in range(cache.layers):
        k, v = (
            Strides(number, 0, page=page * token, token=token, head=head, element=size)
            for number in (layer, cache.layers + layer)
        )
        planes += cache.planes(layer, mine, k, v)
    shards = [cache.shard(tp, one) for one in range(tp)]
    buffers = [Buffer(at, length, device) for at, length in zip(kv.addresses, kv.lengths, strict=True)]
    group = Group(KV, page, kv.count("pages"), null_page=0)
    site = Site(cache.spec, shards[rank], [group], planes, tuple(kv.lengths))
    return SGLangPool(site, buffers, metadata), shards
