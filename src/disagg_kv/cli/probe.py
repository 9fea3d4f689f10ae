"""A measured probe: 256 MiB from this process into another one, over one transport after the other.

The other process listens and owns the memory that is written to. It makes the same transports as this one, and checks
the bytes. Nothing of an endpoint is used but :class:`Transport` and a channel that carries the frames below.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import torch
from attrs import frozen
from msgspec import Struct

from ..channels import Arrived, Channel, Denied
from ..errors import (
    ConfigurationError,
    DeadlineError,
    DisaggKVError,
    IntegrityError,
    PeerLostError,
    RemoteProtocolError,
    text_of,
)
from ..ids import RegionId
from ..memory import bytes_of, new_buffer
from ..testing.pair import batch
from ..transports import Carrier, PeerLost, WriteEnded, between_processes
from ..transports.registry import AUTO
from .places import Place

NBYTES = 256 << 20
TIMES, ENOUGH_S = 5, 1.0
"""The most measured writes of a transport, and the seconds after which no further one begins. One before them makes
connections and touches pages."""

ANSWER_S = 30.0
"""The longest wait for an answer, a write or a connection."""

_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)


class About(Struct, frozen=True):
    """One side: its host for people, what tells whether both are on one host, its device, and versions."""

    host: str
    where: str
    place: Place
    versions: dict[str, str]


class Hello(Struct, frozen=True, tag=True):
    """The first frame, again and again until a ``Welcome``: where answers go to."""

    answer_to: str


class Welcome(Struct, frozen=True, tag=True):
    """The answer to ``Hello``."""

    about: About


class Ask(Struct, frozen=True, tag=True):
    """Make memory of these transports."""

    transport: str


class Ready(Struct, frozen=True, tag=True):
    """The answer to ``Ask``: where the memory is, or why there is none."""

    offers: bytes = b""
    region: int = 0
    refused: str = ""


class Check(Struct, frozen=True, tag=True):
    """Compare the memory with the pattern of a seed."""

    seed: int


class Checked(Struct, frozen=True, tag=True):
    """The answer to ``Check``."""

    wrong: int


class Bye(Struct, frozen=True, tag=True):
    """The probe is over."""


Frame = Hello | Welcome | Ask | Ready | Check | Checked | Bye
F = TypeVar("F", bound=Frame)
_DECODER = msgspec.msgpack.Decoder(Frame)


@frozen
class Lane:
    """What one transport did.

    Args:
        transport: the name; for ``auto``, that of the transport that it took.
        auto: whether it is the one that ``auto`` takes.
        reason: why ``auto`` takes it.
        seconds: of each measured write.
        error: why nothing was measured; empty: it was.
    """

    transport: str
    auto: bool = False
    reason: str = ""
    seconds: tuple[float, ...] = ()
    error: str = ""

    @property
    def gb_s(self) -> float | None:
        """By the median of the writes."""
        return rate(self.seconds) if self.seconds else None


def rate(seconds: Sequence[float]) -> float:
    """GB/s, by the median."""
    return NBYTES / statistics.median(seconds) / 1e9


class Link:
    """A channel and the address of the other side."""

    def __init__(self, channel: Channel, to: str = "") -> None:
        self.channel = channel
        self.to = to

    def send(self, frame: Frame) -> None:
        """Hand a frame over."""
        self.channel.send(self.to, msgspec.msgpack.encode(frame))

    def next(self, until: float, work: Callable[[], object] = lambda: None, every_s: float = 0.1) -> Frame | None:
        """The next frame, with ``work`` done meanwhile; None: there was none in time.

        Raises:
            ConfigurationError: one side does not allow the other.
            RemoteProtocolError: something else came.
        """
        while time.monotonic() < until:
            work()
            self.channel.wait(min(every_s, max(0.0, until - time.monotonic())))
            for news in self.channel.poll():
                if isinstance(news, Denied):
                    reason = news.reason or "one side does not allow the other's key or user: see disagg-kv keys"
                    raise ConfigurationError(f"probe: {news.address}: {reason}")
                if isinstance(news, Arrived):
                    try:
                        return _DECODER.decode(news.frame)
                    except msgspec.MsgspecError as error:
                        raise RemoteProtocolError(f"probe: no frame of this version: {error}") from error
        return None

    def answer(self, kind: type[F]) -> F:
        """The next frame, of this kind. A second ``Welcome`` is passed over.

        Raises:
            PeerLostError: there is none in time.
            RemoteProtocolError: it is of another kind.
        """
        while isinstance(frame := self.next(time.monotonic() + ANSWER_S), Welcome):
            pass
        if frame is None:
            raise PeerLostError(f"probe: the other side did not answer within {ANSWER_S:g} s")
        if not isinstance(frame, kind):
            raise RemoteProtocolError(f"probe: {type(frame).__name__} instead of {kind.__name__}")
        return frame

    def greet(self, patience_s: float, alive: Callable[[], bool]) -> About:
        """Introduce this side while the other one lives; what it says of itself.

        Raises:
            PeerLostError: nothing answers.
        """
        until = time.monotonic() + patience_s
        while alive() and time.monotonic() < until:
            self.send(Hello(self.channel.address))
            if isinstance(found := self.next(time.monotonic() + 0.2), Welcome):
                return found.about
        raise PeerLostError(
            f"probe: nothing answers at {self.to}: is 'disagg-kv doctor --listen' running there, and is the port open?"
        )


class End:
    """This process's end: transports, and NBYTES of memory that they know."""

    def __init__(self, name: str, device: str, host: str) -> None:
        self.side = between_processes(name, device, host)
        try:
            allocate = self.side.allocator
            self.buffer = new_buffer(NBYTES, device) if allocate is None else allocate(NBYTES)
            (self.region,) = self.side.register([self.buffer])
        except BaseException:
            self.side.close(0.0)
            raise

    def words(self) -> torch.Tensor:
        """The memory as int64: a transport's, or of :func:`new_buffer`."""
        if self.buffer.device == "cpu":
            return torch.from_numpy(bytes_of(self.buffer)).view(torch.int64)
        assert isinstance(self.buffer.owner, torch.Tensor)
        return self.buffer.owner.view(torch.int64)

    def wrong(self, seed: int) -> int:
        """How many of its words are not those of the pattern."""
        want = torch.empty_like(self.words())
        pattern(seed, want)
        return int((self.words() != want).sum())

    def write(self, carrier: Carrier, region: RegionId) -> float:
        """Write all of it; the seconds.

        Raises:
            DisaggKVError: the write failed, or did not end in time.
        """
        began = time.perf_counter()
        ticket = carrier.transport.submit(carrier.peer, batch(self.region, region, [(0, 0, NBYTES)]))
        while time.perf_counter() < began + ANSWER_S:
            for _, event in self.side.poll():
                if isinstance(event, PeerLost):
                    raise PeerLostError(f"probe: {carrier.name} has lost the other side")
                if isinstance(event, WriteEnded) and event.ticket == ticket:
                    if event.error is not None:
                        raise event.error
                    return time.perf_counter() - began
            time.sleep(20e-6)
        raise DeadlineError(f"probe: {carrier.name}: a write did not end within {ANSWER_S:g} s")


