"""Endpoints for the fuzz targets: real ones in one process, on a fake clock, with a stranger on their network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import get_args

import numpy as np
from msgspec import inspect

from disagg_kv.channels import Channel, InprocChannel, News
from disagg_kv.core import Codec, Elected, Hello, Options
from disagg_kv.core.wire import frames as f
from disagg_kv.endpoints.peers.handshake import EndpointInfo, RemoteEndpoint
from disagg_kv.endpoints.peers.incarnation import Incarnation
from disagg_kv.errors import DisaggKVError
from disagg_kv.geometry import CacheSpec, PageTable
from disagg_kv.ids import GroupId, Rank, Role
from disagg_kv.memory import PagedPool
from disagg_kv.planning import InstancePlans
from disagg_kv.strategies import paths
from disagg_kv.transports import InprocTransport, Transports
from tests.support.rig import KV, Memory, Request, Rig, tp_shards

SPEC = CacheSpec.kv(2, 4, 8, "float16")
ROWS = 24
CODEC = Codec()


class Fixed:
    """One endpoint's own half of an introduction, and its pages of a room."""

    rows = ROWS

    def __init__(self, role: Role) -> None:
        shards = tuple(tp_shards(SPEC, 2))
        self.pool = PagedPool.allocate(SPEC, shards[0], pages=16, page_size=4)
        self.transport = InprocTransport()
        self.regions = tuple(self.transport.register(self.pool.buffers))
        self.role = role
        self.site = self.pool.site
        self.tables: Mapping[GroupId, PageTable] = {KV: PageTable(KV, np.arange(ROWS // 4))}
        self.me = EndpointInfo(
            Incarnation(), "inproc://me", role, role, Rank(0), shards, self.site, self.regions,
            Transports([self.transport]),
            tuple(paths().values()), Elected, b"", 4096, False, self.regions[0], 1 << 16, 1 << 13,
        )  # fmt: skip
        self.admit = self.me.admit

    def meet(self, hello: Hello) -> tuple[RemoteEndpoint, InstancePlans]:
        """A peer of the other side, admitted before."""
        remote = RemoteEndpoint.of(hello)
        return remote, InstancePlans(self.me.shards, remote.site)


@cache
def endpoint(role: Role) -> Fixed:
    """The endpoint of either side; nothing changes it."""
    return Fixed(role)


class Draw:
    """Reads decisions from bytes; when there are none left, all are 0."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def byte(self) -> int:
        """0 to 255."""
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def number(self) -> int:
        """Small ones mostly, also multiples of 256, and what hardly fits."""
        drawn = self.byte()
        if drawn < 160:
            return drawn % 32
        return (drawn - 159) * 256 if drawn < 224 else (1 << (2 * (drawn - 224))) - (drawn & 1)

    def bytes(self, most: int) -> bytes:
        """Up to so many."""
        return bytes(self.byte() for _ in range(self.byte() % (most + 1)))


class _Overheard:
    """A channel whose last frames a stranger has seen."""

    def __init__(self, inner: Channel, heard: list[bytes]) -> None:
        self._inner = inner
        self._heard = heard
        self.address, self.eager = inner.address, inner.eager
        self.wait, self.wake, self.forget, self.close = inner.wait, inner.wake, inner.forget, inner.close

    def send(self, address: str, frame: bytes) -> bool:
        """Remember and pass on."""
        self._heard.append(frame)
        del self._heard[:-64]
        return self._inner.send(address, frame)

    def poll(self) -> Sequence[News]:
        """Pass on."""
        return self._inner.poll()


class World:
    """Two prefill and two decode ranks, two rooms between them, and somebody who can send them anything.

    Args:
        data: decides what everybody does.
    """

    def __init__(self, data: bytes) -> None:
        self._draw = Draw(data)
        self._heard: list[bytes] = []
        self.rig = Rig(SPEC, options=Options(parked=4, peers=8, tombstones=4, silence_s=5.0, total_s=20.0))
        memory = Memory(channel=lambda inner: _Overheard(inner, self._heard), pages=24)
        path = "auto" if (choice := self._draw.byte()) < 16 else ("staged", "slice")[choice % 2]
        self._prefills = self.rig.prefill(tp_shards(SPEC, 2), memory=memory, strategy=path, slot_bytes=512)
        self._decodes = self.rig.decode(tp_shards(SPEC, 2), memory=memory, strategy=path, ring_bytes=8 << 10)
        self._stranger = InprocChannel(self.rig.hub, "stranger")
        self._requests: list[Request] = []

    def run(self) -> None:
        """As long as there are data, and a little longer."""
        self._begin("0")
        while self._draw:
            match self._draw.byte() % 8:
                case 0 | 1:
                    for _ in range(1 + self._draw.byte() % 8):
                        self.rig.turn()
                case 2 | 3 | 4:
                    self._send(self._forged())
                case 5:
                    self._send(self._changed())
                case 6:
                    self._send(self._draw.bytes(64))
                case _:
                    self._engine()
        for _ in range(8):
            self.rig.turn()

    def check(self) -> None:
        """Nothing went wrong but what was foreseen, and no page that no room had was touched."""
        for member in self.rig.members:
            assert member.observer.counters["errors.unforeseen"] == 0
        for request in self._requests:
            request.forgive()
        self.rig.check()

    def close(self) -> None:
        """Let go of everything."""
        self.rig.close()
        self._stranger.close()

    # Engines.

    def _begin(self, name: str) -> None:
        request = self.rig.request(name, self._prefills, self._decodes, ROWS)
        self._requests.append(request.open_decode().expect().open_prefill())

    def _engine(self) -> None:
        request = self._requests[-1]
        act = self._draw.byte() % 5
        try:
            if act == 0 and not request.given:
                request.send(ROWS).finish()
            elif act == 1 and not request.given:
                request.send(8)
            elif act == 2:
                request.handles[self._draw.byte() % 4].abort("changed my mind")
            elif act == 3 and len(self._requests) < 2:
                self._begin("1")
            else:
                self.rig.wait(self._draw.byte() / 128)
        except DisaggKVError:
            # The order of calls depends on the bytes, and may be wrong.
            return

    # The stranger.

    def _send(self, frame: bytes) -> None:
        member = self.rig.members[self._draw.byte() % 4]
        self._stranger.send(member.channel.address, frame)

    def _changed(self) -> bytes:
        """Something overheard, with a few bytes changed."""
        if not self._heard:
            return b""
        frame = bytearray(self._heard[-1 - self._draw.byte() % len(self._heard)])
        for _ in range(self._draw.byte() % 4):
            frame[self._draw.number() % len(frame)] = self._draw.byte()
        return bytes(frame)

    def _forged(self) -> bytes:
        return CODEC.encode(forge(KINDS[self._draw.byte() % len(KINDS)], self._draw, **self._between()))

    def _between(self) -> dict[str, bytes]:
        """From one to another, mostly between those that are there."""
        epochs = [*[m.endpoint.driver.loop.me.epoch for m in self.rig.members] * 3, bytes(16)]
        return {name: epochs[self._draw.byte() % len(epochs)] for name in ("src", "dst")}


def _box(draw: Draw) -> f.Box:
    """Mostly one that could be."""
    if draw.byte() % 8 == 0:
        return (draw.number(), draw.number(), draw.number(), draw.number(), bool(draw.byte() % 2))
    start, first = 4 * (draw.byte() % 8), draw.byte() % 3
    return (start, start + 4 * (draw.byte() % 7), first, first + draw.byte() % 3, draw.byte() % 16 == 0)


def _tables(draw: Draw) -> tuple[f.WireTable, ...] | None:
    if draw.byte() % 2:
        return None
    pages = np.array([draw.number() % 64 for _ in range(draw.byte() % 9)], "<i4").tobytes()
    count, runs = len(pages) // 4, draw.byte() % 4
    return (f.WireTable("kv", 4 * (draw.byte() % 3), count if runs == 0 else 8 * runs, runs, pages),)


FIELDS: Mapping[str, Callable[[Draw], object]] = {
    "room": lambda draw: (b"0", b"0", b"1", b"x")[draw.byte() % 4],
    "generation": lambda draw: draw.byte() % 4,
    "path": lambda draw: ("staged", "slice", "direct", "mapped")[draw.byte() % 4],
    "tables": _tables,
    "tag": lambda draw: b"",
    "aux": lambda draw: draw.bytes(16),
    "reason": lambda draw: "forged",
    "address": lambda draw: "inproc://nowhere",
}
"""Fields of a forged frame that are drawn so that they often fit the rooms; all others follow their types alone."""

BOX = inspect.type_info(f.Box)

KINDS: tuple[type[f.Frame], ...] = tuple(kind for kind in get_args(f.AnyFrame) if kind is not Hello)
"""What a forged frame may be; the target ``plan`` and the corpus have introductions."""


def forge(kind: type[f.Frame], draw: Draw, **between: object) -> f.Frame:
    """A frame that the codec accepts, with whatever the bytes say in it."""
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType)
    make: Callable[..., f.Frame] = kind
    return make(**between, **{one.name: _field(one, draw) for one in found.fields if one.name not in between})


def _field(field: inspect.Field, draw: Draw) -> object:
    known = FIELDS.get(field.name)
    optional = isinstance(field.type, inspect.UnionType) and field.type.includes_none
    if known is None or (optional and draw.byte() % 4 == 0):
        return _of(field.type, draw)
    return known(draw)


def _of(kind: inspect.Type, draw: Draw) -> object:
    """A value of a type of the wire, within its limits."""
    match kind:
        case inspect.UnionType():
            return _of(kind.types[draw.byte() % len(kind.types)], draw)
        case inspect.NoneType():
            return None
        case inspect.BoolType():
            return bool(draw.byte() % 2)
        case inspect.IntType():
            least = kind.ge or 0
            most = kind.le if kind.le is not None else kind.lt - 1 if kind.lt is not None else 1 << 62
            return min(max(draw.number(), least), most)
        case inspect.FloatType():
            low, high = kind.ge or kind.gt or 0.0, kind.le or kind.lt or 1e9
            return min(max(draw.number() / 4, low or 0.25), high)
        case inspect.StrType():
            return ("", "kv", "inproc", "sum64", "full")[draw.byte() % 5]
        case inspect.BytesType():
            return draw.bytes(min(kind.max_length or 0, 32)).ljust(kind.min_length or 0, b"\0")
        case inspect.LiteralType():
            return kind.values[draw.byte() % len(kind.values)]
        case inspect.VarTupleType():
            most = min(kind.max_length or 0, 3)
            return tuple(_of(kind.item_type, draw) for _ in range(max(kind.min_length or 0, draw.byte() % (most + 1))))
        case inspect.TupleType():
            if kind == BOX:
                return _box(draw)
            return tuple(_of(one, draw) for one in kind.item_types)
        case inspect.StructType():
            return kind.cls(**{one.name: _of(one.type, draw) for one in kind.fields})
        case _:
            raise TypeError(f"no frame has a field of {kind}")
