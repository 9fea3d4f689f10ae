"""How long a killed prefill process keeps the pages of a decode engine, by transport and strategy, on one host.

Two processes. A first request lands, so that decode knows whether its pool is mapped. Of the next one half of the rows
are sent, then prefill is killed: *failed* is when decode's engine knows it, *released* when it may free the pages.

    python -m benchmarks.recovery --json benchmarks/results/cpu_recovery.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from attrs import asdict, frozen

from bench.machine import Machine
from disagg_kv import Options
from tests.support.processes import Cluster, Knobs, Look

TOKENS = 256
OPTIONS = Options()


@frozen
class Recovery:
    """Seconds after the kill, one per kill; ``path`` is that of the requests."""

    transport: str
    strategy: str
    path: str
    failed: tuple[float, ...]
    released: tuple[float, ...]


def landed(look: Look) -> bool:
    """A request is over, or some of its rows are there."""
    return look.released or (look.nbytes > 0 and look.phase == "MOVING")


def measured(folder: Path, transport: str, strategy: str, kills: int) -> Recovery:
    """Kill as many prefill processes beside one decode process."""
    cluster = Cluster(folder)
    knobs = Knobs(strategy, transport=transport, options=OPTIONS, slots=16, pages=1024)
    (decode,) = cluster.start("decode", "decode", knobs=knobs)
    failed, released, path = list[float](), list[float](), ""
    try:
        for number in range(kills):
            name = f"prefill-{number}"
            (prefill,) = cluster.start("prefill", name, knobs=knobs)
            first, room = f"first {number}".encode(), f"killed {number}".encode()
            for one, rows in ((first, TOKENS), (room, TOKENS // 2)):
                decode.ask("expect", one, name, TOKENS)
                prefill.ask("begin", one, TOKENS)
                prefill.ask("send", one, 0, rows, rows == TOKENS)
                path = decode.until(one, landed).path
            prefill.kill()
            began = time.monotonic()
            decode.until(room, lambda look: look.phase == "FAILED")
            failed.append(time.monotonic() - began)
            decode.until(room, lambda look: look.released)
            released.append(time.monotonic() - began)
            decode.ask("free", room)
            decode.ask("free", first)
    finally:
        cluster.stop()
    return Recovery(transport, strategy, path, tuple(failed), tuple(released))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default="shm,nixl,mooncake", help="names, joined by commas")
    parser.add_argument("--strategies", default="auto,staged,slice", help="names, joined by commas")
    parser.add_argument("--kills", type=int, default=5, help="prefill processes that are killed, of each kind")
    parser.add_argument("--json", type=Path, help="where the document is written")
    args = parser.parse_args(argv)
    rows = []
    for transport in args.transports.split(","):
        for strategy in args.strategies.split(","):
            with tempfile.TemporaryDirectory() as folder:
                row = measured(Path(folder), transport, strategy, args.kills)
            rows.append(row)
            failed, released = (statistics.median(seconds) for seconds in (row.failed, row.released))
            print(
                f"{transport:9} {strategy:7} {row.path:7} failed {failed:6.3f} s, "
                f"released {released:6.3f} s, at most {max(row.released):6.3f} s",
                flush=True,
            )
    if args.json is not None:
        document = {"machine": asdict(Machine.here()), "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
