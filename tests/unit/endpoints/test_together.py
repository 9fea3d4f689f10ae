"""Frames that an endpoint has for one peer leave together, over a channel that can, and wait for no copy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from disagg_kv.channels import MAX_FRAME, MAX_TOGETHER, Channel, base
from disagg_kv.core import Options, RoomFrame
from disagg_kv.core.wire.frames import ChunkReady, Done, Landed
from disagg_kv.endpoints.loop import buffers as outbox
from disagg_kv.geometry import CacheSpec
from disagg_kv.kernels import Move
from disagg_kv.memory import Buffer, Event, MemoryPool
from tests.support.rig import Memory, Rig, tp_shards
from tests.support.rig_parts import CountingKernels, Listening

SPEC = CacheSpec.kv(4, 4, 8, "float16")


class Together(Listening):
    """Takes several frames at once, and notes how many."""

    def __init__(self, inner: Channel, heard: list[RoomFrame], sizes: list[int]) -> None:
        super().__init__(inner, heard)
        self._sizes = sizes

    def send_all(self, address: str, frames: Sequence[bytes]) -> bool:
        """See :class:`~disagg_kv.channels.SupportsBatches`."""
        self._sizes.append(len(frames))
        assert base.fit_together(frames)
        return all(self.send(address, frame) for frame in frames)


class Broken(Together):
    """Can send nothing together."""

    def send_all(self, address: str, frames: Sequence[bytes]) -> bool:
        """The first message to a peer gets there: others must know that we are there."""
        if len(frames) > 1:
            raise OSError("no")
        return super().send_all(address, frames)


class Watching(CountingKernels):
    """Notes how many segments were said to have landed when each scatter began."""

    def __init__(self, heard: list[RoomFrame]) -> None:
        super().__init__()
        self.told: list[int] = []
        self._heard = heard

    def scatter(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> Event | None:
        """Count and pass on."""
        self.told.append(sum(len(frame.segments) for frame in self._heard if isinstance(frame, Landed)))
        return super().scatter(pool, moves, staging)


def test_what_one_turn_says_to_one_peer_is_one_message_and_waits_for_no_copy() -> None:
    rig = Rig(SPEC)
    heard: list[RoomFrame] = []
    sizes: list[int] = []
    memory, kernels = Memory(channel=lambda inner: Together(inner, heard, sizes)), Watching(heard)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged", slot_bytes=512, slots=16)
    decodes = rig.decode(tp_shards(SPEC, 1), memory=memory, strategy="staged", kernels=kernels, ring_bytes=1 << 16)
    rig.request("room", prefills, decodes, 64).start(64).landed()
    assert max(sizes) > Options().window // 2
    assert len(kernels.told) > 16
    assert all(told > before for before, told in enumerate(kernels.told))


class Noting(Together):
    """Notes of what kinds the frames of each message are."""

    def __init__(self, inner: Channel, messages: list[list[type[RoomFrame]]]) -> None:
        super().__init__(inner, [], [])
        self._messages = messages

    def send_all(self, address: str, frames: Sequence[bytes]) -> bool:
        """Note and pass on."""
        before = len(self._heard)
        sent = super().send_all(address, frames)
        self._messages.append([type(frame) for frame in self._heard[before:]])
        return sent


@pytest.mark.parametrize("strategy", ["staged", "auto"])
def test_done_crosses_in_one_message_with_the_last_notice(strategy: str) -> None:
    """Nothing is acknowledged by then: what decode waits for takes no round trip after the last write."""
    rig = Rig(SPEC)
    messages: list[list[type[RoomFrame]]] = []
    memory = Memory(channel=lambda inner: Noting(inner, messages))
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy=strategy)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy=strategy)
    rig.request("room", prefills, decodes, 64).start(64).landed()
    (last,) = [kinds for kinds in messages if Done in kinds]
    assert last[-2:] == [ChunkReady, Done]


@pytest.mark.parametrize("most", [MAX_FRAME, 2048])
def test_more_than_goes_together_leaves_by_several_messages(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a message holds is bounded in frames and in bytes, whichever is reached first."""
    for of in (base, outbox):
        monkeypatch.setattr(of, "MAX_FRAME", most)
    rig = Rig(SPEC)
    sizes: list[int] = []
    memory = Memory(channel=lambda inner: Together(inner, [], sizes), pages=4096)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged", slot_bytes=512)
    decodes = rig.decode(tp_shards(SPEC, 1), memory=memory, strategy="staged", ring_bytes=1 << 20)
    requests = [rig.request(f"{i}", prefills, decodes, 64).start(64) for i in range(12)]
    for request in requests:
        request.released().done()
    rig.check()
    assert max(sizes) == MAX_TOGETHER if most == MAX_FRAME else 4 < max(sizes) < MAX_TOGETHER


def test_frames_that_a_channel_fails_to_send_together_are_counted_and_repeated() -> None:
    """A lost message costs a bounded retry."""
    rig = Rig(SPEC)
    memory = Memory(channel=lambda inner: Broken(inner, [], []))
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged", slot_bytes=512)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged", ring_bytes=1 << 16)
    request = rig.request("room", prefills, decodes, 16).open_decode().expect(16).open_prefill().send(16)
    rig.wait(1.0)
    assert prefills[0].observer.counters["frames.dropped"] > 1
    request.receives[0].abort("seen enough")
    request.sends[0].abort("seen enough")
