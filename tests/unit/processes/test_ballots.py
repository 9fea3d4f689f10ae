"""Decode ranks in processes of their own agree by words of shared memory: no thread of their endpoints runs."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from disagg_kv import (
    CacheSpec,
    DecodeEndpoint,
    Expectation,
    PagedPool,
    PageTable,
    Phase,
    PrefillEndpoint,
    RoomId,
    Source,
    shard,
)
from disagg_kv.channels import UnixChannel
from disagg_kv.endpoints import Environment
from disagg_kv.ids import GroupId, Role
from disagg_kv.memory import bytes_of
from disagg_kv.rendezvous import StaticRendezvous
from disagg_kv.transports import ShmTransport

SPEC, RANKS, ROWS, FILLED, POISON = CacheSpec.kv(2, 4, 64, "float16"), 2, 64, 0x5A, 0xA5
PAGES = [PageTable(GroupId("kv"), [1, 2, 3, 4])]
ROOM = RoomId(b"room")
TIMEOUT_S = 60.0


def parts(folder: str, role: Role, rank: int, world: int) -> dict[str, Any]:
    """What both endpoints take; the caller steps them."""
    where = {"prefill": [f"unix://{folder}/prefill0"], "decode": [f"unix://{folder}/decode{n}" for n in range(RANKS)]}
    transport, shards = ShmTransport(), [shard(SPEC, tp=world, rank=n) for n in range(world)]
    pool = PagedPool.allocate(SPEC, shards[rank], pages=8, page_size=16, allocator=transport.allocate)
    bytes_of(pool.buffers[0])[:] = FILLED if role == "prefill" else POISON
    return {
        "pool": pool, "transport": transport, "channel": UnixChannel(f"unix://{folder}/{role}{rank}"),
        "rendezvous": StaticRendezvous(where), "instance": role, "rank": rank, "shards": shards, "strategy": "mapped",
        "environment": Environment(thread=False, engine=False),
    }  # fmt: skip


def decode(pipe: Connection, folder: str, rank: int) -> None:
    """A child: steps its endpoint until it is to stop that, and looks at the room when it is asked."""
    made = parts(folder, "decode", rank, RANKS)
    endpoint = DecodeEndpoint(**made)
    while not any(peer.instance == "decode" for peer in endpoint.peers()):
        endpoint.driver.step(0.001)
    handle = endpoint.open(ROOM, Source("prefill"))
    handle.expect(Expectation(ROWS, PAGES))
    steps = True
    while True:
        if steps:
            endpoint.driver.step(0.001)
        if not pipe.poll(0 if steps else None):
            continue
        asked = pipe.recv()
        steps = asked == "go" or (steps and asked != "stop")
        if asked == "end":
            break
        filled = int((bytes_of(made["pool"].buffers[0]) == FILLED).sum())
        pipe.send((handle.phase.name, handle.released, handle.report.bells, filled))
    endpoint.close(0.0)


@pytest.fixture
def pipes(tmp_path: Path) -> Iterator[list[Connection]]:
    made: list[tuple[Connection, Any]] = []
    for rank in range(RANKS):
        here, there = multiprocessing.Pipe()
        child = multiprocessing.get_context("spawn").Process(
            target=decode, args=(there, str(tmp_path), rank), daemon=True
        )
        child.start()
        there.close()
        made.append((here, child))
    yield [pipe for pipe, _ in made]
    for pipe, _ in made:
        pipe.send("end")
    for _, child in made:
        child.join(TIMEOUT_S)
        assert child.exitcode == 0


def ask(pipe: Connection, what: str = "look") -> tuple[str, bool, bool, int]:
    """A child's answer."""
    pipe.send(what)
    assert pipe.poll(TIMEOUT_S), "the child does not answer"
    found: tuple[str, bool, bool, int] = pipe.recv()
    return found


def until(done: Any, prefill: PrefillEndpoint) -> None:
    """Step prefill's endpoint."""
    end = time.monotonic() + TIMEOUT_S
    while not done():
        assert time.monotonic() < end, "it takes too long"
        prefill.driver.step(0.001)


def test_two_processes_agree_while_their_endpoints_stand_still(pipes: list[Connection], tmp_path: Path) -> None:
    """Each engine only looks: rank 1 votes, rank 0 decides, rank 1 hears that. Their endpoints follow later."""
    prefill = PrefillEndpoint(**parts(str(tmp_path), "prefill", 0, 1))
    delivery = prefill.open(ROOM)
    until(lambda: all(ask(pipe)[0] == "MOVING" for pipe in pipes), prefill)
    for _ in range(50):
        prefill.driver.step(0.001)
        [ask(pipe) for pipe in pipes]
    for pipe in pipes:
        ask(pipe, "stop")
    delivery.send_chunk(ROWS, PAGES)
    nbytes = ROWS * 2 * 2 * 2 * 64 * 2

    def landed() -> bool:
        return [ask(pipe)[3] for pipe in pipes] == [nbytes] * RANKS

    until(landed, prefill)
    end = time.monotonic() + TIMEOUT_S
    while any(ask(pipe)[0] != "DONE" for pipe in pipes):
        assert time.monotonic() < end, "no word is heard"
        prefill.driver.step(0.001)
    assert [ask(pipe) for pipe in pipes] == [("DONE", False, True, nbytes)] * RANKS
    for pipe in pipes:
        ask(pipe, "go")
    delivery.finish(ROWS)
    until(lambda: delivery.released and all(ask(pipe)[1] for pipe in pipes), prefill)
    assert (delivery.phase, delivery.error) == (Phase.DONE, None)
    assert [ask(pipe)[0] for pipe in pipes] == ["DONE"] * RANKS
    prefill.close(1.0)
