"""Writes the seeds of ``fuzz/corpus``: what honest peers send. ``python -m fuzz.seeds``; the same every time."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from disagg_kv.core import Codec, Elected, Hello
from disagg_kv.core.wire import frames as f
from disagg_kv.core.wire.specs import shard_to_wire, site_to_wire, spec_to_wire
from disagg_kv.geometry import Shard
from disagg_kv.ids import Peer, RegionId
from disagg_kv.memory import PagedPool
from disagg_kv.transports.descriptor import Descriptor, Region, encode
from disagg_kv.transports.mooncake_flight import Address
from disagg_kv.transports.process import Process
from fuzz.targets import Plan
from fuzz.world import KINDS, SPEC, Draw, forge
from tests.support.rig import tp_shards

CORPUS = Path(__file__).parent / "corpus"


def hello(role: str, shards: list[Shard], rank: int, page_size: int = 4) -> Hello:
    """An introduction of one rank."""
    site = PagedPool.allocate(SPEC, shards[rank], pages=16, page_size=page_size).site
    return Hello(
        src=b"\1" * 16, dst=b"", version=1, address="inproc://peer", role=role, instance="peer", rank=rank, host="h",
        pid=1, started=1, born=1, spec=spec_to_wire(SPEC), shards=tuple(shard_to_wire(s) for s in shards),
        site=site_to_wire(site), regions=tuple(range(len(site.buffers))), transport="inproc",
        descriptor=encode(Descriptor("inproc", Peer(bytes(16)))), paths=(("direct", 1), ("slice", 1), ("staged", 1)),
        conversions=(), verdict=Elected.name, slot_bytes=4096, ring_region=0, ring_bytes=1 << 16, lease_bytes=1 << 13,
    )  # fmt: skip


def hellos() -> Iterator[Hello]:
    """Of both sides, split in several ways."""
    for role in ("prefill", "decode"):
        for tp, pp, page_size in ((1, 1, 4), (2, 1, 4), (4, 1, 2), (1, 2, 8)):
            shards = tp_shards(SPEC, tp, pp)
            yield hello(role, shards, len(shards) - 1, page_size)


def frames() -> Iterator[bytes]:
    """Every kind of frame."""
    codec, between = Codec(), {"src": b"\1" * 16, "dst": b"\2" * 16}
    draw = Draw(random.Random(1).randbytes(1000))
    yield from (codec.encode(one) for one in hellos())
    yield from (codec.encode(forge(kind, draw, **between)) for kind in KINDS)
    yield codec.encode(f.Refused(**between, address="a", field="f", ours="o", theirs="t"))


def descriptors() -> Iterator[bytes]:
    """Of every transport, and what a store holds."""
    process = Process(1, 1, "host")
    address = Address("session", "127.0.0.1", 1, "tcp", process)
    for name, blob in (("inproc", b""), ("shm", process), ("nixl", process), ("mooncake", address)):
        packed = blob if isinstance(blob, bytes) else msgspec.msgpack.encode(blob)
        region = Region(RegionId(0), 4096, "cpu", 1 << 20, msgspec.msgpack.encode({"number": 0, "fd": 3, "offset": 0}))
        yield encode(Descriptor(name, Peer(bytes(16)), 1, (region,), packed))
    yield from (b"2", b'\0"tcp://127.0.0.1:1"', b'"x"')


def plans() -> Iterator[bytes]:
    """A decode rank with its pages."""
    for one in hellos():
        pages = np.arange(12, dtype="<i4").tobytes()
        yield msgspec.msgpack.encode(Plan(one, (f.WireTable("kv", 0, 12, 0, pages),), 24))


def events() -> Iterator[bytes]:
    """Random ones, long and short."""
    draw = random.Random(2)
    yield from (draw.randbytes(size) for size in (16, 64, 64, 256, 256, 1024, 1024))


def streams() -> Iterator[bytes]:
    """Messages of one and of several frames, whole, cut, and what is none."""
    words = (b"", b"frame", b"x" * 100)
    whole = b"".join(struct.pack("<II", 1, len(word)) + word for word in words)
    several = struct.pack("<4I", len(words), *map(len, words)) + b"".join(words)
    yield from (whole, several, several[:-50], whole + several + b"\0" * 8, struct.pack("<2I", 1, 1 << 31) + b"x")


SEEDS = {"frame": frames, "metadata": descriptors, "plan": plans, "events": events, "stream": streams}


def at(target: str, seed: bytes) -> Path:
    """The file of a seed, named by what is in it."""
    return CORPUS / target / hashlib.sha256(seed).hexdigest()[:16]


def main() -> None:
    """Write them all."""
    for target, make in SEEDS.items():
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
        for seed in make():
            at(target, seed).write_bytes(seed)


if __name__ == "__main__":
    main()
