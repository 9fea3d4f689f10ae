"""A rank of each side, with threads, for tests of what observes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from disagg_kv import (
    CacheSpec,
    DecodeEndpoint,
    Expectation,
    GroupId,
    PagedPool,
    PageTable,
    Phase,
    PrefillEndpoint,
    Source,
    shard,
)
from disagg_kv.channels import Hub, InprocChannel
from disagg_kv.ids import RoomId
from disagg_kv.rendezvous import StaticRendezvous
from disagg_kv.trace import Observer
from disagg_kv.transports import InprocTransport

SPEC = CacheSpec.kv(2, 4, 8, "float16")
TOKENS, PAGE_SIZE = 64, 16
TABLE = [PageTable(GroupId("kv"), list(range(TOKENS // PAGE_SIZE)))]
NBYTES = TOKENS * 2 * 2 * 4 * 8 * 2
"""Of a room: tokens, layers, K and V, heads, elements, bytes."""


@contextmanager
def endpoints(
    prefill: Observer | None = None, decode: Observer | None = None
) -> Iterator[tuple[PrefillEndpoint, DecodeEndpoint]]:
    """A rank of each side, with threads."""
    hub, where = Hub(), StaticRendezvous()
    pools = [PagedPool.allocate(SPEC, shard(SPEC), pages=8, page_size=PAGE_SIZE) for _ in range(2)]
    sender = PrefillEndpoint(
        pools[0], transport=InprocTransport(), channel=InprocChannel(hub, "P"), instance="P", slot_bytes=4096,
        strategy="staged", observer=prefill, rendezvous=where,
    )  # fmt: skip
    receiver = DecodeEndpoint(
        pools[1], transport=InprocTransport(), channel=InprocChannel(hub, "D"), instance="D", ring_bytes=1 << 16,
        strategy="staged", observer=decode, rendezvous=where,
    )  # fmt: skip
    try:
        yield sender, receiver
    finally:
        sender.close()
        receiver.close()


def until(done: Callable[[], bool]) -> None:
    """Wait for it, at most 30 s."""
    limit = time.monotonic() + 30.0
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.002)


def move(sender: PrefillEndpoint, receiver: DecodeEndpoint, name: str) -> None:
    """A whole room."""
    room = RoomId(name.encode())
    reception, delivery = receiver.open(room, Source("P")), sender.open(room)
    reception.expect(Expectation(TOKENS, TABLE))
    delivery.send_chunk(TOKENS, TABLE)
    delivery.finish(TOKENS)
    until(lambda: reception.released and delivery.released)
    assert reception.phase is Phase.DONE, reception.error
