"""Whatever bytes a peer sends: a valid object or RemoteProtocolError, nothing else, whole and in pieces.

Each target takes bytes and raises on anything that breaks that sentence. ``fuzz/run.py`` feeds them with atheris; the
test suite replays ``fuzz/corpus``.
"""

from __future__ import annotations

import atexit
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from functools import cache

import msgspec
import numpy as np

from disagg_kv.channels import MAX_FRAME, MAX_TOGETHER, Arrived, News, Rejected, UnixChannel
from disagg_kv.core import Codec, Hello
from disagg_kv.core.wire import frames as f
from disagg_kv.core.wire.page_runs import tables_from_wire
from disagg_kv.core.wire.runs import numbers_from_runs
from disagg_kv.core.wire.specs import shards_from_wire, site_from_wire, spec_from_wire
from disagg_kv.endpoints.peers.handshake import page_rows
from disagg_kv.errors import DisaggKVError, IncompatiblePeerError, PeerLostError, RemoteProtocolError, TransportError
from disagg_kv.ids import Rank, RoomId
from disagg_kv.planning import EVERY, Limits, Writes
from disagg_kv.rendezvous import Source, StoreRendezvous
from disagg_kv.strategies import Job, TransferPlanner, paths
from disagg_kv.transports import InprocTransport, ShmTransport
from disagg_kv.transports.descriptor import decode, unpack
from disagg_kv.transports.mooncake_flight import ADDRESS
from disagg_kv.transports.process import PROCESS
from fuzz.world import World, endpoint

CODEC = Codec()
TRANSPORTS = ("inproc", "shm", "nixl", "mooncake", "cuda_ipc")


def pieces(data: bytes) -> Iterator[bytes]:
    """The whole, and two parts of it; which two, the data say."""
    yield data
    if data:
        cut = data[-1] % len(data)
        yield data[:cut]
        yield data[cut:]


def frame(data: bytes) -> None:
    """A control frame, and the geometry in it."""
    for piece in pieces(data):
        with suppress(RemoteProtocolError):
            found = CODEC.decode(piece)
            assert CODEC.decode(CODEC.encode(found)) == found
            if isinstance(found, Hello):
                spec = spec_from_wire(found.spec)
                shards = shards_from_wire(found.shards, spec)
                for shard in shards[: found.rank + 1][-1:]:
                    site_from_wire(found.site, spec, shard)
            elif isinstance(found, f.Expect):
                tables_from_wire(found.tables or (), 1 << 20)


class _Store:
    """A store that answers every question with the same bytes."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    def check(self, keys: list[str]) -> bool:
        """Everything is there."""
        return True

    def get(self, key: str) -> bytes:
        """The bytes; where the number of ranks is asked for, one, if they begin with a zero byte."""
        first = self._value[:1] == b"\0"
        return b"1" if first and '", ' not in key else self._value[first:]

    def set(self, key: str, value: str) -> None:
        """Nothing is kept."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """It is there already."""
        return self.get(key)


def metadata(data: bytes) -> None:
    """What a transport says of itself, and what a rendezvous holds."""
    for piece in pieces(data):
        for name in TRANSPORTS:
            with suppress(RemoteProtocolError):
                found = decode(piece, name)
                for blob in (found.blob, *(region.blob for region in found.regions)):
                    with suppress(RemoteProtocolError):
                        unpack(blob, PROCESS)
                    with suppress(RemoteProtocolError):
                        unpack(blob, ADDRESS)
        for make in (InprocTransport, ShmTransport):
            transport = make()
            # A peer that is not there, or of another host: said by name too.
            with suppress(RemoteProtocolError, TransportError, PeerLostError):
                transport.connect(piece, 0.0)
            transport.close(0.0)
        with suppress(RemoteProtocolError):
            StoreRendezvous(_Store(piece)).lookup(Source("prefill"))


class Plan(msgspec.Struct, array_like=True):
    """A peer's introduction, and what it then awaits."""

    hello: Hello
    tables: tuple[f.WireTable, ...]
    stop: f.U


PLANS = msgspec.msgpack.Decoder(Plan)


