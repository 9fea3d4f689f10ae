"""What an endpoint takes once it is closed, and what becomes of rooms that were accepted just before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from disagg_kv.core import Phase
from disagg_kv.endpoints import Expectation, Fail, RecoveringReceiver
from disagg_kv.endpoints.decode.handle import ReceptionHandle
from disagg_kv.endpoints.prefill.handle import DeliveryHandle
from disagg_kv.errors import AbortedError, DisaggKVError, EndpointBrokenError, LocalProtocolError
from disagg_kv.geometry import CacheSpec, PageTable
from disagg_kv.ids import Epoch, LayerId, RoomId
from disagg_kv.rendezvous import Source
from tests.support.rig import KV, Rig, tp_shards

SPEC = CacheSpec.kv(2, 2, 8, "float16")


def _rig() -> Rig:
    rig = Rig(SPEC, threaded=True)
    rig.prefill(tp_shards(SPEC, 1))
    rig.decode(tp_shards(SPEC, 1))
    return rig


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("attempt", range(10))
def test_a_room_that_is_accepted_while_the_endpoint_closes_ends(side: str, attempt: int) -> None:
    """One thread opens rooms until it is refused, the other closes: each accepted room fails and is released."""
    rig = _rig()
    opened: list[DeliveryHandle | ReceptionHandle] = []
    refused: list[DisaggKVError] = []
    go = threading.Barrier(2)

    def open_rooms() -> None:
        go.wait()
        for number in range(100_000):
            room = RoomId(b"%d" % number)
            try:
                if side == "prefill":
                    opened.append(rig.prefills[0].endpoint.open(room))
                else:
                    opened.append(rig.decodes[0].endpoint.open(room, Source("nowhere")))
            except LocalProtocolError as exc:
                refused.append(exc)
                return

    thread = threading.Thread(target=open_rooms)
    thread.start()
    go.wait()
    member = rig.prefills[0] if side == "prefill" else rig.decodes[0]
    while len(opened) < 3 * attempt:
        pass
    member.endpoint.close(0.0)
    thread.join()
    assert refused
    assert "the endpoint is closed" in str(refused[0])
    for handle in opened:
        assert (handle.phase, handle.released) == (Phase.FAILED, True)
        assert isinstance(handle.error, AbortedError)
    rig.close()


def _calls(rig: Rig) -> Iterator[tuple[str, Callable[[], object]]]:
    """What must be refused once both endpoints are closed; made ready while they are open."""
    prefill, decode = rig.prefills[0].endpoint, rig.decodes[0].endpoint
    send, receive = prefill.open(RoomId(b"s")), decode.open(RoomId(b"r"), Source("P"))
    step = prefill.step({prefill.open(RoomId(b"t")).room: (4, [PageTable(KV, [1])])})
    recovering = RecoveringReceiver(decode, Fail())
    yield "open prefill", lambda: prefill.open(RoomId(b"x"))
    yield "open decode", lambda: decode.open(RoomId(b"x"), Source("P"))
    yield "open recovering", lambda: recovering.open(RoomId(b"x"), Source("P"))
    yield "step", lambda: prefill.step({send.room: (4, [PageTable(KV, [0])])})
    yield "send_chunk", lambda: send.send_chunk(4, [PageTable(KV, [0])])
    yield "finish", lambda: send.finish(0)
    yield "withdraw", send.withdraw
    yield "expect", lambda: receive.expect(Expectation(4, [PageTable(KV, [0])]))
    yield "layer_ready", lambda: step.layer_ready(LayerId(0))
    yield "confirm prefill", lambda: prefill.confirm_terminated(Epoch(b"0" * 16))
    yield "confirm decode", lambda: decode.confirm_terminated(Epoch(b"0" * 16))
    yield "abort", lambda: send.abort("x")
    yield "abort decode", lambda: receive.abort("x")
    yield "poll", prefill.poll
    yield "poll decode", decode.poll
    yield "peers", prefill.peers
    yield "close", lambda: prefill.close(0.0)
    yield "close decode", lambda: decode.close(0.0)
    yield "close step", step.close


HARMLESS = ("abort", "poll", "peers", "close")


def test_calls_after_close_are_refused_or_harmless() -> None:
    """Whatever would begin something is refused by name; what ends something or only looks does nothing."""
    rig = _rig()
    calls = dict(_calls(rig))
    for member in rig.members:
        member.endpoint.close(0.0)
    for name, call in calls.items():
        if name.startswith(HARMLESS):
            call()
        else:
            with pytest.raises(LocalProtocolError, match="the endpoint is closed"):
                call()


def test_a_broken_endpoint_says_why() -> None:
    """What broke it is what every later call raises, also after it is closed."""
    rig = _rig()
    driver = rig.prefills[0].endpoint.driver
    driver.loop.failures.broken = EndpointBrokenError("the endpoint failed: the wire is gone")
    for _ in range(2):
        driver.close(0.0)
    with pytest.raises(EndpointBrokenError, match="the wire is gone"):
        driver.check("room")
    rig.decodes[0].endpoint.close(0.0)


def test_a_call_that_queues_something_too_late_is_refused() -> None:
    """Its command may come after those that close the endpoint."""
    rig = _rig()
    driver = rig.prefills[0].endpoint.driver
    driver.check("a call")
    driver.close(0.0)
    with pytest.raises(LocalProtocolError, match="a call: the endpoint is closed"):
        driver.post(lambda: None, "a call")
    rig.decodes[0].endpoint.close(0.0)
