"""Every frame about a room, in the name of every rank, at every step of the room: only that room may suffer from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import pytest

from disagg_kv.channels import InprocChannel
from disagg_kv.core import Codec, Options, Phase, RoomFrame
from disagg_kv.core.wire.frames import Decision, Head, Vote
from disagg_kv.geometry import CacheSpec
from tests.support.every_frame import FIELDS, ROWS, few_about
from tests.support.rig import Memory, Request, Rig, tp_shards

SPEC = CacheSpec.kv(2, 2, 64, "int8")
RANKS = ("P0", "P1", "D0", "D1")
SIBLING = {"P0": "P1", "P1": "P0", "D0": "D1", "D1": "D0"}
OTHER = {"P0": "D1", "P1": "D0", "D0": "P1", "D1": "P0"}
NOBODY = Head(src=bytes(16), dst=bytes(16), room=b"r", generation=1)
LIES: list[tuple[Mapping[str, str], RoomFrame]] = [
    *((OTHER, frame) for frame in few_about(NOBODY)),
    *((SIBLING, frame) for frame in few_about(NOBODY, Vote, Decision)),
    *((SIBLING, next(few_about(NOBODY, kind))) for kind in FIELDS),
]
"""Who says it to a rank, a rank of the other side or of its own, and what."""

Step = Callable[[Request], object] | None
STEPS: tuple[Step, ...] = (
    lambda room: room.open_prefill(),
    lambda room: room.open_decode(),
    None,
    lambda room: room.expect(ROWS),
    None,
    None,
    lambda room: room.send(ROWS),
    None,
    None,
    lambda room: room.finish(),
    None,
)
"""What the engines do, all rooms together; None: every endpoint makes a turn."""

AT = {"opened": 3, "expected": 6, "moving": 8, "finished": 11}
"""After how many of them the lies come."""


class Scene:
    """Two prefill and two decode ranks, a victim that is being moved, and other rooms."""

    def __init__(self, rooms: int, steps: int) -> None:
        self.rig = Rig(SPEC, options=Options(silence_s=20.0, total_s=60.0))
        memory = Memory(pages=2 * rooms + 8)
        prefills = self.rig.prefill(tp_shards(SPEC, 2), memory=memory, strategy="staged")
        decodes = self.rig.decode(tp_shards(SPEC, 2), memory=memory, strategy="staged", ring_bytes=1 << 20)
        self.members = dict(zip(RANKS, self.rig.members, strict=True))
        self.rig.request("warm", prefills, decodes, ROWS).start().landed()
        infos = [info for member in self.rig.members for info in member.endpoint.peers()]
        self.epochs = {f"{info.instance}{info.rank}": info.epoch for info in infos}
        self.victim = self.rig.request("victim", prefills, decodes, ROWS).open_decode().expect(ROWS).open_prefill()
        self.rooms = [self.rig.request(f"room {n}", prefills, decodes, ROWS) for n in range(rooms)]
        self._forger = InprocChannel(self.rig.hub, "forger")
        for step in STEPS[:steps]:
            if step is None:
                self.rig.turn()
                continue
            for room in self.rooms:
                step(room)

    def lie(self, number: int, src: str, dst: str, frame: RoomFrame) -> None:
        """The forger says a frame about a room. All ranks have opened the same rooms in the same order."""
        head = Head(src=self.epochs[src], dst=self.epochs[dst], room=self.rooms[number].room, generation=number + 3)
        said = msgspec.structs.replace(frame, **head)
        assert self._forger.send(self.members[dst].channel.address, Codec().encode(said))

    def unharmed(self) -> None:
        """The victim succeeds, and no rank meets an error that it did not foresee, also until the last room ends."""
        self.rig.turn()
        self.victim.send(ROWS).finish().released().done()
        for handle in [handle for room in self.rooms for handle in room.handles]:
            handle.abort("the test is over")
        self.rig.wait(1.0)
        for name, member in self.members.items():
            assert member.observer.counters["errors.unforeseen"] == 0, name
            assert not member.observer.counters["errors.broken"], name


@pytest.mark.parametrize("dst", RANKS)
@pytest.mark.parametrize("at", AT)
def test_no_frame_about_a_room_harms_another_room(at: str, dst: str) -> None:
    """Every kind of frame with fields that fit, lie or cannot be, each about a room of its own."""
    scene = Scene(len(LIES), AT[at])
    for number, (says, frame) in enumerate(LIES):
        scene.lie(number, says[dst], dst, frame)
    scene.unharmed()


@pytest.mark.parametrize("dst", ["P1", "D1"])
@pytest.mark.parametrize("at", ["opened", "expected", "moving"])
def test_a_success_that_a_rank_has_not_voted_for_ends_that_room_alone_by_name(at: str, dst: str) -> None:
    """The other ranks learn that the room has failed."""
    scene = Scene(2, AT[at])
    room, other = scene.rooms
    scene.lie(0, SIBLING[dst], dst, Decision(**NOBODY, ok=True, shared=True, reason=""))
    for member in scene.rig.members:
        member.frozen = member is not scene.members[dst]
    scene.rig.turn()
    handle = room.sends[1] if dst == "P1" else room.receives[1]
    error = handle.error
    assert handle.phase is Phase.FAILED
    assert "decided a success that rank 1 has not voted for" in str(error)
    for member in scene.rig.members:
        member.frozen = False
    if not room.taken:
        room.expect(ROWS)
    room.failed().forgive()
    assert all(handle.phase is not Phase.FAILED for handle in other.handles)
    scene.unharmed()
