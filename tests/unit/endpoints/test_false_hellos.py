"""A peer introduces itself falsely, in one thing that is nested anywhere: it suffers from that, and nobody else.

From its first frame on to the open mapping and the end of a room, beside a room of another peer, over each transport
of the CPU and a list of two, and for both roles. What is no frame, or leads a transport to nobody, comes from strangers
without an endpoint: all of it goes the same way. One of each field comes from a whole peer, too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any

import msgspec
import pytest
from attrs import evolve

from disagg_kv.channels import Arrived, InprocChannel
from disagg_kv.core import Codec, Hello, Options, Phase
from disagg_kv.endpoints import DecodeEndpoint, Incarnation, PrefillEndpoint
from disagg_kv.endpoints.loop.timing import MOST
from disagg_kv.errors import DisaggKVError, RemoteProtocolError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Role
from disagg_kv.staging import Lease, RingStagingAllocator
from disagg_kv.transports import InprocTransport, Process, ShmTransport, Transport, Transports, transport
from disagg_kv.transports.process import Ending
from sim.accounts import check_side
from tests.support.false_hellos import FIELDS, Lying, variants
from tests.support.needs import needs_mooncake, needs_nixl
from tests.support.rig import STEP_S, Member, Memory, Request, Rig, tp_shards

SPEC = CacheSpec.kv(2, 2, 8, "float16")
ROWS = 8
TOGETHER = 24
"""Liars that introduce themselves at once."""

SAID = [name for name in FIELDS if name != "kind"]
PLACES = ["address", "host", "pid", "started", "regions", "transport", "descriptor", "flags", "slot_bytes", "queues",
          "ring_region", "ring_bytes", "lease_bytes"]  # fmt: skip
LEAST, PER_BYTE = 300_000, 40
"""Calls that any ``Hello`` may cost, about a tenth of a second, and those for each of its bytes."""

PIDS = ((2, "elsewhere"), (3, "elsewhere"))
"""Of an innocent peer and of another one: processes of another host, so that nothing of them can be watched."""

WIRED = ["transport", "descriptor", "regions", "ring_region", "ring_bytes", "flags"]
"""What a transport takes from a ``Hello``."""

TRANSPORTS: dict[str, Callable[[], Transport | Transports]] = {
    "inproc": InprocTransport,
    "shm": ShmTransport,
    "inproc+shm": lambda: Transports([InprocTransport(), ShmTransport()]),
    "nixl": partial(transport, "nixl"),
    "mooncake": partial(transport, "mooncake"),
}
LIBRARIES = {"nixl": [needs_nixl], "mooncake": [needs_mooncake]}


def case(role: Role, path: str, name: str, fields: Sequence[str]) -> object:
    """For each role and transport."""
    return pytest.param(role, path, name, fields, id=f"{role}-{path}-{name}", marks=LIBRARIES.get(name, []))


class Scene:
    """An endpoint with a room of an innocent peer, and others that lie to it."""

    def __init__(
        self, role: Role, transport: Callable[[], Transport | Transports], path: str, pause_s: float = 0.0
    ) -> None:
        self.role, self.path, self.transport, self.pause_s = role, path, transport, pause_s
        self.rig = Rig(SPEC, options=Options(silence_s=4.0, closed_s=1.0))
        memory = Memory(pages=4 * TOGETHER, transport=transport)
        prefill = "one" if role == "prefill" else "innocent"
        self.prefills = self.rig.prefill(tp_shards(SPEC, 1), prefill, memory, strategy=path, slots=64)
        self.decodes = self.rig.decode(tp_shards(SPEC, 1), "D", memory, strategy=path)
        both: dict[Role, Member[PrefillEndpoint] | Member[DecodeEndpoint]] = {
            "prefill": self.prefills[0],
            "decode": self.decodes[0],
        }
        self.one = both[role]
        self.number = 0
        self.innocent = self.rig.request("innocent", self.prefills, self.decodes, ROWS, of=prefill)
        self.innocent.open_decode().expect(ROWS).open_prefill()
        for _ in range(4):
            self.rig.turn()

    def liar(self, change: Callable[[list[object]], bytes]) -> Request:
        """One more peer, and a room with it."""
        self.number += 1
        name = f"liar{self.number}"
        memory = Memory(pages=4, transport=self.transport, channel=partial(Lying, change=change))
        if self.role == "decode":
            prefills = self.rig.prefill(tp_shards(SPEC, 1), name, memory, strategy=self.path)
            return self.rig.request(name, prefills, self.decodes, ROWS, of=name)
        decodes = self.rig.decode(tp_shards(SPEC, 1), name, memory, strategy=self.path)
        return self.rig.request(name, self.prefills, decodes, ROWS, of="one")

    def meet(self, changes: Sequence[Callable[[list[object]], bytes]]) -> list[Request]:
        """They introduce themselves, and a room of each goes as far as it does; then they go."""
        requests = [self.liar(change).start(ROWS) for change in changes]
        for _ in range(14):
            self._turn()
        for request in requests:
            for handle in request.handles:
                if handle.error is None:
                    handle.abort("enough")
            for member, table in zip(request.decodes, request.taken, strict=True):
                member.give(table)
            for (table,), sender in zip(request.given.values(), request.prefills, strict=True):
                sender.give(table)
            self._leaves(request)
        self._turn()
        return requests

    def _turn(self) -> None:
        time.sleep(self.pause_s)  # a library moves bytes on threads of its own
        for member in self.rig.members:
            member.endpoint.driver.step(0.0)
        self.rig.clock.advance(STEP_S)

    def hear(self, frames: Sequence[bytes]) -> None:
        """A stranger says these, none of which is a frame."""
        stranger, before = InprocChannel(self.rig.hub, f"stranger{self.number}"), self.one.observer.counters.copy()
        for frame in frames:
            assert stranger.send(self.one.channel.address, frame)
        self._turn()
        assert self.one.observer.counters - before == {"frames.refused": len(frames)}
        assert not [news for news in stranger.poll() if isinstance(news, Arrived)]
        stranger.close()

    def greeted(self, hellos: Sequence[list[object]]) -> None:
        """As many peers say these, and nothing else; each gets an answer."""
        strangers = []
        for fields in hellos:
            self.number += 1
            stranger = InprocChannel(self.rig.hub, f"stranger{self.number}")
            own = dict(zip(FIELDS, fields, strict=True)) | {"src": os.urandom(16), "address": stranger.address}
            assert stranger.send(self.one.channel.address, msgspec.msgpack.encode(list(own.values())))
            strangers.append(stranger)
        for _ in range(3):
            self._turn()
        for stranger in strangers:
            assert any(isinstance(news, Arrived) for news in stranger.poll())
            stranger.close()

    def of_innocent(self) -> list[object]:
        """What the innocent peer says."""
        peer = (self.decodes if self.role == "prefill" else self.prefills)[0]
        said: list[object] = msgspec.msgpack.decode(Codec().encode(peer.endpoint._loop.me.hello()(b"")))
        return said

    def _leaves(self, request: Request) -> None:
        if self.role == "decode":
            self.rig.prefills = [one for one in self.rig.prefills if one not in request.prefills]
            request.prefills[0].close()
        else:
            self.rig.decodes = [one for one in self.rig.decodes if one not in request.decodes]
            request.decodes[0].close()

    def check(self, what: str) -> None:
        """Nothing happened that was not foreseen, and the innocent room is as it was."""
        assert not self.one.observer.counters["errors.unforeseen"], what
        assert all(handle.error is None for handle in self.innocent.handles), (what, self.innocent.errors())
        check_side(self.one.endpoint.inspect())

    def end(self) -> None:
        """The innocent room ends well, and so does another one."""
        self.innocent.send(ROWS).finish().released().done()
        self.rig.request("last", self.prefills, self.decodes, ROWS, of=self.innocent.source.instance).start().released()
        self.rig.close()


def said_of(scene: Scene) -> list[object]:
    """What an honest peer of the other side says, field by field; its room succeeds."""
    said: list[list[object]] = []

    def honest(fields: list[object]) -> bytes:
        said.append(fields)
        return msgspec.msgpack.encode(fields)

    (request,) = scene.meet([honest])
    assert request.all(Phase.DONE), request.errors()
    return said[0]


def changes_of(field: int, fields: list[object]) -> Iterator[tuple[str, Callable[[list[object]], bytes]]]:
    """Everything that may be wrong in one field. What differs from peer to peer is changed where it is said."""

    def changed(change: Callable[[Any], object], own: list[object]) -> bytes:
        return msgspec.msgpack.encode([*own[:field], change(own[field]), *own[field + 1 :]])

    for where, change in variants(fields[field]):
        yield FIELDS[field] + where, partial(changed, change)


def shapes(fields: list[object]) -> Iterator[tuple[str, Callable[[list[object]], bytes]]]:
    """The frame as a whole is wrong."""
    length = len(msgspec.msgpack.encode(fields))
    for cut in range(0, length, max(1, length // 40)):
        yield f"cut at {cut}", lambda own, cut=cut: msgspec.msgpack.encode(own)[:cut]  # type: ignore[misc]
        yield f"without fields from {cut} on", lambda own, cut=cut: msgspec.msgpack.encode(own[:cut])  # type: ignore[misc]
    yield "with a tail", lambda own: msgspec.msgpack.encode(own) + b"\0"
    yield "with a field more", lambda own: msgspec.msgpack.encode([*own, 0])
    yield "a map", lambda own: msgspec.msgpack.encode(dict(enumerate(map(str, own))))


@pytest.mark.parametrize(
    ("role", "path", "name", "names"),
    [
        case("prefill", "mapped", "inproc", SAID),
        case("decode", "auto", "inproc", SAID),
        case("prefill", "staged", "inproc", PLACES),
        case("prefill", "mapped", "shm", PLACES),
        case("decode", "auto", "shm", PLACES),
        case("prefill", "mapped", "inproc+shm", WIRED),
        case("decode", "auto", "inproc+shm", WIRED),
        case("prefill", "staged", "nixl", WIRED),
        case("decode", "staged", "nixl", WIRED),
        case("prefill", "staged", "mooncake", WIRED),
        case("decode", "staged", "mooncake", WIRED),
    ],
)
def test_what_is_false_in_a_hello_hurts_its_sender_alone(
    role: Role, path: str, name: str, names: Sequence[str]
) -> None:
    scene = Scene(role, TRANSPORTS[name], path, 0.002 if name in LIBRARIES else 0.0)
    fields = said_of(scene)
    liars, noise, strangers = list(shapes(fields)) if names is SAID else [], list[bytes](), list[list[object]]()
    made = TRANSPORTS[name]()
    probe = made if isinstance(made, Transports) else Transports([made])
    for field in names:
        known = set[str]()
        for what, change in changes_of(FIELDS.index(field), fields):
            said = change(fields)
            kind = "liar"
            if not _is_frame(said):
                kind = "noise"
            elif _away(probe, change(scene.of_innocent())):
                kind = "stranger"
            if kind == "noise" and kind in known:
                noise.append(said)
            elif kind == "stranger" and kind in known:
                strangers.append(msgspec.msgpack.decode(said))
            else:
                liars.append((what, change))
            known.add(kind)
    probe.close(0.0)
    for at in range(0, len(noise), MOST):
        scene.hear(noise[at : at + MOST])
        scene.check("noise")
    for at in range(0, len(strangers), TOGETHER):
        scene.greeted(strangers[at : at + TOGETHER])
        scene.check(f"strangers from {at} on")
    for at in range(0, len(liars), TOGETHER):
        some = liars[at : at + TOGETHER]
        scene.meet([change for _, change in some])
        scene.check(", ".join(what for what, _ in some))
    scene.end()


def _away(probe: Transports, said: bytes) -> bool:
    """Whether a transport reaches nobody by what a ``Hello`` says."""
    hello = Codec().decode(said)
    assert isinstance(hello, Hello)
    try:
        found = probe.connect(probe.shared(hello.descriptor), 1.0)
        found.transport.disconnect(found.peer)
    except DisaggKVError:
        return True
    return False


def _is_frame(said: bytes) -> bool:
    try:
        Codec().decode(said)
    except RemoteProtocolError:
        return False
    return True


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_a_hello_costs_goes_by_its_length(role: Role) -> None:
    """A few bytes that unfold to very much would keep the endpoint's thread from all other peers."""
    scene = Scene(role, InprocTransport, "auto")
    fields = said_of(scene)
    loop = scene.one.endpoint.driver.loop
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for name in SAID:
        for what, change in changes_of(FIELDS.index(name), fields):
            said, calls = change(fields), 0
            sys.setprofile(count)
            try:
                hello = Codec().decode(said)
                assert isinstance(hello, Hello)
                loop.me.admit(hello)
            except DisaggKVError:
                pass
            finally:
                sys.setprofile(None)
            assert calls <= LEAST + PER_BYTE * len(said), (what, calls, len(said))
    scene.end()


