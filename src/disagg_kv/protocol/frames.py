"""The control frames, exactly as they cross the wire: MessagePack arrays, one type each, schema-checked on arrival.

Every frame names its sender's and its receiver's epoch (``src``, ``dst``); frames about a room name the room and its
generation too. What does not match is counted and dropped by the receiver, never acted upon.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, TypedDict

import msgspec
from msgspec import Meta, Struct

from ..errors import RemoteProtocolError
from .verify import Verify

VERSION = 2
"""Of the protocol; two sides with different versions refuse each other at ``Hello``."""

MAX_AUX = 64 * 1024
"""Bytes of aux data in one frame: what is longer does not ride in ``Done`` but comes before it, in ``AuxPart``."""

MAX_DESCRIPTOR = 512 * 1024
"""Bytes of what a transport says of itself in ``Hello``."""

MAX_ENTRIES = 65_536
"""Entries of any list in a frame, and page ids of all tables in one frame."""

MAX_RANKS = 4096
"""Ranks of an instance."""

U = Annotated[int, Meta(ge=0, le=2**62)]
Layer = Annotated[int, Meta(ge=0, lt=MAX_ENTRIES)]
RankIndex = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Entries = Meta(max_length=MAX_ENTRIES)
Few = Meta(max_length=256)
Region = Annotated[int, Meta(ge=0, le=2**31 - 1)]
EpochBytes = Annotated[bytes, Meta(min_length=16, max_length=16)]
MaybeEpoch = Annotated[bytes, Meta(max_length=16)]
RoomBytes = Annotated[bytes, Meta(min_length=1, max_length=64)]
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
LayerSums = Annotated[bytes, Meta(max_length=1 << 19)]
"""A checksum of eight bytes for every layer of a segment."""

WirePace = tuple[
    Annotated[float, Meta(gt=0, le=1e9)], Annotated[float, Meta(ge=1, le=1e18)], Annotated[float, Meta(ge=0, le=1e9)]
]
"""A :class:`~disagg_kv.planning.Pace`: seconds per layer and token, bytes per second, seconds per group."""

Box = tuple[U, U, U, U, bool]
"""A segment: start, stop, first, last, state."""


def words(reason: object) -> str:
    """What a frame can carry of a reason, whoever wrote it."""
    return str(reason)[:1000].encode("utf-8", "replace").decode()


class WireHolding(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A :class:`~disagg_kv.geometry.Holding`."""

    component: Name
    layers: Annotated[tuple[Layer, ...], Entries]
    start: U
    stop: U
    ways: U
    index: U
    granule: U


