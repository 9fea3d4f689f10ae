"""One request from a prefill endpoint to a decode endpoint, in one process or in two; it needs no GPU and no model.

    python examples/minimal.py                    # both sides in this process
    python examples/minimal.py prefill            # prints its address, serves one request and ends
    python examples/minimal.py decode ADDRESS     # in another terminal of the same host

Prefill has pages of 16 tokens and decode pages of 32. The rows are drawn from a fixed seed, so decode can compare them.
"""

from __future__ import annotations

import sys
import time

import torch

from disagg_kv import (
    CacheSpec,
    DecodeEndpoint,
    Expectation,
    PagedPool,
    PageTable,
    Phase,
    PrefillEndpoint,
    Source,
    ZmqChannel,
    room_id,
    shard,
    transport,
)
from disagg_kv.rendezvous import RequestRendezvous

LAYERS, HEADS, DIM, TOKENS, ROOM = 2, 4, 64, 100, room_id("request 1")
SPEC = CacheSpec.kv(num_layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="bfloat16")


def cache(pages: int, page_size: int) -> dict[int, dict[str, torch.Tensor]]:
    """An engine's own tensors: for each layer K and V of ``[pages, tokens of a page, heads, dim]``."""
    shape = (pages, page_size, HEADS, DIM)
    return {layer: {name: torch.zeros(shape, dtype=torch.bfloat16) for name in ("k", "v")} for layer in range(LAYERS)}


def rows(layer: int, name: str) -> torch.Tensor:
    """What the model would have computed."""
    seed = torch.Generator().manual_seed(2 * layer + (name == "v"))
    return torch.randn(TOKENS, HEADS, DIM, generator=seed).bfloat16()


def prefill() -> tuple[PrefillEndpoint, str]:
    """Compute a prompt into pages, and hand it over. Decode may ask before that or after it."""
    tensors, pages, carried = cache(8, 16), [6, 1, 4, 2, 0, 3, 7], RequestRendezvous()
    pool = PagedPool.from_tensors(SPEC, shard(SPEC), tensors, layout="NHD")
    endpoint = PrefillEndpoint(
        pool, transport=transport("shm"), channel=ZmqChannel(), rendezvous=carried, instance="prefill"
    )
    for layer, planes in tensors.items():
        for name, plane in planes.items():
            plane.view(-1, HEADS, DIM)[[p * 16 + i for p in pages for i in range(16)][:TOKENS]] = rows(layer, name)
    delivery = endpoint.open(ROOM)
    delivery.send_chunk(TOKENS, [PageTable(pages)])  # final; on a GPU: at an event
    delivery.finish(TOKENS)
    return endpoint, carried.published("prefill", 0)


def decode(address: str) -> None:
    """Await the rows in pages of decode's own, and compare them."""
    tensors, pages = cache(4, 32), [3, 0, 2, 1]
    pool = PagedPool.from_tensors(SPEC, shard(SPEC), tensors, layout="NHD")
    endpoint = DecodeEndpoint(
        pool, transport=transport("shm"), channel=ZmqChannel(), rendezvous=RequestRendezvous(), instance="decode"
    )
    reception = endpoint.open(ROOM, Source("prefill", [address]))  # a router carries the address in the request
    reception.expect(Expectation(TOKENS, [PageTable(pages)]))
    while not reception.released:  # an engine calls poll once in each of its steps
        endpoint.wait(1.0)
        endpoint.poll()
    assert reception.phase is Phase.DONE, reception.error
    for layer, planes in tensors.items():
        for name, plane in planes.items():
            assert torch.equal(plane[pages].reshape(-1, HEADS, DIM)[:TOKENS], rows(layer, name))
    report = reception.report
    print(f"{TOKENS} tokens, {report.nbytes:,} bytes over {report.transport!r} by {report.path!r}: all equal")
    endpoint.close()


if sys.argv[1:2] == ["decode"]:
    decode(sys.argv[2])
else:
    sender, where = prefill()
    print(f"prefill listens at {where}", flush=True)
    if sys.argv[1:2] != ["prefill"]:
        decode(where)
    while sender.usage().rooms:  # until its pages are released
        time.sleep(0.01)
    sender.close()
