"""What an endpoint says leaves at the end of its turn; what landed in a turn is acknowledged in one frame."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import attrs
import pytest

from disagg_kv.channels import MAX_FRAME, Channel, News
from disagg_kv.core import Codec, Phase, RoomFrame
from disagg_kv.core.wire.frames import ChunkReady, Complete, Landed
from disagg_kv.endpoints.loop.buffers import SendBuffer
from disagg_kv.endpoints.peers.limited_log import LimitedLog
from disagg_kv.errors import ConfigurationError
from disagg_kv.geometry import CacheSpec
from disagg_kv.transports.inproc import InprocTransport
from tests.support.rig import Memory, Request, Rig, tp_shards
from tests.support.rig_parts import FiredEvent, PreparingKernels

SPEC = CacheSpec.kv(2, 4, 8, "float16")
ROW_BYTES = 2 * 2 * 4 * 16


class Fast(InprocTransport):
    """Says that it is as fast as NVLink."""

    caps = attrs.evolve(InprocTransport.caps, bytes_per_s=3.8e11)


class Noting:
    """A channel that takes frames together and notes them, and what else its owner does with it."""

    eager = False

    def __init__(self, inner: Channel) -> None:
        self._inner = inner
        self.together: list[list[bytes]] = []
        self.log: list[str] = []

    @property
    def address(self) -> str:
        return self._inner.address

    def send(self, address: str, frame: bytes) -> bool:
        return self.send_all(address, [frame])

    def send_all(self, address: str, frames: Sequence[bytes]) -> bool:
        self.together.append(list(frames))
        for frame in frames:
            assert self._inner.send(address, frame)
        return True

    def poll(self) -> Sequence[News]:
        self.log.append("hear")
        return self._inner.poll()

    def wait(self, timeout_s: float) -> None:
        self.log.append("wait")

    def wake(self) -> None:
        self._inner.wake()

    def forget(self, address: str) -> None:
        self._inner.forget(address)

    def close(self) -> None:
        self._inner.close()

    def said(self, kind: type) -> int:
        """How often a frame of this kind was handed over."""
        return sum(isinstance(Codec().decode(frame), kind) for frames in self.together for frame in frames)


class Eager(Noting):
    """The same, with waits that replace short sleeps."""

    eager = True


@pytest.fixture
def channel(rig: Rig) -> Noting:
    """Two addresses are heard."""
    for name in ("P", "Q"):
        rig.prefill(tp_shards(SPEC, 1), name)
    return Noting(rig.prefills[0].channel)


@pytest.fixture
def rig() -> Rig:
    return Rig(SPEC)


def raises(error: Exception) -> None:
    """No frame here is too large."""
    raise error


P, Q = "inproc://P0", "inproc://Q0"


def test_what_is_said_to_an_address_leaves_together(rig: Rig, channel: Noting) -> None:
    """In the order in which it was said."""
    box = SendBuffer(channel, rig.prefills[0].observer, LimitedLog(rig.clock), raises)
    box.put(P, b"first")
    box.put(Q, b"other")
    box.put(P, b"second")
    assert channel.together == []
    box.flush()
    assert channel.together == [[b"first", b"second"], [b"other"]]
    assert not box.unsent


def world(
    kind: type[Noting], transport: type[InprocTransport], strategy: str = "staged", stop: int | None = 16
) -> tuple[Rig, list[Noting], Request]:
    """One rank to one rank, a room of two segments that are granted; rows are final when the test says so."""
    channels: list[Noting] = []

    def noting(inner: Channel) -> Channel:
        channels.append(kind(inner))
        return channels[-1]

    rig = Rig(SPEC)
    memory = Memory(transport=transport, page_size=8, channel=noting)
    rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy=strategy, slot_bytes=8 * ROW_BYTES, slots=64)
    rig.decode(tp_shards(SPEC, 1), memory=memory, strategy=strategy, kernels=PreparingKernels())
    request = rig.request("room", rig.prefills, rig.decodes, 16).open_decode().expect(stop).open_prefill()
    rig.wait(0.1)
    return rig, channels, request


def until_landed(rig: Rig, request: Request, segments: int = 1, phase: Phase = Phase.MOVING) -> None:
    """Turn both as their own threads would until that many segments have landed; no time passes."""
    for _ in range(100):
        if request.receives[0].report.segments == segments and request.receives[0].phase is phase:
            return
        rig.prefills[0].endpoint.driver.step(1.0)
        rig.decodes[0].endpoint.driver.step(1.0)
    raise AssertionError("they have not landed")


def landed_in(channel: Noting) -> list[int]:
    """Of each ``Landed`` that was handed over, how many segments it lists."""
    frames = [Codec().decode(frame) for frames in channel.together for frame in frames]
    return [len(frame.segments) for frame in frames if isinstance(frame, Landed)]


def test_what_landed_in_a_step_is_acknowledged_in_one_frame() -> None:
    """The notices of both segments come together; the frame leaves in the same step, and prefill takes all of it."""
    rig, (_, decode), request = world(Noting, Fast, stop=None)
    event = FiredEvent()
    request.send(16, ready=event)
    rig.wait(0.1)
    event.fired = True
    until_landed(rig, request, 2)
    assert landed_in(decode) == [2]
    rig.prefills[0].endpoint.driver.step(1.0)
    assert request.sends[0].report.segments == 2
    request.finish().landed()
    assert landed_in(decode) == [2]


def test_complete_acknowledges_what_landed_in_its_step() -> None:
    """Nothing has to be scattered: the last notice brings all, and decode decides at once."""
    rig, (_, decode), request = world(Noting, Fast, "direct")
    event = FiredEvent()
    request.send(16, ready=event).finish()
    rig.wait(0.1)
    event.fired = True
    until_landed(rig, request, 2, Phase.DONE)
    assert landed_in(decode) == []
    assert decode.said(Complete)
    request.landed()
    assert request.sends[0].report.segments == 2


def test_what_ended_a_short_wait_is_heard_before_anything_else_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that have come go before receipts and grants; who sleeps hears when it wakes, in the same turn."""
    rig, (_, decode), _ = world(Eager, Fast)
    endpoint = rig.decodes[0].endpoint
    work = endpoint.driver.loop.side.work

    def noted() -> bool:
        decode.log.append("work")
        return work()

    monkeypatch.setattr(endpoint.driver.loop.side, "work", noted)
    for _ in range(5):
        endpoint.driver.step(1.0)
    assert decode.log.count("wait") == 5
    assert {after for before, after in pairwise(decode.log) if before == "wait"} == {"hear"}


