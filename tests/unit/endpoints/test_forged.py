"""Frames of the right shape that say what cannot be: the room fails by name, or nothing happens; others are unharmed.

Whatever place a peer names, region, offset, length, segment, lease or page, is held against what it may name, which is
what it said of itself in the life that it is in, and what it was granted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from disagg_kv.channels import InprocChannel
from disagg_kv.core import Codec, Phase, RoomFrame
from disagg_kv.core.wire import frames as f
from disagg_kv.core.wire.frames import Head
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import RoomId
from disagg_kv.transports import InprocTransport
from tests.support.rig import Decodes, Memory, Prefills, Request, Rig, tp_shards
from tests.support.rig_parts import RecordingTransport

SPEC = CacheSpec.kv(2, 4, 8, "float16")
ROWS = 8
RING = 1 << 16
WHOLE: f.Box = (0, ROWS, 0, 2, False)
PART = ROWS * 2 * 4 * 16 * 2
"""Bytes of all rows: 2 layers of K and V with 4 heads of 16 bytes."""


class Scene:
    """A room in the middle of being moved, and somebody who speaks in the name of either side."""

    def __init__(self, path: str) -> None:
        self.rig = Rig(SPEC)
        self.transport = RecordingTransport(InprocTransport())
        memory = Memory(transport=lambda: self.transport)
        self.prefills: Prefills = self.rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy=path)
        self.decodes: Decodes = self.rig.decode(tp_shards(SPEC, 1), strategy=path, ring_bytes=RING)
        self.forger = InprocChannel(self.rig.hub, "forger")
        self.rig.request("first", self.prefills, self.decodes, ROWS).start().landed()
        self.transport.batches.clear()
        (self.prefill,) = self.decodes[0].endpoint.peers()
        (self.decode,) = self.prefills[0].endpoint.peers()
        self.request = self.rig.request("room", self.prefills, self.decodes, ROWS)
        self.request.open_decode().expect(ROWS).open_prefill()
        self.rig.until(lambda: self.request.sends[0].phase is Phase.READY, "the expectation")

    def from_prefill(self, kind: Callable[..., RoomFrame], **fields: object) -> None:
        """Say something to decode."""
        head = Head(src=self.prefill.epoch, dst=self.decode.epoch, room=self.request.room, generation=2)
        self._say(self.decode.address, kind(**(head | fields)))

    def from_decode(self, kind: Callable[..., RoomFrame], **fields: object) -> None:
        """Say something to prefill."""
        head = Head(src=self.decode.epoch, dst=self.prefill.epoch, room=self.request.room, generation=2)
        self._say(self.prefill.address, kind(**(head | fields)))

    def _say(self, address: str, frame: RoomFrame) -> None:
        assert self.forger.send(address, Codec().encode(frame))

    def asked(self) -> None:
        """Prefill has asked for a lease, and decode, which is frozen, does not answer."""
        self.decodes[0].frozen = True
        self.request.send(ROWS)
        self.rig.wait(0.1)

    def fails(self, why: str) -> None:
        """The room ends on both sides for that reason, nothing was posted, and the next room is right."""
        assert not self.transport.batches
        self.decodes[0].frozen = self.prefills[0].frozen = False
        self.request.failed()
        assert why in self.request.errors()
        self._goes_on()

    def goes_on(self) -> None:
        """Nothing has happened: the room succeeds."""
        self.decodes[0].frozen = False
        if not self.request.given:
            self.request.send(ROWS)
        self.request.finish().landed()
        self._goes_on()

    def _goes_on(self) -> None:
        self.request.forgive()
        self.rig.request("next", self.prefills, self.decodes, ROWS).start().landed()
        assert not any(m.observer.counters["errors.unforeseen"] for m in self.rig.members)
        self.rig.quiet()

    def counted(self, member: Prefills | Decodes, name: str) -> int:
        """How often the one rank of a side has counted that."""
        return member[0].observer.counters[name]


@pytest.fixture
def scene() -> Scene:
    return Scene("staged")


class TestGrants:
    @pytest.mark.parametrize("offset", [RING - 256, RING, 2**62])
    def test_outside_of_the_ring(self, scene: Scene, offset: int) -> None:
        scene.asked()
        scene.from_decode(f.Grant, segment=WHOLE, ask=0, lease=0, offset=offset, nbytes=PART)
        scene.rig.wait(0.1)
        scene.fails(f"granted bytes {offset}-{offset + PART} of a ring of {RING}")

    @pytest.mark.parametrize("nbytes", [0, PART - 1, PART + 1, 2**62])
    def test_of_another_length(self, scene: Scene, nbytes: int) -> None:
        scene.asked()
        scene.from_decode(f.Grant, segment=WHOLE, ask=0, lease=0, offset=0, nbytes=nbytes)
        scene.rig.wait(0.1)
        scene.fails(f"granted {nbytes} bytes for {PART}")

    @pytest.mark.parametrize(
        "segment", [(0, 4, 0, 2, False), (8, 16, 0, 2, False), (0, 8, 0, 2, True), (8, 0, 2, 0, False)]
    )
    def test_of_a_segment_that_nobody_asked_for(self, scene: Scene, segment: f.Box) -> None:
        scene.asked()
        scene.from_decode(f.Grant, segment=segment, ask=0, lease=0, offset=0, nbytes=PART)
        scene.rig.wait(0.1)
        assert not scene.transport.batches
        scene.goes_on()

    def test_of_another_generation_and_of_another_life(self, scene: Scene) -> None:
        """Counted, and nothing is written."""
        scene.asked()
        grant = {"segment": WHOLE, "ask": 0, "lease": 0, "offset": 0, "nbytes": PART}
        scene.from_decode(f.Grant, generation=9, **grant)
        scene.from_decode(f.Grant, src=bytes(16), **grant)
        scene.from_decode(f.Grant, dst=bytes(16), **grant)
        scene.rig.wait(0.1)
        assert scene.counted(scene.prefills, "frames.unknown_room") == 1
        assert scene.counted(scene.prefills, "frames.stale") == 2
        assert not scene.transport.batches
        scene.goes_on()

    def test_late_in_a_room_that_has_ended_well(self, scene: Scene) -> None:
        """No refusal: the end of a room overtakes what decode had repeated."""
        scene.request.send(ROWS).finish().landed()
        scene.from_decode(f.Grant, segment=WHOLE, ask=0, lease=0, offset=0, nbytes=PART)
        scene.rig.wait(0.1)
        assert scene.counted(scene.prefills, "frames.unknown_room") == 0


class TestNotices:
    @pytest.mark.parametrize(
        ("segment", "lease", "why"),
        [
            (WHOLE, 0, "used lease 0 of"),
            (WHOLE, 2**62, f"used lease {2**62} of"),
            (WHOLE, None, "wrote to pages that were not exposed"),
            ((0, 12, 0, 2, False), 0, "rows 0-12 outside 0-8"),
            ((2**61, 2**62, 0, 2, False), 0, "outside 0-8"),
            ((0, 8, 0, 3, False), 0, "layers [0, 3) are not a run within one of [0, 2)"),
            ((0, 0, 0, 2, False), 0, "an empty segment"),
            ((0, 8, 0, 2, True), 0, "state rows up to 8, but layers range(0, 2) have 0"),
        ],
    )
    def test_of_what_was_not_granted(self, scene: Scene, segment: f.Box, lease: int | None, why: str) -> None:
        """A notice counts only for a lease that its sender holds, inside of what is awaited."""
        scene.prefills[0].frozen = True
        scene.from_prefill(f.ChunkReady, segment=segment, lease=lease)
        scene.rig.wait(0.1)
        assert scene.request.receives[0].phase is Phase.FAILED
        scene.fails(why)

    def test_of_another_generation_and_of_another_life(self, scene: Scene) -> None:
        scene.prefills[0].frozen = True
        scene.from_prefill(f.ChunkReady, segment=WHOLE, lease=0, generation=9)
        scene.from_prefill(f.ChunkReady, segment=WHOLE, lease=0, room=b"nobody's")
        scene.from_prefill(f.ChunkReady, segment=WHOLE, lease=0, src=bytes(16))
        scene.from_prefill(f.ChunkReady, segment=WHOLE, lease=0, dst=bytes(16))
        scene.rig.wait(0.1)
        assert scene.counted(scene.decodes, "frames.unknown_room") == 2
        assert scene.counted(scene.decodes, "frames.stale") == 2
        scene.prefills[0].frozen = False
        scene.goes_on()

    def test_of_a_peer_that_is_no_writer_of_the_room(self, scene: Scene) -> None:
        """It is counted, and is no arrival."""
        others = scene.rig.prefill(tp_shards(SPEC, 1), "Q", strategy="staged")
        scene.rig.request("other", others, scene.decodes, ROWS, "Q").open_decode()
        scene.rig.until(lambda: len(scene.decodes[0].endpoint.peers()) == 2, "the other instance")
        other = next(p for p in scene.decodes[0].endpoint.peers() if p.instance == "Q")
        scene.from_prefill(f.ChunkReady, segment=WHOLE, lease=0, src=other.epoch)
        scene.from_prefill(f.Drained, reason="forged", src=other.epoch)
        scene.rig.wait(0.1)
        assert scene.counted(scene.decodes, "frames.not_a_writer") == 2
        scene.request.send(ROWS).finish().landed()

    def test_of_a_path_that_decode_has_not_chosen(self) -> None:
        scene = Scene("slice")
        scene.prefills[0].frozen = True
        scene.from_prefill(f.StagingRequest, segment=WHOLE, ask=0, ready=True)
        scene.rig.wait(0.1)
        scene.fails("must not use staging memory: the path is 'slice'")


class TestPages:
    """What a peer exposes must be pages that it has."""

    @pytest.mark.parametrize(
        ("first", "pages", "why"),
        [
            (0, [0, 64], "page 64 of 64"),
            (0, [3, 3], "twice"),
            (0, [0, -1], "page ids must be"),
            (0, [0], "rows up to 8, but 1 pages end at 4"),
            (2, [0, 1], "begins at row 2, not at a page of 4 rows"),
            (2**61, [0, 1], "but the table begins at"),
        ],
    )
    @pytest.mark.parametrize("path", ["slice", "direct"])
    def test_that_do_not_exist_or_do_not_fit_are_not_written_to(
        self, path: str, first: int, pages: list[int], why: str
    ) -> None:
        scene = Scene(path)
        delivery = scene.prefills[0].endpoint.open(RoomId(b"exposed"))
        table = f.WireTable("kv", first, len(pages), 0, np.array(pages, "<i4").tobytes())
        expect = {"start": 0, "stop": ROWS, "path": path, "tables": (table,), "tag": b""}
        scene.from_decode(f.Expect, room=b"exposed", **expect)
        scene.rig.wait(0.1)
        spare: Request = scene.rig.request("exposed", scene.prefills, [], ROWS)
        spare.sends = [delivery]
        if not delivery.released:
            spare.send(ROWS).finish()
        scene.rig.until(lambda: delivery.released, "the refusal")
        assert why in str(delivery.error)
        assert not scene.transport.batches
        scene.request.send(ROWS).finish().landed()
