"""The collective per step of the page on tensor parallelism: two ranks, on two threads in place of processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed

from disagg_kv import (
    CacheSpec,
    DecodeEndpoint,
    Expectation,
    PagedPool,
    PageTable,
    PrefillEndpoint,
    Source,
    StaticRendezvous,
    ZmqChannel,
    room_id,
    shard,
    transport,
)
from tests.support.pages import ROOT, blocks

SPEC = CacheSpec.kv(num_layers=2, kv_heads=4, head_dim=16, dtype="float32")
gloo: Any = torch.distributed
HALVES = [shard(SPEC, tp=2, rank=rank) for rank in range(2)]


def loading_of_the_page(receiver: DecodeEndpoint, group: Any) -> Any:
    page: dict[str, Any] = {"__name__": "page"}
    (block,) = (block for block in blocks(ROOT / "docs" / "tensor-parallel.md") if "class Loading" in block.source)
    block.run(page)
    return page["Loading"](receiver, group)


def test_all_ranks_act_on_a_room_in_one_step_whether_it_succeeded_or_failed() -> None:
    where = StaticRendezvous()

    def parts(shards: list[Any], rank: int = 0) -> dict[str, Any]:
        pool = PagedPool.allocate(SPEC, shards[rank], pages=16, page_size=16)
        connections = {"transport": transport("shm"), "channel": ZmqChannel(), "rendezvous": where}
        return {"pool": pool, "shards": shards, "rank": rank, **connections}

    def run(rank: int, store: Any) -> list[dict[bytes, int]]:
        loading = loading_of_the_page(ranks[rank], gloo.ProcessGroupGloo(store, rank, 2))
        for page, name in enumerate(("a", "b")):
            reception = ranks[rank].open(room_id(name), Source("prefill-0"))
            reception.expect(Expectation(16, [PageTable([page])]))
            loading.receptions[reception.room] = reception
        steps = []
        while loading.receptions:
            if agreed := loading.step():
                steps.append(agreed)
        return steps

    sender = PrefillEndpoint(instance="prefill-0", **parts([shard(SPEC)]))
    ranks = [DecodeEndpoint(instance="decode-0", **parts(HALVES, rank)) for rank in range(2)]
    for page, name in enumerate(("a", "b")):
        delivery = sender.open(room_id(name))
        delivery.send_chunk(16, [PageTable([page])])
        if name == "a":
            delivery.finish(16)
        else:
            delivery.abort("no free blocks")
    store = gloo.HashStore()
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(run, range(2), (store, store), timeout=60)
    assert first == second
    assert {room: state for step in first for room, state in step.items()} == {room_id("a"): 2, room_id("b"): 1}
    for receiver in ranks:
        receiver.close()
    sender.close()
