"""One endpoint, several transports: what each peer gets, and that one transport's end leaves the others alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import attrs
import pytest

from bench.emulated import emulate
from disagg_kv import PagedPool, Phase
from disagg_kv.channels import InprocChannel
from disagg_kv.channels.inproc import Hub
from disagg_kv.endpoints import DecodeEndpoint, Environment, PrefillEndpoint
from disagg_kv.errors import ConfigurationError, IncompatiblePeerError
from disagg_kv.geometry import CacheSpec
from disagg_kv.transports import (
    InprocTransport,
    PeerLost,
    Settled,
    ShmTransport,
    Transport,
    Transports,
    WriteEnded,
    registry,
)
from tests.support.rig import Decodes, Memory, Prefills, Request, Rig, tp_shards
from tests.unit.endpoints.test_streams import StreamKernels, StreamTransport

SPEC = CacheSpec.kv(2, 4, 8, "float16")


def several(*made: Callable[[], Transport], page_size: int = 4) -> Memory:
    """A rank with these transports."""
    return Memory(page_size=page_size, transport=lambda: Transports([make() for make in made]))


class Far(InprocTransport):
    """A network that reaches everybody, and maps nothing; it may break."""

    name = "far"
    caps = attrs.evolve(InprocTransport.caps, bytes_per_s=1e9)
    map = None  # type: ignore[assignment]
    broken = False

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        """Raises once it is broken."""
        if self.broken:
            raise OSError("the card is gone")
        return super().poll()


def scene(*made: Callable[[], Transport], strategy: str = "auto") -> tuple[Rig, Decodes, Prefills, Prefills]:
    """A decode rank with several, a prefill rank ``P`` that it shares memory with, and one, ``Q``, that is far."""
    rig = Rig(SPEC)
    decodes = rig.decode(tp_shards(SPEC, 1), memory=several(*(made or (ShmTransport, Far)), page_size=8))
    near = rig.prefill(tp_shards(SPEC, 1), memory=several(ShmTransport, Far), strategy=strategy)
    far = rig.prefill(tp_shards(SPEC, 1), "Q", memory=several(Far), strategy=strategy)
    return rig, decodes, near, far


def test_each_peer_of_an_endpoint_gets_its_transport_and_the_paths_of_it() -> None:
    """Shared memory is mapped, and the network staged; peers and reports name the transport and the reason."""
    rig, decodes, near, far = scene()
    for number in "12":
        one = rig.request(f"one {number}", near, decodes, 9).start(9).landed()
        two = rig.request(f"two {number}", far, decodes, 9, "Q").start(9).landed()
    reports = [request.sends[0].report for request in (one, two)]
    assert [(report.transport, report.path) for report in reports] == [("shm", "mapped"), ("far", "staged")]
    assert [report.transport_reason for report in reports] == ["the first transport", "the only transport"]
    assert [request.receives[0].report.transport for request in (one, two)] == ["shm", "far"]
    assert "mapped cannot: prefill rank 0: transport 'far' does not map" in two.receives[0].report.reason
    (at_near,), (at_far,) = near[0].endpoint.peers(), far[0].endpoint.peers()
    assert (at_near.transport, at_near.transport_reason) == ("shm", "the first transport")
    assert (at_far.transport, at_far.transport_reason) == ("far", "the only transport")
    here = {peer.instance: (peer.transport, peer.transport_reason) for peer in decodes[0].endpoint.peers()}
    assert here == {"P": ("shm", "the first transport"), "Q": ("far", "not shm: the peer does not offer it")}
    rig.quiet()


class Waits(StreamTransport):
    """A transport that waits for the event of a gather."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "waits"


def gathered() -> tuple[Rig, Prefills, Request, Waits, StreamKernels]:
    """A prefill rank sends rows to two decode ranks; of their transports, only the first waits for the gather."""
    rig, waits, kernels = Rig(SPEC), Waits(), StreamKernels()
    memory = Memory(transport=lambda: Transports([waits, InprocTransport()]))
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged", kernels=kernels)
    shards = tp_shards(SPEC, 2)
    decodes = rig.decode(shards, only=[0], memory=Memory(transport=Waits), strategy="staged")
    decodes += rig.decode(shards, only=[1], strategy="staged")
    request = rig.request("room", prefills, decodes, 9).open_decode().expect(9).open_prefill().send(9)
    return rig, prefills, request.finish(), waits, kernels


@pytest.mark.parametrize(("tp", "expected"), [(1, ["far+shm"]), (2, ["shm", "far"])])
def test_decode_reports_the_transports_of_the_ranks_that_send_it_rows(tp: int, expected: list[str]) -> None:
    """Each rank writes over its own transport; that of one that sends nothing to a decode rank does not count there."""
    rig, shards = Rig(SPEC), tp_shards(SPEC, 2)
    decodes = rig.decode(tp_shards(SPEC, tp), memory=several(ShmTransport, Far))
    prefills = rig.prefill(shards, only=[0], memory=several(ShmTransport, Far))
    prefills += rig.prefill(shards, only=[1], memory=several(Far))
    request = rig.request("room", prefills, decodes, 9).open_decode().expect(9)
    assert [receive.report.transport for receive in request.receives] == [""] * tp
    request.open_prefill().send(9).finish().landed()
    assert [receive.report.transport for receive in request.receives] == expected
    assert [send.report.transport for send in request.sends] == ["shm", "far"]
    rig.quiet()


