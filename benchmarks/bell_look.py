"""What a look at bells costs decode's engine: ``Reception.phase`` while nothing rings, and when the last bells do.

Prefill endpoints and one decode endpoint in this process, without threads: this thread steps them. Each request has 32
layers, and crosses as one mapped segment of all its writers. *quiet* is a look at which nothing has rung. *done* is the
look that finds the bells of all writers, up to ``DONE``. Medians of processor time, in microseconds.

    python benchmarks/bell_look.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from attrs import frozen

from disagg_kv import (
    CacheSpec,
    DecodeEndpoint,
    GroupId,
    PagedPool,
    PageTable,
    Phase,
    PrefillEndpoint,
    RoomId,
    Shard,
    Source,
    shard,
)
from disagg_kv.channels import Hub, InprocChannel
from disagg_kv.endpoints import Environment, Expectation
from disagg_kv.rendezvous import StaticRendezvous
from disagg_kv.transports import InprocTransport

LAYERS, ROWS, PAGE, ROOMS, LOOKS = 32, 64, 16, 200, 1000
KV = GroupId("kv")
WARM = 20


class Clock:
    """Time moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        """Now."""
        return self.now


@frozen
class Looks:
    """Of one number of writers: seconds of each look."""

    quiet: list[float]
    done: list[float]


class Stage:
    """``writers`` prefill ranks, and one decode rank that maps into its pages."""

    def __init__(self, writers: int) -> None:
        spec, hub, clock, meet = CacheSpec.kv(LAYERS, 4, 16, "float16"), Hub(), Clock(), StaticRendezvous()
        env = Environment(clock=clock, sleep=lambda seconds: None, thread=False, engine=False)
        self.clock = clock
        halves = [shard(spec, tp=writers, rank=rank) for rank in range(writers)]
        self.prefills = [
            PrefillEndpoint(
                self._pool(spec, half), transport=InprocTransport(), channel=InprocChannel(hub, f"P{rank}"),
                rendezvous=meet, instance="P", rank=rank, shards=halves, strategy="mapped", environment=env,
            )
            for rank, half in enumerate(halves)
        ]  # fmt: skip
        self.decode = DecodeEndpoint(
            self._pool(spec, shard(spec)), transport=InprocTransport(), channel=InprocChannel(hub, "D"),
            rendezvous=meet, instance="D", strategy="mapped", environment=env, ring_bytes=1 << 24,
        )  # fmt: skip

    @staticmethod
    def _pool(spec: CacheSpec, half: Shard) -> PagedPool:
        return PagedPool.allocate(spec, half, pages=ROWS // PAGE, page_size=PAGE)

    def step(self, decode: bool = True) -> None:
        """One step of every rank."""
        for prefill in self.prefills:
            prefill.driver.step()
        if decode:
            self.decode.driver.step()
        self.clock.now += 0.001

    def until(self, done: Callable[[], bool]) -> None:
        """Step until it is so."""
        for _ in range(2000):
            if done():
                return
            self.step()
        raise AssertionError("it does not end")

    def room(self, number: int, looks: Looks) -> None:
        """One request, from its beginning to its end."""
        room, table = RoomId(b"room %d" % number), [PageTable(KV, range(ROWS // PAGE))]
        handle = self.decode.open(room, Source("P"))
        handle.expect(Expectation(ROWS, table))
        sends = [one.open(room) for one in self.prefills]
        self.until(lambda: handle.phase is Phase.MOVING)
        for _ in range(20):
            self.step()
        begin = time.thread_time_ns()
        for _ in range(LOOKS):
            handle.listen()
        looks.quiet.append((time.thread_time_ns() - begin) / LOOKS)
        for send in sends:
            send.send_chunk(ROWS, table)
        for _ in range(4):
            self.step(decode=False)
        begin = time.thread_time_ns()
        phase = handle.phase
        looks.done.append(time.thread_time_ns() - begin)
        assert phase is Phase.DONE, "bells have not ended the room"
        for send in sends:
            send.finish(ROWS)
        self.until(lambda: handle.released and all(send.released for send in sends))
        self.decode.poll()
        for prefill in self.prefills:
            prefill.poll()


def main() -> None:
    """Print a table."""
    print("| writers | quiet, us | done, us |\n| --: | --: | --: |")
    for writers in (1, 4):
        stage, looks = Stage(writers), Looks([], [])
        for number in range(ROOMS):
            stage.room(number, looks)
        quiet, done = (statistics.median(times[WARM:]) / 1000 for times in (looks.quiet, looks.done))
        print(f"| {writers} | {quiet:.2f} | {done:.1f} |")


if __name__ == "__main__":
    main()
