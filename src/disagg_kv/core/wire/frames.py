"""The control frames, exactly as they cross the wire: MessagePack arrays, one type each, schema-checked on arrival.

Every frame names its sender's and its receiver's epoch (``src``, ``dst``); frames about a room name the room and its
generation too. The receiver counts and drops a frame that does not match, and never acts upon it.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache
from hashlib import blake2b
from typing import Annotated, ClassVar, TypedDict, TypeVar

import msgspec
from msgspec import Meta, Struct, structs

from ...errors import About, RemoteProtocolError
from ...ids import peer_name
from .verify import Verify

VERSION = 1
"""Of the protocol; two sides with different versions refuse each other at ``Hello``."""

MAX_AUX = 512 * 1024
"""Bytes of aux data."""

MAX_DESCRIPTOR = 512 * 1024
"""Bytes of a transport's descriptor in ``Hello``."""

MAX_ENTRIES = 65_536
"""Entries of any list in a frame."""

MAX_TABLE = 1 << 20
"""Bytes of page tables: 262,144 page ids, or as many runs of them as there is space for."""

MAX_RANKS = 4096
"""Ranks of an instance."""

P = TypeVar("P")
U = Annotated[int, Meta(ge=0, le=2**62)]
Layer = Annotated[int, Meta(ge=0, lt=MAX_ENTRIES)]
RankIndex = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Entries = Meta(max_length=MAX_ENTRIES)
Count = Annotated[int, Meta(ge=1, le=MAX_ENTRIES)]
LayerRun = tuple[Layer, Count]
"""The first of consecutive layers, and how many they are."""
Few = Meta(max_length=256)
Region = Annotated[int, Meta(ge=0, le=2**31 - 1)]
EpochBytes = Annotated[bytes, Meta(min_length=16, max_length=16)]
MaybeEpoch = Annotated[bytes, Meta(max_length=16)]
RoomBytes = Annotated[bytes, Meta(min_length=1, max_length=64)]
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
Tag = Annotated[bytes, Meta(max_length=256)]
Flags = Annotated[bytes, Meta(max_length=1024)]
"""Where decode's flag page is, as its transport says it; empty: it has none."""
LayerSums = Annotated[bytes, Meta(max_length=1 << 19)]
"""A checksum of eight bytes for every layer of a segment."""

SLOWEST_S, LEAST_RATE, MOST_RATE = 1e9, 1.0, 1e18
WirePace = tuple[
    Annotated[float, Meta(gt=0, le=SLOWEST_S)],
    Annotated[float, Meta(ge=LEAST_RATE, le=MOST_RATE)],
    Annotated[float, Meta(ge=0, le=SLOWEST_S)],
]
"""A :class:`~disagg_kv.planning.Pace`: seconds per layer and token, bytes per second, seconds per group."""


def wire_pace(layer_token_s: float, bytes_per_s: float, group_s: float) -> WirePace:
    """What was measured, inside the bounds: a process that stood still, or two equal times, measure anything."""
    rate = min(max(bytes_per_s, LEAST_RATE), MOST_RATE)
    return min(layer_token_s, SLOWEST_S), rate, min(group_s, SLOWEST_S)


WireFlags = tuple[U, Count, Annotated[int, Meta(ge=1, le=2**62)]]
"""Of the receiver's flag page: the first of consecutive slots, how many they are, and the value of the first."""

Box = tuple[U, U, U, U, bool]
"""A :class:`~disagg_kv.planning.Segment`, which is such a tuple."""

Stride = Annotated[int, Meta(ge=-(2**62), le=2**62)]
WirePlane = tuple[Layer, Name, Name, U, U, U, U, U, Stride, Stride, Stride]
"""A :class:`~disagg_kv.geometry.Plane`, and the steps of layer, buffer and offset between its repetitions."""

PlaneRun = tuple[Count, Annotated[tuple[WirePlane, ...], Meta(min_length=1, max_length=16)]]
"""How often the planes come, one pattern after the other."""


def words(reason: object) -> str:
    """A reason as a frame carries it: at most 1000 characters, all of which UTF-8 can encode."""
    return str(reason)[:1000].encode("utf-8", "replace").decode()