def test_one_gather_serves_transports_that_wait_for_it_and_lanes_that_do_not() -> None:
    """A write is posted behind the gather where its transport waits, and after it where not."""
    rig, prefills, request, waits, kernels = gathered()
    rig.until(lambda: bool(waits.held), "a write behind the gather")
    assert list(waits.after.values()) == kernels.queued
    rig.wait(1.0)
    assert [receive.phase for receive in request.receives] == [Phase.MOVING] * 2
    for gather in kernels.queued:
        gather.run()
    request.landed()
    assert sorted(peer.transport for peer in prefills[0].endpoint.peers()) == ["inproc", "waits"]
    rig.quiet()


def test_a_gather_that_fails_fails_the_writes_of_every_transport() -> None:
    """Those that wait for it end by themselves."""
    rig, _, request, _, kernels = gathered()
    rig.until(lambda: bool(kernels.queued), "a gather")
    kernels.queued[0].error = RuntimeError("a fault of the device")
    kernels.queued[0].happened = True
    rig.until(lambda: request.sends[0].phase is Phase.FAILED, "the failure")
    assert "a fault of the device" in str(request.sends[0].error)
    rig.close()


def test_a_transport_that_fails_loses_its_peers_and_the_others_go_on() -> None:
    """The error has the transport's name and reason."""
    broken: list[Far] = []

    def far() -> Far:
        broken.append(Far())
        return broken[-1]

    rig, decodes, near, there = scene(ShmTransport, far)
    rig.request("one", near, decodes, 9).start(9).landed()
    request = rig.request("two", there, decodes, 9, "Q").open_prefill().open_decode().expect(9)
    rig.until(lambda: len(decodes[0].endpoint.peers()) == 2, "the far peer")
    broken[0].broken = True
    rig.until(lambda: request.receives[0].phase is Phase.FAILED, "the loss")
    assert "far: it has failed: " in str(request.receives[0].error)
    assert "the card is gone" in str(request.receives[0].error)
    rig.request("three", near, decodes, 9).start(9).landed()
    assert [peer.instance for peer in decodes[0].endpoint.peers() if peer.state == "connected"] == ["P"]
    rig.close()


def test_sides_that_share_no_transport_are_refused_with_those_of_both() -> None:
    """Before anything is connected."""
    rig = Rig(SPEC)
    decodes = rig.decode(tp_shards(SPEC, 1), memory=several(ShmTransport, Far))
    prefills = rig.prefill(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 9).open_decode().expect(9)
    rig.until(lambda: request.receives[0].phase is Phase.FAILED, "the refusal")
    error = request.receives[0].error
    assert isinstance(error, IncompatiblePeerError)
    assert {error.ours, error.theirs} == {"shm+far", "inproc"}
    rig.close()


@pytest.mark.parametrize("kind", [PrefillEndpoint, DecodeEndpoint])
def test_an_endpoint_takes_a_list_and_leaves_out_those_for_other_memory(
    kind: type[PrefillEndpoint | DecodeEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is enough; of a list without any, each is named.

    Without a list it takes what starts here, and a network only if other hosts can reach its channel.
    """

    class Gpu(InprocTransport):
        name = "gpu"
        caps = attrs.evolve(InprocTransport.caps, devices=frozenset({"cuda"}))

    class Other(Gpu):
        name = "other"

    class Reached(InprocChannel):
        def __init__(self, hub: Hub, name: str) -> None:
            super().__init__(hub, name)
            self._here, self.address = self.address, "tcp://10.0.0.1:5"

        def close(self) -> None:
            self.address = self._here
            super().close()

    rig = Rig(SPEC)

    number = count()

    def make(
        transport: Transport | Sequence[Transport] | None, channel: type[InprocChannel] = InprocChannel
    ) -> PrefillEndpoint | DecodeEndpoint:
        return kind(
            PagedPool.allocate(SPEC, tp_shards(SPEC, 1)[0], pages=4, page_size=4),
            transport=transport,
            channel=channel(rig.hub, f"x{next(number)}"),
            rendezvous=rig.rendezvous,
            instance="X",
            environment=Environment(clock=rig.clock, thread=False, engine=False),
        )

    for bad, why in (
        ([], "transport: 1 to 8"),
        ([Gpu(), Other()], r"no transport moves memory on 'cpu': gpu \(it moves"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            make(bad)
    made = make([Gpu(), InprocTransport(), emulate(ShmTransport(), 1e9)])
    assert made.driver.loop.me.transports.name == "inproc+shm"
    made.close()
    for name in ("nixl", "mooncake"):
        monkeypatch.setitem(registry._registered, name, Far)
    for channel, expected in ((InprocChannel, "shm"), (Reached, "shm+far")):
        default = make(None, channel)
        assert default.driver.loop.me.transports.name == expected
        default.close()