class Failing(RingStagingAllocator):
    """An allocator of a user, which raises while it is told to."""

    fails = False

    def reserve(self, nbytes: int) -> Lease | None:
        """Raise or pass on."""
        if Failing.fails:
            raise ValueError("no such block")
        return super().reserve(nbytes)


def test_an_allocator_that_raises_for_a_request_of_a_peer_ends_that_peer_s_rooms_alone() -> None:
    rig = Rig(SPEC, options=Options(closed_s=0.5))
    victims = rig.decode(tp_shards(SPEC, 1), strategy="staged", allocator=Failing)
    innocents, others = (rig.prefill(tp_shards(SPEC, 1), name, strategy="staged") for name in ("I", "O"))
    innocent = rig.request("innocent", innocents, victims, ROWS, of="I").open_decode().expect(ROWS).open_prefill()
    rig.until(lambda: innocent.sends[0].phase is Phase.READY, "the innocent room")
    room = rig.request("room", others, victims, ROWS, of="O").open_decode().expect(ROWS).open_prefill()
    rig.until(lambda: room.sends[0].phase is Phase.READY, "the room")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Failing, "fails", True)
        room.send(ROWS).finish()
        rig.until(lambda: room.receives[0].error is not None, "the failure")
    error = room.receives[0].error
    assert error is not None
    assert "no such block" in str(error)
    assert error.instance == "O"
    room.failed()
    innocent.send(ROWS).finish().landed()
    rig.wait(1.0)
    rig.request("next", others, victims, ROWS, of="O").start().landed()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_raises_once_a_peer_is_reached_ends_that_peer_alone(role: Role) -> None:
    """How its process is watched may be the engine's own code."""
    known: list[int] = []

    def watch(process: Process) -> Ending:
        if process.pid not in known:
            raise ValueError("no such process table")
        return process.watch()

    rig = Rig(SPEC)
    ours = Incarnation(watch=watch)
    honest, strange = (Incarnation(process=evolve(Process.own(), pid=pid, host=host)) for pid, host in PIDS)
    known.append(PIDS[0][0])
    if role == "decode":
        one = rig.decode(tp_shards(SPEC, 1), "one", life=ours, strategy="staged")
        innocents, others = (
            rig.prefill(tp_shards(SPEC, 1), name, life=life, strategy="staged")
            for name, life in (("I", honest), ("O", strange))
        )
        first, second = (rig.request(of, some, one, ROWS, of=of) for of, some in (("I", innocents), ("O", others)))
    else:
        served = rig.prefill(tp_shards(SPEC, 1), "one", life=ours, strategy="staged")
        first, second = (
            rig.request(name, served, rig.decode(tp_shards(SPEC, 1), name, life=life, strategy="staged"), ROWS, "one")
            for name, life in (("I", honest), ("O", strange))
        )
    first.open_decode().expect(ROWS).open_prefill()
    rig.until(lambda: first.sends[0].phase is Phase.READY, "the innocent room")
    second.open_decode().expect(ROWS).open_prefill()
    rig.until(lambda: second.receives[0].error is not None, "the failure")
    assert "no such process table" in second.errors()
    first.send(ROWS).finish().landed()