def test_what_is_prepared_is_launched_before_the_next_frame_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames come together; the GPU has something to do while the later ones are read."""
    rig, (prefill, _), request = world(Noting, Fast)
    kernels = rig.decodes[0].endpoint._side.scatters._kernels
    assert isinstance(kernels, PreparingKernels)
    event = FiredEvent()
    request.send(16, ready=event).finish()
    rig.wait(0.3)
    side, launched = rig.decodes[0].endpoint.driver.loop.side, list[int]()
    read = side.on_frame

    def noted(frame: RoomFrame) -> None:
        read(frame)
        if isinstance(frame, ChunkReady):
            launched.append(len(kernels.launched))

    monkeypatch.setattr(side, "on_frame", noted)
    event.fired = True
    request.landed()
    assert launched == [1, 2]
    assert prefill.said(ChunkReady) == 2


class Refusing(Noting):
    """A channel whose ``send_all`` raises while it is ``broken``."""

    broken = False

    def send_all(self, address: str, frames: Sequence[bytes]) -> bool:
        if self.broken:
            raise ConfigurationError("this channel takes no frames")
        return super().send_all(address, frames)


def test_a_channel_that_raises_loses_frames_and_nothing_else() -> None:
    """Whatever it raises, the event that has something to say goes on: the frame is repeated."""
    rig = Rig(SPEC)
    channels: list[Refusing] = []

    def refusing(inner: Channel) -> Channel:
        channels.append(Refusing(inner))
        return channels[-1]

    prefills = rig.prefill(tp_shards(SPEC, 1), memory=Memory(channel=refusing))
    decodes = rig.decode(tp_shards(SPEC, 1))
    rig.request("first", prefills, decodes, 8).start().landed()
    request = rig.request("room", prefills, decodes, 8).start()
    channels[0].broken = True
    rig.wait(0.5)
    assert all(handle.phase is not Phase.FAILED for handle in request.handles)
    channels[0].broken = False
    request.landed()
    rig.quiet()


def test_a_frame_that_no_channel_takes_raises_nothing(rig: Rig, channel: Noting) -> None:
    """What is said may be half of what an event leads to; its error is handled after that."""
    errors: list[Exception] = []
    box = SendBuffer(channel, rig.prefills[0].observer, LimitedLog(rig.clock), errors.append)
    box.put(P, bytes(MAX_FRAME + 1))
    box.flush()
    assert channel.together == []
    (error,) = errors
    assert isinstance(error, ConfigurationError)
    assert f"{MAX_FRAME + 1} bytes" in str(error)
