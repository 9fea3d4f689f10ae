"""A measured probe: 256 MiB from this process into another one, over one transport after the other.

The other process listens and owns the memory that is written to. It makes the same transports as this one, and checks
the bytes. Nothing of an endpoint is used but :class:`Transport` and a channel that carries the frames below.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

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
from .places import Place

NBYTES = 256 << 20
TIMES, ENOUGH_S = 5, 1.0
"""The most measured writes of a transport, and the seconds after which no further one begins. One before them makes
connections and touches pages."""

ANSWER_S, WRITE_S, SILENCE_S = 30.0, 30.0, 60.0
"""The longest wait for an answer or a connection, for a write, and of the listening side for a frame."""

_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)


class About(Struct, frozen=True):
    """One side: its host for people, names that show whether both share a host, its device, and versions."""

    host: str
    where: str
    place: Place
    versions: dict[str, str]


class Hello(Struct, frozen=True, tag=True):
    """The first frame, again and again until it is answered: where answers go to."""

    answer_to: str


class Ask(Struct, frozen=True, tag=True):
    """Make memory of these transports."""

    transport: str


class Check(Struct, frozen=True, tag=True):
    """Compare the memory with the pattern of a seed."""

    seed: int


class Bye(Struct, frozen=True, tag=True):
    """The probe is over."""


class Answer(Struct, frozen=True, tag=True):
    """To ``Hello``: who answers. To ``Ask``: where the memory is, or why there is none. To ``Check``: wrong words."""

    about: About | None = None
    offers: bytes = b""
    region: int = 0
    refused: str = ""
    wrong: int = 0


Frame = Hello | Ask | Check | Bye | Answer
_DECODER = msgspec.msgpack.Decoder(Frame)


@frozen
class Lane:
    """What one transport did, and what that is compared with.

    Args:
        transport: the name; for ``auto``, that of the transport that it took.
        reason: why that one.
        seconds: of each measured write.
        error: why nothing was measured; empty: it was.
        auto: whether it is the one that ``auto`` takes.
        gb_s: by the median of the writes; None: nothing was measured.
        over: what the bytes go over; empty: memory that is mapped.
        fell_back_to_tcp: it is TCP, though there is something faster.
        most_gb_s: a nominal rate, or that of a copy; None: not known.
        most: what has that rate.
    """

    transport: str
    reason: str = ""
    seconds: tuple[float, ...] = ()
    error: str = ""
    auto: bool = False
    gb_s: float | None = None
    over: str = ""
    fell_back_to_tcp: bool = False
    most_gb_s: float | None = None
    most: str = ""


class Link:
    """A channel and the address of the other side."""

    def __init__(self, channel: Channel, to: str = "") -> None:
        self.channel = channel
        self.to = to
        self._frames: deque[bytes] = deque()

    def send(self, frame: Frame) -> None:
        """Hand a frame over."""
        self.channel.send(self.to, msgspec.msgpack.encode(frame))

    def next(self, until: float, work: Callable[[], object] = lambda: None, every_s: float = 0.1) -> Frame | None:
        """The next frame, with ``work`` done meanwhile; None: there was none in time.

        Raises:
            ConfigurationError: one side does not allow the other.
            RemoteProtocolError: something else came.
        """
        while not self._frames:
            if time.monotonic() >= until:
                return None
            work()
            self.channel.wait(every_s)
            for news in self.channel.poll():
                if isinstance(news, Denied):
                    reason = news.reason or "one side does not allow the other's key or user: see disagg-kv keys"
                    raise ConfigurationError(f"probe: {news.address}: {reason}")
                if isinstance(news, Arrived):
                    self._frames.append(news.frame)
        try:
            frame: Frame = _DECODER.decode(self._frames.popleft())
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"probe: no frame of this version: {error}") from error
        return frame

    def answer(self) -> Answer:
        """The next answer; a second one to ``Hello`` is passed over.

        Raises:
            PeerLostError: there is none in time.
            RemoteProtocolError: something else came.
        """
        while (frame := self.next(time.monotonic() + ANSWER_S)) is not None:
            if not isinstance(frame, Answer):
                raise RemoteProtocolError(f"probe: unexpected {type(frame).__name__}")
            if frame.about is None:
                return frame
        raise PeerLostError(f"probe: the other side did not answer within {ANSWER_S:g} s")

    def greet(self, patience_s: float, alive: Callable[[], bool]) -> About:
        """Introduce this side while the other one lives; what it says of itself.

        Raises:
            PeerLostError: nothing answers.
        """
        until = time.monotonic() + patience_s
        while alive() and time.monotonic() < until:
            self.send(Hello(self.channel.address))
            found = self.next(time.monotonic() + 0.2)
            if isinstance(found, Answer) and found.about is not None:
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
        while time.perf_counter() < began + WRITE_S:
            for _, event in self.side.poll():
                if isinstance(event, PeerLost):
                    raise PeerLostError(f"probe: {carrier.name} has lost the other side")
                if isinstance(event, WriteEnded) and event.ticket == ticket:
                    if event.error is not None:
                        raise event.error
                    return time.perf_counter() - began
            time.sleep(20e-6)
        raise DeadlineError(f"probe: {carrier.name}: a write did not end within {WRITE_S:g} s")


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
            ready = link.answer()
        if ready.refused:
            return Lane(name, error=f"at the other side: {ready.refused}")
        return _written(link, end, ready)
    except DisaggKVError as error:
        return Lane(name, error=text_of(error))
    finally:
        if end is not None:
            end.side.close(1.0)


def _written(link: Link, end: End, ready: Answer) -> Lane:
    carrier = end.side.connect(end.side.shared(ready.offers), ANSWER_S)
    region = RegionId(ready.region)
    pattern(0, end.words())
    end.write(carrier, region)
    pattern(1, end.words())
    seconds = list[float]()
    while len(seconds) < TIMES and sum(seconds) < ENOUGH_S:
        seconds.append(end.write(carrier, region))
    link.send(Check(1))
    wrong = link.answer().wrong
    if wrong:
        raise IntegrityError(f"probe: {carrier.name}: {wrong} of {NBYTES // 8} words are wrong")
    return Lane(carrier.name, carrier.reason, tuple(seconds))


def serve(channel: Channel, here: About, device: str, host: str, first_s: float = math.inf) -> None:
    """Listen until one probe is over. It may come within ``first_s``, and be silent for SILENCE_S.

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
            until = time.monotonic() + SILENCE_S
            match frame:
                case Hello():
                    link.to = frame.answer_to
                    link.send(Answer(here))
                case Ask():
                    if end is not None:
                        end.side.close(1.0)
                        end = None
                    try:
                        end = End(frame.transport, device, host)
                        link.send(Answer(offers=end.side.offers(), region=end.region))
                    except DisaggKVError as error:
                        link.send(Answer(refused=text_of(error)))
                case Check() if end is not None:
                    link.send(Answer(wrong=end.wrong(frame.seed)))
                case Bye():
                    return
                case None:
                    raise PeerLostError("probe: the other side is silent")
                case _:
                    raise RemoteProtocolError(f"probe: unexpected {type(frame).__name__}")
    finally:
        if end is not None:
            end.side.close(1.0)
