"""Endpoints deliver the right bytes over NIXL."""

from __future__ import annotations

import time

import pytest

from disagg_kv import (
    CacheSpec,
    DecodeEndpoint,
    GroupId,
    PagedPool,
    PageTable,
    Phase,
    PrefillEndpoint,
    Source,
    shard,
    transport,
)
from disagg_kv.channels import ZmqChannel
from disagg_kv.endpoints import Expectation
from disagg_kv.ids import RoomId
from disagg_kv.memory import bytes_of
from disagg_kv.rendezvous import StaticRendezvous
from disagg_kv.testing.pair import noise, wait
from tests.support.needs import needs_nixl
from tests.support.oracle import RowCell, unit_bytes, where

KV = GroupId("kv")
ROWS = 100
SPEC = CacheSpec.kv(num_layers=2, kv_heads=4, head_dim=64, dtype="bfloat16")


def cells(pool: PagedPool, table: PageTable) -> dict[RowCell, bytes]:
    """What a pool holds of a room, cell by cell."""
    memory = [bytes_of(buffer) for buffer in pool.buffers]
    found: dict[RowCell, bytes] = {}
    for holding in pool.site.shard:
        for layer in holding.layers:
            for unit in holding.units:
                for row in range(ROWS):
                    cell = (holding.component, layer, row, unit)
                    buffer, at = where(pool.site, {KV: table}, cell)
                    found[cell] = memory[buffer][at : at + unit_bytes(pool.site, layer, holding.component)].tobytes()
    return found


@needs_nixl
@pytest.mark.parametrize("path", ["staged", "slice"])
@pytest.mark.parametrize(("prefills", "decodes"), [(2, 1), (1, 2)])
def test_every_byte_arrives(prefills: int, decodes: int, path: str) -> None:
    """Between splits and page sizes that differ; all agents live in this process."""
    book = StaticRendezvous()
    theirs = PageTable(KV, [6, 1, 4, 2, 0, 3, 7])
    ours = PageTable(KV, [3, 0, 2, 1])
    sources = [shard(SPEC, tp=prefills, rank=rank) for rank in range(prefills)]
    targets = [shard(SPEC, tp=decodes, rank=rank) for rank in range(decodes)]
    from_pools = [PagedPool.allocate(SPEC, held, pages=8, page_size=16) for held in sources]
    to_pools = [PagedPool.allocate(SPEC, held, pages=4, page_size=32) for held in targets]
    for seed, pool in enumerate(from_pools):
        for number, buffer in enumerate(pool.buffers):
            bytes_of(buffer)[:] = noise(buffer.nbytes, 100 * seed + number)
    senders = [
        PrefillEndpoint(
            pool, transport=transport("nixl"), channel=ZmqChannel(), rendezvous=book, instance="prefill", rank=rank,
            shards=sources, strategy=path,
        )
        for rank, pool in enumerate(from_pools)
    ]  # fmt: skip
    receivers = [
        DecodeEndpoint(
            pool, transport=transport("nixl"), channel=ZmqChannel(), rendezvous=book, instance="decode", rank=rank,
            shards=targets,
        )
        for rank, pool in enumerate(to_pools)
    ]  # fmt: skip
    try:
        room = RoomId(b"room")
        receptions = [receiver.open(room, Source("prefill")) for receiver in receivers]
        for reception in receptions:
            reception.expect(Expectation(ROWS, [ours]))
        for sender in senders:
            delivery = sender.open(room)
            delivery.send_chunk(ROWS, [theirs])
            delivery.finish(ROWS)
        wait(lambda: all(r.released for r in receptions), lambda: time.sleep(0.001), 120.0, "the room to end")
        assert [(r.phase, r.error) for r in receptions] == [(Phase.DONE, None)] * decodes
    finally:
        for sender in senders:
            sender.close()
        for receiver in receivers:
            receiver.close()
    want = {cell: data for pool in from_pools for cell, data in cells(pool, theirs).items()}
    got = {cell: data for pool in to_pools for cell, data in cells(pool, ours).items()}
    assert got == want
