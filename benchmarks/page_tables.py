"""What page tables cost on the wire: bytes of their frame, and the time to encode, decode and check them.

Prints one JSON document: tables of 262,144 pages by how many of them follow one another. Encoding includes the frame
of decode, decoding that of prefill, up to the table that kernels read. Medians. The clock is the thread's CPU time, to
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
from disagg_kv.core.wire.frames import MAX_TABLE, Expect, Head
from disagg_kv.geometry import Group, PageTable
from disagg_kv.ids import GroupId

PAGES, TIMES = MAX_TABLE // p.ID, 9
HEAD = Head(src=bytes(16), dst=bytes(16), room=b"a room of one request", generation=1)


def table(together: int) -> PageTable:
    """All pages of a pool, in runs of ``together`` that are shuffled."""
    firsts = np.random.default_rng(0).permutation(PAGES // together) * together
    pages = (firsts[:, None] + np.arange(together)).reshape(-1)
    return PageTable(GroupId("kv"), pages.astype(np.int32))


def encoded(known: PageTable, codec: Codec) -> bytes:
    """The frame of one request."""
    tables = p.tables_to_wire([known])
    return codec.encode(Expect(**HEAD, start=0, stop=PAGES, path="mapped", tables=tables, tag=b""))


def decoded(frame: bytes, codec: Codec) -> PageTable:
    """The table in it."""
    expect = codec.decode(frame)
    assert isinstance(expect, Expect)
    (known,) = p.tables_from_wire(expect.tables or (), PAGES).values()
    return known


def measured(together: int) -> dict[str, float]:
    """One kind of table."""
    clock, codec, group, seconds = time.thread_time, Codec(), Group(GroupId("kv"), 1, PAGES), []
    for _ in range(TIMES):
        known = table(together)
        times = [clock()]
        frame = encoded(known, codec)
        times.append(clock())
        back = decoded(frame, codec)
        times.append(clock())
        back.check(group, 0, PAGES)
        times.append(clock())
        assert np.array_equal(back.pages, known.pages)
        seconds.append(np.diff(times))
    encode, decode, check = (round(1e3 * statistics.median(column), 2) for column in zip(*seconds, strict=True))
    return {"together": together, "bytes": len(frame), "encode_ms": encode, "decode_ms": decode, "check_ms": check}


def main() -> None:
    """Print it."""
    results = [measured(together) for together in (1, 2, 4, 16, 64, 1024)]
    json.dump({"machine": asdict(Machine.here()), "pages": PAGES, "tables": results}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
