"""The walk of one request in numbers: calls, files, and how often control goes between two files of prefill.

One prefill endpoint and one decode endpoint in this process, without threads: this thread steps them, prefill first.
The request has 2 layers and 100 rows, and crosses as one staged segment. The first request connects the endpoints and
fills their caches. The second is counted. The clock stands still, so no heartbeat is due and each run counts the same.

What the columns count:

* steps: how often an endpoint was stepped; an idle step has rows of its own.
* calls: Python functions of the library that began, or generators that went on. Before Python 3.12 a comprehension is
  such a function. What attrs generates is in no file of the library and does not count.
* files: files of the library with at least one such call.
* changes: how often control goes from prefill's rooms to its transfers and posted writes, or back. Of the calls into
  the files below, in their order, those count that follow a call into the other side.

    python -m benchmarks.walk            prints the table
    python -m benchmarks.walk --check    compares it with the page of the architecture, which shows Python 3.11's
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType

from attrs import define, field, frozen

import disagg_kv
from disagg_kv import CacheSpec, DecodeEndpoint, GroupId, PagedPool, PageTable, Phase, PrefillEndpoint, Source, shard
from disagg_kv.channels import Hub, InprocChannel
from disagg_kv.endpoints import Delivery, Environment, Expectation, Reception
from disagg_kv.ids import RoomId
from disagg_kv.rendezvous import StaticRendezvous
from disagg_kv.transports import InprocTransport

LAYERS, ROWS = 2, 100
OURS = PageTable(GroupId("kv"), [6, 1, 4, 2, 0, 3, 7])
THEIRS = PageTable(GroupId("kv"), [3, 0, 2, 1])
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
SIDES = {
    "endpoints/prefill/rooms.py": "rooms",
    "endpoints/prefill/transfers.py": "transfers",
    **{
        f"endpoints/prefill/movers/{name}.py": "transfers"
        for name in ("direct", "mapped", "posts", "staged", "verified")
    },
}
LIBRARY = f"{Path(disagg_kv.__file__).parent}/"
MOST_TURNS = 100


@frozen
class Counted:
    """What a part of the walk took: the file of each call, in order, and how many steps."""

    name: str
    steps: int
    calls: Sequence[str]

    @property
    def files(self) -> int:
        """Files of the library with at least one call."""
        return len(set(self.calls))

    @property
    def changes(self) -> int:
        """How often control goes from one of the ``SIDES`` to the other."""
        return sum(a != b for a, b in pairwise(SIDES[file] for file in self.calls if file in SIDES))

    @property
    def row(self) -> str:
        """A row of a Markdown table."""
        return f"| {self.name} | {self.steps} | {len(self.calls):,} | {self.files} | {self.changes} |"


@define
class Calls:
    """The file of each call into the library, in order."""

    files: list[str] = field(factory=list)

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        """As ``sys.setprofile`` wants it."""
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(LIBRARY):
            self.files.append(path.removeprefix(LIBRARY))

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what the block calls."""
        before = sys.getprofile()
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(before)


def _clock() -> float:
    """Stands still; in this file, so that it does not count."""
    return 0.0


def _sleep(seconds: float) -> None:
    """Takes no time."""