def plan(data: bytes) -> None:
    """From an introduction to the writes into that peer's memory: none is outside of what it said it has."""
    try:
        given = PLANS.decode(data)
        # A peer's frame has passed the codec.
        hello = CODEC.decode(CODEC.encode(given.hello))
        tables = tables_from_wire(given.tables, 1 << 20)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, RemoteProtocolError):
        return
    assert isinstance(hello, Hello)
    me = endpoint("decode" if hello.role == "prefill" else "prefill")
    try:
        me.admit(hello)
    except (RemoteProtocolError, IncompatiblePeerError):
        return
    if hello.role == me.role or me.role == "decode":
        return
    remote, plans = me.meet(hello)
    rotation = plans.rotation(RoomId(b"room"))
    rank_plan, pair = plans.rank_plan(rotation), plans.pair(rotation, Rank(0), me.site, EVERY)
    stop = min(given.stop, me.rows)
    # What fits nowhere, and pages that do not fit, are errors of ours that end the room.
    with suppress(DisaggKVError):
        for layers in rank_plan.ranges(Rank(0)):
            for segment in rank_plan.cut(0, stop, layers, Limits(4096, hello.lease_bytes, page_rows(remote.site))):
                for path in paths().values():
                    _post(path, Job(pair, segment, me.tables, tables), hello)


def _post(path: TransferPlanner, job: Job, hello: Hello) -> None:
    """Plan a part's writes and hold them against the peer's own words."""
    with suppress(DisaggKVError):
        writes = path.send(job)
        if isinstance(writes, Writes):
            sizes = np.array(numbers_from_runs(hello.site.buffers), np.int64)
            assert (writes.nbytes > 0).all()
            assert (writes.remote_off >= 0).all()
            assert (writes.remote_off + writes.nbytes <= sizes[writes.remote]).all(), "outside of the peer's memory"


def events(data: bytes) -> None:
    """Engines and a hostile peer at live endpoints: no error that was not foreseen, and no byte of another room."""
    with closing(World(data)) as world:
        world.run()
        world.check()


def stream(data: bytes) -> None:
    """What comes through a Unix socket: the messages before the first that is none, in one piece and in two."""
    want, good = _messages(data)
    for cut in (len(data), data[-1] % len(data) if data else 0):
        frames, refused = _heard(data[:cut], data[cut:])
        assert frames == want
        assert refused != good


def _messages(data: bytes) -> tuple[list[bytes], bool]:
    """Frames of whole messages; False: then comes what cannot become one."""
    frames: list[bytes] = []
    while len(data) >= 4:
        count = int.from_bytes(data[:4], "little")
        if not 1 <= count <= MAX_TOGETHER:
            return frames, False
        head, data = data[: 4 * (1 + count)], data[4 * (1 + count) :]
        sizes = [int.from_bytes(head[at : at + 4], "little") for at in range(4, len(head), 4)]
        if len(head) < 4 * (1 + count):
            return frames, True
        if sum(sizes) > MAX_FRAME:
            return frames, False
        if len(data) < sum(sizes):
            return frames, True
        for size in sizes:
            frames.append(data[:size])
            data = data[size:]
    return frames, True


@cache
def _inbox() -> UnixChannel:
    folder = tempfile.mkdtemp()
    inbox = UnixChannel(f"unix://{folder}/inbox")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(inbox.close)
    return inbox


def _heard(*parts: bytes) -> tuple[list[bytes], bool]:
    """What a channel says of somebody who sends this and goes: frames, and whether it refused him."""
    inbox, news = _inbox(), list[News]()
    with closing(socket.socket(socket.AF_UNIX)) as guest:
        guest.connect(inbox.address.removeprefix("unix://"))
        for part in parts:
            with suppress(BrokenPipeError):  # he was refused before he was through
                guest.sendall(part)
            news += inbox.poll()
    while more := inbox.poll():
        news += more
    assert all(isinstance(one, Arrived) or one == Rejected(messages=1) for one in news), news
    frames = [one.frame for one in news if isinstance(one, Arrived)]
    return frames, len(frames) < len(news)


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "frame": frame,
    "metadata": metadata,
    "plan": plan,
    "events": events,
    "stream": stream,
}
