"""``repr`` of endpoints, handles and pools: short, with what names them, and it never raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from disagg_kv.core import Phase
from disagg_kv.endpoints import DecodeEndpoint, Fail, PrefillEndpoint, Receiver, RecoveringReceiver
from disagg_kv.endpoints.decode.handle import ReceptionHandle
from disagg_kv.errors import EndpointBrokenError, GeometryError
from disagg_kv.geometry import CacheSpec, shard
from disagg_kv.ids import RoomId
from disagg_kv.memory import ConvertedPool, MappedPool, PagedPool
from disagg_kv.rendezvous import Source
from tests.support.rig import Rig, tp_shards

SPEC = CacheSpec.kv(2, 2, 8, "float16")
LONGEST = 180


def test_endpoints_show_their_instance_rank_and_state_and_rooms_their_phase() -> None:
    rig = Rig(SPEC)
    senders, receivers = rig.prefill(tp_shards(SPEC, 2)), rig.decode(tp_shards(SPEC, 1))
    sender, receiver = senders[1].endpoint, receivers[0].endpoint
    assert repr(sender) == "<PrefillEndpoint 'P' rank 1: open, 0 rooms not released>"
    request = rig.request("r", senders, receivers, 8).open_prefill().open_decode()
    assert repr(receiver) == "<DecodeEndpoint 'D' rank 0: open, 1 rooms not released>"
    assert repr(request.receives[0]) == "<ReceptionHandle room r: CONNECTING>"
    request.expect(8).send(8).finish().landed()
    assert [repr(one) for one in request.handles] == [
        "<DeliveryHandle room r: DONE, released>",
        "<DeliveryHandle room r: DONE, released>",
        "<ReceptionHandle room r: DONE, released>",
    ]
    rig.close()
    assert repr(sender) == "<PrefillEndpoint 'P' rank 1: closed, 0 rooms not released>"


def test_a_broken_endpoint_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(SPEC)
    (member,) = rig.decode(tp_shards(SPEC, 1))

    def fail(budget_s: float, *, copies: bool = True) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(member.endpoint.driver.loop, "advance", fail)
    with pytest.raises(EndpointBrokenError):
        member.endpoint.driver.step()
    assert repr(member.endpoint) == "<DecodeEndpoint 'D' rank 0: broken, 0 rooms not released>"
    rig.close()


def test_a_pass_shows_its_rooms_and_layers() -> None:
    rig = Rig(SPEC)
    (sender,) = rig.prefill(tp_shards(SPEC, 1), strategy="auto+layer_pipelined")
    sender.endpoint.open(RoomId(b"r"))
    step = sender.endpoint.step({RoomId(b"r"): (4, [sender.take(4)])})
    step.layer_ready(0)
    assert repr(step) == "<ForwardPass of 1 rooms: 1 of 2 layers declared>"
    step.close()
    assert repr(step) == "<ForwardPass of 1 rooms: 1 of 2 layers declared, closed>"
    rig.close()


def test_a_retried_request_shows_its_attempt() -> None:
    rig = Rig(SPEC)
    (member,) = rig.decode(tp_shards(SPEC, 1))
    receiver = RecoveringReceiver(member.endpoint, Fail())
    request = receiver.open(RoomId(b"r"), Source("P"))
    assert repr(request) == "<Recovering room r: CONNECTING, attempt 1>"
    assert repr(receiver) == f"<RecoveringReceiver over {member.endpoint!r}: 1 requests>"
    rig.close()


class _Hostile:
    """A receiver of another project: its text cannot be had, and neither can its rooms' state."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def open(self, *_: object, **__: object) -> _Hostile:
        """Any room."""
        return self

    def poll(self) -> Sequence[ReceptionHandle]:
        """Never."""
        return ()

    peers = confirm_terminated = close = poll

    @property
    def phase(self) -> Phase:
        """None."""
        raise RuntimeError("no phase")


def test_what_another_project_raises_is_shown_as_the_name_of_the_error() -> None:
    receiver = RecoveringReceiver(cast("Receiver", _Hostile()), Fail())
    assert repr(receiver) == "<RecoveringReceiver: RuntimeError in its repr>"
    assert repr(receiver.open(RoomId(b"r"), Source("P"))) == "<Recovering: RuntimeError in its repr>"


@pytest.mark.parametrize("kind", [PrefillEndpoint, DecodeEndpoint, PagedPool, MappedPool, ReceptionHandle])
def test_a_traceback_can_show_an_object_whose_constructor_failed(kind: type[Any]) -> None:
    """Its attributes are missing."""
    made: object = object.__new__(kind)
    assert repr(made) == f"<{kind.__name__}: AttributeError in its repr>"


def test_names_of_any_length_and_with_any_character_stay_short_and_on_one_line() -> None:
    rig = Rig(SPEC)
    (member,) = rig.decode(tp_shards(SPEC, 1), "i\n" * 128)
    request = member.endpoint.open(RoomId(b"\n" * 64), Source("P"))
    for shown in (repr(member.endpoint), repr(request)):
        assert "\n" not in shown
        assert len(shown) <= LONGEST
    rig.close()


def test_pools_show_their_device_groups_and_size() -> None:
    pool = PagedPool.allocate(SPEC, shard(SPEC), pages=8, page_size=16)
    contents = "on cpu: kv 8 pages of 16 rows; 16384 bytes"
    assert repr(pool) == f"<PagedPool {contents}>"
    assert repr(MappedPool(pool.site, tuple(pool.buffers))) == f"<MappedPool {contents}>"
    assert repr(ConvertedPool(pool, SPEC.cast("float8_e4m3fn"))) == f"<ConvertedPool {contents}>"


def test_a_pool_without_memory_has_a_text() -> None:
    """A pool of another class whose constructor is wrong."""
    pool = PagedPool.allocate(SPEC, shard(SPEC), pages=8, page_size=16)
    with pytest.raises(GeometryError) as raised:
        MappedPool(pool.site, ())
    (made,) = [e.locals["self"] for e in raised.traceback if isinstance(e.locals.get("self"), MappedPool)][:1]
    assert repr(made) == "<MappedPool: IndexError in its repr>"
