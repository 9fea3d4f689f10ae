"""Strangers at live endpoints: refused, counted, and the transfers that run meanwhile are right to the byte."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import msgspec
import pytest
import zmq

from disagg_kv.channels import MAX_FRAME, Channel, Keys, ZmqChannel, key_of
from disagg_kv.core import Codec, Frame, Options
from disagg_kv.core.wire import frames as f
from disagg_kv.endpoints import PeerInfo
from disagg_kv.errors import PeerLostError
from disagg_kv.geometry import CacheSpec
from tests.support.channels import take
from tests.support.rig import Decodes, Member, Memory, Prefills, Request, Rig, tp_shards

SPEC = CacheSpec.kv(2, 4, 8, "float16")
ROWS = 40


def encrypted(keys: Keys) -> Memory:
    """Ranks that have this pair."""

    def channel(_: Channel) -> Channel:
        return ZmqChannel(keys=keys)

    return Memory(channel=channel, pages=128)


def unencrypted(_: Channel) -> Channel:
    return ZmqChannel()


def mutual(*names: str) -> dict[str, Keys]:
    """Pairs that all allow one another."""
    pairs = {name: Keys.new() for name in names}
    public = frozenset(keys.public for keys in pairs.values())
    return {name: Keys(keys.secret, public) for name, keys in pairs.items()}


@pytest.fixture
def keys() -> dict[str, Keys]:
    return mutual("prefill", "decode", "insider")


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(SPEC, threaded=True)
    with closing(rig):
        yield rig


@pytest.fixture
def sides(rig: Rig, keys: dict[str, Keys]) -> tuple[Prefills, Decodes]:
    return (
        rig.prefill(tp_shards(SPEC, 2), memory=encrypted(keys["prefill"]), strategy="staged", slot_bytes=512),
        rig.decode(tp_shards(SPEC, 2), memory=encrypted(keys["decode"]), strategy="staged", ring_bytes=16 << 10),
    )


def plain(address: str) -> str:
    return address.removesuffix(f"#{key_of(address)}")


def addresses(*sides: Prefills | Decodes) -> Sequence[str]:
    return [member.channel.address for side in sides for member in side]


def counted(*sides: Prefills | Decodes, name: str) -> int:
    return sum(member.observer.counters[name] for side in sides for member in side)


def knows(member: Member[Any], other: Member[Any]) -> bool:
    return any(peer.address == other.channel.address for peer in member.endpoint.peers())


def heartbeat(src: bytes, dst: bytes) -> bytes:
    return Codec().encode(f.Heartbeat(src=src, dst=dst))


def test_who_has_no_allowed_key_reaches_no_endpoint(rig: Rig, sides: tuple[Prefills, Decodes]) -> None:
    """Keys that nobody allows, no keys, and garbage, while requests run."""
    prefills, decodes = sides
    requests = [rig.request(f"{i}", prefills, decodes, ROWS).start() for i in range(4)]
    knows = Keys.new([key_of(address) for address in addresses(*sides)])
    with ExitStack() as stack:
        stranger = stack.enter_context(closing(ZmqChannel(keys=knows)))
        context = stack.enter_context(zmq.Context())
        for address in addresses(*sides):
            assert stranger.send(address, heartbeat(bytes(16), bytes(16)))
            push = stack.enter_context(context.socket(zmq.PUSH))
            push.setsockopt(zmq.LINGER, 0)
            push.connect(plain(address))
            push.send(heartbeat(bytes(16), bytes(16)))
            host, port = plain(address).removeprefix("tcp://").split(":")
            garbage = stack.enter_context(socket.create_connection((host, int(port))))
            garbage.sendall(b"\xff" * 4096)
        rig.until(lambda: counted(*sides, name="connections.refused") >= 12, "every refusal")
    landed(rig, requests)
    assert counted(*sides, name="frames.refused") == counted(*sides, name="frames.stale") == 0
    rig.quiet()


def test_a_room_whose_other_side_does_not_allow_our_key_fails_at_once(rig: Rig) -> None:
    """An operator who forgot a key reads so, and does not wait for silence."""
    prefill = Keys.new()
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=encrypted(prefill))
    decodes = rig.decode(tp_shards(SPEC, 1), memory=encrypted(Keys.new([prefill.public])))
    request = rig.request("room", prefills, decodes, ROWS).open_decode()
    rig.until(lambda: request.receives[0].released, "the refusal")
    assert isinstance(request.receives[0].error, PeerLostError)
    assert "does not allow the other's public key" in str(request.receives[0].error)


def test_nobody_speaks_in_the_name_of_a_peer_that_has_another_key(
    rig: Rig, keys: dict[str, Keys], sides: tuple[Prefills, Decodes]
) -> None:
    """An insider who knows every epoch neither ends a life, nor a room, nor takes an address over."""
    prefills, decodes = sides
    request = rig.request("room", prefills, decodes, ROWS).open_decode().expect().open_prefill()
    rig.until(lambda: all(h.held is not None for h in request.sends), "the expectation")
    # That is over when one rank of decode has asked, and rank 0 may be the other.
    pair = prefills[0], decodes[0]
    rig.until(lambda: all(knows(a, b) for a, b in (pair, pair[::-1])), "both to know each other")
    victim = next(peer for peer in prefills[0].endpoint.peers() if peer.instance == "D" and peer.rank == 0)
    target = prefills[0].channel.address
    epoch = next(p.epoch for p in decodes[0].endpoint.peers() if p.address == target)
    with closing(ZmqChannel(keys=keys["insider"])) as insider:
        forged = [
            f.Abort(src=victim.epoch, dst=epoch, room=b"room", generation=1, reason="forged"),
            f.Drained(src=victim.epoch, dst=epoch, room=b"room", generation=1, reason="forged"),
            f.Refused(src=bytes(16), dst=epoch, address=victim.address, field="f", ours="o", theirs="t"),
            introduction(bytes(16), epoch, victim),
            introduction(victim.epoch, epoch, victim),
        ]
        for frame in forged:
            assert insider.send(target, Codec().encode(frame))
            insider.poll()
        rig.until(lambda: counted(prefills[:1], name="frames.forged") == len(forged), "every refusal")
        request.send(ROWS).finish().landed()
        assert victim.epoch in {peer.epoch for peer in prefills[0].endpoint.peers()}
    rig.quiet()


def introduction(src: bytes, dst: bytes, of: PeerInfo) -> f.Hello:
    """A ``Hello`` for an address; nothing else of it is looked at."""
    return f.Hello(
        src=src, dst=dst, version=1, address=of.address, role="decode", instance=of.instance, rank=of.rank,
        host=of.host, pid=of.pid, started=0, born=0, spec=f.WireSpec(b"", (), ()), shards=(),
        site=f.WireSite((), (), ()), regions=(), transport="inproc", descriptor=b"", paths=(), conversions=(),
        verdict="elected",
        slot_bytes=0, ring_region=0, ring_bytes=0, lease_bytes=0,
    )  # fmt: skip


def test_a_flood_of_garbage_at_an_endpoint_without_keys_changes_nothing() -> None:
    """On this host everybody may speak: garbage, frames of strangers, frames for lives long gone."""
    rig = Rig(SPEC, threaded=True, options=Options())
    memory = Memory(channel=unencrypted, pages=128)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged", slot_bytes=512)
    decodes = rig.decode(tp_shards(SPEC, 1), memory=memory, strategy="staged", ring_bytes=16 << 10)
    with closing(rig), closing(ZmqChannel()) as flood:
        requests = [rig.request(f"{i}", prefills, decodes, ROWS).start() for i in range(4)]
        rounds = 50
        for number in range(rounds):
            for address in addresses(prefills, decodes):
                for frame in (b"", b"\xff" * 64, number.to_bytes(MAX_FRAME // 64), msgspec.msgpack.encode([0, b"x"])):
                    while not flood.send(address, frame):
                        take(flood, 0.01)
                for stale in strange_frames():
                    while not flood.send(address, Codec().encode(stale)):
                        take(flood, 0.01)
        rig.until(lambda: counted(prefills, decodes, name="frames.refused") == 2 * 4 * rounds, "all garbage")
        rig.until(lambda: counted(prefills, decodes, name="frames.stale") == 2 * 2 * rounds, "all strange frames")
        landed(rig, requests)
        assert len(prefills[0].endpoint.peers()) == len(decodes[0].endpoint.peers()) == 1
        rig.quiet()


def landed(rig: Rig, requests: Sequence[Request]) -> None:
    """All succeed, and no byte is wrong."""
    for request in requests:
        request.released().done()
    rig.check()


def strange_frames() -> Sequence[Frame]:
    return (
        f.Heartbeat(src=bytes(16), dst=bytes(16)),
        f.ChunkReady(src=b"\1" * 16, dst=bytes(16), room=b"0", generation=1, segment=(0, 8, 0, 1, False), lease=0),
    )
