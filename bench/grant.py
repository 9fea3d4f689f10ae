"""How long a grant takes, beside a bare ZeroMQ round trip of frames of the same sizes, in the same rhythm."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

import zmq
from attrs import define, field, frozen

from disagg_kv.core import Options
from disagg_kv.endpoints.loop.driver import STEP_S
from disagg_kv.endpoints.prefill.handle import ForwardPass
from disagg_kv.errors import ConfigurationError, DeadlineError, IntegrityError
from disagg_kv.geometry import PageTable
from disagg_kv.ids import Role

from .engine import wait_until
from .machine import Machine
from .rank import KV, DecodeRank, Moved, PrefillRank, Setup, attend
from .ranks import ROLES, Ranks, running, within_one_process
from .shape import TransferShape
from .timing import Granted
from .transfer import Quantiles

STRATEGY = "staged+per_chunk"
"""Leases, one for each page that is announced."""

ASKED = Options().window - 1
"""Measured requests of a room; one more precedes them and ends the silence between two rooms."""

ROWS = 16
"""Of a page, which is a segment here."""


@frozen
class Rhythm:
    """Round trips, one after another.

    Args:
        pause_s: silence before each request.
        grant: seconds from handing a request over until its grant is there.
        zeromq: seconds of the same two frames between the same two processes, without anything behind ZeroMQ.
        ratio: of the two medians.
    """

    pause_s: float
    grant: Quantiles
    zeromq: Quantiles
    ratio: float


@frozen
class GrantReport:
    """The results of one run.

    Args:
        transport: the transport that used the grants after they were measured.
        repeats: round trips of each kind.
        request_bytes, grant_bytes: sizes of the frames.
        in_a_row: each request follows the previous grant at once.
        after_pause: each request follows a silence, in which both processes and their cores sleep.
    """

    transport: str
    repeats: int
    request_bytes: int
    grant_bytes: int
    in_a_row: Rhythm
    after_pause: Rhythm
    machine: Machine = field(factory=Machine.here)


def rooms(repeats: int) -> int:
    """How many there are of each rhythm."""
    return -(-repeats // ASKED)


def run_grant(
    transport: str = "shm",
    repeats: int = 1000,
    pause_s: float = 0.01,
    timeout_s: float = 60.0,
    progress: Callable[[str], None] = lambda _: None,
) -> GrantReport:
    """Request the grants of one room after another, in both rhythms in turns.

    A prefill endpoint announces one page after another to a decode endpoint in another process. Every room is then sent
    with the measured leases, and its bytes are checked, before the next one begins.

    Args:
        transport: the transport's name; it moves no bytes while grants are measured.
        repeats: round trips of each kind; rounded up to whole rooms.
        pause_s: silence before each request in one of the two rhythms.
        timeout_s: seconds after which a grant or a room has failed.
        progress: called with a line after each room.

    Raises:
        ConfigurationError: invalid numbers, or an unknown transport.
        IntegrityError: a room's bytes are wrong, or did not use the measured grants.
        DeadlineError, PeerLostError: a rank hangs, or has ended.
    """
    if repeats < 1 or not 0 < pause_s < timeout_s:
        raise ConfigurationError(f"{repeats} round trips, some after {pause_s:g} s, in at most {timeout_s:g} s")
    shape = TransferShape(
        transport=transport,
        strategies=(STRATEGY,),
        prefill_tp=1,
        tokens=(ASKED + 1) * ROWS,
        layers=2,
        kv_heads=2,
        head_dim=64,
        page_size=ROWS,
        decode_page_size=ROWS,
        timeout_s=timeout_s,
    )
    in_a_row, after_pause = Series(0.0), Series(pause_s)
    threads = within_one_process(transport)
    with tempfile.TemporaryDirectory(prefix="disagg-kv-bench-") as folder:
        setups = {role: [Setup(shape, role, 0, folder, 1)] for role in ROLES}
        with running(serve, setups, timeout_s + ASKED * pause_s, threads=threads) as (prefill, decode):
            _room(prefill, decode, "before it counts", 0.0)
            for number in range(1, rooms(repeats) + 1):
                for series in (in_a_row, after_pause):
                    series.measure(prefill, decode, str(number))
                progress(f"{number * ASKED} of each")
    both = [*in_a_row.grants, *after_pause.grants]
    sizes = max(one.request_bytes for one in both), max(one.grant_bytes for one in both)
    return GrantReport(transport, len(in_a_row.grants), *sizes, in_a_row.found(), after_pause.found())


@define
class Series:
    """The measurements of one rhythm."""

    pause_s: float
    grants: list[Granted] = field(factory=list)
    bare: list[float] = field(factory=list)

    def measure(self, prefill: Ranks, decode: Ranks, name: str) -> None:
        """A room, and as many bare round trips."""
        granted = _room(prefill, decode, f"{name}, pauses of {self.pause_s:g} s", self.pause_s)
        decode.ask(type(None), "answer_with", granted[-1].grant_bytes)
        (bare,) = prefill.ask(list, "bare", granted[-1].request_bytes, self.pause_s)
        self.grants += granted
        self.bare += bare

    def found(self) -> Rhythm:
        """Measure all rooms."""
        ours, theirs = Quantiles.of([one.seconds for one in self.grants]), Quantiles.of(self.bare)
        return Rhythm(self.pause_s, ours, theirs, ours.p50 / theirs.p50)


def _room(prefill: Ranks, decode: Ranks, name: str, pause_s: float) -> list[Granted]:
    """Request a room's grants in that rhythm, use them, and check the bytes."""
    room = name.encode()
    decode.ask(type(None), "prepare", STRATEGY, room)
    prefill.ask(type(None), "prepare", STRATEGY, room)
    (grants,) = prefill.ask(list, "request", pause_s)
    decode.tell("move")
    (sent,) = prefill.ask(Moved, "move")
    decode.answers(Moved)
    (bad,) = decode.ask(int, "wrong", STRATEGY)
    if bad or sent.segments != ASKED + 1 or sent.grants:
        raise IntegrityError(
            f"room {name!r}: {bad:,} bytes are wrong, and {sent.segments} segments crossed with {ASKED + 1} grants "
            f"and {len(sent.grants)} others; its times are invalid"
        )
    return grants


