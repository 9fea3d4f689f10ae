"""What page tables cost on the wire: bytes of their frames, and the time to encode, decode and check them.

Prints one JSON document: tables of 1,048,576 pages by how many of them follow one another. Encoding includes the frames
of decode, decoding those of prefill, up to the table that kernels read. Medians. The clock is the thread's CPU time, to
which other processes on the host add only what they take of caches and memory bandwidth.

    python -m benchmarks.page_tables > benchmarks/results/cpu_page_tables.json
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import numpy as np
from attrs import asdict

from bench.machine import Machine
from disagg_kv.core import Codec
from disagg_kv.core.wire import page_runs as p
from disagg_kv.core.wire.frames import MAX_TABLE, Expect, Head, TablePart
from disagg_kv.geometry import Group, PageTable
from disagg_kv.ids import GroupId

PAGES, TIMES = 1 << 20, 9
HEAD = Head(src=bytes(16), dst=bytes(16), room=b"a room of one request", generation=1)


def table(together: int) -> PageTable:
    """All pages of a pool, in runs of ``together`` that are shuffled."""
    firsts = np.random.default_rng(0).permutation(PAGES // together) * together
    pages = (firsts[:, None] + np.arange(together)).reshape(-1)
    return PageTable(GroupId("kv"), pages.astype(np.int32))


def encoded(known: PageTable, codec: Codec) -> list[bytes]:
    """The frames of one request."""
    wire = p.tables_to_wire([known])
    data = b"".join(one.pages for one in wire)
    parts = range(0, len(data), MAX_TABLE) if len(data) > MAX_TABLE else ()
    bare = p.without_pages(wire) if parts else wire
    frames = [codec.encode(Expect(**HEAD, start=0, stop=PAGES, paths=("mapped",), tables=bare, tag=b""))]
    return frames + [codec.encode(TablePart(**HEAD, offset=at, data=data[at : at + MAX_TABLE])) for at in parts]


def decoded(frames: list[bytes], codec: Codec) -> PageTable:
    """The table in them."""
    expect, *parts = (codec.decode(frame) for frame in frames)
    assert isinstance(expect, Expect)
    tables, data = expect.tables or (), bytearray()
    for part in parts:
        assert isinstance(part, TablePart)
        data += part.data
    (known,) = p.tables_from_wire(p.with_pages(tables, bytes(data)) if parts else tables, PAGES).values()
    return known


def measured(together: int) -> dict[str, float]:
    """One kind of table."""
    clock, codec, group, seconds = time.thread_time, Codec(), Group(GroupId("kv"), 1, PAGES), []
    for _ in range(TIMES):
        known = table(together)
        times = [clock()]
        frames = encoded(known, codec)
        times.append(clock())
        back = decoded(frames, codec)
        times.append(clock())
        back.check(group, 0, PAGES)
        times.append(clock())
        assert np.array_equal(back.pages, known.pages)
        seconds.append(np.diff(times))
    encode, decode, check = (round(1e3 * statistics.median(column), 2) for column in zip(*seconds, strict=True))
    sizes = {"frames": len(frames), "bytes": sum(map(len, frames))}
    return {"together": together, **sizes, "encode_ms": encode, "decode_ms": decode, "check_ms": check}


def main() -> None:
    """Print it."""
    results = [measured(together) for together in (1, 2, 4, 16, 64, 1024)]
    json.dump({"machine": asdict(Machine.here()), "pages": PAGES, "tables": results}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
