"""On a fast wire an endpoint with open rooms does not sleep while something may happen soon."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from disagg_kv.channels import Channel, News
from disagg_kv.core import Options
from disagg_kv.endpoints.loop.idle import LONGEST_PAUSE_S
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import RoomId
from disagg_kv.rendezvous import Source
from disagg_kv.transports import InprocTransport
from tests.support.rig import Memory, Rig, tp_shards

SPEC = CacheSpec.kv(2, 4, 8, "float16")


class FastTransport(InprocTransport):
    """Says that it is as fast as NVLink."""

    caps = attrs.evolve(InprocTransport.caps, bytes_per_s=3.8e11)


class Listening:
    """A channel that notes how long its owner was ready to wait."""

    eager = False

    def __init__(self, inner: Channel) -> None:
        self._inner = inner
        self.waits: list[float] = []

    @property
    def address(self) -> str:
        return self._inner.address

    def send(self, address: str, frame: bytes) -> bool:
        return self._inner.send(address, frame)

    def poll(self) -> Sequence[News]:
        return self._inner.poll()

    def wait(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)

    def wake(self) -> None:
        self._inner.wake()

    def forget(self, address: str) -> None:
        self._inner.forget(address)

    def close(self) -> None:
        self._inner.close()


def world(memory: Memory, linger_s: float = 0.002) -> tuple[Rig, list[Listening]]:
    """One rank to one rank; the second channel is decode's."""
    channels: list[Listening] = []

    def listening(inner: Channel) -> Channel:
        channels.append(Listening(inner))
        return channels[-1]

    rig = Rig(SPEC, options=Options(linger_s=linger_s))
    memory = attrs.evolve(memory, channel=listening)
    rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged")
    rig.decode(tp_shards(SPEC, 1), memory=memory, strategy="staged")
    return rig, channels


def await_a_room(rig: Rig) -> None:
    """Decode's engine opens one, and that is settled."""
    rig.request("room", rig.prefills, rig.decodes, 64).open_decode().expect()
    rig.wait(0.1)
    rig.decodes[0].endpoint.open(RoomId(b"other"), Source("P"))


def waits(rig: Rig, channel: Listening, turns: int = 12, step_s: float = 0.0005) -> list[bool]:
    """Whether decode was ready to sleep, turn by turn, while nothing happens."""
    found = []
    for _ in range(turns):
        channel.waits.clear()
        rig.decodes[0].endpoint.driver.step(1.0)
        found.append(any(wait > LONGEST_PAUSE_S for wait in channel.waits))
        rig.clock.advance(step_s)
    return found


def test_an_endpoint_with_an_open_room_stays_awake_for_a_while_after_something_happened() -> None:
    """A thread that sleeps is woken late: for ``linger_s``, and no longer, it only pauses."""
    rig, channels = world(Memory(transport=FastTransport), linger_s=0.002)
    await_a_room(rig)
    found = waits(rig, channels[1])
    assert not any(found[:4])
    assert all(found[5:])


def test_without_a_room_it_sleeps_at_once() -> None:
    """An idle endpoint costs nothing."""
    rig, channels = world(Memory(transport=FastTransport), linger_s=5.0)
    rig.wait(1.0)
    assert all(waits(rig, channels[1])[1:])


def test_on_a_slow_wire_it_sleeps_at_once() -> None:
    """There the wire takes longer than any thread to wake."""
    rig, channels = world(Memory(), linger_s=5.0)
    await_a_room(rig)
    assert all(waits(rig, channels[1])[1:])