def pattern(seed: int, into: torch.Tensor) -> None:
    """Numbers that differ from word to word and from seed to seed; they are there when this returns."""
    torch.arange(len(into), out=into).mul_(_FACTOR).add_(seed)
    finished(into)


def finished(memory: torch.Tensor) -> None:
    """Wait for the device of some memory."""
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)


def measure(link: Link, name: str, device: str, host: str) -> Lane:
    """What the transports of a name do: the first of them that reaches the other side."""
    link.send(Ask(name))
    end: End | None = None
    try:
        try:
            end = End(name, device, host)
        finally:
            ready = link.answer(Ready)
        if ready.refused:
            return Lane(name, error=f"at the other side: {ready.refused}")
        return _written(link, end, ready, name)
    except DisaggKVError as error:
        return Lane(name, error=text_of(error))
    finally:
        if end is not None:
            end.side.close(1.0)


def _written(link: Link, end: End, ready: Ready, name: str) -> Lane:
    carrier = end.side.connect(end.side.shared(ready.offers), ANSWER_S)
    region = RegionId(ready.region)
    pattern(0, end.words())
    end.write(carrier, region)
    pattern(1, end.words())
    seconds = list[float]()
    while len(seconds) < TIMES and sum(seconds) < ENOUGH_S:
        seconds.append(end.write(carrier, region))
    link.send(Check(1))
    wrong = link.answer(Checked).wrong
    if wrong:
        raise IntegrityError(f"probe: {carrier.name}: {wrong} of {NBYTES // 8} words are wrong")
    return Lane(carrier.name, name == AUTO, carrier.reason, tuple(seconds))


def serve(channel: Channel, here: About, device: str, host: str, first_s: float = math.inf) -> None:
    """Listen until one probe is over. It may come within ``first_s``, and be silent for twice ANSWER_S.

    Raises:
        PeerLostError: it was silent for longer.
        ConfigurationError: it may not talk to this side.
        RemoteProtocolError: it does not say what a probe says.
    """
    link, until = Link(channel), time.monotonic() + first_s
    end: End | None = None
    try:
        while True:
            frame = link.next(until, end.side.poll if end else lambda: None, 0.0005 if end else 0.1)
            until = time.monotonic() + 2 * ANSWER_S
            match frame:
                case Hello():
                    link.to = frame.answer_to
                    link.send(Welcome(here))
                case Ask():
                    if end is not None:
                        end.side.close(1.0)
                        end = None
                    try:
                        end = End(frame.transport, device, host)
                        link.send(Ready(end.side.offers(), end.region))
                    except DisaggKVError as error:
                        link.send(Ready(refused=text_of(error)))
                case Check() if end is not None:
                    link.send(Checked(end.wrong(frame.seed)))
                case Bye():
                    return
                case None:
                    raise PeerLostError("probe: the other side is silent")
                case _:
                    raise RemoteProtocolError(f"probe: unexpected {type(frame).__name__}")
    finally:
        if end is not None:
            end.side.close(1.0)
