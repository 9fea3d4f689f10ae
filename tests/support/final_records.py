"""Two processes, of which decode's hears bells and handles no frame: what its engine knows, and what it finds then."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from disagg_kv import CacheSpec, DecodeEndpoint, GroupId, PagedPool, PageTable, Phase, PrefillEndpoint, RoomId, Source
from disagg_kv.channels import UnixChannel
from disagg_kv.endpoints import Environment, Expectation
from disagg_kv.geometry import Component, shard
from disagg_kv.kernels.tensors import plane_of
from disagg_kv.rendezvous import StaticRendezvous
from disagg_kv.transports import SupportsAllocate, Transport, between_processes

SPEC = CacheSpec.uniform(3, (Component("k", "int8", 4, 8), Component("v", "int8", 4, 8)))
HYBRID = CacheSpec.uniform(3, (Component("k", "int8", 4, 8), Component("ssm", "int8", 4, 64, tokens_per_row=0, rows=2)))
PAGES, PAGE, SLOTS, TIMEOUT_S = 8, 16, 4, 60.0
ROWS = PAGES * PAGE - 5
SOURCE_SLOT, TARGET_SLOT = 1, 2


def check_final_record(path: Path, name: str, device: str, *, stop: int | None, aux: int | None, states: bool) -> bool:
    """Send a request; whether bells have ended it. All bytes are compared.

    Args:
        path: of files.
        name: of the transport.
        device: of both pools.
        stop: the end of the room, if decode knows it.
        aux: bytes of aux data; None: there are none.
        states: there are recurrent states, too.
    """
    here, there = multiprocessing.Pipe()
    args = there, path, name, device, stop, aux, states
    child = multiprocessing.get_context("spawn").Process(target=_decode, args=args, daemon=True)
    child.start()
    carrier, pool = _pool(name, device, aux, states)
    for number in range(len(pool.site.planes)):
        plane_of(pool, number).copy_(_drawn(pool, number))
    if aux:
        pool.write_aux(0, _aux(aux))
    elif aux == 0:
        pool.read_aux = lambda slot: b""  # type: ignore[method-assign]
    if device != "cpu":
        torch.cuda.synchronize()
    prefill = PrefillEndpoint(
        pool, transport=carrier, channel=UnixChannel(f"unix://{path}/P"), rendezvous=StaticRendezvous(),
        instance="P", strategy="mapped",
    )  # fmt: skip
    delivery = prefill.open(RoomId(b"final"))
    here.send("it listens")
    assert _answer(here) == "decode listens"
    delivery.send_chunk(ROWS, [PageTable(GroupId("kv"), range(PAGES))])
    delivery.finish(ROWS, aux=None if aux is None else 0, state=_slot(pool, SOURCE_SLOT))
    rung, wrong = _answer(here)
    assert wrong == []
    _until(lambda: delivery.released)
    assert delivery.phase is Phase.DONE, delivery.error
    prefill.close()
    child.join(TIMEOUT_S)
    assert child.exitcode == 0
    return bool(rung)


def _decode(
    pipe: Connection, path: Path, name: str, device: str, stop: int | None, aux: int | None, states: bool
) -> None:
    """The child: its endpoint stands still while its engine looks."""
    carrier, pool = _pool(name, device, aux, states)
    pool.write_aux(1, b"\xff" * pool.aux_bytes)
    assert pipe.recv() == "it listens"
    decode = DecodeEndpoint(
        pool, transport=carrier, channel=UnixChannel(f"unix://{path}/D"), strategy="mapped", instance="D",
        rendezvous=StaticRendezvous({"P": [f"unix://{path}/P"]}), environment=Environment(thread=False, engine=False),
    )  # fmt: skip
    handle = decode.open(RoomId(b"final"), Source("P"))
    table = PageTable(GroupId("kv"), range(PAGES)[::-1])
    handle.expect(Expectation(stop, [table], aux=None if aux is None else 1, state=_slot(pool, TARGET_SLOT)))

    def step() -> bool:
        decode.driver.step(0.001)
        return any(room.watch is not None for room in decode.inspect().rooms.values())

    _until(step)
    pipe.send("decode listens")
    rung = _heard(lambda: handle.phase is Phase.DONE, 1.0 if aux is not None and aux > 4096 else TIMEOUT_S)
    assert handle.report.bells == rung

    def ended() -> bool:
        decode.driver.step(0.001)
        return handle.phase is Phase.DONE and (rung or handle.released)

    if not rung:
        _until(ended)
    pipe.send((rung, _wrong(pool, aux)))
    _until(lambda: ended() and not decode.open_rooms)
    for _ in range(200):  # prefill may ask again
        decode.driver.step(0.001)
    decode.close()


def _pool(name: str, device: str, aux: int | None, states: bool) -> tuple[Transport, PagedPool]:
    if device != "cpu":
        torch.cuda.synchronize()
    spec, carrier = HYBRID if states else SPEC, between_processes(name, device)
    allocator = carrier.allocate if isinstance(carrier, SupportsAllocate) else None
    pool = PagedPool.allocate(
        spec, shard(spec), pages=PAGES, page_size=PAGE, state_slots=SLOTS, aux_slots=2, aux_bytes=aux or 8,
        allocator=allocator, device=device,
    )  # fmt: skip
    return carrier, pool


def _slot(pool: PagedPool, number: int) -> Sequence[PageTable]:
    return [PageTable(group, [number]) for group in pool.site.state_groups]


def _drawn(pool: PagedPool, number: int) -> torch.Tensor:
    """What is in a plane of prefill; none of it is 0."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(1, 256, plane_of(pool, number).shape, generator=generator, dtype=torch.uint8)


def _aux(nbytes: int) -> bytes:
    return bytes(1 + i % 251 for i in range(nbytes))


def _wrong(pool: PagedPool, aux: int | None) -> Sequence[str]:
    """Which parts of decode's pool are not as they must be."""
    found: list[str] = []
    for number, plane in enumerate(pool.site.planes):
        given, want = _drawn(pool, number), torch.zeros(plane_of(pool, number).shape, dtype=torch.uint8)
        if plane.group in pool.site.state_groups:
            want[TARGET_SLOT] = given[SOURCE_SLOT]
        else:
            rows = given.reshape(PAGES * PAGE, *given.shape[2:])
            rows[ROWS:] = 0
            want = rows.reshape(given.shape).flip(0)
        if not torch.equal(plane_of(pool, number).cpu(), want):
            found.append(f"plane {number}")
    if aux is not None and pool.read_aux(1) != _aux(aux).ljust(pool.aux_bytes, b"\0"):
        found.append("aux data")
    return found


def _heard(done: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not done():
        if time.monotonic() > until:
            return False
    return True


def _until(done: Callable[[], bool]) -> None:
    assert _heard(done, TIMEOUT_S), "it takes too long"


def _answer(pipe: Connection) -> Any:
    assert pipe.poll(2 * TIMEOUT_S), "decode does not answer"
    return pipe.recv()
