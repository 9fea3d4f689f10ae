"""Who names another peer's transport gets no link of it: neither its bytes nor its end."""

from __future__ import annotations

import attrs
import pytest

from disagg_kv.core import Options, Phase
from disagg_kv.geometry import CacheSpec
from disagg_kv.transports import InprocTransport, ShmTransport, Transport
from disagg_kv.transports.descriptor import decode, encode
from tests.support.rig import Decodes, Memory, Rig, tp_shards

SPEC = CacheSpec.kv(2, 2, 8, "float16")
OPTIONS = Options(silence_s=5.0)


class Replaying(InprocTransport):
    """Introduces itself with another one's descriptor, byte for byte."""

    said = b""

    def local_descriptor(self) -> bytes:
        """The other's."""
        return self.said


class Forging(InprocTransport):
    """Introduces itself as another one that has its own regions now."""

    said = b""

    def local_descriptor(self) -> bytes:
        """The other's name, newer than what the other said of itself."""
        own, theirs = decode(super().local_descriptor(), self.name), decode(self.said, self.name)
        return encode(attrs.evolve(own, incarnation=theirs.incarnation, serial=theirs.serial + 99))


class ReplayingShm(ShmTransport):
    """The same between processes."""

    said = b""

    def local_descriptor(self) -> bytes:
        """The other's."""
        return self.said


THIEVES: list[tuple[type[Transport], type[Replaying | Forging | ReplayingShm]]] = [
    (InprocTransport, Replaying),
    (InprocTransport, Forging),
    (ShmTransport, ReplayingShm),
]


def scene(
    honest: type[Transport], thief: type[Replaying | Forging | ReplayingShm], monkeypatch: pytest.MonkeyPatch
) -> tuple[Rig, Decodes, Decodes]:
    """A decode rank that has received, and another one that introduces itself with the first one's descriptor."""
    rig = Rig(SPEC, options=OPTIONS)
    memory = Memory(transport=honest)
    rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged")
    first = rig.decode(tp_shards(SPEC, 1), "A", memory, strategy="staged")
    rig.request("before", rig.prefills, first, 12).start(12).landed()
    monkeypatch.setattr(thief, "said", first[0].transport.local_descriptor())
    second = rig.decode(tp_shards(SPEC, 1), "B", Memory(transport=thief), strategy="staged")
    return rig, first, second


def refusal(rig: Rig) -> str:
    """Why the prefill rank does not work with the second one."""
    sessions = rig.prefills[0].endpoint.driver.loop.peers.all()
    return " ".join(str(session.failed) for session in sessions)


@pytest.mark.parametrize(("honest", "thief"), THIEVES)
def test_a_descriptor_of_another_peer_is_refused(
    honest: type[Transport], thief: type[Replaying | Forging | ReplayingShm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first life that names a transport has it: its rooms go on, and no byte goes to the other one, or for it."""
    rig, first, second = scene(honest, thief, monkeypatch)
    stolen = rig.request("stolen", rig.prefills, second, 12).start(12)
    rig.until(lambda: bool(rig.prefills[0].observer.counters.get("peers.lost")), "the refusal")
    rig.wait(1.0)
    owner = first[0].endpoint.driver.loop.me.epoch
    assert f"A/0 (epoch {owner.hex()})" in refusal(rig)
    assert stolen.receives[0].phase is not Phase.DONE
    request = rig.request("after", rig.prefills, first, 12).start(12).released()
    request.done()
    first[0].check()
    second[0].check()
    stolen.receives[0].abort("enough")
    assert [peer.epoch for peer in rig.prefills[0].endpoint.peers()] == [owner]


@pytest.mark.parametrize(("honest", "thief"), THIEVES)
def test_the_end_of_one_that_named_another_is_not_the_other_s(
    honest: type[Transport], thief: type[Replaying | Forging | ReplayingShm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Confirmed or not: the link of the one that was there stays, and its own loss is its own."""
    rig, first, second = scene(honest, thief, monkeypatch)
    rig.request("stolen", rig.prefills, second, 12).start(12)
    rig.until(lambda: bool(rig.prefills[0].observer.counters.get("peers.lost")), "the refusal")
    prefill = rig.prefills[0].endpoint
    prefill.confirm_terminated(second[0].endpoint.driver.loop.me.epoch)
    rig.wait(1.0)
    rig.request("after", rig.prefills, first, 12).start(12).released().done()
    owner = first[0].endpoint.driver.loop.me.epoch
    assert list(prefill.driver.loop.connections.linked()) == [owner]
    assert [link.session.epoch for link in prefill.driver.loop.connections._owners.values()] == [owner]
    prefill.confirm_terminated(owner)
    rig.until(lambda: not prefill.driver.loop.connections.linked(), "the end")
    assert not prefill.driver.loop.connections._owners


def test_a_name_that_could_not_be_connected_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes another's name before that one is there, and has ended, does not keep it."""
    rig = Rig(SPEC, options=OPTIONS)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="staged")
    late = rig.decode(tp_shards(SPEC, 1), "A", strategy="staged")
    late[0].frozen = True
    monkeypatch.setattr(Replaying, "said", late[0].transport.local_descriptor())
    thieves = rig.decode(tp_shards(SPEC, 1), "B", Memory(transport=Replaying), strategy="staged")

    def refused(descriptor: bytes, timeout_s: float) -> bytes:
        raise ConnectionError("no way there")

    with monkeypatch.context() as broken:
        broken.setattr(prefills[0].transport, "connect", refused)
        rig.request("stolen", prefills, thieves, 12).start(12)
        rig.until(lambda: bool(prefills[0].observer.counters.get("peers.lost")), "the refusal")
    assert not prefills[0].endpoint.driver.loop.connections._owners
    late[0].frozen = False
    rig.request("honest", prefills, late, 12).start(12).released().done()