class _Pair:
    """Bare ZeroMQ: an inbox, and a socket to the other rank's inbox."""

    def __init__(self, folder: str, own: Role, other: Role, timeout_s: float | None = None) -> None:
        self._context = zmq.Context()
        self._pull, self._push = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for one in (self._pull, self._push):
            one.setsockopt(zmq.LINGER, 0)
        if timeout_s is not None:
            self._pull.setsockopt(zmq.RCVTIMEO, int(timeout_s * 1000))
        self._pull.bind(f"ipc://{folder}/bare-{own}")
        self._push.connect(f"ipc://{folder}/bare-{other}")

    def send(self, frame: bytes) -> None:
        """Hand it over."""
        self._push.send(frame)

    def receive(self) -> bytes:
        """Wait for the next one."""
        try:
            return self._pull.recv()
        except zmq.Again as exc:
            raise DeadlineError("bare ZeroMQ: no answer") from exc

    def let_go(self) -> None:
        """On the thread that uses it."""
        self._pull.close()
        self._push.close()

    def end(self) -> None:
        """Close it, from any thread. A thread in ``receive`` gets ContextTerminated; this waits until it has left."""
        self._context.term()


class Asker(PrefillRank):
    """Announces one page after another, each when the grant of the last one is there; on one thread."""

    threaded = False
    polls = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._pair = _Pair(setup.folder, "prefill", "decode", setup.shape.timeout_s)

    def request(self, pause_s: float) -> list[Granted]:
        """Request every page of the room, and submit all but the last; the first request is not reported."""
        granted: list[Granted] = []
        passes: list[ForwardPass] = []

        def came() -> bool:
            granted.extend(self._channel.taken())
            return len(granted) == len(passes)

        for start, page in enumerate(self._ids):
            pages = [PageTable(KV, [page], start * ROWS)]
            _rest(pause_s)
            passes.append(self._end.step({self._delivery.room: ((start + 1) * ROWS, pages)}))
            self._until(came)
        self._step = passes.pop()
        for one in passes:
            one.close()
        return granted[1:]

    def _until(self, good: Callable[[], bool], *, busy: bool = False) -> None:
        """Step the endpoint until the condition holds; the endpoint waits by itself."""

        def step() -> None:
            if not good():
                self._end.driver.step(STEP_S)

        wait_until(step, good, self._delivery, self._shape.timeout_s, lambda: None)

    def idle(self) -> None:
        """Beat and answer between two requests of the parent."""
        for end in self._ends.values():
            end.driver.step()

    def bare(self, nbytes: int, pause_s: float) -> list[float]:
        """Seconds of as many bare round trips of a frame of that size."""
        taken, frame = [], bytes(nbytes)
        for _ in range(ASKED + 1):
            _rest(pause_s)
            began = time.monotonic()
            self._pair.send(frame)
            self._pair.receive()
            taken.append(time.monotonic() - began)
        return taken[1:]

    def close(self) -> None:
        """End all."""
        self._pair.let_go()
        self._pair.end()
        super().close()


class Granter(DecodeRank):
    """Awaits rooms, and answers bare frames on a thread of their own."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._answer = b""
        self._pair = _Pair(setup.folder, "decode", "prefill")
        self._thread = threading.Thread(target=self._echo, name="bare ZeroMQ", daemon=True)
        self._thread.start()

    def answer_with(self, nbytes: int) -> None:
        """How large the answer to a bare frame is."""
        self._answer = bytes(nbytes)

    def _echo(self) -> None:
        with suppress(zmq.ContextTerminated):
            while True:
                self._pair.receive()
                self._pair.send(self._answer)
        self._pair.let_go()

    def close(self) -> None:
        """End all."""
        self._pair.end()
        self._thread.join()
        super().close()


def _rest(seconds: float) -> None:
    """Nothing at all where there is no pause: a sleep of no time takes some 50 us."""
    if seconds:
        time.sleep(seconds)


def serve(pipe: Connection, setup: Setup) -> None:
    """Be a rank until the pipe is closed."""
    attend(pipe, setup.device, lambda: Asker(setup) if setup.role == "prefill" else Granter(setup))
