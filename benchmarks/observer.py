"""The cost of observing: nanoseconds per event, and transfers with an observer over those without, in turns.

The first table has the processor time of one event of each kind, through ``Guarded`` as endpoints call it, with
``Silent``, ``Recorder`` and ``PrometheusObserver``. For comparison it has one ``observe`` of a histogram of
``prometheus_client`` with the same bounds. Each is the median of rounds. The limit is 2 us for each event of
``PrometheusObserver``.

The second part moves rooms between two endpoints of this process, with and without observers, in turns, and compares
the medians of the wall time. "silent, again" shows how far equal things differ. The bytes are compared first.

    python -m benchmarks.observer --json benchmarks/results/cpu_observer.json

The exit code is 1 if an event costs more than the limit, or bytes are wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np
from attrs import define, frozen
from prometheus_client import CollectorRegistry, Histogram

from bench.machine import Machine
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
from disagg_kv.memory import bytes_of
from disagg_kv.observe.metrics import SEGMENT_BOUNDS
from disagg_kv.observe.prometheus import PrometheusMetrics
from disagg_kv.rendezvous import StaticRendezvous
from disagg_kv.trace import Guarded, Observer, Recorder, Silent, Span
from disagg_kv.transports import InprocTransport

LIMIT_NS = 2000.0
EVENTS = 2000
SPEC = CacheSpec.kv(32, 8, 128, "bfloat16")
TOKENS, PAGE_SIZE = 1024, 64
PAGES = TOKENS // PAGE_SIZE
WAIT_S = 60.0

ROOM = RoomId(b"request")
ENDED = Span("room", ROOM, 1.0, 1.5, 1 << 30, 4, {"outcome": "done", "path": "staged", "segments": "16"})
SEGMENT = Span("wire", ROOM, 1.0, 1.001, 1 << 20, labels={"layers": "0-32", "rows": "0-64", "peer": "ab" * 16})
EVENTS_OF: Mapping[str, Callable[[Observer], None]] = {
    "span of a segment": lambda observer: observer.span(SEGMENT),
    "span of a room": lambda observer: observer.span(ENDED),
    "count": lambda observer: observer.count("frames.stale"),
    "count of the caller's own": lambda observer: observer.count("mine"),
}


@frozen
class Cost:
    """Nanoseconds of processor time per event, by observer."""

    event: str
    silent: float
    recorder: float
    prometheus: float


def measure(event: Callable[[Observer], None], observers: Sequence[Observer], rounds: int) -> list[float]:
    """Nanoseconds of an event with each observer: the median over rounds, in turns."""
    times: list[list[float]] = [[] for _ in observers]
    for _ in range(rounds):
        for observer, of in zip(observers, times, strict=True):
            began = time.thread_time_ns()
            for _ in range(EVENTS):
                event(observer)
            of.append((time.thread_time_ns() - began) / EVENTS)
    return [statistics.median(of) for of in times]


def costs(rounds: int) -> list[Cost]:
    """Of each kind of event."""
    found = []
    for name, event in EVENTS_OF.items():
        recorder, metrics = Recorder(), PrometheusMetrics(CollectorRegistry())
        observers: list[Observer] = [Silent(), Guarded(recorder), Guarded(metrics.observer("decode", "bench"))]
        found.append(Cost(name, *measure(event, observers, rounds)))
    return found


def of_library(rounds: int) -> float:
    """Nanoseconds of ``observe`` with the histogram of ``prometheus_client``."""
    histogram = Histogram("seconds", "Time.", ["side"], registry=None, buckets=SEGMENT_BOUNDS).labels("decode")

    class Direct(Silent):
        def span(self, span: Span) -> None:
            histogram.observe(span.stop - span.start)

    return measure(EVENTS_OF["span of a segment"], [Direct()], rounds)[0]


@define
class Pair:
    """Two endpoints of this process."""

    prefill: PrefillEndpoint
    decode: DecodeEndpoint
    source: PagedPool
    target: PagedPool
    number: int = 0

    @classmethod
    def made(cls, name: str, metrics: PrometheusMetrics | None) -> Pair:
        """With observers of ``metrics``, or without."""
        hub, where = Hub(), StaticRendezvous()
        pools = [PagedPool.allocate(SPEC, shard(SPEC), pages=PAGES, page_size=PAGE_SIZE) for _ in range(2)]
        observers = [None if metrics is None else metrics.observer(side, name) for side in ("prefill", "decode")]
        prefill = PrefillEndpoint(
            pools[0], transport=InprocTransport(), channel=InprocChannel(hub, "P"), rendezvous=where, instance="P",
            strategy="staged", observer=observers[0],
        )  # fmt: skip
        decode = DecodeEndpoint(
            pools[1], transport=InprocTransport(), channel=InprocChannel(hub, "D"), rendezvous=where, instance="D",
            strategy="staged", observer=observers[1],
        )  # fmt: skip
        for buffer in pools[0].buffers:
            data = bytes_of(buffer)
            data[:] = np.random.default_rng(7).integers(0, 256, data.size, np.uint8)
        return cls(prefill, decode, pools[0], pools[1])

    def move(self) -> float:
        """Seconds of one room, from ``open`` until its pages are released."""
        self.number += 1
        room, pages = RoomId(str(self.number).encode()), [PageTable(GroupId("kv"), list(range(PAGES)))]
        began = time.perf_counter()
        reception = self.decode.open(room, Source("P"))
        reception.expect(Expectation(TOKENS, pages))
        delivery = self.prefill.open(room)
        delivery.send_chunk(TOKENS, pages)
        delivery.finish(TOKENS)
        while not (reception.released and delivery.released):
            if time.perf_counter() - began > WAIT_S:
                raise SystemExit(f"a transfer takes more than {WAIT_S} s")
            time.sleep(0.0002)
        took = time.perf_counter() - began
        assert reception.phase is Phase.DONE, reception.error
        return took

    def check(self) -> None:
        """Move once, and compare all bytes."""
        for buffer in self.target.buffers:
            bytes_of(buffer)[:] = 0xA5
        self.move()
        for sent, came in zip(self.source.buffers, self.target.buffers, strict=True):
            if not np.array_equal(bytes_of(sent), bytes_of(came)):
                raise SystemExit("bytes are wrong; nothing is measured")

    def close(self) -> None:
        """End both endpoints."""
        self.prefill.close()
        self.decode.close()


def transfers(repeats: int) -> dict[str, float]:
    """Median seconds of a transfer, by variant, in turns of random order."""
    metrics = PrometheusMetrics(CollectorRegistry())
    variants = {"silent": None, "silent, again": None, "prometheus": metrics}
    pairs = {name: Pair.made(name, of) for name, of in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in pairs}
    try:
        for pair in pairs.values():
            pair.check()
        for _ in range(repeats):
            for name in random.sample(sorted(pairs), len(pairs)):
                times[name].append(pairs[name].move())
    finally:
        for pair in pairs.values():
            pair.close()
    return {name: statistics.median(of) for name, of in times.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and compare with the limit."""
    parser = argparse.ArgumentParser(description="The cost of observing.")
    parser.add_argument("--rounds", type=int, default=50, help="rounds per kind of event")
    parser.add_argument("--repeats", type=int, default=200, help="transfers per variant; 0: none")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    given = parser.parse_args(argv)
    found, library = costs(given.rounds), of_library(given.rounds)
    print(f"{'ns per event':28}{'Silent':>10}{'Recorder':>10}{'Prometheus':>12}{'limit':>8}{'of limit':>10}")
    for one in found:
        share = f"{one.prometheus / LIMIT_NS:.2f}"
        print(f"{one.event:28}{one.silent:10.0f}{one.recorder:10.0f}{one.prometheus:12.0f}{LIMIT_NS:8.0f}{share:>10}")
    print(f"{'Histogram.observe':28}{'':20}{library:12.0f}   (prometheus_client, same bounds)")
    moved = transfers(given.repeats) if given.repeats else {}
    for name, seconds in moved.items():
        print(f"transfer, {name:18}{seconds * 1e3:10.3f} ms{seconds / moved['silent']:10.4f} of silent")
    if given.json is not None:
        result = {
            "events_ns": [attrs.asdict(one) for one in found],
            "library_ns": library,
            "limit_ns": LIMIT_NS,
            "transfer_s": moved,
            "machine": attrs.asdict(Machine.here()),
        }
        given.json.write_text(json.dumps(result, indent=2) + "\n")
    slow = [one.event for one in found if one.prometheus > LIMIT_NS]
    if slow:
        print(f"over the limit: {', '.join(slow)}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