class Walk:
    """Two endpoints in one process, and requests from one to the other."""

    def __init__(self) -> None:
        hub, where = Hub(), StaticRendezvous()
        spec = CacheSpec.kv(LAYERS, kv_heads=4, head_dim=64, dtype="bfloat16")
        self.prefill = PrefillEndpoint(
            PagedPool.allocate(spec, shard(spec), pages=8, page_size=16),
            transport=InprocTransport(),
            channel=InprocChannel(hub, "prefill"),
            rendezvous=where,
            instance="prefill",
            strategy="staged",
            environment=Environment(clock=_clock, sleep=_sleep, thread=False, engine=False),
        )
        self.decode = DecodeEndpoint(
            PagedPool.allocate(spec, shard(spec), pages=4, page_size=32),
            transport=InprocTransport(),
            channel=InprocChannel(hub, "decode"),
            rendezvous=where,
            instance="decode",
            strategy="staged",
            environment=Environment(clock=_clock, sleep=_sleep, thread=False, engine=False),
        )

    def opened(self, name: bytes) -> tuple[Delivery, Reception, Counted]:
        """A room of both sides whose prefill side has ``Expect``, and what that took."""
        room, source = RoomId(name), Source("prefill")
        calls = Calls()
        with calls.counted():
            reception = self.decode.open(room, source)
            reception.expect(Expectation(ROWS, [THEIRS]))
            delivery = self.prefill.open(room)
        steps = self._step(calls, lambda: delivery.phase is Phase.READY)
        return delivery, reception, Counted("`open` and `expect`, until prefill has `Expect`", steps, calls.files)

    def request(self, name: bytes) -> list[Counted]:
        """Send one request; what its three parts took, and all of it."""
        delivery, reception, opened = self.opened(name)
        calls = Calls()
        with calls.counted():
            delivery.send_chunk(ROWS, [OURS])
        steps = self._step(calls, lambda: delivery.report.segments == 1)
        sent = Counted("`send_chunk`, until prefill has `Landed`", steps, calls.files)
        calls = Calls()
        with calls.counted():
            delivery.finish(ROWS)
        parts = [opened, sent, self._released(delivery, reception, calls, "`finish`, until both sides are released")]
        every = [file for part in parts for file in part.calls]
        return [*parts, Counted("the whole request", sum(part.steps for part in parts), every)]

    def sent_at_once(self, name: bytes) -> Counted:
        """What a request takes whose rows and end are handed over together, from there on."""
        delivery, reception, _ = self.opened(name)
        calls = Calls()
        with calls.counted():
            delivery.send_chunk(ROWS, [OURS])
            delivery.finish(ROWS)
        return self._released(delivery, reception, calls, "`send_chunk` and `finish`, until both sides are released")

    def _released(self, delivery: Delivery, reception: Reception, calls: Calls, name: str) -> Counted:
        steps = self._step(calls, lambda: delivery.released and reception.released)
        assert delivery.phase is reception.phase is Phase.DONE, (delivery.error, reception.error)
        self._step(Calls(), lambda: not self.prefill.open_rooms and not self.decode.open_rooms)
        return Counted(name, steps, calls.files)

    def idle(self) -> list[Counted]:
        """What a step of each endpoint takes that has nothing to do."""
        found = []
        for name, endpoint in (("prefill", self.prefill), ("decode", self.decode)):
            endpoint.driver.step()  # what the other one has sent last
            calls = Calls()
            with calls.counted():
                endpoint.driver.step()
            found.append(Counted(f"an idle step of {name}", 1, calls.files))
        return found

    def close(self) -> None:
        """Close both endpoints."""
        self.prefill.close()
        self.decode.close()

    def _step(self, calls: Calls, done: Callable[[], bool]) -> int:
        """Turn both endpoints alternately until ``done()``; how many steps that took."""
        for steps in range(MOST_TURNS):
            if done():
                return steps
            with calls.counted():
                (self.decode if steps % 2 else self.prefill).driver.step()
        raise AssertionError(f"the request has not gone on after {MOST_TURNS} steps")


def measure() -> list[Counted]:
    """The second request between two endpoints, idle steps, and a third request that is sent at once."""
    walk = Walk()
    try:
        walk.request(b"first")
        return [*walk.request(b"second"), *walk.idle(), walk.sent_at_once(b"third")]
    finally:
        walk.close()


def main(argv: Sequence[str]) -> int:
    """Measure and print a Markdown table; with ``--check``, 1: the page shows another."""
    rows = [counted.row for counted in measure()]
    print("| part | steps | calls | files | changes |\n| --- | --: | --: | --: | --: |", *rows, sep="\n")
    if "--check" not in argv:
        return 0
    shown = PAGE.read_text().splitlines()
    stale = [row for row in rows if row not in shown]
    print(*(f"docs/architecture.md does not show: {row}" for row in stale), sep="\n", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
