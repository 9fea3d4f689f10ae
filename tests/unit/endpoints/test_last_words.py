"""An endpoint that closes in a process that lives on: its last frame is the evidence that the other side waits for."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from disagg_kv.channels import Channel, UnixChannel, ZmqChannel
from disagg_kv.core import Options, Phase
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Peer
from disagg_kv.transports import InprocTransport, ShmTransport, Transport
from tests.support.device_copies import DeviceKernels, launched
from tests.support.rig import Memory, Request, Rig, tp_shards

SPEC = CacheSpec.kv(2, 2, 8, "float16")
PATHS = ("staged", "direct", "mapped")
TRANSPORTS = (InprocTransport, ShmTransport)
SIDES = ("prefill", "decode")
NEVER = Options(closed_s=3600.0, silence_s=3600.0, claim_s=3600.0, total_s=3600.0)
"""The last frame alone ends what it shall end."""


def met(path: str, transport: Callable[[], Transport]) -> tuple[Rig, Request]:
    """A rank of each side between which a request has landed, and the next one."""
    rig, memory = Rig(SPEC), Memory(transport=transport)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy=path, slot_bytes=256)
    decodes = rig.decode(tp_shards(SPEC, 1), memory=memory, strategy=path)
    rig.request("first", prefills, decodes, 8).start(8).landed()
    rig.quiet()
    for member in rig.members:
        member.endpoint.driver.loop.most = 1
    return rig, rig.request("room", prefills, decodes, 12)


def steps(rig: Rig, request: Request) -> Iterator[None]:
    """A room, in the smallest steps that there are: calls of engines, and single steps of endpoints."""

    def turn(times: int) -> Iterator[None]:
        for _ in range(times):
            for member in rig.members:
                if not member.closed:
                    member.endpoint.driver.step(0.0)
                rig.clock.advance(0.001)
                yield

    request.open_decode()
    yield
    yield from turn(1)
    request.expect(12)
    yield
    yield from turn(1)
    request.open_prefill()
    yield
    yield from turn(2)
    for start in (0, 4, 8):
        request.send(start + 4, start)
        yield
        yield from turn(3)
    request.finish()
    yield
    yield from turn(4)


def at_rest(rig: Rig, request: Request, side: str) -> bool:
    """Whether the side that stays waits for nothing and has all its memory."""
    if side == "prefill":
        (decode,), (receive,) = request.decodes, request.receives
        end, ended = decode.endpoint, receive.released and receive.phase in (Phase.DONE, Phase.FAILED)
        held = end.usage().ring_used_bytes
        return ended and not (held or end.open_rooms or any(peer.rooms for peer in end.peers()))
    (prefill,), (send,) = request.prefills, request.sends
    ended = send.released and send.phase in (Phase.DONE, Phase.FAILED)
    source = prefill.endpoint
    return ended and not (source.usage().slots_used or source.open_rooms or any(peer.rooms for peer in source.peers()))


def closes_everywhere(side: str, path: str, transport: Callable[[], Transport]) -> None:
    """Close one side after each step of a room, with no time to drain: a second later the other side is at rest.

    If decode had all rows, prefill's room waits for its engine, and succeeds.
    """
    count, restless = 0, list[int]()
    while True:
        rig, request = met(path, transport)
        going = steps(rig, request)
        done = len([None for _ in itertools.islice(going, count)])
        if request.receives if side == "prefill" else request.sends:
            (rig.prefills if side == "prefill" else rig.decodes)[0].close()
            if side == "decode" and request.receives[0].phase is Phase.DONE:
                list(going)
                rig.wait(1.0)
                assert request.sends[0].phase is Phase.DONE, request.errors()
            rig.wait(1.0)
            if not at_rest(rig, request, side):
                restless.append(count)
        rig.close()
        if done < count:
            break
        count += 1
    assert count > 20
    assert restless == []


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("side", SIDES)
def test_the_other_side_rests_within_a_second_wherever_in_a_room_an_endpoint_closes(
    side: str, path: str, transport: Callable[[], Transport]
) -> None:
    """The room has ended there, its pages are free, and nothing is held."""
    closes_everywhere(side, path, transport)


@pytest.mark.parametrize("kind", ["zmq", "unix"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("side", SIDES)
def test_threads_and_sockets_carry_the_last_frame(side: str, path: str, kind: str, tmp_path: Path) -> None:
    """At any instant of a room; a connection that breaks ends nothing here."""

    def channel(inner: Channel) -> Channel:
        return ZmqChannel() if kind == "zmq" else UnixChannel(f"unix://{tmp_path}/{next(numbers)}")

    numbers = itertools.count()
    for pause_s in (0.0, 0.001, 0.004):
        rig, memory = Rig(SPEC, threaded=True, options=NEVER), Memory(transport=ShmTransport, channel=channel)
        prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy=path, slot_bytes=256)
        decodes = rig.decode(tp_shards(SPEC, 1), memory=memory, strategy=path)
        rig.request("first", prefills, decodes, 8).start(8).landed()
        rig.quiet()
        request = rig.request("room", prefills, decodes, 12).open_prefill().open_decode().expect(12)
        for start in (0, 4, 8):
            request.send(start + 4, start)
        time.sleep(pause_s)
        (prefills if side == "prefill" else decodes)[0].close()
        if side == "decode" and request.receives[0].phase is Phase.DONE:
            request.finish()
        rig.until(partial(at_rest, rig, request, side), "the other side")
        rig.close()


def test_a_last_frame_that_comes_while_its_sender_is_connected_waits_behind_those_before_it() -> None:
    """Else prefill would not learn that a decode rank which closes at once has given the room up."""
    rig, connect = Rig(SPEC, threaded=True, options=NEVER), threading.Event()

    class Slow(InprocTransport):
        def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
            connect.wait(60.0)
            return super().connect(descriptor, timeout_s)

    prefills = rig.prefill(tp_shards(SPEC, 1), memory=Memory(transport=Slow))
    decodes = rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 12).open_decode().expect(12).open_prefill()
    rig.until(lambda: bool(prefills[0].endpoint.peers() and decodes[0].endpoint.peers()), "their introduction")
    time.sleep(0.1)
    decodes[0].close()
    time.sleep(0.1)
    assert request.sends[0].phase is Phase.CONNECTING
    connect.set()
    rig.until(partial(at_rest, rig, request, "decode"), "the end of the room")
    assert "the endpoint closes" in str(request.sends[0].error)
    rig.close()


def test_what_an_interrupt_left_open_is_no_end() -> None:
    """An endpoint that broke does not know what of it runs: it says nothing, and pages stay held."""
    rig, kernels = Rig(SPEC, driven=True), DeviceKernels()
    memory = Memory(transport=ShmTransport)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="mapped", kernels=kernels)
    decodes = rig.decode(tp_shards(SPEC, 1), memory=memory, strategy="mapped")
    request = rig.request("room", prefills, decodes, 9).open_decode().expect(9).open_prefill()
    rig.wait(1.0)

    def interrupt(where: str) -> None:
        if where == "end":
            raise KeyboardInterrupt

    kernels.at = interrupt
    with pytest.raises(KeyboardInterrupt):
        request.send(9)
    prefills[0].close()
    rig.wait(10.0)
    assert (request.receives[0].phase, request.receives[0].released) == (Phase.FAILED, False)
    kernels.finish()


def test_a_copy_in_flight_is_no_end() -> None:
    """The device writes on: pages stay held until it is known that this has ended."""
    rig, kernels = Rig(SPEC), DeviceKernels()
    memory = Memory(transport=ShmTransport)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="mapped", kernels=kernels)
    decodes = rig.decode(tp_shards(SPEC, 1), memory=memory, strategy="mapped")
    request = rig.request("room", prefills, decodes, 9).start(9)
    copy = launched(rig, kernels)
    request.prefills[0].close()
    rig.wait(5.0)
    (receive,), (decode,) = request.receives, request.decodes
    assert (receive.phase, receive.released) == (Phase.FAILED, False)
    (peer,) = decode.endpoint.peers()
    assert peer.rooms == (request.room,)
    copy.run()
    decode.endpoint.confirm_terminated(peer.epoch)
    rig.until(lambda: receive.released, "what the operator says")