class WireComponent(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A :class:`~disagg_kv.geometry.Component`."""

    name: Name
    dtype: Name
    units: U
    unit_bytes: U
    tokens_per_row: U
    rows: U
    window: U | None
    tile_rows: U
    format: Name


class WireSpec(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A :class:`~disagg_kv.geometry.CacheSpec`; layers with equal components share an entry of ``kinds``."""

    model: Annotated[bytes, Meta(max_length=4096)]
    kinds: Annotated[tuple[Annotated[tuple[WireComponent, ...], Few], ...], Few]
    layers: Annotated[tuple[tuple[Layer, Layer], ...], Entries]


class WireSite(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A :class:`~disagg_kv.geometry.Site` without its spec."""

    groups: Annotated[tuple[tuple[Name, U, U, U | None], ...], Few]
    planes: Annotated[tuple[tuple[Layer, Name, Name, U, U, U, U, U], ...], Entries]
    buffers: Annotated[tuple[U, ...], Entries]


class WireTable(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A :class:`~disagg_kv.geometry.PageTable`; ``pages`` are little-endian int32."""

    group: Name
    first: U
    pages: Annotated[bytes, Meta(max_length=4 * MAX_ENTRIES)]


class Frame(Struct, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all frames have."""

    src: EpochBytes
    dst: MaybeEpoch


class RoomFrame(Frame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all frames about a room have."""

    room: RoomBytes
    generation: U


class Hello(Frame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=0):
    """Who I am; sent until the other side's ``Hello`` names my epoch, and whenever an epoch does not match.

    ``started`` is when my process began, which says which one ``pid`` is; ``born`` is when this life of mine began, in
    nanoseconds since the boot of ``host``.
    """

    version: U
    address: Name
    role: Name
    instance: Name
    rank: RankIndex
    host: Name
    pid: U
    started: U
    born: U
    spec: WireSpec
    shards: Annotated[tuple[Annotated[tuple[WireHolding, ...], Entries], ...], Meta(max_length=MAX_RANKS)]
    site: WireSite
    regions: Annotated[tuple[Region, ...], Entries]
    transport: Name
    descriptor: Annotated[bytes, Meta(max_length=MAX_DESCRIPTOR)]
    paths: Annotated[tuple[tuple[Name, U], ...], Few]
    slot_bytes: U
    ring_region: Region
    ring_bytes: U
    lease_bytes: U


class Refused(Frame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=1):
    """We cannot work together: my address, the field that differs, the receiver's value and mine."""

    address: Name
    field: Text
    ours: Text
    theirs: Text


class Heartbeat(Frame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=2):
    """I am alive; every second."""


class Expect(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=3):
    """Decode -> every prefill rank: rows from ``start`` on (to ``stop``, if known) are awaited.

    ``tables`` are there exactly when pages are exposed; ``paths`` are those that decode allows; ``verify`` says how
    much it wants compared. ``pace`` is what a prefill rank said last: all of them decide about layer groups by it.
    """

    start: U
    stop: U | None
    paths: Annotated[tuple[Name, ...], Few]
    tables: Annotated[tuple[WireTable, ...], Few] | None
    tag: Annotated[bytes, Meta(max_length=256)]
    verify: Verify = "off"
    pace: WirePace | None = None


class Expected(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=4):
    """Answer to ``Expect``; ``parked``: the engine has not opened the room yet."""

    parked: bool


class StagingRequest(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=5):
    """Prefill -> decode: I want to send my part of this segment by ``path``; ``ready``: its data are computed.

    ``ask`` counts how often I gave a grant for this part back; a new one says so of the grant before it.
    """

    segment: Box
    ask: U
    ready: bool
    path: Name = "staged"


class Queued(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=6):
    """Answer to ``StagingRequest``: wait, a grant follows."""

    segment: Box


class Grant(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=7):
    """Answer to ``StagingRequest``: you may write ``nbytes`` at ``offset`` of the ring, under lease ``lease``."""

    segment: Box
    ask: U
    lease: U
    offset: U
    nbytes: U


class Landed(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=8):
    """The segments have your parts: answer to a late ``StagingRequest`` and acknowledgement of ``ChunkReady``."""

    segments: Annotated[tuple[Box, ...], Meta(min_length=1, max_length=MAX_ENTRIES)]


class ChunkReady(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=9):
    """Prefill -> decode, after the write's completion: my part is there; ``lease`` is None for exposed pages.

    ``sums``: what my part of each layer sums up to in my pages, where the segment is compared; 0 where I have none.
    """

    segment: Box
    lease: U | None
    sums: LayerSums | None = None


class Done(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=10):
    """Prefill -> decode: all my segments up to row ``stop`` are written and announced, and no write follows.

    ``segments`` is how many those are: notices may be lost, or come later than this. ``aux`` where this rank has any;
    ``pace`` is how fast I am, where that was measured.
    """

    stop: U
    segments: U
    aux: Annotated[bytes, Meta(max_length=MAX_AUX)] | None
    tag: Annotated[bytes, Meta(max_length=256)]
    pace: WirePace | None = None


class Complete(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=11):
    """Answer to ``Done``: every rank of the decode instance has everything."""


class Abort(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=12):
    """Either way: the room has failed. Decode repeats it until ``Drained``, prefill until ``AbortAck``."""

    reason: Text


class AbortAck(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=13):
    """Decode -> prefill: the abort is known."""


class Drained(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=14):
    """Prefill -> decode: my writes of this room to you are quiet and none follows; repeated until ``DrainedAck``."""

    reason: Text


class DrainedAck(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=15):
    """Decode -> prefill: the evidence has arrived."""


class Vote(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=16):
    """Rank -> rank 0 of its own instance: my outcome (None: the room is open); repeated until ``Decision``."""

    ok: bool | None
    reason: Text


class Decision(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=17):
    """Rank 0 -> rank: the outcome of all ranks. ``ok`` None: the vote is known, the outcome is not.

    ``shared``: the room is open on rank 0 too.
    """

    ok: bool | None
    shared: bool
    reason: Text


class Return(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=18):
    """Prefill -> decode: I shall not use what you granted me for this ``ask``; nothing was written."""

    segment: Box
    ask: U


class Returned(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=19):
    """Answer to ``Return``."""

    segment: Box
    ask: U


class AuxPart(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=20):
    """Prefill -> decode: bytes from ``offset`` on of ``total`` bytes of aux data, in order."""

    offset: U
    total: U
    data: Annotated[bytes, Meta(min_length=1, max_length=MAX_AUX)]


class AuxTaken(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=21):
    """Answer to ``AuxPart``: everything before ``upto`` is there; ``total``, too, where decode wants none."""

    upto: U


class Superseded(Frame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=22):
    """Rank -> another life of its own instance: a younger life of your rank is at ``address``; ask it."""

    address: Name


AnyFrame = (
    Hello
    | Refused
    | Heartbeat
    | Expect
    | Expected
    | StagingRequest
    | Queued
    | Grant
    | Landed
    | ChunkReady
    | Done
    | Complete
    | Abort
    | AbortAck
    | Drained
    | DrainedAck
    | Vote
    | Decision
    | Return
    | Returned
    | AuxPart
    | AuxTaken
    | Superseded
)


class Head(TypedDict):
    """The fields that every frame about a room begins with."""

    src: bytes
    dst: bytes
    room: bytes
    generation: int


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[AnyFrame] = msgspec.msgpack.Decoder(AnyFrame)
"""Made at import, for all threads: they have no state but the types, and a type that is half looked at is no type."""


class Codec:
    """Turns frames into bytes and checked bytes into frames."""

    MAX_BYTES: ClassVar[int] = 1 << 20

    def encode(self, frame: Frame) -> bytes:
        """The frame's bytes."""
        return _ENCODER.encode(frame)

    def decode(self, data: bytes) -> AnyFrame:
        """The frame in ``data``.

        Raises:
            RemoteProtocolError: anything but one whole, valid frame of at most 1 MiB.
        """
        if len(data) > self.MAX_BYTES:
            raise RemoteProtocolError(f"a frame of {len(data)} bytes; at most {self.MAX_BYTES} are allowed")
        try:
            return _DECODER.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as exc:
            raise RemoteProtocolError(f"not a frame of version {VERSION}: {exc}") from exc