class WireHolding(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A :class:`~disagg_kv.geometry.Holding`; see :mod:`.runs` for its layers."""

    component: Name
    layers: Annotated[tuple[LayerRun, ...], Entries]
    start: U
    stop: U


class WireComponent(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A :class:`~disagg_kv.geometry.Component`."""

    name: Name
    dtype: Name
    units: U
    unit_bytes: U
    tokens_per_row: U
    rows: U
    window: U | None
    format: Name
    scales: Annotated[tuple[float, ...], Entries]
    scaled_by: Name | None


class WireSpec(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A :class:`~disagg_kv.geometry.CacheSpec`; layers with equal components share an entry of ``kinds``."""

    model: Annotated[bytes, Meta(max_length=4096)]
    kinds: Annotated[tuple[Annotated[tuple[WireComponent, ...], Few], ...], Entries]
    layers: Annotated[tuple[tuple[Layer, Layer], ...], Entries]


class WireSite(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A :class:`~disagg_kv.geometry.Site` without its spec; see :mod:`.runs` for planes and buffers."""

    groups: Annotated[tuple[tuple[Name, U, U, U | None], ...], Few]
    planes: Annotated[tuple[PlaneRun, ...], Entries]
    buffers: Annotated[tuple[tuple[U, Count], ...], Entries]


class WireTable(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A :class:`~disagg_kv.geometry.PageTable` of ``count`` pages, as :mod:`.page_runs` writes it.

    ``runs``: how many runs ``pages`` has; 0: it has page ids.
    """

    group: Name
    first: U
    count: Annotated[int, Meta(ge=0, le=2**31)]
    runs: Annotated[int, Meta(ge=0, le=2**31)]
    pages: Annotated[bytes, Meta(max_length=MAX_TABLE)]


class Frame(Struct, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of every frame."""

    src: EpochBytes
    dst: MaybeEpoch


class RoomFrame(Frame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of every frame about a room."""

    room: RoomBytes
    generation: U


class Hello(Frame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=0):
    """The sender's identity; sent until the receiver's ``Hello`` names its epoch, and whenever an epoch does not match.

    ``started`` is when the sender's process began, as a ``pid`` may be used again. ``born`` is when this incarnation of
    the sender began, in nanoseconds since the boot of ``host``. ``verdict`` is who says how rooms ended, see
    :mod:`disagg_kv.core.verdict`. ``queues``: kernels of prefill queue copies, and keep no thread meanwhile.
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
    conversions: Annotated[tuple[Name, ...], Few]
    verdict: Name
    flags: Flags = b""
    slot_bytes: U
    queues: bool = False
    ring_region: Region
    ring_bytes: U
    lease_bytes: U

    @property
    def name(self) -> str:
        """The sender, for messages."""
        return f"peer {peer_name(self.src, self.instance, self.rank)} at {self.address}"

    @property
    def who(self) -> About:
        """The sender, for attributes of errors."""
        return {"instance": self.instance, "rank": self.rank, "epoch": self.src, "address": self.address}


class Refused(Frame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=1):
    """The two cannot work together: the sender's address, the field that differs, both values, receiver's first."""

    address: Name
    field: Text
    ours: Text
    theirs: Text


class Heartbeat(Frame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=2):
    """The sender is alive; ``ask``: it needs the receiver for a room, and awaits a heartbeat that does not ask."""

    ask: bool = False


class Expect(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=3):
    """Decode -> every prefill rank: rows from ``start`` on (to ``stop``, if known) are awaited, by ``path``.

    ``tables`` are there exactly when pages are exposed; ``verify`` says how much decode wants compared. ``pace`` is the
    last one that a prefill rank sent: all of them choose layer groups by it. ``flags`` are slots in which the receiver
    may announce its segments before its frames do; see :mod:`disagg_kv.transports.flags`. ``unsegmented``: the size of
    a staging slot cuts no segment.
    """

    start: U
    stop: U | None
    path: Name
    tables: Annotated[tuple[WireTable, ...], Few] | None
    tag: Tag
    verify: Verify = "off"
    pace: WirePace | None = None
    flags: WireFlags | None = None
    unsegmented: bool = False


class Expected(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=4):
    """Answer to ``Expect``; ``parked``: the engine has not opened the room yet. ``transport``: what carries its writes.

    ``unmapped``: why the sender has not mapped the receiver's pool; empty: it has; None: it does not say.
    """

    parked: bool
    transport: Name = ""
    unmapped: Text | None = None


class StagingRequest(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=5):
    """Prefill -> decode: request a lease for this rank's part of a segment; ``ready``: it is computed.

    ``ask`` counts the grants for this part that the rank has returned; a higher one returns the grant before it.
    """

    segment: Box
    ask: U
    ready: bool


class Queued(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=6):
    """Answer to ``StagingRequest``: wait, a grant follows."""

    segment: Box


class Grant(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=7):
    """Answer to ``StagingRequest``: prefill may write ``nbytes`` at ``offset`` of the ring, under lease ``lease``."""

    segment: Box
    ask: U
    lease: U
    offset: U
    nbytes: U


class Landed(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=8):
    """The segments have the receiver's parts: answers a late ``StagingRequest``, and acknowledges ``ChunkReady``."""

    segments: Annotated[tuple[Box, ...], Meta(min_length=1, max_length=MAX_ENTRIES)]


class ChunkReady(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=9):
    """Prefill -> decode, after the write's completion: this rank's part is there; ``lease`` None: exposed pages.

    ``sums``: the checksum of this rank's part of each layer in its pages, if the segment is compared; 0 without a part.
    """

    segment: Box
    lease: U | None
    sums: LayerSums | None = None


class Done(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=10):
    """Prefill -> decode: all segments of this rank up to row ``stop`` are written and announced; no write follows.

    ``segments`` is their number: notices may be lost, or arrive after this frame. ``aux``: if this rank has any;
    ``pace``: of this rank, if it was measured; ``transport``: as ``Expected`` says it, which may be lost.
    """

    stop: U
    segments: U
    aux: Annotated[bytes, Meta(max_length=MAX_AUX)] | None
    pace: WirePace | None = None
    transport: Name = ""


class Complete(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=11):
    """Answer to ``Done``: every rank of the decode instance has all data of the room."""


class Abort(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=12):
    """Either way: the room has failed. Decode repeats it until ``Drained``, prefill until decode's own answers it.

    ``tag``: of decode's room, or of prefill's room that is not this one. Where tags differ, prefill's room stays open.
    """

    reason: Text
    tag: Tag = b""


class Drained(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=13):
    """Prefill -> decode: all writes of this flow are quiet, and none follows; repeated until ``DrainedAck``."""

    reason: Text


class DrainedAck(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=14):
    """Decode -> prefill: the evidence has arrived."""


class Vote(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=15):
    """Rank -> rank 0 of its own instance: the rank's outcome (None: the room is open); repeated until ``Decision``."""

    ok: bool | None
    reason: Text


class Decision(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=16):
    """Rank 0 -> rank: the outcome of all ranks. ``ok`` None: the vote has arrived, the outcome is open.

    ``shared``: the room is open on rank 0 too.
    """

    ok: bool | None
    shared: bool
    reason: Text


class Return(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=17):
    """Prefill -> decode: the grant for this ``ask`` will not be used; nothing was written."""

    segment: Box
    ask: U


class Returned(RoomFrame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=18):
    """Answer to ``Return``."""

    segment: Box
    ask: U


class Disconnected(Frame, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=19):
    """The sender has forgotten the receiver, or (``closed``) has closed: it reads and writes no more."""

    closed: bool = False


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
    | Drained
    | DrainedAck
    | Vote
    | Decision
    | Return
    | Returned
    | Disconnected
)


class Head(TypedDict):
    """The fields that every frame about a room begins with."""

    src: bytes
    dst: bytes
    room: bytes
    generation: int


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[AnyFrame] = msgspec.msgpack.Decoder(AnyFrame)
"""Made at import and shared by all threads: they keep no state but types, and no thread meets a half-read type."""


_HELLO_HEAD = _ENCODER.encode([None] * (1 + len(Hello.__struct_fields__)))[:3] + b"\0"
"""The first bytes of every ``Hello``."""


@lru_cache(1024)
def _shared(part: P) -> P:
    """One object for equal parts: the ranks of an instance, and instances of one model, say much the same."""
    return part


class Codec:
    """Turns frames into bytes and checked bytes into frames; used by one thread.

    A ``Hello`` is recognised by the digest of its bytes, and its parts are shared with those of other peers.
    """

    MAX_BYTES: ClassVar[int] = MAX_TABLE + (1 << 16)
    """Bytes of a frame: the largest page tables, and what stands beside them."""
    MAX_HELLO_BYTES: ClassVar[int] = 1 << 24
    """Bytes of the ``Hello`` frames that are remembered."""
    SHARED_BYTES: ClassVar[int] = 1 << 14
    """A ``Hello`` of more bytes shares no parts: they would outlive it."""

    def __init__(self) -> None:
        self._hellos: OrderedDict[bytes, tuple[Hello, int]] = OrderedDict()
        self._hello_bytes = 0

    def encode(self, frame: Frame) -> bytes:
        """The frame's bytes."""
        return _ENCODER.encode(frame)

    def decode(self, data: bytes) -> AnyFrame:
        """The frame in ``data``.

        Raises:
            RemoteProtocolError: anything but one whole, valid frame of at most ``MAX_BYTES``.
        """
        if len(data) > self.MAX_BYTES:
            raise RemoteProtocolError(f"a frame of {len(data)} bytes; at most {self.MAX_BYTES} are allowed")
        return self._hello(data) if data[:4] == _HELLO_HEAD else self._decode(data)

    def _hello(self, data: bytes) -> AnyFrame:
        digest = blake2b(data, digest_size=16).digest()
        known = self._hellos.get(digest)
        if known is not None:
            return known[0]
        frame = self._decode(data)
        if not isinstance(frame, Hello):
            return frame
        if len(data) <= self.SHARED_BYTES:
            frame = structs.replace(
                frame,
                spec=_shared(frame.spec),
                shards=_shared(frame.shards),
                site=_shared(frame.site),
                regions=_shared(frame.regions),
                paths=_shared(frame.paths),
            )
        self._hellos[digest] = frame, len(data)
        self._hello_bytes += len(data)
        while self._hello_bytes > self.MAX_HELLO_BYTES:
            _, (_, nbytes) = self._hellos.popitem(last=False)
            self._hello_bytes -= nbytes
        return frame

    def _decode(self, data: bytes) -> AnyFrame:
        try:
            return _DECODER.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as exc:
            raise RemoteProtocolError(f"not a frame of version {VERSION}: {exc}") from exc
